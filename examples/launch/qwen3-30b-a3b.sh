#!/usr/bin/env bash
# GSPO on mathematics with Qwen3-30B-A3B: two nodes train and generate in turns.
#
#   bash examples/launch/qwen3-30b-a3b.sh --model /models/Qwen3-30B-A3B --data /data/maths.jsonl [section.key=value ...]
#   bash examples/launch/qwen3-30b-a3b.sh --model /models/Qwen3-30B-A3B --dry-run
#   sbatch --nodes=2 examples/launch/slurm.sbatch qwen3-30b-a3b.sh --model /models/Qwen3-30B-A3B --data /data/maths.jsonl
#
# Model      Qwen3-30B-A3B, 48 layers, 128 experts of which 8 are used, bf16
# Data       JSON lines or parquet with prompt (chat messages) and label, scored by math-verify
# Hardware   2 nodes with 8 × H100-80
# Layout     16 Megatron ranks, tp 2 × dp 8, ep 8; 4 engines of 4 GPUs on the same GPUs (colocated), synchronous
# Memory     trainer 57 GiB, engine 14 GiB of weights and 31 GiB of KV cache, of 80 GiB per GPU (megatron-rl plan)
# Target     4 minutes a step of 128 × 8 samples, 300 steps in 20 hours (arithmetic from usual throughputs, not measured here)
# Watch      rollout/reward rises within 50 steps; train/log_prob_diff stays below 0.02
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/common.sh"
launch qwen3-30b-a3b.yaml "$@"
