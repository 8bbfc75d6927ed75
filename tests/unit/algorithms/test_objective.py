"""The settings of the objective: vocabulary, contradictions, presets."""

import re
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

from megatron_rl.algorithms.arguments import CONTROL_ARGUMENTS, ESTIMATOR_ARGUMENTS, LOSS_ARGUMENTS, GDPOArguments, SapoArguments
from megatron_rl.algorithms.objective import (
    ESTIMATORS,
    POLICY_LOSSES,
    AdvantageSettings,
    EntropyControl,
    KLControl,
    Objective,
    OffPolicyCorrection,
)
from megatron_rl.algorithms.presets import PRESETS, expand_preset

ADAPTER = TypeAdapter(Objective)
ARGUMENTS = {*LOSS_ARGUMENTS.values(), *ESTIMATOR_ARGUMENTS.values(), *CONTROL_ARGUMENTS.values()}


def test_every_preset_is_valid_and_grpo_is_the_default() -> None:
    made = {name: ADAPTER.validate_python(expand_preset({"preset": name})) for name in PRESETS}
    assert made["grpo"] == Objective() == ADAPTER.validate_python({})
    assert len(set(made.values())) == len(PRESETS) == 13


def test_explicit_fields_win_over_the_preset_also_inside_a_section() -> None:
    config = {"preset": "ppo", "clip_high": 0.5, "advantage": {"args": {"lam": 0.5}}}
    objective = ADAPTER.validate_python(expand_preset(config))
    assert (objective.clip_high, objective.aggregation) == (0.5, "token_mean")
    assert objective.advantage == AdvantageSettings(estimator="ppo", args={"gamma": 1.0, "lam": 0.5, "whiten": True})
    assert config == {"preset": "ppo", "clip_high": 0.5, "advantage": {"args": {"lam": 0.5}}}


def test_expanding_a_preset_hands_out_copies() -> None:
    expand_preset({"preset": "ppo"})["advantage"]["args"]["lam"] = 0.0
    assert PRESETS["ppo"]["advantage"]["args"]["lam"] == 0.95


def test_unknown_preset_names_the_closest() -> None:
    with pytest.raises(ValueError, match="did you mean 'dapo'"):
        expand_preset({"preset": "dapoo"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective(policy_loss="clipp"), "policy_loss"),
        (lambda: Objective(aggregation="mean"), "aggregation"),
        (lambda: Objective(clip_low=-0.1), "clip_low"),
        (lambda: Objective(loss_args={"dual_clip": 0.5}), r"objective\.loss_args\.dual_clip is 0\.5, needs a number > 1"),
        (
            lambda: Objective(policy_loss="cispo", loss_args={"dual_clip": 3.0}),
            "its own arguments are: none",
        ),
        (lambda: Objective(kl_loss_coef=0.1, kl_reward_coef=0.1), "at most one"),
        (lambda: Objective(kl_control=KLControl()), "kl_control"),
        (lambda: Objective(kl_reward_coef=0.1), "kl_reward_coef"),
        (lambda: Objective(entropy_coef=0.1, entropy_control=EntropyControl()), "entropy_control.args.initial"),
        (lambda: Objective(policy_loss="gpg", entropy_control=EntropyControl(rule="clip_high")), "clip_high"),
        (lambda: Objective(top_entropy_fraction=0.0), "top_entropy_fraction"),
        (lambda: OffPolicyCorrection(), "corrects nothing"),
        (lambda: OffPolicyCorrection(mode="truncate"), "bound"),
        (lambda: OffPolicyCorrection(high=2.0), "mode"),
        (lambda: OffPolicyCorrection(mode="mask", low=2.0, high=1.0), "low"),
        (lambda: Objective(clip_low=1.5), "clipped at -0.5"),
        (lambda: Objective(policy_loss="cispo", clip_low=1.5), "clip_low"),
        (lambda: Objective(policy_loss="clip_cov", loss_args={"low": 2.0, "high": 1.0}), "no token lies between"),
        (
            lambda: Objective(zero_variance="drop", advantage=AdvantageSettings(estimator="ppo")),
            "zero_variance is 'drop' with estimator 'ppo'",
        ),
        (lambda: Objective(zero_variance="resample", advantage=AdvantageSettings(estimator="reinforce_plus_plus")), "does not compare"),
        (lambda: Objective(zero_variance="drop", distillation_coef=1.0), "does not come from rewards"),
        (lambda: Objective(zero_variance="drop", policy_loss="distillation"), "does not come from rewards"),
        (lambda: AdvantageSettings(estimator="gdpo", args={"reward_weights": [0.0, 0.0]}), "one other than 0"),
        (lambda: OffPolicyCorrection(veto=1.0), "veto"),
        (lambda: EntropyControl(args={"initial": 2.0}), r"objective\.entropy_control\.args\.initial 2\.0 is outside"),
        (lambda: EntropyControl(rule="own"), "rule"),
        (
            lambda: AdvantageSettings(estimator="ppo", args={"gamma": 1.5}),
            r"advantage\.args\.gamma is 1\.5, needs a number >= 0, <= 1",
        ),
    ],
)
def test_contradictions_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_no_number_is_infinite_or_none(value: float) -> None:
    """Every numeric field of every section, among them those without a bound."""
    valid: dict[type, dict[str, Any]] = {OffPolicyCorrection: {"mode": "mask", "high": 2.0}}
    checked = 0
    for section in (Objective, AdvantageSettings, OffPolicyCorrection, EntropyControl, KLControl, *ARGUMENTS):
        for name, hint in get_type_hints(section).items():
            if float not in (hint, *get_args(hint)) and name != "reward_weights":
                continue
            given = (1.0, value) if name == "reward_weights" else value
            with pytest.raises(ValueError, match=rf"{section.__name__}\.{name} is .*finite"):
                section(**{**valid.get(section, {}), name: given})
            checked += 1
    assert checked > 30


def test_wide_clips_that_are_no_clips_of_ratios_pass() -> None:
    Objective(policy_loss="gmpo", clip_low=1.5)
    Objective(clip_low=1.0, clip_high=4.0)


def test_groups_may_be_dropped_where_they_have_no_signal() -> None:
    for estimator in ("grpo", "rloo", "remax", "gdpo", "pass@k", "reinforce_plus_plus_baseline"):
        Objective(zero_variance="drop", advantage=AdvantageSettings(estimator=estimator))
    Objective(zero_variance="drop", policy_loss="sft", advantage=AdvantageSettings(estimator="ppo"))


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Objective(), False),
        (Objective(kl_loss_coef=0.1), True),
        (Objective(kl_reward_coef=0.1, advantage=AdvantageSettings(estimator="ppo")), True),
        (Objective(kl_reward_coef=0.1, policy_loss="sft", advantage=AdvantageSettings(estimator="ppo")), False),
        (Objective(policy_loss="sft"), False),
        (Objective(policy_loss="sft", kl_loss_coef=0.1), True),
        (Objective(policy_loss="distillation"), True),
        (Objective(policy_loss="module:function"), True),
    ],
)
def test_who_reads_the_reference(objective: Objective, expected: bool) -> None:
    assert objective.needs_reference is expected


def test_unknown_keys_are_refused_as_settings() -> None:
    configs = {
        "clip": {"clip": 0.2},
        "lamda": {"advantage": {"lamda": 0.9}},
        "hgih": {"off_policy_correction": {"mode": "mask", "hgih": 2}},
    }
    for key, config in configs.items():
        with pytest.raises(ValidationError, match=rf"1 validation error[^$]*\b{key}\n\s+Unexpected keyword"):
            ADAPTER.validate_python(config)


def test_the_entropy_gate_does_not_depend_on_the_present_coefficient() -> None:
    assert not Objective().has_entropy_bonus
    assert Objective(entropy_coef=0.01).has_entropy_bonus
    assert Objective(entropy_control=EntropyControl(args={"initial": 0.0})).has_entropy_bonus
    assert not Objective(entropy_control=EntropyControl(rule="clip_high")).has_entropy_bonus


def test_arguments_are_those_of_the_chosen_loss_estimator_and_rule() -> None:
    assert set(LOSS_ARGUMENTS) == set(POLICY_LOSSES) and set(ESTIMATOR_ARGUMENTS) == set(ESTIMATORS)
    assert Objective(policy_loss="sapo", loss_args={"tau_positive": 2}).arguments(SapoArguments) == SapoArguments(tau_positive=2.0)
    gdpo = AdvantageSettings(estimator="gdpo", args={"reward_weights": [1, 2.5]})
    assert gdpo.arguments(GDPOArguments).reward_weights == (1.0, 2.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective(policy_loss="sapo", loss_args={"tau_positiv": 2.0}), "did you mean objective.loss_args.tau_positive?"),
        (
            lambda: Objective(policy_loss="vespo", loss_args={"tau_positive": 2.0}),
            "tau_positive is no argument of vespo; did you",
        ),
        (lambda: Objective(loss_args={"dual_clip": "3"}), "objective.loss_args.dual_clip is '3', clip needs dual_clip: float | None"),
        (lambda: Objective(loss_args={"dual_clip": True}), "objective.loss_args.dual_clip is True, clip needs dual_clip: float | None"),
        (
            lambda: AdvantageSettings(args={"gamma": 0.9}),
            "args.gamma is no argument of grpo; its own arguments are: scale",
        ),
        (lambda: AdvantageSettings(args={"scale": "grup"}), "objective.advantage.args.scale is 'grup', grpo needs scale: "),
        (lambda: EntropyControl(args={"detla": 1}), "did you mean objective.entropy_control.args.delta?"),
    ],
)
def test_arguments_of_others_and_of_other_types_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_arguments_of_a_preset_do_not_follow_another_loss_or_estimator() -> None:
    sapo = ADAPTER.validate_python(expand_preset({"preset": "sapo", "policy_loss": "gpg"}))
    assert (sapo.policy_loss, sapo.loss_args) == ("gpg", {})
    ppo = ADAPTER.validate_python(expand_preset({"preset": "ppo", "advantage": {"estimator": "grpo", "args": {"scale": "none"}}}))
    assert ppo.advantage == AdvantageSettings(args={"scale": "none"})
    kept = expand_preset({"preset": "sapo", "policy_loss": "sapo", "loss_args": {"tau_negative": 2.0}})
    assert kept["loss_args"] == {"tau_positive": 1.0, "tau_negative": 2.0}
