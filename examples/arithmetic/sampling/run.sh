#!/usr/bin/env bash
# Plain and entropy-aware sampling on the arithmetic task, three seeds each; the table is in README.md beside this file.
#
#   bash examples/arithmetic/sampling/run.sh [DIRECTORY]      # default runs/sampling; finished runs are not repeated
#
# Model, task  those of examples/quickstart.sh, from the same supervised warm start; 24 steps of 64 prompts
# Hardware     2 CPU cores
# Duration     about 15 minutes
# Expected     README.md beside this file
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

directory=${1:-runs/sampling}
python=${VENV:-.venv}/bin/python
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

[ -n "${VENV:-}" ] || bash tools/setup_env.sh

# The same correction for all: it leaves the weights of plain samples at 1.
common=(data.prompts_per_step=64 run.num_steps=24 eval.interval=12 run.save_interval=0 objective.off_policy.mode=truncate
    objective.off_policy.high=2.0)
thresholds='thresholds: [0.3, 0.3]'

train() {
    local run=$1
    shift
    grep -qs '"status": "finished"' "$run/summary.json" || "$python" -m megatron_rl train "$@" run.directory="$run"
}

for seed in ${SEEDS:-1 2 3}; do
    base=$directory/seed$seed
    [ -d "$base/task" ] || "$python" examples/arithmetic/make_task.py "$base/task" --seed "$seed"
    train "$base/sft" examples/arithmetic/sft.yaml run.seed="$seed" model.path="$base/task/model" data.train="$base/task/supervised.jsonl"
    grpo=(examples/arithmetic/grpo.yaml run.seed="$seed" model.path="$base/sft/huggingface"
        data.train="$base/task/train.jsonl" eval.sets.greedy.data="$base/task/held_out.jsonl"
        eval.sets.sampled.data="$base/task/held_out.jsonl" "${common[@]}")
    train "$base/plain" "${grpo[@]}"
    train "$base/quadrants" "${grpo[@]}" rollout.sampling.entropy="{$thresholds}"
    train "$base/no_argmax" "${grpo[@]}" rollout.sampling.entropy="{$thresholds, quadrants: {argmax: {}}}"
done
"$python" examples/arithmetic/sampling/table.py "$directory"
