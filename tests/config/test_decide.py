"""What the config leaves to a search is decided by the costs of the layers."""

import math

from ext.config import ExtConfig
from ext.config.decide import make_schedule, place_by_search
from ext.cost.profile import LayerProfile
from ext.cost.states import StateBytes
from ext.pipeline.plan import PipelineShape


def _layer(name, time):
    return LayerProfile(name, time, time, time, time, storages=(8, 8), inputs=(0,), outputs=(1,), saved=(0,))


def _placed(layers, loss, **blocks):
    pipeline = {"schedule": {"type": "auto", "search_seconds": 0.2}, "partition": "auto", "tolerance": 0.0}
    config = ExtConfig.from_ds_config({"ext": {"pipeline": pipeline, **blocks}})
    schedule = make_schedule(config, PipelineShape(4, 16))
    start = tuple(range(0, len(layers) + 1, len(layers) // 4))
    return place_by_search(config, schedule, layers, loss, StateBytes(4, 4, 0), [math.inf] * 4, start)


def test_layers_move_away_from_a_heavy_end():
    layers = [_layer("Block", 1.0)] * 16
    loss = _layer("loss", 2.0)
    bounds = _placed(layers, loss)
    counts = [stop - first for first, stop in zip(bounds, bounds[1:], strict=False)]
    assert sum(counts) == 16
    assert counts[3] < min(counts[:3])
    assert max(*counts[:3], counts[3] + 2) == 5
    # A list of recomputed layers by stage holds for the layout that it was written for.
    assert _placed(layers, loss, recompute={"policy": [0, 0, 0, 0]}) == (0, 4, 8, 12, 16)
