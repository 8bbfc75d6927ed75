#!/usr/bin/env bash
# GRPO on mathematics with Qwen3-4B: the same 8 GPUs train and generate in turns.
#
#   bash examples/launch/qwen3-4b.sh --model /models/Qwen3-4B --data /data/maths.jsonl [section.key=value ...]
#   bash examples/launch/qwen3-4b.sh --model /models/Qwen3-4B --dry-run
#
# Model      Qwen3-4B, 36 layers, bf16
# Data       JSON lines or parquet with prompt (chat messages) and label, scored by math-verify
# Hardware   1 node with 8 × H100-80
# Layout     8 Megatron ranks, dp 8; 8 engines of 1 GPU on the same GPUs (colocated), synchronous
# Memory     trainer 39 GiB, engine 8 GiB of weights and 38 GiB of KV cache, of 80 GiB per GPU (megatron-rl plan)
# Target     2 minutes a step of 64 × 8 samples, 300 steps in 10 hours (arithmetic from usual throughputs, not measured here)
# Watch      rollout/reward rises within 50 steps; train/log_prob_diff stays below 0.02
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/common.sh"
launch qwen3-4b.yaml "$@"
