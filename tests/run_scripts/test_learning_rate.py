"""Warmup and cosine: a function of the step alone, whatever a checkpoint says."""

import pytest
import torch

from gpt.learning_rate import WarmupCosine


def test_rises_to_the_peak_and_falls_to_the_floor():
    rate = WarmupCosine(warmup_steps=10, num_steps=110, floor=0.1)
    assert [rate(step) for step in range(10)] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rate(10) == 1.0
    assert rate(60) == pytest.approx(0.55)
    assert rate(110) == rate(500) == pytest.approx(0.1)
    values = [rate(step) for step in range(10, 111)]
    assert values == sorted(values, reverse=True)


def test_works_without_warmup_and_with_nothing_but_warmup():
    assert WarmupCosine(0, 10)(0) == 1.0
    assert WarmupCosine(10, 10)(9) == 1.0
    assert WarmupCosine(10, 5)(3) == 0.4


def test_a_restored_scheduler_follows_the_new_arguments_from_the_old_step():
    def make(num_steps):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        return optimizer, WarmupCosine(2, num_steps).scheduler(optimizer)

    optimizer, scheduler = make(10)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
    resumed, other = make(20)
    other.load_state_dict(scheduler.state_dict())
    resumed.step()
    other.step()
    assert resumed.param_groups[0]["lr"] == 2.0 * WarmupCosine(2, 20)(7)
