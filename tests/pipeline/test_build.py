from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.core.errors import ConfigError, ScheduleError
from ext.pipeline.actions import Action, B, F, Kind
from ext.pipeline.build import build_plan, default_recompute, full_recompute
from ext.pipeline.plan import PipelineShape, parse_orders
from ext.pipeline.schedule import SCHEDULES, Schedule, ScheduleConfig
from ext.pipeline.validate import validate

NAMES = tuple(name for name in SCHEDULES if SCHEDULES.get(name).has_rule)


def make(name: str, p: int, m: int) -> Schedule:
    return SCHEDULES.get(name)(shape=PipelineShape(p, m))


def legal(name: str, m: int) -> bool:
    return m >= SCHEDULES.get(name).min_microbatches


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", range(1, 9))
def test_every_plan_ends_with_blocking_sends(name, p):
    # build_plan replays the plan; all legal micro-batch counts, everything recomputed that may be.
    for m in filter(lambda m: legal(name, m), range(1, 33)):
        schedule = make(name, p, m)
        build_plan(schedule, layers_per_stage=(2,) * p, recomputed_layers=full_recompute(schedule, (2,) * p))


@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(1, 8), m=st.integers(1, 24), lookahead=st.integers(0, 6), data=st.data())
def test_plans_with_any_lookahead_and_recompute_are_valid_and_read_back(name, p, m, lookahead, data):
    if not legal(name, m):
        return
    schedule = make(name, p, m)
    layers = data.draw(st.lists(st.integers(1, 3), min_size=p, max_size=p))
    recomputed = [data.draw(st.integers(0, n)) for n in full_recompute(schedule, layers)]
    plan = build_plan(schedule, layers_per_stage=layers, recomputed_layers=recomputed, lookahead=lookahead)
    validate(plan, [schedule.max_in_flight(rank) for rank in range(p)])
    assert parse_orders(plan.to_text()) == plan.orders
    assert (plan.schedule, plan.num_microbatches, plan.num_ranks, plan.num_stages) == (name, m, p, p)
    early = {key for rank in range(p) for key in schedule.early_recomputes(rank) if recomputed[key[0]]}
    assert plan.early_recomputes == early


def test_text_of_a_plan():
    plan = build_plan(make("1f1b", 2, 2), layers_per_stage=(1, 1), recomputed_layers=(0, 0))
    assert plan.to_text().splitlines() == [
        "rank 0: 0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0B1",
        "rank 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    assert plan.to_json() == {"0": ["0F0", "0F1", "0B0", "0B1"], "1": ["1F0", "1B0", "1F1", "1B1"]}


def test_recompute_policies_of_schedules():
    layers = (3, 2, 2, 3)
    for name in NAMES:
        schedule = make(name, 4, 8)
        full = (3, 2, 2, 0) if name in ("last_no_recompute", "shifted_critical_path") else layers
        merak = name in ("early_recompute", "last_no_recompute", "shifted_critical_path")
        assert full_recompute(schedule, layers) == full
        assert default_recompute(schedule, layers) == (full if merak else (0, 0, 0, 0))


def refused(name: str, layers, recomputed) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        build_plan(make(name, 3, 4), layers_per_stage=layers, recomputed_layers=recomputed)
    return error.value.problems


def test_all_wrong_layer_counts_are_refused_at_once():
    assert refused("1f1b", (2, 2), (1, 1, 1, 1)) == (
        "layers_per_stage lists 2 stages, schedule '1f1b' has 3; give one number per stage.",
        "recomputed_layers lists 4 stages, schedule '1f1b' has 3; give one number per stage.",
    )
    assert refused("1f1b", (0, 2, 2), (0, 3, -1)) == (
        "stage 0 has 0 layers; every stage needs at least one.",
        "stage 1 recomputes 3 of 2 layers; give 0 to 2.",
        "stage 2 recomputes -1 of 2 layers; give 0 to 2.",
    )


@pytest.mark.parametrize("name", ["last_no_recompute", "shifted_critical_path"])
def test_recompute_on_a_stage_that_never_recomputes_is_refused(name):
    (problem,) = refused(name, (2, 2, 2), (2, 2, 1))
    assert f"stage 2 recomputes 1 layers, but schedule '{name}' never recomputes there" in problem


class Broken(Schedule):
    class Config(ScheduleConfig):
        type: Literal["broken"] = "broken"
        fault: str = "none"

    config: Config

    def order(self, rank: int) -> list[Action]:
        order = [Action(rank, kind, i) for i in range(self.shape.num_microbatches) for kind in (F, B)]
        if self.config.fault == "drops" and rank == 1:
            return order[:-2]
        if self.config.fault == "communicates":
            return [*order, Action(rank, Kind.SEND_F, 0)]
        return order

    def max_in_flight(self, rank: int) -> int:
        return 0 if self.config.fault == "bound" else 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("drops", "rank 1: 1F3 is missing"),
        ("bound", "rank 0, step 1: 0F0 makes 1 micro-batches in flight, at most 0"),
        ("communicates", "schedule 'broken' communicates on rank 0: 0SEND_F0. Leave that to the passes."),
    ],
)
def test_a_wrong_schedule_of_a_users_own_is_refused(fault, reason):
    schedule = Broken(Broken.Config(fault=fault), shape=PipelineShape(3, 4))
    with pytest.raises(ScheduleError, match=reason):
        build_plan(schedule, layers_per_stage=(1, 1, 1), recomputed_layers=(0, 0, 0))


def test_a_sequential_schedule_of_a_users_own_is_fine():
    build_plan(Broken(shape=PipelineShape(3, 4)), layers_per_stage=(1, 1, 1), recomputed_layers=(1, 0, 1))
