"""Reproducible samples from weights, prompt and seed alone, without a GPU. Pure torch.

A library for matrix products chooses a kernel and an order of summation by the number of rows, so
that a result depends on the other requests of the batch. SGLang's hash of a seed is for GPUs.

Legend: N rows, K and M features.
"""

import torch
from torch import Tensor

BLOCK_ROWS = 16
_32_BITS = 0xFFFFFFFF


def product(rows: Tensor, columns: Tensor) -> Tensor:
    """Return `rows` [N, K] times `columns` [K, M], in blocks of BLOCK_ROWS rows: [N, M]."""
    num_rows = len(rows)
    filled = torch.nn.functional.pad(rows, (0, 0, 0, -num_rows % BLOCK_ROWS))
    result = rows.new_empty(len(filled), columns.shape[1])
    for start in range(0, len(filled), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        # `invariant_products` leaves the operator with an `out` argument alone.
        torch.ops.aten.mm.out(filled[block], columns, out=result[block])
    return result[:num_rows]


def sum_and_product(addend: Tensor, rows: Tensor, columns: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return `beta` times `addend` plus `alpha` times the `product`: [N, M]."""
    return beta * addend + alpha * product(rows, columns)


def log_softmax(rows: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return the log-softmax of `rows` [N, M] over `dim` by the trainer's formula (`log_prob.py`), to the bit."""
    rows = rows.float() if half_to_float else rows
    return (rows - rows.amax(dim, keepdim=True)) - (1 / torch.softmax(rows, dim).amax(dim, keepdim=True)).log()


def invariant_products() -> torch.library.Library:
    """Compute every product and log-softmax on the CPU by the above, without gradients, while the result lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_log_softmax", log_softmax, "CPU")
    library.impl("mm", product, "CPU")
    library.impl("addmm", sum_and_product, "CPU")
    return library


def murmur_hash(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return MurmurHash3 (x86, 32 bits) [N, M] of seed (low half first), position and column."""
    seeds = seeds.to(torch.int64)
    low, high = seeds & _32_BITS, (seeds >> 32) & _32_BITS
    state = torch.zeros(len(seeds), 1, dtype=torch.int64)
    for words in (low[:, None], high[:, None], positions[:, None].to(torch.int64), columns[None].to(torch.int64)):
        # 64-bit integers wrap around, without an effect on the low 32 bits.
        mixed = _rotate((words & _32_BITS) * 0xCC9E2D51 & _32_BITS, 15) * 0x1B873593 & _32_BITS
        state = (_rotate(state ^ mixed, 13) * 5 + 0xE6546B64) & _32_BITS
    state = state ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B & _32_BITS
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & _32_BITS
    return state ^ (state >> 16)


def _rotate(words: Tensor, count: int) -> Tensor:
    return ((words << count) | (words >> (32 - count))) & _32_BITS
