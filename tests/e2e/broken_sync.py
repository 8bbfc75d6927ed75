"""A rollout that stops or kills a process in the middle of the second weight sync after it began."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import psutil

from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Sample

RANK, SCHEDULER = "ray::TrainerWorker", "sglang::scheduler"
WITHIN_S = 2.0
"""Time until engines, which wait for a rank that is stopped, are in the middle of their calls."""
_syncs: list[int] = []
_as_they_were: list[Any] = []


def _signal(words: str, number: signal.Signals) -> None:
    for process in psutil.Process(os.getpid()).children(recursive=True):
        if words in " ".join(process.cmdline()):
            process.send_signal(number)


async def rollout(*, kind: str, **arguments: Any) -> Sequence[Sample]:
    """One turn. The sync meets `rank`s that die, an `engine` that has stopped before, or one that stops while it is `receiving`."""

    # Imported here: it imports Ray, which reads the run's variables then.
    from megatron_rl.runtime.trainers import TrainerGroup

    def begin_send(self: TrainerGroup, **keywords: Any) -> Any:
        (begin,) = _as_they_were
        _syncs.append(keywords["version"])
        if len(_syncs) != 2:
            return begin(self, **keywords)
        _signal(SCHEDULER if kind == "engine" else RANK, signal.SIGSTOP)
        sending = begin(self, **keywords)
        if kind == "rank":
            threading.Timer(WITHIN_S, _signal, (RANK, signal.SIGKILL)).start()
        elif kind == "receiving":
            threading.Timer(WITHIN_S, _signal, (SCHEDULER, signal.SIGSTOP)).start()
            threading.Timer(2 * WITHIN_S, _signal, (RANK, signal.SIGCONT)).start()
        return sending

    if not _as_they_were:
        _as_they_were.append(TrainerGroup.begin_send)
        TrainerGroup.begin_send = begin_send  # type: ignore[method-assign]
    return await single_turn(**arguments)
