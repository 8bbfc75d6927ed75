"""Coefficients of the objective that change from one optimizer step to the next, as pure functions from one state to the next."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.algorithms.entropy_control import EntropyState, applied_value, first_entropy_state, updated_entropy_state
from megatron_rl.algorithms.kl import updated_kl_coef
from megatron_rl.algorithms.objective import Objective
from megatron_rl.errors import UserError


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


@dataclass(frozen=True, slots=True)
class ControlState:
    """What controllers know between two optimizer steps: the KL coefficient, and the state of the entropy's controller, None without one.

    Equal on all ranks.
    """

    kl_coef: float
    entropy: EntropyState | None

    def plain(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        return asdict(self)


def first_state(objective: Objective) -> ControlState:
    """The state before the first step."""
    control = objective.entropy_control
    return ControlState(objective.kl_loss_coef or objective.kl_reward_coef, None if control is None else first_entropy_state(control))


def restored_state(objective: Objective, plain: Mapping[str, Any]) -> ControlState:
    """The state that `plain` holds; a controller that it does not know starts anew, a fixed coefficient stays the setting's.

    Raises UserError when `plain` is the state of another rule of entropy control.
    """
    first = first_state(objective)
    kl_coef = first.kl_coef if objective.kl_control is None else float(plain["kl_coef"])
    if first.entropy is None or plain["entropy"] is None:
        return ControlState(kl_coef, first.entropy)
    rule = plain["entropy"].get("rule")
    if rule != first.entropy.rule:
        raise UserError(
            f"cannot resume: objective.entropy_control.rule is {first.entropy.rule}, was {rule} when the checkpoint was written; restore "
            "it or start a new run"
        )
    return ControlState(kl_coef, EntropyState(**plain["entropy"]))


def kl_reward_coef(objective: Objective, state: ControlState) -> float:
    """The coefficient of the KL in the rewards of the coming step."""
    return state.kl_coef if objective.kl_reward_coef else 0.0


def of_step(objective: Objective, state: ControlState, entropy: float | None = None) -> tuple[Objective, Coefficients]:
    """The objective of the coming step and its coefficients; the objective differs from the settings' in what a controller moves.

    `entropy`, nats per token, is that of the policy before the step, where `objective.needs_entropy_before_step`.
    """
    coefficients = Coefficients(objective.entropy_coef, state.kl_coef if objective.kl_loss_coef else 0.0)
    if objective.entropy_control is None:
        return objective, coefficients
    assert state.entropy is not None, "the state is that of another objective"
    value = applied_value(objective.entropy_control, state.entropy, entropy)
    if not objective.adapts_clip_high:
        return objective, replace(coefficients, entropy=value)
    assert objective.clip_high is not None, "Objective refuses a controller of clip_high without clip_high"
    return replace(objective, clip_high=objective.clip_high + value), coefficients


def updated_state(objective: Objective, state: ControlState, measured: StepMeasurements, *, num_sequences: int) -> ControlState:
    """The state after a finished step of `num_sequences` sequences."""
    entropy, kl_coef, control = state.entropy, state.kl_coef, objective.kl_control
    if objective.entropy_control is not None and entropy is not None and measured.entropy is not None:
        entropy = updated_entropy_state(objective.entropy_control, entropy, measured.entropy)
    if control is not None and measured.kl_per_sequence is not None:
        kl_coef = updated_kl_coef(kl_coef, kl=measured.kl_per_sequence, num_sequences=num_sequences, control=control)
    return ControlState(kl_coef, entropy)
