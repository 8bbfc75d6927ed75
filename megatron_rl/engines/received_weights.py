"""Checksums of weights on both ends of a sync, compared inside the engine.

A rank notes the checksum of every tensor that it sends. An engine notes those of every tensor that
SGLang hands to the model, by any transport, and ends when one differs. That the model keeps what it
is handed is shown by the first sync (`weights.parity`), as it sends the same names and shapes.
"""

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_NOTE = "note"  # in place of checksums: begin to note
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


def order(expected: Mapping[str, int] | None) -> bytes:
    """Return SGLang's form of an order to `note_or_compare`: to compare with `expected`, to note for None."""
    return pickle.dumps([(_NOTE if expected is None else json.dumps(expected), _Empty())])


class _Empty:
    """Unpickled as a tensor without elements, which SGLang wants beside each name."""

    def __reduce__(self) -> tuple[type[Tensor], tuple[()]]:
        return Tensor, ()


def note_or_compare(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Begin to note, or end and compare what was noted, as the only name says.

    Raises RuntimeError, which ends the engine, for tensors that did not come or came with other bits.
    """
    ((text, _),) = named_tensors
    loading = model.load_weights
    if isinstance(loading, _NotingLoad):
        model.load_weights = loading.load
    if text == _NOTE:
        model.load_weights = _NotingLoad(model.load_weights)
        return
    assert isinstance(loading, _NotingLoad), "was asked to note first"
    expected: dict[str, int] = json.loads(text)
    wrong = [name for name, value in expected.items() if loading.checksums.get(name) != value]
    if wrong:
        named = ", ".join(wrong[:NAMED]) + ", …" * (len(wrong) > NAMED)
        raise RuntimeError(f"{len(wrong)} of {len(expected)} weights did not come as the trainer sent them, needs 0: {named}")


class _NotingLoad:
    """A model's `load_weights`, with the checksums of what comes."""

    def __init__(self, load: Callable[[Iterable[tuple[str, Tensor]]], Any]) -> None:
        self.load, self.checksums = load, dict[str, int]()

    def __call__(self, weights: Iterable[tuple[str, Tensor]], *arguments: Any, **keywords: Any) -> Any:
        return self.load(noted(weights, self.checksums), *arguments, **keywords)
