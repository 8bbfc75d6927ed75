"""Your own policy loss and estimator, as choices of the objective. Legend: T tokens of this rank, B samples of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from megatron_rl.algorithms.advantage import Advantage, Samples
from megatron_rl.algorithms.choices import Load, doc, own_arguments
from megatron_rl.algorithms.lazy_torch import Tensor, torch
from megatron_rl.algorithms.policy_loss import PolicyLossTerms, PolicyTerms, RatioLoss
from megatron_rl.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugInAdvantage(Advantage):
    """Your own estimator, a function (rewards=.., group_ids=.., lengths=..) -> advantages [B]."""

    compares_groups: ClassVar[bool] = False

    kind: Literal["plug_in"] = "plug_in"
    path: str = doc("Your own estimator, package.module:function.")
    args: Mapping[str, Any] = own_arguments("Arguments of your own estimator, by their names.")

    def scores(self, samples: Samples) -> Tensor:
        """Raise ValueError, because the function is not loaded."""
        raise ValueError(f"Objective.advantage {self.path} is not loaded; take advantage.loaded(megatron_rl.plugins.loader.load)")

    def loaded(self, load: Load) -> LoadedAdvantage:
        """Return the estimator with its function. Raises UserError when the path cannot be imported or does not take `args`."""
        return LoadedAdvantage(path=self.path, args=self.args, function=load(self.path, kind="advantage", args=self.args))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdvantage(PlugInAdvantage):
    """Your own estimator with its function."""

    function: Callable[..., Any]

    def scores(self, samples: Samples) -> Tensor:
        """Return the function's advantages, [B] float64. Raises UserError for any other result."""
        name, values = f"objective.advantage {self.path}", samples.rewards
        if len(values) == 0:
            return torch.zeros(0, dtype=torch.float64)
        made = self.function(rewards=values, group_ids=samples.group_ids, lengths=samples.lengths)
        if not isinstance(made, torch.Tensor) or made.shape != values.shape or made.dtype != torch.float64:
            got = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, torch.Tensor) else f"type {type(made).__name__}"
            raise UserError(f"{name} returned {got}, needs a float64 tensor {tuple(values.shape)}, an advantage for each sample")
        if not bool(made.isfinite().all()):
            raise UserError(
                f"{name} returned {made[~made.isfinite()][0].item()} for the reward {values[~made.isfinite()][0].item()}, needs finite"
            )
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugInLoss(RatioLoss):
    """Your own loss, a function (objective=.., terms=..) -> PolicyLossTerms, which may also read the reference."""

    needs_reference: ClassVar[bool] = True
    bounded_by: ClassVar[tuple[str, ...] | None] = ()  # a function cannot be asked; its author is believed

    kind: Literal["plug_in"] = "plug_in"
    path: str = doc("Your own policy loss, package.module:function.")
    args: Mapping[str, Any] = own_arguments("Arguments of your own loss, by their names.")

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Raise ValueError, because the function is not loaded."""
        raise ValueError(f"Objective.policy_loss {self.path} is not loaded; take objective.loaded(megatron_rl.plugins.loader.load)")

    def loaded(self, load: Load, objective: object) -> LoadedLoss:
        """Return the loss with its function. Raises UserError when the path cannot be imported or does not take `args`."""
        function = partial(load(self.path, kind="policy_loss", args=self.args), objective=objective)
        return LoadedLoss(**{item.name: getattr(self, item.name) for item in dataclasses.fields(self)}, function=function)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLoss(PlugInLoss):
    """Your own loss with its function."""

    function: Callable[..., Any]

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the function's losses [T]. Raises UserError without a number and a choice for each token."""
        made, name = self.function(terms=terms), f"objective.policy_loss {self.path}"
        if not isinstance(made, PolicyLossTerms):
            raise UserError(f"{name} returned {made!r:.80} of type {type(made).__name__}, needs PolicyLossTerms")
        shape = tuple(terms.log_probs.shape)
        for field_name, tensor in {"losses": made.losses, **{f"events[{event!r}]": hit for event, hit in made.events.items()}}.items():
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
                got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"type {type(tensor).__name__}"
                raise UserError(f"{name} returned {field_name} of {got}, needs a tensor of shape {shape}, a number for each token")
        return made
