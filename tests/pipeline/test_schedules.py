from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ext.core.errors import ConfigError
from ext.pipeline.actions import B, F, I, Kind, R, W, format_order
from ext.pipeline.build import full_recompute
from ext.pipeline.passes import place_recomputes
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES, Schedule

NAMES = ("1f1b", "early_recompute", "gpipe", "last_no_recompute", "shifted_critical_path", "zb_h1")
MERAK = ("early_recompute", "last_no_recompute", "shifted_critical_path")


def make(name: str, p: int, m: int, **options) -> Schedule:
    cls = SCHEDULES.get(name)
    return cls(cls.Config(**options), shape=PipelineShape(p, m))  # type: ignore[call-arg]


def orders(name: str, p: int, m: int) -> list[str]:
    """Orders with every layer recomputed that may be, without communication."""
    schedule = make(name, p, m)
    recomputing = [stage for stage, n in enumerate(full_recompute(schedule, (1,) * p)) if n]
    placed = [place_recomputes(schedule.order(r), schedule.early_recomputes(r), recomputing) for r in range(p)]
    return [format_order(order) for order in placed]


def in_flight_peak(schedule: Schedule, rank: int) -> int:
    now = peak = 0
    for action in schedule.order(rank):
        now += {F: 1, B: -1, W: -1}.get(action.kind, 0)
        peak = max(peak, now)
    return peak


def test_built_ins_are_these():
    assert tuple(name for name in SCHEDULES if SCHEDULES.get(name).has_rule) == NAMES
    assert set(SCHEDULES) - set(NAMES) == {"auto", "plan_file"}


@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(1, 8), m=st.integers(1, 32))
def test_every_rank_runs_every_microbatch_once(name, p, m):
    if m < SCHEDULES.get(name).min_microbatches:
        return
    schedule = make(name, p, m)
    for rank in range(p):
        order = schedule.order(rank)
        backward = (I, W) if name == "zb_h1" else (B,)
        assert sorted(order) == sorted((rank, kind, i) for kind in (F, *backward) for i in range(m))
        for kind in (F, *backward):
            assert [a.microbatch for a in order if a.kind is kind] == list(range(m))


IN_FLIGHT = {
    "1f1b": lambda p, m, r: min(p - r, m),
    "early_recompute": lambda p, m, r: min(p - r, m),
    "last_no_recompute": lambda p, m, r: min(p - r, m),
    "shifted_critical_path": lambda p, m, r: 1 if r == p - 1 else min(max(p - r, 3), m),
    "gpipe": lambda p, m, r: m,
    "zb_h1": lambda p, m, r: min(p, m),
}


@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(1, 8), m=st.integers(1, 32))
def test_in_flight_bound_is_the_docstrings_and_is_reached(name, p, m):
    if m < SCHEDULES.get(name).min_microbatches:
        return
    schedule = make(name, p, m)
    for rank in range(p):
        assert schedule.max_in_flight(rank) == IN_FLIGHT[name](p, m, rank) == in_flight_peak(schedule, rank)


def test_in_flight_ramp_of_1f1b():
    assert [in_flight_peak(make("1f1b", 4, 8), rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight_peak(make("1f1b", 8, 8), rank) for rank in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [in_flight_peak(make("1f1b", 4, 2), rank) for rank in range(4)] == [2, 2, 2, 1]


def test_shifted_critical_path_pairs_the_first_backwards_of_the_rank_before_the_last():
    assert orders("shifted_critical_path", 4, 6) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0R3 0B3 0R4 0B4 0R5 0B5",
        "1F0 1F1 1F2 1R0 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1R4 1B4 1R5 1B5",
        "2F0 2F1 2F2 2R0 2B0 2R1 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
    ]


def test_shifted_critical_path_on_two_ranks_and_on_one():
    assert orders("shifted_critical_path", 2, 4) == [
        "0F0 0F1 0F2 0R0 0B0 0R1 0B1 0F3 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert orders("shifted_critical_path", 1, 4) == orders("1f1b", 1, 4)


def test_early_recompute_covers_the_cooldown_wait_of_all_but_the_last_rank():
    assert orders("early_recompute", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0R2 0B2 0R3 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1R3 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_last_no_recompute_moves_the_rule_one_rank_forward():
    assert orders("last_no_recompute", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0R2 0B2 0R3 0B3",
        "1F0 1F1 1R0 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zb_h1_defers_weight_gradients_by_the_rank():
    assert orders("zb_h1", 3, 4) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


@given(p=st.integers(1, 8), m=st.integers(4, 32))
def test_early_recomputes_follow_the_cooldown_rule(p, m):
    early, last, scp = (make(name, p, m) for name in MERAK)
    for rank in range(p):
        rule = {(rank, i) for i in range(m) if m - i + rank < p}
        assert early.early_recomputes(rank) == (rule if rank <= p - 2 else set())
        first = {p - 2: {(rank, 0)}}.get(rank, set())
        assert last.early_recomputes(rank) == (rule if rank <= p - 3 else first)
        first = {p - 2: {(rank, 0), (rank, 1)}, p - 3: {(rank, 0)}}.get(rank, set())
        assert scp.early_recomputes(rank) == (rule | first if rank <= p - 3 else first)


def test_who_recomputes():
    for name in NAMES:
        schedule = make(name, 4, 8)
        keeps_last = name in ("last_no_recompute", "shifted_critical_path")
        assert [schedule.may_recompute(stage) for stage in range(4)] == [True, True, True, not keeps_last]
        assert schedule.recomputes_by_default == (name in MERAK)
    assert not any(R in (a.kind for a in make(name, 4, 8).order(r)) for name in NAMES for r in range(4))


@pytest.mark.parametrize("m", [1, 2, 3])
def test_shifted_critical_path_needs_four_microbatches(m):
    with pytest.raises(ConfigError) as error:
        make("shifted_critical_path", 4, m)
    text = str(error.value)
    assert "'shifted_critical_path' needs at least 4 micro-batches" in text
    assert f"gives {m}." in text
    assert "Raise gradient_accumulation_steps to 4" in text
    assert "'1f1b'" in text


def test_fewer_microbatches_than_ranks_are_legal_from_four():
    assert orders("shifted_critical_path", 7, 4)[5] == "5F0 5F1 5F2 5R0 5B0 5R1 5B1 5F3 5B2 5B3"


def test_options_of_shifted_critical_path_are_strict():
    for bad in ({"extra_forwards": -1}, {"extra_forwards": "1"}, {"extra": 1}):
        with pytest.raises(ValidationError):
            make("shifted_critical_path", 4, 8, **bad)


def test_kinds_of_the_orders_are_compute():
    assert all(a.kind.is_compute for name in NAMES for r in range(4) for a in make(name, 4, 8).order(r))
    assert not Kind.SEND_F.is_compute
