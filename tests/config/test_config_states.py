"""Bytes per parameter that a ds_config stands for."""

import pytest

from ext.config.states import precision, state_bytes

ADAM = {"optimizer": {"type": "AdamW"}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ADAM, (4, 4, 8, 1)),
        ({"optimizer": {"type": "SGD"}}, (4, 4, 0, 1)),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, (4, 4, 4, 1)),
        ({**ADAM, "bf16": {"enabled": True}}, (2, 4, 12, 2)),
        ({**ADAM, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, (2, 6, 12, 2)),
        ({**ADAM, "fp16": {"enabled": True}}, (2, 2, 12, 1)),
        ({**ADAM, "bf16": {"enabled": False}, "zero_optimization": {"stage": 1}}, (4, 4, 12, 2)),
        ({**ADAM, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, (2, 2, 12, 2)),
        ({}, (4, 4, 8, 1)),
    ],
)
def test_bytes_per_parameter(config, expected):
    states = state_bytes(config, data_parallel=2)
    assert (states.parameter, states.gradient, states.optimizer, states.shards) == expected


def test_the_bucket_of_zero_1():
    zero = {"stage": 1}
    assert state_bytes({**ADAM, "zero_optimization": zero}, 2).bucket == 4 * 500_000_000
    assert state_bytes({**ADAM, "zero_optimization": {**zero, "reduce_bucket_size": 1e6}}, 2).bucket == 4_000_000
    assert state_bytes({**ADAM, "zero_optimization": {**zero, "reduce_bucket_size": "auto"}}, 2).bucket == 2 * 10**9
    assert state_bytes(ADAM, 2).bucket == 0


def test_an_optimizer_that_the_program_makes():
    assert state_bytes({}, 1, optimizer="SGD").optimizer == 0
    assert state_bytes({}, 1, optimizer="Lion").optimizer == 4
    assert state_bytes({}, 1, optimizer="Unheard").optimizer == 8


def test_precision():
    assert precision({}) == "fp32"
    assert precision({"fp16": {"enabled": True}}) == "fp16"
    assert precision({"bfloat16": {"enabled": True}}) == "bf16"
