"""A conversion tensor by tensor: the target has exactly the numbers that were asked for, and float8 moves none further than it has to.

Legend: R rows, C columns of a weight.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.convert.changes import FP8_BLOCK, Changes, is_quantised, quantise_blocks
from megatron_rl.convert.sources import Source, Unit
from megatron_rl.models.quantised import Quantised, dequantise

_BLOCK = (FP8_BLOCK, FP8_BLOCK)
_FP8 = torch.finfo(torch.float8_e4m3fn)
_HALF_STEP = _FP8.eps / 2
"""The most by which rounding to float8 moves a number, as a share of it, where it is not too small for that."""
_SMALLEST_HALF_STEP = _FP8.smallest_normal * _FP8.eps / 2
"""The most by which rounding moves the smallest codes, in units of the scale."""
_FLOAT32_ROUNDING = 1e-3
"""What rounding of the quotient and of the product may add, as a share of the bound."""


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """What is wrong with which tensors, in words, and how far float8 moved those that it holds.

    `largest_error` is a share of the largest number in its block, `mean_error` the mean |error| as a share of the mean |number|.
    """

    num_tensors: int
    wrong: tuple[str, ...]
    num_quantised: int = 0
    largest_error: float = 0.0
    mean_error: float = 0.0

    @property
    def same(self) -> bool:
        """Whether the target is what was asked for."""
        return not self.wrong

    def line(self) -> str:
        """In words."""
        if self.wrong:
            return f"{len(self.wrong)} of {self.num_tensors} tensors are not what was asked for, the first: {self.wrong[0]}"
        moved = f"; float8 moves {self.num_quantised} of them by at most {self.largest_error:.2%} of the largest number in a block of "
        moved += f"{FP8_BLOCK} x {FP8_BLOCK}, by {self.mean_error:.2%} of a number on average"
        return f"{self.num_tensors} tensors have exactly the numbers that were asked for{moved if self.num_quantised else ''}"


def compare_tensors(source: Source, target: Source, changes: Changes, units: Sequence[Unit]) -> TensorComparison:
    """Read the tensors of `units` of `source` again, change them by `changes` and compare them with those of `target`, opened in float32.

    The codes of a quantised target are compared by the numbers that they mean.
    """
    num_tensors, wrong = 0, list(_other_model(source, target))
    errors = _Errors()
    for unit in units:
        asked = dataclasses.replace(changes, quantise=False).apply(unit, source.read(unit))
        for told, tensor in zip(unit.tensors, asked, strict=True):
            num_tensors += 1
            got = target.tensors.read(told.name, told.shape)
            quantised = changes.quantise and is_quantised(unit, told)
            if not _equal(got, _meant_by_codes(tensor) if quantised else tensor):
                wrong.append(f"{told.name} in {target.path} has other numbers than {source.path} gives")
            elif quantised and not errors.add(tensor.float(), got):
                wrong.append(f"{told.name} in {target.path} is further from its weight than float8 has to be: its scales are wrong")
    return TensorComparison(num_tensors, tuple(wrong), errors.num_tensors, errors.largest, errors.mean)


def _other_model(source: Source, target: Source) -> Iterator[str]:
    # Layers of multi-token prediction may have been left out.
    written = dataclasses.replace(target.spec, num_mtp_layers=source.spec.num_mtp_layers)
    for field in dataclasses.fields(source.spec):
        if getattr(source.spec, field.name) != getattr(written, field.name):
            yield f"config.json in {target.directory} gives another {field.name} than that in {source.directory}"


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors [...] have the same numbers: a parameter of several tensors is stored in the widest of their dtypes."""
    widest = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(one.to(widest), other.to(widest))


def _meant_by_codes(weight: Tensor) -> Tensor:
    """The numbers [R, C] that the codes of `weight` mean."""
    codes, scales = quantise_blocks(weight)
    return dequantise(Quantised("", "fp8", "", "", _BLOCK), codes, scales, dtype=torch.float32)


class _Errors:
    """How far float8 moved the numbers of several weights."""

    def __init__(self) -> None:
        self.num_tensors, self.largest = 0, 0.0
        self._moved, self._size = 0.0, 0.0

    @property
    def mean(self) -> float:
        return self._moved / self._size if self._size else 0.0

    def add(self, weight: Tensor, got: Tensor) -> bool:
        """Count `weight` [R, C] float32 and what its codes mean; False where a number is further away than the nearest code is."""
        error, largest = (got - weight).abs(), _largest_of_block(weight)
        allowed = torch.maximum(weight.abs() * _HALF_STEP, largest / _FP8.max * _SMALLEST_HALF_STEP)
        self.num_tensors += 1
        self._moved += error.sum(dtype=torch.float64).item()
        self._size += weight.abs().sum(dtype=torch.float64).item()
        self.largest = max(self.largest, (error / largest.clamp_min(torch.finfo(torch.float32).tiny)).max().item())
        return bool((error <= allowed * (1 + _FLOAT32_ROUNDING)).all())


def _largest_of_block(weight: Tensor) -> Tensor:
    """[R, C]: for each number the largest magnitude in its block."""
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight.abs(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = whole.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK)).amax(dim=(1, 3))
    return blocks.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
