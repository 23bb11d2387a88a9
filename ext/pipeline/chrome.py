"""Traces as files that Chrome's about:tracing and Perfetto (ui.perfetto.dev) open.

The JSON Object Format of the Trace Event Format: complete events ("ph": "X") with times in microseconds, one thread,
and so one row, per pipeline rank. Simulated and measured files have the same form.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ext.core.errors import DataError
from ext.pipeline.plan import Plan, parse_orders, parse_tables
from ext.pipeline.trace import IDLE, LOAD, NAMES, OPTIMIZER, Span, StepTrace

_COMMUNICATION = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
_US = 1e6
_ROUNDING_US = 2e-3
_MAX_PROBLEMS = 20


@dataclass(frozen=True)
class TraceFile:
    """What a file holds.

    Attributes:
        source: "measured" or "simulated".
        plan: what ran.
        steps: at least one.
    """

    source: str
    plan: Plan
    steps: tuple[StepTrace, ...]

    @property
    def pipeline_time(self) -> float:
        """Seconds, mean over the steps."""
        return math.fsum(trace.pipeline_time for trace in self.steps) / len(self.steps)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Share of the pipeline time in which a rank does not compute, by rank, mean over the steps."""
        by_rank = zip(*(trace.bubbles for trace in self.steps), strict=True)
        return tuple(math.fsum(shares) / len(self.steps) for shares in by_rank)

    def to_json(self) -> dict[str, Any]:
        """As Chrome and Perfetto read it; times count from the first span."""
        origin = min(span.start for trace in self.steps for row in trace.rows for span in row)
        events = [*self._metadata()]
        for trace in self.steps:
            for rank, row in enumerate(trace.rows):
                events += [_event(span, rank, trace.step, origin) for span in row]
        plan = self.plan
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "source": self.source,
                "schedule": plan.schedule,
                "plan_hash": plan.hash,
                "num_microbatches": plan.num_microbatches,
                "rank_of": list(plan.rank_of),
                "layers_per_stage": list(plan.layers_per_stage),
                "recomputed_layers": list(plan.recomputed_layers),
                "orders": plan.to_text(),
                **({"unit_tables": plan.tables_json()} if plan.unit_tables else {}),
            },
        }

    def write(self, path: Path) -> None:
        """Write the file whole: a reader sees the old one or the new one.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(self.to_json()))
        part.replace(path)

    def _metadata(self) -> Iterator[dict[str, Any]]:
        title = f"{self.source}: {self.plan.schedule}"
        yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": title}}
        for rank in range(self.plan.num_ranks):
            stages = self.plan.stages_of(rank)
            name = ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}}


def read_trace(path: Path) -> TraceFile:
    """Read a file that `TraceFile.write` made.

    Raises:
        DataError: it cannot be read or is no such file; says what is wrong with it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}. Give a file that a run or `trace simulate` wrote.") from error
    problems = trace_problems(content)
    if problems:
        raise DataError(f"{path} is no trace of this package:\n" + "\n".join(f"  {problem}" for problem in problems))
    return _parse(content)


def trace_problems(content: Any) -> list[str]:
    """What is wrong with the JSON of a trace: the Trace Event Format first, then what this package adds to it.

    Checked are the fields of all events and their types; that spans of a row follow or contain one another, as Chrome
    draws them; that there is one row per rank of the plan; and that step, stage and micro-batch of all spans exist.
    """
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        return ["expected an object with a list 'traceEvents'."]
    problems = list(_wrong_events(content["traceEvents"]))
    plan = None
    try:
        plan = _plan_of(content.get("otherData"))
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"otherData: does not describe a plan: {type(error).__name__} {error}.")
    if not problems and plan is not None:
        problems += _wrong_rows(content["traceEvents"], plan)
    return problems[:_MAX_PROBLEMS]


def _event(span: Span, rank: int, step: int, origin: float) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": step, "stage": span.stage}
    if span.microbatch >= 0:
        arguments["microbatch"] = span.microbatch
    if span.inline:
        arguments["inline"] = True
    return {
        "ph": "X",
        "name": span.name,
        "cat": _category(span.name),
        "pid": 0,
        "tid": rank,
        "ts": round((span.start - origin) * _US, 3),
        "dur": round(span.duration * _US, 3),
        "args": arguments,
    }


def _category(name: str) -> str:
    if name == IDLE:
        return "idle"
    if name in _COMMUNICATION:
        return "communication"
    return {"R": "recompute", LOAD: "data", OPTIMIZER: "optimizer"}.get(name, "compute")


def _wrong_events(events: Sequence[Any]) -> Iterator[str]:
    fields: dict[str, dict[str, Any]] = {
        "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float), "args": dict},
        "M": {"name": str, "pid": int, "tid": int, "args": dict},
    }
    for index, event in enumerate(events):
        phase = event.get("ph") if isinstance(event, dict) else None
        if not isinstance(phase, str) or phase not in fields:
            yield f"traceEvents[{index}]: expected an object with 'ph' of 'X' or 'M', found {str(event)[:60]}."
            continue
        for name, kind in fields[phase].items():
            value = event.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                yield f"traceEvents[{index}].{name}: found {str(value)[:60]}."
            elif isinstance(value, (int, float)) and not 0 <= value < math.inf:
                yield f"traceEvents[{index}].{name}: found {value}; expected a finite number, 0 or more."


def _wrong_rows(events: Sequence[Mapping[str, Any]], plan: Plan) -> Iterator[str]:
    named = {event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    if named != set(range(plan.num_ranks)):
        yield f"thread_name: names rows {sorted(named)}, the plan has ranks 0 to {plan.num_ranks - 1}."
    rows: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for index, event in enumerate(events):
        if event["ph"] == "X":
            rows[event["tid"]].append(event)
            yield from (f"traceEvents[{index}] {event['name']}: {text}" for text in _wrong_span(event, plan))
    if not rows:
        yield "traceEvents: there is no span."
    for rank, row in rows.items():
        yield from _crossing(rank, row)


def _wrong_span(event: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    name, arguments = event["name"], event["args"]
    if name not in NAMES:
        yield f"unknown name; known: {', '.join(sorted(NAMES))}."
        return
    limits = {"step": None, "stage": plan.num_stages, "microbatch": plan.num_microbatches}
    if name == OPTIMIZER or (name == IDLE and "microbatch" not in arguments):
        del limits["microbatch"]
    for key, limit in limits.items():
        value = arguments.get(key)
        if type(value) is not int or value < 0 or (limit is not None and value >= limit):
            yield f"args.{key}: found {value}; expected a whole number" + ("." if limit is None else f" below {limit}.")
            return
    if plan.rank_of[arguments["stage"]] != event["tid"]:
        yield f"stage {arguments['stage']} is on rank {plan.rank_of[arguments['stage']]}, found in row {event['tid']}."


def _crossing(rank: int, row: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Spans that overlap without one containing the other, which no row can show."""
    open_until: list[float] = []
    for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start + _ROUNDING_US:
            open_until.pop()
        if open_until and end > open_until[-1] + _ROUNDING_US:
            yield f"row {rank}: {event['name']} at {start} us overlaps the end of what it starts in."
            return
        open_until.append(end)


def _plan_of(data: Any) -> Plan:
    plan = Plan(
        schedule=str(data["schedule"]),
        num_microbatches=int(data["num_microbatches"]),
        rank_of=tuple(map(int, data["rank_of"])),
        orders=parse_orders(data["orders"]),
        layers_per_stage=tuple(map(int, data["layers_per_stage"])),
        recomputed_layers=tuple(map(int, data["recomputed_layers"])),
        unit_tables=parse_tables(data.get("unit_tables", ())),
    )
    if data["source"] not in ("measured", "simulated"):
        raise ValueError(f"source is {data['source']!r}, expected 'measured' or 'simulated'")
    if plan.hash != data["plan_hash"]:
        raise ValueError(f"plan_hash is {data['plan_hash']!r}, the plan's is {plan.hash}")
    return plan


def _parse(content: Mapping[str, Any]) -> TraceFile:
    plan = _plan_of(content["otherData"])
    steps: dict[int, list[list[Span]]] = {}
    for event in content["traceEvents"]:
        if event["ph"] != "X":
            continue
        arguments, start = event["args"], event["ts"] / _US
        rows = steps.setdefault(arguments["step"], [[] for _ in range(plan.num_ranks)])
        microbatch, inline = arguments.get("microbatch", -1), bool(arguments.get("inline"))
        end = start + event["dur"] / _US
        rows[event["tid"]].append(Span(event["name"], arguments["stage"], microbatch, start, end, inline))
    traces = [StepTrace(step, tuple(map(tuple, rows))) for step, rows in sorted(steps.items())]
    return TraceFile(content["otherData"]["source"], plan, tuple(traces))
