"""A process that builds ranks without memory.

Its standard input is a pickled list of jobs, and a given file gets the answers. The process is
separate, because joining a process group, even a pretended one, and taking CUDA away concern a
whole process.
"""

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.settings import ModelSettings, TrainingSettings
from megatron_rl.errors import MegatronRLError, UserError
from megatron_rl.system.deadlines import PLANNING_S
from megatron_rl.system.device import local_device, prepare_megatron

if TYPE_CHECKING:
    from megatron_rl.models.model_spec import ModelSpec
    from megatron_rl.planning.rank import RankMemory, TeacherMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One layout to measure: ranks of `training` with a model of `spec`, and the distilled `teacher`.

    An optimizer step has `num_sequences` of up to `longest` tokens, the run `total_steps` of them.
    `fused` counts a GPU's fused kernels, otherwise as on the CPU.
    """

    model: ModelSettings
    training: TrainingSettings
    spec: "ModelSpec"
    teacher: "ModelSpec | None"
    has_critic: bool
    longest: int
    num_sequences: int
    total_steps: int
    fused: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Memory of each pipeline stage's first rank for policy, critic and teacher, or the reason for none."""

    policy: "tuple[RankMemory, ...]" = ()
    critic: "tuple[RankMemory, ...]" = ()
    teacher: "tuple[TeacherMemory, ...]" = ()
    refused: str | None = None


def measure(jobs: Sequence[Job]) -> list[Answer]:
    """Return the answers to `jobs` from a separate process. Raises MegatronRLError when that fails."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="megatron-rl-plan-") as directory:
        path = Path(directory) / "answers"
        command = [sys.executable, "-m", "megatron_rl.planning.measurement", str(path)]
        try:
            done = subprocess.run(
                command, input=pickle.dumps(list(jobs)), capture_output=True, env=environment, timeout=PLANNING_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise MegatronRLError(f"measuring {len(jobs)} layouts took longer than {PLANNING_S:g} s") from error
        if done.returncode:
            raise MegatronRLError(f"measuring a layout failed:\n{done.stderr.decode(errors='replace')[-3000:]}")
        answers: list[Answer] = pickle.loads(path.read_bytes())
    return answers


def answer(job: Job) -> Answer:
    """Measure one layout in this process, made ready by `prepare`."""
    from megatron_rl.planning.rank import measure_stages, measure_teacher_stages

    try:
        policy = measure_stages(job, critic=False)
        critic = measure_stages(job, critic=True) if job.has_critic else ()
        return Answer(policy, critic, () if job.teacher is None else measure_teacher_stages(job, job.teacher))
    except UserError as error:
        return Answer(refused=str(error))


def prepare() -> None:
    """Prepare this process for answering jobs."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    prepare_megatron(local_device())


if __name__ == "__main__":
    # The pickled types name this module, not __main__.
    from megatron_rl.planning import measurement

    measurement.prepare()
    asked: list[Job] = pickle.loads(sys.stdin.buffer.read())
    Path(sys.argv[1]).write_bytes(pickle.dumps([measurement.answer(job) for job in asked]))
