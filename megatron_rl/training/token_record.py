"""Values of chosen sequences' tokens at the moment when they are trained on, for readers of the run.

Legend: N predictions of a micro-batch, T tokens of a shard.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import LossInputs
from megatron_rl.data.token_values import TOKEN_VALUES, TokenValues
from megatron_rl.system.device import to_device
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.types import Ints, Shard


class TokenRecord:
    """Collects the values of all trained tokens of the sequences `rows` of the whole batch, in `shard`."""

    def __init__(self, shard: Shard, rows: Collection[int]) -> None:
        self._chosen = np.repeat(np.isin(shard.rows, list(rows)), shard.batch.lengths)
        self._places = token_places(shard)
        self._parts: list[tuple[Ints, Tensor]] = []

    def add(self, micro_batch: MicroBatch, inputs: LossInputs, clipped: Tensor | None) -> None:
        """Keep the values of the chosen tokens among the predictions [N], on their device; `clipped` [N] if any can be."""
        index = np.flatnonzero(self._chosen[micro_batch.target_index])
        if not len(index):
            return
        assert inputs.log_probs is not None, "a step computes them"
        given = {name: clipped if name == "clipped" else getattr(inputs, name) for name in TOKEN_VALUES}
        place = to_device(index, inputs.log_probs.device)
        unknown = torch.full(place.shape, torch.nan, device=place.device)
        columns = [unknown if values is None else values.detach()[place].float() for values in given.values()]
        self._parts.append((micro_batch.target_index[index], torch.stack(columns)))

    def values(self) -> TokenValues:
        """Return the values kept so far."""
        tokens = np.concatenate([np.empty(0, np.int64), *(tokens for tokens, _ in self._parts)])
        values = torch.cat([torch.empty(len(TOKEN_VALUES), 0), *(values.cpu() for _, values in self._parts)], dim=1)
        rows, offsets = (places[tokens] for places in self._places)
        return TokenValues(rows, offsets, values.numpy())


def token_places(shard: Shard) -> tuple[Ints, Ints]:
    """Return the row in the whole batch of each token's sequence, and the token's place in it, both [T]."""
    lengths = shard.batch.lengths
    return np.repeat(shard.rows, lengths), np.arange(len(shard.batch.tokens)) - np.repeat(shard.batch.cu_seqlens[:-1], lengths)
