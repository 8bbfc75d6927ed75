"""What needs no worker; tests/contract/test_reward_workers.py has the workers."""

import asyncio
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
from pebble import ProcessFuture, ProcessPool

from megatron_rl.config.settings import RewardSettings
from megatron_rl.rewards.runner import RewardRunner, was_lost
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample

SETTINGS = RewardSettings(function="no_such_module:score")
PROMPT = Prompt(id="p", token_ids=np.array([1]), text="2+2=", label="4")


def test_workers_that_are_always_killed_end_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pool: ProcessPool, *args: object, **options: object) -> ProcessFuture[Reward]:
        future: ProcessFuture[Reward] = ProcessFuture()
        future.set_exception(BrokenProcessPool("All workers expired"))
        return future

    monkeypatch.setattr(ProcessPool, "schedule", broken)
    with RewardRunner(SETTINGS) as runner:
        reward = asyncio.run(runner.score(Sample.written(PROMPT, text="")))
    assert reward.outcome is RewardOutcome.ERROR
    assert reward.message == "the reward workers were killed before this call was at work, in 3 attempts"
    assert was_lost(reward)


def test_what_a_killed_driver_leaves_is_removed_without_a_word() -> None:
    code = (
        "import os, signal, sys\n"
        "from megatron_rl.rewards.processes import WorkerContext, start_tracker\n"
        "flags = [*sys.warnoptions]\n"
        "start_tracker()\n"
        "assert sys.warnoptions == flags\n"
        "lock = WorkerContext().RLock()\n"
        "print(f'/dev/shm/sem.{lock._semlock.name[1:]}', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # Returns when the tracker, which has these pipes, too, is gone.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.returncode == -signal.SIGKILL
    assert not Path(done.stdout.strip()).exists() and done.stdout.startswith("/dev/shm/sem.mp-")
