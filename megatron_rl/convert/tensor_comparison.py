"""A check of a conversion: exactly the requested numbers, and none moved further by float8 than necessary.

Legend: R rows, C columns of a weight.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_rl.check import Check
from megatron_rl.checkpoints.quantised import Quantised, dequantise
from megatron_rl.checkpoints.stored_weights import StoredWeights
from megatron_rl.models.weight_table import Rule
from megatron_rl.weights.changes import FP8_BLOCK, Changes, is_quantised, quantise_blocks

SAME = "tensors have exactly the numbers that were asked for"
_BLOCK = (FP8_BLOCK, FP8_BLOCK)
_FP8 = torch.finfo(torch.float8_e4m3fn)
_HALF_STEP = _FP8.eps / 2
"""The most by which rounding to float8 moves a number, as a share of it, where it is not too small for that."""
_SMALLEST_HALF_STEP = _FP8.smallest_normal * _FP8.eps / 2
"""The most by which rounding moves the smallest codes, in units of the scale."""
_FLOAT32_ROUNDING = 1e-3
"""What rounding of the quotient and of the product may add, as a share of the bound."""


class TensorComparison:
    """The tensors compared so far, the faults in words, and the error made by float8, a share of the largest number in its block."""

    def __init__(self) -> None:
        self.num_tensors = self.num_quantised = 0
        self.wrong: list[str] = []
        self.largest_error = 0.0

    def check(self) -> Check:
        """Return the promise that the tensors are as requested."""
        if self.wrong:
            return Check(SAME, "broken", f"{len(self.wrong)} of {self.num_tensors} are not, the first: {self.wrong[0]}")
        moved = f"; float8 moves {self.num_quantised} of them by at most {self.largest_error:.2%} of the largest number in a block of "
        moved += f"{FP8_BLOCK} x {FP8_BLOCK}"
        return Check(SAME, text=f"{self.num_tensors} tensors{moved if self.num_quantised else ''}")

    def add_quantised(self, weight: Tensor, got: Tensor) -> bool:
        """Count `weight` [R, C] float32 and its codes' numbers; return False for one further away than the nearest code."""
        error, largest, tiny = (got - weight).abs(), _largest_of_block(weight), torch.finfo(torch.float32).tiny
        allowed = torch.maximum(weight.abs() * _HALF_STEP, (largest / _FP8.max).clamp_min(tiny) * _SMALLEST_HALF_STEP)
        self.num_quantised += 1
        self.largest_error = max(self.largest_error, (error / largest.clamp_min(tiny)).max().item())
        return bool((error <= allowed * (1 + _FLOAT32_ROUNDING)).all())


def compare_tensors(source: StoredWeights, target: StoredWeights, changes: Changes, rules: Mapping[str, Rule | None]) -> TensorComparison:
    """Read the tensors of `rules` of `source` again, apply `changes` and compare with `target`, opened in float32.

    Codes of a quantised target are compared by their numbers.
    """
    found, unquantised = TensorComparison(), dataclasses.replace(changes, quantise=False)
    found.wrong += _other_model(source, target)
    for name, rule in rules.items():
        ((_, tensor),) = unquantised.apply(name, source.read(name), rule)
        got = target.read(name)
        quantised = changes.quantise and is_quantised(name, tensor.dim(), rule)
        found.num_tensors += 1
        meant = dequantise(Quantised("", "fp8", "", "", _BLOCK), *quantise_blocks(tensor), dtype=torch.float32) if quantised else tensor
        # One of the two may be stored in a wider dtype.
        widest = torch.promote_types(got.dtype, meant.dtype)
        if not torch.equal(got.to(widest), meant.to(widest)):
            found.wrong.append(f"{name} in {target.path} has other numbers than {source.path} gives")
        elif quantised and not found.add_quantised(tensor.float(), got):
            found.wrong.append(f"{name} in {target.path} is further from its weight than float8 has to be: its scales are wrong")
    return found


def _other_model(source: StoredWeights, target: StoredWeights) -> Iterator[str]:
    # Layers of multi-token prediction may have been left out.
    written = dataclasses.replace(target.spec, num_mtp_layers=source.spec.num_mtp_layers)
    for field in dataclasses.fields(source.spec):
        if getattr(source.spec, field.name) != getattr(written, field.name):
            yield f"config.json in {target.directory} gives another {field.name} than that in {source.directory}"


def _largest_of_block(weight: Tensor) -> Tensor:
    """Return [R, C]: for each number the largest magnitude in its block."""
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight.abs(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = whole.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK)).amax(dim=(1, 3))
    return blocks.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
