"""What is optimised, as orthogonal choices. `Objective()` is GRPO; `presets.py` names other published combinations.

The classes are plain dataclasses so that this room imports nothing but torch; the configuration room validates them as
settings, with the `metadata` of each field as its description and its bounds.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args

from megatron_rl.algorithms.arguments import (
    CONTROL_ARGUMENTS,
    ESTIMATOR_ARGUMENTS,
    LOSS_ARGUMENTS,
    Arguments,
    ControlArguments,
    WhitenedArguments,
    check_fields,
    chosen_arguments,
    doc,
)

PolicyLoss = Literal[
    "clip", "cispo", "sapo", "vespo", "gmpo", "gpg", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "distillation", "sft", "value"
]
RatioLevel = Literal["token", "sequence"]
Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm", "token_sum"]
KLEstimator = Literal["k1", "k2", "k3", "low_variance"]
Estimator = Literal[
    "grpo", "dr_grpo", "rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gdpo", "pass@k"
]
EntropyRule = Literal["trl", "skywork", "paper", "clip_high"]

POLICY_LOSSES: tuple[str, ...] = get_args(PolicyLoss)
ESTIMATORS: tuple[str, ...] = get_args(Estimator)
WITHOUT_GROUPS = ("ppo", "reinforce_plus_plus")
"""Estimators that compare a sample with the whole batch or a critic, so that a group of equal rewards teaches as much as any other."""

_Chosen = TypeVar("_Chosen", bound=Arguments)
_CLIPS_RATIOS = ("clip", "clip_cov", "cispo")
_NO_POLICY_GRADIENT = ("sft", "value")
_COVARIANCE_LOSSES = ("clip_cov", "kl_cov")


def _section(description: str, factory: Any) -> Any:
    return field(default_factory=factory, metadata={"description": description})


def _args(description: str, owners: Mapping[str, type[Arguments]], *, named_by: str) -> Any:
    """The field of the arguments of what the field `named_by` chooses of `owners`; left out of the hash, because a mapping has none."""
    return field(default_factory=dict, hash=False, metadata={"description": description, "owners": owners, "named_by": named_by})


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyCorrection:
    """How the gap between the policy that generated and the proximal policy is corrected: w = pi_old / pi_rollout.

    `truncate` is TIS (Yao et al. 2025), `mask` IcePop / MIS, `veto` and `opsm` drop whole sequences (OPSM: DeepSeek-V3.2).
    Only the policy term is weighted, never KL or entropy.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    mode: Literal["none", "truncate", "mask"] = doc(
        "none leaves the weights at 1; truncate clamps w to [low, high]; mask zeroes w outside.", "none"
    )
    level: Literal["token", "sequence", "geometric"] = doc("Ratio per token, product over the sequence, or its geometric mean.", "token")
    low: float | None = doc("Lower bound of w; no bound when not set.", None, ge=0)
    high: float | None = doc("Upper bound of w; no bound when not set.", None, gt=0)
    veto: float | None = doc("Drop a sequence when any of its tokens has a ratio below this.", None, gt=0, lt=1)
    opsm: float | None = doc(
        "Off-policy sequence mask: drop tokens with negative advantage in sequences whose mean log(pi_rollout / pi) exceeds this.", None
    )
    keep_rejected_in_denominator: bool = doc("Whether rejected tokens still count in the denominators of the policy term.", True)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mode == "none" and (self.low is not None or self.high is not None):
            raise ValueError("OffPolicyCorrection has bounds but mode 'none', needs mode 'truncate' or 'mask'")
        if self.mode == "none" and self.veto is None and self.opsm is None:
            raise ValueError(
                "OffPolicyCorrection corrects nothing, needs a mode, a veto or an opsm threshold; leave it out to switch it off"
            )
        if self.mode != "none" and self.low is None and self.high is None:
            raise ValueError(f"OffPolicyCorrection with mode {self.mode!r} has no bound, needs low or high")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"OffPolicyCorrection.low {self.low} is above high {self.high}, needs low <= high")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """How rewards become advantages."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    estimator: str = doc(
        f"Baseline and scaling of the reward, one of {', '.join(ESTIMATORS)}, or your own as package.module:function; ppo needs a critic.",
        "grpo",
    )
    args: Mapping[str, Any] = _args(
        "Arguments of the estimator, those below or your own estimator's, by their names.", ESTIMATOR_ARGUMENTS, named_by="estimator"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.is_own and self.estimator not in ESTIMATORS:
            close = difflib.get_close_matches(self.estimator, ESTIMATORS, n=1)
            raise ValueError(
                f"AdvantageSettings.estimator is {self.estimator!r}, needs one of {', '.join(ESTIMATORS)} or package.module:function"
                f"{f'; did you mean {close[0]}?' if close else ''}"
            )
        if not self.is_own:
            self.arguments(Arguments)

    def arguments(self, kind: type[_Chosen]) -> _Chosen:
        """The arguments of one of our estimators, as `kind` or what refines it."""
        return chosen_arguments(kind, ESTIMATOR_ARGUMENTS, self.estimator, self.args, setting="objective.advantage.args")

    def without_whitening(self) -> "AdvantageSettings":
        """The same estimator without the whitening that some end with."""
        whitens = not self.is_own and issubclass(ESTIMATOR_ARGUMENTS[self.estimator], WhitenedArguments)
        return replace(self, args={**self.args, "whiten": False}) if whitens else self

    @property
    def is_own(self) -> bool:
        """True when the estimator is the user's own."""
        return ":" in self.estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyControl:
    """A controller that steers the policy's entropy (nats per token), once per optimizer step.

    Rules trl, skywork and paper move the coefficient of the entropy bonus (Skywork-OR1, arXiv 2505.22312, section 3.2.5, as TRL, its
    code and its paper have it; they differ in lag and ties); clip_high integrates on the upper clip distance.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    rule: EntropyRule = doc("What is moved, and how: trl, skywork and paper move the coefficient of the bonus, clip_high the clip.", "trl")
    target: float = doc("Entropy to hold, in nats per token; choose it relative to the run's initial entropy.", 0.2, ge=0)
    args: Mapping[str, Any] = _args("Arguments of the rule, by their names.", CONTROL_ARGUMENTS, named_by="rule")

    def __post_init__(self) -> None:
        check_fields(self)
        self.arguments()

    def arguments(self) -> ControlArguments:
        """The arguments of the rule."""
        return chosen_arguments(ControlArguments, CONTROL_ARGUMENTS, self.rule, self.args, setting="objective.entropy_control.args")


@dataclass(frozen=True, slots=True, kw_only=True)
class KLControl:
    """Adaptive KL coefficient (Ziegler et al. 2019, section 2.2). The initial value is the objective's own coefficient."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    target: float = doc("KL to hold: mean over sequences of the mean per token, in nats.", 6.0, gt=0)
    horizon: float = doc("Sequences over which a full correction acts.", 10000.0, gt=0)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective of training: policy loss x ratio level x aggregation x off-policy correction x KL x entropy x advantage."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    policy_loss: str = doc(f"One of {', '.join(POLICY_LOSSES)}, or your own as package.module:function.", "clip")
    loss_args: Mapping[str, Any] = _args(
        "Arguments of the policy loss, those below or your own loss's, by their names.", LOSS_ARGUMENTS, named_by="policy_loss"
    )
    ratio_level: RatioLevel = doc(
        "Importance ratio per token, or its geometric mean over the sequence (GSPO); gmpo and vespo form their own.", "token"
    )
    aggregation: Aggregation = doc("How per-token losses become one number; the denominators are global.", "sequence_mean_token_mean")
    max_response_length: int | None = doc(
        "The constant L of sequence_mean_token_sum_norm, in tokens; the response budget when not set.", None, ge=1
    )
    clip_low: float | None = doc("Lower clip distance: ratios are clipped at 1 - clip_low; no lower clip when not set.", 0.2, ge=0)
    clip_high: float | None = doc("Upper clip distance: ratios are clipped at 1 + clip_high; no upper clip when not set.", 0.2, ge=0)
    off_policy_correction: OffPolicyCorrection | None = doc("Correction of the generator's mismatch; none when not set.", None)
    kl_loss_coef: float = doc("Coefficient of the KL to the reference in the loss.", 0.0, ge=0)
    kl_estimator: KLEstimator = doc("Estimator of the KL in the loss.", "k3")
    kl_unbiased: bool = doc("Multiply the KL in the loss by the differentiable ratio, which makes its gradient unbiased.", False)
    kl_reward_coef: float = doc("Coefficient of the KL to the reference in the token rewards.", 0.0, ge=0)
    kl_reward_estimator: KLEstimator = doc("Estimator of the KL in the token rewards.", "k1")
    distillation_coef: float = doc(
        "Coefficient of on-policy distillation: token advantage - coef x (log pi_old - log pi_teacher), before whitening; needs "
        "model.teacher.",
        0.0,
        ge=0,
    )
    kl_control: KLControl | None = doc("Adapt the KL coefficient; fixed when not set.", None)
    advantage: AdvantageSettings = _section("How rewards become advantages.", AdvantageSettings)
    zero_variance: Literal["keep", "mask_kl", "drop", "resample"] = doc(
        "Groups without a signal, because the samples' rewards equal each other (remax: the greedy response's; gdpo: in every component; "
        "pass@k: the best two): keep them, mask their KL, in the loss and in the rewards, drop them, or draw new prompts.",
        "keep",
    )
    entropy_coef: float = doc("Coefficient of the entropy bonus: coef x mean entropy per token, in nats.", 0.0)
    entropy_mode: Literal["absolute", "matched"] = doc(
        "absolute: the bonus is a token mean for every aggregation; matched: it goes through the policy's aggregation.", "absolute"
    )
    entropy_control: EntropyControl | None = doc("Steer the entropy; off when not set.", None)
    top_entropy_fraction: float = doc("Train the policy term on this share of tokens, highest entropy of the step first.", 1.0, gt=0, le=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.policy_loss not in POLICY_LOSSES and ":" not in self.policy_loss:
            close = difflib.get_close_matches(self.policy_loss, POLICY_LOSSES, n=1)
            raise ValueError(
                f"Objective.policy_loss is {self.policy_loss!r}, needs one of {', '.join(POLICY_LOSSES)} or package.module:function"
                f"{f'; did you mean {close[0]}?' if close else ''}"
            )
        if self.policy_loss in POLICY_LOSSES:
            self.arguments(Arguments)
        if self.policy_loss in _CLIPS_RATIOS and self.clip_low is not None and self.clip_low > 1:
            raise ValueError(
                f"Objective.clip_low is {self.clip_low}, so that ratios would be clipped at {1 - self.clip_low:g}, and no ratio is "
                "negative, needs a distance of at most 1; set it to null for no lower clip"
            )
        self._check_controls()
        self._check_dropping()

    def arguments(self, kind: type[_Chosen]) -> _Chosen:
        """The arguments of one of our policy losses, as `kind` or what refines it."""
        return chosen_arguments(kind, LOSS_ARGUMENTS, self.policy_loss, self.loss_args, setting="objective.loss_args")

    def _check_dropping(self) -> None:
        """Refuse to drop groups of equal rewards where these have a signal."""
        if self.zero_variance not in ("drop", "resample") or not self.trains_by_rewards:
            return
        if self.advantage.estimator in WITHOUT_GROUPS:
            raise ValueError(
                f"Objective.zero_variance is {self.zero_variance!r} with estimator {self.advantage.estimator!r}, which does not compare "
                "samples of one prompt with each other, so that groups of equal rewards teach as much as others; set it to 'keep'"
            )
        if self.distillation_coef or self.policy_loss == "distillation":
            raise ValueError(
                f"Objective.zero_variance is {self.zero_variance!r} with distillation, whose signal does not come from rewards, so that "
                "groups of equal rewards teach, too; set it to 'keep'"
            )

    def _check_controls(self) -> None:
        if self.kl_loss_coef and self.kl_reward_coef:
            raise ValueError(
                f"Objective has kl_loss_coef {self.kl_loss_coef} and kl_reward_coef {self.kl_reward_coef}, needs at most one above 0"
            )
        if self.distillation_coef and not self.trains_by_rewards:
            raise ValueError(
                f"Objective.distillation_coef has no effect with policy_loss {self.policy_loss!r}, which has no advantages; remove it, or "
                "choose a policy loss that samples"
            )
        if self.kl_control is not None and not (self.kl_loss_coef or self.kl_reward_coef):
            raise ValueError("Objective.kl_control is set while both KL coefficients are 0, needs one above 0 to start from")
        if self.kl_reward_coef and self.advantage.estimator not in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
            raise ValueError(
                f"Objective.kl_reward_coef has no effect with estimator {self.advantage.estimator!r}, needs ppo, reinforce_plus_plus or "
                "reinforce_plus_plus_baseline; use kl_loss_coef instead"
            )
        if self.adapts_entropy_coef and self.entropy_coef:
            raise ValueError(
                f"Objective has entropy_coef {self.entropy_coef} and an adaptive coefficient, needs one of them; "
                "set entropy_control.args.initial instead"
            )
        if self.adapts_clip_high and (self.policy_loss != "clip" or self.clip_high is None):
            raise ValueError("Objective.entropy_control moves clip_high, needs policy_loss 'clip' with a clip_high")

    @property
    def adapts_entropy_coef(self) -> bool:
        """True when a controller sets the entropy coefficient."""
        return self.entropy_control is not None and self.entropy_control.rule != "clip_high"

    @property
    def adapts_kl_loss_coef(self) -> bool:
        """True when a controller sets the coefficient of the KL in the loss."""
        return self.kl_control is not None and self.kl_loss_coef != 0

    @property
    def adapts_clip_high(self) -> bool:
        """True when a controller sets the upper clip bound."""
        return self.entropy_control is not None and self.entropy_control.rule == "clip_high"

    @property
    def needs_entropy_before_step(self) -> bool:
        """True for the paper's rule of entropy control, whose gate has no lag: it goes by the entropy of the coming step."""
        return self.entropy_control is not None and self.entropy_control.rule == "paper"

    @property
    def has_entropy_bonus(self) -> bool:
        """True when the loss has an entropy term; never depends on a controller's current value, or it could not leave 0."""
        return self.entropy_coef != 0 or self.adapts_entropy_coef

    @property
    def has_critic(self) -> bool:
        """True when a critic is trained beside the policy."""
        return self.trains_by_rewards and self.advantage.estimator == "ppo"

    @property
    def reads_advantages(self) -> bool:
        """False where nothing of the loss depends on advantages; of your own policy loss that cannot be known."""
        masks = self.off_policy_correction is not None and self.off_policy_correction.opsm is not None
        return self.trains_by_rewards and (self.policy_loss != "distillation" or masks)

    @property
    def needs_reference(self) -> bool:
        """True when a term of the loss or of the rewards reads the reference policy's log-probs; your own policy loss may."""
        in_policy_loss = self.policy_loss == "distillation" or self.policy_loss not in POLICY_LOSSES
        return bool(self.kl_loss_coef) or in_policy_loss or (bool(self.kl_reward_coef) and self.reads_advantages)

    @property
    def needs_step_statistics(self) -> bool:
        """True when the loss needs `loss.step_statistics` of the whole optimizer step before its first micro-batch."""
        correction = self.off_policy_correction
        drops = correction is not None and not correction.keep_rejected_in_denominator
        return self.policy_loss in _COVARIANCE_LOSSES or self.top_entropy_fraction < 1 or drops

    @property
    def trains_by_rewards(self) -> bool:
        """False for sft and value, which need no rewards, no ratios and no rollout log-probs."""
        return self.policy_loss not in _NO_POLICY_GRADIENT
