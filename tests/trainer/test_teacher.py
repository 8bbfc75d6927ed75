"""A teacher of another architecture: its log-probs are those of transformers, and the policy comes closer to it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.objective import Objective
from megatron_rl.data.packing import make_shards
from megatron_rl.errors import UserError
from megatron_rl.training.teacher import check_vocabulary
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainBatch

MakeTrainer = Callable[..., Trainer]
TEMPERATURE = 0.7
DISTILLATION = {"distillation_coef": 1.0}
TEACHER = {"name": "teacher", "seed": 5, "hidden": 32, "layers": 3, "tied": False}
ROWS = [[3, 9, 4, 4, 30], [8, 2, 17, 1], [5, 6, 7, 8, 9, 10, 11, 12, 13], [1, 2, 3, 4]]
PROMPT = 2


def make_batch() -> TrainBatch:
    """Equal rewards: the advantages are zero, so that the teacher alone teaches."""
    lengths = np.array([len(row) for row in ROWS])
    mask = np.concatenate([np.arange(length) >= PROMPT for length in lengths])
    return TrainBatch(
        tokens=np.concatenate(ROWS),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.full(len(ROWS), PROMPT),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -3.0, 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=np.ones(len(ROWS)),
        group_ids=np.zeros(len(ROWS), dtype=np.int64),
        truncated=np.zeros(len(ROWS), dtype=bool),
    )


def train(trainer: Trainer) -> dict[str, float]:
    shard = make_shards(make_batch(), dp=1, optimizer_steps=1, max_tokens_per_micro_batch=12, seed=0)[0]
    return {name: metric.value for name, metric in trainer.train_shard(shard)[0].items()}


def trainable_log_probs(path: Path) -> np.ndarray:
    """Of the trainable tokens, by transformers in float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    found = []
    with torch.no_grad():
        for row in ROWS:
            log_probs = (model(torch.tensor([row])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            found.append(log_probs[torch.arange(len(row) - 1), row[1:]][PROMPT - 1 :].numpy())
    return np.concatenate(found)


@pytest.fixture
def paths(tiny_model: Callable[..., Path]) -> tuple[Path, Path]:
    """A policy and a teacher."""
    return tiny_model(), tiny_model(**TEACHER)


def test_the_teacher_is_asked_and_the_policy_comes_closer(make_trainer: MakeTrainer, paths: tuple[Path, Path]) -> None:
    policy, teacher = paths
    trainer = make_trainer(policy, DISTILLATION, teacher=teacher, optimizer={"lr": 4e-3})
    expected = float((trainable_log_probs(policy) - trainable_log_probs(teacher)).mean())
    first = train(trainer)
    assert first["train/teacher_kl"] == pytest.approx(expected, abs=1e-5)
    assert first["train/grad_norm"] > 0.01
    for _ in range(6):
        last = train(trainer)
    assert abs(last["train/teacher_kl"]) < 0.2 * abs(first["train/teacher_kl"])


def test_a_policy_that_is_its_own_teacher_learns_nothing(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    metrics = train(make_trainer(path, DISTILLATION, teacher=path))
    assert metrics["train/teacher_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["train/grad_norm"] < 1e-5


def test_another_vocabulary_is_refused(paths: tuple[Path, Path]) -> None:
    policy, teacher = paths
    check_vocabulary(policy, teacher)
    file = teacher / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"differs in 2 tokens, the first is '3' with ids 6 and 5"):
        check_vocabulary(policy, teacher)


def test_a_token_that_only_one_side_knows_is_another_vocabulary(paths: tuple[Path, Path]) -> None:
    policy, teacher = paths
    file = teacher / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["more"] = len(tokenizer["model"]["vocab"])
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"it differs in 1 token, the first is 'more' with ids \d+ and None"):
        check_vocabulary(policy, teacher)
    with pytest.raises(UserError, match=r"it differs in 1 token, the first is 'more' with ids None and \d+"):
        check_vocabulary(teacher, policy)


def test_a_loss_without_advantages_has_no_use_for_a_teacher() -> None:
    with pytest.raises(ValueError, match="no effect with policy_loss 'sft'"):
        Objective.of(policy_loss="sft", **DISTILLATION)
