"""What the acceptance of a node says of ranks and engines that are not as they should be; stand-ins have the faults."""

import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.acceptance import lines, verdict
from megatron_rl.acceptance.lines import LINES, Line
from megatron_rl.acceptance.node import Node, visible_gpu
from megatron_rl.acceptance.verdict import RESULT_FILE, accept
from megatron_rl.cli import main
from megatron_rl.errors import EngineError, UserError
from megatron_rl.models.attention.attention_fields import attention_fields
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.types import TrainBatch

PLANNED = 1000


class Ranks:
    """Two ranks that give one log-prob to every token: -2, after a step -1. `faults` names what is wrong with them."""

    count = 2

    def __init__(self, *faults: str) -> None:
        self._faults, self._several, self._away = faults, False, False
        self._log_prob = self._saved = math.nan

    def _wrong_layout(self, name: str) -> bool:
        return name in self._faults and self._several

    def open(self, settings: Any) -> None:
        self._several, self._log_prob = settings.training.topology.num_ranks > 1, -2.0

    def call(self, method: str, **arguments: Any) -> list[Any]:
        return [getattr(self, f"_{method}")(**arguments)]

    def _log_probs(self, *, batch: Any, temperature: float) -> Any:
        wrong = self._wrong_layout("log-probs") or ("temperature" in self._faults and temperature != 1)
        return np.full(len(batch.tokens), self._log_prob + 0.1 * wrong, np.float32)

    def _train(self, *, batch: Any) -> dict[str, float]:
        self._log_prob = -1.0
        return {"train/grad_norm": 2.0 + 0.1 * self._wrong_layout("gradients"), "seconds": 0.1}

    def _state_bytes(self) -> int:
        return 0 if self._away and "stays" not in self._faults else 100

    def put_away(self, parts: Any) -> None:
        self._away = True

    def take_back(self, parts: Any) -> None:
        self._away = "gone" in self._faults
        self._log_prob += 1e-7 * ("bits" in self._faults)

    def _save(self, *, directory: Path) -> None:
        self._saved = self._log_prob

    def _load(self, *, directory: Path) -> None:
        self._log_prob = self._log_prob if "load" in self._faults else self._saved

    def _save_hf(self, *, directory: Path) -> None:
        pass

    def _peak_of_step(self, *, batch: Any) -> int:
        return round(PLANNED * (1.11 if "memory" in self._faults else 1.09))

    def all_reduce(self, *, num_bytes: int, repeats: int) -> list[float]:
        return [0.001, 100.0 if "slow" in self._faults else 0.001]


class Engines:
    """In a node's place: engines whose checksums are those of two syncs, and of two that start afresh."""

    def __init__(self, synced: list[str], fresh: list[str]) -> None:
        self._synced, self._fresh = synced, fresh

    @contextmanager
    def serving(self, *_: Any, **__: Any) -> Iterator[None]:
        yield

    @asynccontextmanager
    async def client(self, _: Any) -> AsyncIterator["Engines"]:
        yield self

    async def checksum(self) -> str:
        return self._synced.pop(0)

    def weight_sync(self, *_: Any, **__: Any) -> "Engines":
        return self

    async def connect(self) -> None:
        """Nothing has two ends."""

    async def run(self, *, version: int) -> None:
        """A sync."""

    async def disconnect(self) -> None:
        """Nothing has two ends."""

    async def release_memory(self, parts: Any) -> None:
        """Nothing is there."""

    async def restore_memory(self, parts: Any) -> None:
        """Nothing is there."""

    def fresh(self, *_: Any, **__: Any) -> str:
        return self._fresh.pop(0)


@pytest.fixture
def try_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Line]]:
    """`try_line("layouts", "gradients")`: the lines of ranks with that fault."""
    stage = SimpleNamespace(activations=PLANNED - 10, logits=1, working=10)
    monkeypatch.setattr(lines, "measure", lambda jobs: [SimpleNamespace(refused=None)])
    monkeypatch.setattr(lines, "stage_memories", lambda settings, answer, frees_outputs: (stage,))
    monkeypatch.setattr(lines, "read_model_spec", lambda path: None)
    monkeypatch.setattr(Node, "model", lambda self, name, **config: tmp_path)
    monkeypatch.setattr(Node, "weight_bytes", lambda self, model: 96)

    def run(title: str, *faults: str, synced: str = "ab", fresh: str = "ab") -> list[Line]:
        node, engines = Node("cpu", num_gpus=0, directory=tmp_path), Engines(list(synced), list(fresh))
        node._ranks = Ranks(*faults)  # type: ignore[assignment]
        for name in ("serving", "client", "weight_sync"):
            monkeypatch.setattr(node, name, getattr(engines, name))
        monkeypatch.setattr(node, "checksum", engines.fresh)
        return list(LINES[title](node))

    return run


FAULTS = [
    ("all-reduce", "slow"),
    ("layouts", "log-probs"),
    ("layouts", "gradients"),
    ("put away and take back", "stays"),
    ("put away and take back", "gone"),
    ("put away and take back", "bits"),
    ("plan", "memory"),
    ("checkpoints", "load"),
]


@pytest.mark.parametrize(("title", "fault"), FAULTS)
def test_a_line_fails_by_its_fault_alone(try_line: Callable[..., list[Line]], title: str, fault: str) -> None:
    assert all(line.passed for line in try_line(title))
    assert not any(line.passed for line in try_line(title, fault))


@pytest.mark.parametrize("title", ["weight sync", "weight sync of latent attention"])
def test_an_engine_has_to_hold_what_a_fresh_one_holds_after_each_sync(try_line: Callable[..., list[Line]], title: str) -> None:
    assert [line.passed for line in try_line(title)] == [True]
    for synced, fresh in (("ab", "ac"), ("ab", "cb"), ("aa", "aa")):
        (line,) = try_line(title, synced=synced, fresh=fresh)
        assert not line.passed, "the last of these never changed"


def test_engine_and_trainer_have_to_agree_after_each_wake_at_each_temperature(
    try_line: Callable[..., list[Line]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = 0.0

    async def sync(*_: Any, **__: Any) -> float:
        return 1.0

    async def generate(node: Node, address: Any, temperature: float) -> TrainBatch:
        engine = node.ranks._log_prob + offset  # type: ignore[attr-defined]
        return TrainBatch.from_sequences(prompts=[[1]], responses=[[2, 3]], rollout_log_probs=[[engine, engine]])

    monkeypatch.setattr(lines, "_sync_by_ipc", sync)
    monkeypatch.setattr(lines, "_generate", generate)
    assert [line.passed for line in try_line("colocation")] == [True, True, True]
    assert [line.passed for line in try_line("colocation", "temperature")] == [True, True, False]
    offset = 1e-3
    assert [line.passed for line in try_line("colocation")] == [True, False, False]


def test_two_gpus_do_not_hold_two_ranks_and_an_engine(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="need 3 GPUs, this node has 2"):
        list(LINES["weight sync"](Node("cuda", num_gpus=2, directory=tmp_path)))


def test_layouts_ask_for_nothing_that_transformer_engine_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Listening(Ranks):
        def open(self, settings: Any) -> None:
            super().open(settings)
            opened.append(settings)

    node = Node("cpu", num_gpus=0, directory=tmp_path)
    node._ranks = Listening()  # type: ignore[assignment]
    monkeypatch.setattr(lines, "has_transformer_engine", lambda: True)
    assert all(line.passed for line in LINES["layouts"](node))
    tried = [settings for settings in opened if settings.model.attention == "transformer_engine"]
    for settings in tried:
        attention_fields(read_model_spec(settings.model.path), attention="transformer_engine", cp=settings.training.topology.cp)
    assert (len(tried), len(opened) - len(tried)) == (8, 9), "all that torch computes, but windows with cp"


def test_an_engine_gets_the_gpu_that_its_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpu(2) == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8,7")
    assert [visible_gpu(number) for number in range(3)] == ["5", "GPU-8", "7"]


@pytest.mark.parametrize("error", [EngineError, FileNotFoundError, RuntimeError])
def test_every_line_is_told_whatever_becomes_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    closed: list[bool] = []

    def broken(node: Node) -> Iterator[Line]:
        yield Line("first half", True, "1")
        raise error("it died")

    monkeypatch.setattr(verdict, "LINES", {"broken": broken, "sound": lambda node: iter([Line("sound", True, "2 GB/s")])})
    monkeypatch.setattr(Node, "close", lambda self: closed.append(True))
    assert accept(tmp_path, on_cpu=True, only=("broken", "sound")) == 1
    assert len(closed) == 2, "new ranks after a failure, and none at the end"
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in printed[:3]] == [
        ["PASS", "first half: 1"],
        ["FAIL", f"broken: {error.__name__}: it died"],
        ["PASS", "sound: 2 GB/s"],
    ]
    assert printed[3].startswith("2 of 3 lines passed")
    (result,) = tmp_path.glob(f"*/{RESULT_FILE}")
    written = json.loads(result.read_text())
    assert not written["passed"]
    assert [(line["name"], line["passed"]) for line in written["lines"]] == [("first half", True), ("broken", False), ("sound", True)]
    assert accept(tmp_path, on_cpu=True, only=("sound",)) == 0


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verdict.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="found no GPU here"):
        accept(tmp_path, on_cpu=False)
    assert main(["doctor", "--on-cpu"]) == 2
    assert "add --gpu" in capsys.readouterr().err
