"""The launch plan of a run, in words and numbers, for `train --check`. Starts nothing."""

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch

from megatron_rl.config.derived import (
    Derived,
    derive,
    dtype_name,
    request_deadline_s,
    start_deadline_s,
    step_deadline_s,
    sync_deadline_s,
)
from megatron_rl.config.gpus import find_gpu
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import format_value
from megatron_rl.device import chosen_backends, chosen_row_maths, quiet_megatron_imports
from megatron_rl.errors import counted
from megatron_rl.runtime.engine_model import planned_model
from megatron_rl.runtime.engines import engine_arguments, weight_sync
from megatron_rl.runtime.placement import NodeShare, Placement

with quiet_megatron_imports():
    from megatron_rl.models.megatron_config import attention_name
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.planning.records import RunPlan
    from megatron_rl.planning.run_plan import plan_run
    from megatron_rl.runtime.target import Target
    from megatron_rl.training.critic import critic_optimizer
    from megatron_rl.training.topology import Topology


def launch_plan(settings: Settings, target: Target) -> dict[str, Mapping[str, str]]:
    """Return titled tables: results of the settings, the launch with places, and the packages in
    use.
    """
    return {
        "What the settings add up to": _sizes(settings, derive(settings)),
        "What would be launched": _processes(settings, target),
        "Where it would be placed": _places(settings, target),
        "What it would run on": _backends(settings, target),
    }


def memory_plan(settings: Settings) -> RunPlan | None:
    """Return the run's need of the GPUs named by `runtime.cluster.gpu`; None without a name.

    Takes seconds; see `plan_run`.
    """
    cluster = settings.runtime.cluster
    if cluster.gpu is None:
        return None
    return plan_run(settings, read_model_spec(settings.model.path), gpu=find_gpu(cluster.gpu), num_nodes=cluster.num_nodes)


def _sizes(settings: Settings, derived: Derived) -> dict[str, str]:
    data, training, cp = settings.data, settings.training, settings.training.topology.cp
    prompts, samples = counted(data.prompts_per_step, "prompt"), counted(data.samples_per_prompt, "sample")
    group = counted(data.prompts_per_step, "row") if settings.supervised else f"{prompts} × {samples}"
    rows = {
        "sequences per step": f"{group} = {derived.sequences_per_step}",
        "sequences per optimizer step": f"{derived.sequences_per_step} / "
        f"{counted(training.optimizer_steps_per_batch, 'optimizer step')} = {derived.sequences_per_optimizer_step}",
        "optimizer steps": f"{settings.run.num_steps} × {training.optimizer_steps_per_batch} = {derived.optimizer_steps}",
        "sequences in all": f"{settings.run.num_steps} × {derived.sequences_per_step} = {derived.total_sequences}",
        "tokens per micro-batch": f"at most {training.max_tokens_per_micro_batch} × cp {cp} = {derived.micro_batch_tokens}",
        "evaluations, checkpoints": f"{derived.evaluations}, {derived.checkpoints}",
    }
    if derived.max_sequence_tokens is not None:
        response = settings.rollout.sampling.max_response_tokens
        rows["tokens per sequence"] = f"at most {data.max_prompt_tokens} + {response} = {derived.max_sequence_tokens}"
        staleness = settings.rollout.max_staleness
        rows["groups made ahead"] = (
            f"at most {counted(staleness, 'step')} × {counted(data.prompts_per_step, 'group')} = {derived.groups_ahead}, while a step "
            "trains"
            if staleness
            else "none: generation and training take turns (rollout.max_staleness 0)"
        )
        rows["tokens per step"] = f"at most {derived.max_sequence_tokens} × {derived.sequences_per_step} = {derived.max_step_tokens}"
    return rows


def _processes(settings: Settings, target: Target) -> dict[str, str]:
    runtime, topology, device = settings.runtime, Topology.of(settings.training.topology), target.device
    place = "one GPU each" if device.kind == "cuda" else "on the CPU"
    rows = {
        "Ray": _ray(settings, target),
        "Megatron": f"{topology}, {place}, {device.backend}",
    }
    if settings.has_critic:
        rows["critic"] = f"on the same ranks, learning rate {critic_optimizer(settings.training)['lr']:g}"
    if settings.supervised:
        return rows | {"SGLang": "none: supervised training"}
    where = f", {counted(settings.rollout.ranks_per_engine, 'GPU')} each" if device.kind == "cuda" else ", on the CPU"
    where += ", the same as those of the ranks, in turns" if runtime.colocate else ""
    arguments = engine_arguments(settings, model=planned_model(settings), device_kind=device.kind)
    return rows | {
        "SGLang": f"{counted(settings.rollout.num_engines, 'server')}{where}",
        "SGLang's arguments": " ".join(f"{name}={format_value(value)}" for name, value in arguments.items()),
        "reward workers": f"{settings.reward.num_workers}, {settings.reward.function}",
        "weight sync": weight_sync(settings, device_kind=device.kind),
        "deadlines": _deadlines(settings),
    }


def _deadlines(settings: Settings) -> str:
    """Return the deadlines of work on the model; by default from the model's bytes."""
    model = settings.model
    seconds = {
        "start": start_deadline_s(model),
        "weight sync": sync_deadline_s(model),
        "training step": step_deadline_s(model),
        "request": request_deadline_s(model, settings.rollout.sampling),
    }
    return ", ".join(f"{name} {value:,.0f} s" for name, value in seconds.items())


def _ray(settings: Settings, target: Target) -> str:
    if settings.runtime.ray_address is not None:
        return f"the cluster at {settings.runtime.ray_address}"
    if target.nodes is not None and len(target.nodes) > 1:
        return f"a cluster of {len(target.nodes)} nodes, whose address the run is given (--ray-address)"
    return "a local one, on loopback"


def _places(settings: Settings, target: Target) -> dict[str, str]:
    placement = target.placement(settings)
    if placement is None:
        return {"nodes": f"those of the cluster at {settings.runtime.ray_address}, asked when the run starts"}
    return placement_rows(placement, Topology.of(settings.training.topology))


def _backends(settings: Settings, target: Target) -> dict[str, str]:
    chosen = {
        "device": f"{target.device.kind}, {dtype_name(settings.model, device_kind=target.device.kind)}",
        "attention": attention_name(target.attention(settings, read_model_spec(settings.model.path)), settings.model.megatron),
        "statistics of logits": chosen_row_maths(target.device.kind, dtype_name(settings.model, device_kind=target.device.kind)),
    }
    if torch.cuda.is_available():
        chosen["GPUs here"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    return chosen | {f"{package} here": version for package, version in chosen_backends().items()}


def placement_rows(placement: Placement, topology: Topology) -> dict[str, str]:
    """Return every rank and engine with node and slots, and the nodes spanned by the parallel
    groups.

    Equal nodes share one row.
    """
    rows: dict[str, str] = {}
    for (ranks_each, seats), run in groupby(enumerate(placement.nodes), key=lambda pair: _shape(pair[1])):
        numbered = list(run)
        first, last = numbered[0], numbered[-1]
        name = f"node {first[0]}" if first is last else f"nodes {_span(first[0], last[0])}"
        each = ", {} a node" if first is not last else ""
        unit, parts = placement.needs.unit, []
        if ranks_each:
            ranks = _count("rank", _span(first[1].ranks.start, last[1].ranks.stop - 1))
            parts.append(f"{ranks}{each.format(ranks_each)} on {_count(unit, _span(0, ranks_each - 1))}")
        if seats:
            engines = _count("engine", _span(first[1].engines[0].number, last[1].engines[-1].number))
            slots = _count(unit, _span(seats[0].start, seats[-1].stop - 1))
            parts.append(f"{engines}{each.format(len(seats))} on {slots}{f', {len(seats[0])} each' * (len(seats) > 1)}")
        rows[name] = "; ".join(parts)
    return rows | dict(_group_rows(placement, topology))


def _group_rows(placement: Placement, topology: Topology) -> Iterator[tuple[str, str]]:
    """Return one row for each kind of parallel group with more than one rank.

    The groups are blocks of consecutive ranks, in rank order.
    """
    if len(placement.nodes) == 1 or not placement.needs.num_ranks:
        return
    blocks = {
        f"tensor parallel: tp {topology.tp}": topology.tp,
        f"context parallel: tp {topology.tp} × cp {topology.cp}": topology.tp * topology.cp if topology.cp > 1 else 1,
        f"expert parallel: etp {topology.etp} × ep {topology.ep}": topology.etp * topology.ep if topology.ep > 1 else 1,
    }
    for name, size in blocks.items():
        if size > 1:
            yield name, ", ".join(_on_nodes(nodes, count) for nodes, count in sorted(placement.spans(size).items()))
    per_stage = topology.num_ranks // topology.pp
    if topology.pp > 1:
        stages = [placement.nodes_of_block(stage * per_stage, per_stage) for stage in range(topology.pp)]
        spans = ", ".join(_span(nodes.start, nodes.stop - 1) for nodes in stages)
        yield f"stages 0-{topology.pp - 1}, {counted(per_stage, 'rank')} each", f"on nodes {spans}"


def _on_nodes(nodes: int, count: int) -> str:
    groups = counted(count, "group")
    return f"{groups} within one node" if nodes == 1 else f"{groups} over {nodes} nodes{' each' if count > 1 else ''}"


def _shape(share: NodeShare) -> tuple[int, tuple[range, ...]]:
    return len(share.ranks), tuple(seat.slots for seat in share.engines)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _count(name: str, span: str) -> str:
    return f"{name}s {span}" if "-" in span else f"{name} {span}"
