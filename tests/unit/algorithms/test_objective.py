"""The settings of the objective: vocabulary, contradictions, presets."""

import pytest
from pydantic import TypeAdapter, ValidationError

from megatron_rl.algorithms.objective import AdvantageSettings, EntropyControl, KLControl, Objective, OffPolicyCorrection
from megatron_rl.algorithms.presets import PRESETS, expand_preset

ADAPTER = TypeAdapter(Objective)


def test_every_preset_is_valid_and_grpo_is_the_default() -> None:
    made = {name: ADAPTER.validate_python(expand_preset({"preset": name})) for name in PRESETS}
    assert made["grpo"] == Objective() == ADAPTER.validate_python({})
    assert len(set(made.values())) == len(PRESETS) == 13


def test_explicit_fields_win_over_the_preset_also_inside_a_section() -> None:
    config = {"preset": "ppo", "clip_high": 0.5, "advantage": {"lam": 0.5}}
    objective = ADAPTER.validate_python(expand_preset(config))
    assert (objective.clip_high, objective.aggregation) == (0.5, "token_mean")
    assert objective.advantage == AdvantageSettings(estimator="ppo", lam=0.5)
    assert config == {"preset": "ppo", "clip_high": 0.5, "advantage": {"lam": 0.5}}


def test_expanding_a_preset_hands_out_copies() -> None:
    expand_preset({"preset": "ppo"})["advantage"]["lam"] = 0.0
    assert PRESETS["ppo"]["advantage"]["lam"] == 0.95


def test_unknown_preset_names_the_closest() -> None:
    with pytest.raises(ValueError, match="did you mean 'dapo'"):
        expand_preset({"preset": "dapoo"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective(policy_loss="clipp"), "policy_loss"),
        (lambda: Objective(aggregation="mean"), "aggregation"),
        (lambda: Objective(clip_low=-0.1), "clip_low"),
        (lambda: Objective(dual_clip=0.5), "dual_clip"),
        (lambda: Objective(policy_loss="cispo", dual_clip=3.0), "dual_clip"),
        (lambda: Objective(kl_loss_coef=0.1, kl_reward_coef=0.1), "at most one"),
        (lambda: Objective(kl_control=KLControl()), "kl_control"),
        (lambda: Objective(kl_reward_coef=0.1), "kl_reward_coef"),
        (lambda: Objective(entropy_coef=0.1, entropy_control=EntropyControl()), "entropy_control.initial"),
        (lambda: Objective(policy_loss="gpg", entropy_control=EntropyControl(actuator="clip_high")), "clip_high"),
        (lambda: Objective(top_entropy_fraction=0.0), "top_entropy_fraction"),
        (lambda: OffPolicyCorrection(), "corrects nothing"),
        (lambda: OffPolicyCorrection(mode="truncate"), "bound"),
        (lambda: OffPolicyCorrection(high=2.0), "mode"),
        (lambda: OffPolicyCorrection(mode="mask", low=2.0, high=1.0), "low"),
        (lambda: EntropyControl(initial=2.0), "initial"),
        (lambda: EntropyControl(rule="own"), "rule"),
        (lambda: AdvantageSettings(gamma=1.5), "gamma"),
    ],
)
def test_contradictions_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


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
    assert Objective(entropy_control=EntropyControl(initial=0.0)).has_entropy_bonus
    assert not Objective(entropy_control=EntropyControl(actuator="clip_high")).has_entropy_bonus
