"""Policy losses without a clip: soft gates, sequence weights, plain gradients, and your own.

Legend: T tokens of this rank. r = pi / pi_old at the chosen ratio level, A the advantage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_rl.algorithms.aggregation import bounded_exp
from megatron_rl.algorithms.choices import Load, doc, own_arguments, required
from megatron_rl.algorithms.policy_loss import PolicyLoss, PolicyLossTerms, PolicyTerms, RatioLoss
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from megatron_rl.algorithms.lazy_torch import torch

_VESPO_LOG_LIMITS = (-18.420680743952367, 20.0)  # ln 1e-8, so that the sequence weight stays in [1e-8, e^20]


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Return torch.where of two numbers in the dtype of `like`.

    torch.where of Python numbers alone would round to float32.
    """
    return torch.where(condition, torch.full_like(like, yes), torch.full_like(like, no))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo(RatioLoss):
    """-(4 / tau) sigmoid(tau (r - 1)) A, a soft gate instead of a clip (arXiv 2511.20347)."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = doc("Gate temperature at positive advantages.", 1.0, gt=0)
    tau_negative: float = doc("Gate temperature at other advantages.", 1.05, gt=0)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]."""
        tau = _choose(terms.advantages > 0, self.tau_positive, self.tau_negative, terms.log_ratio)
        return PolicyLossTerms(-(4.0 / tau) * torch.sigmoid(tau * (bounded_exp(terms.log_ratio) - 1.0)) * terms.advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo(PolicyLoss):
    """-sg(phi(W)) A log pi with phi = exp(lambda + k ln W - lambda W), W the sequence's importance
    weight.

    Source: arXiv 2602.10693. The off-policy weight is part of W and does not multiply the loss
    again.
    """

    weighs_off_policy: ClassVar[bool] = True

    kind: Literal["vespo"] = "vespo"
    k_positive: float = doc("Exponent of the sequence weight, advantages >= 0.", 2.0, ge=0)
    lambda_positive: float = doc("Decay of the sequence weight, advantages >= 0.", 3.0, ge=0)
    k_negative: float = doc("Exponent of the sequence weight, advantages < 0.", 3.0, ge=0)
    lambda_negative: float = doc("Decay of the sequence weight, advantages < 0.", 2.0, ge=0)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]."""
        log_ratio = (terms.log_probs.detach() - terms.old_log_probs).clamp(-20.0, 20.0)
        log_weight = terms.sequences.sum(log_ratio)
        if terms.log_off_policy is not None:
            log_weight = log_weight + terms.log_off_policy
        log_weight = terms.sequences.expand(log_weight.clamp(*_VESPO_LOG_LIMITS))
        positive = terms.advantages >= 0
        k = _choose(positive, self.k_positive, self.k_negative, log_weight)
        decay = _choose(positive, self.lambda_positive, self.lambda_negative, log_weight)
        phi = (decay + k * log_weight - decay * log_weight.exp()).exp()
        return PolicyLossTerms(-phi * terms.advantages * terms.log_probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpg(PolicyLoss):
    """-A log pi, the plain policy gradient (arXiv 2504.02546)."""

    kind: Literal["gpg"] = "gpg"

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]."""
        return PolicyLossTerms(-terms.advantages * terms.log_probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation(RatioLoss):
    """-r sg(log pi_teacher - log pi_old): policy gradient of the reverse KL to the reference model, the teacher."""

    reads_advantages: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True

    kind: Literal["distillation"] = "distillation"

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]. Raises ValueError without a teacher."""
        if terms.ref_log_probs is None:
            raise ValueError("Objective.policy_loss distillation got no ref_log_probs, needs those of the teacher")
        return PolicyLossTerms(-bounded_exp(terms.log_ratio) * (terms.ref_log_probs - terms.old_log_probs).detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft(PolicyLoss):
    """-log pi, supervised training on given responses: no rewards, no ratios, no engine."""

    trains_by_rewards: ClassVar[bool] = False
    reads_advantages: ClassVar[bool] = False

    kind: Literal["sft"] = "sft"

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]."""
        return PolicyLossTerms(-terms.log_probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugInLoss(RatioLoss):
    """Your own loss, a function (objective=.., terms=..) -> PolicyLossTerms.

    The function may read anything, also the reference.
    """

    needs_reference: ClassVar[bool] = True

    kind: Literal["plug_in"] = "plug_in"
    path: str = required("Your own policy loss, package.module:function.")
    args: Mapping[str, Any] = own_arguments("Arguments of your own loss, by their names.")

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Raise ValueError, because the function is not loaded."""
        raise ValueError(f"Objective.policy_loss {self.path} is not loaded; take objective.loaded(plugins.load)")

    def loaded(self, load: Load, objective: object) -> LoadedLoss:
        """Return the loss with its function. Raises UserError when the path cannot be imported or does not take `args`."""
        function = partial(load(self.path, kind="policy_loss", args=self.args), objective=objective)
        return LoadedLoss(**{item.name: getattr(self, item.name) for item in dataclasses.fields(self)}, function=function)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLoss(PlugInLoss):
    """Your own loss with its function."""

    function: Callable[..., Any]

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the function's losses [T].

        Raises UserError without a number and a choice for each token.
        """
        made, name = self.function(terms=terms), f"objective.policy_loss {self.path}"
        if not isinstance(made, PolicyLossTerms):
            raise UserError(f"{name} returned {made!r:.80} of type {type(made).__name__}, needs PolicyLossTerms")
        shape = tuple(terms.log_probs.shape)
        for field_name, tensor in {"losses": made.losses, **{f"events[{event!r}]": hit for event, hit in made.events.items()}}.items():
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
                got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"type {type(tensor).__name__}"
                raise UserError(f"{name} returned {field_name} of {got}, needs a tensor of shape {shape}, a number for each token")
        return made


UnclippedLosses = Sapo | Vespo | Gpg | Distillation | Sft | PlugInLoss
