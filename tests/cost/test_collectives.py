import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.core.errors import ConfigError
from ext.cost import collectives
from ext.cost.hardware import Link


def test_a_ring_all_reduce_moves_the_tensor_twice_but_for_one_part():
    link = Link(bandwidth=10.0, latency=0.5)
    # 2 * 3 steps, each of a quarter of 40 bytes at 10 bytes per second and half a second of latency.
    assert collectives.all_reduce(40, 4, link) == pytest.approx(6 * (1.0 + 0.5))
    assert collectives.reduce_scatter(40, 4, link) == pytest.approx(3 * 1.5)
    assert collectives.all_gather(40, 4, link) == pytest.approx(3 * 1.5)
    assert collectives.all_to_all(40, 4, link) == pytest.approx(3 * 1.5)
    assert collectives.all_reduce(40, 1, link) == 0


@given(st.floats(1e6, 1e12), st.floats(0, 1e-3), st.integers(1, 30))
def test_a_fit_returns_the_link_that_made_the_times(bandwidth, latency, steps):
    sizes = [1e3, 1e5, 1e7, 1e9]
    fitted = collectives.fit_link(sizes, [steps * latency + s / bandwidth for s in sizes], num_steps=steps)
    assert fitted.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert fitted.latency == pytest.approx(latency, rel=1e-3, abs=1e-9)


def test_noise_never_gives_a_negative_latency():
    fitted = collectives.fit_link([1.0, 2.0], [0.9, 2.2])
    assert fitted.latency == 0
    assert fitted.bandwidth == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([5.0, 5.0], [1.0, 1.0]), ([1.0, 2.0], [1.0, 0.0]), ([1.0, 100.0], [1.0, 0.5])]
)
def test_measurements_that_fit_no_link_are_refused(sizes, seconds):
    with pytest.raises(ConfigError, match="Measure|Remove"):
        collectives.fit_link(sizes, seconds)
