"""Input of a mixture's routers for a micro-batch, and their results for the optimizer step.

Legend: T tokens of a micro-batch on this rank, n tokens seen by one router call (T / tp under
sequence parallelism), S sequences of the micro-batch, B sequences and N tokens of the optimizer
step, L mixture layers, E experts, K experts of each token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

_REORDERED, _CHANGED, _REPLAYED, _Z_LOSS, _BALANCE_LOSS = -5, -4, -3, -2, -1
_NUM_EXTRA = 5


@dataclass(frozen=True, slots=True, eq=False)
class RoutedTokens:
    """The tokens of a micro-batch as seen by routers.

    `sequence_index` [T] in [0, S), -1 on padding. `sequence_lengths` [S] tokens of each whole
    sequence, over all context-parallel ranks, without padding. `counted` [S] True for sequences
    with a trainable token; only such sequences have a share in auxiliary losses. `experts` [L, T,
    K], in page-locked host memory for a GPU, are the experts chosen by an engine; None without a
    record. `recorded` [T] is True for tokens with known experts.
    """

    sequence_index: Tensor
    sequence_lengths: Tensor
    counted: Tensor
    experts: Tensor | None = None
    recorded: Tensor | None = None

    def part(self, rank: int, num_tokens: int) -> "RoutedTokens":
        """Return the `num_tokens` n tokens of tensor-parallel `rank`, or all of as many."""
        if num_tokens == len(self.sequence_index):
            return self
        own = slice(rank * num_tokens, (rank + 1) * num_tokens)
        return replace(
            self,
            sequence_index=self.sequence_index[own],
            experts=None if self.experts is None else self.experts[:, own],
            recorded=None if self.recorded is None else self.recorded[own],
        )

    @property
    def real(self) -> Tensor:
        """Return True for tokens other than padding, [T]."""
        return self.sequence_index >= 0


class RouterStep:
    """Counts and auxiliary losses of this rank's routers in one optimizer step.

    The losses add to the step's gradient. A router reports a call in the training forward with
    gradients. Under activation recompute this is the second run of a layer, so every token is
    counted once.

    The loss of a layer is `balance_coef` times the mean over the step's `num_sequences` B sequences of the sequence-wise balance loss,
    plus `z_coef` times the mean over their `num_tokens` N tokens, prompts included, of the squared log-sum-exp of the router's logits.
    """

    def __init__(
        self,
        *,
        num_sequences: int,
        num_tokens: int,
        balance_coef: float,
        z_coef: float,
        num_layers: int,
        num_experts: int,
        device: torch.device,
    ) -> None:
        self.num_sequences, self.num_tokens = num_sequences, num_tokens
        self.balance_coef, self.z_coef = balance_coef, z_coef
        self._table = torch.zeros(num_layers, num_experts + _NUM_EXTRA, dtype=torch.float64, device=device)

    def count(self, layer: int, *, load: Tensor, replayed: Tensor, changed: Tensor, reordered: Tensor) -> None:
        """Add tokens of each expert [E] in `layer`, replayed ones, those of changed experts, and of the same in another order."""
        self._table[layer, :-_NUM_EXTRA] += load
        self._table[layer, _REPLAYED] += replayed
        self._table[layer, _CHANGED] += changed
        self._table[layer, _REORDERED] += reordered

    def attach(self, probabilities: Tensor, *, layer: int, balance: Tensor | None, z_loss: Tensor | None) -> Tensor:
        """Return `probabilities` [n, E] with this rank's shares of losses in the backward."""
        for column, coef, share in ((_BALANCE_LOSS, self.balance_coef, balance), (_Z_LOSS, self.z_coef, z_loss)):
            if share is not None:
                self._table[layer, column] += share.detach()
                probabilities = _AlsoDescend.apply(probabilities, coef * share)
        return probabilities

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> "RouterReport":
        """Return the step's numbers, summed over ranks; collective as `all_reduce_sum`."""
        table = all_reduce_sum(self._table.clone()).cpu()
        return RouterReport(
            load=table[:, :-_NUM_EXTRA],
            replayed=float(table[:, _REPLAYED].sum()),
            changed=float(table[:, _CHANGED].sum()),
            reordered=float(table[:, _REORDERED].sum()),
            balance_loss=float(table[:, _BALANCE_LOSS].mean()) if self.balance_coef else None,
            z_loss=float(table[:, _Z_LOSS].mean()) if self.z_coef else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RouterReport:
    """Results of all ranks' routers in one optimizer step.

    `load` [L, E] tokens given to each expert. `replayed`, `changed` and `reordered` count (token,
    layer) pairs.
    The losses are means over layers, without their coefficients; None without a coefficient.
    """

    load: Tensor
    replayed: float
    changed: float
    reordered: float
    balance_loss: float | None
    z_loss: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Input of the routers in one pass: tokens, use of recorded experts, counts of the step."""

    tokens: RoutedTokens
    replay: bool = False
    step: RouterStep | None = None


class _AlsoDescend(torch.autograd.Function):
    """A tensor of any shape with the gradient of a scalar loss, without upstream's global state."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def balance_loss(scores: Tensor, tokens: RoutedTokens, *, top_k: int, num_sequences: int, group: distributed.ProcessGroup | None) -> Tensor:
    """Return this rank's share of the sequence-wise balance loss (DeepSeek-V3, eq. 17-20).

    The loss is averaged over the step's `num_sequences` B sequences. `scores` [n, E] of the experts
    sum to 1 for each token. Let f_i be the fraction of a sequence's tokens with expert i among
    their `top_k`, times E / K, and P_i the mean score of expert i. The loss of the sequence is the
    sum of f_i P_i. The fractions carry no gradient and are counted over `group`: its ranks hold the
    other tokens of these sequences.
    """
    num_experts = scores.shape[-1]
    real = tokens.real.unsqueeze(-1)
    rows = tokens.sequence_index.clamp(min=0)
    with torch.no_grad():
        chosen = torch.zeros_like(scores).scatter_(1, scores.topk(top_k, dim=-1).indices, 1.0) * real
        counts = scores.new_zeros(len(tokens.sequence_lengths), num_experts).index_add_(0, rows, chosen)
        if group is not None and group.size() > 1:
            distributed.all_reduce(counts, group=group)
        lengths = tokens.sequence_lengths.to(scores.dtype).unsqueeze(-1)
        fractions = counts * (num_experts / top_k) / lengths
        weights = fractions * tokens.counted.unsqueeze(-1) / lengths / num_sequences
    return (torch.where(real, scores, 0.0) * weights[rows]).sum()


def z_loss(logits: Tensor, tokens: RoutedTokens, *, num_tokens: int) -> Tensor:
    """Return this rank's share of the mean squared log-sum-exp of `logits` [n, E] (ST-MoE, 5)."""
    counted = tokens.real & tokens.counted[tokens.sequence_index.clamp(min=0)]
    return torch.where(counted, logits.logsumexp(-1).square(), 0.0).sum() / num_tokens
