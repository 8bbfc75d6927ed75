"""Settings that belong to one policy loss, one estimator or one rule of entropy control alone: the arguments beside its name.

`objective: {policy_loss: sapo, loss_args: {tau_positive: 2.0}}` gives `SapoArguments(tau_positive=2.0)`. An argument of the same name
has the same meaning wherever it appears. They are read as the arguments of a plug-in are: by name and type, then by their bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin

from megatron_rl.typed_arguments import read_arguments

_LARGEST = 2**31 - 1
"""Squares and products of such numbers are still finite in float32. Neither infinities nor NaN are below it."""

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def doc(description: str, default: Any, **bounds: float) -> Any:
    """A dataclass field with its help text and numeric bounds (ge, gt, le, lt)."""
    return field(default=default, metadata={"description": description, **bounds})


def check_fields(owner: Any) -> None:
    """Refuse a value outside its Literal or its bounds, also where no settings library stands in front."""
    name = type(owner).__name__
    for item in fields(owner):
        value = getattr(owner, item.name)
        if get_origin(item.type) is Literal and value not in get_args(item.type):
            raise ValueError(f"{name}.{item.name} is {value!r}, needs one of {', '.join(get_args(item.type))}")
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(abs(number) <= _LARGEST for number in numbers if isinstance(number, (int, float))):
            raise ValueError(f"{name}.{item.name} is {value}, needs finite numbers of at most {_LARGEST}; null leaves a bound out")
        if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        limits = item.metadata
        inside = (
            value >= limits.get("ge", value) and value <= limits.get("le", value)
            and ("gt" not in limits or value > limits["gt"]) and ("lt" not in limits or value < limits["lt"])
        )  # fmt: skip
        if not inside:
            bounds = ", ".join(f"{_SIGNS[key]} {limit}" for key, limit in limits.items() if key in _SIGNS)
            raise ValueError(f"{name}.{item.name} is {value}, needs a number {bounds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """No arguments, and the base of those that there are; bounds are checked at construction."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedArguments(Arguments):
    """Of dppo_tv and dppo_kl, and of every loss with a cap of the ratio."""

    ratio_cap: float | None = doc(
        "Cap of the ratio in the unclipped branch (delta); for dppo the cap of the weight, 20 when not set.", None, gt=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipArguments(CappedArguments):
    """Of clip."""

    dual_clip: float | None = doc("Bound c of the loss at negative advantages: at most -c A (dual-clip PPO).", None, gt=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoArguments(Arguments):
    """Of sapo."""

    tau_positive: float = doc("Gate temperature of sapo at positive advantages.", 1.0, gt=0)
    tau_negative: float = doc("Gate temperature of sapo at other advantages.", 1.05, gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class VespoArguments(Arguments):
    """Of vespo."""

    k_positive: float = doc("Exponent of the sequence weight in vespo, advantages >= 0.", 2.0, ge=0)
    lambda_positive: float = doc("Decay of the sequence weight in vespo, advantages >= 0.", 3.0, ge=0)
    k_negative: float = doc("Exponent of the sequence weight in vespo, advantages < 0.", 3.0, ge=0)
    lambda_negative: float = doc("Decay of the sequence weight in vespo, advantages < 0.", 2.0, ge=0)


def _fraction() -> Any:
    return doc("Share of the step's tokens that clip_cov detaches and kl_cov penalises (at least one).", 2e-4, ge=0, le=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovArguments(ClipArguments):
    """Of clip_cov."""

    fraction: float = _fraction()
    low: float = doc("Lower covariance bound of clip_cov's candidates.", 1.0)
    high: float = doc("Upper covariance bound of clip_cov's candidates.", 5.0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.low >= self.high:
            raise ValueError(f"ClipCovArguments.low {self.low} is not below high {self.high}, so that no token lies between")


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCovArguments(Arguments):
    """Of kl_cov, which takes the tokens of largest covariance."""

    fraction: float = _fraction()
    coef: float = doc("Coefficient of kl_cov's penalty |log ratio|.", 1.0, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueArguments(Arguments):
    """Of value, a critic's loss."""

    value_clip: float | None = doc("Largest move of a value prediction within one batch; no clip when not set.", 0.2, gt=0)


LOSS_ARGUMENTS: Mapping[str, type[Arguments]] = MappingProxyType({
    "clip": ClipArguments, "cispo": Arguments, "sapo": SapoArguments, "vespo": VespoArguments, "gmpo": Arguments, "gpg": Arguments,
    "dppo_tv": CappedArguments, "dppo_kl": CappedArguments, "clip_cov": ClipCovArguments, "kl_cov": KlCovArguments,
    "distillation": Arguments, "sft": Arguments, "value": ValueArguments,
})  # fmt: skip


def _std_epsilon() -> Any:
    return doc("Added to a standard deviation that divides.", 1e-6, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledArguments(Arguments):
    """Of estimators that divide by a standard deviation."""

    scale: Literal["group", "batch", "none"] = doc("Standard deviation that is divided by: of the group, of the batch, or none.", "group")
    std_epsilon: float = _std_epsilon()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhitenedArguments(Arguments):
    """Of estimators that end with whitening."""

    whiten: bool = doc("Whiten advantages over the whole batch.", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscountedArguments(WhitenedArguments):
    """Of estimators that discount later rewards."""

    gamma: float = doc("Discount per trainable token.", 1.0, ge=0, le=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOArguments(DiscountedArguments):
    """Of ppo, and of the critic that it trains."""

    lam: float = doc("GAE lambda.", 1.0, ge=0, le=1)
    bootstrap_truncated: bool = doc("Give a truncated response the value of its last state instead of zero.", False)
    value_clip: float | None = doc("Largest move of a value prediction within one batch; no clip when not set.", 0.2, gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GDPOArguments(WhitenedArguments):
    """Of gdpo."""

    std_epsilon: float = _std_epsilon()
    reward_weights: tuple[float, ...] | None = doc("Weights of the reward components; all 1 when not set.", None)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reward_weights is not None and not any(self.reward_weights):
            raise ValueError(f"GDPOArguments.reward_weights is {list(self.reward_weights)}, needs one other than 0")


ESTIMATOR_ARGUMENTS: Mapping[str, type[Arguments]] = MappingProxyType({
    "grpo": ScaledArguments, "dr_grpo": Arguments, "rloo": Arguments, "ppo": PPOArguments, "reinforce_plus_plus": DiscountedArguments,
    "reinforce_plus_plus_baseline": WhitenedArguments, "remax": Arguments, "opo": Arguments, "gdpo": GDPOArguments,
    "pass@k": ScaledArguments,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlArguments(Arguments):
    """Of every rule of entropy control: how fast and how far it moves what it moves."""

    delta: float = doc("Change per optimizer step.", 0.005, gt=0)
    min: float = doc("Smallest value.", 0.0, ge=0)
    max: float = doc("Largest value.", 1.0, ge=0)
    initial: float = doc("Value before the first step.", 0.0, ge=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.min <= self.initial <= self.max:
            raise ValueError(f"ControlArguments.initial {self.initial} is outside [{self.min}, {self.max}], needs min <= initial <= max")


CONTROL_ARGUMENTS: Mapping[str, type[Arguments]] = MappingProxyType(
    dict.fromkeys(("trl", "skywork", "paper", "clip_high"), ControlArguments)
)

_Chosen = TypeVar("_Chosen", bound=Arguments)


def chosen_arguments(
    kind: type[_Chosen], owners: Mapping[str, type[Arguments]], owner: str, args: Mapping[str, Any], *, setting: str
) -> _Chosen:
    """The arguments of `owner`, one of `owners`, as a record of its class, which is `kind` or refines it; `setting` names `args` in errors.

    Raises UserError for an argument that `owner` does not have, of another type or outside of its bounds.
    """
    found = read_arguments(owners[owner], args, owner=owner, setting=setting)
    assert isinstance(found, kind), f"{owner} has {type(found).__name__}, not {kind.__name__}"
    return found
