"""Ways of shrinking a plan that does not fit, cheapest first.

Each is built on top of the earlier ones, until one fits.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config.decided import FULL_RECOMPUTE
from megatron_rl.config.gpus import GIB, Gpu
from megatron_rl.config.settings import Section, Settings, TopologySettings
from megatron_rl.config.yaml_text import format_value
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.planning.run_plan import plan_layouts


def remedy(settings: Settings, spec: ModelSpec, *, gpu: Gpu) -> str:
    """Return a sentence with the overrides that make the trainer fit on `gpu`s.

    The sentence says so when none of the tried overrides suffices. Builds ranks, for seconds.
    """
    tried = list(_smaller(settings, spec, gpu))
    plans = plan_layouts([one for _, one in tried], spec, gpu=gpu, num_nodes=None)
    for number, ((_, _one), plan) in enumerate(zip(tried, plans, strict=True), start=1):
        if not isinstance(plan, str) and plan.peak <= gpu.memory_bytes:
            words = " ".join(lever for lever, _ in tried[:number])
            return f"the trainer fits ({plan.peak / GIB:.1f} GiB on the fullest rank) with {words}"
    words = ", ".join(lever for lever, _ in tried)
    return f"tried on top of each other without success: {words}" if tried else "every lever is pulled already"


def _smaller(settings: Settings, spec: ModelSpec, gpu: Gpu) -> Iterator[tuple[str, Settings]]:
    """Yield overrides, and the settings with all overrides so far."""
    training = settings.training
    if not any(fields.get("use_distributed_optimizer") for fields in (training.optimizer, training.ddp)):
        lever, settings = _fields(settings, "training", "optimizer", {"use_distributed_optimizer": True})
        yield lever, settings
    experts = _divided_experts(training.topology, spec, gpu)
    if experts:
        settings = _with_topology(settings, experts)
        yield _topology_words(experts), settings
    topology = settings.training.topology
    if "recompute_granularity" not in settings.model.megatron:
        lever, settings = _fields(settings, "model", "megatron", FULL_RECOMPUTE)
        yield lever, settings
    longest = settings.data.max_prompt_tokens + settings.rollout.sampling.max_response_tokens
    least = -(-longest // topology.cp)
    if training.max_tokens_per_micro_batch > least:
        settings = _updated(settings, "training", max_tokens_per_micro_batch=least)
        yield f"training.max_tokens_per_micro_batch={least}", settings
    wider = 2 * topology.tp
    if wider <= gpu.per_node and topology.num_ranks % (wider * topology.pp * topology.cp) == 0:
        etp = {} if topology.etp is not None or topology.ep == 1 else {"etp": topology.tp}
        changes = {"tp": wider, "sequence_parallel": True, **etp}
        yield _topology_words(changes), _with_topology(settings, changes)


def _divided_experts(topology: TopologySettings, spec: ModelSpec, gpu: Gpu) -> dict[str, Any]:
    """Return the largest power of two for expert ranks within a node, with whole experts on each.

    Return nothing where the present number is as large.
    """
    if spec.moe is None:
        return {}
    etp = topology.etp or 1
    powers = [2**power for power in range(gpu.per_node.bit_length()) if etp * 2**power <= gpu.per_node]
    sizes = [ep for ep in powers if spec.moe.num_experts % ep == 0 and topology.num_ranks % (etp * ep * topology.pp) == 0]
    ep = max(sizes, default=1)
    return {"ep": ep, "etp": etp} if ep > topology.ep else {}


def _with_topology(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    return _updated(settings, "training", topology=settings.training.topology.model_copy(update=changes))


def _topology_words(changes: Mapping[str, Any]) -> str:
    return " ".join(f"training.topology.{name}={format_value(value)}" for name, value in changes.items())


def _updated(settings: Settings, section: str, **changes: Any) -> Settings:
    part: Section = dict(settings)[section]
    return settings.model_copy(update={section: part.model_copy(update=changes)})


def _fields(settings: Settings, section: str, mapping: str, fields: dict[str, Any]) -> tuple[str, Settings]:
    part: Section = dict(settings)[section]
    words = " ".join(f"{section}.{mapping}.{name}={format_value(value)}" for name, value in fields.items())
    return words, _updated(settings, section, **{mapping: {**dict(part)[mapping], **fields}})
