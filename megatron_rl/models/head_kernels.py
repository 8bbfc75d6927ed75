"""Statistics and gradients of rows of logits as Triton kernels.

Each kernel reads the logits once, and the gradient overwrites the logits.

Cost by arithmetic (N = 8,192 tokens, V = 151,936, H = 4,096, bfloat16, one
H100 with 989 TFLOP/s and 3.35 TB/s by the data sheet): the head's 4 products of 2 N V H take 56 ms,
the kernels 2.8 ms for 7.5 GB of logits, read twice and written once. An H200
took 65 ms in all, 5.0 ms of it for the kernels. A product with the kernels as
an epilogue could save no more than this time, and only when within 5 % of cuBLAS. The backward
product would need atomics or the logits a third time, because the gradients of hidden states and of
the weight sum over different dimensions.

Legend: T rows, V vocabulary columns of this rank.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.algorithms.log_prob import RowMaths, Shard, gradient_polynomial

# exp() of the floor is exactly 0 in float32, so p s is 0 and not NaN for a logit of -inf.
_FLOOR = tl.constexpr(-1e4)
# Columns of a tile, and its warps: each thread has 32 columns of a row in registers, and the
# kernels then take at most 96 registers. So five programs share a multiprocessor of an H100, with
# 40 KiB under way. A multiprocessor's share of the bandwidth times 0.7 us of latency is 18 KiB.
_TILE = 4096
# Without fused multiply-add z - maximum is exactly 0 at the maximum, as in torch and in Triton's interpreter.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _partials_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, targets, out, columns, start, inverse_temperature, WITH_ENTROPY: tl.constexpr, TILE: tl.constexpr
):
    """Reduce one row per program: each tile gives five exact numbers, merged like those of ranks."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    maximum, normaliser, mean, square = float("-inf"), 0.0, 0.0, 0.0
    for first in range(0, columns, TILE):
        column = first + tl.arange(0, TILE)
        # Masked columns are -inf and have no mass; so are padding columns, with any content.
        z = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32) * inverse_temperature
        tile_maximum = tl.max(z, 0)
        joint = tl.maximum(maximum, tile_maximum)
        # A maximum of -inf has no weight, and the distance from -inf is no number.
        shifted = z - tl.where(tile_maximum == float("-inf"), 0.0, tile_maximum)
        weight = tl.exp(shifted)
        tile_normaliser = tl.sum(weight, 0)
        scale = tl.where(maximum == float("-inf"), 0.0, tl.exp(maximum - joint))
        tile_scale = tl.where(tile_maximum == float("-inf"), 0.0, tl.exp(tile_maximum - joint))
        if WITH_ENTROPY:
            shifted = tl.maximum(shifted, _FLOOR)
            tile_mean = tl.where(tile_normaliser == 0, 0.0, tl.sum(weight * shifted, 0) / tile_normaliser)
            centred = shifted - tile_mean
            tile_square = tl.sum(weight * centred * centred, 0)
            old, new = normaliser * scale, tile_normaliser * tile_scale
            # Chan, Golub and LeVeque (1983), with both means relative to the joint maximum.
            mean = tl.where(old == 0, 0.0, mean + (maximum - joint))
            tile_mean = tl.where(new == 0, mean, tile_mean + (tile_maximum - joint))
            mean = tl.where(old == 0, tile_mean, mean)
            total = old + new
            share = tl.where(total == 0, 0.0, new / total)
            difference = tile_mean - mean
            mean += difference * share
            square = square * scale + tile_square * tile_scale + difference * difference * old * share
            normaliser = total
        else:
            normaliser = normaliser * scale + tile_normaliser * tile_scale
        maximum = joint
    target = tl.load(targets + row) - start
    here = (target >= 0) & (target < columns)
    at_target = tl.load(logits + target, mask=here, other=float("-inf")).to(tl.float32) * inverse_temperature
    out += row * 5
    tl.store(out, maximum)
    tl.store(out + 1, normaliser)
    tl.store(out + 2, mean)
    tl.store(out + 3, tl.where(normaliser == 0, 0.0, square / normaliser))
    tl.store(out + 4, at_target)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, targets, numbers, columns, width, start, inverse_temperature, DEGREE: tl.constexpr, TILE: tl.constexpr
):
    """One program for each row and tile: p x a polynomial of z - maximum, written where z was; 0 in padding columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    logits += row * row_stride
    numbers += row * 6
    maximum, inverse_normaliser, at_target = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    z = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32) * inverse_temperature
    shifted = z - maximum
    p = tl.exp(shifted) * inverse_normaliser
    polynomial = tl.load(numbers + 3)
    if DEGREE > 0:
        shifted = tl.maximum(shifted, _FLOOR)
        slope = tl.load(numbers + 4)
        if DEGREE > 1:
            slope += tl.load(numbers + 5) * shifted
        polynomial += slope * shifted
    target = tl.load(targets + row) - start
    gradient = p * polynomial + tl.where(column == target, at_target, 0.0)
    tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < width)


def _partials(logits: Tensor, targets: Tensor, *, shard: Shard, with_entropy: bool) -> Tensor:
    """`local_partials` [T, 5] of `logits` [T, V] and `targets` [T], in float32."""
    out = torch.zeros(len(logits), 5, dtype=torch.float32, device=logits.device)
    if shard.columns == 0 or len(logits) == 0:
        out[:, 0] = out[:, 4] = float("-inf")
        return out
    assert logits.stride(1) == 1, "a row of logits lies in one piece"
    _partials_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        targets,
        out,
        shard.columns,
        shard.start,
        1.0 / shard.temperature,
        WITH_ENTROPY=with_entropy,
        TILE=_TILE,
        **_OPTIONS,
    )
    return out


def _gradient(
    logits: Tensor,
    targets: Tensor,
    shard: Shard,
    saved: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    *,
    in_place: bool = False,
) -> Tensor | None:
    """`logit_gradient` [T, V], computed in float32."""
    if all(gradient is None for gradient in gradients):
        return None
    out = logits if in_place else logits.clone(memory_format=torch.contiguous_format)
    if shard.columns == 0 or len(logits) == 0:
        return out.zero_()
    assert out.stride(1) == 1, "a row of logits lies in one piece"
    numbers, degree = _row_numbers(saved, gradients, shard)
    _gradient_kernel[(len(out), triton.cdiv(out.shape[1], _TILE))](
        out,
        out.stride(0),
        targets,
        numbers,
        shard.columns,
        out.shape[1],
        shard.start,
        1.0 / shard.temperature,
        DEGREE=degree,
        TILE=_TILE,
        **_OPTIONS,
    )
    return out


def _row_numbers(saved: Sequence[Tensor], gradients: Sequence[Tensor | None], shard: Shard) -> tuple[Tensor, int]:
    """Return the numbers [T, 6] needed by the gradient of a row, and the degree of the polynomial.

    The numbers are maximum, 1 / normaliser, the gradient at the target and the polynomial. A row
    without a finite logit on this rank gets zeros, as do its gradients.
    """
    maximum, log_normaliser, _, _, _, has_mass = saved
    at_target, coefficients = gradient_polynomial(saved, gradients, shard.temperature)
    zero = torch.zeros_like(maximum)
    known = [torch.where(has_mass, number, 0.0) for number in (at_target, *coefficients)]
    empty = maximum == float("-inf")
    inverse_normaliser = torch.where(empty, 0.0, (-log_normaliser).exp())
    rows = [torch.where(empty, 0.0, maximum), inverse_normaliser, *known, *[zero] * (3 - len(coefficients))]
    return torch.stack(rows, 1), len(coefficients) - 1


TRITON_ROWS = RowMaths("triton", _partials, _gradient)
