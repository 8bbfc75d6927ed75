"""Matrix products on a CPU whose rows do not depend on how many others there are. Pure torch.

A library for matrix products takes another kernel, and with it another order of summation, for another number of rows: what a request
computes then depends on which requests it meets in a batch. Legend: N rows, K and M features.
"""

import torch
from torch import Tensor

BLOCK_ROWS = 16


def product(rows: Tensor, columns: Tensor) -> Tensor:
    """`rows` [N, K] times `columns` [K, M], in blocks of BLOCK_ROWS rows, the last one filled with zeros: [N, M]."""
    num_rows = len(rows)
    filled = torch.nn.functional.pad(rows, (0, 0, 0, -num_rows % BLOCK_ROWS))
    result = rows.new_empty(len(filled), columns.shape[1])
    for start in range(0, len(filled), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        # The operator with an output of its own is another one, which `invariant_products` leaves alone.
        torch.ops.aten.mm.out(filled[block], columns, out=result[block])
    return result[:num_rows]


def sum_and_product(addend: Tensor, rows: Tensor, columns: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta` times `addend` plus `alpha` times the `product`: [N, M]."""
    return beta * addend + alpha * product(rows, columns)


def invariant_products() -> torch.library.Library:
    """Let every product on the CPU go through `product`, without gradients, as long as what is returned lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", product, "CPU")
    library.impl("addmm", sum_and_product, "CPU")
    return library
