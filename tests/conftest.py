"""Shared by all tests: what the fork server of run_ranks imports once."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ext.testing.ranks import preload

preload("deepspeed", "deepspeed.pipe")
