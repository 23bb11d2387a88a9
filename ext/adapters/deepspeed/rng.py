"""DeepSpeed's named RNG streams, for tensor-parallel dropout."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing


class DeepSpeedRngTracker:
    """Captures and restores the streams of ``deepspeed.checkpointing.get_cuda_rng_tracker()``."""

    def capture(self) -> Any:
        return checkpointing.get_cuda_rng_tracker().get_states()

    def restore(self, state: Any) -> None:
        checkpointing.get_cuda_rng_tracker().set_states(state)
