import pytest

from ext.core.errors import ConfigError
from ext.cost.collectives import all_reduce
from ext.cost.hardware import DEVICES, NVLINK, PCIE
from ext.cost.transformer import MODELS, TransformerShape
from ext.recompute.analytic import tensor_parallel_windows, transformer_costs
from ext.recompute.units import ATTENTION, MLP, LayerUnits, Unit, check_graph, run_units
from ext.recompute.windows import on_demand_position, one_f_one_b_waits

A100 = DEVICES["a100-40gb"]


def windows(link, **options):
    options = {"micro_batch": 4, "device": A100, "tensor_parallel": 8, **options}
    return {w.name: w for w in tensor_parallel_windows(MODELS["gpt-13b"], link=link, **options)}


def test_the_order_in_time_is_that_of_the_layer():
    found = {name: window.position for name, window in windows(PCIE).items()}
    (wait,) = one_f_one_b_waits(0, 4, 8, 1.0)
    times = [
        found["F1"],
        found["F2"],
        wait.position,
        found["B2"],
        on_demand_position(MLP),
        found["B1"],
        on_demand_position(ATTENTION),
    ]
    assert times == sorted(set(times))


def test_backward_windows_are_what_weight_gradients_leave():
    reduce = all_reduce(MODELS["gpt-13b"].boundary_bytes(4), 8, PCIE)
    fc1 = A100.compute_time(2.0 * 4 * 2048 * 5120 * 4 * 5120 / 8)
    slow = windows(PCIE)
    assert slow["F1"].capacity == slow["F2"].capacity == reduce
    assert slow["B1"].capacity == pytest.approx(reduce - fc1)
    assert slow["B2"].capacity > slow["B1"].capacity  # qkv's weight is smaller than fc1's
    assert not slow["B2"].last_layer
    assert slow["B1"].admits(ATTENTION)
    assert not slow["B1"].admits(MLP)
    # On a fast link the host's own overlap fills them.
    assert windows(NVLINK)["B1"].capacity == windows(NVLINK)["B2"].capacity == 0
    assert windows(NVLINK, host_overlaps_weight_grad=False)["B1"].capacity > 0
    assert windows(PCIE, tensor_parallel=1) == {}


def test_waits_of_1f1b():
    assert one_f_one_b_waits(3, 4, 8, 1.0) == ()
    for rank, lacking in ((0, 4 / 8), (1, 5 / 8), (2, 6 / 8)):
        (wait,) = one_f_one_b_waits(rank, 4, 8, 2.5)
        assert (wait.capacity, wait.exposed, wait.stage_wide) == (2.5, lacking, True)
    (wait,) = one_f_one_b_waits(0, 4, 2, 1.0)
    assert wait.exposed == 0


@pytest.mark.parametrize(("flash", "number"), [(True, 16), (False, 20)])
def test_a_transformer_layer_has_as_many_units_as_published(flash, number):
    kw = {"micro_batch": 2, "device": A100, "flash": flash}
    costs = transformer_costs(MODELS["gpt-1.3b"], tensor_parallel=2, link=NVLINK, **kw)
    assert len(costs.units) == number
    alone = transformer_costs(MODELS["gpt-1.3b"], **kw)
    assert not any(unit.communication for unit in alone.units)
    assert costs.forward < alone.forward


def test_activations_are_those_of_korthikanti():
    # arXiv:2205.05198, equation 2: s b h (10 + 24/t + 5 a s / (h t)) bytes of a layer in 16 bit; rotary positions keep
    # nothing more. Our dropout keeps its output and a mask of half its bytes, softmax its output: 2 + 2 + 1 per score.
    s, b, h, a, t = 2048, 2, 2048, 16, 2
    shape = TransformerShape(hidden_size=h, num_heads=a, num_layers=2, seq_length=s)
    costs = transformer_costs(shape, micro_batch=b, device=A100, tensor_parallel=t, link=NVLINK)
    expected = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert costs.activation_bytes == pytest.approx(expected, rel=0.02)


def test_shapes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="16 heads"):
        transformer_costs(MODELS["gpt-1.3b"], micro_batch=1, device=A100, tensor_parallel=3, link=NVLINK)
    with pytest.raises(ConfigError, match="need a link"):
        transformer_costs(MODELS["gpt-1.3b"], micro_batch=1, device=A100, tensor_parallel=2)


def test_graphs_of_units_are_checked_all_at_once():
    with pytest.raises(ConfigError) as error:
        check_graph([("a", ("x",)), ("a", ("x",)), ("b", ("c", "x"))], ["x"])
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match="no units"):
        LayerUnits(())
    with pytest.raises(ConfigError, match="outputs"):
        LayerUnits((Unit("a", abs, ("x",)),), outputs=("z",))


def test_units_run_one_after_another():
    units = LayerUnits(
        (
            Unit("a", lambda x: x + 1, ("x",)),
            Unit("b", lambda a, x: a * x, ("a", "x")),
            Unit("c", lambda b: -b, ("b",)),
        ),
        outputs=("c", "x"),
    )
    assert run_units(units, (3,)) == (-12, 3)
