"""A Trainer made of its sections alone, in a process alone: steps in halves, and batches that bring their own numbers."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from megatron_rl import ModelSettings, Objective, TrainBatch, Trainer, TrainingSettings, UserError, batch_from_sequences
from megatron_rl.algorithms.off_policy import OffPolicy
from megatron_rl.training.whole_batch import divide

PROMPTS = [[3, 9], [3, 9], [5, 6, 7], [5, 6, 7], [8]]
RESPONSES = [[4, 4, 30], [17], [8, 9, 10, 11, 12, 13, 14], [2, 3], [12, 30, 9, 4]]
REWARDS = [1.0, 0.0, 0.25, 1.0, 0.5]
TEMPERATURE = 0.7
PPO = Objective.of(aggregation="token_mean", advantage={"kind": "gae", "lam": 0.5, "gamma": 0.9, "whiten": False})
Make = Callable[..., Trainer]


def batch_of(**fields: Any) -> TrainBatch:
    return batch_from_sequences(prompts=PROMPTS, responses=RESPONSES, **fields)


def per_token(seed: int, low: float, high: float) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.uniform(low, high, len(ids)) for ids in RESPONSES]


def responses_of(flat: np.ndarray) -> list[np.ndarray]:
    """The responses' parts of an array [T] of `batch_of`."""
    ends = np.cumsum([len(prompt) + len(ids) for prompt, ids in zip(PROMPTS, RESPONSES, strict=True)])
    return [np.asarray(flat[end - len(ids) : end], np.float64) for end, ids in zip(ends, RESPONSES, strict=True)]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


@pytest.fixture
def make(tiny_model: Callable[..., Path]) -> Iterator[Make]:
    """Trainers of one model, the earlier one closed before the next."""
    path, made = tiny_model(), []

    def build(objective: Objective | None = None, *, training: dict[str, Any] | None = None, **options: Any) -> Trainer:
        while made:
            made.pop().close()
        fields = {"optimizer": {"lr": 1e-3}, "max_tokens_per_micro_batch": 12, **(training or {})}
        model = ModelSettings(path=options.pop("path", path))
        made.append(Trainer(model=model, training=TrainingSettings(**fields), objective=objective, temperature=TEMPERATURE, **options))
        return made[-1]

    yield build
    while made:
        made.pop().close()
    assert not distributed.is_initialized()


def test_a_batch_is_divided_as_a_run_divides_it(make: Make) -> None:
    training = {"optimizer_steps_per_batch": 2}
    batch = batch_of(rewards=REWARDS)
    first = make(training=training, seed=7)
    got, weights = [first.train(batch) for _ in range(2)], weights_of(first)
    spans = first.spans.take()
    assert [span.name for span in spans] == ["log-probs, advantages", *["forward, backward", "optimizer"] * len(got[0])] * 2
    assert sum(span.count or 0 for span in spans) == 2 * batch.num_sequences, "each is counted in one optimizer step of each call"
    second = make(training=training, seed=7)
    for number, steps in enumerate(got):
        shard = divide(batch, second._training, seed=7 + number)[0]
        shares = second.train_shard(shard)
        assert [{name: metric.value for name, metric in sorted(step.items())} for step in shares] == steps
    assert all(torch.equal(tensor, weights[name]) for name, tensor in second.weights())
    assert not np.array_equal(divide(batch, second._training, seed=7)[0].steps[0][0], shard.steps[0][0])


@pytest.mark.parametrize("objective", [Objective.of(kl={"coef": 0.1}, entropy={"coef": 0.01}), PPO], ids=["grpo", "ppo"])
def test_a_step_in_halves_is_the_whole_step(make: Make, objective: Objective) -> None:
    batch = batch_of(rewards=REWARDS)
    whole = make(objective)
    metrics = [whole.train(batch)[0] for _ in range(2)]
    weights, values = weights_of(whole), whole.values(batch) if objective is PPO else None
    halves = make(objective)
    for want in metrics:
        before = weights_of(halves)
        first = halves.forward_backward(batch)
        halves.log_probs(batch, reference=halves._reference is not None)
        assert all(torch.equal(tensor, before[name]) for name, tensor in halves.weights())
        second = halves.optimizer_step()
        assert first | second == want and not first.keys() & second.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in halves.weights())
    if values is not None:
        np.testing.assert_array_equal(halves.values(batch), values)


def test_routers_biases_move_with_the_optimizer_step(make: Make, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(family="deepseek_v3", name="experts")
    model = ModelSettings(path=path, megatron={"moe_router_bias_update_rate": 0.05})
    with Trainer(model=model, training=TrainingSettings(optimizer={"lr": 1e-3})) as trainer:
        before = weights_of(trainer)
        trainer.forward_backward(batch_of(rewards=REWARDS))
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())
        trainer.optimizer_step()
        moved = [float((tensor - before[name]).abs().max()) for name, tensor in trainer.weights() if "correction_bias" in name]
    assert moved and max(moved) == pytest.approx(0.05)


def test_what_would_lose_a_gradient_is_refused(make: Make, tmp_path: Path) -> None:
    trainer, batch = make(), batch_of(rewards=REWARDS)
    with pytest.raises(UserError, match=r"optimizer_step has no gradient"):
        trainer.optimizer_step()
    trainer.forward_backward(batch)
    calls = {"train": [batch], "forward_backward": [batch], "save": [tmp_path / "lost"], "put_away": []}
    for name, arguments in calls.items():
        with pytest.raises(UserError, match=rf"^{name} was called while the gradient of forward_backward waits"):
            getattr(trainer, name)(*arguments)
    assert trainer.optimizer_step()["train/skipped_steps"] == 0
    assert not (tmp_path / "lost").exists()


def test_a_checkpoint_goes_on_where_it_was(make: Make, tmp_path: Path) -> None:
    objective = Objective.of(kl={"coef": 0.1})
    training = {"optimizer_steps_per_batch": 2}
    batch, trainer = batch_of(rewards=REWARDS), make(objective, training=training)
    trainer.train(batch)
    trainer.save(str(tmp_path / "checkpoint"))
    want = trainer.train(batch)
    resumed = make(objective, training=training)
    resumed.forward_backward(batch)
    resumed.load(str(tmp_path / "checkpoint"))
    assert resumed.train(batch) == want


def test_own_advantages_are_used_as_they_are(make: Make, tiny_model: Callable[..., Path]) -> None:
    """On policy the loss is minus the mean of the sequences' mean advantages, and its gradient that of transformers."""
    import transformers

    advantages = per_token(1, -2, 2)
    masks = [np.arange(len(ids)) != 2 for ids in RESPONSES]
    hidden = [np.where(mask, numbers, np.nan) for mask, numbers in zip(masks, advantages, strict=True)]
    trainer = make(training={"optimizer": {"lr": 1e-3, "clip_grad": 0.0}})
    got = trainer.forward_backward(batch_of(advantages=hidden, loss_masks=masks)) | trainer.optimizer_step()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name="same"), dtype=torch.float32)
    loss = torch.zeros((), dtype=torch.float64)
    for prompt, ids, numbers, mask in zip(PROMPTS, RESPONSES, advantages, masks, strict=True):
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE
        logs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        ratio = (logs - logs.detach()).exp()
        loss = loss - (ratio * torch.from_numpy(numbers))[torch.from_numpy(mask)].mean() / len(PROMPTS)
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert got["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert got["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert got["train/num_tokens"] == 14 and "train/off_policy_ratio" not in got and "train/log_prob_diff" not in got


def test_advantages_of_the_estimator_can_be_brought_instead(make: Make) -> None:
    trainer = make()
    want, weights = trainer.train(batch_of(rewards=REWARDS))[0], weights_of(trainer)
    groups = {0: [1.0, 0.0], 1: [1.0, 0.0], 2: [0.25, 1.0], 3: [0.25, 1.0]}
    # A lone sample has nothing to be compared with.
    own = [(REWARDS[row] - np.mean(group)) / (np.std(group, ddof=1) + 1e-6) for row, group in groups.items()] + [0.0]
    trainer = make()
    got = trainer.train(batch_of(advantages=own))[0]
    assert got == {name: pytest.approx(value, rel=1e-5, abs=1e-7) for name, value in want.items()}
    for name, tensor in trainer.weights():
        assert (tensor - weights[name]).norm() <= 1e-4 * weights[name].norm(), name


def test_own_log_probs_take_the_place_of_both_passes(make: Make) -> None:
    objective = Objective.of(kl={"coef": 0.1}, aggregation="token_mean")
    trainer = make(objective)
    before = responses_of(trainer.log_probs(batch_of()))
    old = [logs + shift for logs, shift in zip(before, per_token(2, -0.3, 0.3), strict=True)]
    reference = [logs + shift for logs, shift in zip(before, per_token(3, -0.5, 0.5), strict=True)]
    advantages = per_token(4, -2, 2)
    got = trainer.forward_backward(batch_of(advantages=advantages, old_log_probs=old, ref_log_probs=reference))
    now, was, ref, gain = (np.concatenate(rows) for rows in (before, old, reference, advantages))
    ratio, k3 = np.exp(now - was), np.exp(ref - now) - (ref - now) - 1
    policy = -np.minimum(ratio * gain, np.clip(ratio, 0.8, 1.2) * gain).mean()
    assert got["train/ratio"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert got["train/kl_reference"] == pytest.approx(k3.mean(), rel=1e-5)
    assert got["train/loss"] == pytest.approx(policy + 0.1 * k3.mean(), rel=1e-5)


def test_values_are_those_of_the_states_before_each_token(make: Make) -> None:
    values = per_token(5, -1, 1)
    trainer = make(PPO)
    got = trainer.forward_backward(batch_of(rewards=REWARDS, values=values))
    trainer.optimizer_step()
    returns, advantages, value_losses = [], [], []
    for reward, row in zip(REWARDS, values, strict=True):
        ahead = 0.0
        for place in reversed(range(len(row))):
            last = place + 1 == len(row)
            delta = (reward if last else 0.9 * row[place + 1]) - row[place]
            ahead = delta + (0.0 if last else 0.9 * 0.5 * ahead)
            advantages.append(ahead)
            returns.append(ahead + row[place])
            # The critic's head starts at 0, and its clip is around the batch's own values.
            clipped = np.clip(0.0, row[place] - 0.2, row[place] + 0.2)
            value_losses.append(0.5 * max(returns[-1] ** 2, (clipped - returns[-1]) ** 2))
    assert got["train/loss"] == pytest.approx(-np.mean(advantages), rel=1e-5)
    assert got["train/return_mean"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert got["train/value_loss"] == pytest.approx(np.mean(value_losses), rel=1e-5)


def test_values_come_back_as_a_batch_takes_them(make: Make) -> None:
    trainer = make(PPO)
    batch = batch_of(rewards=REWARDS)
    trainer.train(batch)
    values = trainer.values(batch)
    assert np.abs(values).max() > 1e-3
    own = trainer.forward_backward(dataclasses.replace(batch, values=values))
    trainer._waiting = None
    assert trainer.forward_backward(batch) == own


@pytest.mark.parametrize(
    ("objective", "fields", "message"),
    [
        (
            Objective.of(advantage={"kind": "remax"}),
            {"advantages": [1.0] * 5},
            "kind remax works with the rewards of gr",
        ),
        (Objective.of(advantage={"kind": "gdpo"}), {"advantages": [1.0] * 5}, "kind gdpo works with components"),
        (PPO, {"advantages": [1.0] * 5}, "kind gae works with a critic's returns"),
        (
            Objective.of(kl_reward={"coef": 0.1}, advantage={"kind": "reinforce_plus_plus"}),
            {"advantages": [1.0] * 5},
            "objective.kl_reward 0.1 changes the advantages",
        ),
        (Objective.of(zero_variance="mask_kl", kl={"coef": 0.1}), {"advantages": [1.0] * 5}, "mask_kl goes by the rewards"),
        (Objective.of(policy_loss="sft"), {"advantages": [1.0] * 5}, "advantages has no effect with objective.policy_loss sft"),
        (Objective.of(policy_loss="sft"), {"old_log_probs": [np.zeros(len(ids)) for ids in RESPONSES]}, "old_log_probs has no effect"),
        (Objective(), {"rewards": REWARDS, "values": [np.zeros(len(ids)) for ids in RESPONSES]}, "values has no effect with .* group"),
        (
            Objective.of(advantage={"kind": "gae", "bootstrap_truncated": True}),
            {"rewards": REWARDS, "values": [np.zeros(len(ids)) for ids in RESPONSES]},
            "bootstrap_truncated needs the value behind",
        ),
        (
            Objective.of(off_policy=OffPolicy(mode="truncate", high=2.0)),
            {"rewards": REWARDS},
            "rollout_log_probs is None",
        ),
        (Objective(proximal="rollout"), {"rewards": REWARDS}, "proximal rollout compares .*rollout_log_probs is None"),
        (
            Objective(proximal="rollout"),
            {"rewards": REWARDS, **{name: [np.zeros(len(ids)) for ids in RESPONSES] for name in ("rollout_log_probs", "old_log_probs")}},
            "old_log_probs has no effect with objective.proximal rollout",
        ),
        (Objective(), {}, "5 of 5 sequences have no finite reward"),
        (Objective(), {"rewards": [1, 0, np.nan, 1, 1]}, "1 of 5 sequences have no finite reward"),
    ],
)
def test_contradictions_of_batch_and_objective_are_refused(objective: Objective, fields: dict[str, Any], message: str) -> None:
    from megatron_rl.training.objective_checks import check_batch

    batch = batch_of(**fields)
    with pytest.raises(UserError, match=message):
        check_batch(objective, batch, rewards=batch.rewards, trajectory_ids=batch.trajectory_ids)


def test_tokens_outside_the_vocabulary_are_refused_before_a_pass(make: Make) -> None:
    trainer = make()
    for token in (32, -1):
        batch = batch_from_sequences(prompts=[[3], [3]], responses=[[4], [4]], rewards=[1, 0])
        batch = dataclasses.replace(batch, tokens=np.array([3, 4, 3, token]))
        for method in (trainer.train, trainer.forward_backward, trainer.log_probs, partial(trainer.own_log_probs, temperature=1.0)):
            with pytest.raises(ValueError, match=rf"TrainBatch\.tokens are in \[{min(token, 3)}, {max(token, 4)}\].* \[0, 32\)"):
                method(batch)


def test_a_trainer_checks_its_batches(make: Make) -> None:
    trainer = make()
    with pytest.raises(UserError, match="no finite reward"):
        trainer.train(batch_of())
    with pytest.raises(UserError, match="no finite reward"):
        trainer.forward_backward(batch_of())
    assert trainer.forward_backward(batch_of(rewards=REWARDS))["train/num_tokens"] == 17


def test_supervised_training_needs_neither_rewards_nor_log_probs(make: Make) -> None:
    trainer = make(Objective.of(policy_loss="sft", aggregation="token_mean"))
    before = np.concatenate(responses_of(trainer.log_probs(batch_of())))
    assert trainer.train(batch_of())[0]["train/loss"] == pytest.approx(-before.mean(), rel=1e-5)
    with pytest.raises(UserError, match="no term of this objective reads them"):
        trainer.log_probs(batch_of(), reference=True)
    with pytest.raises(UserError, match=r"only objective\.advantage\.kind gae has a critic"):
        trainer.values(batch_of())


def test_a_broken_step_is_dumped_where_asked_and_nowhere_else(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    broken = [np.full(len(ids), 3e38) for ids in RESPONSES]
    present = sorted(tmp_path.rglob("*"))
    assert make().train(batch_of(advantages=broken))[0]["train/skipped_steps"] == 1
    assert sorted(tmp_path.rglob("*")) == present
    trainer = make(dump_directory=str(tmp_path / "dumps"))
    trainer.forward_backward(batch_of(advantages=broken))
    assert trainer.optimizer_step()["train/skipped_steps"] == 1
    assert list((tmp_path / "dumps").glob("optimizer-step-000001-rank-0-micro-batch-*.safetensors"))


def test_trainers_say_what_they_lack(make: Make) -> None:
    decays = {"schedule": {"decay_style": "cosine"}}
    with pytest.raises(UserError, match="decay_style is cosine without decay_steps, and the training has no total_steps"):
        make(training=decays)
    # What could not be built has left the groups.
    first = make(training=decays, total_steps=10)
    with pytest.raises(UserError, match="has a Trainer already"):
        Trainer(model=first._model_settings)
    with pytest.raises(UserError, match=r"max_response_length is not set"):
        Trainer(model=first._model_settings, objective=Objective.of(aggregation="sequence_mean_token_sum_norm"))
    with pytest.raises(UserError, match=r"distillation_coef is 0\.1, but model\.teacher is not set"):
        make(Objective.of(distillation_coef=0.1))


@pytest.mark.parametrize("zero_variance", ["drop", "resample"])
def test_groups_without_a_signal_are_left_out(make: Make, zero_variance: str) -> None:
    """As if the batch had not had them: neither their KL nor their tokens in denominators."""
    fields = {"kl": {"coef": 0.5}, "aggregation": "token_mean"}
    rewards = [1.0, 1.0, 0.25, 1.0, 0.5]
    trainer = make(Objective.of(**fields))
    want = [trainer.train(batch_of(rewards=rewards).select(np.array([2, 3])))[0] for _ in range(2)]
    weights = weights_of(trainer)
    trainer = make(Objective.of(**fields, zero_variance=zero_variance))
    assert [trainer.train(batch_of(rewards=rewards))[0] for _ in range(2)] == want and want[0]["train/num_tokens"] == 9
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer.weights())
    halves = trainer.forward_backward(batch_of(rewards=[1.0] * 5)) | trainer.optimizer_step()
    assert (halves["train/num_tokens"], halves["train/skipped_steps"]) == (0, 1)


def test_the_initial_policy_is_no_teacher(make: Make) -> None:
    trainer = make(Objective.of(policy_loss={"kind": "distillation"}))
    with pytest.raises(UserError, match=r"distillation got no TrainBatch\.ref_log_probs, needs those of a teacher"):
        trainer.train(batch_of(rewards=REWARDS))
    assert trainer.train(batch_of(rewards=REWARDS, ref_log_probs=per_token(3, -5, -1)))[0]["train/grad_norm"] > 0.01


def test_a_resume_keeps_the_reference(make: Make, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with_kl, frozen = Objective.of(kl={"coef": 0.1}), {"frozen": ["*.layers.0.mlp.down_proj.weight"]}
    saved = {}
    for name, training in {"all": {}, "some": frozen}.items():
        trainer = make(with_kl, training=training)
        want = trainer.log_probs(batch_of(), reference=True)
        trainer.train(batch_of(rewards=REWARDS))
        saved[name] = tmp_path / name
        trainer.save(saved[name])
    other = tiny_model(name="other", seed=9)
    with pytest.raises(UserError, match=rf"model.path {other} have the BLAKE3 \w+, .* the KL would pull to another policy; give the"):
        make(with_kl, path=other).load(saved["all"])
    with pytest.raises(UserError, match=r"frozen .* freezes model\.layers\.0\.mlp\.down_proj\.weight, which was trained .* restore"):
        make(with_kl, training=frozen).load(saved["all"])
    for name, training in {"all": {}, "some": frozen}.items():
        trainer = make(with_kl, training=training)
        trainer.load(saved[name])
        np.testing.assert_array_equal(trainer.log_probs(batch_of(), reference=True), want)
    make(training=frozen, path=other).load(saved["all"])


OWNERS = ("x", "y", "z", "z", "x")


def test_means_are_those_of_trajectories(make: Make) -> None:
    """On policy the loss is minus the mean over trajectories of the mean advantage of all their tokens, in whatever micro-batch."""
    advantages = per_token(6, -2, 2)
    batch = batch_of(advantages=advantages, trajectory_ids=OWNERS, group_ids=[0] * 5)
    trainer = make(training={"optimizer": {"lr": 1e-3}, "max_tokens_per_micro_batch": 10})
    got = trainer.forward_backward(batch)
    joined = [np.concatenate([row for row, owner in zip(advantages, OWNERS, strict=True) if owner == each]) for each in "xyz"]
    assert got["train/loss"] == pytest.approx(-np.mean([row.mean() for row in joined]), rel=1e-5)
    assert (got["train/num_sequences"], got["train/num_trajectories"]) == (5, 3)
    trainer = make(Objective.of(kl={"coef": 0.1, "control": {"target": 1.0, "horizon": 50}}))
    first, second = (trainer.train(batch)[0]["train/kl_loss_coef"] for _ in range(2))
    assert (first, second) == (0.1, pytest.approx(0.1 * (1 - 0.2 * 3 / 50))), "the policy is the reference in the first step"


def test_trajectories_of_one_sequence_train_as_without_ids(make: Make) -> None:
    objective = Objective.of(kl={"coef": 0.1}, entropy={"coef": 0.01})
    got = []
    for owners in (None, ["e", "a", "d", "b", "c"]):
        trainer = make(objective, training={"optimizer_steps_per_batch": 2})
        got.append((trainer.train(batch_of(rewards=REWARDS, trajectory_ids=owners)), weights_of(trainer)))
    assert got[0][0] == got[1][0]
    assert all(torch.equal(tensor, got[1][1][name]) for name, tensor in got[0][1].items())


def test_a_trainer_refuses_returns_of_trajectories(make: Make) -> None:
    batch = batch_of(rewards=[1.0, 0.0, 0.25, 0.25, 1.0], trajectory_ids=OWNERS, group_ids=[0] * 5)
    with pytest.raises(UserError, match="kind gae got trajectories of several sequences"):
        make(PPO).train(batch)


def test_routers_are_balanced_by_the_pieces_of_the_model(make: Make, tiny_model: Callable[..., Path]) -> None:
    model = ModelSettings(path=tiny_model(family="qwen3_moe", name="balanced"), megatron={"moe_aux_loss_coeff": 0.1})
    with Trainer(model=model, training=TrainingSettings(optimizer={"lr": 1e-3})) as trainer:
        losses = []
        for owners in (None, OWNERS):
            batch = batch_of(advantages=[0.0] * 5, trajectory_ids=owners, group_ids=[0] * 5)
            losses.append(trainer.forward_backward(batch)["train/aux_loss"])
            trainer._waiting = None
    assert losses[0] == losses[1] > 0
