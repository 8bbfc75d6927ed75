"""Waiting with a name and a deadline, while watching that everybody who must live does.

Ray reports the death of an actor only to who asks it something. So every actor has one call that never returns; when it
does, the actor is dead, and whoever waits for anything at all learns it at once.
"""

import concurrent.futures
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from megatron_rl.errors import DeadlineError, MegatronRLError, UserError, WorkerDiedError

Future = concurrent.futures.Future[Any]

CAUSE_S = 5.0
"""How long a failure waits for the death of a watched actor that explains it. Whoever talks to a dead engine learns of a refused
connection at once; its watcher, which has the exit code and the log, looks twice a second."""


def _raise_own(error: BaseException, *, owner: str) -> None:
    """Raise what an actor raised as itself where it is ours, so that a user's mistake prints as one sentence; `owner` names the actor."""
    if isinstance(error, RayActorError):
        raise WorkerDiedError(f"{owner} died: its process {_exit_of(error)}") from error
    if isinstance(error, RayTaskError) and isinstance(error.cause, MegatronRLError):
        raise error.cause from error
    raise error


def _is_user_error(error: BaseException | None) -> bool:
    return isinstance(error.cause if isinstance(error, RayTaskError) else error, UserError)


def _exit_of(error: RayActorError) -> str:
    """Why the process of an actor ended, from Ray's long account of it."""
    found = re.search(r"Worker exit type: (\S+) Worker exit detail: ([^.]+)", str(error))
    return f"ended ({found[1]}: {found[2]})" if found else "is gone"


class Watchdog:
    """Waits for futures; the death of any watched actor ends every wait with that actor's own error."""

    def __init__(self) -> None:
        self._vital: dict[Future, str] = {}

    def watch(self, name: str, future: Future) -> None:
        """Watch an actor through the future of a call that returns only when the actor fails."""
        self._vital[future] = name

    def forget(self) -> None:
        """Watch nobody any more, because they are about to be stopped on purpose."""
        self._vital.clear()

    def wait(self, futures: Sequence[Future], *, name: str, timeout_s: float, blame: Mapping[int, str] | None = None) -> list[Any]:
        """Wait for all futures and return their results in order.

        `name` says what is waited for; `blame` names the owner of each future by position, for the message at the deadline.

        Raises:
            DeadlineError: `timeout_s` seconds went by; the message names who is still missing.
            Exception: whatever the first failing future or watched actor raised.
        """
        deadline = time.monotonic() + timeout_s
        pending = set(futures)
        while pending:
            done, _ = concurrent.futures.wait(
                pending | set(self._vital), timeout=max(0.0, deadline - time.monotonic()), return_when=concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                for item in pending:
                    item.cancel()
                missing = [self._blamed(futures, item, blame) for item in futures if item in pending]
                raise DeadlineError(f"{name} did not finish within {timeout_s:.0f} s, still waiting for: {', '.join(missing)}")
            if any(self._has_consequence(item) for item in done):
                done |= concurrent.futures.wait(self._vital, timeout=CAUSE_S, return_when=concurrent.futures.FIRST_COMPLETED).done
            for item in sorted(done, key=lambda item: item not in self._vital):
                self._check(item, owner=self._vital.get(item) or self._blamed(futures, item, blame))
            pending -= done
        return [item.result() for item in futures]

    @staticmethod
    def _blamed(futures: Sequence[Future], item: Future, blame: Mapping[int, str] | None) -> str:
        position = list(futures).index(item)
        return (blame or {}).get(position, f"part {position}")

    def _has_consequence(self, item: Future) -> bool:
        """Whether `item` failed in a way that somebody else's death may have caused; a user's mistake is its own cause."""
        return item not in self._vital and item.exception() is not None and not _is_user_error(item.exception())

    def _check(self, item: Future, *, owner: str) -> None:
        error = item.exception()
        if error is not None:
            _raise_own(error, owner=owner)
        if item in self._vital:
            raise WorkerDiedError(f"{owner} ended although nobody asked it to")

    def wait_refs(self, refs: Sequence[ray.ObjectRef], *, name: str, timeout_s: float, owner: str = "Megatron rank") -> list[Any]:
        """Wait for Ray calls, one per actor; the actors are called `owner` in messages, with their number."""
        blame = {position: f"{owner} {position}" for position in range(len(refs))}
        return self.wait([ref.future() for ref in refs], name=name, timeout_s=timeout_s, blame=blame)
