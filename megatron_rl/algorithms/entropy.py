"""The policy's entropy in the objective: a bonus, and controllers of coefficient or upper clip.

Controllers are pure functions from state to state, called once per optimizer step with its global
mean entropy per token, in nats, never by an evaluation; all micro-batches of a step use the same
value.

The coefficient moves by +-delta within [min, max] and is applied only while the entropy is low
(Skywork-OR1, arXiv 2505.22312, section 3.2.5). TRL, the Skywork code and the paper differ in lag
and ties. `trl`: applies when the last step's entropy <= target, rises at equality, closed before
the first step. `skywork`: applies when the last < target, falls at equality, open before the first
step. `paper`: applies when the coming step's own entropy <= target, stays at equality. `clip_high`
integrates on the upper clip distance: k <- clip(k + delta sign(target - entropy), min, max), and
ratios are clipped at 1 + high + k (MAI-Thinking-1, with bound (1 - 0.6)^-1 + k, delta 0.25, max 2.5
and target 0.3).
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Discriminator

from megatron_rl.algorithms.choices import Choice, check_fields, doc


@dataclass(frozen=True, slots=True, kw_only=True)
class _Control(Choice):
    """Speed and range of a controller's value, moved once per optimizer step."""

    kind: str
    target: float = doc("Entropy to hold, in nats per token; choose it relative to the run's initial entropy.", 0.2, ge=0)
    delta: float = doc("Change per optimizer step.", 0.005, gt=0)
    min: float = doc("Smallest value.", 0.0, ge=0)
    max: float = doc("Largest value.", 1.0, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientControl(_Control):
    """Move the coefficient of the bonus, from the bonus's own, by one of three published rules."""

    kind: Literal["trl", "skywork", "paper"] = "trl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipHighControl(_Control):
    """Move the upper clip distance of policy_loss clip."""

    kind: Literal["clip_high"] = "clip_high"
    initial: float = doc("Growth of the distance before the first step.", 0.0, ge=0)

    def __post_init__(self) -> None:
        check_fields(self)
        _check_range("ClipHighControl.initial", self.initial, self)


def _check_range(name: str, value: float, control: _Control) -> None:
    if not control.min <= value <= control.max:
        raise ValueError(f"{name} {value} is outside [{control.min}, {control.max}], needs control.min <= it <= control.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entropy(Choice):
    """The entropy bonus coef x mean entropy per token, and a controller of the entropy."""

    coef: float = doc("Coefficient of the bonus, per nat; where control moves it, that before the first step.", 0.0)
    mode: Literal["absolute", "matched"] = doc(
        "absolute: the bonus is a token mean for every aggregation; matched: it goes through the policy's aggregation.", "absolute"
    )
    control: Annotated[CoefficientControl | ClipHighControl, Discriminator("kind")] | None = doc(
        "Steer the entropy; off when not set.", None
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.control, CoefficientControl):
            _check_range("Entropy.coef", self.coef, self.control)
        elif not self.coef:
            if self.control is None:
                raise ValueError("Entropy.coef is 0 without a control, so that it does nothing, needs one of them; null switches it off")
            if self.mode != "absolute":
                raise ValueError(f"Entropy.mode is {self.mode!r} without a bonus; set coef, or remove mode")

    @property
    def has_bonus(self) -> bool:
        """Return True when the loss has an entropy term, whatever a controller's present coefficient is."""
        return self.coef != 0 or isinstance(self.control, CoefficientControl)


@dataclass(frozen=True, slots=True)
class EntropyState:
    """The state of a `kind` of controller between two steps: `value`, and last entropy, None before the first step."""

    kind: str
    value: float
    last_entropy: float | None = None

    @classmethod
    def first(cls, entropy: Entropy | None) -> "EntropyState | None":
        """Return the state before the first step; None without a controller."""
        if entropy is None or entropy.control is None:
            return None
        control = entropy.control
        return cls(control.kind, control.initial if isinstance(control, ClipHighControl) else entropy.coef)

    def applied(self, control: CoefficientControl | ClipHighControl, entropy: float | None = None) -> float:
        """Return the coming coefficient (0 behind a closed gate) or clip growth. ValueError for paper without entropy."""
        last, target = self.last_entropy, control.target
        if control.kind == "paper" and entropy is None:
            raise ValueError("CoefficientControl paper got no entropy of the coming step, needs it from the pass before the step")
        is_open = {
            "trl": last is not None and last <= target,
            "skywork": last is None or last < target,
            "paper": entropy is not None and entropy <= target,
            "clip_high": True,
        }
        return self.value if is_open[control.kind] else 0.0

    def updated(self, control: CoefficientControl | ClipHighControl, entropy: float) -> "EntropyState":
        """Return the state after a step of this mean entropy, nats per token. Raises ValueError when it is not finite."""
        if not math.isfinite(entropy):
            raise ValueError(f"EntropyState.updated got entropy {entropy}, needs a finite number of nats per token; skip such a step")
        if entropy == control.target:
            sign = {"trl": 1.0, "skywork": -1.0, "paper": 0.0, "clip_high": 0.0}[control.kind]
        else:
            sign = math.copysign(1.0, control.target - entropy)
        return EntropyState(control.kind, min(max(self.value + sign * control.delta, control.min), control.max), entropy)
