"""Attention over packed sequences on plain torch, for any context parallel size.

Legend: T tokens on this rank, H query heads, G key-value heads, D channels of a query or key head, E of a value head; S, L, C as in
`attention_plan`.
The plan travels with the micro-batch, so index arrays and rotary angles are made once, not once per layer.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.models.attention_plan import AttentionPlan, Bucket, Part, plan_attention, with_window
from megatron_rl.models.rotary import RotarySpec, rotate
from megatron_rl.models.routed_tokens import Routing

# Up to this many keys two batched matrix products and a softmax beat the fused CPU kernel, whose backward is slow on tiny tiles.
_SHORT_KEYS = 64


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's packed sequence parameters with this project's attention plan.

    `plan` is the index plan of this micro-batch on this rank. `logit_positions` [N], when given, are the local tokens at which the
    language model head runs; None runs it on all. `routing` is for the routers of a mixture of experts.
    """

    plan: AttentionPlan = field(kw_only=True)
    logit_positions: Tensor | None = field(default=None, kw_only=True)
    routing: Routing | None = field(default=None, kw_only=True)
    _angles: dict[tuple[RotarySpec, int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict, kw_only=True, repr=False)
    _windowed: dict[int, AttentionPlan] = field(default_factory=dict, kw_only=True, repr=False)

    def angles(self, rotary: RotarySpec, *, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each local token's angles for `dim` rotated channels, each [T, 1, dim / 2]; computed once.

        Both carry the rotary embedding's attention factor.
        """
        key = (rotary, dim, dtype)
        if key not in self._angles:
            frequencies = rotary.inverse_frequencies(dim).to(self.plan.positions.device)
            angle = (self.plan.positions.float()[:, None] * frequencies)[:, None, :]
            factor = rotary.attention_factor
            self._angles[key] = ((angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype))
        return self._angles[key]

    def windowed(self, window: int) -> AttentionPlan:
        """The plan in which each query sees the last `window` tokens of its sequence only, itself included; made once."""
        if window not in self._windowed:
            self._windowed[window] = with_window(self.plan, window)
        return self._windowed[window]

    def at(self, positions: Tensor) -> "PackedSequences":
        """The same sequences, with the language model head run at the local tokens `positions` [N] only."""
        return dataclasses.replace(self, logit_positions=positions)

    def routed(self, routing: Routing | None) -> "PackedSequences":
        """The same sequences, for a pass whose routers are told `routing`."""
        return dataclasses.replace(self, routing=routing)


def packed_sequences(
    cu_seqlens: NDArray[np.integer[Any]], *, device: torch.device | str = "cpu", cp_size: int = 1, cp_rank: int = 0
) -> PackedSequences:
    """Describe one micro-batch to the model.

    `cu_seqlens` [sequences + 1] are the offsets of whole sequences, padding included, before context parallelism; every token
    of the input belongs to one of them. Raises ValueError for lengths that context parallelism cannot split, and when there is
    no token: megatron-core's layers cannot run on none, so a rank without sequences runs on padding.
    """
    offsets = np.asarray(cu_seqlens, np.int64)
    if offsets[-1] < 1:
        raise ValueError("a micro-batch has no tokens, the model needs at least one; give it a sequence of padding")
    tensor = torch.from_numpy(offsets.astype(np.int32)).to(device)
    longest = int(np.diff(offsets).max(initial=0))
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=tensor,
        cu_seqlens_kv=tensor,
        cu_seqlens_q_padded=tensor,
        cu_seqlens_kv_padded=tensor,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=plan_attention(offsets, cp_size=cp_size, cp_rank=cp_rank, device=device),
    )


class PackedAttention(MegatronModule):
    """Core attention of a layer: causal, grouped queries, packed sequences, rotary embedding included.

    Latent attention, which says how many channels keys have (`k_channels`), rotates a part of them itself before. `rotary`, `rotary_dim`
    and `window` are set by the model's builder, because megatron-core passes no more than its own config to this class: the embedding,
    how many channels of a head it rotates, and how many tokens a query of this layer sees, None for all before it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type is AttnMaskType.causal and attention_type == "self", "only causal self-attention is built"
        assert pg_collection is not None, "megatron-core passes the process groups"
        self.layer_number = layer_number
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp
        self.rotates = k_channels is None
        self.rotary: RotarySpec | None = None
        self.rotary_dim = 0
        self.window: int | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each packed sequence: query [T, H, D], key [T, G, D] and value [T, G, E] to [T, H E]."""
        assert isinstance(packed_seq_params, PackedSequences), "call the model with packed_seq_params=packed_sequences(...)"
        plan = packed_seq_params.plan if self.window is None else packed_seq_params.windowed(self.window)
        assert len(query) == len(plan.positions), f"{len(query)} tokens came for a plan of {len(plan.positions)}"
        if self.rotates:
            assert self.rotary is not None, "build_model sets the rotary embedding"
            cosine, sine = packed_seq_params.angles(self.rotary, dim=self.rotary_dim, dtype=query.dtype)
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        if self.cp_group.size() > 1:
            both = torch.cat((key, value), dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
            key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
        output = attend(query, key, value, plan, scale=self.scale)
        return output.flatten(1)


def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, *, scale: float | None = None) -> Tensor:
    """Causal attention within the sequences of `plan`: query [T, H, D], gathered key [cp T, G, D] and value [cp T, G, E] to [T, H, E].

    `scale` multiplies the scores; None is 1 / sqrt(D).
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not plan.identity:
        query = _ToSlots.apply(query, plan.query_tokens, plan.token_queries)
        key, value = (_ToSlots.apply(x, plan.key_tokens, plan.token_keys) for x in (key, value))
    outputs = [_attend_bucket(query, key, value, bucket, scale) for bucket in plan.buckets]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if plan.identity else _FromSlots.apply(output, plan.token_queries, plan.query_tokens, plan.query_padding)


def _attend_bucket(query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scale: float) -> Tensor:
    """The bucket's slice of the query slots, [S queries, H, E]."""
    count, length = bucket.num_sequences, bucket.length
    queries = query.narrow(0, bucket.first_query, bucket.num_queries).unflatten(0, (count, -1)).transpose(1, 2)
    keys, values = (x.narrow(0, bucket.first_key, count * length).unflatten(0, (count, length)).transpose(1, 2) for x in (key, value))
    outputs = []
    for part, part_queries in zip(bucket.parts, queries.split([part.query_length for part in bucket.parts], dim=2), strict=True):
        part_keys, part_values = (x.narrow(2, part.first_key, part.key_length) for x in (keys, values))
        short = part.key_length <= _SHORT_KEYS and query.device.type == "cpu"
        outputs.append((_attend_short if short else _attend_long)(part_queries, part_keys, part_values, part, scale).transpose(1, 2))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).flatten(0, 1)


def _attend_long(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type == "cpu":
        # The fused CPU kernel takes equal head counts only; asked for grouped queries torch falls back to a slow product.
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=part.mask, is_causal=part.mask is None, scale=scale, enable_gqa=grouped
    )


def _attend_short(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> Tensor:
    """Query [S, H, C, D], key [S, G, K, D]: the H / G query heads of a group are stacked as rows of one product."""
    groups, length = key.shape[1], query.shape[2]
    mask = part.mask if part.mask is not None else torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    stacked = query.unflatten(1, (groups, -1)).flatten(2, 3)
    scores = torch.matmul(stacked * scale, key.transpose(-1, -2)).unflatten(2, (-1, length))
    mask = mask.unsqueeze(1) if mask.dim() == 4 else mask
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype)
    return torch.matmul(weights.flatten(2, 3), value).unflatten(2, (-1, length)).flatten(1, 2)


class _ToSlots(torch.autograd.Function):
    """slots = tokens[slot_tokens]. Each token has one real slot, so the gradient is a gather too, many times faster than index_add."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slot_tokens: Tensor, token_slots: Tensor) -> Tensor:
        ctx.save_for_backward(token_slots)
        return tokens.index_select(0, slot_tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token_slots,) = ctx.saved_tensors
        return grad.index_select(0, token_slots), None, None


class _FromSlots(torch.autograd.Function):
    """tokens = slots[token_slots]; padding slots get a zero gradient."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, token_slots: Tensor, slot_tokens: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(slot_tokens, padding)
        return slots.index_select(0, token_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        slot_tokens, padding = ctx.saved_tensors
        return grad.index_select(0, slot_tokens).index_fill_(0, padding, 0), None, None, None
