#!/usr/bin/env bash
# Four ways to treat the entropy of the arithmetic policy, three seeds each; the picture and the table are in README.md beside this file.
#
#   bash examples/arithmetic/entropy/run.sh [DIRECTORY]       # default runs/entropy; finished runs are not repeated
#
# Model, task  those of examples/quickstart.sh, from the same supervised warm start
# Hardware     2 CPU cores
# Duration     about 12 minutes
# Expected     entropy falls without control and with clip-higher, falls less with a static bonus, and returns to the target with control
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

directory=${1:-runs/entropy}
python=${VENV:-.venv}/bin/python
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

bash tools/setup_env.sh

# Several optimizer steps on each batch, because a clip range acts only on what has moved since the batch was generated.
common=(data.prompts_per_step=64 run.num_steps=30 eval.interval=15 run.save_interval=0
    training.optimizer_steps_per_batch=4 training.optimizer.lr=1.0e-4 training.optimizer.min_lr=1.0e-4 objective.policy_loss.high=0.2)

train() {
    local run=$1
    shift
    grep -qs '"status": "finished"' "$run/summary.json" || "$python" -m megatron_rl train "$@" run.directory="$run"
}

for seed in 1 2 3; do
    base=$directory/seed$seed
    [ -d "$base/task" ] || "$python" examples/arithmetic/make_task.py "$base/task" --seed "$seed"
    train "$base/sft" examples/arithmetic/sft.yaml run.seed="$seed" model.path="$base/task/model" data.train="$base/task/supervised.jsonl"
    grpo=(examples/arithmetic/grpo.yaml run.seed="$seed" model.path="$base/sft/huggingface"
        data.train="$base/task/train.jsonl" eval.sets.greedy.data="$base/task/held_out.jsonl"
        eval.sets.sampled.data="$base/task/held_out.jsonl" "${common[@]}")
    train "$base/none" "${grpo[@]}"
    train "$base/clip_higher" "${grpo[@]}" objective.policy_loss.high=1.0
    train "$base/static" "${grpo[@]}" objective.entropy.coef=0.5
    train "$base/adaptive" "${grpo[@]}" objective.entropy.control.kind=trl objective.entropy.control.target=0.15 \
        objective.entropy.control.delta=0.02 objective.entropy.control.max=2.0
done
"$python" examples/arithmetic/entropy/plot.py "$directory"
