"""One rank against plain transformers and torch: losses, gradients, updates; and what a step does when numbers are not finite."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megatron_rl.algorithms import head_statistics
from megatron_rl.algorithms.rounding_limits import Expected, Limits
from megatron_rl.data.packing import make_shards
from megatron_rl.errors import ParityError, UserError
from megatron_rl.observe.metrics import Metric, check_metrics
from megatron_rl.training.resting import RestingWeights
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Shard, TrainBatch

SUPERVISED = {"policy_loss": "sft", "aggregation": "token_mean"}
OPTIMIZER = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1, "adam_eps": 1e-6}
TEMPERATURE = 0.7
MakeTrainer = Callable[..., Trainer]


def make_batch(tokens: list[list[int]], *, prompt: int = 2) -> TrainBatch:
    """These sequences with rewards 0, 1, 2 …, in groups of two; everything behind the prompt is trainable and was generated."""
    lengths = [len(row) for row in tokens]
    mask = np.concatenate([np.arange(length) >= prompt for length in lengths])
    return TrainBatch(
        tokens=np.concatenate(tokens),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.full(len(tokens), prompt),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -3.0, 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=np.arange(len(tokens)),
        group_ids=np.arange(len(tokens)) // 2,
        truncated=np.zeros(len(tokens)),
    )


ROWS = [[3, 9, 4, 4, 30], [8, 2, 17], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [1, 2, 3, 4]]


def train(trainer: Trainer, batch: TrainBatch, *, optimizer_steps: int = 1) -> list[dict[str, float]]:
    shard = make_shards(batch, dp=1, optimizer_steps=optimizer_steps, max_tokens_per_micro_batch=12, seed=0)[0]
    steps = trainer.train_shard(shard)
    for step in steps:
        check_metrics(step)
    return [{name: metric.value for name, metric in step.items()} for step in steps]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def hf_log_probs(model: Any, row: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of tokens 1 … of one sequence."""
    logits = model(torch.tensor([row])).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]


def load_hf(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_three_supervised_steps_are_those_of_a_plain_loop(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(layers=2)
    trainer, model = make_trainer(path, SUPERVISED), load_hf(path)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)
    for _ in range(3):
        got = train(trainer, make_batch(ROWS))[0]
        reference.zero_grad()
        loss = -torch.cat([hf_log_probs(model, row)[1:] for row in ROWS]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        reference.step()
        assert got["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert got["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert got["train/num_tokens"] == 17
    expected = model.state_dict()
    for name, tensor in weights_of(trainer).items():
        assert (tensor - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_log_probs_equal_transformers_at_the_temperature(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(tied=False, layers=2)
    trainer, model = make_trainer(path), load_hf(path)
    with torch.no_grad():
        expected = [np.concatenate([[0.0], hf_log_probs(model, row, temperature=TEMPERATURE).numpy()]) for row in ROWS]
    got = trainer.log_probs(make_batch(ROWS))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=0, atol=1e-5)


def test_the_reference_stays_initial_and_training_is_on_policy(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    batch, trainer = make_batch(ROWS), make_trainer(tiny_model(), reference_interval=1)
    initial = trainer.log_probs(batch)
    first = train(trainer, batch)[0]
    assert first["train/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first["train/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert first["train/log_prob_diff"] == pytest.approx(np.abs(initial[batch.loss_mask] + 3.0).mean(), rel=1e-5)
    moved = trainer.log_probs(batch)
    np.testing.assert_array_equal(trainer.log_probs(batch, reference=True), initial)
    np.testing.assert_array_equal(trainer.log_probs(batch), moved)
    assert np.abs(moved - initial).max() > 1e-3
    second = train(trainer, batch, optimizer_steps=2)
    assert second[0]["train/kl_reference"] > 1e-6
    assert second[1]["train/ratio"] != pytest.approx(1.0, abs=1e-6)


def counted_reference_passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows by one entry whenever the reference weights take their place in the model."""
    passes: list[bool] = []
    in_place = RestingWeights.in_place

    def counting(reference: RestingWeights) -> AbstractContextManager[None]:
        passes.append(True)
        return in_place(reference)

    monkeypatch.setattr(RestingWeights, "in_place", counting)
    return passes


@pytest.mark.parametrize(
    ("objective", "interval", "measured"),
    [
        ({}, 0, [False] * 5),
        ({}, 2, [True, False, True, False, True]),
        ({"kl": {"coef": 0.1}}, 0, [True] * 5),
        ({"kl_reward": {"coef": 0.1}, "advantage": {"kind": "reinforce_plus_plus"}}, 3, [True] * 5),
    ],
)
def test_the_reference_runs_where_a_term_or_a_measure_reads_it(
    make_trainer: MakeTrainer,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    objective: dict[str, Any],
    interval: int,
    measured: list[bool],
) -> None:
    passes, path = counted_reference_passes(monkeypatch), tiny_model()
    trainer = make_trainer(path, objective, reference_interval=interval)
    for number, expected in enumerate(measured):
        passes.clear()
        for metrics in train(trainer, make_batch(ROWS), optimizer_steps=2):
            assert {"train/kl_reference", "train/kl_k1", "train/kl_k2", "train/kl_k3"} & metrics.keys() == (
                {"train/kl_reference", "train/kl_k1", "train/kl_k2", "train/kl_k3"} if expected else set()
            )
        assert len(passes) == expected
        if number == 2:
            trainer.save(tmp_path / "checkpoint")
            trainer = make_trainer(path, objective, reference_interval=interval)
            trainer.load(tmp_path / "checkpoint")


def test_no_reference_is_kept_that_nothing_reads(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    trainer = make_trainer(tiny_model())
    assert trainer._reference is None
    with pytest.raises(UserError, match=r"training\.reference_interval"):
        trainer.log_probs(make_batch(ROWS), reference=True)


def test_the_interval_measures_and_changes_nothing_else(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    outcomes = []
    for interval in (0, 1):
        trainer = make_trainer(path, reference_interval=interval)
        train(trainer, make_batch(ROWS), optimizer_steps=2)
        outcomes.append(weights_of(trainer))
    for name, tensor in outcomes[0].items():
        assert torch.equal(tensor, outcomes[1][name]), name


@pytest.mark.parametrize(
    "objective",
    [
        {"kl": {"coef": 0.1}},
        {"kl_reward": {"coef": 0.1}, "advantage": {"kind": "reinforce_plus_plus_baseline"}},
        {"kl_reward": {"coef": 0.1}, "advantage": {"kind": "reinforce_plus_plus_baseline", "whiten": False}},
    ],
)
def test_constant_groups_train_no_kl_under_mask_kl(
    make_trainer: MakeTrainer, tiny_model: Callable[..., Path], objective: dict[str, Any]
) -> None:
    """Two constant groups, and a lone sample of a group whose others were not scored."""
    path = tiny_model()
    norms = {}
    for zero_variance in ("keep", "mask_kl"):
        trainer = make_trainer(path, {**objective, "zero_variance": zero_variance})
        train(trainer, make_batch(ROWS))
        constant = replace(make_batch([*ROWS, ROWS[0]]), rewards=np.array([0.3, 0.3, 1.0, 1.0, 0.7]))
        norms[zero_variance] = train(trainer, constant)[0]["train/grad_norm"]
    assert norms["mask_kl"] == 0.0 < norms["keep"]


@pytest.mark.parametrize("estimator", ["group", "pass@k", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_huge_rewards_train_as_small_ones_in_proportion(make_trainer: MakeTrainer, tiny_model: Callable[..., Path], estimator: str) -> None:
    path = tiny_model()
    norms = []
    for factor in (1.0, 1e38, 1e200):
        args = {"std_epsilon": 0.0} if estimator in ("group", "pass@k") else {}
        trainer = make_trainer(path, {"advantage": {"kind": estimator, **args}})
        batch = replace(make_batch(ROWS), rewards=np.array([1.0, -1.0, 0.5, -0.25]) * factor)
        norms.append(train(trainer, batch)[0]["train/grad_norm"])
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-6)


def poison(trainer: Trainer, *, token: int) -> None:
    """Make the embedding of one token infinite, as no weights that are read may be."""
    embedding = next(tensor for name, tensor in trainer.weights() if name == "model.embed_tokens.weight")
    with torch.no_grad():
        embedding[token] = torch.inf
    assert any(torch.isinf(tensor).any() for tensor in weights_of(trainer).values())


@pytest.mark.parametrize("chunk_rows", [3, 1000])
def test_a_non_finite_loss_changes_nothing_and_is_dumped(
    make_trainer: MakeTrainer, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    monkeypatch.setitem(head_statistics._CHUNK_LOGITS, "cpu", chunk_rows * 32)
    trainer = make_trainer(tiny_model(tied=False), SUPERVISED)
    poison(trainer, token=17)
    before = weights_of(trainer)
    batch = make_batch([[8, 2, 17, 3, 3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    metrics = train(trainer, batch)[0]
    assert metrics["train/skipped_steps"] == 1
    for name, tensor in weights_of(trainer).items():
        assert torch.equal(tensor, before[name]), name
    files = sorted(file.name for file in (tmp_path / "run" / "dumps").iterdir())
    assert len(files) == 2, f"one micro-batch of two is broken, but {files} were written"
    arrays = load_file(tmp_path / "run" / "dumps" / files[1])
    assert arrays["input_ids"].tolist() == [8, 2, 17, 3, 3, 3, 3, 3, 3, 3]
    assert arrays["targets"].tolist() == [17, 3, 3, 3, 3, 3, 3, 3]
    assert arrays["positions"].tolist() == list(range(1, 9))
    assert [Path(file).suffix for file in files] == [".json", ".safetensors"]
    about = json.loads((tmp_path / "run" / "dumps" / files[0]).read_text())
    assert (about["loss"], about["grad_norm"], about["temperature"], about["rows"]) == ("nan", "nan", 1.0, [0])
    clean = train(trainer, make_batch([[1, 2, 3, 4, 5]]))[0]
    assert clean["train/skipped_steps"] == 0 and np.isfinite(clean["train/grad_norm"])


CONTROLLED = {
    "kl": {"coef": 0.1, "control": {"target": 100.0, "horizon": 10.0}},
    "entropy": {"coef": 0.25, "control": {"kind": "skywork", "target": 100.0, "delta": 0.125, "max": 5.0}},
}


def test_a_skipped_step_moves_neither_schedule_nor_controllers(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    trainer = make_trainer(tiny_model(tied=False), CONTROLLED, schedule={"warmup_steps": 8})
    poison(trainer, token=17)
    clean, broken = make_batch([[1, 2, 3, 4, 5], [5, 4, 3]]), make_batch([[8, 2, 17, 3, 3], [1, 2, 3]])
    names = ("train/lr", "train/entropy_coef", "train/kl_loss_coef")
    steps = [train(trainer, batch)[0] for batch in (clean, broken, broken, clean)]
    assert [step["train/skipped_steps"] for step in steps] == [0, 1, 1, 0]
    seen = [tuple(step[name] for name in names) for step in steps]
    assert seen[0] != seen[1] == seen[2] == seen[3]
    assert seen[3] == pytest.approx((2e-3 / 9, 0.375, 0.1 * (1 - 0.2 * 2 / 10)))


def test_step_without_a_trainable_token_changes_nothing(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    train(trainer, make_batch(ROWS))
    before = weights_of(trainer)
    assert train(trainer, make_batch(ROWS, prompt=100))[0]["train/skipped_steps"] == 1
    for name, tensor in weights_of(trainer).items():
        assert torch.equal(tensor, before[name]), name


@pytest.fixture
def saved(make_trainer: MakeTrainer, tiny_model: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A model and a checkpoint of it after one step."""
    path = tiny_model()
    trainer = make_trainer(path, SUPERVISED)
    train(trainer, make_batch(ROWS))
    trainer.save(tmp_path / "checkpoint")
    return path, tmp_path / "checkpoint"


def test_checkpoint_of_another_model_is_refused(
    make_trainer: MakeTrainer, tiny_model: Callable[..., Path], saved: tuple[Path, Path]
) -> None:
    resumed = make_trainer(tiny_model(layers=3, name="deeper"), SUPERVISED)
    with pytest.raises(UserError, match="not one of this model"):
        resumed.load(saved[1])


def test_learning_rate_of_the_settings_survives_a_checkpoint(make_trainer: MakeTrainer, saved: tuple[Path, Path]) -> None:
    path, checkpoint = saved
    resumed = make_trainer(path, SUPERVISED, optimizer={**OPTIMIZER, "lr": 0.25})
    resumed.load(checkpoint)
    assert train(resumed, make_batch(ROWS))[0]["train/lr"] == 0.25


def test_directory_without_a_checkpoint_is_refused(make_trainer: MakeTrainer, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a complete checkpoint"):
        make_trainer(tiny_model(), SUPERVISED).load(tmp_path)


def test_a_pass_before_the_step_returns_to_its_micro_batch(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    path, batch = tiny_model(), make_batch([[3, 9, 4, 4, 30, 2], [8, 2, 17, 21, 6, 5], [5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 31, 0]])
    objective = {"policy_loss": {"kind": "clip_cov", "covariance_low": -1.0, "fraction": 0.3}, "top_entropy_fraction": 0.5}
    results = []
    # Sequences of one length: the numbers of another micro-batch would have the right shape.
    for max_tokens in (6, 100):
        trainer = make_trainer(path, objective)
        shard = make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=max_tokens, seed=0)[0]
        results.append([{name: metric.value for name, metric in trainer.train_shard(shard)[0].items()} for _ in range(2)])
    assert [step["train/num_micro_batches"] for step in results[0]] == [4, 4]
    for many, one in zip(*results, strict=True):
        for name in many.keys() - {"train/num_micro_batches"}:
            assert many[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def agreeing(trainer: Trainer, batch: TrainBatch, *, version: int, changed: dict[int, float], rows: set[int] | None = None) -> TrainBatch:
    """The batch with log-probs of `trainer` by weights of `version`; tokens that have an id in `changed` have more, in `rows` alone."""
    row_of = np.repeat(np.arange(batch.num_sequences), batch.lengths)
    added = np.select([batch.tokens == token for token in changed], list(changed.values()), 0.0) if changed else np.zeros(len(batch.tokens))
    added[~batch.loss_mask | (False if rows is None else ~np.isin(row_of, list(rows)))] = 0.0
    log_probs = np.where(batch.loss_mask, trainer.log_probs(batch) + added, 0.0)
    versions = np.where(batch.loss_mask, version, -1)
    return replace(batch, rollout_log_probs=log_probs.astype(np.float32), weight_versions=versions)


def test_no_step_is_made_on_log_probs_other_than_expected(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    trainer = make_trainer(tiny_model())
    expected = Expected(version=4, limits=Limits(median=0.01, outlier=0.5, share=0.02))

    def trained(batch: TrainBatch) -> list[dict[str, Metric]]:
        shard = make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=12, seed=0)[0]
        return trainer.train_shard(shard, expected=expected)

    # Of 17 tokens nine are cut off at 0.5, and one is 0.3 off.
    wrong = agreeing(trainer, make_batch(ROWS), version=4, changed={4: 8.0, 17: -3.0, 7: 1.0, 8: 2.0, 9: 1.0, 10: 9.0, 11: 0.3})
    with pytest.raises(ParityError, match=r"step 5: .*over 17 tokens of weight version 4, .* is 2\.8e-01 nats, needs at most 2\.6e-01"):
        trained(wrong)
    # Tokens of older weights stop nothing, and those within the limits neither.
    old = replace(wrong, weight_versions=np.where(wrong.loss_mask, np.where(wrong.tokens == 30, 4, 3), -1))
    assert trained(old)[0]["train/log_prob_diff_clipped"].value == pytest.approx(0.0, abs=1e-5), "of the one token that is not older"
    few = agreeing(trainer, make_batch(ROWS), version=4, changed={4: 8.0, 11: 0.25})
    metrics = trained(few)[0]
    assert metrics["train/log_prob_diff_clipped"].value == pytest.approx((3 * 0.5 + 0.25) / 17, rel=1e-4)
    assert metrics["train/log_prob_outliers"].value == pytest.approx(3 / 17)
    assert metrics["train/log_prob_diff_max"].value == pytest.approx(8.0, rel=1e-4)
    assert "train/log_prob_diff_max" not in trained(replace(few, weight_versions=np.where(few.loss_mask, 3, -1)))[0]


def test_a_later_step_of_a_batch_is_held_against_the_weights_before(make_trainer: MakeTrainer, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    trainer = make_trainer(path, optimizer={**OPTIMIZER, "lr": 0.1})
    expected = Expected(version=0, limits=Limits(median=1e-4, outlier=1e-3, share=0.0))

    def shard_of(batch: TrainBatch) -> Shard:
        return make_shards(batch, dp=1, optimizer_steps=2, max_tokens_per_micro_batch=12, seed=0)[0]

    batch = make_batch([[3, 9, *range(4, 24)], [8, 2, *range(4, 24)], [5, 6, *range(4, 24)], [1, 2, *range(4, 24)]])
    right = trainer.train_shard(shard_of(agreeing(trainer, batch, version=0, changed={})), expected=expected)
    assert [step["train/skipped_steps"].value for step in right] == [0, 0], "the first step moves the second one's log-probs"
    shard = shard_of(batch)
    second = {int(shard.rows[row]) for rows in shard.steps[1] for row in rows}
    assert len(second) == 2
    free = make_trainer(path, {"proximal": "rollout"}, optimizer={**OPTIMIZER, "lr": 0.1})
    steps = free.train_shard(shard_of(agreeing(free, batch, version=0, changed={})), expected=expected)
    assert "train/log_prob_diff_clipped" not in steps[1], "nobody knows its log-probs before the first step"
    trainer = make_trainer(path, optimizer={**OPTIMIZER, "lr": 0.1})
    before = weights_of(trainer)
    wrong = agreeing(trainer, batch, version=0, changed=dict.fromkeys(range(4, 16), 2.0), rows=second)
    with pytest.raises(ParityError, match="over 40 tokens of weight version 0"):
        trainer.train_shard(shard_of(wrong), expected=expected)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights_of(trainer).items()), "the first step was right"
