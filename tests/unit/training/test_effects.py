"""The table of what reads each setting, held to the truth: where nothing is said to read it, changing it changes no bit of a training.

A training is here: losses and gradients of two steps from the rewards of a batch, also a critic's, and coefficients that move.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from step_emulation import Step, run_step, trivial_layout

from megatron_rl.algorithms.coefficients import StepMeasurements, first_state, kl_reward_coef, of_step, updated_state
from megatron_rl.algorithms.effects import READERS, is_read, unread_settings
from megatron_rl.algorithms.objective import POLICY_LOSSES, EntropyControl, Estimator, KLControl, Objective
from megatron_rl.algorithms.presets import PRESETS, expand_preset
from megatron_rl.algorithms.token_advantage import without_signal
from megatron_rl.config.settings_reference import setting_fields
from megatron_rl.data.baseline import GREEDY_BASELINE
from megatron_rl.data.packing import make_shards
from megatron_rl.training import advantages
from megatron_rl.training.advantages import make_token_data
from megatron_rl.training.critic import critic_objective
from megatron_rl.types import Shard, TrainBatch

ADAPTER = TypeAdapter(Objective)
LENGTHS = (5, 3, 6, 2, 4, 7, 3, 4)
REWARDS = (1.0, 0.2, 0.0, 0.5, 0.5, 0.9, -1.0, 0.3)
GROUPS = (0, 0, 0, 1, 1, 2, 2, 3)
ENTROPIES = (0.15, 0.1, 0.2, 0.3, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1, 0.15)

# Another value of every setting, of which a change can be seen where it is read.
CHANGED: dict[str, Any] = {
    "policy_loss": "gpg",
    "ratio_level": "sequence",
    "aggregation": "token_sum",
    "max_response_length": 11,
    "clip_low": 0.02,
    "clip_high": 0.03,
    "loss_args.ratio_cap": 1.02,
    "loss_args.dual_clip": 1.05,
    "loss_args.tau_positive": 2.0,
    "loss_args.tau_negative": 0.5,
    "loss_args.k_positive": 1.0,
    "loss_args.lambda_positive": 1.0,
    "loss_args.k_negative": 1.0,
    "loss_args.lambda_negative": 1.0,
    "loss_args.fraction": 0.9,
    "loss_args.low": 0.1,
    "loss_args.high": 0.5,
    "loss_args.coef": 0.5,
    "off_policy_correction": {"mode": "truncate", "high": 1.05},
    "off_policy_correction.mode": "mask",
    "off_policy_correction.level": "geometric",
    "off_policy_correction.low": 0.9,
    "off_policy_correction.high": 1.02,
    "off_policy_correction.veto": 0.6,
    "off_policy_correction.opsm": -9.0,
    "off_policy_correction.keep_rejected_in_denominator": False,
    "kl_loss_coef": 0.2,
    "kl_estimator": "k1",
    "kl_unbiased": True,
    "kl_reward_coef": 0.2,
    "kl_reward_estimator": "k2",
    "distillation_coef": 0.3,
    "kl_control": {"target": 0.01, "horizon": 10.0},
    "kl_control.target": 0.01,
    "kl_control.horizon": 20.0,
    "advantage.estimator": "rloo",
    "advantage.args.scale": "batch",
    "advantage.args.std_epsilon": 0.3,
    "advantage.args.gamma": 0.6,
    "advantage.args.lam": 0.7,
    "advantage.args.whiten": False,
    "advantage.args.bootstrap_truncated": True,
    "advantage.args.reward_weights": [2.0, 0.5, 0.0],
    "advantage.args.value_clip": 0.05,
    "zero_variance": "mask_kl",
    "entropy_coef": 0.1,
    "entropy_mode": "matched",
    "entropy_control": {"args": {"initial": 0.3}},
    "entropy_control.rule": "skywork",
    "entropy_control.target": 0.45,
    "entropy_control.args.delta": 0.01,
    "entropy_control.args.min": 0.25,
    "entropy_control.args.max": 0.32,
    "entropy_control.args.initial": 0.31,
    "top_entropy_fraction": 0.5,
}
BASE: dict[str, Any] = {"max_response_length": 9}
# Bounds between which the tokens of the batch lie on both sides.
LOSS_ARGS: dict[str, dict[str, Any]] = {"clip_cov": {"fraction": 0.5, "low": -0.2, "high": 2.0}, "kl_cov": {"fraction": 0.3}}
MAPPINGS = {"loss_args", "advantage.args", "entropy_control.args"}
"""What holds arguments; an argument is refused by what does not take it."""
NOT_TRAINED = {"loss_args.value_clip"}
"""Of the loss of a critic, which is made from advantage.args.value_clip."""
CONTROL = {"target": 0.2, "args": {"initial": 0.3, "min": 0.1, "max": 0.4, "delta": 0.06}}
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"kl_loss_coef": 0.1, "kl_control": {"target": 0.5, "horizon": 15.0}, "zero_variance": "mask_kl"},
    {"off_policy_correction": {"mode": "truncate", "high": 1.1, "low": 0.8}, "entropy_coef": 0.05},
    {"off_policy_correction": {"mode": "mask", "level": "sequence", "high": 1.5, "opsm": 0.1}, "aggregation": "token_mean"},
    {"off_policy_correction": {"mode": "none", "veto": 0.2}, "aggregation": "token_sum", "top_entropy_fraction": 0.6},
    {"entropy_control": CONTROL, "aggregation": "sequence_mean_token_sum_norm"},
    {"entropy_control": {**CONTROL, "rule": "clip_high"}, "clip_high": 0.02},
    {"off_policy_correction": {"mode": "none", "opsm": 0.1}, "kl_loss_coef": 0.1, "kl_unbiased": True},
)  # fmt: skip


def made(config: Mapping[str, Any]) -> Objective | None:
    """The objective of nested plain values, None where it is a contradiction."""
    try:
        return ADAPTER.validate_python(config)
    except ValidationError:
        return None


def changed(config: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """`config` with the setting at `path` changed; None where its section is not set."""
    section, _, name = path.partition(".")
    if not name:
        return {**config, section: CHANGED[path]}
    if section not in ("advantage", "loss_args") and config.get(section) is None:
        return None
    inner, inner_config = (CHANGED[path], config.get(section, {}))
    if name.startswith("args."):
        inner, name = {**inner_config.get("args", {}), name.removeprefix("args."): inner}, "args"
    return {**config, section: {**inner_config, name: inner}}


def contexts() -> Iterator[dict[str, Any]]:
    """Every policy loss and every estimator, each with some of the rest."""
    losses = [name for name in POLICY_LOSSES if name != "value"]
    for number, loss in enumerate(losses):
        named = {**BASE, "policy_loss": loss, "loss_args": LOSS_ARGS.get(loss, {})}
        yield {**named, "entropy_coef": 0.01}
        yield {**named, **EXTRAS[2]}
        estimator = Estimator.__args__[number % len(Estimator.__args__)]
        yield {**named, **EXTRAS[(3 * number + 1) % len(EXTRAS)], "advantage": {"estimator": estimator}}
    for estimator in Estimator.__args__:
        yield {**BASE, "advantage": {"estimator": estimator}}
    yield from ({**BASE, **extra} for extra in EXTRAS[1:])
    for estimator in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        for loss in ("clip", "sft", "distillation"):
            kl = {"kl_reward_coef": 0.1, "kl_control": {"target": 0.5, "horizon": 15.0}}
            yield {**BASE, **kl, "policy_loss": loss, "advantage": {"estimator": estimator}}


def numbers(seed: int, *, low: float = -2.0, spread: float = 0.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(low, spread, sum(LENGTHS)).astype(np.float32)


@functools.cache
@functools.cache
def shard() -> Shard:
    mask = np.random.default_rng(3).random(sum(LENGTHS)) < 0.8
    mask[np.cumsum(LENGTHS) - LENGTHS] = False
    components = np.stack([np.array(REWARDS) ** 2, np.array(REWARDS) > 0.4, np.full(len(LENGTHS), 0.1)], axis=1)
    batch = TrainBatch(
        tokens=np.zeros(sum(LENGTHS)),
        cu_seqlens=np.concatenate([[0], np.cumsum(LENGTHS)]),
        prompt_lengths=np.ones(len(LENGTHS)),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, numbers(4), 0.0),
        weight_versions=np.zeros(sum(LENGTHS)),
        rewards=REWARDS,
        group_ids=GROUPS,
        truncated=np.arange(len(LENGTHS)) % 2 == 0,
        component_names=("a", "b", GREEDY_BASELINE),
        reward_components=components,
    )
    return make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=100, seed=0)[0]


def outcome(objective: Objective) -> list[np.ndarray]:
    """Everything that a training under the objective does, but for what it only reports."""
    state, batch, found = first_state(objective), shard().batch, []
    old, reference, teacher, values = numbers(5), numbers(6, low=-2.4), numbers(7), numbers(8, low=0.5, spread=1.0)
    for number, entropy in enumerate(ENTROPIES[: 2 if objective.entropy_control is None else None]):
        present, coefficients = of_step(objective, state, entropy)
        moved = present.clip_high if objective.adapts_clip_high else coefficients.entropy
        found.append(np.array(moved))
        if number > 1:
            state = updated_state(objective, state, StepMeasurements(entropy=entropy, kl_per_sequence=None), num_sequences=len(LENGTHS))
            continue
        data = make_token_data(
            objective,
            shard(),
            old=old,
            reference=reference,
            state_values=values if objective.has_critic else None,
            teacher=teacher,
            kl_reward_coef=kl_reward_coef(objective, state),
        )
        tokens = {
            "log_probs": torch.from_numpy(numbers(9)).double(),
            "entropy": torch.from_numpy(np.abs(numbers(10))).double(),
            "old_log_probs": torch.from_numpy(old).double(),
            "rollout_log_probs": torch.from_numpy(batch.rollout_log_probs.copy()).double(),
            "ref_log_probs": torch.from_numpy(reference).double(),
            "advantages": torch.from_numpy(data.advantages).double(),
            "token_keys": torch.from_numpy(data.token_keys),
        }
        if data.kl_mask is not None:
            tokens["kl_mask"] = torch.from_numpy(data.kl_mask)
        step = Step(lengths=tuple(batch.lengths.tolist()), loss_mask=torch.from_numpy(batch.loss_mask.copy()), tokens=tokens)
        result = run_step(
            present,
            step,
            trivial_layout(len(LENGTHS)),
            coefficients=coefficients,
        )
        found += [np.array(result.loss), *(gradient.numpy() for gradient in result.gradients.values())]
        if objective.has_critic:
            found += _critic(objective, step, data)
        measured = StepMeasurements(entropy=entropy, kl_per_sequence=result.metrics.get("kl_per_sequence"))
        state = updated_state(objective, state, measured, num_sequences=len(LENGTHS))
    return [*found, *_dropped(objective)]


def _critic(objective: Objective, step: Step, data: Any) -> list[np.ndarray]:
    values = {"values": numbers(11, low=0.5), "old_values": data.old_values, "returns": data.returns}
    tokens = {name: torch.from_numpy(array).double() for name, array in values.items()}
    result = run_step(critic_objective(objective), dataclasses.replace(step, tokens=tokens), trivial_layout(len(LENGTHS)))
    return [np.array(result.loss), result.gradients["values"].numpy()]


def _dropped(objective: Objective) -> list[np.ndarray]:
    """The samples that the rollout throws away."""
    if objective.zero_variance not in ("drop", "resample") or not objective.trains_by_rewards:
        return []
    rewards = advantages._sample_rewards(objective, shard())
    return [without_signal(objective.advantage, **rewards).numpy()]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Callable[[Objective], list[np.ndarray]]]:
    """Outcomes by objective, computed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advantages, "sum_over_data_parallel", lambda values: values)
        yield functools.cache(outcome)


def test_the_table_names_every_setting_and_no_other() -> None:
    assert READERS.keys() == {item.path for item in setting_fields(Objective)} == CHANGED.keys() | MAPPINGS | NOT_TRAINED


@pytest.mark.parametrize("path", CHANGED)
def test_a_setting_acts_where_it_is_read_and_nowhere_else(path: str, outcomes: Callable[[Objective], list[np.ndarray]]) -> None:
    """It acts with every estimator, or else with every policy loss, that is said to read it."""
    acted: dict[str, bool] = {}
    number = list(CHANGED).index(path)
    for index, config in enumerate(contexts()):
        before, config_after = made(config), changed(config, path)
        after = None if config_after is None else made(config_after)
        if before is None or after is None or before == after:
            continue
        read = is_read(path, after)
        reader = before.advantage.estimator if path.startswith("advantage.") else before.policy_loss
        if acted.get(reader, False) if read else (index + number) % 5:
            continue
        one, other = outcomes(before), outcomes(after)
        acts = len(one) != len(other) or not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        assert read or not acts, f"{path} is said not to be read, but acts in {config}"
        if read:
            acted[reader] = acts
    assert acted and all(acted.values()), f"{path} is said to be read, but these never show it: {[k for k, v in acted.items() if not v]}"


def test_presets_and_defaults_have_no_settings_without_effect() -> None:
    for preset in PRESETS:
        objective = made(expand_preset({"preset": preset}))
        assert objective is not None and unread_settings(objective) == [], preset


def test_notes_name_the_value_and_who_would_read_it() -> None:
    objective = made(
        {"policy_loss": "sapo", "loss_args": {"tau_positive": 2.0}, "advantage": {"args": {"scale": "none", "std_epsilon": 0.5}}}
    )
    assert objective is not None
    assert unread_settings(objective) == [
        "objective.advantage.args.std_epsilon 0.5 has no effect: only advantage.estimator gdpo, or grpo and pass@k with a scale reads it",
    ]
    supervised = Objective(policy_loss="sft", kl_reward_coef=0.1, kl_control=KLControl(), advantage=dataclasses.replace(
        Objective().advantage, estimator="ppo"), entropy_control=EntropyControl())  # fmt: skip
    named = {note.split()[0] for note in unread_settings(supervised)}
    assert named == {"objective.kl_reward_coef", "objective.kl_control", "objective.advantage.estimator"}
