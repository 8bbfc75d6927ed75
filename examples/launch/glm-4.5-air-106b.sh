#!/usr/bin/env bash
# DAPO on mathematics with GLM-4.5-Air: 4 nodes train on what 4 nodes generated a step before.
#
#   bash examples/launch/glm-4.5-air-106b.sh --model /models/GLM-4.5-Air --data /data/maths.jsonl [section.key=value ...]
#   bash examples/launch/glm-4.5-air-106b.sh --model /models/GLM-4.5-Air --dry-run
#   sbatch --nodes=8 examples/launch/slurm.sbatch glm-4.5-air-106b.sh --model /models/GLM-4.5-Air --data /data/maths.jsonl
#
# Model      GLM-4.5-Air, 106 B parameters of which 12 B are active, 46 layers, bf16
# Data       JSON lines or parquet with prompt (chat messages) and label, scored by math-verify
# Hardware   8 nodes with 8 × H200-141
# Layout     32 Megatron ranks, tp 2 × pp 2 × cp 2 × dp 4, ep 16; 4 engines of 8 GPUs (disaggregated), asynchronous with max_staleness 1
# Memory     trainer 77 GiB, engine 25 GiB of weights and 94 GiB of KV cache, of 140 GiB per GPU (megatron-rl plan)
# Target     5 minutes a step of 128 × 8 samples, 300 steps in 25 hours (arithmetic from usual throughputs, not measured here)
# Watch      rollout/reward rises within 50 steps; train/log_prob_diff stays below 0.02
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/common.sh"
launch glm-4.5-air-106b.yaml "$@"
