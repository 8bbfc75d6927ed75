#!/usr/bin/env bash
# GSPO on mathematics with Qwen3-235B-A22B: 8 nodes train on what 8 nodes generated up to two steps before.
#
#   bash examples/launch/qwen3-235b-a22b.sh --model /models/Qwen3-235B-A22B --data /data/maths.jsonl [section.key=value ...]
#   bash examples/launch/qwen3-235b-a22b.sh --model /models/Qwen3-235B-A22B --dry-run
#   sbatch --nodes=16 examples/launch/slurm.sbatch qwen3-235b-a22b.sh --model /models/Qwen3-235B-A22B --data /data/maths.jsonl
#
# Model      Qwen3-235B-A22B, 94 layers, 128 experts of which 8 are used, bf16
# Data       JSON lines or parquet with prompt (chat messages) and label, scored by math-verify
# Hardware   16 nodes with 8 × H200-141
# Layout     64 Megatron ranks, tp 4 × pp 4 × cp 2 × dp 2, ep 16; 8 engines of 8 GPUs (disaggregated), asynchronous with max_staleness 2
# Memory     trainer 74 GiB, engine 55 GiB of weights and 69 GiB of KV cache, of 140 GiB per GPU (megatron-rl plan)
# Target     7 minutes a step of 256 × 8 samples, 200 steps in 23 hours (arithmetic from usual throughputs, not measured here)
# Watch      rollout/reward rises within 50 steps; train/log_prob_diff stays below 0.02
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/common.sh"
launch qwen3-235b-a22b.yaml "$@"
