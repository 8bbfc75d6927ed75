"""Every argument of every choice acts: another value of it changes a bit of a training, if only the choice is made.

A training is here: losses and gradients of two steps from the rewards of a batch, also a critic's, and coefficients that move.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from step_emulation import Step, run_step, trivial_layout

from megatron_rl.algorithms.coefficients import ControlState
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.policy_loss import Clip
from megatron_rl.config.settings_reference import setting_fields
from megatron_rl.data.batch import GREEDY_BASELINE
from megatron_rl.data.packing import Trajectories, make_shards
from megatron_rl.training import advantages
from megatron_rl.training.advantages import compared_samples, make_token_data
from megatron_rl.training.critic import value_loss
from megatron_rl.types import Shard, TrainBatch

LENGTHS = (5, 3, 6, 2, 4, 7, 3, 4)
REWARDS = (1.0, 0.2, 0.0, 0.5, 0.5, 0.9, -1.0, 0.3)
GROUPS = (0, 0, 0, 1, 1, 2, 2, 3)
ENTROPIES = (0.15, 0.1, 0.2, 0.3, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1, 0.15)

CHANGED: dict[str, Any] = {
    "policy_loss.ratio_level": "sequence",
    "policy_loss.low": 0.02,
    "policy_loss.high": 0.03,
    "policy_loss.ratio_cap": 1.02,
    "policy_loss.dual_clip": 1.05,
    "policy_loss.tau_positive": 2.0,
    "policy_loss.tau_negative": 0.5,
    "policy_loss.k_positive": 1.0,
    "policy_loss.lambda_positive": 1.0,
    "policy_loss.k_negative": 1.0,
    "policy_loss.lambda_negative": 1.0,
    "policy_loss.fraction": 0.1,
    "policy_loss.covariance_low": 0.1,
    "policy_loss.covariance_high": 0.5,
    "policy_loss.coef": 0.5,
    "aggregation": "token_sum",
    "max_response_length": 11,
    "advantage.scale": "batch_std",
    "advantage.std_epsilon": 0.3,
    "advantage.gamma": 0.6,
    "advantage.lam": 0.7,
    "advantage.whiten": False,
    "advantage.bootstrap_truncated": True,
    "advantage.reward_weights": [2.0, 0.5, 0.0],
    "advantage.value_clip": 0.05,
    "off_policy": {"mode": "truncate", "high": 1.05},
    "proximal": "interpolated",
    "off_policy.mode": "truncate",
    "off_policy.level": "geometric",
    "off_policy.low": 0.9,
    "off_policy.high": 1.02,
    "off_policy.veto": 0.6,
    "off_policy.opsm": -9.0,
    "off_policy.keep_rejected_in_denominator": False,
    "kl": {"coef": 0.2},
    "kl.coef": 0.3,
    "kl.estimator": "k1",
    "kl.unbiased": True,
    "kl.control": {"target": 0.01, "horizon": 10.0},
    "kl.control.target": 0.01,
    "kl.control.horizon": 20.0,
    "kl_reward": {"coef": 0.2},
    "kl_reward.coef": 0.3,
    "kl_reward.estimator": "k2",
    "kl_reward.control": {"target": 0.01, "horizon": 10.0},
    "kl_reward.control.target": 0.01,
    "kl_reward.control.horizon": 20.0,
    "entropy": {"coef": 0.1},
    "entropy.coef": 0.31,
    "entropy.mode": "matched",
    "entropy.control": {"kind": "skywork", "target": 0.3},
    "entropy.control.target": 0.45,
    "entropy.control.delta": 0.01,
    "entropy.control.min": 0.25,
    "entropy.control.max": 0.32,
    "entropy.control.initial": 0.31,
    "distillation_coef": 0.3,
    "zero_variance": "mask_kl",
    "top_entropy_fraction": 0.5,
}
"""Another value of every setting, of which a change can be seen."""
KINDS = {"policy_loss.kind": "gpg", "advantage.kind": "rloo", "entropy.control.kind": "skywork"}
OWN = {"policy_loss.path", "policy_loss.args", "advantage.path", "advantage.args"}
"""Of the user's own."""

# Bounds between which the tokens of the batch lie on both sides.
_LOSSES: dict[str, dict[str, Any]] = {
    "cispo": {"high": 0.2, "low": 0.2},
    "gmpo": {"low": 0.2, "high": 0.2},
    "clip_cov": {"fraction": 0.5, "covariance_low": -0.2, "covariance_high": 2.0},
    "kl_cov": {"fraction": 0.3},
}
_CONTROL = {"target": 0.2, "min": 0.1, "max": 0.4, "delta": 0.06}
_KL = {"coef": 0.1, "control": {"target": 0.5, "horizon": 15.0}}


def chosen(path: str, kind: str | None) -> list[dict[str, Any]]:
    """Objectives in which the choice is made that has the setting at `path`."""
    section = path.partition(".")[0]
    if section == "policy_loss":
        return [{"policy_loss": {"kind": kind, **_LOSSES.get(kind or "", {})}}]
    if section == "advantage":
        return [{"advantage": {"kind": kind}}]
    if section == "entropy":
        control = {"control": {"kind": kind or "trl", **_CONTROL}}
        initial = {"control": {**control["control"], "initial": 0.3}} if kind == "clip_high" else {"coef": 0.3, **control}
        return [
            {"entropy": {"coef": 0.3}}
            if path in ("entropy.mode", "entropy.control")
            else {"entropy": initial, "policy_loss": {"high": 0.02}}
        ]
    return {
        "max_response_length": [{"aggregation": "sequence_mean_token_sum_norm", "max_response_length": 9}],
        "zero_variance": [{"kl": _KL}],
        "kl": [{"kl": _KL}] if "." in path else [{}],
        "kl_reward": [
            {"advantage": {"kind": kind}, **({"kl_reward": _KL} if "." in path else {})} for kind in ("gae", "reinforce_plus_plus")
        ],
        "proximal": [{"off_policy": {"mode": "truncate", "high": 3.0}}],
        "off_policy": [{"off_policy": {"mode": "mask", "low": 0.7, "high": 1.1}}] if "." in path else [{}],
    }.get(section, [{}])


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    section, _, rest = path.partition(".")
    return {**config, section: changed(config.get(section) or {}, rest, value) if rest else value}


def numbers(seed: int, *, low: float = -2.0, spread: float = 0.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(low, spread, sum(LENGTHS)).astype(np.float32)


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
    state, batch, found = ControlState.first(objective), shard().batch, []
    old, reference, teacher, values = numbers(5), numbers(6, low=-2.4), numbers(7), numbers(8, low=0.5, spread=1.0)
    for number, entropy in enumerate(ENTROPIES[: 2 if objective.entropy is None or objective.entropy.control is None else None]):
        present, coefficients = state.of_step(objective, entropy)
        loss = present.policy_loss
        found.append(np.array(loss.high if objective.adapts_clip_high and isinstance(loss, Clip) else coefficients.entropy))
        if number > 1:
            state = state.updated(objective, entropy=entropy, kl=None, num_trajectories=len(LENGTHS))
            continue
        data = make_token_data(
            objective,
            shard(),
            old=old,
            reference=reference,
            state_values=values if objective.has_critic else None,
            teacher=teacher,
            kl_reward_coef=state.kl_reward_coef(objective),
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
        if data.current_share is not None:
            tokens["current_share"] = torch.from_numpy(data.current_share).double()
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
        kl = result.metrics.get("kl_per_sequence")
        state = state.updated(objective, entropy=entropy, kl=kl, num_trajectories=len(LENGTHS))
    return [*found, *_dropped(objective)]


def _critic(objective: Objective, step: Step, data: Any) -> list[np.ndarray]:
    values = {"values": numbers(11, low=0.5), "old_values": data.old_values, "returns": data.returns}
    tokens = {name: torch.from_numpy(array).double() for name, array in values.items()}
    result = run_step(value_loss(objective), dataclasses.replace(step, tokens=tokens), trivial_layout(len(LENGTHS)))
    return [np.array(result.loss), result.gradients["values"].numpy()]


def _dropped(objective: Objective) -> list[np.ndarray]:
    """The samples that the rollout throws away."""
    if objective.zero_variance not in ("drop", "resample") or not objective.trains_by_rewards:
        return []
    samples = compared_samples(objective, shard(), Trajectories.of(shard().all_trajectory_ids))
    return [objective.advantage.without_signal(samples).numpy()]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Callable[[Objective], list[np.ndarray]]]:
    """Outcomes by objective, computed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advantages, "sum_over_data_parallel", lambda values: values)
        yield functools.cache(outcome)


def test_every_setting_has_another_value() -> None:
    fields = {field.path for field in setting_fields(Objective)}
    assert fields == CHANGED.keys() | KINDS.keys() | OWN | {"entropy.control"}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (field.path, kind)
        for field in setting_fields(Objective)
        if field.path in CHANGED
        for kind in field.kinds or (None,)
        if kind != "plug_in"
    ],
)
def test_an_argument_acts(path: str, kind: str | None, outcomes: Callable[[Objective], list[np.ndarray]]) -> None:
    for config in chosen(path, kind):
        before, after = Objective.of(**config), Objective.of(**changed(config, path, CHANGED[path]))
        one, other = outcomes(before), outcomes(after)
        assert len(one) != len(other) or not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True)), config


@pytest.mark.parametrize(
    "field", [field for field in setting_fields(Objective) if field.kinds and field.path not in OWN], ids=lambda f: f.path
)
def test_an_argument_of_another_kind_cannot_be_set(field: Any) -> None:
    section, _, name = field.path.rpartition(".")
    kinds = next(other for other in setting_fields(Objective) if other.path == f"{section}.kind").type.removeprefix("one of ").split(", ")
    with_it = {kind for other in setting_fields(Objective) if other.path == field.path for kind in other.kinds}
    for kind in set(kinds) - with_it:
        value = {"kind": kind, name: CHANGED[field.path], **({"path": "a:b"} if kind == "plug_in" else {})}
        with pytest.raises(ValidationError, match="Unexpected keyword"):
            Objective.of(**changed({}, section, value))
