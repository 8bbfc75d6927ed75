"""Contradictions between settings, found by arithmetic and shown in a sentence.

Pure: no file, device or upstream is read.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.algorithms.objective import Advantages, Objective
from megatron_rl.algorithms.unclipped_losses import Distillation
from megatron_rl.config.data_settings import DataSettings
from megatron_rl.config.derived import CANDIDATES_LIMIT, MOST_CANDIDATES, leaves_tokens_out
from megatron_rl.config.eval_sets import EvalSettings
from megatron_rl.config.order import FirstComplete
from megatron_rl.config.section import MAX_INTEGER
from megatron_rl.config.settings import (
    ModelSettings,
    RolloutSettings,
    RuntimeSettings,
    SamplingSettings,
    Settings,
    TopologySettings,
    TrainingSettings,
    WeightSettings,
)
from megatron_rl.errors import counted

_LARGEST_SEED = 2**32 - 1
"""Largest seed of numpy.random.seed, called by SGLang."""


def contradictions(settings: Settings) -> list[str]:
    """Return a sentence with the arithmetic and a fix for each pair of settings in conflict."""
    run, data, objective, rollout, training = settings.run, settings.data, settings.objective, settings.rollout, settings.training
    supervised = settings.supervised
    found = [
        *_numbers(settings.model, rollout, training),
        *_seed(run.seed, rollout.num_engines),
        *topology_contradictions(training.topology),
        *_batch(data, settings.sequences_per_step, training.optimizer_steps_per_batch, supervised=supervised),
        *_schedule(run.num_steps, training, has_critic=objective.has_critic),
        *_evaluation(settings.eval, rollout.sglang, supervised=supervised),
        *_colocation(settings.weights, settings.runtime, rollout),
    ]
    if not supervised:
        if rollout.max_staleness and not objective.corrects_staleness:
            got, taken = f"rollout.max_staleness is {rollout.max_staleness}", "tokens of older weights count as the current ones'"
            found.append(_uncorrected(got, objective.policy_loss.kind, taken))
        found += [*_group(data, objective.advantage), *_lengths(data, rollout, training), *_engines(rollout.sglang)]
        found += [*_candidates(rollout.sampling, rollout.sglang), *_entropy_aware(rollout.sampling, objective), *_router(settings)]
    if data.chat_template_kwargs and rollout.is_hosted:
        found.append(
            f"data.chat_template_kwargs has {', '.join(data.chat_template_kwargs)}, but {rollout.name} renders its messages by "
            "rollout.renderer, which takes none of them; remove them, or use a model whose template has them as defaults"
        )
    own = {"function": rollout.function, "environment": rollout.environment, "agent": rollout.agent and "set"}
    if len(given := [f"rollout.{name} is {value}" for name, value in own.items() if value is not None]) > 1:
        found.append(f"{' and '.join(given)}, needs at most one; remove the other")
    if rollout.agent is not None and rollout.agent.command and rollout.args:
        found.append(f"rollout.args has {', '.join(rollout.args)}, but rollout.agent.command takes none; write them into the command")
    if settings.reward.function is None and not rollout.is_hosted and not supervised:
        found.append(
            "reward.function is null without rollout.environment and rollout.agent, needs one of these, which gives rewards; set "
            "reward.function"
        )
    if objective.distillation_coef and settings.model.teacher is None:
        found.append(
            f"objective.distillation_coef is {objective.distillation_coef}, but model.teacher is not set, so there is nothing to learn "
            "from; set model.teacher to a Hugging Face directory, or objective.distillation_coef to 0"
        )
    if isinstance(objective.policy_loss, Distillation):
        found.append(
            "objective.policy_loss is distillation, whose teacher is the reference, in a run the initial policy, from which there is "
            "nothing to learn; choose another policy_loss, and set objective.distillation_coef and model.teacher"
        )
    return found


def _uncorrected(got: str, loss: str, taken: str) -> str:
    """Return the sentence for tokens of another distribution in an objective that takes them for the current policy's."""
    return (
        f"{got}, but with objective.policy_loss {loss} around recomputed log-probs {taken}; set objective.off_policy, such as "
        "{mode: truncate, high: 2.0}, which weighs each token, or objective.proximal to rollout, a trust region around the rollout's own "
        "log-probs, or objective.proximal to interpolated with objective.off_policy, decoupled PPO without a pass of its own"
    )


def _numbers(model: ModelSettings, rollout: RolloutSettings, training: TrainingSettings) -> Iterator[str]:
    """Yield numbers in the fields of upstream classes beyond the use of any upstream class."""
    mappings = {
        "model.megatron": model.megatron,
        "rollout.sglang": rollout.sglang,
        "training.optimizer": training.optimizer,
        "training.ddp": training.ddp,
        "training.critic.optimizer": training.critic.optimizer,
    }
    for section, fields in mappings.items():
        for path, value in _leaves(section, fields):
            # Upstream's fields of numbers take a text as well, and YAML's own spelling of infinity is `.inf`.
            spelled = isinstance(value, str) and value.lstrip("+-").lower() in ("inf", "infinity", "nan")
            if spelled or (isinstance(value, float) and not math.isfinite(value)):
                yield f"{path} is {value}, needs a finite number"
            elif isinstance(value, int) and abs(value) >= 2**63:
                yield f"{path} is {value}, needs an integer of at most {2**63 - 1}"


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value inside of mappings and lists, with its dotted path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(f"{path}.{index}", inner)
    else:
        yield path, value


def _seed(seed: int, engines: int) -> Iterator[str]:
    last = seed * engines + engines - 1
    if last > _LARGEST_SEED:
        yield (
            f"run.seed {seed} × rollout.num_engines {engines} + {engines - 1} = {last} is the seed of the last engine, which takes at most "
            f"{_LARGEST_SEED}; set run.seed to {(_LARGEST_SEED + 1) // engines - 1} or less"
        )


def _engines(sglang: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(stages := sglang.get("pp_size"), int) and stages > 1:
        yield (
            f"rollout.sglang.pp_size is {stages}, needs 1: a weight sync finds an engine's ranks by their tensor parallel number, which "
            "those of two stages share, and is answered by the first stage alone; remove it, and set rollout.sglang.tp_size to the GPUs "
            "of an engine, which may be on several nodes (nnodes)"
        )
    nodes = sglang.get("nnodes", 1)
    for name in ("dp_size", "attn_dp_size"):
        if nodes > 1 and isinstance(copies := sglang.get(name), int) and copies > 1:
            yield (
                f"rollout.sglang.{name} is {copies} with nnodes {nodes}, needs 1: SGLang opens the store at which the ranks of such an "
                "engine meet to every interface of a node, without a secret; remove it, or let tp_size fit on one node and remove nnodes"
            )
    for name in ("quantization", "torchao_config"):
        if sglang.get(name):
            yield (
                f"rollout.sglang.{name} is {sglang[name]}, needs none: a weight sync writes the trainer's weights as they are, not "
                "quantised; remove it"
            )


def _router(settings: Settings) -> Iterator[str]:
    """Yield what a router before the engines would leave out of requests without a word, or what hides the engine that answers."""
    sampling, sglang, sets = settings.rollout.sampling, settings.rollout.sglang, settings.eval.sets
    lost = {
        "training.routing_replay": settings.training.routing_replay,
        "rollout.sampling.entropy": sampling.entropy is not None,
        "rollout.sampling.top_p, top_k or min_p": leaves_tokens_out(sampling),
        **{f"eval.sets.{name}.sampling.logit_bias": one.sampling.logit_bias for name, one in sets.items()},
        "rollout.sglang.tokenizer_worker_num": sglang.get("tokenizer_worker_num", 1) != 1,
    }
    for name, value in lost.items():
        if value and sglang.get("router") is not None:
            yield f"rollout.sglang.router is set with {name}, but SGLang's router does not pass on what that needs; remove one of them"


def topology_contradictions(topology: TopologySettings) -> Iterator[str]:
    """Yield one sentence for each pair of sizes of a topology in conflict."""
    model_ranks = topology.model_ranks
    product = f"tp {topology.tp} × pp {topology.pp} × cp {topology.cp} = {model_ranks}"
    if topology.num_ranks % model_ranks:
        lower = topology.num_ranks // model_ranks * model_ranks
        fitting = " or ".join(str(number) for number in (lower, lower + model_ranks) if number)
        yield (
            f"training.topology: {counted(topology.num_ranks, 'rank')} cannot be divided by {product}, so there is no whole number of "
            f"data-parallel copies; set training.topology.num_ranks to {fitting}, or change tp, pp or cp"
        )
    if topology.vpp > 1 and topology.pp == 1:
        yield (
            f"training.topology: vpp is {topology.vpp} with pp 1, but virtual stages divide the stages of a pipeline; "
            f"set training.topology.pp to 2 or more, or vpp to 1"
        )
    if topology.sequence_parallel and topology.tp == 1:
        yield (
            "training.topology: sequence_parallel is true with tp 1, but it shards activations over the tensor parallel ranks; "
            "set training.topology.tp to 2 or more, or sequence_parallel to false"
        )
    expert_ranks = topology.expert_tp * topology.ep * topology.pp
    if topology.ep > 1 or topology.etp is not None:
        if topology.num_ranks % expert_ranks:
            yield (
                f"training.topology: {counted(topology.num_ranks, 'rank')} cannot be divided by etp {topology.expert_tp} × ep "
                f"{topology.ep} × pp {topology.pp} = {expert_ranks}; change training.topology.num_ranks, ep or etp"
            )
        if topology.tp > 1 and topology.ep > 1 and not topology.sequence_parallel:
            yield (
                f"training.topology: ep {topology.ep} with tp {topology.tp} needs sequence_parallel, because experts get their tokens "
                f"sharded over the tensor parallel ranks; set training.topology.sequence_parallel to true"
            )


def _batch(data: DataSettings, sequences: int, steps: int, *, supervised: bool) -> Iterator[str]:
    rows, prompts = counted(data.prompts_per_step, "row"), counted(data.prompts_per_step, "prompt")
    product = rows if supervised else f"{prompts} × {counted(data.samples_per_prompt, 'sample')} = {sequences}"
    if sequences > MAX_INTEGER:
        yield f"{product} in a step are more than {MAX_INTEGER}; lower data.prompts_per_step"
    elif sequences % steps:
        small = [number for number in range(1, math.isqrt(sequences) + 1) if sequences % number == 0]
        fitting = {*small, *(sequences // number for number in small)}
        nearest = sorted(sorted(fitting, key=lambda number: abs(number - steps))[:2])
        yield (
            f"{product}, not divisible by {steps} optimizer steps; set training.optimizer_steps_per_batch to "
            f"{' or '.join(map(str, nearest))}, or change data.prompts_per_step"
        )


def _group(data: DataSettings, advantage: Advantages) -> Iterator[str]:
    if data.samples_per_prompt == 1 and advantage.compares_groups:
        yield (
            f"data.samples_per_prompt is 1, but objective.advantage.kind {advantage.kind} compares the samples of one prompt with each "
            f"other, so every advantage would be zero; set data.samples_per_prompt to 2 or more, or choose another kind"
        )


def _lengths(data: DataSettings, rollout: RolloutSettings, training: TrainingSettings) -> Iterator[str]:
    prompt, response = data.max_prompt_tokens, rollout.sampling.max_response_tokens
    budget, cp = training.max_tokens_per_micro_batch, training.topology.cp
    if prompt + response > budget * cp:
        yield (
            f"a sequence may have data.max_prompt_tokens {prompt} + rollout.sampling.max_response_tokens {response} = "
            f"{prompt + response} tokens, but a micro-batch holds training.max_tokens_per_micro_batch {budget} × cp {cp} = {budget * cp}; "
            f"set training.max_tokens_per_micro_batch to {-(-(prompt + response) // cp)} or more, or allow fewer tokens"
        )
    for name in ("context_length", "max_total_tokens"):
        limit = rollout.sglang.get(name)
        # Others may ask for the room that is left.
        if not rollout.is_hosted and rollout.function is None and isinstance(limit, int) and prompt + response > limit:
            yield (
                f"a sequence may have data.max_prompt_tokens {prompt} + rollout.sampling.max_response_tokens {response} = "
                f"{prompt + response} tokens, but rollout.sglang.{name} is {limit}; raise it, or allow fewer tokens"
            )


def _candidates(sampling: SamplingSettings, sglang: Mapping[str, Any]) -> Iterator[str]:
    most = sglang.get(CANDIDATES_LIMIT, MOST_CANDIDATES)
    if sampling.top_k is not None and sampling.top_k > most:
        yield (
            f"rollout.sampling.top_k is {sampling.top_k}, but an engine records at most {most} candidates for a token; set top_k to {most} "
            f"or less, or raise rollout.sglang.{CANDIDATES_LIMIT}"
        )
    if sampling.min_p and sglang.get("enable_deterministic_inference"):
        yield (
            f"rollout.sampling.min_p is {sampling.min_p}, but SGLang with rollout.sglang.enable_deterministic_inference ends at such a "
            "request, since it draws by seeds from weights that min_p leaves without a norm; use top_p or top_k, or turn it off"
        )


def _entropy_aware(sampling: SamplingSettings, objective: Objective) -> Iterator[str]:
    if sampling.entropy is None:
        return
    taken = "tokens of another distribution count as the policy's own"
    if not objective.corrects_staleness:
        yield _uncorrected("rollout.sampling.entropy is set", objective.policy_loss.kind, taken)
    if leaves_tokens_out(sampling):
        yield (
            f"rollout.sampling.entropy is set with top_p {sampling.top_p:g}, top_k {sampling.top_k} and min_p {sampling.min_p:g}, but "
            "SGLang records no candidates where a logit processor shapes logits, so that log-probs would be another distribution's; "
            "remove these, and give rollout.sampling.entropy.quadrants a top_k or top_p, or remove entropy"
        )


def _schedule(num_steps: int, training: TrainingSettings, *, has_critic: bool) -> Iterator[str]:
    schedule, steps = training.schedule, num_steps * training.optimizer_steps_per_batch
    frozen = training.critic.warmup_steps if has_critic else 0
    product = (
        f"run.num_steps {num_steps} × training.optimizer_steps_per_batch {training.optimizer_steps_per_batch} = "
        f"{counted(steps, 'optimizer step')}"
    )
    if steps > MAX_INTEGER:
        yield f"{product}, more than {MAX_INTEGER}; lower run.num_steps"
    own = steps - frozen
    if schedule.warmup_steps > own > 0:
        behind = f", {own} of them behind training.critic.warmup_steps" if frozen else ""
        yield (
            f"training.schedule.warmup_steps is {schedule.warmup_steps}, but the run has {product}{behind}, so the learning rate would "
            f"never reach its peak; set training.schedule.warmup_steps to {own} or less"
        )
    if frozen >= steps:
        yield (
            f"training.critic.warmup_steps is {training.critic.warmup_steps}, but the run has {product}, so the policy would never "
            f"learn; set training.critic.warmup_steps below {steps}"
        )
    if schedule.decay_style in ("constant", "inverse_square_root"):
        if schedule.decay_steps is not None:
            never = "never decays" if schedule.decay_style == "constant" else "has no end"
            yield (
                f"training.schedule.decay_steps is {schedule.decay_steps}, but decay_style {schedule.decay_style} {never}; "
                f"remove decay_steps, or set training.schedule.decay_style to linear or cosine"
            )
    elif schedule.warmup_steps <= own and 0 < (last := schedule.decay_steps or own) <= schedule.warmup_steps:
        behind = f" behind training.critic.warmup_steps {frozen}" if frozen else ""
        yield (
            f"training.schedule: the rate is to reach its floor at optimizer step {last}{behind}, but warms up for "
            f"{schedule.warmup_steps}; set warmup_steps below {last}"
        )
    for name in ("lr", "min_lr"):
        rate = training.optimizer.get(name)
        if isinstance(rate, int | float) and rate < 0:
            yield f"training.optimizer.{name} is {rate}, needs a number >= 0"
            return
    peak, floor = training.optimizer.get("lr"), training.optimizer.get("min_lr")
    if isinstance(peak, int | float) and isinstance(floor, int | float) and floor > peak:
        yield f"training.optimizer.min_lr {floor} is above lr {peak}, but the rate falls from lr to min_lr; exchange them"


def _evaluation(evaluation: EvalSettings, sglang: Mapping[str, Any], *, supervised: bool) -> Iterator[str]:
    for name, one in evaluation.sets.items():
        if one.sampling.min_p and sglang.get("enable_deterministic_inference"):
            yield (
                f"eval.sets.{name}.sampling.min_p is {one.sampling.min_p}, but SGLang ends at such a request with "
                "rollout.sglang.enable_deterministic_inference; use top_p or top_k, or turn it off"
            )
    if supervised and evaluation.sets:
        yield (
            f"eval.sets has {', '.join(evaluation.sets)}, but objective.policy_loss sft starts no engine that could generate answers; "
            f"remove eval.sets, and evaluate the result with `megatron-rl eval`"
        )
    if not evaluation.sets and evaluation.interval not in (0, EvalSettings.model_fields["interval"].default):
        yield (
            f"eval.interval is {evaluation.interval}, but eval.sets is empty, so there is nothing to evaluate on; "
            f"name a file of held-out rows with eval.sets.NAME=FILE, or set eval.interval to 0"
        )


def _colocation(weights: WeightSettings, runtime: RuntimeSettings, rollout: RolloutSettings) -> Iterator[str]:
    staleness = rollout.max_staleness
    if weights.transport == "ipc" and not runtime.colocate:
        yield (
            "weights.transport is ipc with runtime.colocate false, but memory is shared by a Megatron rank and an engine on the same GPU; "
            "set runtime.colocate to true, or weights.transport to broadcast"
        )
    if weights.delta and (runtime.colocate or weights.transport == "ipc"):
        yield (
            "weights.delta is true with runtime.colocate or weights.transport ipc, but engines that share the trainer's GPUs put their "
            "weights away, and nothing is left that a delta could be added to; set weights.delta to false"
        )
    for name in ("quantization", "dp_size"):
        if weights.delta and (given := rollout.sglang.get(name)) not in (None, 1):
            yield (
                f"weights.delta is true with rollout.sglang.{name} {given}, but a delta is added to weights as the trainer has them, on an "
                "engine of one data-parallel rank; set weights.delta to false"
            )
    if runtime.colocate and staleness and not rollout.order.partial:
        yield (
            f"runtime.colocate is true with rollout.max_staleness {staleness}, but engines that share the trainer's GPUs cannot generate "
            f"while it trains; set rollout.max_staleness to 0, or runtime.colocate to false"
        )
    order = rollout.order
    if isinstance(order, FirstComplete) and not order.partial and order.oversampling > 1 + staleness:
        yield (
            f"rollout.order is first_complete with oversampling {order.oversampling:g} and rollout.max_staleness {staleness}, but groups "
            f"that a step leaves are trained on within max_staleness steps, which needs an oversampling of at most 1 + {staleness}; raise "
            "rollout.max_staleness, lower rollout.order.oversampling, or set rollout.order.partial to true"
        )
    if runtime.colocate and rollout.sglang.get("enable_memory_saver") is False:
        yield (
            "rollout.sglang.enable_memory_saver is false with runtime.colocate true, but engines that share the trainer's GPUs "
            "must be able to release their memory; remove it, or set runtime.colocate to false"
        )
