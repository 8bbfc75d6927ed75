"""Coefficients of the objective between optimizer steps, as pure functions from state to state."""

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.algorithms.entropy import ClipHighControl, CoefficientControl, EntropyState
from megatron_rl.algorithms.kl import updated_kl_coef
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.policy_loss import Clip
from megatron_rl.errors import UserError


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients of the entropy bonus and of the KL in the loss, for all micro-batches of one optimizer step."""

    entropy: float
    kl_loss: float

    @classmethod
    def fixed(cls, objective: Objective) -> "Coefficients":
        """Return the coefficients set by `objective`. Raises ValueError when a controller moves one from step to step."""
        kl, entropy = objective.kl, objective.entropy
        moved = {
            "entropy": entropy is not None and isinstance(entropy.control, CoefficientControl),
            "kl": kl is not None and kl.control is not None,
        }
        for name in (name for name, moves in moved.items() if moves):
            raise ValueError(f"Objective.{name}.control moves a coefficient of the loss from step to step; pass the step's coefficients")
        return cls(entropy=0.0 if entropy is None else entropy.coef, kl_loss=0.0 if kl is None else kl.coef)


@dataclass(frozen=True, slots=True)
class ControlState:
    """The state between two steps, equal on all ranks: KL coefficient, and the entropy controller's, None without one."""

    kl_coef: float
    entropy: EntropyState | None

    @classmethod
    def first(cls, objective: Objective) -> "ControlState":
        """Return the state before the first step."""
        term = objective.kl or objective.kl_reward
        return cls(0.0 if term is None else term.coef, EntropyState.first(objective.entropy))

    @classmethod
    def restored(cls, objective: Objective, plain: Mapping[str, Any]) -> "ControlState":
        """Return the state in `plain`; unknown controllers start anew, and fixed coefficients stay the setting's.

        Raises UserError when `plain` is the state of another controller of the entropy.
        """
        first = cls.first(objective)
        term = objective.kl or objective.kl_reward
        # 0 is of a run without a KL, and a controller multiplies.
        kl_coef = first.kl_coef if term is None or term.control is None else float(plain["kl_coef"]) or first.kl_coef
        if first.entropy is None or plain["entropy"] is None:
            return cls(kl_coef, first.entropy)
        kind = plain["entropy"].get("kind")
        if kind != first.entropy.kind:
            raise UserError(
                f"cannot resume: objective.entropy.control.kind is {first.entropy.kind}, was {kind} when the checkpoint was written; "
                "restore it or start a new run"
            )
        return cls(kl_coef, EntropyState(**plain["entropy"]))

    def plain(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        return asdict(self)

    def kl_reward_coef(self, objective: Objective) -> float:
        """Return the coefficient of the KL in the rewards of the coming step."""
        return 0.0 if objective.kl_reward is None else self.kl_coef

    def of_step(self, objective: Objective, entropy: float | None = None) -> tuple[Objective, Coefficients]:
        """Return the coming step's objective and coefficients by the controllers; `entropy`, nats, is that before the step."""
        kl_loss = 0.0 if objective.kl is None else self.kl_coef
        if objective.entropy is None or objective.entropy.control is None:
            return objective, Coefficients(0.0 if objective.entropy is None else objective.entropy.coef, kl_loss)
        assert self.entropy is not None, "the state is that of another objective"
        value = self.entropy.applied(objective.entropy.control, entropy)
        if not isinstance(objective.entropy.control, ClipHighControl):
            return objective, Coefficients(value, kl_loss)
        loss = objective.policy_loss
        assert isinstance(loss, Clip) and loss.high is not None, "Objective refuses a controller of clip_high without an upper clip"
        moved = dataclasses.replace(objective, policy_loss=dataclasses.replace(loss, high=loss.high + value))
        return moved, Coefficients(objective.entropy.coef, kl_loss)

    def updated(self, objective: Objective, *, entropy: float | None, kl: float | None, num_trajectories: int) -> "ControlState":
        """Return the state after a step; `entropy` is a mean over tokens, `kl` over trajectories, nats; None: not measured."""
        state, kl_coef, term = self.entropy, self.kl_coef, objective.kl or objective.kl_reward
        control = None if objective.entropy is None else objective.entropy.control
        if control is not None and state is not None and entropy is not None:
            state = state.updated(control, entropy)
        if term is not None and term.control is not None and kl is not None:
            kl_coef = updated_kl_coef(kl_coef, kl=kl, num_trajectories=num_trajectories, control=term.control)
        return ControlState(kl_coef, state)
