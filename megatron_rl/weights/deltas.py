"""What changed in the weights since the last sync, in place of the weights.

A rank that sends keeps a copy of its weights in host memory, bucket by bucket. A bucket with changes
in a tenth of its elements is sent as a delta, one with changes in half of them whole. The first sync
of a connection sends everything, so that an engine that returns has a base. A checked one with deltas
sends everything after them: engines compare what both leave. The engines' half is
`engines.received_deltas`.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl.engines.received_deltas import integers, pack
from megatron_rl.engines.received_weights import checksum
from megatron_rl.weights.transport import WeightSpec, check_all_taken, fill_buckets, next_weight, num_bucket_bytes

GAIN = 2
"""How much smaller than its bucket a delta has to be."""
_INDEX_BYTES = 4
_PART = 2**16  # elements that are compared together
Numbers = npt.NDArray[Any]


DIGEST: Literal["digest"] = "digest"  # announces that all buckets follow, for comparison
END = "end"  # is announced behind the last message


@dataclass(frozen=True, slots=True)
class Message:
    """`content` [bytes] uint8 for a `bucket` by number: a delta, or the bucket.

    Without a bucket it says that all buckets follow, for comparison.
    """

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
        self._kept: list[Tensor] = []
        self._base: str | None = None

    def messages(self, weights: Iterator[tuple[str, Tensor]], *, version: int, checked: bool) -> Iterator[Message]:
        """Yield what to send for `weights`, all of the buckets in order; a message is good until the next alone."""
        base, self._base = self._base, None
        if base is None:
            self._kept = []
            for number, flat in enumerate(fill_buckets(weights, self._buckets)):
                self._kept.append(flat.to("cpu", copy=True))
                yield Message(number, flat)
        else:
            for number in range(len(self._buckets)):
                device, delta = self._take(number, weights, base)
                yield Message(number, self._kept[number].to(device)) if delta is None else Message(number, delta, is_delta=True)
            check_all_taken(weights)
            if checked:
                yield Message(None, self._kept[0][:0])
                for number, kept in enumerate(self._kept):
                    yield Message(number, kept.to(device))
        self._base = holding(self._token, version)

    def _take(self, number: int, weights: Iterator[tuple[str, Tensor]], base: str) -> tuple[torch.device, Tensor | None]:
        """Keep the next bucket of `weights`; return its device and its delta, None where it is no gain."""
        bucket, kept, start = self._buckets[number], self._kept[number], 0
        room, runs, device = num_bucket_bytes(bucket) // GAIN, list[tuple[Tensor, Tensor]](), kept.device
        for dtype, specs in itertools.groupby(bucket, key=lambda spec: spec.torch_dtype):
            first, places, values = start, list[Tensor](), list[Tensor]()
            for spec in specs:
                tensor, part = next_weight(weights, spec), kept[start : start + spec.num_bytes]
                device, size = tensor.device, _INDEX_BYTES + dtype.itemsize
                changed = keep(part, tensor, most=room // size) if room >= 0 else None
                if changed is None:
                    part.view(dtype).view(spec.shape).copy_(tensor)
                    room = -1
                else:
                    places.append(changed[0] + (start - first) // dtype.itemsize)
                    values.append(changed[1])
                    room -= size * len(changed[0])
                start += spec.num_bytes
            if room >= 0:
                runs.append((torch.cat(places), torch.cat(values)))
            # Places go as 32 bits.
            room = room if (start - first) // dtype.itemsize < 2**31 else -1
        described = [(spec.name, spec.dtype, spec.shape) for spec in bucket]
        return device, pack(described, runs, base=base, checksum=checksum) if room >= 0 else None


def keep(kept: Tensor, tensor: Tensor, *, most: int) -> tuple[Tensor, Tensor] | None:
    """Write `tensor` [...] over the earlier bits of it that were `kept` [bytes] uint8 on the host.

    Return places [changes] int64, in rising order, and values [changes] of elements with other bits than
    before. None for more than `most`, or with NaN, the mark of an unchanged one: then `kept` has any content.
    """
    after = tensor.detach().reshape(-1).contiguous().view(integers(tensor.dtype))
    before = kept.view(after.dtype)
    if after.is_cuda:
        places = (before.to(after.device, non_blocking=True) != after).nonzero()[:, 0]
        values = after[places]
        before[places.cpu()] = values.cpu()
    else:
        found = _changes_on_the_host(before.numpy(), after.numpy(), most=most)
        if found is None:
            return None
        places, values = map(torch.from_numpy, found)
    values = values.view(tensor.dtype)
    return None if len(places) > most or values.isnan().any() else (places, values)


def _changes_on_the_host(before: Numbers, after: Numbers, *, most: int) -> tuple[Numbers, Numbers] | None:
    """Return places and values as `keep`, part by part: caches have room for one. Write into `before`."""
    places, count = [np.empty(0, np.int64)], 0
    values = [after[:0]]
    for start in range(0, len(after), _PART):
        old, new = before[start : start + _PART], after[start : start + _PART]
        near = np.flatnonzero(old != new)
        old[near] = part = new[near]
        places.append(near + start)
        values.append(part)
        count += len(near)
        if count > most:
            return None
    return np.concatenate(places), np.concatenate(values)


def holding(token: str, version: int) -> str:
    """Return the name of the weights `version` that came by the connection called `token`."""
    return f"{token}/{version}"
