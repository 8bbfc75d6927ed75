"""A micro-batch on disk, to replay a non-finite loss or gradient offline."""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from megatron_rl.system.files import write_atomic
from megatron_rl.training.advantages import TokenData
from megatron_rl.training.micro_batch import MicroBatch

_OF_TOKENS = (
    "advantages", "rollout_log_probs", "old_log_probs", "current_share", "ref_log_probs", "teacher_log_probs", "old_values", "returns",
)  # fmt: skip


def dump_micro_batch(path: Path, micro_batch: MicroBatch, data: TokenData, *, loss: float, grad_norm: float, temperature: float) -> None:
    """Write tokens, experts, candidates and inputs of the loss [N] to `path`.safetensors and `path`.json. Raises UserError on failure."""
    index = micro_batch.target_index
    tensors = {
        "input_ids": micro_batch.input_ids[0],
        "position_ids": micro_batch.position_ids[0],
        "cu_seqlens_padded": micro_batch.packed.cu_seqlens_q_padded,
        **{name: getattr(micro_batch, name) for name in ("positions", "targets", "sequence_index")},
    }
    arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    arrays |= {name: values[index] for name in _OF_TOKENS if (values := getattr(data, name)) is not None}
    routed = micro_batch.routed
    if routed.experts is not None and routed.recorded is not None:
        arrays |= {"routed_experts": routed.experts.transpose(0, 1).numpy(), "routed": routed.recorded.cpu().numpy()}
    if micro_batch.candidates is not None:
        arrays |= {
            "candidates": micro_batch.candidates.columns.cpu().numpy(),
            "candidate_counts": micro_batch.candidates.counts.cpu().numpy(),
        }
    about = {"loss": _number(loss), "grad_norm": _number(grad_norm), "temperature": temperature, "rows": micro_batch.rows.tolist()}
    write_atomic(path.with_name(path.name + ".safetensors"), save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
    write_atomic(path.with_name(path.name + ".json"), json.dumps(about, indent=2))


def _number(value: float) -> float | str:
    """Return `value`, or its name for JSON, which has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)
