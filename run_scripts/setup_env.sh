# Sourced by pretrain_gpt.sh and test.sh: makes .venv at the root of the repository, or reuses it.
#
# PYTHON  the interpreter to make it with (default: python3)
# TORCH   what pip installs as torch (default: torch==2.13.0, the release the package is tested with)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="${PYTHON:-python3}"
TORCH="${TORCH:-torch==2.13.0}"
export TORCH_EXTENSIONS_DIR="$VENV/torch_extensions"
export PATH="$VENV/bin:$PATH"

say() { printf '[%s] %s\n' "$(basename "$0")" "$*" >&2; }

# Whatever must be installed anew when it changes. The interpreter is that of the environment once there is one.
environment_stamp() {
    local python="$VENV/bin/python"
    [ -x "$python" ] || python="$PYTHON"
    { "$python" -VV; echo "$TORCH"; cat "$ROOT/setup.py"; } | sha256sum | cut -d' ' -f1
}

install_environment() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        say "$PYTHON is $("$PYTHON" --version 2>&1), needed is Python 3.10 or newer: set PYTHON=/path/to/python3"
        exit 3
    }
    # An install that was interrupted may have left an environment without a working pip.
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making the environment $VENV"
        "$PYTHON" -m venv --clear "$VENV"
    fi
    say "installing $TORCH and the package with its dependencies; a few minutes the first time"
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "$TORCH"
    # Naming torch again keeps pip from replacing it for a dependency's sake.
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check \
        "$TORCH" --editable "$ROOT[megatron,plot,tokenizers,monitor,test]"
    environment_stamp > "$VENV/.installed"
}

ensure_environment() {
    mkdir -p "$ROOT/.venv"
    # One install at a time; the lock goes with the process that holds it.
    exec 9> "$VENV/.lock"
    if ! flock --nonblock 9; then
        say "waiting for another run that is installing the environment"
        flock 9
    fi
    if [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$(environment_stamp)" ]; then
        install_environment
    fi
    "$VENV/bin/python" "$ROOT/run_scripts/build_extensions.py"
    exec 9>&-
}
