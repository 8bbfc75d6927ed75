"""What changed in the weights since the last sync, in place of the weights.

A rank that sends keeps a copy of its weights in host memory, bucket by bucket. A bucket with changes
in a tenth of its elements is sent as a delta, one with changes in half of them whole. The first sync
of a connection sends everything, so that an engine that returns has a base. A checked one with deltas
sends everything after them: engines compare what both leave. The engines' half is
`engines.received_deltas`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.engines.received_deltas import Described, pack, runs_of
from megatron_rl.engines.received_weights import checksum
from megatron_rl.weights.transport import WeightSpec, num_bucket_bytes

GAIN = 2
"""How much smaller than its bucket a delta has to be."""
_INDEX_BYTES = 4
_WORD = 8  # flags that are looked at together


DIGEST, END = "digest", "end"


@dataclass(frozen=True, slots=True)
class Message:
    """`content` [bytes] uint8 for a `bucket` by number: a delta, or the bucket. Without, what follows is sent for comparison."""

    bucket: int | None
    content: Tensor
    is_delta: bool = False

    def __str__(self) -> str:
        """Return the announcement of the message."""
        if self.bucket is None:
            return DIGEST
        return f"{self.bucket} {len(self.content)}" if self.is_delta else str(self.bucket)


class Deltas:
    """The messages of a rank's syncs over a connection called `token`, with `buckets` of weights."""

    def __init__(self, buckets: Sequence[Sequence[WeightSpec]], *, token: str) -> None:
        self._buckets, self._token = buckets, token
        self._described: list[Described] = [[(spec.name, spec.dtype, spec.shape) for spec in bucket] for bucket in buckets]
        self._kept: list[Tensor] = []
        self._base: str | None = None

    def messages(self, flats: Iterable[Tensor], *, version: int, checked: bool) -> Iterator[Message]:
        """Yield what to send for the content `flats` of all buckets, each [bytes] uint8; keep one until the next alone."""
        base, self._base = self._base, None
        if base is None:
            self._kept = []
        for number, flat in enumerate(flats):
            if base is None:
                self._kept.append(flat.to("cpu", copy=True))
                yield Message(number, flat)
            else:
                delta = self._delta(number, flat, base)
                yield Message(number, flat) if delta is None else Message(number, delta, is_delta=True)
        if base is not None and checked:
            yield Message(None, flat[:0])
            for number, kept in enumerate(self._kept):
                yield Message(number, kept.to(flat.device))
        self._base = holding(self._token, version)

    def _delta(self, number: int, flat: Tensor, base: str) -> Tensor | None:
        """Return the delta of a bucket, None where it is no gain; keep the bucket's content."""
        described, kept, start, num_bytes = self._described[number], self._kept[number], 0, 0
        changed: list[tuple[Tensor, Tensor]] = []
        before = kept.to(flat.device, non_blocking=True)
        for dtype, count in runs_of(described):
            part = slice(start, start := start + count * dtype.itemsize)
            places = changes(before[part], flat[part], itemsize=dtype.itemsize)
            values = flat[part].view(dtype)[places]
            num_bytes += len(places) * (_INDEX_BYTES + dtype.itemsize)
            # NaN says that nothing changed.
            if count >= 2**31 or num_bytes * GAIN > num_bucket_bytes(self._buckets[number]) or values.isnan().any():
                kept.copy_(flat)
                return None
            changed.append((places, values))
        start = 0
        for (dtype, count), (places, values) in zip(runs_of(described), changed, strict=True):
            kept[start : start + count * dtype.itemsize].view(dtype)[places.cpu()] = values.cpu()
            start += count * dtype.itemsize
        return pack(described, changed, base=base, checksum=checksum)


def changes(before: Tensor, after: Tensor, *, itemsize: int) -> Tensor:
    """Return places [changes] int64 in rising order: elements of `itemsize` bytes that differ between two [bytes] uint8."""
    integer = {2: torch.int16, 4: torch.int32}[itemsize]
    differs = before.view(integer) != after.view(integer)
    whole = len(differs) // _WORD * _WORD
    # Most words have no change.
    words = differs[:whole].view(torch.int64).nonzero()[:, 0]
    near = (words[:, None] * _WORD + torch.arange(_WORD, device=words.device)).view(-1)
    rest = torch.arange(whole, len(differs), device=words.device)
    places = torch.cat([near, rest])
    return places[differs[places]]


def holding(token: str, version: int) -> str:
    """Return the name of the weights `version` that came by the connection called `token`."""
    return f"{token}/{version}"
