#!/usr/bin/env bash
# RL end to end on one machine, without a GPU or a download: GRPO teaches a tiny model which of two rules of addition is right.
#
#   bash examples/quickstart.sh [--seed N] [--dry-run] [section.key=value ...]
#
# Model      Qwen3 architecture, 0.7 M parameters, random weights made by code
# Task       12+39= -> 051, 500 problems held out; warm start on a teacher who mostly forgets to carry (examples/arithmetic/make_task.py)
# Parts      Megatron-Core (2 data-parallel ranks, gloo) trains, an SGLang server generates, Ray places the processes
# Hardware   2 CPU cores, 8 GiB of memory; where there are GPUs, up to three of them
# Duration   first call: set-up (2 minutes plus download) and then as a later call: 3 minutes
# Expected   held-out greedy accuracy from about 0.35 to above 0.9
#
# Arguments of the form section.key=value go to the GRPO run, for example run.num_steps=60 or training.optimizer.lr=1e-4.
# Everything that was started is stopped at the end, also after Ctrl-C.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

seed=1
dry_run=
overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --seed)
            [[ ${2:-} =~ ^[0-9]+$ ]] || { echo "quickstart: --seed got '${2:-}', needs a whole number, as in --seed 2" >&2; exit 2; }
            seed=$2
            shift
            ;;
        --seed=*) set -- --seed "${1#--seed=}" "${@:2}" && continue ;;
        --dry-run) dry_run=yes ;;
        -h | --help) usage && exit ;;
        *=*) overrides+=("$1") ;;
        *) echo "quickstart: '$1' is not known, needs --seed N, --dry-run or section.key=value (bash examples/quickstart.sh --help)" >&2; exit 2 ;;
    esac
    shift
done

num_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    fi
}

# Two ranks and an engine take three GPUs. Where there are fewer, one rank trains, and shares the only one with the engine.
sft_layout=() grpo_layout=()
case $(num_gpus) in
    1) sft_layout=(training.topology.num_ranks=1) grpo_layout=(training.topology.num_ranks=1 runtime.colocate=true) ;;
    2) sft_layout=(training.topology.num_ranks=1) grpo_layout=(training.topology.num_ranks=1) ;;
esac

directory=runs/quickstart/seed$seed-$(date +%Y%m%d-%H%M%S)
python=${VENV:-.venv}/bin/python
# torchvision's image decoder, which transformers imports and nothing here uses, does not load next to a CPU build of torch.
export PYTHONWARNINGS="ignore:Failed to load image Python extension:UserWarning${PYTHONWARNINGS:+,$PYTHONWARNINGS}"

# Runs a command in a process group of its own, so that an interruption is passed on once and the command can stop what it started.
child=
run() {
    if [ -n "$dry_run" ]; then
        printf '%s\n' "$(printf '%q ' "$@")"
        return
    fi
    local status=0
    set -m
    "$@" &
    child=$!
    set +m
    wait "$child" || status=$?
    child=
    return "$status"
}

stop_child() {
    [ -n "$child" ] || return 0
    printf '\nquickstart: stopping\n' >&2
    kill -INT "$child" 2>/dev/null || true
    for _ in $(seq 60); do
        kill -0 "$child" 2>/dev/null || return 0
        sleep 0.5
    done
    kill -KILL -- "-$child" 2>/dev/null || true
}
trap stop_child EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

phase() {
    [ -n "$dry_run" ] || printf '\n== %s\n' "$1"
}

timed_run() {
    local name=$1 begin=$EPOCHREALTIME milliseconds
    shift
    run "$@"
    milliseconds=$(((${EPOCHREALTIME/[.,]/} - ${begin/[.,]/}) / 1000)) # the decimal sign depends on the locale
    seconds+=(--seconds "$name=$((milliseconds / 1000)).$(printf '%03d' $((milliseconds % 1000)))")
}
seconds=()

phase "1/5 environment"
timed_run setup bash tools/setup_env.sh

phase "2/5 task and model in $directory"
timed_run task "$python" examples/arithmetic/make_task.py "$directory/task" --seed "$seed"

phase "3/5 supervised warm start"
timed_run sft "$python" -m megatron_rl train examples/arithmetic/sft.yaml \
    run.directory="$directory/sft" run.seed="$seed" model.path="$directory/task/model" data.train="$directory/task/supervised.jsonl" \
    "${sft_layout[@]}"

phase "4/5 GRPO"
timed_run grpo "$python" -m megatron_rl train examples/arithmetic/grpo.yaml \
    run.directory="$directory/grpo" run.seed="$seed" model.path="$directory/sft/huggingface" \
    data.train="$directory/task/train.jsonl" data.eval="$directory/task/held_out.jsonl" "${grpo_layout[@]}" "${overrides[@]}"

phase "5/5 result"
run "$python" examples/arithmetic/report.py "$directory" "${seconds[@]}"

[ -z "$dry_run" ] || exit 0
cat <<MESSAGE

curves      $directory/grpo/curves.png and $directory/grpo/report.html
checkpoint  $("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["checkpoint"])' "$directory/summary.json")
continue    $(printf %q "$python") -m megatron_rl train $(printf %q "$directory")/grpo/settings.yaml --resume run.num_steps=60
change      bash examples/quickstart.sh --seed $seed training.optimizer.lr=1e-4

$directory/summary.json
MESSAGE
