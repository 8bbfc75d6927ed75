"""What some objectives must know of a whole optimizer step before its first micro-batch: a pass without gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from megatron_rl.algorithms.log_prob import TokenStatistics
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.selection import StepStatistics, step_statistics
from megatron_rl.training import passes
from megatron_rl.training.loss_inputs import loss_inputs
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.sequence_sum import SequenceSum
from megatron_rl.training.token_data import TokenData


@dataclass(frozen=True, slots=True, eq=False)
class BeforeStep:
    """`seen` the policy's statistics of each micro-batch before the step, on the last pipeline stage; `entropy` their mean, nats."""

    seen: Sequence[TokenStatistics]
    entropy: float | None


def look_before_step(policy: passes.Policy, micro_batches: Sequence[MicroBatch]) -> BeforeStep:
    """Run the pass. Collective; `entropy` is the mean over the tokens of all ranks, the same on every rank."""
    seen = passes.statistics(policy, micro_batches)
    pair = torch.zeros(2, dtype=torch.float64, device=micro_batches[0].input_ids.device)
    if policy.place.reports:
        for statistics in seen:
            assert statistics.entropy is not None, "this pass computes entropies"
            pair[0] += statistics.entropy.double().sum()
            pair[1] += len(statistics.entropy)
    distributed.all_reduce(pair)
    total, count = pair.tolist()
    return BeforeStep(seen, total / count if count else None)


def make_step_statistics(
    objective: Objective,
    before: BeforeStep,
    policy: passes.Policy,
    micro_batches: Sequence[MicroBatch],
    data: TokenData,
    *,
    num_tokens: int,
    seed: int,
) -> StepStatistics | None:
    """Thresholds and denominators of the step on the last pipeline stage, None on others. Collective over that stage's dp and cp ranks."""
    if not policy.place.last_stage:
        return None
    inputs = [loss_inputs(micro_batch, seen, data) for micro_batch, seen in zip(micro_batches, before.seen, strict=True)]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return step_statistics(
        objective,
        inputs,
        num_tokens=num_tokens,
        sequence_sum=SequenceSum(policy.place.cp_group),
        gather=lambda values: _gather(values, group, micro_batches[0].input_ids.device),
        seed=seed,
    )


def _gather(values: Tensor, group: distributed.ProcessGroup, device: torch.device) -> Tensor:
    """[n] values of this rank to those of all ranks of `group`, concatenated; n differs between ranks."""
    values = values.to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    distributed.all_gather(sizes, torch.tensor([len(values)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(values, (0, longest - len(values)))
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])
