"""The place of a run in the data: prompts taken, groups consumed, and return to a checkpoint."""

import json
from typing import Any

from megatron_rl.config.data_settings import DataSettings
from megatron_rl.config.settings import RewardSettings, RolloutSettings
from megatron_rl.data.buffer import Buffer, BufferCounts
from megatron_rl.data.row_source import RENDERING, OwnRows
from megatron_rl.data.source import PromptSource
from megatron_rl.errors import UserError, counted

_GROUPS, _CONSUMED = "num_groups", "num_consumed"
"""Keys of a position: the groups in the buffer, and those that steps have taken."""


def made_by(data: DataSettings, rollout: RolloutSettings, reward: RewardSettings, *, greedy: bool) -> str:
    """Return the settings that turn a prompt into a group, as JSON; `greedy` groups have a baseline."""
    sampling = {f"rollout.sampling.{name}": value for name, value in rollout.sampling.model_dump(mode="json").items()}
    chosen = {
        **sampling,
        "rollout.function": rollout.function,
        "rollout.environment": rollout.environment,
        "rollout.agent": rollout.agent and rollout.agent.model_dump(mode="json", exclude={"max_processes"}),
        "rollout.max_turns": rollout.max_turns,
        "rollout.renderer": rollout.renderer,
        "rollout.args": rollout.args,
        "data.samples_per_prompt": data.samples_per_prompt,
        "data.label_key": data.label_field,
        "data.system_prompt": data.system_prompt,
        "data.chat_template_kwargs": data.chat_template_kwargs,
        "reward.function": reward.function,
        "reward.args": reward.args,
        # Only groups made for ReMax have a baseline.
        "objective.advantage.kind is remax": greedy,
    }
    return json.dumps(chosen, sort_keys=True)


def difference(made_by: str, now: str) -> str:
    """Return the settings that differ in two texts of `made_by`, in words."""
    then, present = json.loads(made_by), json.loads(now)
    names = sorted(name for name in then.keys() | present.keys() if then.get(name) != present.get(name))
    return " and ".join(f"{name} is {present.get(name)} now and was {then.get(name)}" for name in names)


def position_of(source: PromptSource, buffer: Buffer, *, step: int) -> dict[str, Any]:
    """Return the prompt cursor after `step` steps, as JSON values, for a checkpoint.

    The buffer is flushed first: no checkpoint may know more than the disk. Groups already handed to
    the next step do not count as taken.
    """
    buffer.flush()
    if isinstance(source.rows, OwnRows):
        source.rows.see(buffer.mean_rewards, step=step)
    return {**source.rows.state(), _GROUPS: buffer.counts().total, _CONSUMED: buffer.num_consumed(step=step)}


def rewind(source: PromptSource, buffer: Buffer, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
    """Continue at the checkpoint after `step` steps, at the first prompt without a `position`.

    Groups finished since then are kept where their weights still exist and the settings would make
    equal groups. Returns a sentence for each set of other settings whose groups are made anew, and
    for a lost buffer. Raises UserError for other data, and a buffer of an earlier moment.
    """
    num_groups, gone = 0, tuple[str, ...]()
    if position is not None:
        source.rows.restore(position)
        num_groups = position[_GROUPS]
    # Of a resume that is refused, the buffer keeps all samples.
    with buffer.transaction():
        others = buffer.rewind(step)
        counts = buffer.counts()
        if position is not None:
            gone = _missing(buffer, counts, num_groups=num_groups, num_consumed=position[_CONSUMED], step=step)
        if not counts.total:
            # A kill before the next checkpoint comes back to this one, with what is made from now on.
            buffer.num_gone = num_groups
        # Prompts taken after the checkpoint are in the buffer: the next prompts come behind.
        then = (position or {}).get(RENDERING)
        renewed = then is not None and then != source.rows.state().get(RENDERING)
        pending = {group.id for group in buffer.waiting() if group.state != "done"}
        buffer.add_prompts(source.follow(buffer.ids_after(num_groups)), renewed=renewed)
        # Prompts from before the checkpoint wait as the settings at that time read them.
        buffer.add_prompts(source.again(sorted(pending)), renewed=renewed)
    now = buffer.made_by
    renewed = (f"{counted(count, 'group')} to be made anew, because {difference(then, now)}" for then, count in others.items())
    return (*gone, *renewed)


def _missing(buffer: Buffer, counts: BufferCounts, *, num_groups: int, num_consumed: int, step: int) -> tuple[str, ...]:
    """Return a sentence for a lost buffer. Raises UserError for one with too few groups."""
    waiting = num_groups - num_consumed
    if not counts.total:
        left_out = f"; {counted(waiting, 'prompt')} that waited in it will not be trained on" if waiting else ""
        return (f"the buffer is gone: its record of samples is whole from step {step + 1} on{left_out}",) if num_groups else ()
    # A buffer begun at this checkpoint has no earlier groups.
    begun_here = buffer.num_gone == num_groups
    if counts.total < num_groups or (counts.consumed != num_consumed and not begun_here):
        raise UserError(
            f"{buffer.path} is not the buffer of the checkpoint of step {step}: it has {counts.total} groups, of which the steps up to "
            f"{step} took {counts.consumed}, and had {num_groups} and {num_consumed} then; copy it again with the -wal file beside it, or "
            f"move it away to go on without the groups that waited in it ({waiting})"
        )
    return ()
