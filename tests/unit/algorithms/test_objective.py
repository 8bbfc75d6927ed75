"""The settings of the objective: vocabulary, contradictions, presets."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import ValidationError

from megatron_rl.algorithms.advantage import Gdpo, GroupAdvantage
from megatron_rl.algorithms.choices import Choice
from megatron_rl.algorithms.entropy import ClipHighControl, CoefficientControl, Entropy
from megatron_rl.algorithms.kl import KLControl, KLLoss, KLReward
from megatron_rl.algorithms.objective import PRESETS, Objective, expand_preset
from megatron_rl.algorithms.off_policy import OffPolicy
from megatron_rl.algorithms.policy_loss import Clip
from megatron_rl.algorithms.unclipped_losses import Sapo


def choices() -> Iterator[type[Choice]]:
    """Every class that a setting of the objective can be."""
    for hint in get_type_hints(Objective).values():
        yield from (kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind))
    yield from (KLControl, CoefficientControl, ClipHighControl)


def test_every_preset_is_valid_and_grpo_is_the_default() -> None:
    made = {name: Objective.of(preset=name) for name in PRESETS}
    assert made["grpo"] == Objective() == Objective.of() == Objective.of(preset=None)
    assert len(set(made.values())) == len(PRESETS) == 13


def test_explicit_fields_win_over_the_preset_in_a_section() -> None:
    config = {"preset": "ppo", "policy_loss": {"high": 0.5}, "advantage": {"gamma": 0.9}}
    objective = Objective.of(**config)
    assert (objective.policy_loss, objective.aggregation) == (Clip(high=0.5), "token_mean")
    assert objective.advantage == Objective.of(advantage={"kind": "gae", "gamma": 0.9, "lam": 0.95}).advantage
    assert config == {"preset": "ppo", "policy_loss": {"high": 0.5}, "advantage": {"gamma": 0.9}}


def test_expanding_a_preset_hands_out_copies() -> None:
    expand_preset({"preset": "ppo"})["advantage"]["lam"] = 0.0
    assert PRESETS["ppo"]["advantage"]["lam"] == 0.95


def test_another_kind_starts_from_its_own_defaults() -> None:
    assert Objective.of(preset="dapo", policy_loss="sapo").policy_loss == Sapo()
    assert Objective.of(preset="dapo", policy_loss={"kind": "clip"}).policy_loss == Clip(high=0.28)
    assert Objective.of(preset="ppo", advantage={"kind": "group", "scale": "none"}).advantage == GroupAdvantage(scale="none")
    own = Objective.of(policy_loss="my.losses:loss").policy_loss
    assert (own.kind, own.path) == ("plug_in", "my.losses:loss")


def test_unknown_preset_names_the_closest() -> None:
    with pytest.raises(ValueError, match="did you mean 'dapo'"):
        expand_preset({"preset": "dapoo"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective(aggregation="mean"), "aggregation"),
        (lambda: Clip(low=-0.1), "low"),
        (lambda: Clip(dual_clip=0.5), r"Clip\.dual_clip is 0\.5, needs a number > 1"),
        (lambda: Objective.of(kl={"coef": 0.1}, kl_reward={"coef": 0.1}, advantage="gae"), "at most one"),
        (lambda: KLLoss(coef=0.0), "KLLoss.coef is 0.0, needs a number > 0"),
        (lambda: Objective.of(kl_reward={"coef": 0.1}), "kl_reward has no effect with advantage 'group', needs gae"),
        (lambda: Entropy(coef=2.0, control=CoefficientControl()), r"Entropy\.coef 2\.0 is outside"),
        (lambda: Entropy(), "does nothing"),
        (lambda: Entropy(mode="matched", control=ClipHighControl()), "without a bonus"),
        (lambda: ClipHighControl(initial=2.0), r"ClipHighControl\.initial 2\.0 is outside"),
        (lambda: Objective.of(policy_loss="gpg", entropy={"control": {"kind": "clip_high"}}), "policy_loss 'clip' with a high"),
        (lambda: Objective.of(policy_loss={"high": None}, entropy={"control": {"kind": "clip_high"}}), "policy_loss 'clip' with a high"),
        (lambda: Objective(top_entropy_fraction=0.0), "top_entropy_fraction"),
        (lambda: Objective(max_response_length=9), "which does not divide by it; remove it"),
        (lambda: OffPolicy(), "corrects nothing"),
        (lambda: OffPolicy(mode="truncate"), "bound"),
        (lambda: OffPolicy(high=2.0), "mode"),
        (lambda: OffPolicy(level="sequence", veto=0.1), "a level but mode 'none'"),
        (lambda: OffPolicy(mode="mask", low=2.0, high=1.0), "low"),
        (lambda: OffPolicy(veto=1.0), "veto"),
        (lambda: OffPolicy(mode="truncate", high=2.0, keep_rejected_in_denominator=False), "which rejects no token"),
        (
            lambda: Objective.of(aggregation="token_sum", off_policy={"veto": 0.1, "keep_rejected_in_denominator": False}),
            "aggregation 'token_sum', which has none",
        ),
        (lambda: Clip(low=1.5), "clipped at -0.5"),
        (lambda: Objective.of(policy_loss={"kind": "cispo", "low": 1.5}), "clipped at -0.5"),
        (lambda: Objective.of(policy_loss={"kind": "clip_cov", "covariance_low": 2.0, "covariance_high": 1.0}), "no token lies between"),
        (lambda: GroupAdvantage(scale="none", std_epsilon=0.5), "std_epsilon is 0.5 with scale 'none'"),
        (lambda: Objective.of(zero_variance="drop", advantage="gae"), "zero_variance is 'drop' with advantage 'gae'"),
        (lambda: Objective.of(zero_variance="resample", advantage="reinforce_plus_plus"), "does not compare"),
        (lambda: Objective.of(zero_variance="drop", distillation_coef=1.0), "does not come from rewards"),
        (lambda: Objective.of(zero_variance="drop", policy_loss="distillation"), "does not come from rewards"),
        (lambda: Objective.of(zero_variance="mask_kl"), "'mask_kl' without a KL"),
        *[
            (lambda loss=loss: Objective.of(policy_loss=loss, proximal="rollout"), f"policy_loss '{kind}' without a bound")
            for kind, loss in {
                **{name: name for name in ("gpg", "kl_cov", "distillation", "sft")},
                "clip": {"low": None},
                "clip_cov": {"kind": "clip_cov", "high": None},
                "cispo": {"kind": "cispo", "high": None},
                "gmpo": {"kind": "gmpo", "high": None},
                "dppo_kl": {"kind": "dppo_kl", "low": None},
            }.items()
        ],
        (lambda: Objective.of(proximal="interpolated"), "'interpolated' without the weights of decoupled PPO; set off_policy"),
        (lambda: Objective.of(proximal="interpolated", off_policy={"opsm": 0.1}), "without the weights of decoupled PPO"),
        (lambda: Objective.of(proximal="rollout", off_policy={"mode": "mask", "high": 2.0}), "is then 1 throughout; remove one"),
        (lambda: Objective.of(proximal="rollout", off_policy={"veto": 0.1}), "is then 1 throughout; remove one"),
        (lambda: Objective.of(proximal="rollout", distillation_coef=0.1), "distillation_coef, which reads the recomputed policy"),
        (lambda: Objective.of(proximal="rollout", advantage="gae", kl_reward={"coef": 0.1}), "kl_reward, which reads the recomputed"),
        (lambda: Objective.of(policy_loss="sft", off_policy={"veto": 0.1}), "off_policy has no effect with policy_loss 'sft'"),
        (lambda: Objective.of(policy_loss="sft", advantage="rloo"), "advantage has no effect with policy_loss 'sft'"),
        (lambda: Objective.of(policy_loss="sft", kl={"coef": 0.1, "unbiased": True}), "kl.unbiased has no effect"),
        (lambda: Objective.of(policy_loss="sft", advantage="gae", kl_reward={"coef": 0.1}), "has no effect with policy_loss 'sft'"),
        (lambda: Objective.of(policy_loss="distillation", distillation_coef=0.1), "distillation_coef has no effect"),
        (lambda: Gdpo(reward_weights=(0.0, 0.0)), "one other than 0"),
        (lambda: Objective.of(advantage={"kind": "gae", "gamma": 1.5}), "gamma"),
    ],
)
def test_contradictions_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_no_number_is_infinite_or_none(value: float) -> None:
    """Every numeric field of every section, among them those without a bound."""
    valid: dict[type, dict[str, Any]] = {OffPolicy: {"mode": "mask", "high": 2.0}, Entropy: {"coef": 0.1}, KLReward: {"coef": 0.1}}
    checked = 0
    for section in {Objective, *choices()}:
        needed = {"path": "a:b"} if any(item.name == "path" for item in dataclasses.fields(section)) else valid.get(section, {})
        for name, hint in get_type_hints(section).items():
            if float not in (hint, *get_args(hint)) and name != "reward_weights":
                continue
            given = (1.0, value) if name == "reward_weights" else value
            with pytest.raises(ValueError, match=rf"{section.__name__}\.{name} is .*finite"):
                section(**{**needed, name: given})
            checked += 1
    assert checked > 45


@pytest.mark.parametrize("loss", ["clip", "clip_cov", "cispo", "gmpo", "dppo_tv", "dppo_kl", "sapo", "vespo", "package.module:loss"])
def test_losses_with_a_bound_take_the_rollout_as_centre(loss: str) -> None:
    assert not Objective.of(policy_loss=loss).corrects_staleness
    assert Objective.of(policy_loss=loss, proximal="rollout").corrects_staleness
    assert Objective.of(policy_loss=loss, proximal="rollout", off_policy={"opsm": 0.1}).corrects_staleness


def test_wide_clips_that_are_no_clips_of_ratios_pass() -> None:
    Objective.of(policy_loss={"kind": "gmpo", "low": 1.5})
    Objective.of(policy_loss={"low": 1.0, "high": 4.0})


def test_groups_may_be_dropped_where_they_have_no_signal() -> None:
    for kind in ("group", "rloo", "remax", "gdpo", "pass@k", "opo", "reinforce_plus_plus_baseline", "my.own:estimator"):
        Objective.of(zero_variance="drop", advantage=kind)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Objective(), False),
        (Objective.of(kl={"coef": 0.1}), True),
        (Objective.of(kl_reward={"coef": 0.1}, advantage="gae"), True),
        (Objective.of(policy_loss="sft"), False),
        (Objective.of(policy_loss="sft", kl={"coef": 0.1}), True),
        (Objective.of(policy_loss="distillation"), True),
        (Objective.of(policy_loss="module:function"), True),
    ],
)
def test_who_reads_the_reference(objective: Objective, expected: bool) -> None:
    assert objective.needs_reference is expected


def test_unknown_keys_are_refused_as_settings() -> None:
    for key, config in {
        "clip": {"clip": 0.2},
        "lamda": {"advantage": {"lamda": 0.9}},
        "hgih": {"off_policy": {"mode": "mask", "hgih": 2}},
    }.items():
        with pytest.raises(ValidationError, match=rf"1 validation error[^$]*\b{key}\n\s+Unexpected keyword"):
            Objective.of(**config)


def test_the_entropy_gate_ignores_the_present_coefficient() -> None:
    assert Entropy(coef=0.01).has_bonus
    assert Entropy(control=CoefficientControl()).has_bonus
    assert not Entropy(control=ClipHighControl()).has_bonus


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy_loss": {"kind": "vespo", "tau_positive": 2.0}}, "policy_loss.vespo.tau_positive\n  Unexpected keyword"),
        ({"policy_loss": {"dual_clip": "three"}}, "policy_loss.clip.dual_clip\n  Input should be a valid number"),
        ({"advantage": {"gamma": 0.9}}, "advantage.group.gamma\n  Unexpected keyword"),
        ({"advantage": {"scale": "grup"}}, "advantage.group.scale\n  Input should be 'std', 'batch_std' or 'none'"),
        ({"entropy": {"control": {"kind": "trl", "detla": 1}}}, "entropy.control"),
        ({"policy_loss": "clipp"}, "'clipp' found using 'kind' does not match any of the expected tags: 'clip'"),
    ],
)
def test_arguments_of_others_and_of_other_types_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Objective.of(**config)
