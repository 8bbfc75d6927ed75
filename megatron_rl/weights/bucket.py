"""Weights grouped into buckets: a sync moves few large messages instead of many small ones.

Trainer and engine agree on the buckets before the first byte moves: names, dtypes and shapes follow
from the manifest.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import rules, tensor_shapes

BUCKET_BYTES = 512 * 1024 * 1024
_FUSED_MODULE = ".self_attn."
"""An engine may fuse tensors of one attention into one of its own, and then drops the one whose counterpart is not in the same bucket.

SGLang does so for q_a_proj and kv_a_proj_with_mqa of latent attention (`cached_a_proj` in its deepseek_weight_loader.py).
"""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the checkpoint under its Hugging Face name; `dtype` is torch's name without the prefix, as in "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "WeightSpec":
        """Describe `tensor`, of any shape [...]."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return torch's dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


def exported_specs(spec: ModelSpec, *, dtype: str) -> tuple[WeightSpec, ...]:
    """Return the tensors of `export_hf_weights` for a model with parameters of `dtype`, in its
    order.

    `dtype` is a name such as "bfloat16". The tensors follow from the architecture alone, without
    gathering by any rank.
    """
    float32 = {name for rule in rules(spec) if rule.float32 for name in rule.hugging_face}
    return tuple(WeightSpec(name, "float32" if name in float32 else dtype, shape) for name, shape in tensor_shapes(spec))


def fused_together(name: str) -> str:
    """Return a common name for all tensors an engine has to receive at once.

    The name is the attention of a layer, else the tensor's own name.
    """
    module, found, _ = name.partition(_FUSED_MODULE)
    return module + found


def make_buckets(manifest: Sequence[WeightSpec], *, max_bytes: int = BUCKET_BYTES) -> tuple[tuple[WeightSpec, ...], ...]:
    """Cut the manifest, in order, into runs of at most `max_bytes` bytes.

    Tensors possibly fused by an engine stay together: the attention of one layer, or a single
    tensor, gets a larger bucket when needed.
    """
    buckets: list[tuple[WeightSpec, ...]] = []
    current: list[WeightSpec] = []
    num_bytes = 0
    for _, run in itertools.groupby(manifest, key=lambda spec: fused_together(spec.name)):
        unit = list(run)
        unit_bytes = sum(spec.num_bytes for spec in unit)
        if current and num_bytes + unit_bytes > max_bytes:
            buckets.append(tuple(current))
            current, num_bytes = [], 0
        current += unit
        num_bytes += unit_bytes
    if current:
        buckets.append(tuple(current))
    _check_fused(buckets)
    return tuple(buckets)


def _check_fused(buckets: Sequence[Sequence[WeightSpec]]) -> None:
    bucket_of: dict[str, int] = {}
    for number, bucket in enumerate(buckets):
        for spec in bucket:
            first = bucket_of.setdefault(fused_together(spec.name), number)
            assert first == number, f"{spec.name} is in bucket {number}, but an engine may fuse it with tensors of bucket {first}"


def num_bucket_bytes(bucket: Sequence[WeightSpec]) -> int:
    """Return the size of one bucket in bytes."""
    return sum(spec.num_bytes for spec in bucket)


def fill_buckets(
    weights: Iterable[tuple[str, Tensor]],
    buckets: Sequence[Sequence[WeightSpec]],
    *,
    allocate: Callable[[int, torch.device], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Yield each bucket as one flat uint8 tensor [bytes], in the order of the buckets.

    Each bucket is in separate memory from `allocate`(bytes, device). Without `allocate` all buckets
    use the same memory, of the size of the largest: copy a bucket to keep the content beyond the
    next one.

    Raises:
        ValueError: a tensor differs from its entry in the manifest, a write to a wrong place of the engine.
    """
    source = iter(weights)
    memory: Tensor | None = None
    for bucket in buckets:
        start = 0
        if allocate is not None:
            memory = None
        for spec in bucket:
            tensor = _next_weight(source, spec)
            if memory is None and allocate is not None:
                memory = allocate(num_bucket_bytes(bucket), tensor.device)
            elif memory is None:
                memory = torch.empty(max(map(num_bucket_bytes, buckets)), dtype=torch.uint8, device=tensor.device)
            end = start + spec.num_bytes
            memory[start:end].view(spec.torch_dtype).view(spec.shape).copy_(tensor)
            start = end
        assert memory is not None, "a bucket has tensors"
        yield memory[:start]
    if next(source, None) is not None:
        raise ValueError("the trainer exports more tensors than the manifest promised to the engines")


def _next_weight(source: Iterator[tuple[str, Tensor]], spec: WeightSpec) -> Tensor:
    name, tensor = next(source, (None, None))
    got = WeightSpec.of(name, tensor) if name is not None and tensor is not None else None
    if got != spec or tensor is None:
        raise ValueError(f"the trainer exports {got or 'nothing more'}, the manifest promised {spec} to the engines")
    return tensor.detach()
