"""Parts of a trained model that go to host memory and come back leave nothing behind on the device and change not one bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer

from megatron_rl.data.packing import make_shards
from megatron_rl.training import offload
from megatron_rl.training.offload import PARTS, ModelMemory, page_locked_bytes, piece_sizes
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainBatch

MakeTrainer = Callable[..., Trainer]
TinyModel = Callable[..., Path]
OPTIMIZER = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1, "adam_eps": 1e-6}
DISTRIBUTED = {"optimizer": {**OPTIMIZER, "use_distributed_optimizer": True}}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, distributed optimizer": DISTRIBUTED,
    "fp32, overlap": {**DISTRIBUTED, "ddp": {"overlap_param_gather": True, "overlap_grad_reduce": True}},
    "bf16": {"dtype": "bfloat16"},
    "bf16, distributed optimizer": {**DISTRIBUTED, "dtype": "bfloat16"},
    "bf16, overlap": {**DISTRIBUTED, "dtype": "bfloat16", "ddp": {"overlap_param_gather": True, "overlap_grad_reduce": True}},
}


def make_batch(seed: int) -> TrainBatch:
    random = np.random.default_rng(seed)
    lengths = np.array([5, 7, 4, 11])
    mask = np.concatenate([np.arange(length) >= 2 for length in lengths])
    return TrainBatch(
        tokens=random.integers(2, 30, lengths.sum()),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.full(4, 2),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -3.0, 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=random.random(4),
        group_ids=[0, 0, 1, 1],
        truncated=np.zeros(4),
    )


def train(trainer: Trainer, seed: int) -> dict[str, float]:
    shard = make_shards(make_batch(seed), dp=1, optimizer_steps=2, max_tokens_per_micro_batch=12, seed=seed)[0]
    steps = trainer.train_shard(shard)
    return {f"{index}/{name}": metric.value for index, step in enumerate(steps) for name, metric in step.items()}


def outcome(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def tensors_of(trainer: Trainer) -> list[torch.Tensor]:
    """Every tensor that a model, its gradient buffers and its optimizer hold, but for counts, which are in host memory on a GPU, too."""
    found: list[torch.Tensor] = []
    for model in trainer.trained_models().values():
        for chunk in model.chunks:
            found += list(chunk.parameters())
            found += [parameter.main_grad for parameter in chunk.parameters()]
        for optimizer in model.optimizer.chained_optimizers if isinstance(model.optimizer, ChainedOptimizer) else [model.optimizer]:
            found += [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]
            found += [moment for state in optimizer.optimizer.state.values() for name, moment in state.items() if name != "step"]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_for_bit_and_nothing_stays_behind(make_trainer: MakeTrainer, tiny_model: TinyModel, kind: str) -> None:
    path = tiny_model(tied=False)
    plain = make_trainer(path, **KINDS[kind])
    expected = [train(plain, seed) for seed in range(2)]
    weights = outcome(plain)

    trainer = make_trainer(path, **KINDS[kind])
    memory = ModelMemory(trainer.trained_models()["policy"])
    objects = [id(tensor) for tensor in tensors_of(trainer)]
    got = []
    for seed in range(2):
        got.append(train(trainer, seed))
        before = {part: memory.num_bytes(part) for part in PARTS}
        memory.put_away(["gradients", "optimizer"])
        assert memory.away == {"gradients", "optimizer"}
        # The weights are still here: they can be published.
        published = outcome(trainer)
        memory.put_away()
        assert [memory.num_bytes(part) for part in PARTS] == [0, 0, 0]
        assert {tensor.untyped_storage().nbytes() for tensor in tensors_of(trainer)} == {0}
        memory.put_away()
        memory.take_back(["parameters"])
        assert all(torch.equal(tensor, published[name]) for name, tensor in outcome(trainer).items())
        memory.take_back()
        memory.take_back()
        assert {part: memory.num_bytes(part) for part in PARTS} == before
    assert [id(tensor) for tensor in tensors_of(trainer)] == objects
    assert got == expected
    assert all(torch.equal(tensor, weights[name]) for name, tensor in outcome(trainer).items())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_and_loaded_is_put_away_as_what_was_made(
    make_trainer: MakeTrainer, tiny_model: TinyModel, tmp_path: Path, kind: str
) -> None:
    """As a colocated run that is resumed does first of all."""
    path = tiny_model(tied=False)
    saved = make_trainer(path, **KINDS[kind])
    train(saved, 0)
    saved.begin_save(tmp_path / "megatron", hf=tmp_path / "hf")
    saved.finish_save()
    resumed = make_trainer(path, **KINDS[kind])
    resumed.load(tmp_path / "megatron")
    for trainer in (saved, resumed):
        memory = ModelMemory(trainer.trained_models()["policy"])
        memory.put_away()
        assert [memory.num_bytes(part) for part in PARTS] == [0, 0, 0]
        memory.take_back()
    assert train(resumed, 1) == train(saved, 1)


@pytest.mark.parametrize(
    ("kind", "bytes_per_parameter"),
    [
        # Weights are the optimizer's own in fp32; bf16 has fp32 copies of them. Gradients are summed in fp32, two moments are fp32.
        ("fp32", (4, 4, 8)),
        ("fp32, distributed optimizer", (4, 4, 8)),
        ("bf16", (2, 4, 12)),
        ("bf16, distributed optimizer", (2, 4, 12)),
    ],
)
def test_each_part_has_the_bytes_of_its_arithmetic(
    make_trainer: MakeTrainer, tiny_model: TinyModel, kind: str, bytes_per_parameter: tuple[int, ...]
) -> None:
    trainer = make_trainer(tiny_model(tied=False), **KINDS[kind])
    model = trainer.trained_models()["policy"]
    memory = ModelMemory(model)
    count = sum(parameter.numel() for chunk in model.chunks for parameter in chunk.parameters())
    for part, expected in zip(PARTS, bytes_per_parameter, strict=True):
        # Buffers are padded so that ranks get equal shares.
        assert expected * count <= memory.num_bytes(part) <= expected * count * 1.05, part


def test_policy_and_critic_take_turns(make_trainer: MakeTrainer, tiny_model: TinyModel) -> None:
    ppo = {"advantage": {"kind": "gae"}}
    path = tiny_model(tied=False)
    plain = make_trainer(path, ppo)
    expected = [train(plain, seed) for seed in range(2)]
    trainer = make_trainer(path, ppo)
    models = trainer.trained_models()
    memories = {name: ModelMemory(model) for name, model in models.items()}
    assert set(memories) == {"policy", "critic"}
    got = []
    for seed in range(2):
        memories["critic"].put_away()
        memories["policy"].put_away(["optimizer"])
        trainer.log_probs(make_batch(seed))
        assert memories["critic"].num_bytes("parameters") == 0
        for memory in memories.values():
            memory.take_back()
        assert not memories["critic"].away
        got.append(train(trainer, seed))
    assert got == expected


def test_using_what_is_away_is_an_error(make_trainer: MakeTrainer, tiny_model: TinyModel) -> None:
    trainer = make_trainer(tiny_model())
    ModelMemory(trainer.trained_models()["policy"]).put_away(["parameters"])
    with pytest.raises(RuntimeError, match="storage"):
        trainer.log_probs(make_batch(0))


def test_storages_larger_than_a_piece_come_back_bit_for_bit(
    make_trainer: MakeTrainer, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PIECE_BYTES", 1000)
    trainer = make_trainer(tiny_model(), **KINDS["fp32, distributed optimizer"])
    memory = ModelMemory(trainer.trained_models()["policy"])
    weights = outcome(trainer)
    planned = memory.host_bytes()
    memory.put_away()
    pieces = [piece for stored in memory._away.values() for one in stored for piece in one.host or ()]
    assert max(map(len, pieces)) == 1000 and len(pieces) > 100
    assert planned == sum(1 << (len(piece) - 1).bit_length() for piece in pieces)
    memory.take_back()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in outcome(trainer).items())


def test_page_locked_memory_is_counted_as_torch_takes_it() -> None:
    """Each request is rounded up to a power of two, so large storages lie in equal pieces."""
    mib = 2**20
    assert piece_sizes(0) == [] and piece_sizes(128 * mib) == [128 * mib]
    assert piece_sizes(300 * mib) == [128 * mib, 128 * mib, 44 * mib]
    assert page_locked_bytes([300 * mib]) == 512 * mib
    assert page_locked_bytes(piece_sizes(300 * mib)) == 320 * mib
    assert page_locked_bytes([1, 2, 3, 0]) == 1 + 2 + 4


def test_torch_still_rounds_page_locked_memory() -> None:
    header = Path(torch.__file__).parent / "include/ATen/core/CachingHostAllocator.h"
    assert "PowerOf2Ceil(size)" in header.read_text(), "torch takes page-locked memory as it is asked: page_locked_bytes counts too much"


def test_on_a_gpu_nothing_is_freed_before_its_copy_is_done(
    make_trainer: MakeTrainer, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's way with a GPU pretended: copies that do not wait, page-locked memory that is kept, caches handed back."""
    trainer = make_trainer(tiny_model(), **KINDS["fp32, distributed optimizer"])
    memory = ModelMemory(trainer.trained_models()["policy"])
    weights, parts = outcome(trainer), sum(memory.num_bytes(part) for part in PARTS)
    events: list[tuple[str, int]] = []
    empty, pinned = torch.empty, []

    def page_locked(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        made = empty(*arguments, **named)
        if pin_memory:
            pinned.append(made)
        return made

    def note(event: str) -> Callable[..., None]:
        return lambda *_unused: events.append((event, sum(memory.num_bytes(part) for part in PARTS)))

    monkeypatch.setattr(memory, "_on_gpu", True)
    monkeypatch.setattr(torch, "empty", page_locked)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: any(tensor is one for one in pinned))
    monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", note("ipc_collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", note("empty_cache"))
    memory.put_away()
    assert events == [("synchronize", parts), ("ipc_collect", 0), ("empty_cache", 0)]
    memory.take_back()
    assert events[3:] == [("synchronize", parts)]
    count = len(pinned)
    memory.put_away()
    memory.take_back()
    assert len(pinned) == count > 0, "page-locked memory is slow to get: it is used again"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in outcome(trainer).items())
