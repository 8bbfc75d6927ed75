"""Settings left open by the user and decided from other settings.

Each decision has its reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_rl.config.derived import CANDIDATES_LIMIT, MOST_CANDIDATES, leaves_tokens_out
from megatron_rl.config.settings import ClusterSettings, RolloutSettings, Settings, TopologySettings, TrainingSettings
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
    training, rollout, runtime, supervised = settings.training, settings.rollout, settings.runtime, settings.supervised
    made = list(_processes(runtime.cluster, training.topology, rollout, shared=supervised or runtime.colocate, supervised=supervised))
    if rollout.is_hosted and "function" not in settings.reward.model_fields_set:
        giver = "rollout.agent" if rollout.environment is None else "rollout.environment"
        made.append(Decision("reward.function", None, f"{giver} gives the rewards"))
    if has_gpus:
        made += _memory(training, settings.model.megatron)
    if rollout.sampling.top_k is None and leaves_tokens_out(rollout.sampling) and not supervised:
        most = rollout.sglang.get(CANDIDATES_LIMIT, MOST_CANDIDATES)
        # Kernels on GPUs keep all tokens that are as likely as the last one.
        reason = f"an engine records at most {most} candidates for a token ({CANDIDATES_LIMIT}), and half of them may be ties"
        made.append(Decision("rollout.sampling.top_k", max(1, most // 2), reason))
        own = {name: each.sampling for name, each in settings.eval.sets.items() if each.sampling.top_p is not None}
        reason = "the set has a top_p of its own, and answers of evaluations have no record of candidates"
        made += [Decision(f"eval.sets.{name}.sampling.top_k", 0, reason) for name, each in own.items() if each.top_k is None]
    field, cp, longest = "max_tokens_per_micro_batch", training.topology.cp, settings.longest_sequence
    if not supervised and field not in training.model_fields_set and longest > TrainingSettings().max_tokens_per_micro_batch * cp:
        prompt, response = settings.data.max_prompt_tokens, rollout.sampling.max_response_tokens
        reason = f"data.max_prompt_tokens {prompt} + rollout.sampling.max_response_tokens {response}, shared by cp {cp}"
        made.append(Decision(f"training.{field}", -(-longest // cp), reason))
    return with_values(settings, {decision.path: decision.value for decision in made}), tuple(made)


def _memory(training: TrainingSettings, megatron: Mapping[str, Any]) -> Iterator[Decision]:
    """Yield what most runs on GPUs need to fit: shared optimizer state, activations computed again."""
    if not any("use_distributed_optimizer" in fields for fields in (training.optimizer, training.ddp)):
        reason = "ranks have GPUs, where copies of the model share the optimizer's state"
        yield Decision("training.optimizer.use_distributed_optimizer", True, reason)
    if not any(field.startswith("recompute_") for field in megatron):
        reason = "ranks have GPUs, whose memory a third more arithmetic saves; recompute_granularity null turns it off"
        for field, value in FULL_RECOMPUTE.items():
            yield Decision(f"model.megatron.{field}", value, reason)


def _processes(
    cluster: ClusterSettings, topology: TopologySettings, rollout: RolloutSettings, *, shared: bool, supervised: bool
) -> Iterator[Decision]:
    """Yield numbers of ranks and engines for all GPUs of `runtime.cluster`, in turns if `shared`, else halves."""
    if cluster.num_nodes is None or cluster.gpus_per_node is None:
        return
    num_gpus, each = cluster.num_nodes * cluster.gpus_per_node, rollout.ranks_per_engine
    where = f"runtime.cluster has {cluster.num_nodes} × {cluster.gpus_per_node} = {num_gpus} GPUs"
    engines_given, ranks_given = "num_engines" in rollout.model_fields_set, "num_ranks" in topology.model_fields_set
    for_ranks = num_gpus if shared else num_gpus - rollout.num_engines * each if engines_given else num_gpus // 2
    fitting = for_ranks // topology.model_ranks * topology.model_ranks
    if fitting < 1:
        return
    how = "ranks take all" if shared else "engines take the others" if engines_given else "half for ranks"
    ranks = topology.num_ranks if ranks_given else fitting
    if not ranks_given:
        yield Decision("training.topology.num_ranks", ranks, f"{where}; {how}, in multiples of tp × pp × cp = {topology.model_ranks}")
    engines = (num_gpus if shared else num_gpus - ranks) // each
    if engines >= 1 and not supervised and not engines_given:
        left = "the GPUs of the ranks, in turns" if shared else f"what {counted(ranks, 'rank')} leave"
        yield Decision("rollout.num_engines", engines, f"{where}; engines take {left}, {each} each")


def with_values(section: Section, values: Mapping[str, Any]) -> Section:
    """Return `section` with these values at their dotted paths."""
    for path, value in values.items():
        section = _with(section, path.split("."), value)
    return section


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(section, dict):
        return {**section, name: _with(section[name], rest, value) if rest else value}
    return section.model_copy(update={name: _with(vars(section)[name], rest, value) if rest else value})
