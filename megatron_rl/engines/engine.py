"""One SGLang server as a child process: start, readiness, watch, and stop with all descendants."""

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from megatron_rl.config.derived import start_deadline_s
from megatron_rl.config.settings import ModelSettings, RolloutSettings
from megatron_rl.deadlines import ENGINE_READY_S, ENGINE_STOP_S
from megatron_rl.engines.routing_record import MixtureShape
from megatron_rl.engines.server_args import check_environment, server_arguments
from megatron_rl.errors import DeadlineError, EngineDiedError, EngineError, UserError
from megatron_rl.leftovers import Scratch, remove_leftovers, shared_memory_of
from megatron_rl.process_variables import ALLOCATOR_VARIABLES, NCCL_VARIABLES, tool_variables

LOG_TAIL_LINES = 25
POLL_S = 0.1
FIRST_PORT, LAST_PORT = 20000, 32000
"""Below the range from which the kernel takes ports for outgoing connections, so that none is taken between choice and bind."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Facts about a running engine for a client.

    `context_length` and `max_total_tokens` are in tokens: the longest sequence, and the size of the
    key-value pool shared by all running requests. `has_tokenizer` is False when the server takes
    and gives token ids only (no stop strings). `mixture` is set when the server records the experts
    of tokens.
    """

    url: str
    api_key: str = field(repr=False)
    vocab_size: int
    context_length: int
    max_total_tokens: int
    has_tokenizer: bool
    mixture: MixtureShape | None = None


class Engine:
    """One SGLang server. The server ends with the process that made this object, also after a kill.

    Args of the constructor: `model_path` a Hugging Face directory; `dtype` float32 or bfloat16;
    `seed` of the server's sampling; `log_path` gets all output of the server; `gpu_ids` the visible
    GPUs, one tensor parallel rank each; `host` the address to bind; `port` a fixed port, or None
    for a free one; `mixture` the model's experts, when the server is to record the experts of
    tokens; `colocated` when GPUs are shared; `max_prompt_tokens` the longest prompt, when all
    requests are prompts; `has_weights` False when `model_path` has none and the first sync brings
    weights; `serves_text` when the server takes and gives text, too, otherwise only where stop
    strings are asked for.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        settings: RolloutSettings,
        device_kind: Literal["cpu", "cuda"],
        dtype: str,
        seed: int,
        log_path: Path,
        gpu_ids: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int | None = None,
        mixture: MixtureShape | None = None,
        colocated: bool = False,
        max_prompt_tokens: int | None = None,
        has_weights: bool = True,
        serves_text: bool = False,
    ) -> None:
        self._start_timeout_s = start_deadline_s(ModelSettings(path=model_path))
        self._gpu_ids = tuple(gpu_ids)
        self._log_path = log_path
        self._mixture = mixture
        self._host = host
        self._port = free_port(host) if port is None else check_port(host, port)
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Scratch | None = None
        self._served = False
        self._vocab_size = _vocab_size(model_path)
        self.api_key = secrets.token_urlsafe(24)
        self._arguments = server_arguments(
            settings.sglang,
            model_path=model_path,
            device_kind=device_kind,
            dtype=dtype,
            seed=seed,
            host=host,
            port=self._port,
            api_key=self.api_key,
            needs_tokenizer=serves_text or bool(settings.sampling.stop),
            records_routing=mixture is not None,
            colocated=colocated,
            max_prompt_tokens=max_prompt_tokens,
            has_weights=has_weights,
        )

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, None when not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, *, timeout_s: float | None = None) -> EngineAddress:
        """Start the server and wait until requests are served.

        Raises:
            EngineError: the server died; the message ends with the tail of the log.
            DeadlineError: no service within `timeout_s`, by default from the bytes of the model
                (the server is then stopped).
        """
        self._start_timeout_s = timeout_s or self._start_timeout_s
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
            deadline = time.monotonic() + self._start_timeout_s
            self._wait_for("/ready", deadline=deadline, request_s=ENGINE_READY_S)
            address = self._read_address(deadline)
            self._scratch.note(shared_memory_of(_group_members(self._process.pid)))
            self._served = True
            return address
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise EngineError with the tail of the server's log when the server is not running."""
        if self._process is None:
            raise EngineError(f"the engine at {self.url} was not started")
        status = self._process.poll()
        if status is not None:
            cause = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            kind = EngineDiedError if status < 0 or self._served else EngineError
            raise kind(f"the SGLang server at {self.url} died ({cause}); the end of its log {self._log_path}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        if not self._log_path.exists():
            return ""
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def stop(self) -> None:
        """Kill the server with every process of the process group, and reap it. Harmless when not
        running.

        SGLang's own shutdown takes 5 seconds and saves nothing.
        """
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
        """Return the server's variables.

        A dying scheduler must not wait a minute for GPU dumps without GPU.
        """
        check_environment(os.environ)
        inherited = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
        environment = {**inherited, "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}
        environment |= tool_variables(inherited, device_kind=self._arguments["device"])
        if self._arguments["device"] == "cuda":
            environment = NCCL_VARIABLES | environment
        # SGLang would choose the address with a route to the internet among the addresses of this
        # machine.
        environment["SGLANG_HOST_IP"] = self._host
        if self._gpu_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpu_ids)
        if self._arguments["device"] == "cpu":
            # Two spinning OpenMP threads on shared cores cost up to ten times the throughput.
            environment["OMP_NUM_THREADS"] = "1"
            ranks = self._arguments.get("tp_size", 1)
            if ranks > 1:
                environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
        return environment

    def _wait_for(self, path: str, *, deadline: float, request_s: float = math.inf) -> bytes:
        """Return the body of a GET, repeated until success, each try for at most `request_s`
        seconds.

        Raises EngineError when the server dies, DeadlineError after `deadline` on the monotonic
        clock.
        """
        while True:
            self.check()
            body = self._get(path, timeout_s=min(request_s, max(POLL_S, deadline - time.monotonic())))
            if body is not None:
                return body
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the SGLang server at {self.url} does not answer {path} after {self._start_timeout_s:.0f} s"
                    f" (model.deadline_s); the end of its log {self._log_path}:\n{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def _get(self, path: str, *, timeout_s: float) -> bytes | None:
        """Body of a GET, None while the server does not answer with success."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.api_key}"})
        # No proxy: one set in the environment would capture traffic between our own processes.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as response:
                return bytes(response.read())
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return None

    def _read_address(self, deadline: float) -> EngineAddress:
        """Ask a ready server for its facts; on a loaded machine the answer takes as long as a
        generation.
        """
        models, server = (self._wait_for(path, deadline=deadline) for path in ("/v1/models", "/server_info"))
        return EngineAddress(
            url=self.url,
            api_key=self.api_key,
            vocab_size=self._vocab_size,
            context_length=int(json.loads(models)["data"][0]["max_model_len"]),
            max_total_tokens=int(json.loads(server)["max_total_num_tokens"]),
            has_tokenizer=not self._arguments["skip_tokenizer_init"],
            mixture=self._mixture,
        )


def free_port(host: str) -> int:
    """Return a port of `host` without a listener.

    Raises EngineError when a hundred tries find none.
    """
    for _ in range(100):
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        error = _bind_error(host, port)
        if error is None:
            return port
        if error.errno != errno.EADDRINUSE:
            return check_port(host, port)
    raise EngineError(f"no free port between {FIRST_PORT} and {LAST_PORT} on {host}")


def check_port(host: str, port: int) -> int:
    """Return `port`.

    Raise UserError for a port in use, or a `host` that is no address of this machine.
    """
    error = _bind_error(host, port)
    if error is None:
        return port
    if error.errno == errno.EADDRINUSE:
        raise UserError(f"port {port} on {host} is in use, an engine needs a free one; choose another or let the engine choose")
    if error.errno == errno.EACCES:
        raise UserError(f"port {port} on {host} is for the system's own services ({error.strerror}); choose one above 1023")
    raise UserError(
        f"{host} is no address of this machine ({error.strerror}), needs one that it can listen on, such as 127.0.0.1; choose another"
    )


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def _vocab_size(model_path: Path) -> int:
    """Return the rows of the embedding by config.json.

    A token id at or above would crash the server.
    """
    try:
        config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
        return int(config["vocab_size"])
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise UserError(
            f"{model_path} has no config.json with a vocab_size ({error!r}); give a Hugging Face directory as model.path"
        ) from error


def _group_members(group: int) -> list[int]:
    """Process ids of the living members of a process group; a zombie is gone already."""
    members = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except ProcessLookupError:
            continue
    return members
