"""DeepSpeed's batch arithmetic: train_batch_size = micro-batch x gradient accumulation x data parallel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ext.config.problems import Problem, shown

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
GAS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """The three numbers of a ds_config, in samples, samples and micro-batches; None where not given.

    Attributes:
        open: whether an "auto" leaves one of them to the program that calls DeepSpeed.
    """

    train: int | None
    micro: int | None
    gas: int | None
    open: bool = False

    def completed(self, data_parallel: int | None) -> Batch:
        """With what DeepSpeed computes from the numbers at hand; what it cannot know stays None."""
        train, micro, gas = self.train, self.micro, self.gas
        if self.open:
            return self
        if gas is None and (train is None) != (micro is None):
            gas = 1
        if data_parallel is not None:
            if train is None and micro is not None and gas is not None:
                train = micro * gas * data_parallel
            elif train is not None and gas is None and micro is not None:
                gas = train // (micro * data_parallel)
            elif train is not None and micro is None and gas is not None:
                micro = train // (gas * data_parallel)
        return Batch(train, micro, gas)


def read_batch(ds_config: dict[str, Any]) -> tuple[Batch, list[Problem]]:
    """The numbers of ``ds_config`` and what is wrong with each; a wrong one is left out, and so is "auto"."""
    problems = [
        Problem(key, f"found {shown(value)}; allowed: a whole number above 0.")
        for key in (TRAIN, MICRO, GAS)
        if (value := ds_config.get(key)) not in (None, "auto") and not _is_count(value)
    ]
    train, micro, gas = (value if _is_count(value := ds_config.get(key)) else None for key in (TRAIN, MICRO, GAS))
    return Batch(train, micro, gas, open="auto" in (ds_config.get(key) for key in (TRAIN, MICRO, GAS))), problems


def batch_problems(batch: Batch, data_parallel: int | None, layout: str) -> Iterator[Problem]:
    """What does not add up; ``layout`` says where ``data_parallel`` comes from, which may be unknown."""
    train = batch.train
    factors = {"micro-batch": batch.micro, "GAS": batch.gas, "dp": data_parallel}
    unknown = [name for name, number in factors.items() if number is None]
    step = math.prod(number for number in factors.values() if number is not None)
    if train is None or (train % step == 0 if unknown else train == step):
        return
    product = " x ".join(name if number is None else str(number) for name, number in factors.items())
    meaning = f"({MICRO} x {GAS} x data parallel{layout})"
    if not unknown:
        yield Problem(TRAIN, f"{train} != {product} = {step} {meaning}. {_fixes(batch, data_parallel, step)}")
        return
    legal = [n * step for n in (train // step, train // step + 1) if n]
    each = [f"{total} ({unknown[0]} {total // step})" if len(unknown) == 1 else str(total) for total in legal]
    yield Problem(
        TRAIN,
        f"{train} != {product} for any whole {' and '.join(unknown)} {meaning}. Nearest legal: {' and '.join(each)}.",
    )


def _fixes(batch: Batch, data_parallel: int | None, step: int) -> str:
    train, micro, gas = batch.train or 0, batch.micro or 1, batch.gas or 1
    fixes = [f"{TRAIN} to {step}"]
    for key, rest in ((GAS, micro * (data_parallel or 1)), (MICRO, gas * (data_parallel or 1))):
        if train % rest == 0:
            fixes.append(f"{key} to {train // rest}")
    return f"Set {' or '.join(fixes)}."


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
