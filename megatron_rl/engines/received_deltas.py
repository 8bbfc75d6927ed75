"""Changes of weights since the last sync: their form on the way, and their merge into a model of SGLang.

A delta stands for a bucket of weights: which elements have other bits than before, and their values.
SGLang's loaders cut, stack and cast whole tensors, so they are handed whole ones, NaN where nothing
changed, and while they load, a copy into the model leaves alone what a NaN would overwrite.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Described = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype (torch's, without the prefix) and shape of each tensor of a bucket."""

DELTA = "megatron_rl.delta."
"""How names of deltas begin, among names of weights."""
_HEAD = 16  # bytes: checksum of all behind it, and size of the header
_ALIGNED = 8


def pack(bucket: Described, changed: Iterable[tuple[Tensor, Tensor]], *, base: str, checksum: Callable[[Tensor], int]) -> Tensor:
    """Return a delta [bytes] uint8 of `bucket` to the weights `base`, with a checksum of its own.

    `changed` has places [changes] int64 in rising order and values [changes] of each run of the bucket.
    """
    parts, counts, device = list[Tensor](), list[int](), torch.device("cpu")
    for places, values in changed:
        counts.append(len(places))
        parts += [_bytes(places.to(torch.int32)), _bytes(values)]
        device = places.device
    text = json.dumps({"base": base, "tensors": bucket, "changed": counts})
    header = _bytes(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)).to(device)
    body = torch.cat([torch.tensor([len(header)], device=device).view(torch.uint8), header, *parts])
    return torch.cat([torch.tensor([checksum(body)], device=device).view(torch.uint8), body])


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` [n], with spaces behind it up to whole words."""
    flat = tensor.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _ALIGNED), value=ord(" "))


class Merge:
    """Deltas for models; `checksum` is that of `pack`."""

    def __init__(self, checksum: Callable[[Tensor], int]) -> None:
        self._checksum = checksum
        self._scratch = torch.empty(0, dtype=torch.uint8)  # all bits set but where a delta is: NaN in every dtype of floats
        self._changed: list[tuple[Tensor, Tensor]] = []
        """Places, in elements from the start of the scratch, and values [changes] of each run."""
        self._version = 0  # of the scratch, with the changes

    @torch.no_grad()
    def load(self, delta: Tensor, load: Callable[[Iterable[tuple[str, Tensor]]], Any], *, base: str | None) -> None:
        """Give the bucket of a `delta` [bytes] uint8 to a model's `load`, which has the weights `base`.

        Raises RuntimeError for a delta to other weights, or one with changed bits.
        """
        with torch.inference_mode(False):  # only a normal tensor counts its changes
            bucket = self._unpack(delta.clone(), base)
        self._version = self._scratch._version
        with self._merging():
            load(bucket)
        if self._scratch._version != self._version:  # a loader wrote into its input
            self._scratch.fill_(255)
        for places, values in self._changed:
            self._scratch.view(integers(values.dtype))[places] = -1

    def rest(self) -> None:
        """Keep no memory of a GPU until the next sync; that of a host stays: new pages take three times the CPU seconds of a merge."""
        self._changed = []
        if self._scratch.is_cuda:
            self._scratch = torch.empty(0, dtype=torch.uint8)

    def _unpack(self, delta: Tensor, base: str | None) -> list[tuple[str, Tensor]]:
        """Write the changes of `delta` into the scratch; return the bucket's tensors, which are views of it."""
        claimed, size = delta[:_HEAD].view(torch.int64).tolist()
        if claimed != self._checksum(delta[_ALIGNED:]):
            raise RuntimeError("a delta of weights did not come as the trainer sent it")
        header = json.loads(delta[_HEAD : _HEAD + size].cpu().numpy().tobytes())
        if header["base"] != base:
            raise RuntimeError(f"a delta is to the weights {header['base']}, and this engine has {base}; it needs all weights")
        bucket = [(name, getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in header["tensors"]]
        num_bytes = sum(shape.numel() * dtype.itemsize for _, dtype, shape in bucket)
        num_bytes += -num_bytes % _ALIGNED  # whole elements of every dtype
        if len(self._scratch) < num_bytes:
            self._scratch = torch.full((num_bytes,), 255, dtype=torch.uint8, device=delta.device)
        read, start, tensors, self._changed = _HEAD + size, 0, list[tuple[str, Tensor]](), []
        runs = itertools.groupby(bucket, key=lambda each: each[1])
        for (dtype, run), num_changed in zip(runs, header["changed"], strict=True):
            places, read = _take(delta, read, torch.int32, num_changed)
            values, read = _take(delta, read, dtype, num_changed)
            places = places.long() + start // dtype.itemsize
            self._scratch.view(dtype)[places] = values
            self._changed.append((places, values))
            for name, _, shape in run:
                end = start + shape.numel() * dtype.itemsize
                tensors.append((name, self._scratch[start:end].view(dtype).view(shape)))
                start = end
        return tensors

    @contextmanager
    def _merging(self) -> Iterator[None]:
        """Let a copy to a tensor leave its elements where the source is NaN, in all threads: loaders have some."""
        copy = Tensor.copy_

        def merge(target: Tensor, source: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            if not source.is_floating_point():
                return copy(target, source, *arguments, **keywords)
            changed = self._changed_in(source) if source.shape == target.shape else None
            if changed is None:
                wanted = source.to(device=target.device, dtype=target.dtype)
                return copy(target, torch.where(wanted.isnan(), target, wanted))
            places, values = changed
            if source.is_contiguous() and target.is_contiguous():
                target.view(-1)[places] = values.to(target)
            else:
                coordinates, inside = coordinates_of(places, source)
                target[coordinates] = values[inside].to(target)
            return target

        Tensor.copy_ = merge  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            Tensor.copy_ = copy  # type: ignore[method-assign]

    def _changed_in(self, source: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return places from the start of `source`, a view of the scratch, and values [changes].

        None for another tensor, and in a scratch that a loader wrote into.
        """
        in_scratch = source.untyped_storage().data_ptr() == self._scratch.untyped_storage().data_ptr()
        if not in_scratch or self._scratch._version != self._version or not _goes_forward(source):
            return None
        first = int(source.storage_offset())
        last = first + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        found_places, found_values = [], []
        for places, values in self._changed:
            if values.dtype == source.dtype:
                begin, end = torch.searchsorted(places, places.new_tensor([first, last + 1])).tolist()
                found_places.append(places[begin:end] - first)
                found_values.append(values[begin:end])
        return (torch.cat(found_places), torch.cat(found_values)) if found_places else None


def _dimensions(source: Tensor) -> list[int]:
    """Return the dimensions of more than one element, those with the largest strides first."""
    return sorted((dim for dim in range(source.dim()) if source.shape[dim] > 1), key=source.stride, reverse=True)


def _goes_forward(source: Tensor) -> bool:
    """Return True when `coordinates_of` can say the coordinates of a place in `source` [...]."""
    dimensions = _dimensions(source)
    spans = [source.shape[dim] * source.stride(dim) for dim in dimensions]
    return all(source.stride(dim) >= span for dim, span in zip(dimensions, [*spans[1:], 1], strict=False))


def coordinates_of(places: Tensor, source: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the coordinates of `places` [n] from the start of a view, one [inside] for each dimension.

    And which places are inside [n]: rows of some columns have others between them.
    """
    rest, inside = places, torch.ones_like(places, dtype=torch.bool)
    indices = [torch.zeros_like(places)] * source.dim()
    for dim in _dimensions(source):
        indices[dim] = rest // source.stride(dim)
        rest = rest - indices[dim] * source.stride(dim)
        inside &= indices[dim] < source.shape[dim]
    inside &= rest == 0
    return tuple(index[inside] for index in indices), inside


def _take(delta: Tensor, start: int, dtype: torch.dtype, count: int) -> tuple[Tensor, int]:
    """Return `count` elements of `dtype` from byte `start` on, and where the next part starts."""
    end = start + count * dtype.itemsize
    return delta[start:end].view(dtype), end + -end % _ALIGNED


def integers(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of integers as large as numbers of `dtype`."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
