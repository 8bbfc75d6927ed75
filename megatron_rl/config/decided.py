"""Settings left open by the user and decided from other settings.

Each decision has its reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

from megatron_rl.config.settings import Settings
from megatron_rl.errors import counted

Section = TypeVar("Section")
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Fields of megatron-core's TransformerConfig: keep only the inputs of layers."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decided value of the open setting at the dotted `path`, and the `reason`."""

    path: str
    value: Any
    reason: str


def decide(settings: Settings, *, has_gpus: bool) -> tuple[Settings, tuple[Decision, ...]]:
    """Return `settings` with every decidable open setting filled, and the decisions.

    A value set by the user stays. `has_gpus` says that ranks will have GPUs, here or elsewhere.
    """
    made = tuple(decision for decision in _decisions(settings, has_gpus) if not _is_given(settings, decision.path))
    for decision in made:
        settings = _with(settings, decision.path.split("."), decision.value)
    return settings, made


def _decisions(settings: Settings, has_gpus: bool) -> Iterator[Decision]:
    yield from _processes(settings)
    if has_gpus:
        yield from _memory(settings)
    if settings.supervised:
        return
    prompt, response = settings.data.max_prompt_tokens, settings.rollout.sampling.max_response_tokens
    budget, cp = type(settings.training).model_fields["max_tokens_per_micro_batch"].default, settings.training.topology.cp
    if prompt + response > budget * cp:
        needed = -(-(prompt + response) // cp)
        reason = f"data.max_prompt_tokens {prompt} + rollout.sampling.max_response_tokens {response}, shared by cp {cp}"
        yield Decision("training.max_tokens_per_micro_batch", needed, reason)


def _memory(settings: Settings) -> Iterator[Decision]:
    """Yield memory settings that most runs on GPUs need to fit.

    Copies share the optimizer's state, and activations are computed again.
    """
    if not any("use_distributed_optimizer" in fields for fields in (settings.training.optimizer, settings.training.ddp)):
        reason = "ranks have GPUs, where copies of the model share the optimizer's state"
        yield Decision("training.optimizer.use_distributed_optimizer", True, reason)
    if not any(field.startswith("recompute_") for field in settings.model.megatron):
        reason = "ranks have GPUs, whose memory a third more arithmetic saves; recompute_granularity null turns it off"
        for field, value in FULL_RECOMPUTE.items():
            yield Decision(f"model.megatron.{field}", value, reason)


def _processes(settings: Settings) -> Iterator[Decision]:
    """Yield numbers of ranks and engines to fill the GPUs of `runtime.cluster`.

    Both take all GPUs in turns, or each takes half.
    """
    cluster, topology = settings.runtime.cluster, settings.training.topology
    if cluster.num_nodes is None or cluster.gpus_per_node is None:
        return
    num_gpus, each = cluster.num_nodes * cluster.gpus_per_node, settings.rollout.ranks_per_engine
    where = f"runtime.cluster has {cluster.num_nodes} × {cluster.gpus_per_node} = {num_gpus} GPUs"
    shared = settings.supervised or settings.runtime.colocate
    engines_given = _is_given(settings, "rollout.num_engines")
    for_ranks = num_gpus if shared else num_gpus - settings.rollout.num_engines * each if engines_given else num_gpus // 2
    fitting = for_ranks // topology.model_ranks * topology.model_ranks
    if fitting < 1:
        return
    how = "ranks take all" if shared else "engines take the others" if engines_given else "half for ranks"
    yield Decision("training.topology.num_ranks", fitting, f"{where}; {how}, in multiples of tp × pp × cp = {topology.model_ranks}")
    ranks = topology.num_ranks if _is_given(settings, "training.topology.num_ranks") else fitting
    engines = (num_gpus if shared else num_gpus - ranks) // each
    if engines >= 1 and not settings.supervised:
        left = "the GPUs of the ranks, in turns" if shared else f"what {counted(ranks, 'rank')} leave"
        yield Decision("rollout.num_engines", engines, f"{where}; engines take {left}, {each} each")


def _is_given(settings: Settings, path: str) -> bool:
    *sections, name = path.split(".")
    owner: Any = reduce(lambda section, part: vars(section)[part], sections, settings)
    return name in (owner if isinstance(owner, dict) else owner.model_fields_set)


def with_values(section: Section, values: Mapping[str, Any]) -> Section:
    """Return `section` with these values at their dotted paths."""
    for path, value in values.items():
        section = _with(section, path.split("."), value)
    return section


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(section, dict):
        return {**section, name: value}
    return section.model_copy(update={name: _with(vars(section)[name], rest, value) if rest else value})
