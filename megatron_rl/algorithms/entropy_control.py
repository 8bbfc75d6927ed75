"""Controllers that hold the policy's entropy: of the bonus coefficient by three published rules, and of the upper clip bound.

Both are steered once per optimizer step by the global mean entropy per token of that step, in nats; all micro-batches of a
step use the same value; evaluation never calls them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from megatron_rl.algorithms.objective import EntropyControl, Objective

State = dict[str, float | None]


class EntropyController(Protocol):
    """What a training step needs of a controller."""

    @property
    def needs_current_entropy(self) -> bool:
        """Whether `applied` needs the entropy of the coming step, known from a pass before it."""
        ...

    def applied(self, entropy: float | None = None) -> float:
        """The value of the coming step. `entropy`, nats per token, is that of the policy before the step."""
        ...

    def update(self, entropy: float) -> None:
        """Take in the finished step's global mean entropy, nats per token."""
        ...

    def state(self) -> State:
        """Everything a checkpoint must hold, as JSON-safe numbers."""
        ...

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Continue from `state`."""
        ...


def _finite(entropy: float) -> float:
    if not math.isfinite(entropy):
        raise ValueError(
            f"EntropyController got entropy {entropy}, needs a finite number of nats per token; skip the update of such a step"
        )
    return entropy


class CoefficientController:
    """Moves the entropy coefficient by +-delta within [min, max]; applies it only while the entropy is low.

    Rules (Skywork-OR1, arXiv 2505.22312, section 3.2.5). `trl`: applies when the last step's entropy <= target, rises at
    equality, closed before the first step. `skywork`: applies when the last < target, falls at equality, open before the first
    step. `paper`: applies when the coming step's own entropy <= target, stays at equality.
    """

    def __init__(self, settings: EntropyControl) -> None:
        self._settings = settings
        self._coefficient = settings.initial
        self._last_entropy: float | None = None

    @property
    def needs_current_entropy(self) -> bool:
        """True for the paper's rule, whose gate has no lag."""
        return self._settings.rule == "paper"

    @property
    def coefficient(self) -> float:
        """The coefficient behind the gate."""
        return self._coefficient

    def applied(self, entropy: float | None = None) -> float:
        """The coefficient of the coming step. Raises ValueError when the paper's rule gets no `entropy`."""
        return self._coefficient if self._gate_is_open(entropy) else 0.0

    def _gate_is_open(self, entropy: float | None) -> bool:
        target, last = self._settings.target, self._last_entropy
        if self._settings.rule == "trl":
            return last is not None and last <= target
        if self._settings.rule == "skywork":
            return last is None or last < target
        if entropy is None:
            raise ValueError("EntropyControl.rule paper got no entropy of the coming step, needs it from the pass before the step")
        return entropy <= target

    def update(self, entropy: float) -> None:
        """Move the coefficient by the entropy of the finished step. Raises ValueError when it is not finite."""
        settings = self._settings
        self._last_entropy = _finite(entropy)
        rises = entropy <= settings.target if settings.rule == "trl" else entropy < settings.target
        stays = settings.rule == "paper" and entropy == settings.target
        step = 0.0 if stays else settings.delta if rises else -settings.delta
        self._coefficient = min(max(self._coefficient + step, settings.min), settings.max)

    def state(self) -> State:
        """`coefficient` and `last_entropy`, None before the first step."""
        return {"coefficient": self._coefficient, "last_entropy": self._last_entropy}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Continue from `state`. Raises ValueError when it is not one of this controller's."""
        coefficient = _entry(state, "coefficient")
        if coefficient is None:
            raise ValueError("EntropyController.restore got no coefficient, needs a number")
        self._coefficient = coefficient
        self._last_entropy = _entry(state, "last_entropy")


class ClipHighController:
    """Integrates on the upper clip distance: k <- clip(k + delta sign(target - entropy), min, max); the bound is 1 + clip_high + k.

    From MAI-Thinking-1, which has (1 - 0.6)^-1 + k as bound, delta 0.25, max 2.5 and target 0.3.
    """

    def __init__(self, settings: EntropyControl, *, clip_high: float) -> None:
        self._settings = settings
        self._clip_high = clip_high
        self._widening = settings.initial

    @property
    def needs_current_entropy(self) -> bool:
        """False: the integral lags by one step."""
        return False

    def applied(self, entropy: float | None = None) -> float:
        """The clip_high of the coming step."""
        return self._clip_high + self._widening

    def update(self, entropy: float) -> None:
        """Widen when the entropy of the finished step is below the target, narrow when above. Raises ValueError when not finite."""
        settings = self._settings
        difference = settings.target - _finite(entropy)
        step = 0.0 if difference == 0 else math.copysign(settings.delta, difference)
        self._widening = min(max(self._widening + step, settings.min), settings.max)

    def state(self) -> State:
        """`widening`, the integral k."""
        return {"widening": self._widening}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Continue from `state`. Raises ValueError when it is not one of this controller's."""
        widening = _entry(state, "widening")
        if widening is None:
            raise ValueError("EntropyController.restore got no widening, needs a number")
        self._widening = widening


def _entry(state: Mapping[str, float | None], name: str) -> float | None:
    if name not in state:
        raise ValueError(
            f"EntropyController.restore got the keys {sorted(state)}, needs {name!r}: the checkpoint has another entropy_control"
        )
    return state[name]


def make_entropy_controller(objective: Objective) -> EntropyController | None:
    """The controller that `objective.entropy_control` asks for, None without one."""
    settings = objective.entropy_control
    if settings is None:
        return None
    if settings.actuator == "coefficient":
        return CoefficientController(settings)
    assert objective.clip_high is not None, "Objective refuses a clip_high controller without clip_high"
    return ClipHighController(settings, clip_high=objective.clip_high)


def controlled(objective: Objective, value: float) -> tuple[Objective, float]:
    """(objective, entropy coefficient) of a step in which the controller applies `value`."""
    if objective.adapts_clip_high:
        return replace(objective, clip_high=value), objective.entropy_coef
    return objective, value if objective.adapts_entropy_coef else objective.entropy_coef
