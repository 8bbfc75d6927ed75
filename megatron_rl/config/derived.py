"""Deadlines, the dtype, reward workers and recorded candidates, which no setting says; `train --check` prints them."""

import os
from pathlib import Path
from typing import Literal, TypeAlias

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.settings import ModelSettings, SamplingSettings, ScheduleSettings
from megatron_rl.system.deadlines import MODEL_BYTES_PER_S, REQUEST_S, REQUEST_TOKENS_PER_S, START_S, STEP_S, SYNC_S

CORES_PER_REWARD_WORKER = 4
"""Cores of the machine per reward worker; ranks, engines and the driver take the others."""
MOST_REWARD_WORKERS = 64
DEADLINE = "model.deadline_s"
"""The setting in place of the deadlines below, for messages."""
FEWEST_REQUESTS = 8
"""Requests in flight that an engine has at least where rollout.max_concurrent_requests is null."""
CANDIDATES_LIMIT, MOST_CANDIDATES = "sampling_mask_max_tokens", 4096
"""Argument of SGLang for the candidates for a token that it records at most, and the default."""
OneReward: TypeAlias = Literal["teaches", "teaches nothing", "is replaced"]
"""A group whose rewards are equal: a signal, none, or left out for another prompt."""
AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""The meaning of model.dtype auto, by the kind of device."""


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


def leaves_tokens_out(sampling: SamplingSettings) -> bool:
    """Return True when some tokens are never drawn, and the candidates for each token are recorded."""
    return sampling.top_p < 1 or sampling.top_k is not None or sampling.min_p > 0


def _moving_s(model_path: Path) -> float:
    """Return the seconds for reading or sending a model directory's files; 0 without files."""
    files = model_path.iterdir() if model_path.is_dir() else ()
    return sum(file.stat().st_size for file in files if file.is_file()) / MODEL_BYTES_PER_S


def anneal_steps(schedule: ScheduleSettings, decay_steps: int) -> int:
    """Return the last optimizer steps of wsd, in which the rate falls: a tenth, after the warm-up."""
    return min(max(1, decay_steps // 10), decay_steps - schedule.warmup_steps)


def reward_workers(num_cores: int | None = None) -> int:
    """Return the number of reward workers on `num_cores`, by default this machine's."""
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    return max(1, min(cores // CORES_PER_REWARD_WORKER, MOST_REWARD_WORKERS))


def dtype_name(model: ModelSettings, *, device_kind: Literal["cpu", "cuda"]) -> str:
    """Return torch's name of the dtype of the ranks' and the engines' parameters."""
    return AUTO_DTYPES[device_kind] if model.dtype == "auto" else model.dtype


def one_reward(objective: Objective) -> OneReward:
    """Return what becomes of groups whose rewards are equal."""
    if not objective.advantage.compares_groups:
        return "teaches"
    return "is replaced" if objective.zero_variance == "resample" else "teaches nothing"
