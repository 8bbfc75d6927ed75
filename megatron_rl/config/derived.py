"""Numbers derived from the settings by arithmetic alone.

No settings file stores them; `train --check` prints them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_rl.config.settings import ModelSettings, SamplingSettings, Settings
from megatron_rl.deadlines import MODEL_BYTES_PER_S, REQUEST_S, REQUEST_TOKENS_PER_S, START_S, STEP_S, SYNC_S

AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""The meaning of model.dtype auto, by the kind of device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Totals of a run's settings, in ranks, sequences, optimizer steps or tokens as the names say.

    `max_sequence_tokens` and `max_step_tokens` are upper bounds. Both are None for supervised
    training, because only a row tells the length of a response. `groups_ahead` of later steps may
    be generated while a step trains.
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
    """Return the derived values of settings without contradictions (see `config/checks.py`)."""
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


def start_deadline_s(model: ModelSettings) -> float:
    """Return the seconds for the start of ranks, or of an engine, on the model directory."""
    return model.deadline_s or START_S + _moving_s(model.path)


def sync_deadline_s(model: ModelSettings) -> float:
    """Return the seconds allowed for one weight sync."""
    return model.deadline_s or SYNC_S + _moving_s(model.path)


def step_deadline_s(model: ModelSettings) -> float:
    """Return the seconds allowed for one training step, or for a collective in the step."""
    return model.deadline_s or STEP_S + _moving_s(model.path)


def request_deadline_s(model: ModelSettings, sampling: SamplingSettings) -> float:
    """Return the seconds allowed for one generation request, retries included."""
    return model.deadline_s or REQUEST_S + sampling.max_response_tokens / REQUEST_TOKENS_PER_S


def _moving_s(model_path: Path) -> float:
    """Return the seconds for reading or sending a model directory's files; 0 without files."""
    files = model_path.iterdir() if model_path.is_dir() else ()
    return sum(file.stat().st_size for file in files if file.is_file()) / MODEL_BYTES_PER_S


def samples_per_prompt(settings: Settings) -> int:
    """Return the number of sequences made from one row.

    The samples of a group, or the single target of supervised training.
    """
    return 1 if settings.supervised else settings.data.samples_per_prompt


def dtype_name(model: ModelSettings, *, device_kind: Literal["cpu", "cuda"]) -> str:
    """Return torch's name of the dtype of the ranks' and the engines' parameters."""
    return AUTO_DTYPES[device_kind] if model.dtype == "auto" else model.dtype


def _evaluations(settings: Settings) -> int:
    """Return the number of evaluations in the whole run.

    They are before the first step, every `run.eval_interval` steps and after the last step.
    """
    if settings.data.eval is None or settings.run.eval_interval == 0:
        return 0
    return 1 + _rounds(settings.run.num_steps, settings.run.eval_interval)


def _rounds(steps: int, interval: int) -> int:
    """Count actions every `interval` steps (0: never) and after `steps` steps."""
    return 1 if interval == 0 else -(-steps // interval)
