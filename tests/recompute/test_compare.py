"""Simulated throughput of policies: what must hold whatever the figures are."""

from dataclasses import replace

import pytest

from ext.core.errors import ConfigError
from ext.cost.hardware import DEVICES, NVLINK, PCIE
from ext.cost.transformer import MODELS
from ext.recompute.compare import Job, compare


def job(name="gpt-13b", link=NVLINK, micro_batch=8, **options):
    options = {"tensor_parallel": 8, "stages": 4, "num_microbatches": 16, "flash": False, **options}
    return Job(MODELS[name], DEVICES["a100-40gb"], link, micro_batch=micro_batch, **options)


@pytest.mark.parametrize("link", [NVLINK, PCIE])
def test_policies_are_ordered_as_their_freedom_is(link):
    outcomes = compare(job(link=link), opt_seconds=0.5)
    times = {policy: outcome.step_time for policy, outcome in outcomes.items()}
    assert times["none"] is None  # the point of it all
    assert times["opt"] <= times["heu"] * (1 + 1e-9)
    assert times["heu"] <= times["on_demand"] * (1 + 1e-9)
    assert times["on_demand"] < times["full"]
    for policy in ("on_demand", "heu", "opt"):
        assert len(outcomes[policy].solutions) == 4
        for stage, solution in enumerate(outcomes[policy].solutions):
            assert solution.bytes <= job(link=link).problem(stage).budget


def test_memory_and_windows_differ_by_stage():
    problems = [job().problem(stage) for stage in range(4)]
    assert [problem.in_flight for problem in problems] == [4, 3, 2, 1]
    assert problems[0].budget < problems[1].budget == problems[2].budget  # the embedding
    assert problems[3].budget < problems[0].budget  # the head and its logits
    assert ["P" in problem.window for problem in problems] == [True, True, True, False]
    assert {"F1", "F2", "B1", "B2"} <= set(problems[3].window)


def test_on_a_slow_link_nothing_stays_exposed():
    outcome = compare(job(link=PCIE), ["heu"])["heu"]
    assert max(outcome.exposed) < 0.02 * 10 * job(link=PCIE).problem(0).layer.forward


def test_where_everything_fits_no_policy_recomputes():
    outcomes = compare(job(micro_batch=1))
    assert outcomes["none"].step_time is not None
    for policy in ("on_demand", "heu", "opt"):
        assert outcomes[policy].step_time == outcomes["none"].step_time
        assert set(outcomes[policy].exposed) == {0.0}


def test_full_recomputation_costs_a_forward():
    timed = replace(job(), head=False)
    none = timed.step_time([0.0] * 4)
    outcome = compare(timed, ["full"])["full"]
    forward = 10 * (timed.problem(0).layer.forward + 2 * timed.reduce_time)
    assert outcome.exposed == (pytest.approx(forward),) * 4
    # Equal stages: m + p - 1 micro-batches pass through each, every one a recompute longer.
    assert outcome.step_time - none == pytest.approx((16 + 3) * forward)


def test_what_cannot_work_is_left_out_or_refused():
    tight = compare(job("gpt-20b", micro_batch=32, tensor_parallel=2), ["full", "heu"])
    assert all(outcome.step_time is None for outcome in tight.values())
    with pytest.raises(ConfigError, match="do not divide"):
        _ = job(stages=3).layers_per_stage
