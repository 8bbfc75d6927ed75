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
source examples/steps.sh
read_options "$@"
[ ${#names[@]} -eq 0 ] || fail "'${names[0]}' is not known, needs --seed N, --dry-run or section.key=value (bash examples/quickstart.sh --help)"

directory=runs/quickstart/seed$seed-$(date +%Y%m%d-%H%M%S)

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
    data.train="$directory/task/train.jsonl" eval.sets.greedy.data="$directory/task/held_out.jsonl" \
    eval.sets.sampled.data="$directory/task/held_out.jsonl" "${grpo_layout[@]}" "${overrides[@]}"

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
