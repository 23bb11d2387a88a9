"""Learning rate over a run: linear warmup, then a cosine down to a share of the peak."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class WarmupCosine:
    """Factor of the peak learning rate as a function of the step alone, which makes a resumed run exact."""

    warmup_steps: int
    num_steps: int
    floor: float = 0.1

    def __call__(self, step: int) -> float:
        """Factor in (0, 1] for the step that follows `step` finished ones."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """What `initialize(lr_scheduler=...)` takes; the peak is the optimizer's own learning rate."""
        # A plain function, for LambdaLR would save and restore the fields of an object: new arguments shall win.
        return LambdaLR(optimizer, lambda step: self(step))
