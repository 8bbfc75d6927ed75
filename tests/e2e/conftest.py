"""Starting `megatron-rl` as its user does, and looking at everything it starts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from chat_parts import chat_tokenizer
from small_run import chat_arguments
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0

# Ray is started in processes of their own: what it leaves in a process would reach every later test.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster()
for number, words in enumerate(sys.argv[1:]):
    cpus, gpus = map(int, words.split(","))
    cluster.add_node(num_cpus=cpus, num_gpus=gpus, object_store_memory=150 * 2**20, include_dashboard=False)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=int, default=60, help="steps of the run with a fault every 15; 300 in the whole one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: begun last, it would run alone."""
    items.sort(key=lambda item: item.path.name != "test_exact_resume.py")


class Command:
    """A running `megatron-rl` in a process group of its own; `output` grows in a file."""

    def __init__(self, arguments: list[str], *, log: Path) -> None:
        self._log = log
        self._seen: set[psutil.Process] = set()
        self.roots: list[int] = []
        """Other processes below which the command's may be: a cluster's."""
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl", *arguments],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def descendants(self) -> set[psutil.Process]:
        """Every process that the command has started and that this object has seen."""
        for root in (self.process.pid, *self.roots):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen |= set(psutil.Process(root).children(recursive=True))
        return self._seen

    def members(self, words: str) -> list[psutil.Process]:
        """Those of its processes that have `words` in their command line, the oldest first."""
        found = []
        for process in self.descendants():
            # One that ends at this moment is none.
            with contextlib.suppress(psutil.NoSuchProcess):
                if words in " ".join(process.cmdline()):
                    found.append((process.create_time(), process))
        return [process for _, process in sorted(found, key=lambda each: each[0])]

    def wait_for(self, text: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the output contains `text`."""
        self.wait_until(lambda: text in self.output, what=text, timeout_s=timeout_s)

    def wait_until(self, holds: Callable[[], object], *, what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until something holds, which the command has to live to see."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            self.descendants()
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what!r} within {timeout_s} s:\n{self.output}"
            time.sleep(0.2)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end and return the exit status."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.descendants()
            assert time.monotonic() < deadline, f"still running after {timeout_s} s:\n{self.output}"
            time.sleep(0.2)
        return self.process.returncode

    def survivors(self, *, timeout_s: float = 15.0) -> list[str]:
        """What the command started and left running for `timeout_s` seconds, as command lines."""
        _, alive = psutil.wait_procs([process for process in self._seen if process.is_running()], timeout=timeout_s)
        found = []
        for process in alive:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue
        return found

    def reap(self) -> None:
        """End whatever is left, whatever the test found."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for process in self._seen:
            if process.is_running():
                process.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """`start("train", "config.yaml", "key=value", ...)` starts the command line; everything it started ends with the test."""
    started: list[Command] = []

    def run(*arguments: object) -> Command:
        command = Command([str(argument) for argument in arguments], log=tmp_path / f"output-{len(started)}.txt")
        started.append(command)
        return command

    yield run
    for command in started:
        command.reap()


@pytest.fixture(scope="session")
def finish() -> Callable[..., None]:
    """`finish(log, "train", "config.yaml", "key=value", ...)` runs the command line to its end, whose status has to be 0."""

    def run(log: Path, *arguments: object) -> None:
        command = Command([str(argument) for argument in arguments], log=log)
        try:
            assert command.wait() == 0, command.output
        finally:
            command.reap()

    return run


@pytest.fixture
def cluster() -> Iterator[Callable[..., str]]:
    """`cluster("4,2", "4,2")` starts nodes with so many CPUs and GPUs, which may be make-believe; returns Ray's address."""
    started: list[subprocess.Popen[str]] = []

    def start(*nodes: str) -> str:
        # Ray gives workers the lowest priority else, and a busy machine then no time.
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, *nodes],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_worker_niceness": "0"},
        )
        started.append(process)
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        return next(line.strip() for line in lines if ":" in line and " " not in line.strip())

    yield start
    for process in started:
        process.communicate(timeout=60)


def read_json(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The arithmetic example's model and data."""
    directory = tmp_path_factory.mktemp("arithmetic") / "task"
    subprocess.run(
        [sys.executable, "examples/arithmetic/make_task.py", str(directory), "--seed", "1"], cwd=ROOT, check=True, timeout=TIMEOUT_S
    )
    # Fewer held-out problems: each evaluation then takes a tenth of the time.
    held_out = directory / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:50]))
    return directory


@pytest.fixture(scope="session")
def chat_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model with random weights, and rows."""
    directory = tmp_path_factory.mktemp("chat")
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    lines = [json.dumps({"prompt": f"Question {number}", "label": str(number)}) for number in range(12)]
    (directory / "rows.jsonl").write_text("\n".join(lines))
    return directory


@pytest.fixture(scope="session")
def interviews(chat_task: Path, tmp_path_factory: pytest.TempPathFactory, finish: Callable[..., None]) -> Path:
    """The directory of a run of two steps with an environment, which nothing interrupts."""
    root = tmp_path_factory.mktemp("interviews")
    finish(root / "output.txt", *chat_arguments(chat_task, root / "run"))
    return root / "run"
