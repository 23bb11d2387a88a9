"""ext.pipeline_module places layers by the partition key, loses none, and changes no number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ext
from ext.adapters.deepspeed import placement
from ext.adapters.deepspeed.placement import PlacedPipelineModule
from ext.testing.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from memory_models import batch, cross_entropy, transformer

pytestmark = pytest.mark.dist

GAS = 4


AUTO = {"type": "auto", "search_seconds": 0.3}


def _config(partition: Any, schedule: Any = "1f1b", **blocks: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": 10**9,
        "ext": {"pipeline": {"partition": partition, "schedule": schedule}, **blocks},
    }


def _module(layers: list[Any], config: dict[str, Any], num_stages: int = 4, **kwargs: Any) -> Any:
    return ext.pipeline_module(layers, config=config, num_stages=num_stages, loss_fn=cross_entropy, **kwargs)


def _losses(module: Any, config: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    engine = ext.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
    losses = [engine.train_batch(iter([batch(9 * step + i) for i in range(GAS)])).item() for step in range(2)]
    return losses, ext.describe(engine)["partition"]


def _layouts(rank: int, world_size: int) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    results: dict[str, Any] = {}
    tied = {"tied": True}
    cases: dict[str, tuple[dict[str, Any], Any, dict[str, Any], Any]] = {
        "thirty_blocks": ({"num_layers": 30}, "uniform", {}, None),
        "module": (tied, "module", {}, None),
        "uniform": (tied, "uniform", {}, None),
        "layers": (tied, [3, 1, 4, 1], {}, None),
        "blocks": (tied, [1, 2, 2, 1], {}, None),
        "measured": (tied, "recompute_aware", {}, batch(0)),
        "measured_in_budget": (
            tied,
            "recompute_aware",
            {"recompute": {"policy": "stage_aware", "memory_budget_gib": 600 * 2**-20}},
            batch(0),
        ),
        "auto": (tied, "auto", {}, batch(0)),
        "auto_schedule": (tied, "auto", {"schedule": AUTO}, batch(0)),
        "auto_without_sample": (tied, "auto", {}, None),
    }
    for name, (model, partition, blocks, sample) in cases.items():
        config = _config(partition, **blocks)
        torch.manual_seed(5)
        module = _module(transformer(**model), config, sample_batch=sample)
        if sample is not None:
            after = torch.get_rng_state()
            torch.manual_seed(5)
            counts = [stop - start for start, stop in zip(module.parts, module.parts[1:], strict=False)]
            _module(transformer(**model), _config(counts))
            assert torch.equal(after, torch.get_rng_state()), "measuring has drawn random numbers"
        parameters = sum(p.numel() for p in module.parameters())
        results[name] = (*_losses(module, config), parameters, list(map(int, module.parts)))
    return results


def test_every_layout_holds_each_layer_and_trains_alike():
    by_rank = run_ranks(_layouts, 4, timeout=120)
    results = by_rank[0]
    assert results["thirty_blocks"][3] == [0, 9, 17, 24, 32]
    assert results["thirty_blocks"][1] == {"type": "uniform", "layers_per_stage": [9, 8, 7, 8]}
    assert results["uniform"][3] == [0, 3, 5, 6, 9]
    assert results["layers"][3] == [0, 3, 4, 8, 9]
    assert results["auto_without_sample"][3] == results["module"][3]
    assert results["auto"][1]["type"] == results["auto_schedule"][1]["type"] == "auto"
    assert results["blocks"][3] == [0, 2, 4, 6, 9]
    whole = sum(p.numel() for spec in transformer(tied=True) for p in spec.build().parameters())
    for name, (losses, partition, _, bounds) in results.items():
        counts = partition["layers_per_stage"]
        assert sum(counts) == bounds[-1] == (32 if name == "thirty_blocks" else 9)
        assert min(counts) >= 1
        if name == "thirty_blocks":
            continue
        assert losses == results["module"][0], name
        # The head on the last stage has a copy of the embedding on the first.
        assert sum(result[name][2] for result in by_rank) == whole


class Shrinking(nn.Module):
    """Builds less where there is memory for it than its spec says."""

    def __init__(self) -> None:
        super().__init__()
        on_meta = torch.empty(0).is_meta
        self.linear = nn.Linear(32, 32 if on_meta else 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class LosesLayers(PlacedPipelineModule):
    """Stages of equal size, the remainder left out."""

    def _set_bounds(self, start: int | None = None, stop: int | None = None) -> None:
        share = self._num_layers // self.num_stages
        super()._set_bounds(self.stage_id * share, (self.stage_id + 1) * share)


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    deepspeed.init_distributed("gloo")
    texts = {}

    def note(name: str, build: Any) -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the text is compared
            build()
        texts[name] = f"{type(caught.value).__name__}: {caught.value}"

    layers = transformer(5)
    uniform = _config("uniform")
    note("lost", lambda: LosesLayers(layers, num_stages=2, loss_fn=cross_entropy, ds_config=uniform))
    shrunk = [layers[0], LayerSpec(Shrinking), *layers[1:]]
    note("shrunk", lambda: _module(shrunk, uniform, 2))
    note("both", lambda: _module(layers, uniform, 2, partition_method="parameters"))
    note("sum", lambda: _module(layers, _config([2, 2]), 2))
    note("searched", lambda: _module(layers, _config("auto"), 2, sample_batch=batch(0), partition_method="uniform"))
    note("stages", lambda: _module(layers, _config([2, 2, 3]), 2))
    note("no_sample", lambda: _module(layers, _config("recompute_aware"), 2))
    note("too_few", lambda: _module(layers[:1], uniform, 2))
    tight = {"recompute": {"policy": "stage_aware", "memory_budget_gib": 1e-6}}
    note("infeasible", lambda: _module(layers, _config("recompute_aware", **tight), 2, sample_batch=batch(0)))
    module = _module(layers, uniform, 2)
    other = _config([3, 2])
    note("other", lambda: ext.initialize(model=module, model_parameters=module.parameters(), config=other))
    return texts


def test_what_cannot_be_placed_is_refused_on_every_rank():
    texts, others = run_ranks(_refusals, 2, timeout=60)
    assert texts == others
    assert "do not hold each of the 7 layers once: stage 0 holds 0 to 2, stage 1 holds 3 to 5" in texts["lost"]
    assert "A layer builds something else than its spec says." in texts["shrunk"]
    assert "'uniform' and partition_method='parameters' both place the layers" in texts["both"]
    assert "'auto' and partition_method='uniform' both place the layers" in texts["searched"]
    assert "2 + 2 = 4 layers, the model has 7 layers and 5 blocks 'Layer'. Make the sum 7 or 5." in texts["sum"]
    assert "3 numbers given, the pipeline has 2 stages" in texts["stages"]
    assert "sample_batch=(inputs, labels)" in texts["no_sample"]
    assert "1 layers cannot fill 2 pipeline stages" in texts["too_few"]
    assert texts["infeasible"].startswith(
        "InfeasibleError: no layout of 7 layers on 2 stages fits budgets of 1.049 KiB"
    )
    assert "'per_stage' places layers while the module is built" in texts["other"]
    for name in ("both", "searched", "sum", "stages", "no_sample", "too_few", "other"):
        assert texts[name].startswith("ConfigError: ext.pipeline.partition: "), texts[name]


def test_scripts_under_ext_run_get_the_class_that_places():
    assert issubclass(placement.ScriptPipelineModule, PlacedPipelineModule)
    assert placement.ScriptPipelineModule.ds_config is None
