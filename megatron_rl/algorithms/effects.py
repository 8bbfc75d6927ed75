"""When each setting of the objective is read: one that was changed although nothing reads it deserves a note.

A test walks through the table and compares losses, advantages, gradients and coefficients with the setting changed and unchanged.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from megatron_rl.algorithms.arguments import ScaledArguments
from megatron_rl.algorithms.objective import POLICY_LOSSES, Objective


@dataclass(frozen=True, slots=True)
class Reader:
    """Whether anything of an objective reads a setting, and `what` does, in words."""

    reads: Callable[[Objective], bool]
    what: str


_ALWAYS = Reader(lambda _: True, "every objective")
_REWARDS = Reader(lambda objective: objective.trains_by_rewards, "a policy_loss that trains by rewards")
_ADVANTAGES = Reader(lambda objective: objective.reads_advantages, "a policy_loss that trains by advantages")
_KL_LOSS = Reader(lambda objective: objective.kl_loss_coef > 0, "a kl_loss_coef above 0")
_KL_REWARD = Reader(
    lambda objective: objective.kl_reward_coef > 0 and (objective.reads_advantages or objective.has_critic), "a kl_reward_coef above 0"
)
_SEQUENCE_SUM_NORM = "sequence_mean_token_sum_norm"


def _losses(*names: str) -> Reader:
    """Read by these policy losses, and perhaps by the user's own, which are given the whole objective."""
    return Reader(
        lambda objective: objective.policy_loss in names or objective.policy_loss not in POLICY_LOSSES, f"policy_loss {', '.join(names)}"
    )


def _estimators(*names: str) -> Reader:
    return Reader(
        lambda objective: objective.reads_advantages and objective.advantage.estimator in names, f"advantage.estimator {', '.join(names)}"
    )


def _returns(*names: str) -> Reader:
    """As `_estimators`, for what also makes the returns that a critic learns from."""
    return Reader(
        lambda objective: objective.advantage.estimator in names and (objective.reads_advantages or objective.has_critic),
        f"advantage.estimator {', '.join(names)}",
    )


def _divides_by_spread(objective: Objective) -> bool:
    advantage = objective.advantage
    if not objective.reads_advantages or advantage.estimator not in ("grpo", "pass@k"):
        return objective.reads_advantages and advantage.estimator == "gdpo"
    return advantage.arguments(ScaledArguments).scale != "none"


def _rejects(objective: Objective) -> bool:
    correction = objective.off_policy_correction
    return correction is not None and (correction.mode == "mask" or correction.veto is not None or correction.opsm is not None)


def _has_kl(objective: Objective) -> bool:
    return _KL_LOSS.reads(objective) or _KL_REWARD.reads(objective)


def _masks_or_drops(objective: Objective) -> bool:
    return objective.trains_by_rewards and (_has_kl(objective) or objective.zero_variance != "mask_kl")


_CLIPPING = _losses("clip", "clip_cov", "cispo", "gmpo", "dppo_tv", "dppo_kl")

# Legend: dotted path below objective -> its reader. A section that may be null comes before its fields, which are read only with it.
READERS: Mapping[str, Reader] = MappingProxyType({
    "policy_loss": _ALWAYS,
    "loss_args": _ALWAYS,  # A loss refuses what it does not take.
    "ratio_level": _losses("clip", "clip_cov", "kl_cov", "cispo", "sapo", "dppo_tv", "dppo_kl", "distillation"),
    "aggregation": _ALWAYS,
    "max_response_length": Reader(lambda objective: objective.aggregation == _SEQUENCE_SUM_NORM, f"aggregation {_SEQUENCE_SUM_NORM}"),
    "clip_low": _CLIPPING,
    "clip_high": _CLIPPING,
    "loss_args.ratio_cap": _losses("clip", "clip_cov", "dppo_tv", "dppo_kl"),
    "loss_args.dual_clip": _losses("clip", "clip_cov"),
    "loss_args.tau_positive": _losses("sapo"),
    "loss_args.tau_negative": _losses("sapo"),
    "loss_args.k_positive": _losses("vespo"),
    "loss_args.lambda_positive": _losses("vespo"),
    "loss_args.k_negative": _losses("vespo"),
    "loss_args.lambda_negative": _losses("vespo"),
    "loss_args.fraction": _losses("clip_cov", "kl_cov"),
    "loss_args.low": _losses("clip_cov"),
    "loss_args.high": _losses("clip_cov"),
    "loss_args.coef": _losses("kl_cov"),
    "loss_args.value_clip": _losses("value"),
    "off_policy_correction": _REWARDS,
    "off_policy_correction.mode": _REWARDS,
    "off_policy_correction.level": Reader(
        lambda objective: objective.off_policy_correction is not None and objective.off_policy_correction.mode != "none",
        "off_policy_correction.mode truncate or mask",
    ),
    "off_policy_correction.low": _REWARDS,
    "off_policy_correction.high": _REWARDS,
    "off_policy_correction.veto": _REWARDS,
    "off_policy_correction.opsm": _REWARDS,
    "off_policy_correction.keep_rejected_in_denominator": Reader(
        lambda objective: _rejects(objective) and objective.aggregation != "token_sum",
        "a correction that rejects tokens (mode mask, veto or opsm) and an aggregation that divides",
    ),
    "kl_loss_coef": _ALWAYS,
    "kl_estimator": _KL_LOSS,
    "kl_unbiased": Reader(lambda objective: _KL_LOSS.reads(objective) and objective.trains_by_rewards, _KL_LOSS.what),
    "kl_reward_coef": _returns("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    "kl_reward_estimator": _KL_REWARD,
    "distillation_coef": _ADVANTAGES,
    "kl_control": Reader(_has_kl, "a KL coefficient above 0"),
    "kl_control.target": _ALWAYS,
    "kl_control.horizon": _ALWAYS,
    "advantage.estimator": Reader(lambda objective: objective.reads_advantages or objective.has_critic, _ADVANTAGES.what),
    "advantage.args": Reader(lambda objective: objective.reads_advantages or objective.has_critic, _ADVANTAGES.what),
    "advantage.args.scale": _estimators("grpo", "pass@k"),
    "advantage.args.std_epsilon": Reader(_divides_by_spread, "advantage.estimator gdpo, or grpo and pass@k with a scale"),
    "advantage.args.gamma": _returns("ppo", "reinforce_plus_plus"),
    "advantage.args.lam": _returns("ppo"),
    "advantage.args.whiten": _estimators("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"),
    "advantage.args.bootstrap_truncated": _returns("ppo"),
    "advantage.args.reward_weights": _estimators("gdpo"),
    "advantage.args.value_clip": _returns("ppo"),
    "zero_variance": Reader(_masks_or_drops, "a policy_loss that trains by rewards (mask_kl: with a KL coefficient above 0)"),
    "entropy_coef": _ALWAYS,
    "entropy_mode": Reader(lambda objective: objective.has_entropy_bonus, "an entropy bonus"),
    "entropy_control": _ALWAYS,
    "entropy_control.rule": _ALWAYS,
    "entropy_control.target": _ALWAYS,
    "entropy_control.args": _ALWAYS,
    "entropy_control.args.delta": _ALWAYS,
    "entropy_control.args.min": _ALWAYS,
    "entropy_control.args.max": _ALWAYS,
    "entropy_control.args.initial": _ALWAYS,
    "top_entropy_fraction": _ALWAYS,
})  # fmt: skip


def is_read(path: str, objective: Objective) -> bool:
    """Whether anything reads the setting at the dotted `path`. Raises KeyError for a path that the table lacks."""
    parent = path.rpartition(".")[0]
    return READERS[path].reads(objective) and (parent not in READERS or READERS[parent].reads(objective))


def unread_settings(objective: Objective) -> list[str]:
    """One sentence for each setting that is not at its default although nothing reads it under the others."""
    return [
        f"objective.{path}{'' if is_dataclass(value) else f' {value}'} has no effect: only {READERS[path].what} reads it"
        for path, value in _changed(objective, objective, "")
        if not is_read(path, objective)
    ]


def _changed(objective: Objective, section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted path and value of what is not at its default; a section that is not read stands for all of its fields."""
    for item in fields(section):
        path, value = f"{prefix}{item.name}", getattr(section, item.name)
        owners: Mapping[str, type] = item.metadata.get("owners", {})
        owner = owners.get(getattr(section, item.metadata["named_by"])) if owners else None
        if is_dataclass(value) and (path not in READERS or is_read(path, objective)):
            yield from _changed(objective, value, f"{path}.")
        elif owner is not None:
            defaults = {argument.name: argument.default for argument in fields(owner)}
            yield from ((f"{path}.{name}", given) for name, given in value.items() if given != defaults[name])
        elif value != (item.default if item.default_factory is MISSING else item.default_factory()):
            yield path, value
