"""The optimised objective, a product of choices. `Objective()` is GRPO; `PRESETS` name published combinations.

Each choice is a type with arguments and maths in a file of its family; the unions below list them.
"""

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Discriminator, TypeAdapter

from megatron_rl.algorithms.advantage import GroupAdvantage, GroupAdvantages
from megatron_rl.algorithms.aggregation import Aggregation
from megatron_rl.algorithms.choices import Choice, Load, check_fields, doc
from megatron_rl.algorithms.covariance_losses import CovarianceLosses
from megatron_rl.algorithms.entropy import ClipHighControl, Entropy
from megatron_rl.algorithms.kl import KLLoss, KLReward
from megatron_rl.algorithms.off_policy import OffPolicy
from megatron_rl.algorithms.plug_in import PlugInAdvantage, PlugInLoss
from megatron_rl.algorithms.policy_loss import Clip, ClippedLosses
from megatron_rl.algorithms.return_advantage import ReturnAdvantages
from megatron_rl.algorithms.unclipped_losses import UnclippedLosses

PolicyLosses = Annotated[ClippedLosses | CovarianceLosses | UnclippedLosses | PlugInLoss, Discriminator("kind")]
Advantages = Annotated[GroupAdvantages | ReturnAdvantages | PlugInAdvantage, Discriminator("kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Choice):
    """The objective of training: policy loss x aggregation x off-policy correction x KL x entropy x advantage."""

    policy_loss: PolicyLosses = doc("What is minimised per token, or your own as kind plug_in.", Clip())
    aggregation: Aggregation = doc("How per-token losses become one number; the denominators are global.", "sequence_mean_token_mean")
    max_response_length: int | None = doc(
        "The constant L of aggregation sequence_mean_token_sum_norm, in tokens; the response budget when not set.", None, ge=1
    )
    advantage: Advantages = doc("How rewards become advantages, or your own as kind plug_in; gae needs a critic.", GroupAdvantage())
    off_policy: OffPolicy | None = doc("Correction of the generator's mismatch; none when not set.", None)
    proximal: Literal["recomputed", "interpolated", "rollout"] = doc(
        "The policy pi_old of ratios and clips: recomputed before the step; rollout, the one that generated; or interpolated between the "
        "rollout's and the current one by the age of each token, decoupled PPO without a pass of its own (A-3PO).",
        "recomputed",
    )
    kl: KLLoss | None = doc("KL to the reference in the loss; none when not set.", None)
    kl_reward: KLReward | None = doc("KL to the reference in the token rewards; none when not set.", None)
    entropy: Entropy | None = doc("Entropy bonus and control; none when not set.", None)
    distillation_coef: float = doc(
        "Coefficient of on-policy distillation: token advantage - coef x (log pi_old - log pi_teacher), before whitening; needs "
        "model.teacher.",
        0.0,
        ge=0,
    )
    zero_variance: Literal["keep", "mask_kl", "drop", "resample"] = doc(
        "Groups without a signal, because the samples' rewards equal each other (remax: the greedy response's; gdpo: in every component; "
        "pass@k: the best two): keep them, mask their KL, in the loss and in the rewards, drop them, or draw new prompts.",
        "keep",
    )
    top_entropy_fraction: float = doc("Train the policy term on this share of tokens, highest entropy of the step first.", 1.0, gt=0, le=1)

    def __post_init__(self) -> None:
        check_fields(self)
        loss, advantage = self.policy_loss, self.advantage
        if self.max_response_length is not None and self.aggregation != "sequence_mean_token_sum_norm":
            raise ValueError(
                f"Objective.max_response_length is {self.max_response_length} with aggregation {self.aggregation!r}, which does not divide "
                "by it; remove it, or set aggregation to 'sequence_mean_token_sum_norm'"
            )
        if self.kl is not None and self.kl_reward is not None:
            raise ValueError(f"Objective has kl with coef {self.kl.coef} and kl_reward with coef {self.kl_reward.coef}, needs at most one")
        if self.kl_reward is not None and not advantage.takes_kl:
            raise ValueError(
                f"Objective.kl_reward has no effect with advantage {advantage.kind!r}, needs gae, reinforce_plus_plus or "
                "reinforce_plus_plus_baseline; use kl instead"
            )
        self._check_unread()
        if self.proximal != "recomputed":
            self._check_proximal()
        if self.adapts_clip_high and (not isinstance(loss, Clip) or loss.high is None):
            raise ValueError("Objective.entropy.control moves the upper clip, needs policy_loss 'clip' with a high")
        if self.zero_variance == "mask_kl" and self.kl is None and self.kl_reward is None:
            raise ValueError(
                "Objective.zero_variance is 'mask_kl' without a KL, so that it does nothing; set kl, or zero_variance to 'keep'"
            )
        if self.zero_variance in ("drop", "resample"):
            self._check_dropping()
        if self.off_policy is not None and not self.off_policy.keep_rejected_in_denominator and self.aggregation == "token_sum":
            raise ValueError("Objective.off_policy.keep_rejected_in_denominator is false with aggregation 'token_sum', which has none")

    def _check_unread(self) -> None:
        """Refuse what a loss without rewards or advantages does not read."""
        loss = self.policy_loss
        if loss.reads_advantages:
            return
        unread = {
            "advantage": self.advantage != GroupAdvantage(),
            "kl_reward": self.kl_reward is not None,
            "distillation_coef": self.distillation_coef != 0,
            "zero_variance": self.zero_variance != "keep",
        }
        if not loss.trains_by_rewards:
            unread |= {"off_policy": self.off_policy is not None, "kl.unbiased": self.kl is not None and self.kl.unbiased}
        elif self.off_policy is not None and self.off_policy.opsm is not None:
            # The mask goes by the advantages' signs.
            unread = {name: found for name, found in unread.items() if name == "zero_variance"}
        for name in (name for name, found in unread.items() if found):
            raise ValueError(
                f"Objective.{name} has no effect with policy_loss {loss.kind!r}, whose signal does not come from rewards; remove it (or "
                "the preset that brings it), or choose another policy_loss"
            )

    def _check_proximal(self) -> None:
        """Refuse a proximal policy without a reader, and readers of the recomputed one."""
        got, correction = f"Objective.proximal is {self.proximal!r} with", self.off_policy
        weighs = correction is not None and correction.mode != "none"
        if not self.policy_loss.bounds_ratio:
            raise ValueError(
                f"{got} policy_loss {self.policy_loss.kind!r} without a bound of the ratio to it, needs one; set the loss's bounds, choose "
                "a loss that has them, such as clip, or remove proximal"
            )
        if self.proximal == "interpolated" and not weighs:
            raise ValueError(f"{got}out the weights of decoupled PPO; set off_policy, such as {{mode: truncate, high: 5.0}}")
        if self.proximal == "rollout" and correction is not None and (weighs or correction.veto is not None):
            raise ValueError(f"{got} off_policy, whose ratio pi_old / pi_rollout is then 1 throughout; remove one of them")
        for name, reads in (("kl_reward", self.kl_reward is not None), ("distillation_coef", self.distillation_coef != 0)):
            if reads:
                raise ValueError(f"{got} {name}, which reads the recomputed policy; remove {name}, or proximal")

    def _check_dropping(self) -> None:
        """Refuse to drop groups of equal rewards where equal rewards have a signal."""
        if not self.advantage.drops_groups:
            raise ValueError(
                f"Objective.zero_variance is {self.zero_variance!r} with advantage {self.advantage.kind!r}, which does not compare "
                "samples of one prompt with each other, so that groups of equal rewards teach as much as others; set it to 'keep'"
            )
        if self.distillation_coef:
            raise ValueError(
                f"Objective.zero_variance is {self.zero_variance!r} with distillation, whose signal does not come from rewards, so that "
                "groups of equal rewards teach, too; set it to 'keep'"
            )

    @classmethod
    def of(cls, **values: Any) -> "Objective":
        """Return the objective of nested values, as in a settings file, `preset` included. Raises
        ValueError for wrong ones.

        Example: `Objective.of(preset="dapo", policy_loss={"high": 0.3}, kl={"coef": 0.001})`
        """
        return _adapter().validate_python(expand_preset(values))

    def loaded(self, load: Load) -> "Objective":
        """Return the objective with the functions of your own loss and estimator, found by `load` as by `loader.load`."""
        loss = self.policy_loss.loaded(load, self) if isinstance(self.policy_loss, PlugInLoss) else self.policy_loss
        advantage = self.advantage.loaded(load) if isinstance(self.advantage, PlugInAdvantage) else self.advantage
        return dataclasses.replace(self, policy_loss=loss, advantage=advantage)

    @property
    def trains_by_rewards(self) -> bool:
        """Return False for supervised training, without rewards, ratios and rollout log-probs."""
        return self.policy_loss.trains_by_rewards

    @property
    def corrects_staleness(self) -> bool:
        """Return True when samples of older weights are weighed, or kept near the rollout's own log-probs."""
        return self.off_policy is not None or self.proximal == "rollout"

    @property
    def adapts_clip_high(self) -> bool:
        """Return True when a controller sets the upper clip bound."""
        return self.entropy is not None and isinstance(self.entropy.control, ClipHighControl)

    @property
    def needs_entropy_before_step(self) -> bool:
        """Return True for the paper's rule of entropy control, whose gate goes by the entropy of the coming step."""
        return self.entropy is not None and self.entropy.control is not None and self.entropy.control.kind == "paper"

    @property
    def has_critic(self) -> bool:
        """Return True when a critic is trained beside the policy."""
        return self.trains_by_rewards and self.advantage.has_critic

    @property
    def needs_reference(self) -> bool:
        """Return True when the loss, your own too, or the rewards may read the reference policy's log-probs."""
        return self.kl is not None or self.kl_reward is not None or self.policy_loss.needs_reference

    @property
    def needs_step_statistics(self) -> bool:
        """Return True when the loss needs `selection.step_statistics` of the whole step before its first micro-batch."""
        drops = self.off_policy is not None and not self.off_policy.keep_rejected_in_denominator
        return self.policy_loss.needs_statistics or self.top_entropy_fraction < 1 or drops


@functools.cache
def _adapter() -> TypeAdapter[Objective]:
    """Return the adapter, made once: making one takes longer than all else about an objective."""
    return TypeAdapter(Objective)


_GRPO = {"policy_loss": {"kind": "clip"}, "aggregation": "sequence_mean_token_mean", "advantage": {"kind": "group"}}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    # DeepSeekMath, arXiv 2402.03300
    "grpo": _GRPO,
    # Understanding R1-Zero-like training, arXiv 2503.20783
    "dr_grpo": {**_GRPO, "aggregation": "sequence_mean_token_sum_norm", "advantage": {"kind": "group", "scale": "none"}},
    # DAPO, arXiv 2503.14476
    "dapo": {**_GRPO, "policy_loss": {"kind": "clip", "low": 0.2, "high": 0.28}, "aggregation": "token_mean", "zero_variance": "resample"},
    # TRL's name for GRPO over the batch's tokens; with global denominators only the clip range differs from dapo
    "bnpo": {**_GRPO, "aggregation": "token_mean"},
    # GSPO, arXiv 2507.18071
    "gspo": {**_GRPO, "policy_loss": {"kind": "clip", "ratio_level": "sequence", "low": 3e-4, "high": 4e-4}},
    # MiniMax-M1, arXiv 2506.13585: an absolute cap of 5 and no lower clip
    "cispo": {**_GRPO, "policy_loss": {"kind": "cispo"}, "aggregation": "token_mean"},
    # SAPO, arXiv 2511.20347
    "sapo": {**_GRPO, "policy_loss": {"kind": "sapo"}},
    # LUSPO, arXiv 2602.05261
    "luspo": {**_GRPO, "policy_loss": {"kind": "clip", "ratio_level": "sequence"}, "aggregation": "sequence_mean_token_sum"},
    # VESPO, arXiv 2602.10693
    "vespo": {**_GRPO, "policy_loss": {"kind": "vespo"}, "aggregation": "token_mean"},
    # GMPO, arXiv 2507.20673: clip distances are in log space
    "gmpo": {**_GRPO, "policy_loss": {"kind": "gmpo"}},
    # PPO, arXiv 1707.06347, with GAE, arXiv 1506.02438
    "ppo": {**_GRPO, "aggregation": "token_mean", "advantage": {"kind": "gae", "lam": 0.95}},
    # REINFORCE++, arXiv 2501.03262
    "reinforce_plus_plus": {**_GRPO, "aggregation": "token_mean", "advantage": {"kind": "reinforce_plus_plus"}},
    # RLOO, arXiv 2402.14740: the whole response is one action, so the loss is a sum over tokens
    "rloo": {**_GRPO, "aggregation": "sequence_mean_token_sum", "advantage": {"kind": "rloo"}},
})  # fmt: skip


def expand_preset(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Objective` meant by `config`: those of `preset`, grpo when not set, under its own.

    A section of another kind starts from that kind's defaults. Raises ValueError for an unknown
    preset.
    """
    name = config.get("preset")
    name = "grpo" if name is None else name
    if not isinstance(name, str) or name not in PRESETS:
        closest = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"; did you mean {closest[0]!r}?" if closest else ""
        raise ValueError(f"Objective.preset is {name!r}, needs one of {', '.join(PRESETS)}{hint}")
    return _merged(PRESETS[name], {key: value for key, value in config.items() if key != "preset"})


def _merged(base: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested plain values: `base` under `explicit`, both unmodified. A section with another
    `kind` starts from nothing.

    A text stands for a section of the kind of this name, or of a plug-in at this path.
    """
    result = {key: _merged(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in explicit.items():
        below = base.get(key)
        if isinstance(value, str) and isinstance(below, Mapping) and "kind" in below:
            value = {"kind": "plug_in", "path": value} if ":" in value else {"kind": value}
        if isinstance(value, Mapping):
            continues = isinstance(below, Mapping) and value.get("kind", below.get("kind")) == below.get("kind")
            value = _merged(below if isinstance(below, Mapping) and continues else {}, value)
        result[key] = value
    return result
