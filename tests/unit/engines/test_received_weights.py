"""Checksums of what comes, against a loop in whole numbers."""

import itertools
import math
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.engines import received_weights
from megatron_rl.engines.received_weights import checksum, follow, noted, order

FACTOR = 0x9E3779B97F4A7C15


def expected_checksum(tensor: Tensor, chunk: int) -> int:
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)]
    total = 0
    for start in range(0, len(words), chunk):
        products = [signed(word * FACTOR) for word in words[start : start + chunk]]
        total = total * FACTOR + sum((product ^ product >> 32) * (2 * place + 1) for place, product in enumerate(products))
    return signed(total)


def signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 * (number >= 2**63)


@pytest.mark.parametrize(("shape", "dtype"), [((5, 7), torch.bfloat16), ((3, 4, 2), torch.float32), ((1,), torch.uint8)])
def test_a_checksum_is_that_of_the_formula(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_weights, "_CHUNK", 4)
    numbers = np.random.default_rng(0).integers(1, 100, math.prod(shape))
    tensor = torch.from_numpy(numbers).view(shape).to(dtype)
    assert checksum(tensor) == expected_checksum(tensor, 4)
    if tensor.dim() > 1:
        assert checksum(tensor.transpose(0, 1)) == expected_checksum(tensor.transpose(0, 1), 4) != checksum(tensor)
    # Where it lies does not matter, also not beside 8 bytes.
    flat = torch.cat([torch.zeros(3, dtype=torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)])
    assert checksum(flat[3:]) == checksum(tensor)


def test_no_changed_bit_and_no_swap_stays_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_weights, "_CHUNK", 4)
    words = torch.arange(1, 11)
    found = {checksum(words)}
    for place, bit in itertools.product(range(10), range(64)):
        changed = words.clone()
        changed[place] ^= 1 << bit if bit < 63 else -(2**63)
        found.add(checksum(changed))
    for one, other in itertools.combinations(range(10), 2):
        swapped = words.clone()
        swapped[[one, other]] = swapped[[other, one]]
        found.add(checksum(swapped))
    assert len(found) == 1 + 640 + 45
    signs = torch.tensor([0, 1] * 10, dtype=torch.int32) << 31
    two = [checksum(torch.randn(20).view(torch.int32) ^ signs * (torch.arange(20) < number)) for number in (0, 2, 4)]
    assert len(set(two)) == 3


class Model:
    """What SGLang hands to a loader: it has loads of its own."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded |= dict(weights)


def ask(model: Model, expected: Any) -> None:
    follow(model, pickle.loads(order("note") if expected is None else order("end", expected=expected)))


def test_what_comes_is_loaded_and_compared() -> None:
    sent = {f"w{number}": torch.full((2, 3), float(number)) for number in range(7)}
    expected: dict[str, int] = {}
    assert dict(noted(sent.items(), expected)) == sent
    model = Model()

    def receives(weights: dict[str, Tensor], checksums: dict[str, int]) -> None:
        ask(model, None)
        for each in weights.items():
            model.load_weights([each])
        ask(model, checksums)

    receives(sent, expected)
    assert model.loaded.keys() == sent.keys()
    # Files may have more than what is trained.
    receives({**sent, "more": torch.ones(1)}, expected)
    with pytest.raises(RuntimeError, match=r"1 of 7 weights did not come as the trainer sent them, needs 0: w3$"):
        receives({**sent, "w3": torch.zeros(2, 3)}, expected)
    with pytest.raises(RuntimeError, match=r"6 of 7 weights .*: w1, w2, w3, w4, …$"):
        receives({"w0": sent["w0"]}, expected)
    # Noting begins anew after an update that was broken off.
    ask(model, None)
    model.load_weights([("w1", sent["w2"])])
    receives(sent, expected)
