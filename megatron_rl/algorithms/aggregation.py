"""The one place where losses get their denominators.

Every term of the objective is sum_t w_t l_t. The weights carry mask and normalisation and come from counts over the whole
optimizer step, so the sum is additive over micro-batches and over data- and context-parallel ranks.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.objective import Aggregation
from megatron_rl.algorithms.sequences import Sequences


def token_weights(
    sequences: Sequences,
    *,
    aggregation: Aggregation,
    num_tokens: int,
    num_sequences: int,
    max_response_length: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Weights [T] of per-token losses, 0 where the mask is False.

    `num_tokens` N and `num_sequences` B count the trainable tokens, and the sequences with at least one, of the whole step:
    token_mean 1/N; sequence_mean_token_mean 1/(B n_i); sequence_mean_token_sum 1/B; sequence_mean_token_sum_norm 1/(B L);
    token_sum 1. The tokens of all sequences of a trajectory count as one sequence, of n_i tokens. A step without a trainable token has
    weights 0.

    Raises ValueError when L = `max_response_length` is needed and missing.
    """
    tokens = max(num_tokens, 1)
    rows = max(num_sequences, 1)
    if aggregation == "sequence_mean_token_mean":
        per_sequence = 1.0 / (rows * sequences.mean_divisor.to(dtype))
        return sequences.expand(per_sequence).masked_fill(sequences.excluded, 0.0)
    if aggregation == "sequence_mean_token_sum_norm" and max_response_length is None:
        raise ValueError(
            "Objective.aggregation sequence_mean_token_sum_norm has no max_response_length, needs the constant L in tokens; set it"
        )
    constants = {
        "token_mean": 1.0 / tokens,
        "sequence_mean_token_sum": 1.0 / rows,
        "sequence_mean_token_sum_norm": 1.0 / (rows * (max_response_length or 1)),
        "token_sum": 1.0,
    }
    return torch.full(sequences.mask.shape, constants[aggregation], dtype=dtype, device=sequences.mask.device).masked_fill_(
        sequences.excluded, 0.0
    )
