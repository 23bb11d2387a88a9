from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.core.errors import ScheduleError
from ext.pipeline.actions import Action, F, Kind, format_order, parse_order
from ext.pipeline.plan import Plan, parse_orders

actions = st.builds(Action, st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6))


@given(st.lists(actions))
def test_text_of_an_order_reads_back(order):
    assert parse_order(format_order(order)) == order


@given(st.lists(st.lists(actions), min_size=1, max_size=4))
def test_text_of_a_plan_reads_back(orders):
    frozen = tuple(map(tuple, orders))
    plan = Plan("x", 1, tuple(range(len(orders))), frozen, (1,) * len(orders), (0,) * len(orders))
    assert parse_orders(plan.to_text()) == frozen


def test_text_form():
    assert str(Action(2, F, 0)) == "2F0"
    assert repr(Action(12, Kind.SEND_F, 34)) == "12SEND_F34"
    assert parse_order("3RECV_B1  0W7\n1I2") == [Action(3, Kind.RECV_B, 1), Action(0, Kind.W, 7), Action(1, Kind.I, 2)]


@pytest.mark.parametrize("text", ["", "F0", "2F", "2f0", "2X0", "-1F0", "2F0x", "2SENDF0", "2F-1", "2F0 2F1"])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is no action; write stage, kind, micro-batch as in 2F0"):
        Action.parse(text)


def test_actions_are_hashable_values():
    assert len({Action(0, F, 1), Action(0, Kind("F"), 1), Action(1, F, 1)}) == 2
    assert pickle.loads(pickle.dumps(Action(0, F, 1))) == Action(0, F, 1)


def test_hash_of_a_plan_changes_with_orders_layout_and_recompute():
    def plan(orders="0F0 0B0", layers=(2,), recomputed=(0,)):
        return Plan("1f1b", 1, (0,), (tuple(parse_order(orders)),), layers, recomputed)

    hashes = {plan().hash, plan("0F0 0I0 0W0").hash, plan(layers=(3,)).hash, plan(recomputed=(1,)).hash}
    assert len(hashes) == 4
    assert plan().hash == plan().hash
