"""Attention over packed sequences on plain torch, for any context parallel size.

Legend: T tokens on this rank, H query heads, G key-value heads, D channels of a query or key head, E of a value head; S, L, C as in
`plan`.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.algorithms.invariant_attention import attend_invariantly
from megatron_rl.models.attention.attention_plan import AttentionPlan, Bucket, Part
from megatron_rl.models.attention.rotary import RotarySpec, rotate
from megatron_rl.models.norms import SplitModule, split_parameter
from megatron_rl.models.packed_sequences import PackedSequences

# Up to this many keys two batched matrix products and a softmax beat the fused CPU kernel: its
# backward is slow on tiny tiles.
_SHORT_KEYS = 64


class PackedAttention(SplitModule, MegatronModule):
    """Core attention of a layer: causal, grouped queries, packed sequences, rotation.

    Latent attention, recognised by its number of key channels (`k_channels`), rotates a part of the
    channels itself before. The model's builder sets `rotary` and `window`, because megatron-core
    passes only its own config to this class. `window` is the number of tokens seen by a query of
    this layer, None for all earlier tokens.
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
        self.invariant = config.batch_invariant_mode
        self.cp_group = pg_collection.cp
        self.rotates = k_channels is None
        self.rotary: RotarySpec | None = None
        self.window: int | None = None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            # The logits of the sinks [H], under megatron-core's name for sinks.
            self.softmax_offset = split_parameter(config, pg_collection.tp, config.num_attention_heads, value=0.0)

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
        assert len(query) == len(plan.token_queries), f"{len(query)} tokens came for a plan of {len(plan.token_queries)}"
        if self.rotates:
            assert self.rotary is not None, "build_model sets the rotary embedding"
            cosine, sine = packed_seq_params.angles(self.rotary, dtype=query.dtype)
            query, key = (rotate(x, cosine, sine, interleaved=self.rotary.interleaved) for x in (query, key))
        if self.cp_group.size() > 1:
            both = torch.cat((key, value), dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
            key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
        output = attend(query, key, value, plan, scale=self.scale, sinks=self.softmax_offset, invariant=self.invariant)
        return output.flatten(1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, *,
    scale: float | None = None, sinks: Tensor | None = None, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Attend causally within the sequences of `plan`.

    Query [T, H, D], gathered key [cp T, G, D] and value [cp T, G, E] give [T, H, E]. `scale`
    multiplies the scores; None is 1 / sqrt(D). `sinks` [H] are one more logit in each softmax, with
    a share but no value (gpt-oss, https://arxiv.org/abs/2508.10925, 2.2). `invariant` gives a
    sequence the same bits in any batch, on a CPU.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not plan.identity:
        query = _Move.apply(query, plan.query_tokens, plan.token_queries, None)
        key, value = (_Move.apply(x, plan.key_tokens, plan.token_keys, None) for x in (key, value))
    outputs = [_attend_bucket(query, key, value, bucket, scale, sinks, invariant) for bucket in plan.buckets]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if plan.identity else _Move.apply(output, plan.token_queries, plan.query_tokens, plan.query_padding)


def _attend_bucket(
    query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scale: float, sinks: Tensor | None, invariant: bool
) -> Tensor:
    """Return the bucket's slice of the query slots, [S queries, H, E]."""
    count, length = bucket.num_sequences, bucket.length
    queries = query.narrow(0, bucket.first_query, bucket.num_queries).unflatten(0, (count, -1)).transpose(1, 2)
    keys, values = (x.narrow(0, bucket.first_key, count * length).unflatten(0, (count, length)).transpose(1, 2) for x in (key, value))
    outputs = []
    for part, part_queries in zip(bucket.parts, queries.split([part.query_length for part in bucket.parts], dim=2), strict=True):
        part_keys, part_values = (x.narrow(2, part.first_key, part.key_length) for x in (keys, values))
        short = part.key_length <= _SHORT_KEYS and query.device.type == "cpu"
        attend_part = _attend_alike if invariant and query.device.type == "cpu" else _attend_short if short else _attend_long
        if sinks is None:
            output = attend_part(part_queries, part_keys, part_values, part, scale)
        else:
            output = attend_part(*_with_sink_key(part_queries, part_keys, part_values, part, sinks / scale), scale)
            output = output[:, :, -part.query_length :, :-1]
        outputs.append(output.transpose(1, 2))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).flatten(0, 1)


def _with_sink_key(query: Tensor, key: Tensor, value: Tensor, part: Part, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor, Part]:
    """Return the part with one more key in front, as the sink of attention.

    The key has value 0, and its product with each query of a head is the head's entry of `sinks`
    [H]. One more channel gives this product: the sink in each query, 1 in the new key, 0 in the
    others. The fused kernels compute this attention and its gradient like any other. A triangle
    gets one more query in front, and so stays a triangle.
    """
    last = sinks.to(query.dtype)[None, :, None, None].expand(*query.shape[:-1], 1)
    query = torch.cat((query, last), dim=-1)
    first = F.pad(key.new_ones(1, 1, 1, 1), (key.shape[-1], 0)).expand(len(key), key.shape[1], 1, -1)
    key = torch.cat((first, F.pad(key, (0, 1))), dim=2)
    value = F.pad(value, (0, 1, 1, 0))
    if part.mask is None:
        return F.pad(query, (0, 0, 1, 0)), key, value, replace(part, query_length=part.query_length + 1, key_length=part.key_length + 1)
    return query, key, value, replace(part, key_length=part.key_length + 1, mask=F.pad(part.mask, (1, 0), value=True))


def _attend_long(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type == "cpu":
        # The fused CPU kernel takes equal head counts only; asked for grouped queries torch falls back to a slow product.
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=part.mask, is_causal=part.mask is None, scale=scale, enable_gqa=grouped
    )


def _attend_alike(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> Tensor:
    return attend_invariantly(query, key, value, part.mask, scale=scale)


def _attend_short(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> Tensor:
    """Query [S, H, C, D], key [S, G, K, D]: the H / G query heads of a group are stacked as rows of one product."""
    groups, length = key.shape[1], query.shape[2]
    mask = part.mask if part.mask is not None else torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    stacked = query.unflatten(1, (groups, -1)).flatten(2, 3)
    scores = torch.matmul(stacked * scale, key.transpose(-1, -2)).unflatten(2, (-1, length))
    mask = mask.unsqueeze(1) if mask.dim() == 4 else mask
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype)
    return torch.matmul(weights.flatten(2, 3), value).unflatten(2, (-1, length)).flatten(1, 2)


class _Move(torch.autograd.Function):
    """moved = rows[indices]. Each token has one real slot, so the gradient is a gather by `inverse` too, many times faster than index_add.

    From slots to tokens, `padding` names the slots that get a zero gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor, inverse: Tensor, padding: Tensor | None) -> Tensor:
        ctx.save_for_backward(inverse, padding)
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        inverse, padding = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        return grad if padding is None else grad.index_fill_(0, padding, 0), None, None, None
