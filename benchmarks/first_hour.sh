#!/usr/bin/env bash
# Measure on a GPU what docs/scaling.md only estimates. Finished stages are not repeated.
#
#   benchmarks/first_hour.sh --trainer [STAGE ...]   torch >= 2.11 for CUDA and msgspec, without vLLM and DeepSpeed
#   benchmarks/first_hour.sh --full [STAGE ...]      a machine with the environment of `make install DEVICE=cuda`
#
# OUT (default: outputs/first-hour) gets a result for each stage. The last lines are all results.
# PYTHON changes the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT=${OUT:-outputs/first-hour}
mode=${1:-}
[ $# -gt 0 ] && shift
mkdir -p "$OUT"

if [ "$mode" = --trainer ]; then
    PYTHON=${PYTHON:-python3}
    # shellcheck disable=SC2046
    [ $# -gt 0 ] || set -- $("$PYTHON" -m benchmarks.first_hour)
    status=0
    for stage in "$@"; do
        [ -e "$OUT/$stage.jsonl" ] && echo "$stage: done before" && continue
        # A process for each stage, so that a stage that hangs or takes all the memory does not stop the others.
        if timeout 540 "$PYTHON" -m benchmarks.first_hour "$stage" >"$OUT/$stage.part"; then
            mv "$OUT/$stage.part" "$OUT/$stage.jsonl"
        else
            echo "$stage: failed, the same command runs it again" && status=1
        fi
    done
    tail -n +1 "$OUT"/*.jsonl
    exit $status
elif [ "$mode" != --full ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 2
fi

PYTHON=${PYTHON:-.venv/bin/python}
STEPS=${STEPS:-5}
gpus=$(nvidia-smi --query-gpu=uuid --format=csv,noheader 2>/dev/null)
first=$(head -n 1 <<<"$gpus")

run() { # NAME OVERRIDE...: a run, with the highest memory of the first GPU meanwhile
    local name=$1 watch
    shift
    nvidia-smi -i "$first" --query-gpu=memory.used --format=csv,noheader,nounits -l 1 >"$OUT/$name.memory" 2>/dev/null &
    watch=$!
    "$PYTHON" plan.py "$@" && "$PYTHON" train.py "$@" max_steps="$STEPS" output_dir="$OUT/runs" run_name="$name"
    local status=$?
    kill "$watch" 2>/dev/null
    return $status
}
one() { CUDA_VISIBLE_DEVICES=$first run "$@"; } # on one shared GPU, named by its UUID

install() { make install DEVICE="${DEVICE:-cuda}"; }
smi() { nvidia-smi && nvidia-smi -L && df -h /dev/shm; }
tests() { "$PYTHON" -m pytest -m gpu -n 0 -rs; }
tiny() { one tiny; }
moe() { one moe model=tiny-moe; }
small_adapter() { one small_adapter model=qwen3-0.6b env=gsm8k batch_size=64; }
small_all() { one small_all model=qwen3-0.6b env=gsm8k batch_size=64 adapter=none optim.learning_rate=1e-6; }
big_adapter() { one big_adapter model=qwen3-4b-instruct env=gsm8k batch_size=64 trainer.tokens_per_micro_batch=4096; }
big_merged() { one big_merged model=qwen3-4b-instruct env=gsm8k batch_size=64 trainer.tokens_per_micro_batch=4096 sync=shm; }
plain() { one plain model=qwen3-0.6b env=gsm8k batch_size=64 trainer.compile=false; }
generation() { CUDA_VISIBLE_DEVICES=$first "$PYTHON" -m benchmarks.sampling; }
two_gpus() { [ "$(wc -l <<<"$gpus")" -ge 2 ] && run two_gpus model=qwen3-0.6b env=gsm8k batch_size=64; }
shared_ipc() { one shared_ipc model=qwen3-0.6b env=gsm8k batch_size=64 adapter=none optim.learning_rate=1e-6 sync=ipc; }
two_ipc() { [ "$(wc -l <<<"$gpus")" -ge 2 ] && run two_ipc model=qwen3-0.6b env=gsm8k batch_size=64 sync=ipc; }
two_nccl() { [ "$(wc -l <<<"$gpus")" -ge 2 ] && run two_nccl model=qwen3-0.6b env=gsm8k batch_size=64 sync=nccl; }
two_ranks() { [ "$(wc -l <<<"$gpus")" -ge 3 ] && run two_ranks model=qwen3-0.6b env=gsm8k batch_size=64 trainer.ranks=2; }

stages=(install smi tests tiny moe small_adapter small_all big_adapter big_merged plain generation shared_ipc two_gpus two_ipc two_nccl two_ranks)
[ $# -gt 0 ] && wanted=("$@") || wanted=("${stages[@]}")
for stage in "${wanted[@]}"; do
    [ -e "$OUT/$stage.ok" ] && echo "$stage: done before" && continue
    echo "$stage: its output is in $OUT/$stage.log"
    if "$stage" >"$OUT/$stage.log" 2>&1; then touch "$OUT/$stage.ok"; else echo "$stage: failed"; fi
done
"$PYTHON" -m benchmarks.first_hour --table "$OUT" "${stages[@]}"
