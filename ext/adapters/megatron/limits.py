"""What Megatron offers that cannot go with this package's schedules and recomputation, flag by flag.

Works on Megatron's parsed arguments as well as on its ``TransformerConfig``: both name these settings alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

SCHEDULE, RECOMPUTE = "pipeline.schedule", "recompute.policy"


class Limit(NamedTuple):
    """One setting of the host that is refused.

    Attributes:
        setting: attribute of the arguments or of the config.
        flag: how users set it.
        why: what is in the way, and what to change.
        allowed: values that ask for nothing.
    """

    setting: str
    flag: str
    why: str
    allowed: tuple[Any, ...] = (None, False)


ALWAYS = (
    Limit(
        "virtual_pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "a rank holds one stage here. Remove it",
        (None, 1),
    ),
    *(
        Limit(setting, f"--{setting.replace('_', '-')}", "a rank holds one stage here. Remove it", (None,))
        for setting in ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    ),
    Limit("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", "it is a schedule of its own"),
    Limit("delay_wgrad_compute", "--delay-wgrad-compute", "nothing would run the delayed gradients. Use zb_h1 instead"),
    Limit("hybrid_context_parallel", "--hybrid-context-parallel", "it is a schedule of its own"),
    Limit("cuda_graph_impl", "--cuda-graph-impl", "graphs are captured for Megatron's own order", (None, "none")),
    Limit("enable_cuda_graph", "--enable-cuda-graph", "graphs are captured for Megatron's own order"),
    Limit("external_cuda_graph", "--external-cuda-graph", "graphs are captured for Megatron's own order"),
    Limit("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute", "it counts on Megatron's own order"),
    Limit(
        "num_microbatches_with_partial_activation_checkpoints",
        "--num-microbatches-with-partial-activation-checkpoints",
        "it counts on Megatron's own order. Use --ext-recompute-policy instead",
    ),
    Limit("fine_grained_activation_offloading", "--fine-grained-activation-offloading", "it needs Megatron's order"),
    Limit("use_megatron_fsdp", "--use-megatron-fsdp", "it gathers weights by Megatron's own order"),
    Limit("use_torch_fsdp2", "--use-torch-fsdp2", "it gathers weights by Megatron's own order"),
    Limit("yaml_cfg", "--yaml-cfg", "its nested settings cannot be checked. Use flags"),
)
WITH_RECOMPUTE = (
    Limit("recompute_granularity", "--recompute-granularity", "one of both recomputes. Remove one"),
    Limit("recompute_activations", "--recompute-activations", "one of both recomputes. Remove one"),
    Limit("cpu_offloading", "--cpu-offloading-num-layers", "what it moves is what recomputation drops"),
    Limit("fp8", "--fp8-format", "re-runs would move the scales of FP8 layers. Use bf16, or Megatron's recomputation"),
    Limit("fp4", "--fp4-format", "re-runs would move the scales of FP4 layers. Use bf16, or Megatron's recomputation"),
    Limit("mtp_num_layers", "--mtp-num-layers", "its layers are not counted in the plan"),
)
WITH_SPLIT = (
    Limit(
        "gradient_accumulation_fusion",
        "--no-gradient-accumulation-fusion (absent)",
        "fused gradients cannot wait for W. Add --no-gradient-accumulation-fusion",
    ),
    Limit("recompute_granularity", "--recompute-granularity", "use --ext-recompute-policy, whose re-runs it knows"),
    Limit("recompute_activations", "--recompute-activations", "use --ext-recompute-policy, whose re-runs it knows"),
    Limit("save_wgrads_interval", "--save-wgrads-interval", "it looks at gradients inside the backward"),
)


def problems(settings: Any, name: Callable[[str], str], *, splits: bool, recomputes: str | None) -> list[str]:
    """What of ``settings`` cannot go with a plan, both flags named.

    Args:
        settings: Megatron's arguments or config.
        name: how a dotted key of ours is called where the user set it.
        splits: whether the plan runs I and W apart.
        recomputes: the key by which this package decides what is recomputed; None where Megatron does.
    """
    found = [_problem(limit, settings, f"{name(SCHEDULE)} or {name(RECOMPUTE)}") for limit in ALWAYS]
    if recomputes:
        found += [_problem(limit, settings, name(recomputes)) for limit in WITH_RECOMPUTE]
    texts = [text for text in found if text is not None]
    return texts + (against_split(settings, name) if splits else [])


def against_split(settings: Any, name: Callable[[str], str]) -> list[str]:
    """What of ``settings`` cannot go with I and W apart; arguments as in `problems`."""
    found = [_problem(limit, settings, f"{name(SCHEDULE)} with a split backward") for limit in WITH_SPLIT]
    return [text for text in found if text is not None]


def recomputing_key(has_policy: bool, by_default: bool) -> str | None:
    """The key that makes this package decide what is recomputed: a policy, or a schedule with one of its own."""
    return RECOMPUTE if has_policy else SCHEDULE if by_default else None


def layers_that_cannot_split(classes: Sequence[str], name: Callable[[str], str]) -> list[str]:
    """The refusal of a split backward over layers whose weight gradients nothing can defer."""
    if not classes:
        return []
    return [
        f"--transformer-impl transformer_engine ({', '.join(classes)}) cannot go with {name(SCHEDULE)} with a split "
        "backward: their weight gradients cannot wait for W. Use --transformer-impl local or another schedule."
    ]


def _problem(limit: Limit, settings: Any, ours: str) -> str | None:
    value = getattr(settings, limit.setting, None)
    if value is None or value in limit.allowed:
        return None
    return f"{limit.flag} (found {value}) cannot go with {ours}: {limit.why}."
