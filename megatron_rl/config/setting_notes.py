"""Settings that have no effect in the run that the others make, each noted in a sentence."""

import math
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.data_settings import DataSettings
from megatron_rl.config.eval_sets import EvalSettings
from megatron_rl.config.section import Section
from megatron_rl.config.settings import RewardSettings, RolloutSettings, RunSettings, Settings, TrainingSettings


def setting_notes(settings: Settings) -> list[str]:
    """Return one sentence for each changed setting without a reader."""
    objective, training = settings.objective, settings.training
    found = list[tuple[str, str]]()
    if settings.supervised:
        found += _of_supervised(settings)
    else:
        found += _of_rollouts(settings.rollout, settings.reward, settings.eval, colocate=settings.runtime.colocate)
    found += _of_objective(objective, training, settings.model.teacher)
    found += _of_checkpoints(settings.run, settings.data)
    found += _of_rates(training)
    return [f"{name} has no effect: {why}" for name, why in found]


def _changed(section: Section, *names: str) -> list[str]:
    """Return those of the `names` whose values are not the defaults."""
    default = type(section).model_fields
    return [name for name in names if getattr(section, name) != default[name].get_default(call_default_factory=True)]


def _of_supervised(settings: Settings) -> Iterator[tuple[str, str]]:
    because, samples = "objective.policy_loss sft starts no engine and calls no reward", settings.data.samples_per_prompt
    if samples != 1 and _changed(settings.data, "samples_per_prompt"):
        yield f"data.samples_per_prompt {samples}", f"{because}, a row gives one sequence"
    sections = {"rollout": settings.rollout, "reward": settings.reward, "weights": settings.weights}
    unread = [f"the section {name}" for name, section in sections.items() if section != type(section)()]
    fields = {"runtime.colocate": settings.runtime.colocate, "training.routing_replay": settings.training.routing_replay}
    unread += [f"{name} true" for name, value in fields.items() if value]
    unread += [f"run.{name}" for name in _changed(settings.run, "keep_groups")]
    unread += [f"observe.{name}" for name in _changed(settings.observe, "print_samples")]
    yield from ((name, because) for name in unread)


def _of_rollouts(
    rollout: RolloutSettings, reward: RewardSettings, evaluation: EvalSettings, *, colocate: bool
) -> Iterator[tuple[str, str]]:
    hosted, agent, own = rollout.is_hosted, rollout.agent, rollout.function or rollout.environment or rollout.agent
    readers = {"args": own, "max_turns": hosted, "renderer": hosted, "step_timeout_s": rollout.environment}
    unread = _changed(rollout, *(name for name, read in readers.items() if not read))
    unread += ["agent.max_processes"] * bool(agent is not None and agent.function and agent.max_processes)
    yield from ((f"rollout.{name}", f"{rollout.name} does not read it") for name in unread)
    if colocate:
        for name in _changed(rollout, "engine_restarts"):
            yield f"rollout.{name}", "engines on the shared devices of runtime.colocate are not started again alone"
    sets = evaluation.sets
    if reward.function is None:
        of_sets = any(each.reward for each in sets.values())
        for name in _changed(reward, "args", "check_labels", "max_error_rate", *([] if of_sets else ["timeout_s"])):
            yield f"reward.{name}", "reward.function is null"
    if sets and all(each.interval is not None for each in sets.values()):
        for name in _changed(evaluation, "interval"):
            yield f"eval.{name}", "every set of eval.sets has an interval of its own"


def _of_objective(objective: Objective, training: TrainingSettings, teacher: Path | None) -> Iterator[tuple[str, str]]:
    if not objective.has_critic and _changed(training, "critic"):
        yield "the section training.critic", f"objective.advantage.kind is {objective.advantage.kind}, only gae trains a critic"
    if teacher is not None and not objective.distillation_coef:
        yield f"model.teacher {teacher}", "objective.distillation_coef is 0"
    if training.reference_interval:
        supervised = not objective.trains_by_rewards
        why = "objective.policy_loss sft measures no KL" if supervised else "the objective reads the reference for every batch"
        if supervised or objective.needs_reference:
            yield f"training.reference_interval {training.reference_interval}", why


def _of_checkpoints(run: RunSettings, data: DataSettings) -> Iterator[tuple[str, str]]:
    if not run.save_interval:
        for name in _changed(run, "keep_checkpoints", "keep_interval"):
            yield f"run.{name} {getattr(run, name)}", "run.save_interval is 0, which saves only at the end"
    elif run.keep_interval and (first := math.lcm(run.save_interval, run.keep_interval)) > run.num_steps:
        saved = f"with run.save_interval {run.save_interval} the first such checkpoint is step {first}"
        yield f"run.keep_interval {run.keep_interval}", f"{saved}, and run.num_steps is {run.num_steps}"
    if run.export_interval > run.num_steps:
        yield f"run.export_interval {run.export_interval}", f"run.num_steps is {run.num_steps}"
    if data.source is not None and data.max_bad_rows:
        yield f"data.max_bad_rows {data.max_bad_rows}", f"data.source {data.source} leaves out its unusable rows itself"


def _of_rates(training: TrainingSettings) -> Iterator[tuple[str, str]]:
    optimizer, style = training.optimizer, training.schedule.decay_style
    if style == "constant" and "min_lr" in optimizer and optimizer["min_lr"] != optimizer.get("lr"):
        yield f"training.optimizer.min_lr {optimizer['min_lr']}", "training.schedule.decay_style constant never falls to it"
