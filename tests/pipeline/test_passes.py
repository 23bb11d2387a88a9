from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.pipeline.actions import B, F, I, Kind, R, W, format_order, parse_order
from ext.pipeline.passes import add_communication, place_recomputes


def communicate(orders: list[str], rank_of=None, **options) -> list[str]:
    rank_of = rank_of or tuple(range(len(orders)))
    return [format_order(order) for order in add_communication([parse_order(o) for o in orders], rank_of, **options)]


def test_recompute_stands_before_the_backward_of_early_microbatches_only():
    order = parse_order("0F0 0F1 0F2 0B0 0I1 0W1 0B2")
    placed = place_recomputes(order, {(0, 0), (0, 1), (1, 2)}, {0})
    assert format_order(placed) == "0F0 0F1 0F2 0R0 0B0 0R1 0I1 0W1 0B2"


def test_stages_that_drop_nothing_get_no_recompute():
    order = parse_order("0F0 2F0 2B0 0B0")
    assert format_order(place_recomputes(order, {(0, 0), (2, 0)}, {2})) == "0F0 2F0 2R0 2B0 0B0"


def test_receive_just_in_time_comes_before_the_send_of_the_action_before():
    assert communicate(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], lookahead=0) == [
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_lookahead_counts_compute_actions():
    orders = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert communicate(orders, lookahead=1)[1] == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    assert communicate(orders, lookahead=2)[1] == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    with pytest.raises(ValueError, match="at least 0, got -1"):
        communicate(orders, lookahead=-1)


def test_a_gradient_is_received_after_its_forward_however_far_ahead():
    received = communicate(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], lookahead=9)[0]
    assert received == "0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0B1"


def test_a_gradient_is_received_before_an_early_recompute():
    orders = ["0F0 0F1 0R0 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert communicate(orders, lookahead=0)[0] == "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0R0 0B0 0RECV_B1 0B1"


def test_input_gradient_of_a_split_backward_is_what_is_sent():
    assert communicate(["0F0 0I0 0W0", "1F0 1I0 1W0"], lookahead=0) == [
        "0F0 0RECV_B0 0SEND_F0 0I0 0W0",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0",
    ]


def test_stages_on_one_rank_do_not_communicate():
    # A V placement: rank 0 holds stages 0 and 3, rank 1 holds 1 and 2.
    orders = ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"]
    assert communicate(orders, (0, 1, 1, 0), lookahead=0) == [
        "0F0 3RECV_F0 0SEND_F0 3F0 3B0 0RECV_B0 3SEND_B0 0B0",
        "1RECV_F0 1F0 2F0 2RECV_B0 2SEND_F0 2B0 1B0 1SEND_B0",
    ]
    assert communicate(["0F0 1F0 1B0 0B0"], (0, 0)) == ["0F0 1F0 1B0 0B0"]


def test_receives_follow_the_order_of_the_sends_where_they_are_used_in_another():
    # Rank 0 sends micro-batch 1 first, rank 1 needs 0 first: both receives stand before the first use.
    received = communicate(["0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1"], lookahead=0)[1]
    assert received == "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_a_receive_is_posted_earlier_where_blocking_sends_would_wait_for_ever():
    # Just in time, rank 0 would wait in its third send for 1RECV_F2, and rank 1 in its first for 0RECV_B0.
    first, second = communicate(["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"], lookahead=0)
    assert first == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0RECV_B0 0SEND_F3 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3"
    )
    # 1RECV_F2 moved to where rank 1 waited; all others stand just before their use.
    assert second == (
        "1RECV_F0 1F0 1B0 1RECV_F1 1RECV_F2 1SEND_B0 1F1 1B1 1RECV_F3 1SEND_B1 1F2 1B2 1SEND_B2 1F3 1B3 1SEND_B3"
    )


@st.composite
def chunked_orders(draw):
    """Any placement of up to 6 stages on up to 3 ranks, with each rank's actions in any order."""
    num_ranks = draw(st.integers(1, 3))
    rank_of = tuple(draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_ranks, max_size=6)))
    m = draw(st.integers(1, 4))
    orders = []
    for rank in range(max(rank_of) + 1):
        forwards = [(s, F, i) for s, owner in enumerate(rank_of) if owner == rank for i in range(m)]
        forwards = draw(st.permutations(forwards))
        backwards = draw(st.permutations([(s, B, i) for s, _, i in forwards]))
        orders.append(parse_order(" ".join(f"{s}{k}{i}" for s, k, i in [*forwards, *backwards])))
    return rank_of, orders


@given(chunked_orders(), st.integers(0, 4))
def test_channels_keep_one_order_and_receives_come_in_time(placed, lookahead):
    rank_of, orders = placed
    result = add_communication(orders, rank_of, lookahead=lookahead)
    channels: dict = {}
    for rank, order in enumerate(result):
        assert [a for a in order if a.kind.is_compute] == orders[rank]
        for step, action in enumerate(order):
            stage, kind, i = action
            if kind is Kind.SEND_F:
                channels.setdefault((rank, rank_of[stage + 1]), ([], []))[0].append((stage + 1, "F", i))
            elif kind is Kind.SEND_B:
                channels.setdefault((rank, rank_of[stage - 1]), ([], []))[0].append((stage - 1, "B", i))
            elif kind is Kind.RECV_F:
                channels.setdefault((rank_of[stage - 1], rank), ([], []))[1].append((stage, "F", i))
                assert step < order.index((stage, F, i))
            elif kind is Kind.RECV_B:
                channels.setdefault((rank_of[stage + 1], rank), ([], []))[1].append((stage, "B", i))
                assert step < order.index((stage, B, i))
    crossings = sum(a != b for a, b in zip(rank_of, rank_of[1:], strict=False))
    m = len({a.microbatch for order in orders for a in order})
    assert sum(len(sent) for sent, _ in channels.values()) == 2 * m * crossings
    assert all(sent == posted for sent, posted in channels.values())
    assert {W, I, R}.isdisjoint(a.kind for order in result for a in order)
