#!/usr/bin/env bash
# DAPO on mathematics with Qwen3-8B: 4 GPUs train on what 4 GPUs generated a step before.
#
#   bash examples/launch/qwen3-8b.sh --model /models/Qwen3-8B --data /data/maths.jsonl [section.key=value ...]
#   bash examples/launch/qwen3-8b.sh --model /models/Qwen3-8B --dry-run
#
# Model      Qwen3-8B, 36 layers, bf16
# Data       JSON lines or parquet with prompt (chat messages) and label, scored by math-verify
# Hardware   1 node with 8 × H100-80
# Layout     4 Megatron ranks, tp 2 × dp 2; 4 engines of 1 GPU (disaggregated), asynchronous with max_staleness 1
# Memory     trainer 53 GiB, engine 15 GiB of weights and 52 GiB of KV cache, of 80 GiB per GPU (megatron-rl plan)
# Target     5 minutes a step of 64 × 8 samples, 400 steps in 33 hours (arithmetic from usual throughputs, not measured here)
# Watch      rollout/reward rises within 50 steps; train/log_prob_diff stays below 0.02
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/common.sh"
launch qwen3-8b.yaml "$@"
