"""One SGLang server as a child process: start, readiness, watch, and stop with all descendants.

An engine on several nodes has a server on each. The one of node rank 0 answers for all; the others
meet it at an address of its machine and serve no requests.
"""

import errno
import http.client
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.engines.answers import MixtureShape
from megatron_rl.engines.server_args import check_environment
from megatron_rl.errors import DeadlineError, EngineDiedError, EngineError, UserError
from megatron_rl.system.deadlines import ENGINE_READY_S, ENGINE_STOP_S, START_S
from megatron_rl.system.leftovers import Scratch, remove_leftovers, shared_memory_of
from megatron_rl.system.process_variables import ALLOCATOR_VARIABLES, NCCL_VARIABLES, tool_variables

LOG_TAIL_LINES = 25
SCHEDULER = "sglang::scheduler"  # how names of SGLang's processes that make steps begin
LOOK_S, IDLE_SHARE = 10.0, 0.01  # a process with less than this share of a CPU for so long does no work
POLL_S = 0.1
FIRST_PORT, LAST_PORT = 20000, 32000
"""Below the kernel's ports of outgoing connections, which could take one before the bind."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Facts about a running engine for a client."""

    url: str
    api_key: str = field(repr=False)
    vocab_size: int
    context_length: int  # tokens of the longest sequence
    max_total_tokens: int  # of the key-value pool, shared by all running requests
    has_tokenizer: bool  # without one there are no stop strings
    mixture: MixtureShape | None = None  # when the server records the experts of tokens
    hosts: tuple[str, ...] = ()  # of all nodes of an engine on several, in the order of its ranks


class Engine:
    """One SGLang server. The server ends with the process that made this object, also after a kill.

    `arguments` are those of `server_arguments`. `log_path` gets all output of the server; `gpu_ids`
    are the visible GPUs; `host` is the address to bind; `port` None chooses a free one. On the
    nodes of one engine, servers of a `node_rank` meet at the `meeting_point` of the first.
    `check_others` raises where another server of the engine does not run.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        log_path: Path,
        gpu_ids: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int | None = None,
        mixture: MixtureShape | None = None,
        node_rank: int = 0,
        meeting_point: str | None = None,
        check_others: Callable[[], None] = lambda: None,
    ) -> None:
        self._gpu_ids, self.host, self._mixture, self._check_others = gpu_ids, host, mixture, check_others
        self._log_path = log_path.with_stem(f"{log_path.stem}-node-{node_rank}") if node_rank else log_path
        self._vocab_size = _vocab_size(Path(arguments["model_path"]))
        self.api_key = secrets.token_urlsafe(24)
        self._claims = [socket.socket(socket.AF_UNIX) for _ in range(2)]  # of the port, and that of the meeting point
        port = free_port(host, claim=self._claims[0]) if port is None else check_port(host, port)
        self.url = f"http://{host}:{port}"
        self._arguments = {**arguments, "host": host, "port": port, "api_key": self.api_key}
        self.meeting_point = meeting_point
        if self._arguments.get("nnodes", 1) > 1:
            self.meeting_point = meeting_point or f"{host}:{self._arguments.get('nccl_port') or free_port(host, claim=self._claims[1])}"
            self._arguments |= {"node_rank": node_rank, "dist_init_addr": self.meeting_point}
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Scratch | None = None
        self._served = False

    @property
    def pid(self) -> int | None:
        """Process id of the server, None when not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, *, timeout_s: float = START_S) -> EngineAddress:
        """Start the server and wait until requests are served.

        Raises EngineError for a dead server, and DeadlineError after `timeout_s`, both with the tail
        of the log; the server is then stopped.
        """
        with self._starting("/ready", timeout_s=timeout_s) as wait:
            # On a loaded machine these take as long as a generation.
            models, server = (json.loads(wait(path)) for path in ("/v1/models", "/server_info"))
            return EngineAddress(
                url=self.url,
                api_key=self.api_key,
                vocab_size=self._vocab_size,
                context_length=int(models["data"][0]["max_model_len"]),
                max_total_tokens=int(server["max_total_num_tokens"]),
                has_tokenizer=not self._arguments["skip_tokenizer_init"],
                mixture=self._mixture,
            )

    def follow(self, *, timeout_s: float = START_S) -> None:
        """As `start` for a server of node rank 1 or more, which has its share of the model when its health endpoint answers."""
        with self._starting("/health", timeout_s=timeout_s):
            pass

    @contextmanager
    def _starting(self, path: str, *, timeout_s: float) -> Iterator[Callable[[str], bytes]]:
        """Start the server, wait for `path`, and yield the wait for others; stop the server after a failure."""
        if self._process is not None:
            raise EngineError(f"the engine at {self.url} was started before; make a new Engine")
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers()
        self._scratch = Scratch.make()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.engines.sglang_server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**self._environment(), "TMPDIR": str(self._scratch.path)},
            )
        assert self._process.stdin is not None, "opened as a pipe"
        try:
            with self._process.stdin as orders:
                orders.write(json.dumps(self._arguments).encode())
            wait = partial(self._wait_for, until_s=time.monotonic() + timeout_s, timeout_s=timeout_s)
            wait(path, request_s=ENGINE_READY_S)
            yield wait
            self._scratch.note(shared_memory_of(_group_members(self._process.pid)))
            self._served = True
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise EngineError with the tail of the server's log when the server, or another one of the engine, is not running."""
        if self._process is None:
            raise EngineError(f"the engine at {self.url} was not started")
        status = self._process.poll()
        if status is not None:
            cause = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            kind = EngineDiedError if status < 0 or self._served else EngineError
            raise kind(f"the SGLang server at {self.url} died ({cause}){self._log_tail()}")
        self._check_others()

    def is_still(self, *, answers: bool, waits: bool = False) -> bool:
        """Return True when a scheduler does no work for LOOK_S seconds, or where the server `answers` nothing, the server.

        A scheduler's compilers work for it. A process that `waits` for others does no work, either: it has to be stopped by a signal.
        """
        if self.pid is None:
            return False
        group = [psutil.Process(pid) for pid in _group_members(self.pid)]
        looked_at = [each for each in group if each.name().startswith(SCHEDULER) or (each.pid == self.pid and not answers)]
        before_s = [_worked_s(each) for each in looked_at]
        time.sleep(LOOK_S)
        is_stopped = [not waits or each.status() == psutil.STATUS_STOPPED for each in looked_at]
        busy_s = [_worked_s(each) - before for each, before in zip(looked_at, before_s, strict=True)]
        return any(stopped and 0 <= busy < IDLE_SHARE * LOOK_S for stopped, busy in zip(is_stopped, busy_s, strict=True))

    def _log_tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines() if self._log_path.exists() else []
        return "\n".join([f"; the end of its log {self._log_path}:", *lines[-LOG_TAIL_LINES:]])

    def stop(self) -> None:
        """Kill the server with its process group, and reap it; SGLang's own shutdown saves nothing."""
        for claim in self._claims:
            claim.close()
        if self._process is None or self._scratch is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + ENGINE_STOP_S
        while time.monotonic() < deadline and _group_members(self._process.pid):
            time.sleep(POLL_S / 5)
        self._scratch.remove_all()

    def _environment(self) -> dict[str, str]:
        """Return the server's variables. Raises UserError for one that changes draws or reports."""
        check_environment(os.environ)
        inherited = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
        # A dying scheduler must not wait a minute for GPU dumps without GPU.
        environment = {**inherited, "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}
        environment |= tool_variables(inherited, device_kind=self._arguments["device"])
        if self._arguments["device"] == "cuda":
            environment = NCCL_VARIABLES | environment
        # SGLang would choose the address with a route to the internet.
        environment["SGLANG_HOST_IP"] = self.host
        if self._gpu_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpu_ids)
        if self._arguments["device"] == "cpu":
            # Two spinning OpenMP threads on shared cores cost up to ten times the throughput.
            environment["OMP_NUM_THREADS"] = "1"
            ranks = self._arguments.get("tp_size", 1)
            if ranks > 1:
                environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
        return environment

    def _wait_for(self, path: str, *, until_s: float, timeout_s: float, request_s: float = math.inf) -> bytes:
        """Return the body of a GET, repeated until success or `until_s`, each for `request_s` at most."""
        while True:
            self.check()
            body = self._get(path, timeout_s=min(request_s, max(POLL_S, until_s - time.monotonic())))
            if body is not None:
                return body
            if time.monotonic() > until_s:
                late = f"does not answer {path} after {timeout_s:.0f} s (model.deadline_s)"
                raise DeadlineError(f"the SGLang server at {self.url} {late}{self._log_tail()}")
            time.sleep(POLL_S)

    def _get(self, path: str, *, timeout_s: float) -> bytes | None:
        """Return the body of a GET, None without an answer of success."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.api_key}"})
        # No proxy: one set in the environment would capture traffic between our own processes.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as response:
                return bytes(response.read())
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return None


def free_port(host: str, *, claim: socket.socket) -> int:
    """Return a port of `host` without a listener. Raises EngineError after a hundred tries.

    No other call on this machine returns it until `claim`, a new UNIX socket, is closed: who is to listen may
    need minutes to do so.
    """
    for _ in range(100):
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        error = _bind_error(host, port)
        if error is None:
            try:
                claim.bind(f"\0megatron-rl port {port}")
            except OSError:  # another process's
                continue
            return port
        if error.errno != errno.EADDRINUSE:
            return check_port(host, port)
    raise EngineError(f"no free port between {FIRST_PORT} and {LAST_PORT} on {host}")


def check_port(host: str, port: int) -> int:
    """Return `port`. Raises UserError for a port in use, or a `host` of another machine."""
    error = _bind_error(host, port)
    if error is None:
        return port
    if error.errno == errno.EADDRINUSE:
        raise UserError(f"port {port} on {host} is in use, an engine needs a free one; choose another or let the engine choose")
    if error.errno == errno.EACCES:
        raise UserError(f"port {port} on {host} is for the system's own services ({error.strerror}); choose one above 1023")
    got = f"{host} is no address of this machine ({error.strerror})"
    raise UserError(f"{got}, needs one that it can listen on, such as 127.0.0.1; choose another")


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
        except TypeError as error:
            # A name that has no form in ASCII.
            return OSError(errno.EINVAL, str(error))
    return None


def _vocab_size(model_path: Path) -> int:
    """Return the rows of the embedding by config.json; a higher token id would crash the server."""
    try:
        config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
        return int(config["vocab_size"])
    except (OSError, json.JSONDecodeError, KeyError) as error:
        got = f"{model_path} has no config.json with a vocab_size ({error!r})"
        raise UserError(f"{got}; give a Hugging Face directory as model.path") from error


def _worked_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a server, or of a scheduler with those below it, also of those that have ended."""
    if not process.name().startswith(SCHEDULER):
        return float(sum(process.cpu_times()[:2]))
    worked_s = float(sum(process.cpu_times()[:4]))
    for each in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            worked_s += sum(each.cpu_times()[:4])
    return worked_s


def _group_members(group: int) -> list[int]:
    """Return process ids of the members of a process group, without zombies."""
    members = []
    for process in psutil.process_iter(["pid", "status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members
