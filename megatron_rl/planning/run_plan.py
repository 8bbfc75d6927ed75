"""The plan of a run: real ranks measured without memory, plus constants for a real GPU."""

from collections.abc import Sequence
from math import prod

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.derived import dtype_name
from megatron_rl.config.gpus import GIB, Gpu
from megatron_rl.config.settings import ModelSettings, RolloutSettings, Settings, TrainingSettings
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import Attention, attention_name, resolve_attention
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.unavailable_fields import without_kernels
from megatron_rl.models.weight_table import tensor_shapes
from megatron_rl.planning.measurement import Answer, Job, measure
from megatron_rl.planning.rank import RankMemory
from megatron_rl.planning.records import EngineMemory, RunPlan, StageMemory
from megatron_rl.runtime.placement import Needs, nodes_needed
from megatron_rl.training.model_check import check_layout
from megatron_rl.training.objective_checks import teacher_path
from megatron_rl.training.teacher import read_teacher_spec
from megatron_rl.training.topology import Topology
from megatron_rl.weights.transport import BUCKET_BYTES, exported_specs

CONTEXT_BYTES = int(2.5 * GIB)
"""Usual CUDA context, cuBLAS workspaces and NCCL buffers of a training rank; not measured since communicators come at first use."""
FRAGMENTATION = 0.05
"""Share of activations, or of a larger teacher, unusable by the allocator."""
ASLEEP_BYTES = 2 * GIB
"""Memory of an engine on a GPU without weights and cache: CUDA context, CUDA graphs, NCCL."""
RANK_HOST_BYTES, ENGINE_HOST_BYTES = 6 * GIB, 10 * GIB
"""Main memory of a rank and of an engine before any weight: code, the CUDA context's share, pinned buffers."""
MOST_TOKENS = 2**22
"""Tokens of the largest measured micro-batch: index arrays are real, and a GPU holds far fewer tokens."""
_FUSED = {"bias_activation_fusion": True}
"""Transformer Engine's effects on sizes on a GPU, besides attention and norms, which count as fused."""
_WEIGHT_BYTES = 2
_CACHE_BYTES = {"auto": 2, "bfloat16": 2, "bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}
# Room for activations and CUDA graphs on GPUs above 60 GiB, by SGLang's rule (server_args' memory settings).
_LEFT_BYTES = 10 * GIB
_LEFT_PER_GPU_BYTES = GIB // 8


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
    """Call `plan_run` for several settings of one model in one process; refused settings get a sentence."""
    plans: list[RunPlan | str] = []
    jobs: dict[int, tuple[Job, Attention]] = {}
    for index, settings in enumerate(variants):
        try:
            _check_tokens(settings.training, longest=settings.longest_sequence)
            check_layout(Topology.of(settings.training.topology), spec, settings.model.megatron)
            attention = planned_attention(settings.model, spec, gpu, cp=settings.training.topology.cp)
            jobs[index] = make_job(settings, spec, attention=attention), attention
            plans.append("")
        except UserError as error:
            plans.append(str(error))
    answers = measure([job for job, _ in jobs.values()]) if jobs else []
    for (index, (job, attention)), answer in zip(jobs.items(), answers, strict=True):
        if answer.refused is not None:
            plans[index] = answer.refused
            continue
        settings = variants[index]
        name = attention_name(attention, settings.model.megatron)
        plans[index] = _assemble(settings, spec, job, answer, name, gpu=gpu, num_nodes=num_nodes)
    return plans


def make_job(settings: Settings, spec: ModelSpec, *, attention: Attention | None) -> Job:
    """Return the measurement of a run's ranks on GPUs with this `attention`, or with None on the CPU."""
    return Job(
        model=settings.model if attention is None else on_gpu(settings.model, attention),
        training=settings.training,
        spec=spec,
        teacher=teacher_spec(settings.objective, settings.model),
        has_critic=settings.objective.has_critic,
        longest=settings.longest_sequence,
        num_sequences=settings.sequences_per_optimizer_step,
        total_steps=settings.optimizer_steps,
        fused=attention is not None,
    )


def teacher_spec(objective: Objective, model: ModelSettings) -> ModelSpec | None:
    """Return the distilled teacher's architecture from its config.json; None without a teacher. Raises UserError."""
    return read_teacher_spec(teacher_path(objective, model)) if objective.distillation_coef else None


def planned_attention(model: ModelSettings, spec: ModelSpec, gpu: Gpu, *, cp: int) -> Attention:
    """Return the attention of a model on such GPUs with Transformer Engine. Raises UserError for an impossible one."""
    return resolve_attention(model.attention, spec, overrides=model.megatron, cp=cp, capability=gpu.capability, installed=True)


def on_gpu(model: ModelSettings, attention: Attention) -> ModelSettings:
    """Return the model's settings on a GPU: bf16 unless another dtype is set, and this attention's kernels."""
    fields = model.megatron if attention == "torch" else {**_FUSED, **without_kernels(model.megatron)}
    return model.model_copy(update={"dtype": dtype_name(model, device_kind="cuda"), "attention": "torch", "megatron": fields})


def _check_tokens(training: TrainingSettings, *, longest: int) -> None:
    tokens, cp = _tokens(training, longest), training.topology.cp
    if tokens * cp > MOST_TOKENS:
        raise UserError(
            f"a micro-batch of {tokens} tokens × cp {cp} = {tokens * cp} tokens is more than the {MOST_TOKENS} that a plan measures; lower "
            "training.max_tokens_per_micro_batch, data.max_prompt_tokens or rollout.sampling.max_response_tokens"
        )


def _tokens(training: TrainingSettings, longest: int) -> int:
    return max(training.max_tokens_per_micro_batch, -(-longest // training.topology.cp))


def _assemble(settings: Settings, spec: ModelSpec, job: Job, answer: Answer, attention: str, *, gpu: Gpu, num_nodes: int | None) -> RunPlan:
    """Return the plan of measured ranks."""
    runtime, topology = settings.runtime, Topology.of(job.training.topology)
    # While a colocated engine generates, and while a thread writes a checkpoint, whose copy's memory stays for the
    # next one. An upper bound, because another copy's rank writes a part.
    copies, keeps = runtime.colocate + (settings.run.save_interval > 0), settings.training.keeps_reference(settings.objective)
    stages = stage_memories(job, answer, frees_outputs=True, host_copies=copies, keeps_reference=keeps)
    rollout = None if settings.supervised else settings.rollout
    needs = Needs.of(settings.training.topology, rollout, colocate=runtime.colocate, device_kind="cuda")
    engine, handover, on_engines = None, 0, 0
    # Main memory of the fullest node.
    per_node = min(runtime.cluster.gpus_per_node or gpu.per_node, gpu.per_node)
    on_ranks = max(stage.host for stage in stages) * min(per_node, topology.num_ranks)
    if settings.weights.delta:
        on_ranks += sum(tensor.num_bytes for tensor in exported_specs(spec, dtype=dtype_name(job.model, device_kind="cuda")))
    if rollout is not None:
        engine = plan_engine(rollout, spec, gpu, longest=job.longest, shared_with=CONTEXT_BYTES if needs.colocated else 0)
        on_engines = max(1, per_node * rollout.nodes_per_engine // engine.num_gpus) * ENGINE_HOST_BYTES
    if needs.colocated and engine is not None:
        # Ranks and engines share the buckets in a sync.
        buckets = shared_buckets(job.model, spec) if settings.weight_transport == "ipc" else 0
        handover = max(stage.parameters for stage in stages) + engine.weights + CONTEXT_BYTES + ASLEEP_BYTES + buckets
    return RunPlan(
        gpu=gpu,
        layout=str(topology),
        attention=attention,
        tokens=_tokens(job.training, job.longest),
        num_nodes=num_nodes or nodes_needed(needs, slots_per_node=per_node),
        stages=stages,
        engine=engine,
        colocated=needs.colocated,
        asleep=ASLEEP_BYTES if needs.colocated else 0,
        handover=handover,
        host_per_node=on_ranks + on_engines if needs.colocated else max(on_ranks, on_engines),
    )


def shared_buckets(model: ModelSettings, spec: ModelSpec) -> int:
    """Return the bytes of weight buckets filled by a rank and copied by an engine at the same time.

    One tensor can be larger: an embedding, or a stack of experts, built beside its parts.
    """
    largest = max(tensor.num_bytes for tensor in exported_specs(spec, dtype=dtype_name(model, device_kind="cuda")))
    return 2 * max(BUCKET_BYTES, largest) + (2 * largest if spec.names.stacked_experts else 0)


def stage_memories(
    job: Job, answer: Answer, *, frees_outputs: bool, host_copies: int = 0, keeps_reference: bool = False
) -> tuple[StageMemory, ...]:
    """Return the memory of every pipeline stage, critic included.

    A critic's state stays beside the policy's, its passes come after the policy's. A teacher's
    passes come before both. `frees_outputs` says that a stage drops sent outputs, as megatron-core
    does on GPUs. Main memory holds `host_copies` of the state, and a reference.
    """
    topology, stages = Topology.of(job.training.topology), []
    count = count_micro_batches(job.training, longest=job.longest, num_sequences=job.num_sequences)
    for number, policy in enumerate(answer.policy):
        models, teachers = [policy, *answer.critic[number : number + 1]], answer.teacher[number : number + 1]
        activations, in_flight = max(_activations(model, topology, count, stage=number, frees_outputs=frees_outputs) for model in models)
        working = max(max(model.backward for model in models), max(model.update for model in models) - activations, 0)
        asked = sum(teacher.weights + teacher.forward for teacher in teachers)
        resting = sum(teacher.resting for teacher in teachers)
        stages.append(
            StageMemory(
                stage=number,
                num_layers=policy.num_layers,
                num_parameters=policy.num_parameters,
                in_flight=in_flight,
                parameters=sum(model.parameters for model in models),
                gradients=sum(model.gradients for model in models),
                optimizer=sum(model.optimizer for model in models),
                activations=activations,
                logits=policy.head,
                working=working,
                teacher=asked,
                reserved=CONTEXT_BYTES + int(FRAGMENTATION * max(activations, asked)),
                host=RANK_HOST_BYTES + keeps_reference * policy.reference + host_copies * sum(model.away for model in models) + resting,
                largest_collective=max((model.largest_collective for model in models), key=lambda collective: collective.num_bytes),
            )
        )
    return tuple(stages)


def _activations(model: RankMemory, topology: Topology, num_micro_batches: int, *, stage: int, frees_outputs: bool) -> tuple[int, float]:
    """Return the bytes and the number of all micro-batches in flight on a stage."""
    last = stage == topology.pp - 1
    held = [
        chunk.held - (chunk.output if frees_outputs and not (last and index == len(model.chunks) - 1) else 0)
        for index, chunk in enumerate(model.chunks)
    ]
    return most_held(held, stage=stage, pp=topology.pp, num_micro_batches=num_micro_batches)


def count_micro_batches(training: TrainingSettings, *, longest: int, num_sequences: int) -> int:
    """Count the micro-batches of `num_sequences` sequences of `longest` tokens on a data-parallel rank."""
    topology = training.topology
    together = max(1, training.max_tokens_per_micro_batch * topology.cp // longest)
    sequences = -(-num_sequences // topology.dp)
    count = -(-sequences // together)
    return -(-count // topology.pp) * topology.pp if topology.vpp > 1 else count


def most_held(held: Sequence[int], *, stage: int, pp: int, num_micro_batches: int) -> tuple[int, float]:
    """Return the peak bytes held on pipeline rank `stage`, and the held micro-batches.

    1F1B (Narayanan et al. 2021, section 2.2) lets stage s of p run p - s forwards before its first
    backward. Interleaved, each of v chunks on a rank counts for itself (section 2.2.2). The number
    of micro-batches is over all chunks.

    `held` [vpp] are bytes of one micro-batch in each chunk. The schedule has `num_micro_batches`,
    for interleaved chunks a multiple of `pp`.
    """
    vpp, behind = len(held), pp - stage - 1
    forwards, ahead = [0] * num_micro_batches, behind
    if vpp > 1:
        assert num_micro_batches % pp == 0, f"{num_micro_batches} micro-batches for interleaved chunks of {pp} ranks"
        # `pp` micro-batches in a chunk, then in the next.
        forwards = [chunk for _ in range(num_micro_batches // pp) for chunk in range(vpp) for _ in range(pp)]
        ahead = 2 * behind + (vpp - 1) * pp
    backwards, ahead = [vpp - 1 - chunk for chunk in forwards], min(ahead, len(forwards))
    now = most = sum(held[chunk] for chunk in forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        now += held[forward]
        most = max(most, now)
        now -= held[backward]
    return most, most / max(1, sum(held))


def plan_engine(rollout: RolloutSettings, spec: ModelSpec, gpu: Gpu, *, longest: int, shared_with: int) -> EngineMemory:
    """Return the memory of each GPU of an engine, from the architecture alone.

    Matrices are split over the engine's GPUs and one-dimensional weights are on each. Attention's
    keys and values are split, a latent is on each GPU. Others always take `shared_with` bytes.
    """
    arguments, tp = rollout.sglang, rollout.ranks_per_engine
    share = float(arguments.get("mem_fraction_static") or 1.0 - (_LEFT_BYTES + tp * _LEFT_PER_GPU_BYTES) / gpu.memory_bytes)
    shapes = [shape for _, shape in tensor_shapes(spec)]
    weights = _WEIGHT_BYTES * sum(-(-prod(shape) // tp) if len(shape) > 1 else prod(shape) for shape in shapes)
    usable = int(gpu.memory_bytes * share)
    attention_tp = max(1, tp // int(arguments.get("dp_size", 1))) if arguments.get("enable_dp_attention") else tp
    per_token = _token_numbers(spec, tp=attention_tp) * _CACHE_BYTES.get(str(arguments.get("kv_cache_dtype", "auto")), 2)
    cache = max(0, usable - weights - shared_with)
    return EngineMemory(
        num_gpus=tp,
        num_engines=rollout.num_engines,
        weights=weights,
        cache=cache,
        reserved=gpu.memory_bytes - usable,
        bytes_per_token=per_token,
        cache_tokens=cache // per_token,
        longest_sequence=longest,
    )


def _token_numbers(spec: ModelSpec, *, tp: int) -> int:
    """Return the cached numbers of one token on one GPU: its heads' keys and values, or the latent."""
    if spec.mla is not None:
        return spec.num_layers * (spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim)
    heads = max(1, -(-spec.num_kv_heads // tp))
    return spec.num_layers * heads * 2 * spec.head_dim
