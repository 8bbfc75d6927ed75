"""Passes over micro-batches through megatron-core's schedules, so a pipeline needs no code of its own.

Every rank makes every call, also with micro-batches of padding alone. Legend: N predictions in use
of a micro-batch, T tokens of a batch, H hidden channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.algorithms.entropy_aware import EntropyAware
from megatron_rl.algorithms.log_prob import TokenStatistics
from megatron_rl.models.build import PolicyModel, forward_selected
from megatron_rl.models.experts.routed_tokens import RouterStep, Routing
from megatron_rl.system.device import to_device
from megatron_rl.training.collectives import from_last_stage, sum_over_context_parallel
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.topology import Place
from megatron_rl.types import Floats, Ints

Chunk: TypeAlias = DistributedDataParallel | PolicyModel
"""A model chunk; one that is not trained needs no gradient buffers around it."""

LossFunction = Callable[[int, Tensor], tuple[Tensor, Any]]
"""From a micro-batch's number and the model's output at its positions to this rank's share of the step's loss, and anything to report.

The output is hidden states [N, H] of a policy, values [N, 1] of a critic.
"""


@dataclass(frozen=True, slots=True)
class Policy:
    """A model as a distribution over next tokens: softmax of logits over `vocab_size` at `temperature`.

    Where micro-batches have records of an engine, the softmax is over its candidates, and with
    `replays_routing` the routers take its experts. With `entropy` the distribution is that of
    entropy-aware sampling, for log-probs alone.
    """

    chunks: Sequence[Chunk]
    place: Place
    vocab_size: int
    temperature: float
    replays_routing: bool = False
    entropy: EntropyAware | None = None

    def statistics(self, micro_batch: MicroBatch, hidden: Tensor, *, with_entropy: bool) -> TokenStatistics:
        """Return statistics [N] at the micro-batch's targets from the last stage's `hidden` [N, H]. Collective over tp."""
        last = self.chunks[-1]
        model = last if isinstance(last, PolicyModel) else last.module
        assert isinstance(model, PolicyModel), "a policy is made of PolicyModels"
        sampled: dict[str, Any] = {"temperature": self.temperature, "vocab_size": self.vocab_size}
        if self.entropy is not None:
            return model.token_statistics(hidden, targets=micro_batch.targets, **sampled, entropy=self.entropy)
        sampled |= {"candidates": micro_batch.candidates, "with_entropy": with_entropy}
        return model.token_statistics(hidden, targets=micro_batch.targets, **sampled)


def _run(
    chunks: Sequence[Chunk],
    micro_batches: Sequence[MicroBatch],
    finish: Callable[..., Any],
    *,
    everywhere: bool = False,
    replay: bool = False,
    router_step: RouterStep | None = None,
    **options: Any,
) -> list[Any]:
    """Run the schedule; on the last stage `finish(number, output)` ends each micro-batch, at its positions or `everywhere`."""

    def forward_step(iterator: Iterator[tuple[int, MicroBatch]], chunk: Chunk) -> tuple[Tensor, Callable[..., Any]]:
        number, micro_batch = next(iterator)
        input_ids, position_ids = micro_batch.input_ids, micro_batch.position_ids
        packed = replace(micro_batch.packed, routing=Routing(micro_batch.routed, replay=replay, step=router_step))
        if everywhere:
            output = chunk(input_ids, position_ids, None, packed_seq_params=packed)
        else:
            output = forward_selected(chunk, input_ids, position_ids, packed, micro_batch.positions)
        return output, partial(finish, number)

    # The interleaved schedule wants an iterator for each model chunk, the others a lone one.
    iterators, interleaved = [enumerate(micro_batches) for _ in chunks], len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if interleaved else iterators[0],
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=max(micro_batch.input_ids.shape[1] for micro_batch in micro_batches),
        micro_batch_size=1,
        **options,
    )


def _look(
    chunks: Sequence[Chunk],
    micro_batches: Sequence[MicroBatch],
    finish: Callable[[MicroBatch, Tensor], Any],
    *,
    everywhere: bool = False,
    replay: bool = False,
) -> list[Any]:
    """Return `finish(micro_batch, output)` of each on the last stage, without gradients; an empty list on the others."""

    def collect(number: int, output: Tensor, non_loss_data: bool = True) -> Any:
        return finish(micro_batches[number], output)

    for chunk in chunks:
        chunk.eval()
    reports = _run(chunks, micro_batches, collect, everywhere=everywhere, replay=replay, forward_only=True, collect_non_loss_data=True)
    for chunk in chunks:
        chunk.train()
    return reports


def _by_token(parts: Sequence[tuple[Ints, Tensor]], place: Place, *, num_tokens: int, device: torch.device) -> Floats:
    """Return numbers [T] float32, else 0, from the last stage's `parts`, (positions, numbers), on all tp, cp and pp ranks."""
    result = torch.zeros(num_tokens, device=device)
    for index, numbers in parts:
        result[to_device(index, device)] = numbers.float()
    return np.asarray(from_last_stage(sum_over_context_parallel(result, place), place).cpu().numpy(), dtype=np.float32)


@torch.no_grad()
def statistics(policy: Policy, micro_batches: Sequence[MicroBatch], *, with_entropy: bool = True) -> list[TokenStatistics]:
    """Return statistics [N] of each micro-batch on the last stage, without gradients; an empty list on the others."""
    finish = partial(policy.statistics, with_entropy=with_entropy)
    return _look(policy.chunks, micro_batches, finish, replay=policy.replays_routing)


@torch.no_grad()
def log_probs(policy: Policy, micro_batches: Sequence[MicroBatch], *, num_tokens: int) -> Floats:
    """Return log-probs [T] float32, nats, of the targets among `num_tokens` tokens, else 0; equal on tp, cp and pp ranks."""
    reports = statistics(policy, micro_batches, with_entropy=False)
    here = micro_batches if policy.place.last_stage else []
    parts = [(micro_batch.target_index, report.log_prob) for micro_batch, report in zip(here, reports, strict=True)]
    return _by_token(parts, policy.place, num_tokens=num_tokens, device=micro_batches[0].input_ids.device)


@torch.no_grad()
def state_values(chunks: Sequence[Chunk], micro_batches: Sequence[MicroBatch], place: Place, *, num_tokens: int) -> Floats:
    """Return a critic's values [T] float32 behind each token of the micro-batches, else 0; equal on tp, cp and pp ranks."""
    reports = _look(chunks, micro_batches, lambda _, values: values.flatten(), everywhere=True)
    parts = []
    for micro_batch, values in zip(micro_batches if place.last_stage else [], reports, strict=True):
        held = np.flatnonzero(micro_batch.token_index >= 0)
        parts.append((micro_batch.token_index[held], values[to_device(held, values.device)]))
    return _by_token(parts, place, num_tokens=num_tokens, device=micro_batches[0].input_ids.device)


def forward_backward(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Sequence[MicroBatch],
    loss: LossFunction,
    *,
    replay: bool = False,
    router_step: RouterStep | None = None,
) -> list[Any]:
    """Compute gradients of the sum of `loss` over all micro-batches and dp and cp ranks, in the gradient buffers.

    With `replay` routers take recorded experts; their counts and own losses are those of
    `router_step`. Returns the reports of `loss` on the last stage; an empty list on the others.
    """
    no_tokens = torch.zeros((), dtype=torch.int, device=micro_batches[0].input_ids.device)

    def finish(number: int, output: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        value, report = loss(number, output)
        if not len(micro_batches[number].positions):
            # Without predictions the loss must still depend on the model, so this rank joins every collective of the backward.
            value = value + output.sum()
        # megatron would divide by a token count; a count of zero leaves the sum alone: the share is already weighted.
        return value, no_tokens, report

    for chunk in chunks:
        chunk.zero_grad_buffer()
    return _run(chunks, micro_batches, finish, replay=replay, router_step=router_step, forward_only=False)
