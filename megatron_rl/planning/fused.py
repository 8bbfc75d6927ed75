"""Stand-ins, on tensors without values, for torch's kernels for real tensors only.

A stand-in keeps the same tensors for the backward pass as the kernel.

Legend: S sequences, H query heads, G key-value heads, C queries, K keys, D channels of a query,
E of a value.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keep flash attention's tensors of query [S, H, C, D], key [S, G, K, D], value [S, G, K, E].

    Kept are the inputs, the output [S, H, C, E] and a logarithm for each query in fp32, but no
    scores.
    """
    output: Tensor = _Attention.apply(query, key, value)
    return output


def fused_rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Keep the tensors of a fused norm of `input`, of any shape.

    Kept are the input, the weight and one fp32 number for each row.
    """
    output: Tensor = _RmsNorm.apply(input, weight)
    return output


def masked_select(values: Tensor, mask: Tensor) -> Tensor:
    """Return as many of `values`, of any shape, as a real `mask` of the same shape selects, [N]."""
    if not values.is_meta:
        return torch.masked_select(values, mask)
    output: Tensor = _MaskedSelect.apply(values, mask)
    return output


class _MaskedSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(values, mask)
        return values.new_empty(int(mask.expand_as(values).sum()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1]).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None) -> Tensor:
        saved = [rows, rows.new_empty(rows.shape[:-1], dtype=torch.float32)]
        ctx.save_for_backward(*saved, *([] if weight is None else [weight]))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, _, *weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight[0]) if weight else None
