#!/usr/bin/env bash
# Make the environment if needed, then train a GPT on NUM_RANKS ranks of this machine (default: 2).
#
#   run_scripts/pretrain_gpt.sh
#   NUM_RANKS=4 run_scripts/pretrain_gpt.sh --config my_ds_config.json --steps 1000
#
# All arguments go to pretrain_gpt.py; see --help. GPUs are used where there is one for each rank.
# MASTER_PORT is a free port unless set; PYTHON and TORCH are explained in setup_env.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

NUM_RANKS="${NUM_RANKS:-2}"
case "$NUM_RANKS" in
    ''|*[!0-9]*|0) say "NUM_RANKS is '$NUM_RANKS'; allowed is a whole number above 0"; exit 3 ;;
esac

if [ -z "${DS_ACCELERATOR:-}" ]; then
    num_gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU' || true)
    if [ "$num_gpus" -lt "$NUM_RANKS" ]; then
        export DS_ACCELERATOR=cpu
        [ "$num_gpus" -eq 0 ] || say "$num_gpus GPU(s) for $NUM_RANKS ranks: running on CPU; set NUM_RANKS=$num_gpus for GPUs"
    fi
fi
[ "${DS_ACCELERATOR:-}" != cpu ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

ensure_environment
program="$ROOT/run_scripts/pretrain_gpt.py"

# One clear error before any rank starts; it also answers --help.
python "$program" --check --world-size "$NUM_RANKS" "$@" || exit $?
for argument; do
    case "$argument" in -h|--help|--check) exit 0 ;; esac
done

# Below the range from which the system hands out ports: else another program may have it before rank 0 listens.
free_port() {
    python - <<'END'
import random, socket

while True:
    port = random.randrange(20000, 32000)
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            print(port)
            break
END
}
MASTER_PORT="${MASTER_PORT:-$(free_port)}"
deepspeed --log_level error --num_accelerators "$NUM_RANKS" --master_port "$MASTER_PORT" "$program" "$@" &
launcher=$!

# Ctrl-C reaches the ranks by itself; they finish their step. SIGTERM is passed on to what started them.
signal=0
trap 'signal=2' INT
trap 'signal=15; kill -TERM $(cat /proc/$launcher/task/$launcher/children) 2>/dev/null || true' TERM
code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do
    code=0
    wait "$launcher" || code=$?
done
# DeepSpeed's CPU communication leaves a buffer per rank in memory for ever.
rm -f "/dev/shm/deepspeed_allreduce_buffer_"*"_${MASTER_PORT}_"*
[ "$signal" -eq 0 ] || code=$((128 + signal))
exit "$code"
