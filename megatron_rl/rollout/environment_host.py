"""Host environments: one process for each trajectory, or one event loop for all async ones.

Processes are forked by a server that has imported the user's module once. So a trajectory's
environment starts in milliseconds; a hang, a crash or a limit of memory costs that trajectory.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import psutil

from megatron_rl.errors import UserError
from megatron_rl.plugins.environment import environment_class, is_async
from megatron_rl.plugins.loader import load
from megatron_rl.rewards.processes import WorkerContext, kill_session, lead_session
from megatron_rl.rollout.environment_call import Answer, EnvironmentCall, tools_of
from megatron_rl.system.deadlines import PLUGIN_IMPORT_S
from megatron_rl.system.files import disk_errors
from megatron_rl.types import Message, Prompt

MEMORY_BYTES = 4 * 2**30
"""Memory that the process of one environment may allocate."""
SWEEP_S = 1.0  # between two searches for processes that ended environments have left
_LINE_BYTES = 2**26  # of one answer
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


class Home(Protocol):
    """An open environment of one trajectory."""

    async def reset(self, prompt: Prompt) -> Answer:
        """Return the first messages, or a failure."""

    async def answer(self, message: Message) -> Answer:
        """Return the reply to a message of the policy, or a failure."""


class Environments(AbstractContextManager["Environments", None]):
    """The environments of the class at `path` with `args`; leaving the context ends all of them.

    Output printed by processes goes to `log_path`. Raises UserError for an unusable class.
    """

    def __init__(self, path: str, args: Mapping[str, Any], *, log_path: Path | None = None) -> None:
        self._path, self._args, self._log_path = path, dict(args), log_path
        make = load(path, kind="environment", args=args)
        environment = environment_class(make)
        self._tools = tools_of(environment)
        self.tools: Sequence[Message] = [tool.description for tool in self._tools.values()]
        """Descriptions of the tools for the policy: name, description and parameters."""
        self.replayable = environment.replayable
        """True where an environment whose process ended may be given all messages again."""
        self._make = make
        if log_path is not None:
            with disk_errors(log_path):
                log_path.parent.mkdir(parents=True, exist_ok=True)
        self.asynchronous = is_async(environment)
        self._loop = _Loop() if self.asynchronous else None
        self._server = None if self._loop is not None else _Server(path, self._args, log_path)
        self._forking = threading.Lock()

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.close()
        if self._server is not None:
            self._server.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Home]:
        """Yield a fresh environment, and end it with the body of `with`."""
        if self._loop is not None:
            yield _OnLoop(self._loop, EnvironmentCall(self._make, self._tools, shares_loop=True))
            return
        ours, theirs = socket.socketpair()
        # In threads, because a server without time to read lets writers wait.
        server = await asyncio.to_thread(self._fork, theirs)
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES)
        home = _InProcess(reader, writer)
        try:
            yield home
        finally:
            writer.close()
            await asyncio.to_thread(server.end, home.pid)

    def _fork(self, theirs: socket.socket) -> "_Server":
        """Start a process at the other end of a connection; return its server, new if dead."""
        with theirs, self._forking:
            assert self._server is not None, "an environment lives on a loop or in a process"
            if not self._server.process.is_alive():
                self._server.close()
                self._server = _Server(self._path, self._args, self._log_path)
            self._server.fork(theirs)
            return self._server


class _Loop:
    """A thread with an event loop for async environments."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="environments")
        self._thread.start()

    def _run(self) -> None:
        while True:
            # An exit in a task, such as one of several calls, ends the loop and not the trajectory alone.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                return

    def close(self) -> None:
        """Cancel unfinished work and stop the loop; a blocked one ends with the process."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), self.loop).result(timeout=1.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=1.0)


class _OnLoop:
    """An async environment, on the event loop that all async ones share."""

    def __init__(self, loop: _Loop, call: EnvironmentCall) -> None:
        self._loop, self._call = loop.loop, call

    async def reset(self, prompt: Prompt) -> Answer:
        return await self._there(self._call.reset(prompt))

    async def answer(self, message: Message) -> Answer:
        return await self._there(self._call.answer(message))

    async def _there(self, work: Coroutine[Any, Any, bytes]) -> Answer:
        answer: Answer = json.loads(await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop)))
        return answer


class _InProcess:
    """An environment in its own process; each message is a line of JSON."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.pid: int | None = None  # known with the first answer

    async def reset(self, prompt: Prompt) -> Answer:
        values = {field.name: getattr(prompt, field.name) for field in fields(prompt)}
        return await self._ask({"prompt": values | {"token_ids": prompt.token_ids.tolist()}})

    async def answer(self, message: Message) -> Answer:
        return await self._ask({"message": message})

    async def _ask(self, request: Mapping[str, Any]) -> Answer:
        try:
            if self.pid is None and (first := await self._reader.readline()):
                self.pid = int(first)
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        except ValueError:  # of a line that is too long
            most = f"{_LINE_BYTES / 2**20:g} MiB"
            return {"cause": "environment", "headline": f"its answer has more than {most}, needs less; cut what tools return", "trace": ""}
        if not line.endswith(b"\n"):
            return {"cause": "environment", "headline": "its process ended before it answered", "trace": "", "ended": True}
        answer: Answer = json.loads(line)
        return answer


class _Server:
    """The process that forks environments, on requests through a socket of packets."""

    def __init__(self, path: str, args: Mapping[str, Any], log_path: Path | None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = WorkerContext().Process(target=_serve, args=(theirs, path, args, log_path), name="environments")
            self.process.start()
        ready, _, _ = select.select([self._control], [], [], PLUGIN_IMPORT_S)
        if not ready or not self._control.recv(1):
            self.close()
            raise UserError(
                f"rollout.environment {path} is not imported after {PLUGIN_IMPORT_S:.0f} s, or its process ended; look in "
                f"{log_path or 'its output'}, and move slow work out of its module"
            )

    def fork(self, theirs: socket.socket) -> None:
        """Start an environment's process on the other end of a connection."""
        with contextlib.suppress(ConnectionError):  # the connection then ends without an answer
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])

    def end(self, pid: int | None) -> None:
        """Kill the process `pid` with what it started. One without an answer yet ends by itself."""
        if pid is not None:
            with contextlib.suppress(OSError):  # a server that is gone, with all of its children
                self._control.send(str(pid).encode())

    def close(self) -> None:
        """Kill and reap the server and every environment."""
        self._control.close()
        self.process.terminate()
        self.process.join()


def _serve(control: socket.socket, path: str, args: Mapping[str, Any], log_path: Path | None) -> None:
    """Fork environments until the driver ends: the inside of the server."""
    lead_session(log_path)
    make = load(path, kind="environment", args=args)
    tools = tools_of(environment_class(make))
    call, prctl = EnvironmentCall(make, tools, shares_loop=False), ctypes.CDLL(None).prctl
    used = int(Path("/proc/self/statm").read_text("ascii").split()[5]) * resource.getpagesize()
    # What is imported stays shared with the children; every page that a child touches is copied.
    gc.collect()
    gc.freeze()
    # What the module started on its import belongs to all.
    kept = {each.pid for each in psutil.Process().children()}
    children: set[int] = set()
    swept_s = time.monotonic()
    control.send(b"+")
    while True:
        select.select([control], [], [], SWEEP_S)
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                children.discard(pid)
        if time.monotonic() > swept_s + SWEEP_S:
            swept_s = time.monotonic()
            # What an ended environment started has become a child of this process.
            for stray in {each.pid for each in psutil.Process().children()} - children - kept:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stray, signal.SIGKILL)
        if not select.select([control], [], [], 0)[0]:
            continue
        word, handles, _, _ = socket.recv_fds(control, 64, 1)
        if not word:
            return
        if word != b"fork":
            # Reaped above and by nobody else, so the number is still this child's.
            if (pid := int(word)) in children:
                kill_session(pid)
            continue
        with warnings.catch_warnings():
            # The thread that follows the driver holds no lock that a child needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            control.close()
            _live(socket.socket(fileno=handles[0]), call, prctl=prctl, most_bytes=used + MEMORY_BYTES)
        children.add(pid)
        os.close(handles[0])


def _live(connection: socket.socket, call: EnvironmentCall, *, prctl: Callable[..., int], most_bytes: int) -> NoReturn:
    """Answer the driver's requests until the connection ends, in an environment's process of `most_bytes`."""
    try:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
        faulthandler.enable()  # the log has the stack of a crash
        with connection.makefile("rwb") as stream, asyncio.Runner() as runner:
            stream.write(b"%d\n" % os.getpid())
            stream.flush()
            for line in stream:
                request = json.loads(line)
                if "prompt" in request:
                    work = call.reset(Prompt(**{**request["prompt"], "token_ids": np.array(request["prompt"]["token_ids"])}))
                else:
                    work = call.answer(request["message"])
                stream.write(runner.run(work) + b"\n")
                stream.flush()
    except BaseException as error:
        # A connection that ended is the end of the trajectory.
        if not isinstance(error, ConnectionError):
            traceback.print_exc()
    finally:
        os._exit(0)
