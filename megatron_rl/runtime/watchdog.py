"""Waits with a name, owners and a deadline, and the watch over the processes that must live.

The loop of a run is plain code in the main thread. The loop waits for calls of Ray's actors and for
coroutines of the rollout side, which run on an event loop in a separate thread. Ray reports the
death of an actor only to a caller. So every actor has one call that never returns. When this call
does return, the actor is dead and every wait ends at once.
"""

import asyncio
import concurrent.futures
import re
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from megatron_rl.errors import DeadlineError, MegatronRLError, UserError, WorkerDiedError
from megatron_rl.observe.live_state import WaitState
from megatron_rl.system.deadlines import CAUSE_S, CLOSE_S, LATE_S, LOOP_STOP_S, NAMED_S, STACK_S

Future = concurrent.futures.Future[Any]
GoesOn = Callable[[Exception], bool]
Work: TypeAlias = Future | Coroutine[Any, Any, Any] | ray.ObjectRef
Result = TypeVar("Result")

MEANWHILE_S = 0.5
"""How often a wait looks at the event loop, and does what is to be done meanwhile."""

ACTOR_DEATHS = (RayActorError, OutOfMemoryError)
"""What Ray raises of a call to an actor whose process has ended: the second where Ray itself ended it, because memory ran low."""
LATE_FACTOR, LATE_OF_LONGEST, FEWEST_WAITS = 6.0, 2.0, 3
"""A wait is late beyond so many times the median, and the longest, of this number of equal waits at least."""


@dataclass(slots=True, eq=False)
class OpenWait:
    """A wait in progress for `owners`; late after `late_after_s` seconds, expired after `timeout_s`.

    `usual_s` is the median of earlier waits of this kind, None with fewer than FEWEST_WAITS.
    """

    name: str
    owners: tuple[str, ...]
    timeout_s: float
    usual_s: float | None
    late_after_s: float
    see: str
    noted: bool = False
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        return time.monotonic() - self.begun_s

    @property
    def is_late(self) -> bool:
        """Return True beyond the usual time."""
        return self.seconds > self.late_after_s

    def state(self) -> WaitState:
        """Return the wait as it is shown outside of this process."""
        return WaitState(
            name=self.name, owners=self.owners, seconds=self.seconds, usual_s=self.usual_s, deadline_s=self.timeout_s, late=self.is_late
        )


class Watchdog:
    """Waits for work; a watched actor's death ends every wait with the actor's error.

    Use in a `with`. `note` gets a sentence about a plug-in that blocks the event loop, `late` each
    wait that takes longer than usual, once, in a thread of its own, one at a time.
    """

    def __init__(self, *, note: Callable[[str], None] = lambda text: None, late: Callable[[OpenWait], None] = lambda wait: None) -> None:
        self._note, self._late = note, late
        self._telling: threading.Thread | None = None  # of the last late wait
        self.open_waits: list[OpenWait] = []
        """Waits in progress, of all threads; other threads may read a copy."""
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=50))  # of finished waits, by kind
        # Watched actors: a name, and the decision to go on without the actor.
        self._vital: dict[Future, tuple[str, GoesOn | None]] = {}
        # The making of a transport, in a separate thread, waits as well.
        self._lock = threading.RLock()
        self._loop = asyncio.new_event_loop()
        # The time of the last question to the event loop, its answer, and if a lack of it was noted.
        self._asked_s, self._answer, self._noted = 0.0, Future(), True
        self._answer.set_result(None)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="rollout-loop", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Cancel the running coroutines, and end their thread."""
        try:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(timeout=LOOP_STOP_S)
        except TimeoutError:
            # A plug-in blocks the loop, whose thread ends with the process.
            return
        self._closing.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=LOOP_STOP_S)
        self._loop.close()

    def _run_loop(self) -> None:
        while not self._closing.is_set():
            # A plug-in that calls sys.exit() ends `run_forever`. Waits for the plug-in end with
            # this exception, not later.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def watch(self, name: str, future: Future, *, goes_on: GoesOn | None = None) -> None:
        """Watch an actor through the future of a call that returns only when the actor fails.

        `goes_on` is asked with the actor's error when the actor has died before any work failed.
        True ends no wait, and the actor is forgotten.
        """
        self._vital[future] = name, goes_on

    def forget(self) -> None:
        """Watch no actor any more, because all are about to be stopped on purpose."""
        self._vital.clear()
        if self._telling is not None:
            # It asks the ranks first, and would start another Ray once this one has ended.
            self._telling.join(timeout=STACK_S)

    def wait(
        self,
        work: Coroutine[Any, Any, Result] | concurrent.futures.Future[Result],
        *,
        name: str,
        owner: str,
        timeout_s: float,
        see: str = "",
        meanwhile: Callable[[], None] | None = None,
    ) -> Result:
        """Wait for a coroutine, or one begun, and return the result.

        `name` describes the work, `owner` the worker, `see` the settings that `timeout_s` follows. Every MEANWHILE_S seconds of a long wait
        `meanwhile` is called.

        Raises:
            DeadlineError: `timeout_s` seconds went by; the message names the missing owners.
            Exception: raised by the work, by the first failing watched actor, or by `meanwhile`.
        """
        future = self.begin(work)
        try:
            self._wait({future: owner}, name=name, timeout_s=timeout_s, see=see, meanwhile=meanwhile)
        except BaseException:
            # The result has no reader any more.
            future.cancel()
            raise
        result: Result = future.result()
        return result

    def wait_for_all(
        self, works: Sequence[Work], *, name: str, owner: str, timeout_s: float, see: str = "", outlasts: bool = False
    ) -> list[Any]:
        """Wait as `wait` for several pieces of work by as many owners, numbered; return the results in order.

        One that `outlasts` actors with a `goes_on` leaves their error to the next wait.
        """
        owners = {self.begin(work): f"{owner} {number}" for number, work in enumerate(works)}
        self._wait(owners, name=name, timeout_s=timeout_s, see=see, outlasts=outlasts)
        return [future.result() for future in owners]

    @contextmanager
    def entered(self, context: AbstractAsyncContextManager[Result], *, name: str, owner: str, timeout_s: float) -> Iterator[Result]:
        """Enter an asynchronous context within `timeout_s` seconds for the block; always leave the context."""
        value = self.wait(context.__aenter__(), name=name, owner=owner, timeout_s=timeout_s)
        try:
            yield value
        except BaseException:
            # A plug-in that blocks the loop must not hide the error.
            with suppress(TimeoutError):
                self.begin(context.__aexit__(None, None, None)).result(timeout=CLOSE_S)
            raise
        closing = self.begin(context.__aexit__(None, None, None))
        if not concurrent.futures.wait([closing], timeout=CLOSE_S).done:
            raise DeadlineError(f"the end of {name} did not finish within {CLOSE_S:g} s, still waiting for: {owner}")
        closing.result()

    def begin(self, work: Work) -> Future:
        """Start the work, if a coroutine; the caller cancels the future to abandon the work."""
        if isinstance(work, concurrent.futures.Future):
            return work
        if isinstance(work, Coroutine):
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        return work.future()

    def _wait(self, owners: dict[Future, str], *, name: str, timeout_s: float, see: str, **how: Any) -> None:
        with self._opened(owners, name=name, timeout_s=timeout_s, see=see) as wait:
            self._wait_openly(wait, owners, **how)

    @contextmanager
    def _opened(self, owners: dict[Future, str], *, name: str, timeout_s: float, see: str) -> Iterator[OpenWait]:
        """List a wait during the block, and remember its time where the block succeeds."""
        # Steps, versions and ranks have numbers.
        seconds = self._seconds[re.sub(r"\d+", "N", name)]
        usual_s = statistics.median(seconds) if len(seconds) >= FEWEST_WAITS else None
        late_after_s = timeout_s if usual_s is None else max(LATE_S, LATE_FACTOR * usual_s, LATE_OF_LONGEST * max(seconds))
        wait = OpenWait(name, tuple(owners.values()), timeout_s, usual_s, late_after_s, see)
        self.open_waits.append(wait)
        try:
            yield wait
        finally:
            self.open_waits.remove(wait)
        seconds.append(wait.seconds)

    def _note_late(self, wait: OpenWait) -> None:
        with self._lock:
            if wait.is_late and not wait.noted and (self._telling is None or not self._telling.is_alive()):
                wait.noted = True
                # Processes that hang take seconds each, in which deaths and deadlines must be noticed.
                self._telling = threading.Thread(target=self._late, args=(wait,), name="late wait", daemon=True)
                self._telling.start()

    def _wait_openly(
        self, wait: OpenWait, owners: dict[Future, str], *, meanwhile: Callable[[], None] | None = None, outlasts: bool = False
    ) -> None:
        deadline = wait.begun_s + wait.timeout_s
        pending, outlasted = set(owners), set[Future]()
        while pending:
            wait.owners = tuple(owner for item, owner in owners.items() if item in pending)
            left_s = max(0.0, deadline - time.monotonic())
            done, _ = concurrent.futures.wait(
                pending | (set(self._vital) - outlasted),
                timeout=min(left_s, MEANWHILE_S),
                return_when=concurrent.futures.FIRST_COMPLETED,
            )
            blocked = None if done else self._blocked()
            if not done and left_s > MEANWHILE_S:
                if meanwhile is not None:
                    meanwhile()
                self._note_late(wait)
                continue
            if not done:
                for item in pending:
                    item.cancel()
                reason = "".join(f"; {why}" for why in (blocked, wait.see and f"see {wait.see}") if why)
                missing = ", ".join(wait.owners)
                raise DeadlineError(f"{wait.name} did not finish within {wait.timeout_s:.0f} s, still waiting for: {missing}{reason}")
            with self._lock:
                if any(self._has_consequence(item) for item in done & pending):
                    done |= concurrent.futures.wait(self._vital, timeout=CAUSE_S, return_when=concurrent.futures.FIRST_COMPLETED).done
                else:
                    done = {item for item in done if item in pending or not self._goes_on_without(item)}
                    if outlasts:
                        outlasted |= {item for item in done - pending if self._vital[item][1] is not None}
                # Actors that another thread has gone on without in the meantime are no longer
                # watched.
                done &= pending | (set(self._vital) - outlasted)
                for item in sorted(done, key=lambda item: item in pending):
                    self._check(item, owner=owners[item] if item in pending else self._vital[item][0])
            pending -= done

    def _blocked(self) -> str | None:
        """Return and note the call that has kept the event loop from all others for NAMED_S seconds."""
        waited_s = time.monotonic() - self._asked_s
        if self._closing.is_set():
            return None
        if self._answer.done():
            self._asked_s, self._answer, self._noted = time.monotonic(), Future(), False
            self._loop.call_soon_threadsafe(self._answer.set_result, None)
            return None
        task, frame = asyncio.current_task(self._loop), sys._current_frames().get(self._thread.ident or 0)
        if waited_s < NAMED_S or task is None or frame is None:
            return None
        call = traceback.extract_stack(frame)[-1]
        sentence = (
            f"{task.get_name()} has kept the event loop for {waited_s:.0f} s in {call.name} ({call.filename}:{call.lineno}), and every "
            "other prompt waits; await what takes time, or call it by asyncio.to_thread"
        )
        if not self._noted:
            self._noted = True
            self._note(sentence)
        return sentence

    @staticmethod
    def _has_consequence(item: Future) -> bool:
        """Return True when the death of an actor may have caused `item` to fail, False for a user's mistake."""
        error = item.exception()
        return error is not None and not isinstance(error.cause if isinstance(error, RayTaskError) else error, UserError)

    def _goes_on_without(self, item: Future) -> bool:
        """Return True when the end of this watched actor ends no wait."""
        if item not in self._vital:
            return True
        name, goes_on = self._vital.pop(item)
        error = item.exception()
        if goes_on is not None and error is not None:
            own = _own_error(error, owner=name)
            if isinstance(own, Exception) and goes_on(own):
                return True
        # Asked once: the error may be left to another wait.
        self._vital[item] = name, None if goes_on is None else lambda _: False
        return False

    def _check(self, item: Future, *, owner: str) -> None:
        error = item.exception()
        if error is not None:
            own = _own_error(error, owner=owner)
            raise own from (error if own is not error else error.__cause__)
        if item in self._vital:
            raise WorkerDiedError(f"{owner} ended although nobody asked it to")


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _own_error(error: BaseException, *, owner: str) -> BaseException:
    """Return the error of the actor `owner`, where its class is ours: a user's mistake prints as one sentence."""
    if isinstance(error, ACTOR_DEATHS):
        return WorkerDiedError(f"{owner} died: its process {exit_of(error)}")
    if isinstance(error, RayTaskError) and isinstance(error.cause, MegatronRLError):
        return error.cause
    return error


def exit_of(error: RayError) -> str:
    """Return the reason why an actor's process ended or cannot be reached, from Ray's long account."""
    if not isinstance(error, ACTOR_DEATHS):
        first = str(error).partition("\n")[0]
        return f"is gone ({first})"
    if isinstance(error, OutOfMemoryError):
        used = re.search(r"[\d.]+\s?GB used / [\d.]+\s?GB", str(error))
        return f"was ended by Ray, because the machine runs out of memory{f' ({used[0]})' if used else ''}"
    found = re.search(r"Worker exit type: (\S+) Worker exit detail: ([^.]+)", str(error))
    return f"ended ({found[1]}: {found[2]})" if found else "is gone"
