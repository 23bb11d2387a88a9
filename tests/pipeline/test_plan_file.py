"""Plan files: what is written is what is read, and what is wrong with a file is said at once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ext.core.errors import ConfigError
from ext.pipeline.build import build_plan, plan_of_orders
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.plan import PipelineShape
from ext.pipeline.plan_file import read_plan, write_plan
from ext.pipeline.schedule import SCHEDULES


def plan_of(name: str, p: int = 3, m: int = 5, recomputed=None):
    schedule = SCHEDULES.get(name)(shape=PipelineShape(p, m))
    counts = (0,) * p if recomputed is None else recomputed
    return build_plan(schedule, layers_per_stage=(4,) * p, recomputed_layers=counts)


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [("1f1b", None), ("zb_h1", (1, 2, 3)), ("early_recompute", (4, 4, 4)), ("shifted_critical_path", (4, 2, 0))],
)
def test_what_is_written_is_read(tmp_path, name, recomputed):
    path, plan = tmp_path / "folder" / "plan.json", plan_of(name, recomputed=recomputed)
    costs = Costs(tuple(StageCosts(1.0, 1.0, 1.0) for _ in range(3)), latency=0.1)
    write_plan(path, plan, costs=costs, notes={"versions": {"python": "3"}})
    assert read_plan(path) == plan
    content = json.loads(path.read_text())
    assert content["orders"]["0"].startswith("0F0 0F1")
    assert "SEND" not in path.read_text()
    assert content["costs"]["latency"] == 0.1
    assert "bandwidth" not in content["costs"]  # infinite, for which JSON has no number
    assert content["versions"] == {"python": "3"}


def test_a_recompute_stays_where_it_was_and_not_just_before_its_backward(tmp_path):
    orders = [["0F0", "0R0", "0F1", "0I0", "0R1", "0W0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    from ext.pipeline.actions import Action

    plan = plan_of_orders(
        "auto",
        [[Action.parse(text) for text in order] for order in orders],
        rank_of=(0, 1),
        num_microbatches=2,
        layers_per_stage=(2, 2),
        recomputed_layers=(1, 0),
    )
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    cls = SCHEDULES.get("plan_file")
    schedule = cls(cls.Config(path=str(path)), shape=PipelineShape(2, 2))  # type: ignore[call-arg]
    again = build_plan(schedule, layers_per_stage=(2, 2), recomputed_layers=(1, 0))
    assert [str(action) for action in again.compute_order(0)] == orders[0]
    assert again.hash == plan.hash
    assert schedule.early_recomputes(0) == {(0, 0), (0, 1)}
    assert [str(action) for action in schedule.order(0)] == ["0F0", "0F1", "0I0", "0W0", "0B1"]


def test_unit_tables_stand_in_the_file_by_name(tmp_path):
    path, whole = tmp_path / "plan.json", plan_of("1f1b", 2, 2, recomputed=(1, 0))
    kept: tuple = ((),) * 4
    plan = replace(whole, unit_tables=(((("norm", "P"), ("act", "C")), *kept[1:]), kept))
    write_plan(path, plan)
    assert read_plan(path) == plan
    assert plan.hash != whole.hash
    content = json.loads(path.read_text())
    assert content["unit_tables"][0][0] == {"norm": "P", "act": "C"}
    content["unit_tables"][0][0]["norm"] = "C"
    path.write_text(json.dumps(content))
    (problem,) = problems(path)
    assert "it was changed by hand" in problem


def edited(tmp_path, **changes):
    path = tmp_path / "plan.json"
    write_plan(path, plan_of("1f1b", 2, 2))
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key) if value is None else content.update({key: value})
    path.write_text(json.dumps(content))
    return path


def problems(path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        read_plan(path)
    assert all(problem.startswith(str(path)) for problem in error.value.problems)
    return error.value.problems


GOOD = {"0": "0F0 0F1 0B0 0B1", "1": "1F0 1B0 1F1 1B1"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format": 2}, "format: found 2"),
        ({"format": None}, "format: found None"),
        ({"num_microbatches": "2"}, "num_microbatches: found '2'"),
        ({"num_microbatches": True}, "num_microbatches: found True"),
        ({"layers_per_stage": [4, 4.0]}, "layers_per_stage: found"),
        ({"layers_per_stage": [4]}, "layers_per_stage: 1 numbers for 2 stages"),
        ({"layers_per_stage": [4, 0]}, "stage 1 recomputes 0 of 0 layers"),
        ({"recomputed_layers": [5, 0]}, "stage 0 recomputes 5 of 4 layers"),
        ({"recomputed_layers": [-1, 0]}, "recomputed_layers: found"),
        ({"rank_of": [0, 2]}, "rank_of: found [0, 2]"),
        ({"rank_of": None}, "rank_of: found None"),
        ({"orders": []}, "orders: give an object"),
        ({"orders": {**GOOD, "1": ["1F0"]}}, "orders: give an object"),
        ({"orders": {"0": GOOD["0"]}}, "orders: found ranks 0"),
        ({"orders": {**GOOD, "2": ""}}, "orders: found ranks 0, 1, 2"),
        ({"orders": {**GOOD, "1": "1F0 1X0"}}, "'1X0' is no action"),
        ({"orders": {**GOOD, "1": "1F0 1B0 1F1"}}, "1B1 is missing"),
        ({"orders": {**GOOD, "0": "0B0 0F0 0F1 0B1"}}, "0B0 comes before 0F0"),
        ({"orders": {**GOOD, "0": "0F0 0F1 0R0 0B0 0B1"}}, "has nothing to recompute"),
        ({"orders": {**GOOD, "0": "0F0 0SEND_F0 0F1 0B0 0B1"}}, "communicates on rank 0"),
        ({"layers_per_stage": [3, 5]}, "it was changed by hand"),
        ({"unit_tables": {}}, "unit_tables: for [] layers by stage, the plan has [4, 4]"),
        ({"unit_tables": [[{}] * 4, 7]}, "unit_tables: for [4, 0] layers by stage"),
        ({"unit_tables": [[{}] * 4, [{}] * 3]}, "unit_tables: for [4, 3] layers by stage"),
        ({"unit_tables": [[{}] * 4, [{}, {}, {}, {"norm": 1}]]}, "unit_tables: found {'norm': 1} on stage 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, changes, text):
    assert text in "\n".join(problems(edited(tmp_path, **changes)))


def test_all_that_is_wrong_is_named_at_once(tmp_path):
    found = problems(edited(tmp_path, num_microbatches=0, rank_of=[], recomputed_layers="none", orders=None))
    assert len(found) == 4


def test_a_plan_by_hand_needs_no_hash_and_one_that_is_right_is_taken(tmp_path):
    assert read_plan(edited(tmp_path, hash=None, layers_per_stage=[3, 5])).layers_per_stage == (3, 5)
    assert read_plan(edited(tmp_path, schedule=None)).schedule == "plan_file"


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '"text"', "null"])
def test_files_that_hold_no_plan(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert len(problems(path)) == 1


def test_no_file_a_folder_and_one_that_cannot_be_written(tmp_path):
    assert "no plan can be read" in problems(tmp_path / "missing.json")[0]
    assert "no plan can be read" in problems(tmp_path)[0]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_plan(tmp_path / "file" / "plan.json", plan_of("1f1b"))


def test_another_shape_is_refused(tmp_path):
    path = edited(tmp_path)
    cls = SCHEDULES.get("plan_file")
    with pytest.raises(ConfigError, match="for 2 ranks and 2 micro-batches, this run has 2 and 3"):
        cls(cls.Config(path=str(path)), shape=PipelineShape(2, 3))  # type: ignore[call-arg]
