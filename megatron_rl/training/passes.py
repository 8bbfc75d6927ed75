"""Running a model over micro-batches: log-probabilities without gradients, and forward + backward of a loss.

Both go through megatron-core's schedules, so that a pipeline, interleaved or not, needs no code of its own. Every rank makes every
call, also with micro-batches of padding alone.

Legend: N predictions of a micro-batch that are looked at, T tokens of a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed

from megatron_rl.algorithms.log_prob import TokenStatistics, token_statistics
from megatron_rl.models.build import forward_selected
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.topology import Place, sum_over

LossFunction = Callable[[MicroBatch, TokenStatistics], tuple[Tensor, Any]]
"""From a micro-batch and its statistics to this rank's additive share of the step's loss, and anything to report."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A model as a distribution over next tokens: softmax of its logits over `vocab_size` tokens at `temperature`."""

    model: Sequence[DistributedDataParallel]
    place: Place
    vocab_size: int
    temperature: float

    def statistics(self, logits: Tensor, micro_batch: MicroBatch, *, with_entropy: bool) -> TokenStatistics:
        """Statistics [N] at the micro-batch's targets from this rank's columns of the logits [N, V / tp]."""
        group = self.place.tp_group if self.place.tp_group.size() > 1 else None
        return token_statistics(
            logits,
            micro_batch.targets,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            vocab_start=self.place.tp_rank * logits.shape[-1],
            group=group,
            with_entropy=with_entropy,
        )


def _iterators(
    model: Sequence[DistributedDataParallel], micro_batches: Sequence[MicroBatch]
) -> Iterator[MicroBatch] | list[Iterator[MicroBatch]]:
    """One iterator for each model chunk, as the interleaved schedule wants; a lone one otherwise."""
    iterators = [iter(micro_batches) for _ in model]
    return iterators if len(iterators) > 1 else iterators[0]


def _forward(chunk: DistributedDataParallel, micro_batch: MicroBatch) -> Tensor:
    """Logits [N, V / tp] on the last stage, hidden states on the others."""
    return forward_selected(chunk, micro_batch.input_ids, micro_batch.position_ids, micro_batch.packed, micro_batch.positions)


def _run(policy: Policy, micro_batches: Sequence[MicroBatch], finish: Callable[..., Any], **options: Any) -> list[Any]:
    """Put all micro-batches through the schedule; `finish(micro_batch, output)` ends each on the last stage."""

    def forward_step(iterator: Iterator[MicroBatch], chunk: DistributedDataParallel) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        return _forward(chunk, micro_batch), partial(finish, micro_batch)

    longest = max(micro_batch.input_ids.shape[1] for micro_batch in micro_batches)
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=_iterators(policy.model, micro_batches),
        model=list(policy.model) if len(policy.model) > 1 else policy.model[0],
        num_microbatches=len(micro_batches),
        seq_length=longest,
        micro_batch_size=1,
        **options,
    )
    return reports


@torch.no_grad()
def statistics(policy: Policy, micro_batches: Sequence[MicroBatch], *, with_entropy: bool = True) -> list[TokenStatistics]:
    """Statistics [N] of each micro-batch on the last pipeline stage, without gradients; an empty list on the others."""

    def finish(micro_batch: MicroBatch, logits: Tensor, non_loss_data: bool = True) -> TokenStatistics:
        return policy.statistics(logits, micro_batch, with_entropy=with_entropy)

    for chunk in policy.model:
        chunk.eval()
    reports = _run(policy, micro_batches, finish, forward_only=True, collect_non_loss_data=True)
    for chunk in policy.model:
        chunk.train()
    return reports


@torch.no_grad()
def log_probs(policy: Policy, micro_batches: Sequence[MicroBatch], *, num_tokens: int) -> Tensor:
    """Log-probs [T] float32, in nats, of the micro-batches' targets among `num_tokens` tokens; 0 at every other token.

    All ranks of a data-parallel rank's tensor-, context- and pipeline-parallel groups get the same values.
    """
    reports = statistics(policy, micro_batches, with_entropy=False)
    result = torch.zeros(num_tokens, device=micro_batches[0].input_ids.device)
    if policy.place.last_stage:
        for micro_batch, report in zip(micro_batches, reports, strict=True):
            result[torch.from_numpy(micro_batch.target_index).to(result.device)] = report.log_prob.float()
    sum_over(result, policy.place.cp_group)
    if policy.place.pp_group.size() > 1:
        distributed.broadcast(result, group_src=policy.place.pp_group.size() - 1, group=policy.place.pp_group)
    return result


def forward_backward(policy: Policy, micro_batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
    """Gradients of the sum of `loss` over micro-batches and over data- and context-parallel ranks, in the gradient buffers.

    The reports of `loss`, one for each micro-batch, on the last stage; an empty list on the others.
    """
    no_tokens = torch.zeros((), dtype=torch.int, device=micro_batches[0].input_ids.device)

    def finish(micro_batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        value, report = loss(micro_batch, policy.statistics(logits, micro_batch, with_entropy=True))
        if not len(micro_batch.positions):
            # Without predictions the loss must still depend on the model, so that this rank joins every collective of the backward.
            value = value + logits.sum()
        # megatron would divide by a token count; ours is zero, which leaves the sum alone: the share is already weighted.
        return value, no_tokens, report

    for chunk in policy.model:
        chunk.zero_grad_buffer()
    return _run(policy, micro_batches, finish, forward_only=False)
