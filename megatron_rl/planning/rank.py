"""Memory needs of a layout's ranks, one for each kind of pipeline stage.

Measured on the real model, gradient buffers and optimizer, and on a forward and backward pass.

Legend: T tokens of a micro-batch on this rank, n tokens seen by a router, E experts, H hidden
channels.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_rl.data.batch import batch_from_sequences
from megatron_rl.data.packing import sequence_multiple
from megatron_rl.models.build import PolicyModel, TrainedModel, forward_selected
from megatron_rl.models.experts.moe_fields import has_experts
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.planning.measurement import Job
from megatron_rl.planning.meta import rank_without_memory
from megatron_rl.planning.records import Collective
from megatron_rl.planning.tracking import MemoryTracker
from megatron_rl.system.device import local_device
from megatron_rl.training.critic import critic_optimizer
from megatron_rl.training.micro_batch import MicroBatch, make_micro_batch
from megatron_rl.training.offload import ModelMemory, page_locked_bytes, piece_sizes
from megatron_rl.training.passes import Policy
from megatron_rl.training.teacher import build_teacher, teacher_config, teacher_tensors
from megatron_rl.training.topology import Place, Topology
from megatron_rl.training.trained_model import build_trained_model, model_dtype
from megatron_rl.types import TrainBatch


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """One virtual stage: `held` bytes from a micro-batch's forward to the backward, `output` of them sent on.

    Besides, the backward pass needs up to `backward`, the head with statistics up to `head`.
    """

    num_layers: int
    held: int
    output: int
    backward: int
    head: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's bytes, for the policy or a critic.

    `reference` is a copy of the parameters and `away` everything that the rank can put away, both
    in page-locked host memory. `update` is the optimizer step's temporary need.
    """

    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    reference: int
    away: int
    chunks: tuple[ChunkMemory, ...]
    update: int
    largest_collective: Collective

    @property
    def num_layers(self) -> int:
        """Number of layers on this rank."""
        return sum(chunk.num_layers for chunk in self.chunks)

    @property
    def backward(self) -> int:
        """Peak of the backward pass of a chunk, besides held memory."""
        return max(chunk.backward for chunk in self.chunks)

    @property
    def head(self) -> int:
        """Peak of the language model head, besides held memory; 0 before the last stage."""
        return max(chunk.head for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TeacherMemory:
    """One rank's bytes for a teacher: on the GPU while asked, and `resting` in page-locked host memory."""

    weights: int
    forward: int
    resting: int


Memory = TypeVar("Memory", RankMemory, TeacherMemory)


def measure_stages(job: Job, *, critic: bool) -> tuple[RankMemory, ...]:
    """Return the memory of each stage's first rank, of the policy or a `critic`. Raises UserError for refusals."""
    topology, dtype = job.training.topology, model_dtype(job.model, local_device())
    config = transformer_config(job.spec, topology=topology, dtype=dtype, overrides=job.model.megatron, attention="torch")
    return _each_stage(config, job, partial(_measure_rank, job, critic=critic))


def measure_teacher_stages(job: Job, teacher: ModelSpec) -> tuple[TeacherMemory, ...]:
    """Return the same for the teacher. Raises UserError also where it does not fit the policy's layout."""
    dtype = model_dtype(job.model, local_device())
    config = teacher_config(job.model, job.training.topology, teacher, dtype=dtype, attention="torch")
    return _each_stage(config, job, partial(_measure_teacher, job, teacher))


def _each_stage(config: TransformerConfig, job: Job, measure: Callable[[Topology, TrainBatch], Memory]) -> tuple[Memory, ...]:
    """Return the result of `measure` on the first rank of each stage; equal stages are built once."""
    topology = Topology.of(job.training.topology)
    batch = full_batch(topology, longest=job.longest, budget=job.training.max_tokens_per_micro_batch)
    measured: dict[object, Memory] = {}
    stages = []
    for stage in range(topology.pp):
        kind = (stage == 0, stage == topology.pp - 1, _layers(config, topology, stage))
        if kind not in measured:
            with rank_without_memory(topology, rank=topology.first_rank(stage), fused=job.fused):
                measured[kind] = measure(topology, batch)
        stages.append(measured[kind])
    return tuple(stages)


def _layers(config: TransformerConfig, topology: Topology, stage: int) -> tuple[tuple[bool, ...], ...]:
    """Return True for each layer with experts, for each chunk of a stage."""
    layers = []
    for chunk in [None] if topology.vpp == 1 else range(topology.vpp):
        first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
        count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
        layers.append(tuple(has_experts(config, layer) for layer in range(first, first + count)))
    return tuple(layers)


def full_batch(topology: Topology, *, longest: int, budget: int) -> TrainBatch:
    """Return the largest micro-batch: sequences of `longest` tokens, all but the first trainable, within `budget`."""
    unit = sequence_multiple(topology.cp)
    longest = -(-longest // unit) * unit
    whole, rest = divmod(max(longest, budget * topology.cp), longest)
    lengths = [longest] * whole + [rest // unit * unit] * (rest >= 2 * unit)
    return batch_from_sequences(
        prompts=[np.zeros(1, np.int64)] * len(lengths),
        responses=[np.zeros(length - 1, np.int64) for length in lengths],
        rewards=np.zeros(len(lengths)),
    )


def _measure_rank(job: Job, topology: Topology, batch: TrainBatch, *, critic: bool) -> RankMemory:
    """Build this process's rank, and run `batch`, one micro-batch, through each chunk."""
    optimizer = critic_optimizer(job.training) if critic else job.training.optimizer
    model = build_trained_model(
        job.model,
        job.training,
        job.spec,
        device=local_device(),
        optimizer=optimizer,
        total_steps=job.total_steps,
        with_value_head=critic,
        with_weights=False,
    )
    memory = ModelMemory(model)
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    expert_gradients = _balance_experts(model.chunks, fused=job.fused)
    policy = Policy(model.chunks, Place.here(), vocab_size=job.spec.vocab_size, temperature=1.0)
    micro_batch = _micro_batch(batch, topology, policy.place, on=parameters[0].device)
    with MemoryTracker() as tracker:
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        chunks = [_run_chunk(chunk, None if critic else policy, micro_batch, tracker) for chunk in model.chunks]
        update = _update(model, tracker, fused=job.fused)
    return RankMemory(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        parameters=memory.num_bytes("parameters"),
        gradients=memory.num_bytes("gradients"),
        optimizer=memory.num_bytes("optimizer"),
        reference=page_locked_bytes(piece_sizes(sum(parameter.nbytes for parameter in parameters))),
        away=memory.host_bytes(),
        chunks=tuple(dataclasses.replace(chunk, backward=chunk.backward + expert_gradients) for chunk in chunks),
        update=update,
        largest_collective=tracker.largest_collective,
    )


def _measure_teacher(job: Job, teacher: ModelSpec, topology: Topology, batch: TrainBatch) -> TeacherMemory:
    """Build this process's rank of the teacher, and ask for the log-probs of `batch`."""
    chunks = build_teacher(job.model, job.training.topology, teacher, device=local_device())
    weights = sum(tensor.nbytes for tensor in teacher_tensors(chunks))
    _balance_experts(chunks, fused=job.fused)
    policy = Policy(chunks, Place.here(), vocab_size=teacher.vocab_size, temperature=1.0)
    micro_batch = _micro_batch(batch, topology, policy.place, on=next(chunks[0].parameters()).device)
    with MemoryTracker() as tracker, torch.no_grad():
        forward = max(_ask_chunk(chunk, policy, micro_batch, tracker) for chunk in chunks)
    return TeacherMemory(weights=weights, forward=forward, resting=page_locked_bytes(piece_sizes(weights)))


def _ask_chunk(chunk: PolicyModel, policy: Policy, micro_batch: MicroBatch, tracker: MemoryTracker) -> int:
    """Return the peak bytes of a chunk's forward pass without gradients, log-probs behind the last included."""
    before = tracker.live
    tracker.reset_peak()
    chunk.eval()
    outputs: list[Tensor] = []
    # The schedule holds the output of a micro-batch until the end of the next one.
    for _ in range(2):
        if not chunk.pre_process:
            chunk.set_input_tensor(_received(chunk, micro_batch))
        outputs.append(forward_selected(chunk, micro_batch.input_ids, micro_batch.position_ids, micro_batch.packed, micro_batch.positions))
        if chunk.post_process:
            policy.statistics(micro_batch, outputs[-1], with_entropy=False)
    chunk.set_input_tensor(None)
    return tracker.peak - before


def _micro_batch(batch: TrainBatch, topology: Topology, place: Place, *, on: torch.device) -> MicroBatch:
    """Return the whole batch as one micro-batch; targets are real for the statistics."""
    micro_batch = make_micro_batch(batch, np.arange(batch.num_sequences), topology=topology, place=place, device=on)
    assert micro_batch.packed.plan, "made now, so that its index arrays are not counted as activations of the first layer"
    return dataclasses.replace(micro_batch, targets=torch.zeros(len(micro_batch.positions), dtype=torch.int64))


def _balance_experts(chunks: Sequence[torch.nn.Module], *, fused: bool) -> int:
    """Give all experts equally many tokens, and return the extra bytes of weight gradients if in one product."""
    others = 0
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, TopKRouter):
            module.register_forward_hook(_balance)
        elif isinstance(module, SequentialMLP) and fused:
            first = next(module.local_experts[0].parameters())
            others = max(others, (module.num_local_experts - 1) * first.numel() * first.element_size())
            module.num_local_experts = 1
    return others


def _balance(router: torch.nn.Module, arguments: tuple[Tensor, ...], result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Give every expert equally many tokens: weights [n, E] stay, the routing [n, E] is of real numbers."""
    assert isinstance(router, TopKRouter), "the hook is put on routers"
    weights, _ = result
    num_tokens, num_experts = weights.shape
    taken = (torch.arange(num_tokens)[:, None] * router.topk + torch.arange(router.topk)) % num_experts
    chosen = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    return weights, chosen.scatter_(1, taken, True)


def _run_chunk(chunk: DistributedDataParallel, policy: Policy | None, micro_batch: MicroBatch, tracker: MemoryTracker) -> ChunkMemory:
    """Run a forward and a backward pass of one chunk, of a `policy` or of a critic."""
    model = chunk.module
    before = tracker.live
    if not model.pre_process:
        model.set_input_tensor(_received(model, micro_batch))
    output = forward_selected(chunk, micro_batch.input_ids, micro_batch.position_ids, micro_batch.packed, micro_batch.positions)
    held = tracker.live - before
    gradient, head = torch.empty_like(output), 0
    if model.post_process and policy is not None:
        gradient, head = _run_head(output, policy, micro_batch, tracker)
    tracker.reset_peak()
    torch.autograd.backward(output, gradient)
    model.set_input_tensor(None)
    return ChunkMemory(
        num_layers=len(model.decoder.layers),
        held=held,
        output=output.numel() * output.element_size(),
        backward=tracker.peak - before - held,
        head=head,
    )


def _run_head(output: Tensor, policy: Policy, micro_batch: MicroBatch, tracker: MemoryTracker) -> tuple[Tensor, int]:
    """Return the gradient of the model's `output` [N, H], and the bytes taken by head and statistics."""
    before = tracker.live
    tracker.reset_peak()
    leaf = output.detach().requires_grad_()
    statistics = policy.statistics(micro_batch, leaf, with_entropy=True)
    assert statistics.entropy is not None, "it was asked for"
    (statistics.log_prob.sum() + statistics.entropy.sum()).backward()
    assert leaf.grad is not None, "the statistics depend on the output"
    return leaf.grad, tracker.peak - before


def _received(model: PolicyModel, micro_batch: MicroBatch) -> Tensor:
    """Return hidden states [T, 1, H] as sent by the stage before, of a part of T by sequence parallelism."""
    config = model.config
    num_tokens = micro_batch.input_ids.shape[1] // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    like = next(model.parameters())
    return torch.empty(num_tokens, 1, config.hidden_size, dtype=config.pipeline_dtype, device=like.device, requires_grad=True)


def _update(model: TrainedModel, tracker: MemoryTracker, *, fused: bool) -> int:
    """Sum the gradients and step the optimizer; return the temporary bytes, none of a `fused` step."""
    before = tracker.live
    tracker.reset_peak()
    finalize_model_grads(list(model.chunks), None)
    if not fused:
        model.optimizer.prepare_grads()
        model.optimizer.step_with_ready_grads()
    return tracker.peak - before
