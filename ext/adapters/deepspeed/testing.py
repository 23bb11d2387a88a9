"""Import this in test processes: DeepSpeed then neither compiles nor loads its shared-memory all-reduce.

The op serves inference only. Building it takes half a minute, loading it takes a lock, and a test rank that is
ended while it holds that lock would leave every later rank waiting.
"""

from __future__ import annotations

import deepspeed.ops
import deepspeed.pipe

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
