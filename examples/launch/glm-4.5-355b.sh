#!/usr/bin/env bash
# DAPO on mathematics with GLM-4.5: 16 nodes train on what 8 nodes generated a step before.
#
#   bash examples/launch/glm-4.5-355b.sh --model /models/GLM-4.5 --data /data/maths.jsonl [section.key=value ...]
#   bash examples/launch/glm-4.5-355b.sh --model /models/GLM-4.5 --dry-run
#   sbatch --nodes=24 examples/launch/slurm.sbatch glm-4.5-355b.sh --model /models/GLM-4.5 --data /data/maths.jsonl
#
# Model      GLM-4.5, 355 B parameters of which 32 B are active, 92 layers, bf16
# Data       JSON lines or parquet with prompt (chat messages) and label, scored by math-verify
# Hardware   24 nodes with 8 × H200-141
# Layout     128 Megatron ranks, tp 4 × pp 4 × cp 2 × dp 4, ep 32; 8 engines of 8 GPUs (disaggregated), asynchronous with max_staleness 1
# Memory     trainer 63 GiB, engine 82 GiB of weights and 41 GiB of KV cache, of 140 GiB per GPU (megatron-rl plan)
# Target     6 minutes a step of 256 × 8 samples, 200 steps in 20 hours (arithmetic from usual throughputs, not measured here)
# Watch      rollout/reward rises within 50 steps; train/log_prob_diff stays below 0.02
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/common.sh"
launch glm-4.5-355b.yaml "$@"
