"""Layouts of a number of GPUs that fit, best first.

Every combination of tp, pp, cp and ep is costed and its memory estimated by formulas; the cheapest that should fit are then built.

The cost is a model of the time of one optimizer step on a GPU: matrix products at 400 TFLOP/s, a third more with full recompute,
stretched by the pipeline's bubble, (pp - 1) / micro-batches (Narayanan et al. 2021), plus the messages of tp, cp and ep at 300 GB/s inside
a node and 40 GB/s between nodes. Messages of data parallelism overlap with it and are not counted, so that what is not split costs
least. tp stays inside a node. Equal costs are ordered by headroom. It ranks layouts; it does not foretell a speed.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megatron_rl.config.derived import derive
from megatron_rl.config.settings import Settings, TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import rules
from megatron_rl.planning.gpus import GIB, Gpu
from megatron_rl.planning.levers import FULL_RECOMPUTE, remedy
from megatron_rl.planning.records import RunPlan
from megatron_rl.planning.run_plan import CONTEXT_BYTES, plan_layouts, teacher_spec
from megatron_rl.training.model_check import check_layout
from megatron_rl.training.topology import Topology

_FLOPS, _NODE_BYTES, _NETWORK_BYTES = 4e14, 3e11, 4e10
_MARGIN = 1.2
_BUILT_AT_ONCE, _BUILT_AT_MOST = 4, 12


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout by its settings, with the seconds that the model says a step takes and its estimated bytes on a GPU."""

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
    """Up to `keep` layouts of `num_gpus` Megatron ranks that fit on `gpu`s, best first, as settings and their plans.

    Everything but the topology is taken from `settings`; where these say nothing of recompute, layouts with full recompute are among them.
    `say` gets what is being built, which takes seconds each time; `advise` tries what would make the smallest fit when none does.
    Raises UserError when none fits, with the one that comes closest.
    """
    found = sorted(candidates(settings, spec, gpu=gpu, num_gpus=num_gpus), key=lambda candidate: candidate.cost_s)
    if not found:
        raise UserError(
            f"no layout of {num_gpus} GPUs divides this model's {spec.num_layers} layers and {spec.num_heads} heads; use another number"
        )
    likely = [candidate for candidate in found if candidate.num_bytes <= _MARGIN * gpu.memory_bytes]
    fitting: list[tuple[float, int, Settings, RunPlan]] = []
    for first in range(0, min(len(likely), _BUILT_AT_MOST), _BUILT_AT_ONCE):
        last = min(first + _BUILT_AT_ONCE, len(likely), _BUILT_AT_MOST)
        say(f"{num_gpus} ranks: building layouts {first + 1}-{last} of {len(likely)} likely ones, of {len(found)} that divide the model")
        fitting += _fitting(likely[first : first + _BUILT_AT_ONCE], spec, gpu)
        if len(fitting) >= keep:
            break
    if not fitting:
        smallest = min(found, key=lambda candidate: candidate.num_bytes)
        say(f"{num_gpus} ranks: building the smallest layout by estimate")
        fitting = _fitting([smallest], spec, gpu)
    if not fitting:
        closest = Topology.of(smallest.settings.training.topology)
        advice = ""
        if advise:
            say(f"{num_gpus} ranks: trying what would make that fit")
            advice = f"{remedy(smallest.settings, spec, gpu=gpu)}; or "
        raise UserError(
            f"no layout of {num_gpus} GPUs of type {gpu.name} fits; by estimate the smallest, {closest}, "
            f"needs {smallest.num_bytes / GIB:.1f} GiB of {gpu.memory_bytes / GIB:.1f}; {advice}use more GPUs"
        )
    return [(one, plan) for _, _, one, plan in sorted(fitting, key=lambda row: row[:2])[:keep]]


def _fitting(built: Sequence[Candidate], spec: ModelSpec, gpu: Gpu) -> list[tuple[float, int, Settings, RunPlan]]:
    """Cost, peak bytes, settings and plan of those that fit on GPUs; the engines are another question."""
    plans = plan_layouts([candidate.settings for candidate in built], spec, gpu=gpu, num_nodes=None)
    return [
        (candidate.cost_s, plan.peak, candidate.settings, plan)
        for candidate, plan in zip(built, plans, strict=True)
        if not isinstance(plan, str) and plan.peak <= gpu.memory_bytes
    ]


def candidates(settings: Settings, spec: ModelSpec, *, gpu: Gpu, num_gpus: int) -> Iterator[Candidate]:
    """Every layout of `num_gpus` ranks that the model can be divided by, without and with full recompute."""
    size, teacher = _Size.of(spec), teacher_spec(settings)
    distilled = None if teacher is None else _Size.of(teacher)
    recomputes = [settings.model.megatron]
    if "recompute_granularity" not in settings.model.megatron:
        recomputes.append({**settings.model.megatron, **FULL_RECOMPUTE})
    for topology in _topologies(spec, gpu=gpu, num_gpus=num_gpus):
        for megatron in recomputes:
            one = settings.model_copy(
                update={
                    "model": settings.model.model_copy(update={"megatron": megatron}),
                    "training": settings.training.model_copy(update={"topology": topology}),
                }
            )
            try:
                placed = Topology.of(topology)
                check_layout(placed, spec, megatron)
                if teacher is not None:
                    check_layout(placed, teacher, megatron)
            except UserError:
                continue
            full = megatron.get("recompute_granularity") == "full"
            num_bytes = size.rank_bytes(one, placed, full_recompute=full, teacher=distilled)
            yield Candidate(one, size.step_seconds(one, placed, gpu=gpu, full_recompute=full), num_bytes)


def _topologies(spec: ModelSpec, *, gpu: Gpu, num_gpus: int) -> Iterator[TopologySettings]:
    powers = [2**power for power in range(8)]
    expert_sizes = [1] if spec.moe is None else [size for size in powers if spec.moe.num_experts % size == 0]
    pipelines = [size for size in range(1, spec.num_layers + 1) if num_gpus % size == 0]
    for tp, pp, cp, ep in itertools.product([size for size in powers if size <= gpu.per_node], pipelines, powers, expert_sizes):
        if num_gpus % (tp * pp * cp) == 0 and num_gpus % (pp * ep) == 0:
            etp = None if ep == 1 else 1
            yield TopologySettings(num_ranks=num_gpus, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sequence_parallel=tp > 1)


@dataclass(frozen=True, slots=True)
class _Size:
    """Numbers of a model: `dense` parameters on every expert-parallel rank, `experts` parameters, those that a token `uses`."""

    spec: ModelSpec
    dense: int
    experts: int

    @classmethod
    def of(cls, spec: ModelSpec) -> "_Size":
        sizes = [(rule.of_expert, prod(tensor.shape)) for rule in rules(spec) if rule.exported for tensor in rule.tensors]
        return cls(spec, sum(size for expert, size in sizes if not expert), sum(size for expert, size in sizes if expert))

    @property
    def used(self) -> float:
        """Parameters that one token meets."""
        moe = self.spec.moe
        return self.dense + (self.experts * moe.num_experts_per_token / moe.num_experts if moe is not None else 0)

    def rank_bytes(self, settings: Settings, topology: Topology, *, full_recompute: bool, teacher: "_Size | None") -> float:
        """Bytes of a rank: bf16 weights, fp32 gradients, 12 bytes of optimizer state per parameter, activations or a teacher's weights."""
        split = any(fields.get("use_distributed_optimizer") for fields in (settings.training.optimizer, settings.training.ddp))
        dense, experts = self._here(topology)
        state = dense * (6 + 12 / (topology.dp * topology.cp if split else 1)) + experts * (6 + 12 / (topology.expert_dp if split else 1))
        longest = settings.data.max_prompt_tokens + settings.rollout.sampling.max_response_tokens
        tokens = max(settings.training.max_tokens_per_micro_batch, longest / topology.cp)
        layer = tokens * self._layer_numbers() * 2 / topology.tp
        boundary = tokens * self.spec.hidden_size * 2 / topology.tp
        # The first stage holds the micro-batches of all.
        layers = self.spec.num_layers / topology.pp * min(topology.pp, _micro_batches(settings, topology))
        activations = layers * boundary + layer if full_recompute else layers * layer
        asked = 0.0 if teacher is None else 2 * sum(teacher._here(topology))
        return state + max(activations, asked) + CONTEXT_BYTES

    def _here(self, topology: Topology) -> tuple[float, float]:
        """Parameters on one rank of those that are no experts' and of those that are."""
        return self.dense / (topology.tp * topology.pp), self.experts / (topology.etp * topology.ep * topology.pp)

    def _layer_numbers(self) -> float:
        """Numbers that one token leaves in a layer on all tensor-parallel ranks together."""
        spec, moe = self.spec, self.spec.moe
        attention = (
            4 * spec.hidden_size + 2 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim + 2 * spec.num_heads * spec.value_dim
        )
        if moe is None:
            return attention + 3 * spec.ffn_hidden_size
        return attention + moe.num_experts_per_token * (5 * spec.hidden_size + 3 * moe.ffn_hidden_size) + 3 * moe.shared_ffn_hidden_size

    def step_seconds(self, settings: Settings, topology: Topology, *, gpu: Gpu, full_recompute: bool) -> float:
        """The model's time of one optimizer step on a GPU, as the module says."""
        spec, longest = self.spec, settings.data.max_prompt_tokens + settings.rollout.sampling.max_response_tokens
        tokens = derive(settings).sequences_per_optimizer_step * longest
        compute = 6 * self.used * tokens / topology.num_ranks / _FLOPS * (4 / 3 if full_recompute else 1)
        bubble = (topology.pp - 1) / _micro_batches(settings, topology)
        here = tokens / (topology.dp * topology.cp) * spec.num_layers / topology.pp * 2

        def speed(ranks: int) -> float:
            return _NODE_BYTES if ranks <= gpu.per_node else _NETWORK_BYTES

        # Forward and backward each gather and scatter twice; a gather moves the other ranks' shares.
        messages = here * 8 * spec.hidden_size * (topology.tp - 1) / topology.tp / speed(topology.tp)
        keys = 2 * spec.num_kv_heads * spec.head_dim / topology.tp
        messages += here * 2 * keys * (topology.cp - 1) / speed(topology.tp * topology.cp)
        if spec.moe is not None:
            sent = 4 * spec.moe.num_experts_per_token * spec.hidden_size / topology.tp
            messages += here * sent * (topology.ep - 1) / topology.ep / speed(topology.etp * topology.ep)
        return compute * (1 + bubble) + messages


def _micro_batches(settings: Settings, topology: Topology) -> int:
    longest = settings.data.max_prompt_tokens + settings.rollout.sampling.max_response_tokens
    together = max(1, settings.training.max_tokens_per_micro_batch * topology.cp // longest)
    return max(1, -(-derive(settings).sequences_per_optimizer_step // (topology.dp * together)))
