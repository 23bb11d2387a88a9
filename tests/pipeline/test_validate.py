from __future__ import annotations

import pytest

from ext.core.errors import ScheduleError
from ext.pipeline.actions import parse_order
from ext.pipeline.plan import Plan
from ext.pipeline.validate import validate

GOOD = (
    "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0R0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
)


def plan(*orders: str, m: int = 2, rank_of: tuple[int, ...] | None = None, recomputed=None) -> Plan:
    rank_of = rank_of or tuple(range(len(orders)))
    n = len(rank_of)
    return Plan("x", m, rank_of, tuple(tuple(parse_order(o)) for o in orders), (1,) * n, recomputed or (1,) * n)


def refusal(plan: Plan, bounds=None) -> str:
    with pytest.raises(ScheduleError) as error:
        validate(plan, bounds)
    return str(error.value)


def test_a_good_plan_passes():
    validate(plan(*GOOD), [2, 1])


def test_backward_before_its_forward_is_marked():
    text = refusal(plan(GOOD[0], "1RECV_F0 1B0 1F0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1"))
    assert text.splitlines() == [
        "rank 1, step 2: 1B0 comes before 1F0.",
        "  rank 1:  1RECV_F0 [1B0] 1F0 1RECV_F1 1SEND_B0 1F1 ...",
    ]


def test_long_lines_are_cut_around_the_bad_cell():
    forwards = " ".join(f"0F{i}" for i in range(20) if i != 15)
    backwards = " ".join(f"0B{i}" for i in range(20))
    assert refusal(plan(f"{forwards} {backwards} 0F15", m=20)).splitlines() == [
        "rank 0, step 35: 0B15 comes before 0F15.",
        "  rank 0:  ... 0B7 0B8 0B9 0B10 0B11 0B12 0B13 0B14 [0B15] 0B16 0B17 0B18 0B19 ...",
    ]


def test_a_dropped_microbatch_is_missing():
    text = refusal(plan("0F0 0SEND_F0 0RECV_B0 0B0", GOOD[1]))
    assert "rank 0: 0F1 is missing." in text
    assert "rank 0: 0B1 is missing." in text
    assert "  rank 0:  0F0 0SEND_F0 0RECV_B0 0B0 [0F1?]" in text


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("0F0 0B0 0F1", "rank 0: 0B1 is missing"),
        ("0F0 0I0 0F1 0B1", "rank 0: 0W0 is missing"),
        ("0F0 0B0 0F0 0F1 0B1", "rank 0, step 3: 0F0 comes twice"),
        ("0F0 0F1 0R0 0R0 0B0 0B1", "rank 0, step 4: 0R0 comes twice"),
        ("0R0 0F0 0B0 0F1 0B1", "rank 0, step 1: 0R0 comes before 0F0"),
        ("0F0 0B0 0R0 0F1 0B1", "rank 0, step 3: 0R0 comes after the backward it is for"),
        ("0F0 0I0 0R0 0W0 0F1 0B1", "rank 0, step 3: 0R0 comes after the backward it is for"),
        ("0F0 0W0 0I0 0F1 0B1", "rank 0, step 2: 0W0 comes before 0I0"),
        ("0F0 0B0 0I0 0W0 0F1 0B1", "rank 0, step 3: 0I0 repeats a part of 0B0"),
        ("0F0 0I0 0W0 0B0 0F1 0B1", "rank 0, step 2: 0I0 repeats a part of 0B0"),
        ("0B0 0F1 0B1", "rank 0, step 1: 0B0 comes without 0F0"),
        ("0F0 0B0 0F1 0B1 0F2", "step 5: 0F2 names micro-batch 2, there are 0 to 1"),
        ("0F0 0B0 0F1 0B1 3F0", "step 5: 3F0 names stage 3, the stages are 0 to 0"),
        ("0F0 0B0 0F1 0B1 0SEND_F0", "step 5: 0SEND_F0 carries no message between ranks"),
    ],
)
def test_one_rank_out_of_order(order, reason):
    assert reason in refusal(plan(order))


def test_an_action_on_the_wrong_rank():
    assert "rank 0, step 1: 1F0 belongs to rank 1, which holds stage 1" in refusal(plan("1F0 " + GOOD[0], GOOD[1]))


def test_recompute_of_a_stage_that_keeps_everything():
    text = refusal(plan(*GOOD, recomputed=(0, 0)))
    assert "rank 0, step 6: 0R0 has nothing to recompute, stage 0 keeps all" in text


def test_more_in_flight_than_the_bound():
    text = refusal(plan(*GOOD), [1, 1])
    assert "rank 0, step 3: 0F1 makes 2 micro-batches in flight, at most 1" in text
    assert "[0F1]" in text
    split = plan("0F0 0I0 0F1 0W0 0I1 0W1", recomputed=(0,))
    validate(split, [2])
    assert "0F1 makes 2 micro-batches in flight" in refusal(split, [1])


def test_a_missing_receive():
    text = refusal(plan(GOOD[0], GOOD[1].replace("1RECV_F1 ", "")))
    assert "rank 1, step 5: 1F1 comes before its receive 1RECV_F1" in text
    assert "1RECV_F0 1F0 1B0 1SEND_B0 [1F1] 1B1 1SEND_B1" in text
    assert "rank 1: 1RECV_F1 is missing" in text


def test_a_missing_send():
    assert "rank 1: 1SEND_B1 is missing" in refusal(plan(GOOD[0], GOOD[1].replace(" 1SEND_B1", "")))


def test_communication_at_the_wrong_place():
    assert "step 1: 0SEND_F0 comes before 0F0" in refusal(plan("0SEND_F0 " + GOOD[0].replace("0SEND_F0 ", ""), GOOD[1]))
    early = GOOD[0].replace("0RECV_B1 ", "")
    assert "step 1: 0RECV_B1 comes before 0F1" in refusal(plan("0RECV_B1 " + early, GOOD[1]))
    late = GOOD[1].replace("1B0 1RECV_F1 1SEND_B0", "1SEND_B0 1B0 1RECV_F1")
    assert "step 3: 1SEND_B0 comes before 1B0" in refusal(plan(GOOD[0], late))
    assert "step 3: 0SEND_F0 comes twice" in refusal(plan(GOOD[0].replace("0SEND_F0", "0SEND_F0 0SEND_F0"), GOOD[1]))


def test_two_ends_of_a_channel_in_different_order():
    swapped = GOOD[1].replace("1RECV_F0 1F0 1B0 1RECV_F1", "1RECV_F1 1RECV_F0 1F0 1B0")
    assert refusal(plan(GOOD[0], swapped)).splitlines() == [
        "rank 1, step 1: 1RECV_F1 is posted where rank 0 sends what 1RECV_F0 receives.",
        "  rank 1:  [1RECV_F1] 1RECV_F0 1F0 1B0 1SEND_B0 ...",
    ]


def test_a_deadlock_of_blocking_sends_shows_every_stuck_rank():
    # Each rank sends before it posts the receive the other one's send waits for.
    text = refusal(
        plan(
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        )
    )
    assert text.splitlines() == [
        "rank 0, step 4: 0SEND_F1 waits for 1RECV_F1 for ever.",
        "  rank 0:  0F0 0SEND_F0 0F1 [0SEND_F1] 0RECV_B0 0B0 0RECV_B1 0B1",
        "rank 1, step 4: 1SEND_B0 waits for 0RECV_B0 for ever.",
        "  rank 1:  1RECV_F0 1F0 1B0 [1SEND_B0] 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_a_deadlock_of_actions_that_wait_for_messages():
    text = refusal(
        plan(
            "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        )
    )
    assert "rank 0, step 4: 0B0 waits for 1SEND_B0 for ever" in text
    assert "rank 1, step 4: 1F1 waits for 0SEND_F1 for ever" in text


def test_stages_on_one_rank_wait_for_each_other_without_messages():
    validate(plan("0F0 1F0 1I0 0I0 0W0 1W0", m=1, rank_of=(0, 0)))
    text = refusal(plan("1F0 0F0 1B0 0B0", m=1, rank_of=(0, 0)))
    assert "rank 0, step 1: 1F0 waits for 0F0 for ever" in text
    assert "1B0 for ever" in refusal(plan("0F0 1F0 0B0 1B0", m=1, rank_of=(0, 0)))


def test_many_problems_are_counted():
    text = refusal(plan("0B0 0B1 0B2 0B3 0B4 0B5 0B6", m=7))
    assert text.count("comes without") == 5
    assert text.endswith("... and 9 more.")
