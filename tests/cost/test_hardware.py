import pytest
from pydantic import ValidationError

from ext.core.errors import ConfigError
from ext.cost.hardware import DEVICES, GIB, Device, Link, preset


def test_a_preset_is_name_nodes_devices():
    cluster = preset("a100-80gb:4x8")
    assert cluster.num_devices == 32
    assert cluster.device.memory_bytes == 80 * GIB
    assert cluster.link(8) == cluster.intra_node
    assert cluster.link(16) == cluster.inter_node
    assert preset("a100-80gb-pcie:1x4").device == DEVICES["a100-80gb"]


@pytest.mark.parametrize(
    ("text", "hint"),
    [("a100-80g:8x8", "Did you mean 'a100-80gb'"), ("a100-80gb", "a100-80gb:8x8"), ("a100-80gb:0x8", "no size")],
)
def test_a_wrong_preset_says_what_to_write(text, hint):
    with pytest.raises(ConfigError, match=hint):
        preset(text)


def test_times_follow_the_efficiencies():
    device = Device(flops=100.0, memory_bandwidth=10.0, memory_bytes=1, flops_efficiency=0.5, memory_efficiency=0.25)
    assert device.compute_time(100.0) == 2.0
    assert device.memory_time(10.0) == 4.0


def test_impossible_links_are_refused():
    with pytest.raises(ValidationError):
        Link(bandwidth=0.0)
