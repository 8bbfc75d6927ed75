#!/usr/bin/env bash
# RL of agents on one machine, without a GPU or a download: a tiny model learns to play an example well whose rules it knows.
#
#   bash examples/agents/run.sh shop|nim|pair|black_box|reasoning [--seed N] [--dry-run] [section.key=value ...]
#
# shop        a calculator and a store of prices as tools, in a process for each trajectory
# nim         a game whose state lasts from turn to turn, as an async environment
# pair        two agents, three proposals at the same time and a verifier of each, as an async function
# black_box   a program that imports nothing but openai
# reasoning   two datasets of reasoning-gym, which is installed here (a C compiler and Python's headers build it)
#
# Model      Qwen3 architecture, 0.3 M parameters, random weights made by code
# Task       made by examples/agents/make_task.py; warm start on a teacher who knows the rules and is mostly wrong
# Hardware   2 CPU cores, 8 GiB of memory
# Duration   first call: set-up (2 minutes plus download) and then as a later call: 3 to 5 minutes, black_box 24 (measured on busy cores)
# Expected   the reward rises to between 0.8 and 1 (examples/agents/README.md)
#
# Arguments of the form section.key=value go to the GRPO run, for example run.num_steps=60 or training.optimizer.lr=1e-4.
# Everything that was started is stopped at the end, also after Ctrl-C.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/steps.sh
read_options "$@"

name=${names[*]:-}
held_out=128
case $name in
    shop) own=(rollout.environment=examples.agents.shop:Shop) ;;
    nim) own=(rollout.environment=examples.agents.nim:Nim) ;;
    pair) own=("rollout.agent={function: examples.agents.pair:play}") ;;
    # Each trajectory starts a Python, which imports openai for a second.
    black_box) own=("rollout.agent={command: [$python, examples/agents/black_box.py]}" data.prompts_per_step=16 data.samples_per_prompt=4 eval.interval=12)
        held_out=64 ;;
    # One short answer a trajectory: steps take a second.
    reasoning) own=(reward.function=reasoning_gym run.num_steps=40 eval.interval=20) ;;
    *) fail "'$name' is no example, needs one of shop, nim, pair, black_box and reasoning (bash $0 --help)" ;;
esac

directory=runs/agents/$name-seed$seed-$(date +%Y%m%d-%H%M%S)

phase "1/4 environment"
timed_run setup bash tools/setup_env.sh
[ "$name" != reasoning ] || timed_run tasks "$python" -m pip install --quiet --constraint tools/requirements/constraints.txt reasoning-gym

phase "2/4 task and model in $directory"
timed_run task "$python" -m examples.agents.make_task "$name" "$directory/task" --seed "$seed" --held-out "$held_out"

phase "3/4 supervised warm start"
timed_run sft "$python" -m megatron_rl train examples/agents/sft.yaml \
    run.directory="$directory/sft" run.seed="$seed" model.path="$directory/task/model" data.train="$directory/task/supervised.jsonl" \
    "${sft_layout[@]}"

phase "4/4 GRPO"
timed_run grpo "$python" -m megatron_rl train examples/agents/grpo.yaml \
    run.directory="$directory/grpo" run.seed="$seed" model.path="$directory/sft/huggingface" \
    data.train="$directory/task/train.jsonl" eval.sets.greedy.data="$directory/task/held_out.jsonl" \
    eval.sets.sampled.data="$directory/task/held_out.jsonl" "${own[@]}" "${grpo_layout[@]}" "${overrides[@]}"

[ -z "$dry_run" ] || exit 0
cat <<MESSAGE

seconds     ${seconds[*]//--seconds/}
curves      $directory/grpo/curves.png and $directory/grpo/report.html
checkpoint  $directory/grpo/huggingface
MESSAGE
