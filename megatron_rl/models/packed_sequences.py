"""One micro-batch of packed sequences, as received by the layers of the model.

Legend: T tokens on this rank. The plan travels with the micro-batch, so index arrays and rotary
angles are made once, not once per layer. The index arrays are made at the first request of a torch
layer; Transformer Engine's layers never ask. The lengths are made for longrope alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.data.packing import local_positions
from megatron_rl.models.attention.attention_plan import AttentionPlan, check_splits, plan_attention, with_window
from megatron_rl.models.attention.rotary import RotarySpec
from megatron_rl.models.experts.routed_tokens import Routing
from megatron_rl.system.device import to_device


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's packed sequence parameters with this project's attention plan.

    `positions` [T] are the positions of local tokens in their sequences; `make_lengths` gives the
    tokens of each token's sequence [T]. `logit_positions` [N], when given, are the local tokens for
    the language model head; None runs the head on all tokens. `routing` is for the routers of a
    mixture of experts.
    """

    positions: Tensor = field(kw_only=True)
    make_lengths: Callable[[], Tensor] = field(kw_only=True, repr=False)
    make_plan: Callable[[], AttentionPlan] = field(kw_only=True, repr=False)
    logit_positions: Tensor | None = field(default=None, kw_only=True)
    routing: Routing | None = field(default=None, kw_only=True)
    _angles: dict[tuple[RotarySpec, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict, kw_only=True, repr=False)
    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict, kw_only=True, repr=False)

    @property
    def plan(self) -> AttentionPlan:
        """The index plan of this micro-batch on this rank; made once."""
        if None not in self._plans:
            self._plans[None] = self.make_plan()
        return self._plans[None]

    def angles(self, rotary: RotarySpec, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, D / 2] for D channels, times the attention factor."""
        key = (rotary, dtype)
        if key not in self._angles:
            angle = rotary.angles(self.positions, self.make_lengths)[:, None, :]
            factor = rotary.attention_factor
            self._angles[key] = ((angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype))
        return self._angles[key]

    def windowed(self, window: int) -> AttentionPlan:
        """Return the plan for queries of the last `window` tokens; made once."""
        if window not in self._plans:
            self._plans[window] = with_window(self.plan, window)
        return self._plans[window]


def packed_sequences(
    cu_seqlens: NDArray[np.integer[Any]],
    *,
    lengths: NDArray[np.integer[Any]] | None = None,
    device: torch.device | str = "cpu",
    cp_size: int = 1,
    cp_rank: int = 0,
) -> PackedSequences:
    """Describe one micro-batch to the model.

    `cu_seqlens` [sequences + 1] are the offsets of whole sequences, padding included, before
    context parallelism. Every input token belongs to a sequence. `lengths` [sequences] are the
    tokens of each sequence without padding, None for no padding. Raises ValueError for lengths not
    divisible by context parallelism, and for an input without a token. megatron-core's layers need
    a token, so a rank without sequences runs on padding.
    """
    offsets = np.asarray(cu_seqlens, np.int64)
    if offsets[-1] < 1:
        raise ValueError("a micro-batch has no tokens, the model needs at least one; give it a sequence of padding")
    check_splits(offsets, cp_size=cp_size)
    padded = np.diff(offsets)
    tensor = to_device(offsets.astype(np.int32), device)

    def make_lengths() -> Tensor:
        return to_device(np.repeat(padded if lengths is None else np.asarray(lengths, np.int64), padded // cp_size), device)

    longest = int(padded.max(initial=0))
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=tensor,
        cu_seqlens_kv=tensor,
        cu_seqlens_q_padded=tensor,
        cu_seqlens_kv_padded=tensor,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=to_device(local_positions(padded, cp_size=cp_size, cp_rank=cp_rank), device),
        make_lengths=make_lengths,
        make_plan=partial(plan_attention, offsets, cp_size=cp_size, cp_rank=cp_rank, device=device),
    )
