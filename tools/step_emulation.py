"""One optimizer step computed in this process under any split: micro-batches, order, padding, data- and context-parallel ranks.

It runs the same code as training, each rank in a thread, with the collectives replaced by barriers. The proof that a split changes
nothing (`tools/check_vectors.py --layouts`, the property tests) stands on it. Legend: T tokens of the whole step.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import LossInputs, Metrics
from megatron_rl.algorithms.coefficients import Coefficients
from megatron_rl.algorithms.loss import compute_loss
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.return_advantage import ValueLoss
from megatron_rl.algorithms.selection import step_statistics

_BARRIER_TIMEOUT_S = 60.0
_WITH_GRADIENT = ("log_probs", "entropy", "values")
_OF_CRITIC = ("values", "old_values", "returns")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The sequences of one optimizer step laid end to end: `lengths` per sequence, `loss_mask` [T], and by the names of
    `LossInputs` the other per-token tensors [T]. `trajectories` number those that the sequences are parts of; each its own when None.
    """  # fmt: skip

    lengths: tuple[int, ...]
    loss_mask: Tensor
    tokens: Mapping[str, Tensor]
    trajectories: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        unknown = set(self.tokens) - {item.name for item in fields(LossInputs)} - set(_OF_CRITIC)
        if unknown or sum(self.lengths) != len(self.loss_mask):
            raise ValueError(
                f"Step has unknown tensors {sorted(unknown)}, or lengths of {sum(self.lengths)} and a mask of {len(self.loss_mask)}"
            )

    def trainable(self) -> tuple[int, ...]:
        """Trainable tokens of each sequence."""
        return tuple(int(part.sum()) for part in self.loss_mask.split(list(self.lengths)))

    def trajectory_tokens(self) -> dict[int, int]:
        """Trainable tokens of each trajectory, by its number."""
        totals: dict[int, int] = {}
        for owner, count in zip(self.trajectories or range(len(self.lengths)), self.trainable(), strict=True):
            totals[owner] = totals.get(owner, 0) + count
        return totals


@dataclass(frozen=True, slots=True)
class Layout:
    """`ranks[d][m]` are the sequences in micro-batch m of data-parallel rank d, each spread over `cp` ranks; `padding` fills the rest.

    Every data-parallel rank has the same number of micro-batches, and some may be empty. `pad` tokens end every micro-batch.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    cp: int = 1
    pad: int = 0
    padding: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """`loss` of the step, its `gradients` [T] by the tensor they belong to, and `metrics` as sum / weight."""

    loss: float
    gradients: Mapping[str, Tensor]
    metrics: Mapping[str, float]


@dataclass(eq=False)
class _Exchange:
    """A collective among the threads of one group: everybody puts a tensor down, waits, and combines all of them."""

    size: int
    slots: list[Tensor | None] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=_BARRIER_TIMEOUT_S)

    def collect(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.slots[rank] = tensor
        self.barrier.wait()
        everything = [slot for slot in self.slots if slot is not None]
        self.barrier.wait()
        return everything

    def summing(self, rank: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: torch.stack(self.collect(rank, tensor)).sum(0)

    def concatenating(self, rank: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: torch.cat(self.collect(rank, tensor))


def trivial_layout(num_sequences: int) -> Layout:
    """Everything in one micro-batch on one rank."""
    return Layout(ranks=((tuple(range(num_sequences)),),))


def run_step(
    objective: Objective | ValueLoss, step: Step, layout: Layout, *, coefficients: Coefficients | None = None, seed: int = 0
) -> StepResult:
    """Return the step under `layout`; `coefficients` are those that the objective begins with when None."""
    if coefficients is None and isinstance(objective, Objective):
        kl, entropy = objective.kl, objective.entropy
        coefficients = Coefficients(entropy=0.0 if entropy is None else entropy.coef, kl_loss=0.0 if kl is None else kl.coef)
    leaves = {name: tensor.clone() for name, tensor in step.tokens.items()}
    for name in _WITH_GRADIENT:
        if name in leaves:
            leaves[name] = leaves[name].requires_grad_()
    world = _Exchange(len(layout.ranks) * layout.cp)
    shares: list[tuple[Tensor, list[Metrics]] | None] = [None] * world.size
    failures: list[BaseException] = []

    def rank_program(dp_rank: int, cp_rank: int, context: _Exchange) -> None:
        rank = dp_rank * layout.cp + cp_rank
        try:
            micro_batches = [rank_inputs(step, leaves, rows, layout, cp_rank) for rows in layout.ranks[dp_rank]]
            shares[rank] = rank_share(
                objective, step, micro_batches, coefficients, context.summing(cp_rank), world.concatenating(rank), seed
            )
        except BaseException as error:  # handed to the caller below; the other threads must not wait for this one
            failures.append(error)
            context.barrier.abort()
            world.barrier.abort()

    ranks = []
    for dp_rank in range(len(layout.ranks)):
        context = _Exchange(layout.cp)
        ranks += [(dp_rank, cp_rank, context) for cp_rank in range(layout.cp)]
    threads = [threading.Thread(target=rank_program, args=rank) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    rank_program(*ranks[0])
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    return _merged([share for share in shares if share is not None], leaves)


def rank_share(
    objective: Objective | ValueLoss,
    step: Step,
    micro_batches: Sequence[tuple[LossInputs, Mapping[str, Tensor]]],
    coefficients: Coefficients | None,
    sequence_sum: Callable[[Tensor], Tensor],
    gather: Callable[[Tensor], Tensor],
    seed: int,
) -> tuple[Tensor, list[Metrics]]:
    """What one rank's program does in a step."""
    num_tokens = int(step.loss_mask.sum())
    num_trajectories = sum(count > 0 for count in step.trajectory_tokens().values())
    statistics, counts = None, {"num_tokens": num_tokens, "num_trajectories": num_trajectories}
    if isinstance(objective, Objective) and objective.needs_step_statistics:
        of_policy = [inputs for inputs, _ in micro_batches]
        statistics = step_statistics(objective, of_policy, num_tokens=num_tokens, sequence_sum=sequence_sum, gather=gather, seed=seed)
    total, metrics = torch.zeros((), dtype=torch.float64), []
    for inputs, of_critic in micro_batches:
        if isinstance(objective, ValueLoss):
            share, own = objective.share(inputs.sequences(sequence_sum), **of_critic, **counts)
            total = total + share
            metrics.append(own)
            continue
        output = compute_loss(objective, inputs, **counts, coefficients=coefficients, sequence_sum=sequence_sum, statistics=statistics)
        total = total + output.loss
        metrics.append(output.metrics)
    return total, metrics


def _merged(shares: Sequence[tuple[Tensor, list[Metrics]]], leaves: Mapping[str, Tensor]) -> StepResult:
    loss = torch.stack([share for share, _ in shares]).sum()
    if loss.requires_grad:
        loss.backward()
    sums: dict[str, list[float]] = {}
    for metrics in (entry for _, entries in shares for entry in entries):
        for name, (total, weight) in metrics.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += float(total)
            pair[1] += float(weight)
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
    return StepResult(float(loss.detach()), gradients, {name: total / weight for name, (total, weight) in sums.items() if weight})


def rank_inputs(
    step: Step, leaves: Mapping[str, Tensor], rows: Sequence[int], layout: Layout, cp_rank: int
) -> tuple[LossInputs, Mapping[str, Tensor]]:
    """Return the micro-batch of sequences `rows` on one context-parallel rank, in zigzag order, with gaps filled by the padding.

    The second part is a critic's: values, old values and returns.
    """
    starts = [sum(step.lengths[:row]) for row in rows]
    positions, index = [], []
    for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
        own = _zigzag(step.lengths[row], layout.cp, cp_rank)
        positions += [start + position if position >= 0 else -1 for position in own]
        index += [place] * len(own)
    tail = layout.pad if rows else 0
    where = torch.tensor(positions + [-1] * tail, dtype=torch.int64)
    real = where >= 0
    trainable = step.trainable()

    def take(tensor: Tensor) -> Tensor:
        if not len(tensor):
            return tensor.new_zeros(len(where))
        fill = 0 if not tensor.is_floating_point() else layout.padding
        return torch.where(real, tensor[where.clamp(min=0)], torch.tensor(fill, dtype=tensor.dtype))

    taken = {name: take(leaf) for name, leaf in leaves.items()}
    of_critic = {name: taken.pop(name) for name in _OF_CRITIC if name in taken}
    inputs = LossInputs(
        loss_mask=take(step.loss_mask),
        sequence_index=torch.tensor(index + [0] * tail, dtype=torch.int64),
        sequence_tokens=torch.tensor([trainable[row] for row in rows], dtype=torch.int64),
        **_owners(step, rows),
        **taken,
    )
    return inputs, of_critic


def _owners(step: Step, rows: Sequence[int]) -> dict[str, Tensor]:
    if step.trajectories is None:
        return {}
    ids, totals = [step.trajectories[row] for row in rows], step.trajectory_tokens()
    return {
        "trajectory_ids": torch.tensor(ids, dtype=torch.int64),
        "trajectory_tokens": torch.tensor([totals[owner] for owner in ids], dtype=torch.int64),
    }


def _zigzag(length: int, cp: int, cp_rank: int) -> list[int]:
    """Positions of one sequence on `cp_rank`: chunks r and 2 cp - 1 - r of 2 cp equal ones; -1 stands for padding."""
    if cp == 1:
        return list(range(length))
    chunk = -(-length // (2 * cp))
    own = [*range(cp_rank * chunk, (cp_rank + 1) * chunk), *range((2 * cp - 1 - cp_rank) * chunk, (2 * cp - cp_rank) * chunk)]
    return [position if position < length else -1 for position in own]


def random_layouts(num_sequences: int, *, count: int, seed: int) -> list[Layout]:
    """`count` layouts that between them change order, micro-batches, dp, cp and what padding holds."""
    generator = torch.Generator().manual_seed(seed)
    paddings = (0.0, 7.77, float("nan"), float("inf"), float("-inf"))
    layouts = []
    for number in range(count):
        dp = int(torch.randint(1, 4, (), generator=generator))
        micro_batches = int(torch.randint(1, 4, (), generator=generator))
        order = torch.randperm(num_sequences, generator=generator).tolist()
        slots: list[list[list[int]]] = [[[] for _ in range(micro_batches)] for _ in range(dp)]
        for row in order:
            slot = int(torch.randint(0, dp * micro_batches, (), generator=generator))
            slots[slot // micro_batches][slot % micro_batches].append(row)
        ranks = tuple(tuple(tuple(batch) for batch in rank) for rank in slots)
        pad = int(torch.randint(0, 4, (), generator=generator))
        layouts.append(Layout(ranks=ranks, cp=1 + number % 3, pad=pad, padding=paddings[number % len(paddings)]))
    return layouts
