"""Layouts of a number of GPUs that fit, best first.

Formulas give the cost and the memory of every combination of tp, pp, cp and ep. Then the cheapest
candidates that should fit are built. The cost is the time of one optimizer step by `step_time`, at
assumed rates of a GPU and with sequences of the greatest length. tp stays inside a node. Equal
costs are ordered by headroom. The cost ranks layouts; the cost is no forecast of a speed.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.decided import FULL_RECOMPUTE, with_values
from megatron_rl.config.gpus import GIB, Gpu
from megatron_rl.config.settings import Settings, TopologySettings, TrainingSettings
from megatron_rl.config.yaml_text import format_value
from megatron_rl.errors import UserError, counted
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.planning.records import RunPlan
from megatron_rl.planning.run_plan import CONTEXT_BYTES, plan_layouts, teacher_spec
from megatron_rl.planning.step_time import ModelSize, Rates, Step
from megatron_rl.training.model_check import check_layout
from megatron_rl.training.topology import Topology

_ASSUMED = Rates(products=4e14, attention=4e14, memory=2e12, node=3e11, network=4e10)
"""Rates of an H100, in a node and between nodes: round figures, not measured."""
_MARGIN = 1.2
_BUILT_AT_ONCE, _BUILT_AT_MOST = 4, 12


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout by its settings, the modelled seconds of a step and the estimated bytes on a GPU."""

    settings: Settings
    cost_s: float
    num_bytes: float


def best_layouts(
    settings: Settings,
    spec: ModelSpec,
    *,
    gpu: Gpu,
    num_gpus: int,
    keep: int = 3,
    advise: bool = True,
    say: Callable[[str], None] = lambda words: None,
) -> list[tuple[Settings, RunPlan]]:
    """Return up to `keep` fitting layouts of `num_gpus` Megatron ranks on `gpu`s, best first.

    `say` gets the names of layouts under construction. Raises UserError without a fitting layout,
    with `advise` with what would make the closest fit.
    """
    found = sorted(candidates(settings, spec, gpu=gpu, num_gpus=num_gpus), key=lambda candidate: candidate.cost_s)
    if not found:
        raise UserError(
            f"no layout of {counted(num_gpus, 'GPU')} divides this model's {counted(spec.num_layers, 'layer')} and "
            f"{counted(spec.num_heads, 'head')}; use another number"
        )
    ranks, fitting = counted(num_gpus, "rank"), list[tuple[Candidate, RunPlan]]()
    likely = [candidate for candidate in found if candidate.num_bytes <= _MARGIN * gpu.memory_bytes]
    for first in range(0, min(len(likely), _BUILT_AT_MOST), _BUILT_AT_ONCE):
        last = min(first + _BUILT_AT_ONCE, len(likely), _BUILT_AT_MOST)
        say(f"{ranks}: building layouts {first + 1}-{last} of {len(likely)} likely ones, of {len(found)} that divide the model")
        fitting += _fitting(likely[first : first + _BUILT_AT_ONCE], spec, gpu)
        if len(fitting) >= keep:
            break
    if not fitting:
        smallest = min(found, key=lambda candidate: candidate.num_bytes)
        say(f"{ranks}: building the smallest layout by estimate")
        fitting = _fitting([smallest], spec, gpu)
    if not fitting:
        advice = ""
        if advise:
            say(f"{ranks}: trying what would make that fit")
            advice = f"{remedy(smallest.settings, spec, gpu=gpu)}; or "
        raise UserError(
            f"no layout of {counted(num_gpus, 'GPU')} of type {gpu.name} fits; by estimate the smallest, "
            f"{Topology.of(smallest.settings.training.topology)}, needs {smallest.num_bytes / GIB:.1f} GiB of "
            f"{gpu.memory_bytes / GIB:.1f}; {advice}use more GPUs"
        )
    best = sorted(fitting, key=lambda found: (found[0].cost_s, found[1].peak))
    return [(candidate.settings, plan) for candidate, plan in best[:keep]]


def _fitting(built: Sequence[Candidate], spec: ModelSpec, gpu: Gpu) -> list[tuple[Candidate, RunPlan]]:
    """Return the layouts whose trainers fit on GPUs, with their plans."""
    plans = plan_layouts([candidate.settings for candidate in built], spec, gpu=gpu, num_nodes=None)
    found = zip(built, plans, strict=True)
    return [(candidate, plan) for candidate, plan in found if not isinstance(plan, str) and plan.peak <= gpu.memory_bytes]


def candidates(settings: Settings, spec: ModelSpec, *, gpu: Gpu, num_gpus: int) -> Iterator[Candidate]:
    """Yield every valid layout of `num_gpus` ranks, without and with full recompute."""
    size, teacher = ModelSize.of(spec), teacher_spec(settings.objective, settings.model)
    taught = None if teacher is None else ModelSize.of(teacher)
    longest, num_sequences = settings.longest_sequence, settings.sequences_per_optimizer_step
    recomputes = [settings.model.megatron]
    if "recompute_granularity" not in settings.model.megatron:
        recomputes.append({**settings.model.megatron, **FULL_RECOMPUTE})
    for topology in _topologies(spec, gpu=gpu, num_gpus=num_gpus):
        for megatron in recomputes:
            one = with_values(settings, {"model.megatron": megatron, "training.topology": topology})
            try:
                placed = Topology.of(topology)
                check_layout(placed, spec, megatron)
                if teacher is not None:
                    check_layout(placed, teacher, megatron)
            except UserError:
                continue
            recompute = megatron.get("recompute_granularity")
            step = Step.of(one.training, size, recompute=recompute, longest=longest, num_sequences=num_sequences, per_node=gpu.per_node)
            tokens = max(one.training.max_tokens_per_micro_batch, longest / topology.cp)
            yield Candidate(one, sum(step.parts(_ASSUMED).values()), _rank_bytes(step, tokens=tokens, teacher=taught))


def _topologies(spec: ModelSpec, *, gpu: Gpu, num_gpus: int) -> Iterator[TopologySettings]:
    powers = [2**power for power in range(8)]
    expert_sizes = [1] if spec.moe is None else [size for size in powers if spec.moe.num_experts % size == 0]
    pipelines = [size for size in range(1, spec.num_layers + 1) if num_gpus % size == 0]
    for tp, pp, cp, ep in itertools.product([size for size in powers if size <= gpu.per_node], pipelines, powers, expert_sizes):
        if num_gpus % (tp * pp * cp) == 0 and num_gpus % (pp * ep) == 0:
            etp = None if ep == 1 else 1
            yield TopologySettings(num_ranks=num_gpus, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sequence_parallel=tp > 1)


def _rank_bytes(step: Step, *, tokens: float, teacher: ModelSize | None) -> float:
    """Estimate the bytes of a rank with micro-batches of `tokens`: bf16 weights, fp32 gradients, Adam."""
    size, topology = step.size, step.topology
    state = sum(count * (6 + 12 / (copies if step.distributed_optimizer else 1)) for count, copies in step.held())
    layer = tokens * size.kept * 2 / topology.tp
    boundary = tokens * size.spec.hidden_size * 2 / topology.tp
    # The first stage holds the micro-batches of all stages.
    layers = size.spec.num_layers / topology.pp * min(topology.pp, step.num_micro_batches)
    activations = layers * boundary + layer if step.recompute == "full" else layers * layer
    asked = 0.0 if teacher is None else 2 * sum(count for count, _ in dataclasses.replace(step, size=teacher).held())
    return state + max(activations, asked) + CONTEXT_BYTES


def remedy(settings: Settings, spec: ModelSpec, *, gpu: Gpu) -> str:
    """Return a sentence with the overrides, each tried on top of cheaper ones, that make the trainer fit on `gpu`s."""
    words, tried = list[str](), list[Settings]()
    for changes in _levers(settings.training, settings.model.megatron, spec, gpu, longest=settings.longest_sequence):
        settings = with_values(settings, changes)
        words.append(" ".join(f"{path}={format_value(value)}" for path, value in changes.items()))
        tried.append(settings)
    plans = plan_layouts(tried, spec, gpu=gpu, num_nodes=None)
    for number, plan in enumerate(plans, start=1):
        if not isinstance(plan, str) and plan.peak <= gpu.memory_bytes:
            return f"the trainer fits ({plan.peak / GIB:.1f} GiB on the fullest rank) with {' '.join(words[:number])}"
    return f"tried on top of each other without success: {', '.join(words)}" if tried else "every lever is pulled already"


def _levers(
    training: TrainingSettings, megatron: Mapping[str, Any], spec: ModelSpec, gpu: Gpu, *, longest: int
) -> Iterator[dict[str, Any]]:
    """Yield values by their paths that each save memory on top of the earlier ones."""
    topology = training.topology
    if not any(fields.get("use_distributed_optimizer") for fields in (training.optimizer, training.ddp)):
        yield {"training.optimizer.use_distributed_optimizer": True}
    experts = _divided_experts(topology, spec, gpu)
    if experts:
        yield {f"training.topology.{name}": value for name, value in experts.items()}
        topology = topology.model_copy(update=experts)
    if "recompute_granularity" not in megatron:
        yield {f"model.megatron.{name}": value for name, value in FULL_RECOMPUTE.items()}
    least = -(-longest // topology.cp)
    if training.max_tokens_per_micro_batch > least:
        yield {"training.max_tokens_per_micro_batch": least}
    wider = 2 * topology.tp
    if wider <= gpu.per_node and topology.num_ranks % (wider * topology.pp * topology.cp) == 0:
        changes = {"training.topology.tp": wider, "training.topology.sequence_parallel": True}
        yield changes | ({} if topology.etp is not None or topology.ep == 1 else {"training.topology.etp": topology.tp})


def _divided_experts(topology: TopologySettings, spec: ModelSpec, gpu: Gpu) -> dict[str, Any]:
    """Return the largest power of two of expert ranks within a node, with whole experts, if larger than now."""
    if spec.moe is None:
        return {}
    etp = topology.etp or 1
    powers = [2**power for power in range(gpu.per_node.bit_length()) if etp * 2**power <= gpu.per_node]
    sizes = [ep for ep in powers if spec.moe.num_experts % ep == 0 and topology.num_ranks % (etp * ep * topology.pp) == 0]
    ep = max(sizes, default=1)
    return {"ep": ep, "etp": etp} if ep > topology.ep else {}
