#!/usr/bin/env bash
# Make the environment if needed, then run the checks: ruff, pyright, import contracts and tests.
#
#   run_scripts/test.sh                      the fast tests (minutes)
#   run_scripts/test.sh --all                the slow ones too; also with CI=true
#   run_scripts/test.sh tests/run_scripts    other arguments go to pytest
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

selection=(-m "not slow")
[ "${CI:-}" != true ] || selection=()
if [ "${1:-}" = --all ]; then
    selection=()
    shift
fi
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
ensure_environment
cd "$ROOT"

say "ruff"
ruff check .
ruff format --check .
say "pyright"
pyright
say "import contracts"
lint-imports
say "pytest"
python -m pytest "${selection[@]}" "$@"
