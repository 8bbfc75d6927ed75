"""The launch plan of a run, in words and numbers, for `train --check`. Starts nothing."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch

from megatron_rl.config.derived import (
    anneal_steps,
    dtype_name,
    request_deadline_s,
    reward_workers,
    start_deadline_s,
    step_deadline_s,
    sync_deadline_s,
)
from megatron_rl.config.order import FirstComplete
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import format_value
from megatron_rl.errors import counted
from megatron_rl.models.attention.attention_choice import attention_name
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.runtime.engine_model import planned_model
from megatron_rl.runtime.engines import engine_arguments, weight_sync
from megatron_rl.runtime.placement import NodeShare, Placement
from megatron_rl.runtime.target import Target
from megatron_rl.system.device import chosen_backends, chosen_row_maths
from megatron_rl.training.critic import critic_optimizer
from megatron_rl.training.topology import Topology


def launch_plan(settings: Settings, target: Target, *, replay: Path | None = None) -> dict[str, Mapping[str, str]]:
    """Return titled tables: what the settings add up to, the launch with places, and packages in use; a `replay` has no engines."""
    placement, address = target.placement(), settings.runtime.ray_address
    elsewhere = {"nodes": f"those of the cluster at {address}, asked when the run starts"}
    kind = target.device.kind
    model, topology = settings.model, Topology.of(settings.training.topology)
    dtype, attention = dtype_name(model, device_kind=kind), target.attention(model, read_model_spec(model.path), cp=topology.cp)
    backends = {
        "device": f"{kind}, {dtype}",
        "attention": attention_name(attention, model.megatron),
        "statistics of logits": chosen_row_maths(kind, dtype),
    }
    if torch.cuda.is_available():
        backends["GPUs here"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    reward = settings.reward.function or settings.rollout.name
    sets = {} if replay is not None else settings.eval.described(sampling=settings.rollout.sampling, reward=reward)
    return {
        "What the settings add up to": sizes(settings),
        **({"What it would be evaluated on, the run's values in parentheses": sets} if sets else {}),
        "What would be launched": _processes(settings, target, replay),
        "Where it would be placed": elsewhere if placement is None else placement_rows(placement),
        "What it would run on": backends | {f"{package} here": version for package, version in chosen_backends().items()},
    }


def sizes(settings: Settings) -> dict[str, str]:
    """Return the totals of a run with their arithmetic; tokens are upper bounds."""
    data, training, run, held_out = settings.data, settings.training, settings.run, settings.eval
    per_step, steps = settings.sequences_per_step, training.optimizer_steps_per_batch
    prompts, cp = counted(data.prompts_per_step, "prompt"), training.topology.cp
    group = counted(data.prompts_per_step, "row")
    group = group if settings.supervised else f"{prompts} × {counted(data.samples_per_prompt, 'sample')}"
    evaluations = sum(1 + _rounds(run.num_steps, every) for name in held_out.sets if (every := held_out.interval_of(name)))
    rows = {
        "sequences per step": f"{group} = {per_step}",
        "sequences per optimizer step": f"{per_step} / {counted(steps, 'optimizer step')} = {settings.sequences_per_optimizer_step}",
        "optimizer steps": f"{run.num_steps} × {steps} = {settings.optimizer_steps}",
        "sequences in all": f"{run.num_steps} × {per_step} = {run.num_steps * per_step}",
        "tokens per micro-batch": f"at most {training.max_tokens_per_micro_batch} × cp {cp} = {training.max_tokens_per_micro_batch * cp}",
        "evaluations, checkpoints": f"{evaluations}, {_rounds(run.num_steps, run.save_interval)}",
    }
    schedule, last = training.schedule, training.schedule.decay_steps or settings.policy_steps
    if schedule.decay_style == "wsd":
        rows["learning rate"] = f"wsd, falls in the last {anneal_steps(schedule, last)} of {last} optimizer steps"
    if settings.supervised:
        return rows
    longest, response, staleness = settings.longest_sequence, settings.rollout.sampling.max_response_tokens, settings.rollout.max_staleness
    groups, order = counted(data.prompts_per_step, "group"), settings.rollout.order
    ahead = order.ahead(data.prompts_per_step, max_staleness=staleness, steps_left=run.num_steps)
    return rows | {
        "tokens per sequence": f"at most {data.max_prompt_tokens} + {response} = {longest}",
        "groups made ahead": f"at most {ahead} besides {groups} (rollout.order {order.kind})"
        if isinstance(order, FirstComplete)
        else f"at most {counted(staleness, 'step')} × {groups} = {staleness * data.prompts_per_step}, while a step trains"
        if staleness
        else "none: generation and training take turns (rollout.max_staleness 0)",
        "tokens per step": f"at most {longest} × {per_step} = {longest * per_step}",
    }


def _rounds(steps: int, interval: int) -> int:
    """Count actions every `interval` steps (0: never) and after `steps` steps."""
    return 1 if interval == 0 else -(-steps // interval)


def _processes(settings: Settings, target: Target, replay: Path | None) -> dict[str, str]:
    runtime, topology, device = settings.runtime, Topology.of(settings.training.topology), target.device
    place, several = "one GPU each" if device.kind == "cuda" else "on the CPU", target.nodes is not None and len(target.nodes) > 1
    ray = f"a cluster of {len(target.nodes or ())} nodes, whose address the run is given (--ray-address)"
    ray = f"the cluster at {runtime.ray_address}" if runtime.ray_address is not None else ray if several else "a local one, on loopback"
    rows = {"Ray": ray, "Megatron": f"{topology}, {place}, {device.backend}"}
    if settings.objective.has_critic:
        rows["critic"] = f"on the same ranks, learning rate {critic_optimizer(settings.training)['lr']:g}"
    if settings.supervised or replay is not None:
        return rows | {"SGLang": "none: supervised training" if replay is None else f"none: recorded batches of {replay}"}
    where = f", {counted(settings.rollout.ranks_per_engine, 'GPU')} each" if device.kind == "cuda" else ", on the CPU"
    where += f", on {settings.rollout.nodes_per_engine} nodes each" * (settings.rollout.nodes_per_engine > 1)
    where += ", the same as those of the ranks, in turns" if runtime.colocate else ""
    model = planned_model(settings.model.path, directory=settings.run.directory, sglang=settings.rollout.sglang)
    arguments = engine_arguments(settings, model=model, device_kind=device.kind)
    deadlines = {
        "start": start_deadline_s(settings.model),
        "weight sync": sync_deadline_s(settings.model),
        "training step": step_deadline_s(settings.model),
        "request": request_deadline_s(settings.model, settings.rollout.sampling),
    }
    return rows | {
        "SGLang": f"{counted(settings.rollout.num_engines, 'engine')}{where}",
        "SGLang's arguments": " ".join(f"{name}={format_value(value)}" for name, value in arguments.items()),
        "rewards": f"{reward_workers()} workers on the cores here, {settings.reward.function}"
        if settings.reward.function
        else settings.rollout.name,
        "weight sync": weight_sync(settings.weight_transport, settings.weights, colocate=runtime.colocate, device_kind=device.kind),
        "deadlines": ", ".join(f"{name} {value:,.0f} s" for name, value in deadlines.items()),
    }


def placement_rows(placement: Placement) -> dict[str, str]:
    """Return ranks and engines with node and slots, a row for equal nodes."""
    rows: dict[str, str] = {}
    for (ranks_each, seats), run in groupby(enumerate(placement.nodes), key=lambda pair: _shape(pair[1])):
        numbered = list(run)
        first, last = numbered[0], numbered[-1]
        name = f"node {first[0]}" if first is last else f"nodes {_span(first[0], last[0])}"
        each = ", {} a node" if first is not last else ""
        spread = placement.needs.nodes_per_engine
        unit, parts = placement.needs.unit, []
        if ranks_each:
            ranks = _count("rank", _span(first[1].ranks.start, last[1].ranks.stop - 1))
            parts.append(f"{ranks}{each.format(ranks_each)} on {_count(unit, _span(0, ranks_each - 1))}")
        if seats:
            engines = _count("engine", _span(min(first[1].engines), max(last[1].engines)))
            slots = _count(unit, _span(seats[0].start, seats[-1].stop - 1))
            shared = f", {len(seats[0])} each" * (len(seats) > 1) + f", on {spread} nodes each" * (spread > 1)
            parts.append(f"{engines}{each.format(len(seats))} on {slots}{shared}")
        rows[name] = "; ".join(parts)
    return rows


def _shape(share: NodeShare) -> tuple[int, tuple[range, ...]]:
    return len(share.ranks), tuple(share.engines.values())


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _count(name: str, span: str) -> str:
    return f"{name}s {span}" if "-" in span else f"{name} {span}"
