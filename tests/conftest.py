"""Shared by all tests: what the fork server of run_ranks imports once."""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("EXT_RUN_DIR", tempfile.mkdtemp(prefix="ext-tests-"))
# One place for compiled extensions, shared with no other environment: see run_scripts/setup_env.sh.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
# Extensions are built again whenever another release of ninja looks at them: always take this environment's.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))

from hypothesis import settings

from ext.testing.ranks import preload

preload("ext.adapters.deepspeed.testing")

# The same examples in every run: a change fails where it was made, not some days later.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")
