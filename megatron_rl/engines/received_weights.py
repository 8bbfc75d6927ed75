"""Weights as an engine gets them: checksums, compared with the ranks' inside the engine, and deltas.

A rank notes the checksum of every tensor that it sends. An engine notes those of every tensor that
SGLang hands to the model, by any transport, and ends when one differs. That the model keeps what it
is handed is shown by the first sync (`weights.parity`), as it sends the same names and shapes.
"""

import itertools
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.engines.received_deltas import DELTA, Merge
from megatron_rl.engines.server_args import WeightOrder

_CHUNK = 2**16  # words of 8 bytes
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""An odd number with bits set all over."""
NAMED = 4


def checksum(tensor: Tensor) -> int:
    """Return 64 bits that differ where one word of 8 bytes of `tensor` does, or two are swapped.

    That is Σ mixed(word · factor) · (2 place + 1) within a chunk, over chunks by Horner's rule, modulo
    2^64, of the bytes in row-major order with zeros behind, where `mixed` lets high bits change low
    ones: x ^ x >> 32 of signed numbers. The same on every device, for any shape [...] but an empty one.
    """
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    places = 2 * torch.arange(min(_CHUNK, -(-flat.nbytes // 8)), device=flat.device) + 1
    words = torch.zeros_like(places)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in flat.split(8 * _CHUNK):
        some = words[: -(-len(chunk) // 8)]
        some[-1:] = 0
        some.view(torch.uint8)[: len(chunk)].copy_(chunk)
        some.mul_(_FACTOR)
        some.bitwise_xor_(some >> 32).mul_(places[: len(some)])
        total = total * _FACTOR + some.sum()
    return int(total)


def noted(weights: Iterable[tuple[str, Tensor]], checksums: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, each with its checksum noted in `checksums` before."""
    for name, tensor in weights:
        checksums[name] = checksum(tensor)
        yield name, tensor


def order(step: WeightOrder, *, expected: Mapping[str, int] | None = None, holds: str | None = None) -> bytes:
    """Return SGLang's form of an order to `follow`."""
    return pickle.dumps([(json.dumps({"step": step, "expected": expected, "holds": holds}), _Empty())])


class _Empty:
    """Unpickled as a tensor without elements, which SGLang wants beside each name."""

    def __reduce__(self) -> tuple[type[Tensor], tuple[()]]:
        return Tensor, ()


def follow(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Follow an order about the weights of a sync, between two of its messages.

    "end" compares with `expected` checksums, and names what the model `holds` from then on, for
    deltas to it. Weights that come after "digest" have to leave the model's own as they are. Raises
    RuntimeError, which ends the engine, for a difference.
    """
    ((text, _),) = named_tensors
    if not isinstance(model.load_weights, _Receiving):
        model.load_weights = _Receiving(model)
    receiving, given = model.load_weights, json.loads(text)
    step: WeightOrder = given["step"]
    if step == "digest":
        receiving.note_digest()
    elif step == "end":
        receiving.end(given["expected"], given["holds"])
    else:
        receiving.begin(notes=step == "note")


class _Receiving:
    """The `load_weights` of a `model`, with checksums of what comes, and deltas among it."""

    def __init__(self, model: Any) -> None:
        self._model, self._load = model, model.load_weights
        self._is_open = False
        self._checksums: dict[str, int] | None = None
        self._digest: dict[str, int] | None = None
        self._base: str | None = None
        self._holds: str | None = None
        self._merge = Merge(checksum)

    def __call__(self, weights: Iterable[tuple[str, Tensor]], *arguments: Any, **keywords: Any) -> Any:
        if not self._is_open:
            self._holds = None
        load, deltas, result = partial(self._load, **keywords), list[Tensor](), None
        whole = _but_deltas(weights, deltas)
        whole = whole if self._checksums is None else noted(whole, self._checksums)
        first = next(whole, None)
        if first is not None:
            result = load(itertools.chain([first], whole), *arguments)
        for delta in deltas:
            self._merge.load(delta, load, base=self._base)
        return result

    def begin(self, *, notes: bool) -> None:
        """Begin a sync; until its end nothing can be a base of deltas."""
        if self._is_open:  # a sync failed, maybe in the middle of a delta
            self._merge = Merge(checksum)
        self._base, self._holds, self._is_open = self._holds, None, True
        self._checksums, self._digest = {} if notes else None, None

    def note_digest(self) -> None:
        """Note checksums of the model's tensors."""
        self._digest = self._own()

    def end(self, expected: Mapping[str, int] | None, holds: str | None) -> None:
        """End the sync. Raises RuntimeError for other weights than `expected`, or than were noted."""
        assert self._is_open, "was asked to begin first"
        checksums, before = self._checksums or {}, self._digest
        self._is_open, self._checksums, self._digest = False, None, None
        self._merge.rest()
        _check_equal(checksums, expected or {}, "did not come as the trainer sent them, needs 0")
        if before is not None:
            _check_equal(self._own(), before, "are other ones by deltas than by themselves, needs 0; set weights.delta to false")
        self._holds = holds

    def _own(self) -> dict[str, int]:
        named = itertools.chain(self._model.named_parameters(), self._model.named_buffers())
        return {name: checksum(tensor) for name, tensor in named if tensor.numel()}


def _but_deltas(weights: Iterable[tuple[str, Tensor]], deltas: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield what are whole weights; collect `deltas`."""
    for name, tensor in weights:
        if name.startswith(DELTA):
            deltas.append(tensor)
        else:
            yield name, tensor


def _check_equal(got: Mapping[str, int], expected: Mapping[str, int], words: str) -> None:
    wrong = [name for name, value in expected.items() if got.get(name) != value]
    if wrong:
        named = ", ".join(wrong[:NAMED]) + ", …" * (len(wrong) > NAMED)
        raise RuntimeError(f"{len(wrong)} of {len(expected)} weights {words}: {named}")
