"""The plan of a run: real ranks measured without memory, plus constants for a real GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.config.derived import derive, dtype_name
from megatron_rl.config.gpus import GIB, Gpu
from megatron_rl.config.settings import Settings
from megatron_rl.device import quiet_megatron_imports
from megatron_rl.errors import UserError
from megatron_rl.planning.engine_memory import plan_engine
from megatron_rl.planning.measurement import Answer, Job, measure
from megatron_rl.planning.records import EngineMemory, RunPlan, StageMemory
from megatron_rl.weights.bucket import BUCKET_BYTES, exported_specs

with quiet_megatron_imports():
    from megatron_rl.models.attention.attention_fields import Attention
    from megatron_rl.models.megatron_config import attention_name, resolve_attention
    from megatron_rl.models.model_spec import ModelSpec
    from megatron_rl.models.unavailable_fields import without_kernels
    from megatron_rl.training.model_check import check_layout
    from megatron_rl.training.objective_checks import teacher_path
    from megatron_rl.training.teacher import read_teacher_spec
    from megatron_rl.training.topology import Topology

if TYPE_CHECKING:
    from megatron_rl.planning.rank import RankMemory

CONTEXT_BYTES = int(2.5 * GIB)
"""Usual CUDA context, cuBLAS workspaces and NCCL buffers of a training rank; not measured."""
FRAGMENTATION = 0.05
"""Share of activations, or of a larger teacher, unusable by the allocator."""
ASLEEP_BYTES = 2 * GIB
"""Memory of an engine on a GPU without weights and cache: CUDA context, CUDA graphs, NCCL."""
RANK_HOST_BYTES, ENGINE_HOST_BYTES = 6 * GIB, 10 * GIB
"""Main memory of a rank and of an engine before any weight.

Imported code, the CUDA context's share, pinned buffers.
"""

MOST_TOKENS = 2**22
"""Tokens of the largest measured micro-batch.

Index arrays are real, and a GPU holds far fewer tokens.
"""

_FUSED = {"bias_activation_fusion": True}
"""Transformer Engine's effects on sizes on a GPU.

Attention and norms count as its fused kernels.
"""


def plan_run(settings: Settings, spec: ModelSpec, *, gpu: Gpu, num_nodes: int | None) -> RunPlan:
    """Return the memory on `gpu`s for `settings` and a model of `spec`, without weights or a GPU.

    `num_nodes` None takes as many nodes as the run's GPUs need. One rank of each kind of pipeline
    stage is built on the meta device, in a separate process, for seconds. Experts take equally many
    tokens, micro-batches are full. Raises UserError for a layout refused by the model or
    megatron-core.
    """
    [plan] = plan_layouts([settings], spec, gpu=gpu, num_nodes=num_nodes)
    if isinstance(plan, str):
        raise UserError(plan)
    return plan


def plan_layouts(variants: Sequence[Settings], spec: ModelSpec, *, gpu: Gpu, num_nodes: int | None) -> list[RunPlan | str]:
    """Call `plan_run` for several settings of one model, one after the other in one process.

    Refused settings get a sentence.
    """
    refused = {index: sentence for index, settings in enumerate(variants) if (sentence := _refusal(settings, spec, gpu)) is not None}
    jobs = [
        Job(on_gpu(settings, planned_attention(settings, spec, gpu)), spec, fused=True, teacher=teacher_spec(settings))
        for index, settings in enumerate(variants)
        if index not in refused
    ]
    answers = iter(measure(jobs) if jobs else [])
    plans: list[RunPlan | str] = []
    for index, settings in enumerate(variants):
        answer = Answer(refused=refused[index]) if index in refused else next(answers)
        plans.append(answer.refused or assemble(settings, spec, answer, gpu=gpu, num_nodes=num_nodes))
    return plans


def teacher_spec(settings: Settings) -> ModelSpec | None:
    """Return the distilled teacher's architecture from its config.json; None without a teacher.

    Raises UserError.
    """
    return read_teacher_spec(teacher_path(settings.objective, settings.model)) if settings.objective.distillation_coef else None


def _refusal(settings: Settings, spec: ModelSpec, gpu: Gpu) -> str | None:
    """Return the reason against this model division or micro-batch size; None without one."""
    tokens, cp = _tokens(settings), settings.training.topology.cp
    if tokens * cp > MOST_TOKENS:
        return (
            f"a micro-batch of {tokens} tokens × cp {cp} = {tokens * cp} tokens is more than the {MOST_TOKENS} that a plan measures; lower "
            "training.max_tokens_per_micro_batch, data.max_prompt_tokens or rollout.sampling.max_response_tokens"
        )
    try:
        check_layout(Topology.of(settings.training.topology), spec, settings.model.megatron)
        planned_attention(settings, spec, gpu)
    except UserError as error:
        return str(error)
    return None


def planned_attention(settings: Settings, spec: ModelSpec, gpu: Gpu) -> Attention:
    """Return the attention of a model of `spec` on such GPUs with Transformer Engine.

    Raises UserError where the settings ask for an impossible attention.
    """
    model, cp = settings.model, settings.training.topology.cp
    return resolve_attention(model.attention, spec, overrides=model.megatron, cp=cp, capability=gpu.capability, installed=True)


def on_gpu(settings: Settings, attention: Attention) -> Settings:
    """Return the settings as seen by the ranks of a GPU.

    bf16 unless another dtype is set, and the kernels of this attention's layers.
    """
    model = settings.model
    dtype = dtype_name(model, device_kind="cuda")
    fields = model.megatron if attention == "torch" else {**_FUSED, **without_kernels(model.megatron)}
    return settings.model_copy(update={"model": model.model_copy(update={"dtype": dtype, "attention": "torch", "megatron": fields})})


def assemble(settings: Settings, spec: ModelSpec, answer: Answer, *, gpu: Gpu, num_nodes: int | None) -> RunPlan:
    """Return the plan of `settings` from measured ranks."""
    topology = Topology.of(settings.training.topology)
    stages = stage_memories(settings, answer, frees_outputs=True)
    colocated = settings.runtime.colocate and not settings.supervised
    engine = None if settings.supervised else plan_engine(settings, spec, gpu, shared_with=CONTEXT_BYTES if colocated else 0)
    per_node = min(settings.runtime.cluster.gpus_per_node or gpu.per_node, gpu.per_node)
    num_engine_gpus = 0 if engine is None or colocated else engine.num_engines * engine.num_gpus
    weights = max(stage.parameters for stage in stages) + (0 if engine is None else engine.weights)
    return RunPlan(
        gpu=gpu,
        layout=str(topology),
        attention=attention_name(planned_attention(settings, spec, gpu), settings.model.megatron),
        tokens=_tokens(settings),
        num_nodes=num_nodes or -(-(topology.num_ranks + num_engine_gpus) // per_node),
        stages=stages,
        engine=engine,
        colocated=colocated,
        asleep=ASLEEP_BYTES if colocated else 0,
        handover=weights + CONTEXT_BYTES + ASLEEP_BYTES + _shared_buckets(settings, spec) if colocated else 0,
        host_per_node=_host_bytes(stages, engine, topology, per_node=per_node, colocated=colocated),
    )


def _shared_buckets(settings: Settings, spec: ModelSpec) -> int:
    """Return the weight buckets filled by a rank and copied by an engine at the same time.

    Both see the same memory. One tensor can be larger than the bucket size: an embedding, or a
    stack of experts, built beside its parts.
    """
    if settings.weight_transport != "ipc":
        return 0
    largest = max(tensor.num_bytes for tensor in exported_specs(spec, dtype=dtype_name(settings.model, device_kind="cuda")))
    return 2 * max(BUCKET_BYTES, largest) + (2 * largest if spec.names.stacked_experts else 0)


def stage_memories(settings: Settings, answer: Answer, *, frees_outputs: bool) -> tuple[StageMemory, ...]:
    """Return the memory of every pipeline stage, critic included.

    A critic's state stays beside the policy's, its passes come after the policy's. A teacher's
    passes come before both. `frees_outputs` says that a stage drops sent outputs, as megatron-core
    does on GPUs.
    """
    topology = Topology.of(settings.training.topology)
    stages = []
    for number, policy in enumerate(answer.policy):
        models, teachers = [policy, *answer.critic[number : number + 1]], answer.teacher[number : number + 1]
        passes = [_activations(settings, model, topology, stage=number, frees_outputs=frees_outputs) for model in models]
        activations, in_flight = max(passes)
        working = max(max(model.backward for model in models), max(model.update for model in models) - activations, 0)
        asked = sum(teacher.weights + teacher.forward for teacher in teachers)
        stages.append(
            StageMemory(
                stage=number,
                num_layers=policy.num_layers,
                num_parameters=policy.num_parameters,
                stage_parameters=policy.stage_parameters,
                in_flight=in_flight,
                parameters=sum(model.parameters for model in models),
                gradients=sum(model.gradients for model in models),
                optimizer=sum(model.optimizer for model in models),
                activations=activations,
                logits=policy.head,
                working=working,
                teacher=asked,
                reserved=CONTEXT_BYTES + int(FRAGMENTATION * max(activations, asked)),
                host=_rank_host(settings, policy, models) + sum(teacher.resting for teacher in teachers),
                largest_collective=max((model.largest_collective for model in models), key=lambda collective: collective.num_bytes),
            )
        )
    return tuple(stages)


def _activations(settings: Settings, model: "RankMemory", topology: Topology, *, stage: int, frees_outputs: bool) -> tuple[int, float]:
    """Return the bytes and the number of all micro-batches in flight on a stage."""
    last = stage == topology.pp - 1
    held = [
        chunk.held - (chunk.output if frees_outputs and not (last and index == len(model.chunks) - 1) else 0)
        for index, chunk in enumerate(model.chunks)
    ]
    return most_held(held, stage=stage, pp=topology.pp, num_micro_batches=count_micro_batches(settings, topology))


def count_micro_batches(settings: Settings, topology: Topology) -> int:
    """Count the micro-batches of an optimizer step on a data-parallel rank.

    All sequences have the greatest length.
    """
    sequences = -(-derive(settings).sequences_per_optimizer_step // topology.dp)
    longest = settings.data.max_prompt_tokens + settings.rollout.sampling.max_response_tokens
    together = max(1, settings.training.max_tokens_per_micro_batch * topology.cp // longest)
    count = -(-sequences // together)
    return -(-count // topology.pp) * topology.pp if topology.vpp > 1 else count


def _tokens(settings: Settings) -> int:
    longest = settings.data.max_prompt_tokens + settings.rollout.sampling.max_response_tokens
    return max(settings.training.max_tokens_per_micro_batch, -(-longest // settings.training.topology.cp))


def _rank_host(settings: Settings, policy: "RankMemory", models: Sequence["RankMemory"]) -> int:
    """Return the main memory for a rank.

    Parts are the reference copy, weights and optimizer state while a colocated engine generates,
    and the copy for a checkpoint by a thread. The memory of the checkpoint's copy stays for the
    next one. This is an upper bound, because another copy's rank writes a part.
    """
    reference = policy.reference if settings.keeps_reference else 0
    state = sum(model.away for model in models)
    away = state if settings.runtime.colocate else 0
    written = state if settings.run.save_interval else 0
    return reference + away + written + RANK_HOST_BYTES


def _host_bytes(stages: Sequence[StageMemory], engine: EngineMemory | None, topology: Topology, *, per_node: int, colocated: bool) -> int:
    """Return the main memory of the fullest node: ranks and, where present, engines."""
    ranks = max(stage.host for stage in stages) * min(per_node, topology.num_ranks)
    if engine is None:
        return ranks
    engines = max(1, per_node // engine.num_gpus) * ENGINE_HOST_BYTES
    return ranks + engines if colocated else max(ranks, engines)


def most_held(held: Sequence[int], *, stage: int, pp: int, num_micro_batches: int) -> tuple[int, float]:
    """Return the peak bytes held on pipeline rank `stage`, and the held micro-batches.

    1F1B (Narayanan et al. 2021, section 2.2) lets stage s of p run p - s forwards before its first
    backward. Interleaved, each of v chunks on a rank counts for itself (section 2.2.2). The number
    of micro-batches is over all chunks.

    `held` [vpp] are bytes of one micro-batch in each chunk. The schedule has `num_micro_batches`,
    for interleaved chunks a multiple of `pp`.
    """
    forwards = _chunk_order(len(held), pp=pp, num_micro_batches=num_micro_batches)
    backwards = [len(held) - 1 - chunk for chunk in forwards]
    ahead = 2 * (pp - stage - 1) + (len(held) - 1) * pp if len(held) > 1 else pp - stage - 1
    ahead = min(ahead, len(forwards))
    now = most = sum(held[chunk] for chunk in forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        now += held[forward]
        most = max(most, now)
        now -= held[backward]
    return most, most / max(1, sum(held))


def _chunk_order(vpp: int, *, pp: int, num_micro_batches: int) -> list[int]:
    """Return the chunk of each forward: `pp` micro-batches in a chunk, then in the next."""
    if vpp == 1:
        return [0] * num_micro_batches
    assert num_micro_batches % pp == 0, f"{num_micro_batches} micro-batches for interleaved chunks of {pp} ranks"
    return [chunk for _ in range(num_micro_batches // pp) for chunk in range(vpp) for _ in range(pp)]
