"""Weights grouped into buckets, so that a sync moves few large messages instead of many small ones.

Trainer and engine agree on the buckets before the first byte moves: names, dtypes and shapes follow from the manifest.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the checkpoint under its Hugging Face name; `dtype` is torch's name without the prefix, as in "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def make_manifest(weights: Iterable[tuple[str, Tensor]]) -> tuple[WeightSpec, ...]:
    """Describe every tensor of `weights`, in order."""
    return tuple(WeightSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights)


def make_buckets(manifest: Sequence[WeightSpec], *, max_bytes: int = BUCKET_BYTES) -> tuple[tuple[WeightSpec, ...], ...]:
    """Cut the manifest, in order, into runs of at most `max_bytes` bytes; a larger tensor gets a bucket of its own."""
    buckets: list[tuple[WeightSpec, ...]] = []
    current: list[WeightSpec] = []
    num_bytes = 0
    for spec in manifest:
        if current and num_bytes + spec.num_bytes > max_bytes:
            buckets.append(tuple(current))
            current, num_bytes = [], 0
        current.append(spec)
        num_bytes += spec.num_bytes
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


def fill_buckets(weights: Iterable[tuple[str, Tensor]], buckets: Sequence[Sequence[WeightSpec]]) -> Iterator[Tensor]:
    """Yield each bucket as one flat uint8 tensor [bytes], in the order of the buckets.

    Raises:
        ValueError: a tensor differs from its entry in the manifest, which would write into the wrong place of the engine.
    """
    source = iter(weights)
    for bucket in buckets:
        parts = []
        for spec in bucket:
            name, tensor = next(source)
            got = WeightSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if got != spec:
                raise ValueError(f"the trainer exports {got}, the manifest promised {spec} to the engines")
            parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        yield torch.cat(parts)
    if next(source, None) is not None:
        raise ValueError("the trainer exports more tensors than the manifest promised to the engines")
