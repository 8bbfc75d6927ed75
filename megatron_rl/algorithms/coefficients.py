"""Coefficients of the objective that change from one optimizer step to the next, and what steers them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.algorithms.entropy_control import controlled, make_entropy_controller
from megatron_rl.algorithms.kl import updated_kl_coef
from megatron_rl.algorithms.objective import Objective


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients in the loss of one optimizer step, the same for all its micro-batches: of the entropy bonus and of the KL."""

    entropy: float
    kl_loss: float

    @classmethod
    def fixed(cls, objective: Objective) -> "Coefficients":
        """Those that `objective` sets. Raises ValueError when a controller moves one, so that they differ from step to step."""
        for name, moved in (("entropy_control", objective.adapts_entropy_coef), ("kl_control", objective.adapts_kl_loss_coef)):
            if moved:
                raise ValueError(f"Objective.{name} moves a coefficient of the loss from step to step; pass the step's coefficients")
        return cls(entropy=objective.entropy_coef, kl_loss=objective.kl_loss_coef)


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """What a finished step measured over all ranks: mean entropy per token, and mean over sequences of the KL per token, in nats.

    None where the step measured nothing.
    """

    entropy: float | None
    kl_per_sequence: float | None


class Controllers:
    """The entropy controller and the adaptive KL coefficient, as far as the objective asks for them; equal on all ranks."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._entropy = make_entropy_controller(objective)
        self._kl_coef = objective.kl_loss_coef or objective.kl_reward_coef

    @property
    def needs_current_entropy(self) -> bool:
        """Whether `present` wants the entropy of the policy before the step."""
        return self._entropy is not None and self._entropy.needs_current_entropy

    @property
    def kl_reward_coef(self) -> float:
        """The present coefficient of the KL in the rewards."""
        return self._kl_coef if self._objective.kl_reward_coef else 0.0

    def present(self, entropy: float | None = None) -> tuple[Objective, Coefficients]:
        """The objective of the coming step and its coefficients; the objective differs from the settings' in what a controller moves.

        `entropy`, nats per token, is that of the policy before the step, where it is needed.
        """
        objective, entropy_coef = self._objective, self._objective.entropy_coef
        if self._entropy is not None:
            objective, entropy_coef = controlled(objective, self._entropy.applied(entropy))
        return objective, Coefficients(entropy_coef, self._kl_coef if objective.kl_loss_coef else 0.0)

    def update(self, measured: StepMeasurements, *, num_sequences: int) -> None:
        """Take in a finished step of `num_sequences` sequences."""
        if self._entropy is not None and measured.entropy is not None:
            self._entropy.update(measured.entropy)
        control = self._objective.kl_control
        if control is not None and measured.kl_per_sequence is not None:
            self._kl_coef = updated_kl_coef(self._kl_coef, kl=measured.kl_per_sequence, num_sequences=num_sequences, control=control)

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {"kl_coef": self._kl_coef, "entropy": None if self._entropy is None else self._entropy.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; a controller that the checkpoint does not know starts anew, a fixed coefficient stays the setting's."""
        if self._objective.kl_control is not None:
            self._kl_coef = float(state["kl_coef"])
        if self._entropy is not None and state["entropy"] is not None:
            self._entropy.restore(state["entropy"])
