"""Releases of the hosts: older ones are refused with the reason."""

import pytest

from ext.core.versions import deepspeed_refusal, is_newer, is_older


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.17.6", " (this release multiplies them by 4)"),
        ("0.18.2", " (this release multiplies them by 4)"),
        ("0.18.4", " (this release crashes in fp32)"),
        ("0.19.2", " (this release multiplies those of stage 0 by 0.25)"),
        ("0.9.5", ""),
        ("0.19.8rc1", ""),
    ],
)
def test_deepspeed_that_scales_gradients_wrongly(version, reason):
    assert deepspeed_refusal(version) == (
        f"deepspeed {version} is installed, 0.19.8 or newer is needed: older releases scale the gradients of "
        f"pipeline stages wrongly{reason}. Run: pip install 'deepspeed>=0.19.8'"
    )


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+cpu", "0.19.10", "0.20.0", "1.0", "not a version"])
def test_deepspeed_that_is_used(version):
    assert deepspeed_refusal(version) is None


def test_order_is_not_that_of_text():
    assert is_older("0.9", "0.19.8")
    assert not is_older("2.10", "2.6")
    assert not is_older("2.6.0+cu126", "2.6")
    assert is_newer("2.14", "2.13")
    assert is_newer("3.0", "2.13")
    assert not is_newer("2.13.4+cpu", "2.13")
    assert not is_newer("unknown", "2.13")
