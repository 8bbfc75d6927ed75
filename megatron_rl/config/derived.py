"""Numbers that follow from the settings by arithmetic alone: never stored in them, printed by `train --check`."""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.settings import ModelSettings, Settings

AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""What model.dtype auto means, by the kind of device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What the settings of a run add up to. Sizes are in ranks, sequences, optimizer steps or tokens, as the names say.

    `max_sequence_tokens` and `max_step_tokens` are upper bounds; both are None for supervised training, where the length of
    a response is only known from its row. `groups_ahead` of later steps may be generated while a step trains.
    """

    dp: int
    expert_dp: int
    sequences_per_step: int
    sequences_per_optimizer_step: int
    optimizer_steps: int
    total_sequences: int
    max_sequence_tokens: int | None
    max_step_tokens: int | None
    micro_batch_tokens: int
    groups_ahead: int
    evaluations: int
    checkpoints: int


def derive(settings: Settings) -> Derived:
    """The derived values of settings without contradictions (see `config/checks.py`)."""
    topology, data, run = settings.training.topology, settings.data, settings.run
    steps_per_batch = settings.training.optimizer_steps_per_batch
    sequences = data.prompts_per_step * samples_per_prompt(settings)
    ahead = 0 if settings.supervised else settings.rollout.max_staleness * data.prompts_per_step
    longest = None if settings.supervised else data.max_prompt_tokens + settings.rollout.sampling.max_response_tokens
    return Derived(
        dp=topology.dp,
        expert_dp=topology.expert_dp,
        sequences_per_step=sequences,
        sequences_per_optimizer_step=sequences // steps_per_batch,
        optimizer_steps=run.num_steps * steps_per_batch,
        total_sequences=run.num_steps * sequences,
        max_sequence_tokens=longest,
        max_step_tokens=None if longest is None else longest * sequences,
        micro_batch_tokens=settings.training.max_tokens_per_micro_batch * topology.cp,
        groups_ahead=ahead,
        evaluations=_evaluations(settings),
        checkpoints=_rounds(run.num_steps, run.save_interval),
    )


def samples_per_prompt(settings: Settings) -> int:
    """Sequences made from one row: the samples of a group, or the single target of supervised training."""
    return 1 if settings.supervised else settings.data.samples_per_prompt


def dtype_name(model: ModelSettings, *, device_kind: Literal["cpu", "cuda"]) -> str:
    """The dtype of parameters, of the ranks' and of the engines', as torch names it."""
    return AUTO_DTYPES[device_kind] if model.dtype == "auto" else model.dtype


def _evaluations(settings: Settings) -> int:
    """Evaluations of the whole run: before the first step, every `run.eval_interval` steps and after the last."""
    if settings.data.eval is None or settings.run.eval_interval == 0:
        return 0
    return 1 + _rounds(settings.run.num_steps, settings.run.eval_interval)


def _rounds(steps: int, interval: int) -> int:
    """How often something happens that is done every `interval` steps (0: never) and at the end of `steps` steps."""
    return 1 if interval == 0 else -(-steps // interval)
