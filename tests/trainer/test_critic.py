"""One rank's critic against a transformers backbone with a linear layer on it, and against sums written out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.return_advantage import ValueLoss
from megatron_rl.config.settings import RunSettings, TrainingSettings
from megatron_rl.data.packing import make_shards
from megatron_rl.errors import UserError
from megatron_rl.observe.metrics import check_metrics
from megatron_rl.training.critic import critic_optimizer, explained_variance, value_loss
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainBatch

PPO = {"aggregation": "token_mean", "advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.8, "value_clip": 0.2}}
ROWS = [[3, 9, 4, 4, 30], [8, 2, 17], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [1, 2, 3, 4]]
REWARDS = [0.0, 1.0, 2.0, -1.0]
PROMPT = 2
OPTIMIZER = {"lr": 1e-4, "clip_grad": 0.5, "weight_decay": 0.1, "adam_eps": 1e-6}
MakeTrainer = Callable[..., Trainer]
TinyModel = Callable[..., Path]


def make_batch() -> TrainBatch:
    lengths = [len(row) for row in ROWS]
    mask = np.concatenate([np.arange(length) >= PROMPT for length in lengths])
    return TrainBatch(
        tokens=np.concatenate(ROWS),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.full(4, PROMPT),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -3.0, 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=np.array(REWARDS),
        group_ids=np.array([0, 0, 1, 1]),
        truncated=np.zeros(4, dtype=bool),
    )


def train(trainer: Trainer, *, optimizer_steps: int = 1) -> list[dict[str, float]]:
    shard = make_shards(make_batch(), dp=1, optimizer_steps=optimizer_steps, max_tokens_per_micro_batch=12, seed=0)[0]
    steps = trainer.train_shard(shard)
    for step in steps:
        check_metrics(step)
    return [{name: metric.value for name, metric in step.items()} for step in steps]


def head_of(trainer: Trainer) -> torch.nn.Parameter:
    assert trainer.critic is not None
    head: torch.nn.Parameter = trainer.critic.model.chunks[-1].module.output_layer.weight
    return head


def values_of(trainer: Trainer) -> np.ndarray:
    """Values of the states behind every token."""
    assert trainer.critic is not None
    batch = make_batch()
    shard = make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=12, seed=0)[0]
    micro_batches = trainer._micro_batches.of_parts(batch, shard.steps[0])
    return trainer.critic.state_values(micro_batches, num_tokens=len(batch.tokens))


def backbone_of(path: Path, dtype: torch.dtype) -> Any:
    return pytest.importorskip("transformers").AutoModel.from_pretrained(path, dtype=dtype)


def hidden_states(model: Any, row: list[int]) -> torch.Tensor:
    return model(torch.tensor([row])).last_hidden_state[0]


@pytest.mark.parametrize("tied", [True, False])
def test_values_equal_a_float64_backbone_under_a_linear_layer(make_trainer: MakeTrainer, tiny_model: TinyModel, tied: bool) -> None:
    path = tiny_model(tied=tied, layers=2)
    trainer, model = make_trainer(path, PPO), backbone_of(path, torch.float64)
    head = head_of(trainer)
    assert head.shape == (1, 64)
    assert not values_of(trainer).any(), "a new critic expects nothing"
    with torch.no_grad():
        head.normal_(generator=torch.Generator().manual_seed(0))
        expected = torch.cat([hidden_states(model, row) @ head[0].double() for row in ROWS])
    got = values_of(trainer)
    assert got.dtype == np.float32 and got.std() > 1
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-4)


def plain_returns(values: torch.Tensor, reward: float) -> torch.Tensor:
    """GAE returns of one response whose tokens were chosen at states of these values."""
    returns: list[float] = []
    advantage = following = 0.0
    for index in reversed(range(len(values))):
        terminal = reward if index == len(values) - 1 else 0.0
        advantage = terminal + 0.9 * following - float(values[index]) + 0.9 * 0.8 * advantage
        following = float(values[index])
        returns.insert(0, advantage + following)
    return torch.tensor(returns)


def test_three_steps_are_those_of_a_plain_loop(make_trainer: MakeTrainer, tiny_model: TinyModel) -> None:
    path = tiny_model(layers=2)
    trainer, model = make_trainer(path, PPO, optimizer=OPTIMIZER), backbone_of(path, torch.float32)
    head = torch.nn.Parameter(torch.zeros(1, 64))
    everything = [*model.parameters(), head]
    groups = [
        {"params": [parameter for parameter in everything if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in everything if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)
    for _ in range(3):
        got = train(trainer)[0]
        reference.zero_grad()
        values = [(hidden_states(model, row) @ head[0])[PROMPT - 1 : -1] for row in ROWS]
        returns = [plain_returns(part.detach(), reward) for part, reward in zip(values, REWARDS, strict=True)]
        errors = torch.cat(values) - torch.cat(returns)
        loss = 0.5 * errors.square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(everything, 0.5)
        reference.step()
        assert got["train/value_loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert got["train/critic_grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert got["train/critic_lr"] == pytest.approx(1e-3)
        explained = 1 - errors.detach().var() / torch.cat(returns).var()
        assert got["train/explained_variance"] == pytest.approx(explained.item(), abs=1e-5)
    assert (head_of(trainer) - head).norm() <= 1e-5 * head.norm()


def test_value_loss_falls_and_the_policy_moves(make_trainer: MakeTrainer, tiny_model: TinyModel) -> None:
    trainer = make_trainer(
        tiny_model(),
        {**PPO, "advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.8, "value_clip": None}},
        optimizer=OPTIMIZER,
        critic={"optimizer": {"lr": 4e-3}},
    )
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    steps = [step for _ in range(5) for step in train(trainer, optimizer_steps=2)]
    assert sum(step["train/value_loss"] for step in steps[-2:]) < 0.3 * sum(step["train/value_loss"] for step in steps[:2])
    assert steps[-2]["train/explained_variance"] > 0.5 > steps[0]["train/explained_variance"]
    assert all(step["train/critic_skipped_steps"] == 0 for step in steps)
    assert before.keys() == dict(trainer.weights()).keys()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.weights())


def test_the_policy_waits_while_the_critic_warms_up(make_trainer: MakeTrainer, tiny_model: TinyModel) -> None:
    steered = {**PPO, "kl": {"coef": 0.1, "control": {"target": 100.0, "horizon": 10.0}}}
    trainer = make_trainer(tiny_model(), steered, optimizer=OPTIMIZER, critic={"warmup_steps": 3})
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    first, second = train(trainer, optimizer_steps=2)
    assert first["train/lr"] == second["train/lr"] == 0.0 and first["train/critic_lr"] == pytest.approx(1e-3)
    assert second["train/ratio"] == pytest.approx(1.0, abs=1e-6) and second["train/skipped_steps"] == 0
    assert head_of(trainer).any()
    train(trainer)
    for name, tensor in trainer.weights():
        assert torch.equal(tensor, before[name]), name
    begun = train(trainer)[0]
    assert begun["train/lr"] == 1e-4 and begun["train/kl_loss_coef"] == 0.1, "controllers wait as well"
    assert train(trainer)[0]["train/kl_loss_coef"] < 0.1
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.weights())


def test_a_missing_critic_is_refused_and_a_surplus_one_ignored(make_trainer: MakeTrainer, tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model()
    make_trainer(path).save(tmp_path / "policy")
    trainer = make_trainer(path, PPO)
    with pytest.raises(UserError, match="has no critic, which the objective needs"):
        trainer.load(tmp_path / "policy")
    trainer.save(tmp_path / "both")
    make_trainer(path).load(tmp_path / "both")


def test_fields_of_the_critic_go_over_those_of_the_policy() -> None:
    training = TrainingSettings.model_validate({"optimizer": {"lr": 2e-4, "min_lr": 1e-5, "clip_grad": 0.3}})
    assert critic_optimizer(training) == {"lr": pytest.approx(2e-3), "min_lr": pytest.approx(1e-4), "clip_grad": 0.3}
    own = TrainingSettings.model_validate({"critic": {"optimizer": {"lr": 5e-4, "weight_decay": 0.1}}})
    assert critic_optimizer(own) == {"lr": 5e-4, "min_lr": 0.0, "weight_decay": 0.1}


def test_the_value_loss_has_the_policy_s_denominators() -> None:
    ppo = Objective.of(advantage={"kind": "gae", "value_clip": 0.3}).advantage
    objective = Objective.of(aggregation="sequence_mean_token_mean", kl={"coef": 0.1}, entropy={"coef": 0.1}, advantage=ppo)
    assert value_loss(objective) == ValueLoss(value_clip=0.3, aggregation="sequence_mean_token_mean")


def test_explained_variance_is_that_of_numpy() -> None:
    random = np.random.default_rng(0)
    returns, values = random.normal(100, 1, 40), random.normal(100, 1, 40)
    mask = random.random(40) < 0.7
    expected = 1 - (returns - values)[mask].var() / returns[mask].var()
    alone = explained_variance(
        returns=torch.from_numpy(returns), values=torch.from_numpy(values), mask=torch.from_numpy(mask), all_reduce_sum=lambda share: share
    )
    assert alone == pytest.approx(expected, rel=1e-9)


def test_returns_that_do_not_vary_explain_nothing() -> None:
    constant = torch.full((5,), 0.1)
    everywhere, nowhere = torch.ones(5, dtype=torch.bool), torch.zeros(5, dtype=torch.bool)
    for mask in (everywhere, nowhere):
        assert explained_variance(returns=constant, values=torch.arange(5.0), mask=mask, all_reduce_sum=lambda share: share) is None


@pytest.mark.parametrize("warmup_steps", (0, 1))
def test_a_policy_that_waits_for_its_critic_keeps_router_biases(
    make_trainer: MakeTrainer, tiny_model: TinyModel, warmup_steps: int
) -> None:
    trainer = make_trainer(
        tiny_model(family="glm4_moe"),
        PPO,
        megatron={"moe_router_bias_update_rate": 0.05},
        critic={"warmup_steps": warmup_steps},
        optimizer=OPTIMIZER,
    )
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    train(trainer)
    changed = {name for name, tensor in trainer.weights() if not torch.equal(tensor, before[name])}
    biases = {name for name in before if name.endswith("e_score_correction_bias")}
    assert biases and (changed == set() if warmup_steps else biases <= changed)


def test_the_policys_rate_reaches_its_floor_with_the_run(make_trainer: MakeTrainer, tiny_model: TinyModel) -> None:
    trainer = make_trainer(tiny_model(), PPO, critic={"warmup_steps": 3}, schedule={"decay_style": "linear"})
    assert trainer.critic is not None
    num_steps = RunSettings.model_fields["num_steps"].default
    ends = [model.scheduler.lr_decay_steps for model in trainer.trained_models().values()]
    assert sorted(ends) == [num_steps - 3, num_steps], "the policy takes a step less for each of the critic's own"
