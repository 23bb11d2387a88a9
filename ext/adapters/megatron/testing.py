"""A small GPTModel on CPU ranks whose weights do not depend on the layout, and one step of it as plain data.

Tests import this module before ``megatron``: it installs the CPU stand-ins.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ext.adapters.megatron import cpu

warnings.filterwarnings("ignore", module=r"megatron\.")
cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel as DDP  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

VOCAB, SEQ, HIDDEN, HEADS = 64, 16, 32, 4
Batch = tuple[Tensor, Tensor]


def parallel(*, tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Set up Megatron's process groups, instead of those of an earlier layout, and its random streams."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    seed()


def seed(value: int = 7) -> None:
    """Start all random streams again."""
    torch.manual_seed(value)
    tensor_parallel.model_parallel_cuda_manual_seed(value, force_reset_rng=True)


def build(
    num_layers: int = 4,
    *,
    tied: bool = True,
    ddp: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> DDP:
    """The part of the model that belongs to this rank, under data parallelism; weights follow from their names.

    Args:
        num_layers: of the whole model.
        tied: whether the head shares the embedding's weight.
        ddp: settings of ``DistributedDataParallelConfig``.
        dtype: of parameters and activations.
        config: further settings of ``TransformerConfig``.
    """
    settings = {
        "num_layers": num_layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "deallocate_pipeline_outputs": True,
        "moe_token_dispatcher_type": "alltoall",
        **config,
    }
    transformer = TransformerConfig(**settings)
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(transformer.num_moe_experts),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
    )
    model.model_type = ModelType.encoder_or_decoder  # type: ignore[assignment]
    if dtype == torch.bfloat16:
        model.bfloat16()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(shard(_initial(global_name(model, name), parameter), parameter))
    wrapped = DDP(transformer, DistributedDataParallelConfig(**(ddp or {})), model)
    transformer.finalize_model_grads_func = finalize_model_grads
    if (ddp or {}).get("overlap_grad_reduce"):
        transformer.no_sync_func = wrapped.no_sync
    return wrapped


def batches(count: int, start: int = 0, lengths: Sequence[int] = ()) -> list[Batch]:
    """Micro-batches ``start`` onwards of a fixed stream: ids and next ids, each ``(2, seq)``."""
    result = []
    for index in range(start, start + count):
        length = lengths[index - start] if lengths else SEQ
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCAB, (2, length + 1), generator=generator)
        result.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return result


def forward_step(data: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Megatron's forward step: the model's output and the loss function."""
    ids, labels = next(data)
    seq = ids.shape[1]
    positions = torch.arange(seq).expand_as(ids)
    mask = torch.ones(seq, seq).triu(1).bool()[None, None]
    return model(ids, positions, mask, labels=labels), _loss


def train(function: Callable[..., list[Any]], model: DDP, data: Iterable[Batch], **call: Any) -> list[float]:
    """Zero the gradients, then run one step; losses by micro-batch on the last stage, else nothing."""
    model.zero_grad_buffer()
    return run(function, model, data, **call)


def run(function: Callable[..., list[Any]], model: DDP, data: Iterable[Batch], **call: Any) -> list[float]:
    """One call of a forward-backward function on ``data``; losses by micro-batch on the last stage."""
    num_microbatches = call.pop("num_microbatches", None)
    store = function(
        forward_step_func=forward_step,
        data_iterator=iter(data),
        model=[model],
        num_microbatches=len(list(data)) if num_microbatches is None else num_microbatches,
        seq_length=SEQ,
        micro_batch_size=2,
        **call,
    )
    return [entry["lm loss"].item() for entry in store]


def gradients(model: DDP) -> dict[str, Tensor]:
    """The accumulated gradient of each parameter of this rank, by its name in the whole model."""
    return {
        global_name(model.module, name): parameter.main_grad.clone()  # type: ignore[attr-defined]
        for name, parameter in model.module.named_parameters()
    }


def global_name(model: nn.Module, name: str) -> str:
    """A parameter's name in the whole model, whatever stage holds it; a tied head's is the embedding's."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)  # type: ignore[union-attr, index]
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            rank = parallel_state.get_expert_model_parallel_rank()
            count = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()  # type: ignore[union-attr, operator]
            parts[at] = str(int(parts[at]) + rank * count)
    return ".".join(parts)


def shard(whole: Tensor, parameter: Tensor) -> Tensor:
    """This tensor-parallel rank's part of a parameter or of its gradient."""
    if whole.shape == parameter.shape:
        return whole
    rank = parallel_state.get_tensor_model_parallel_rank()
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    return whole.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim)[rank]


def _initial(name: str, parameter: Tensor) -> Tensor:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    base = 1.0 if "layernorm.weight" in name else 0.0
    return base + 0.1 * torch.randn(shape, generator=generator)


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}
