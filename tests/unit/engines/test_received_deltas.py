"""Deltas of weights, merged into a model whose loaders cut, stack, cast, turn around and overwrite what they are handed."""

import itertools
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.engines.received_deltas import DELTA
from megatron_rl.engines.received_weights import follow, noted, order
from megatron_rl.weights import deltas
from megatron_rl.weights.deltas import Deltas, Message, holding, keep
from megatron_rl.weights.transport import WeightSpec, make_buckets

SHAPES = {
    "bias": ("bfloat16", (9,)),
    "q": ("bfloat16", (6, 8)),
    "k": ("bfloat16", (2, 8)),
    "down": ("bfloat16", (8, 12)),
    "head": ("bfloat16", (7, 8)),
    "router": ("float32", (3, 5)),
    "one": ("bfloat16", (1, 1)),
    "experts": ("bfloat16", (2, 4, 6)),
}
MANIFEST = [WeightSpec(name, dtype, shape) for name, (dtype, shape) in SHAPES.items()]
BUCKETS = make_buckets(MANIFEST, max_bytes=250)


class Model(torch.nn.Module):
    """A rank's part of the weights: rows of one, columns of another, two stacked, some turned around."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"qk": (4, 8), "down": (8, 6), "router": (3, 5), "head": (7, 8), "bias": (9,), "one": (1, 1), "experts": (2, 6, 4)}
        for name, shape in shapes.items():
            dtype = torch.float32 if name in ("router", "head") else torch.bfloat16
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, 7.0, dtype=dtype)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in list(weights):
            if name == "q":
                own["qk"].data[:3].copy_(torch.stack(list(tensor[3:])))
            elif name == "k":
                own["qk"].data.narrow(0, 3, 1).copy_(tensor.narrow(0, 1, 1))
            elif name == "down":
                own["down"].data.copy_(tensor[:, 6:])
            elif name == "bias":
                # As SGLang's gpt-oss on every rank but the first.
                own["bias"].data.copy_(tensor.zero_())
            elif name == "experts":
                for index, expert in enumerate(tensor):
                    own["experts"].data[index].copy_(expert.T)
            elif name == "head":
                # In the memory of those of the buckets before.
                own["head"].data.copy_(tensor.float())
            elif name == "one":
                own["one"].data.copy_(torch.cat([tensor * 2]))
            else:
                own[name].data.copy_(tensor)


def tell(model: Any, step: Any, **given: Any) -> None:
    follow(model, pickle.loads(order(step, **given)))


def named(message: Message) -> list[tuple[str, Tensor]]:
    assert message.bucket is not None
    if message.is_delta:
        return [(f"{DELTA}{message.bucket}", message.content)]
    parts = message.content.split([spec.num_bytes for spec in BUCKETS[message.bucket]])
    return [(spec.name, part.view(spec.torch_dtype).view(spec.shape)) for spec, part in zip(BUCKETS[message.bucket], parts, strict=True)]


def fresh(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for name, (dtype, shape) in SHAPES.items()}


def changed(weights: dict[str, Tensor], *, seed: int, share: float) -> dict[str, Tensor]:
    """An element of each, and a share of all."""
    generator, moved = torch.Generator().manual_seed(seed), fresh(seed)
    masks = {name: torch.rand(tensor.shape, generator=generator) < share for name, tensor in weights.items()}
    for mask in masks.values():
        mask.view(-1)[-1] = True
    return {name: torch.where(masks[name], moved[name], tensor) for name, tensor in weights.items()}


class Rank:
    """The sender of a connection."""

    def __init__(self) -> None:
        self.deltas = Deltas(BUCKETS, token="here")

    def sync(self, model: Model, weights: dict[str, Tensor], *, version: int, checked: bool = False) -> list[str]:
        """Give the model a version; return the announcements."""
        said, sums = [], dict[str, int]()
        tell(model, "note" if checked else "begin")
        for message in self.deltas.messages(noted(weights.items(), sums), version=version, checked=checked):
            said.append(str(message))
            if message.bucket is None:
                tell(model, "digest")
            else:
                model.load_weights(named(Message(message.bucket, message.content.clone(), is_delta=message.is_delta)))
        tell(model, "end", expected=sums if checked else None, holds=holding("here", version))
        return said


def state(model: Model) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def whole(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    model = Model()
    model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])
    return state(model)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


@pytest.mark.parametrize("inference", [False, True])
def test_deltas_leave_what_whole_weights_leave(inference: bool) -> None:
    model, rank, weights = Model(), Rank(), fresh(0)
    with torch.inference_mode(inference), torch.no_grad():
        assert rank.sync(model, weights, version=1, checked=True) == [str(number) for number in range(len(BUCKETS))]
        for version, checked in ((2, True), (3, False), (4, False), (14, True)):
            weights = changed(weights, seed=version, share=0.03)
            said = rank.sync(model, weights, version=version, checked=checked)
            assert all(" " in each for each in said[: len(BUCKETS)]), said
            assert said[len(BUCKETS) :] == (["digest", *map(str, range(len(BUCKETS)))] if checked else [])
            assert same(state(model), whole(weights))


def test_nothing_changed_and_everything_changed() -> None:
    model, rank, weights = Model(), Rank(), fresh(0)
    rank.sync(model, weights, version=1)
    assert all(" " in each for each in rank.sync(model, weights, version=2)) and same(state(model), whole(weights))
    weights = changed(weights, seed=5, share=0.9)
    assert rank.sync(model, weights, version=3) == [str(number) for number in range(len(BUCKETS))], "no gain"
    weights = {**weights, "head": weights["head"].index_fill(0, torch.tensor([2]), float("nan"))}
    said = rank.sync(model, weights, version=4)
    assert [" " in each for each in said] == ["head" not in {spec.name for spec in bucket} for bucket in BUCKETS], "NaN is sent as it is"
    assert same(state(model), whole(weights))
    # Zeros of both signs have different bits.
    weights = {name: -tensor if name == "router" else tensor for name, tensor in weights.items()}
    weights["head"] = torch.zeros(7, 8, dtype=torch.bfloat16)
    rank.sync(model, weights, version=5)
    weights["head"][3, 4] = -0.0
    rank.sync(model, weights, version=6)
    assert same(state(model), whole(weights)) and model.head[3, 4].signbit()


def test_memory_of_deltas_is_used_again_unless_a_sync_failed() -> None:
    """What a loader that failed left in it would be written to elements without a change."""
    model, rank, weights = Model(), Rank(), fresh(0)
    rank.sync(model, weights, version=1)
    receiving: Any = None
    places = []
    for version in (2, 3):
        weights = changed(weights, seed=version, share=0.03)
        rank.sync(model, weights, version=version)
        receiving = model.load_weights
        places.append(receiving._merge._scratch.data_ptr())
    assert places[0] == places[1] != 0 and bool((receiving._merge._scratch == 255).all())
    tell(model, "begin")
    receiving._merge._scratch.zero_()
    model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])
    rank = Rank()
    for version in (4, 5):
        rank.sync(model, weights, version=version)
        weights = changed(weights, seed=version, share=0.03)
    rank.sync(model, weights, version=6)
    assert same(state(model), whole(weights))


def test_a_delta_to_other_weights_is_refused() -> None:
    weights = fresh(0)

    def synced() -> tuple[Model, Rank]:
        model, rank = Model(), Rank()
        rank.sync(model, weights, version=1)
        return model, rank

    model, rank = synced()
    model.load_weights([("head", weights["head"])])  # by someone else
    with pytest.raises(RuntimeError, match="is to the weights here/1, and this engine has None"):
        rank.sync(model, weights, version=2)
    _, rank = synced()
    with pytest.raises(RuntimeError, match="and this engine has None"):
        rank.sync(Model(), weights, version=2)
    model, rank = synced()
    tell(model, "begin")  # a sync that was broken off
    with pytest.raises(RuntimeError, match="and this engine has None"):
        rank.sync(model, weights, version=2)
    model, rank = synced()
    rank.sync(synced()[0], weights, version=2)
    with pytest.raises(RuntimeError, match="is to the weights here/2, and this engine has here/1"):
        rank.sync(model, weights, version=3)


def test_a_sender_that_broke_off_sends_everything() -> None:
    model, rank, weights = Model(), Rank(), fresh(0)
    rank.sync(model, weights, version=1)
    weights = changed(weights, seed=2, share=0.03)
    next(rank.deltas.messages(iter(weights.items()), version=2, checked=False))
    assert rank.sync(model, weights, version=3) == [str(number) for number in range(len(BUCKETS))]


def test_every_changed_bit_of_a_delta_is_seen() -> None:
    model, rank, weights = Model(), Rank(), fresh(0)
    rank.sync(model, weights, version=1)
    weights = changed(weights, seed=1, share=0.05)
    message = next(rank.deltas.messages(iter(weights.items()), version=2, checked=False))
    assert message.is_delta
    tell(model, "begin")
    for place in itertools.chain(range(24), range(len(message.content) - 24, len(message.content))):
        broken = message.content.clone()
        broken[place] ^= 16
        with pytest.raises((RuntimeError, ValueError)):
            model.load_weights(named(Message(message.bucket, broken, is_delta=True)))


def test_loaders_that_keep_no_element_are_found_out() -> None:
    """A loader that writes by other means than a copy would leave NaN: the comparison with whole weights tells."""

    class Assigns(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                if name == "head":
                    self.head.data[...] = tensor

    model, rank, weights = Assigns(), Rank(), fresh(0)
    rank.sync(model, weights, version=1)
    match = r"1 of 7 weights are other ones by deltas than by themselves, needs 0; set weights.delta to false: head"
    with pytest.raises(RuntimeError, match=match):
        rank.sync(model, changed(weights, seed=1, share=0.05), version=2, checked=True)


@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 1), (torch.bfloat16, 16), (torch.float32, 21), (torch.float16, 100)])
def test_changes_are_those_of_a_loop(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, length: int) -> None:
    monkeypatch.setattr(deltas, "_PART", 6)
    before = torch.randn(length).to(dtype)
    for places in ([], [0], [length - 1], list(range(0, length, 3)), list(range(length))):
        after, kept = before.clone(), before.clone().view(torch.uint8)
        for place in places:
            after[place] = -after[place]
        found = keep(kept, after, most=len(places))
        assert found is not None and found[0].tolist() == places and torch.equal(found[1], after[places])
        assert torch.equal(kept, after.view(torch.uint8))
        assert not places or keep(before.clone().view(torch.uint8), after, most=len(places) - 1) is None
