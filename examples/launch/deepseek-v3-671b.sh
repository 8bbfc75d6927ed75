#!/usr/bin/env bash
# GRPO on mathematics with DeepSeek-V3: 32 nodes train, then 8 nodes generate.
#
#   bash examples/launch/deepseek-v3-671b.sh --model /models/DeepSeek-V3-bf16 --data /data/maths.jsonl [section.key=value ...]
#   bash examples/launch/deepseek-v3-671b.sh --model /models/DeepSeek-V3-bf16 --dry-run
#   sbatch --nodes=40 examples/launch/slurm.sbatch deepseek-v3-671b.sh --model /models/DeepSeek-V3-bf16 --data /data/maths.jsonl
#
# Model      DeepSeek-V3, 671 B parameters of which 37 B are active, 61 layers; the released fp8 weights converted to bf16
# Data       JSON lines or parquet with prompt (chat messages) and label, scored by math-verify
# Hardware   40 nodes with 8 × B200-192
# Layout     256 Megatron ranks, tp 4 × pp 8 × dp 8, ep 32; 8 engines of 8 GPUs (disaggregated), synchronous
# Memory     trainer 65 GiB, engine 156 GiB of weights and 8 GiB of KV cache, of 179 GiB per GPU (megatron-rl plan)
# Target     12 minutes a step of 256 × 8 samples of 3,000 tokens, 40 at a time in an engine's cache; 200 steps in 40 hours (not measured)
# Watch      rollout/reward rises within 50 steps; train/log_prob_diff stays below 0.02
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/common.sh"
launch deepseek-v3-671b.yaml "$@"
