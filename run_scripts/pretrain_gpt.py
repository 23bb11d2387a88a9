"""Train a GPT on DeepSpeed with this package. See run_scripts/gpt/ for the parts, and --help for the options.
With ``--megatron PATH -- <Megatron flags>`` it runs an unmodified Megatron-LM instead; see run_scripts/gpt/megatron.py.

    deepspeed --num_accelerators 2 run_scripts/pretrain_gpt.py --config run_scripts/configs/gpt_small_pp2.json

Exit codes: 0 done, 1 failed, 3 wrong config or data, 128 + n stopped by signal n.
"""

from __future__ import annotations

import os
import sys
import time

from ext.core.errors import ConfigError, DataError, ExtError
from gpt import arguments, megatron
from gpt.check import check


def main() -> int:
    """Parse, check, hand over; an error of ours is one text on rank 0."""
    try:
        if megatron.is_asked(sys.argv[1:]):
            megatron.run(sys.argv[1:])
            return 0
        options = arguments.parse()
        ds_config, num_stages = check(options)
        if options.check:
            return 0
        from gpt.job import run  # imports torch and DeepSpeed, which the check must not wait for

        signum = run(options, ds_config, num_stages)
    except ExtError as error:
        return _fail(error)
    return 128 + signum if signum else 0


def _fail(error: ExtError) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # the launcher ends all ranks as soon as one has: let rank 0 speak first
    return 3 if isinstance(error, ConfigError | DataError) else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group that is still connected may abort the interpreter's own end
