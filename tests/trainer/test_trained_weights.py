"""Which weights are trained, in which precision, with how much decay; and what of the logits a training step holds at once."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.algorithms import head_statistics
from megatron_rl.data.packing import make_shards
from megatron_rl.errors import UserError
from megatron_rl.models.build import TrainedModel
from megatron_rl.models.freezing import frozen_rules
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainBatch

MakeTrainer = Callable[..., Trainer]
SUPERVISED = {"policy_loss": "sft", "aggregation": "token_mean"}
PPO = {"advantage": {"kind": "gae"}}
DISTRIBUTED = {"use_distributed_optimizer": True}
UNCLIPPED = {"lr": 1e-3, "clip_grad": 0.0, "weight_decay": 0.1, "adam_eps": 1e-6}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def make_batch(lengths: list[int], *, prompt: int = 2, vocab: int = 32) -> TrainBatch:
    """Random sequences, all of which is trainable behind the prompt."""
    total = sum(lengths)
    mask = np.concatenate([np.arange(length) >= prompt for length in lengths])
    return TrainBatch(
        tokens=np.random.default_rng(total).integers(0, vocab, total),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.full(len(lengths), prompt),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -3.0, 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=np.arange(len(lengths), dtype=np.float64),
        group_ids=np.zeros(len(lengths), dtype=np.int64),
        truncated=np.zeros(len(lengths), dtype=bool),
    )


BATCH = make_batch([9, 5, 14, 3])


def train(trainer: Trainer, batch: TrainBatch = BATCH, *, steps: int = 1, max_tokens: int = 12) -> dict[str, float]:
    """Values of the last step's metrics."""
    for _ in range(steps):
        shard = make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=max_tokens, seed=0)[0]
        metrics = trainer.train_shard(shard)[0]
        assert metrics["train/skipped_steps"].value == 0
    return {name: metric.value for name, metric in metrics.items()}


def policy_of(trainer: Trainer) -> TrainedModel:
    return trainer.trained_models()["policy"]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


# Frozen weights.


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["model.embed_token.*"], r"matches no tensor of the model; the closest name is model\.embed_tokens\.weight"),
        (["*.q_proj.weight"], r"but not model\.layers\.0\.self_attn\.k_proj\.weight, .*v_proj\.weight, which are one parameter"),
        (["*.layers.1.mlp.gate_proj.weight"], r"freezes model\.layers\.1\.mlp\.gate_proj\.weight but not model\.layers\.1\.mlp\.up_proj"),
        (["*"], "nothing to train"),
    ],
)
def test_patterns_that_cannot_be_are_refused(tiny_model: Callable[..., Path], patterns: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        frozen_rules(read_model_spec(tiny_model(layers=2)), patterns)


FROZEN = ["model.embed_tokens.*", "*.layers.0.*", "*_layernorm.weight", "lm_head.weight"]


def is_frozen(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in FROZEN)


@pytest.mark.parametrize("megatron", [{}, RECOMPUTED], ids=["kept", "recomputed"])
@pytest.mark.parametrize("optimizer", [{}, DISTRIBUTED], ids=["plain", "distopt"])
def test_frozen_weights_stay_and_the_others_train_as_without(
    make_trainer: MakeTrainer, tiny_model: Callable[..., Path], megatron: dict[str, Any], optimizer: dict[str, bool]
) -> None:
    path = tiny_model(tied=False, layers=2)
    free = make_trainer(path, SUPERVISED, optimizer=UNCLIPPED)
    initial = weights_of(free)
    train(free)
    want = weights_of(free)
    trainer = make_trainer(path, SUPERVISED, optimizer={**UNCLIPPED, **optimizer}, megatron=megatron, frozen=FROZEN)
    metrics = train(trainer)
    for name, tensor in weights_of(trainer).items():
        assert torch.equal(tensor, initial[name] if is_frozen(name) else want[name]), name
        assert is_frozen(name) or not torch.equal(tensor, initial[name]), f"{name} was not trained"
    chunk = policy_of(trainer).chunks[0]
    trained = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    assert all(parameter.main_grad is not None for parameter in trained)
    norm = torch.stack([parameter.main_grad.norm() for parameter in trained]).norm()
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    padding = 128 * len(trained)
    assert sum(buffer.grad_data.numel() for buffer in chunk.buffers) <= sum(parameter.numel() for parameter in trained) + padding


@pytest.mark.parametrize("optimizer", [{}, DISTRIBUTED], ids=["plain", "distopt"])
def test_a_checkpoint_with_frozen_weights_continues_bit_equal(
    make_trainer: MakeTrainer, tiny_model: Callable[..., Path], tmp_path: Path, optimizer: dict[str, bool]
) -> None:
    path, training = tiny_model(tied=False, layers=2), {"optimizer": {**UNCLIPPED, **optimizer}, "frozen": FROZEN}
    straight = make_trainer(path, SUPERVISED, **training)
    train(straight, steps=2)
    straight.save(tmp_path / "checkpoint")
    train(straight)
    want = weights_of(straight)
    resumed = make_trainer(path, SUPERVISED, **training)
    resumed.load(tmp_path / "checkpoint")
    train(resumed)
    for name, tensor in weights_of(resumed).items():
        assert torch.equal(tensor, want[name]), name


def test_a_rank_with_nothing_to_train_is_refused(
    make_trainer: MakeTrainer, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def freeze_stage(chunks: list[torch.nn.Module], *_: Any) -> None:
        for chunk in chunks:
            chunk.requires_grad_(False)

    monkeypatch.setattr("megatron_rl.training.trained_model.freeze", freeze_stage)
    with pytest.raises(UserError, match="leaves a pipeline stage with nothing to train"):
        make_trainer(tiny_model(), SUPERVISED, optimizer={**UNCLIPPED, **DISTRIBUTED}, frozen=FROZEN)


# Weight decay.


@pytest.mark.parametrize("optimizer", [{}, DISTRIBUTED], ids=["plain", "distopt"])
def test_matrices_decay_and_biases_and_norms_do_not(
    make_trainer: MakeTrainer, tiny_model: Callable[..., Path], optimizer: dict[str, bool]
) -> None:
    path = tiny_model(architectures=["Qwen2ForCausalLM"], model_type="qwen2", tied=False)
    trainer = make_trainer(path, PPO, optimizer={**UNCLIPPED, **optimizer})
    train(trainer)
    for name, model in trainer.trained_models().items():
        parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
        assert any(parameter.shape == (1, 64) for parameter in parameters) == (name == "critic"), "the value head is a matrix of one row"
        found = {0.0: 0, 0.1: 0}
        for group in model.optimizer.param_groups:
            found[group["weight_decay"]] += sum(parameter.numel() for parameter in group["params"])
        vectors = sum(parameter.numel() for parameter in parameters if parameter.ndim == 1)
        assert found == {0.0: vectors, 0.1: sum(parameter.numel() for parameter in parameters) - vectors}, name


# Mixed precision.


def main_parameters(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter for group in policy_of(trainer).optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("optimizer", [{}, DISTRIBUTED], ids=["plain", "distopt"])
def test_updates_too_small_for_bfloat16_add_up_in_float32(
    make_trainer: MakeTrainer, tiny_model: Callable[..., Path], tmp_path: Path, optimizer: dict[str, bool]
) -> None:
    fields = {**UNCLIPPED, **optimizer, "lr": 1.9e-3, "weight_decay": 0.0}
    path, training = tiny_model(), {"dtype": "bfloat16", "optimizer": fields, "reference_interval": 1}
    trainer = make_trainer(path, **training)
    assert {parameter.dtype for parameter in policy_of(trainer).chunks[0].parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in main_parameters(trainer)} == {torch.float32}
    initial, initial_main = weights_of(trainer)["model.norm.weight"], [parameter.clone() for parameter in main_parameters(trainer)]
    train(trainer)
    # Next to 1 a bfloat16 has steps of 2^-7 or 2^-8, and an update of at most 1.9e-3 rounds to none of them.
    assert torch.equal(weights_of(trainer)["model.norm.weight"], initial)
    assert all(not torch.equal(parameter, before) for parameter, before in zip(main_parameters(trainer), initial_main, strict=True))
    train(trainer, steps=4)
    moved = (weights_of(trainer)["model.norm.weight"] != initial).float().mean()
    assert moved > 0.5, f"{moved:.0%} of the weights moved"
    main = [parameter.clone() for parameter in main_parameters(trainer)]
    trainer.log_probs(BATCH, reference=True)
    assert all(torch.equal(parameter, before) for parameter, before in zip(main_parameters(trainer), main, strict=True))
    trainer.save(tmp_path / "checkpoint")
    resumed = make_trainer(path, **training)
    resumed.load(tmp_path / "checkpoint")
    assert all(torch.equal(parameter, before) for parameter, before in zip(main_parameters(resumed), main, strict=True))


# Logits.


class LargestLogits(TorchDispatchMode):
    """The most elements of a new tensor with `columns` columns; weights and their gradients have them too and are left out by `hidden`."""

    def __init__(self, *, columns: int, hidden: int) -> None:
        super().__init__()
        self.columns, self.hidden, self.elements = columns, hidden, 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and self.columns in tensor.shape and self.hidden not in tensor.shape:
                self.elements = max(self.elements, tensor.numel())
        return made


def test_a_step_holds_logits_of_one_chunk_whatever_the_lengths(
    make_trainer: MakeTrainer, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, rows = 37, 8
    monkeypatch.setitem(head_statistics._CHUNK_LOGITS, "cpu", rows * vocab)
    trainer = make_trainer(tiny_model(vocab=vocab), {"kl": {"coef": 0.1}, "entropy": {"coef": 0.01}}, max_tokens_per_micro_batch=1000)
    batches = {
        "short": make_batch([12, 12], vocab=vocab),
        "long prompts": make_batch([200, 230], prompt=180, vocab=vocab),
        "long responses": make_batch([200, 230], vocab=vocab),
    }
    for name, batch in batches.items():
        with LargestLogits(columns=vocab, hidden=64) as looking:
            trainer.log_probs(batch)
        with LargestLogits(columns=vocab, hidden=64) as training:
            train(trainer, batch, max_tokens=1000)
        # Three planes of scratch for the softmax of a chunk.
        assert looking.elements == training.elements == 3 * rows * vocab, name
