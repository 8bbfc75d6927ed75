"""What the acceptance of a node says of ranks and engines that are not as they should be; stand-ins have the faults."""

import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.acceptance import lines, stack, verdict
from megatron_rl.acceptance.judging import Line, cudnn_version, library_problems, pinned_libraries, sleep_problems
from megatron_rl.acceptance.lines import LIMITS_S, LINES
from megatron_rl.acceptance.node import Node, visible_gpu
from megatron_rl.acceptance.verdict import RESULT_FILE, accept
from megatron_rl.cli import main
from megatron_rl.doctor import Finding
from megatron_rl.errors import EngineError, UserError, WorkerDiedError
from megatron_rl.models.attention.attention_fields import attention_fields
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.planning.run_plan import CONTEXT_BYTES
from megatron_rl.planning.step_time import Rates
from megatron_rl.training.model_check import check_layout
from megatron_rl.training.topology import Topology
from megatron_rl.types import TrainBatch
from megatron_rl.versions import installed_version, transformer_engine_release

PLANNED = 1000


class TwoRanks:
    """Two ranks that give one log-prob to every token: -2, after a step -1. `faults` names what is wrong with them."""

    count = 2

    def __init__(self, *faults: str) -> None:
        self._faults, self._several, self._away = faults, False, False
        self._log_prob = self._saved = math.nan
        self.steps = 0

    def _wrong_layout(self, name: str) -> bool:
        return name in self._faults and self._several

    def open(self, settings: Any) -> None:
        self._several, self._log_prob = settings.training.topology.num_ranks > 1, -2.0

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """The answers of both, of which the second is twice as fast."""
        answer = getattr(self, f"_{method}")(**arguments)
        faster = {
            "train": lambda: {**answer, "seconds": answer["seconds"] / 2},
            "rates": lambda: Rates(*(2 * rate for rate in astuple(answer))),
        }
        return [answer, faster.get(method, lambda: answer)()]

    def _log_probs(self, *, batch: Any, temperature: float) -> Any:
        wrong = self._wrong_layout("log-probs") or ("temperature" in self._faults and temperature != 1)
        return np.full(len(batch.tokens), self._log_prob + 0.1 * wrong, np.float32)

    def _train(self, *, batch: Any) -> dict[str, float]:
        self._log_prob = -1.0 - 0.1 * self._wrong_layout("update")
        self.steps += 1
        return {"train/grad_norm": 2.0 + 0.1 * self._wrong_layout("gradients"), "seconds": self._seconds()}

    def _seconds(self) -> float:
        return {"slow": 0.6, "fast": 0.04}.get(next(iter(self._faults), ""), 0.1)

    def _rates(self, *, spec: Any, num_tokens: int, length: int, dtype: str) -> Rates:
        assert (num_tokens, length) == (4 * 64, 64), "of a micro-batch of four sequences"
        return Rates(products=10.0, attention=20.0, memory=30.0, node=math.inf, network=math.inf)

    def _foreign_bytes(self) -> int:
        """As long as the models are away an engine is there, of 1,000 bytes, and of 50 asleep."""
        if "crowded" in self._faults:
            return CONTEXT_BYTES + 1
        return 1050 if self._away or "insomnia" in self._faults else 50

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
    stage = SimpleNamespace(trained=PLANNED)
    monkeypatch.setattr(lines, "measure", lambda jobs: [SimpleNamespace(refused=None)])
    monkeypatch.setattr(lines, "stage_memories", lambda settings, answer, frees_outputs: (stage,))
    monkeypatch.setattr(lines, "read_model_spec", lambda path: None)
    # Of bare work that takes a tenth of a second.
    work = SimpleNamespace(parts=lambda rates: {"products": 0.6 / rates.products, "optimizer": 1.2 / rates.memory})
    monkeypatch.setattr(lines, "ModelSize", SimpleNamespace(of=lambda spec: None))
    monkeypatch.setattr(lines, "Flops", SimpleNamespace(of=lambda size, lengths: lengths.tolist()))
    monkeypatch.setattr(lines, "Step", SimpleNamespace(of=lambda settings, size, flops, **_: work if flops == [64] * 16 else None))
    monkeypatch.setattr(Node, "model", lambda self, name, **config: tmp_path)
    monkeypatch.setattr(Node, "weight_bytes", lambda self, model: 96)

    def run(title: str, *faults: str, synced: str = "ab", fresh: str = "ab") -> list[Line]:
        node, engines = Node("cpu", num_gpus=0, directory=tmp_path), Engines(list(synced), list(fresh))
        node._ranks = TwoRanks(*faults)  # type: ignore[assignment]
        for name in ("serving", "client", "weight_sync"):
            monkeypatch.setattr(node, name, getattr(engines, name))
        monkeypatch.setattr(node, "checksum", engines.fresh)
        return list(LINES[title](node))

    return run


FAULTS = [
    ("all-reduce", "slow"),
    ("layouts", "log-probs"),
    ("layouts", "gradients"),
    ("layouts", "update"),
    ("put away and take back", "stays"),
    ("put away and take back", "gone"),
    ("put away and take back", "bits"),
    ("checkpoints", "load"),
]


@pytest.mark.parametrize(("title", "fault"), FAULTS)
def test_a_line_fails_by_its_fault_alone(try_line: Callable[..., list[Line]], title: str, fault: str) -> None:
    assert all(line.passed for line in try_line(title))
    assert not any(line.passed for line in try_line(title, fault))


@pytest.mark.parametrize(
    ("fault", "passed"),
    [
        ("none", [True, True, True]),
        ("memory", [False, True, True]),
        ("crowded", [True, False, True]),
        ("slow", [True, True, False]),
        ("fast", [True, True, False]),
    ],
)
def test_a_step_has_to_need_the_memory_of_the_plan_and_the_time_of_its_arithmetic(
    try_line: Callable[..., list[Line]], fault: str, passed: list[bool]
) -> None:
    """A step that is faster than its arithmetic shows that this is wrong."""
    lines_of_plan = try_line("plan", fault)
    assert [line.passed for line in lines_of_plan] == passed
    if fault == "none":
        assert lines_of_plan[2].number.startswith("0.100 s, 1.00 of 0.100 s (products 0.060, optimizer 0.040), needs 0.5 to 5 of it; bare")


@pytest.mark.parametrize("title", ["weight sync", "weight sync of latent attention"])
def test_an_engine_has_to_hold_what_a_fresh_one_holds_after_each_sync(try_line: Callable[..., list[Line]], title: str) -> None:
    assert [line.passed for line in try_line(title)] == [True]
    for synced, fresh in (("ab", "ac"), ("ab", "cb"), ("aa", "aa")):
        (line,) = try_line(title, synced=synced, fresh=fresh)
        assert not line.passed, "the last of these never changed"


@pytest.fixture
def try_colocation(try_line: Callable[..., list[Line]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bool]]:
    """`try_colocation("insomnia", offset=0.1)`: whether the lines of colocation pass; engines that are `forgetful` speak anew each time."""

    def run(*faults: str, offset: float = 0.0, forgetful: bool = False) -> list[bool]:
        asked = iter(range(10**6))

        async def sync(*_: Any, **__: Any) -> float:
            return 1.0

        async def generate(node: Node, address: Any, temperature: float) -> TrainBatch:
            engine = node.ranks._log_prob + offset  # type: ignore[attr-defined]
            token = next(asked) if forgetful else node.ranks.steps  # type: ignore[attr-defined]
            return TrainBatch.from_sequences(prompts=[[1]], responses=[[token, 3]], rollout_log_probs=[[engine, engine]])

        monkeypatch.setattr(lines, "_sync_by_ipc", sync)
        monkeypatch.setattr(lines, "_generate", generate)
        monkeypatch.setattr(Node, "pool_bytes", lambda self, model: 1000)
        return [line.passed for line in try_line("colocation", *faults)]

    return run


def test_engine_and_trainer_have_to_agree_after_each_wake_at_each_temperature(try_colocation: Callable[..., list[bool]]) -> None:
    assert try_colocation() == [True, True, True]
    assert try_colocation("temperature") == [True, True, False]
    assert try_colocation(offset=1e-3) == [True, False, False]


def test_a_colocated_engine_has_to_sleep_and_to_wake_as_it_was(try_colocation: Callable[..., list[bool]]) -> None:
    assert try_colocation("insomnia") == [False, True, True]
    assert try_colocation(forgetful=True) == [False, True, True]


def test_sleep_is_judged_by_what_it_frees_and_by_what_it_keeps_each_time() -> None:
    assert sleep_problems(awake=[1950, 1950], asleep=[1000, 1000], pool=1000) == []
    assert sleep_problems(awake=[1950, 1950], asleep=[1000, 1060], pool=1000) == ["a sleep frees 890 bytes of 1000"]
    assert sleep_problems(awake=[2000, 2150], asleep=[1000, 1150], pool=1000) == [
        "asleep it holds 150 bytes more than after its first sleep"
    ]
    assert sleep_problems(awake=[5], asleep=[5], pool=0) == [], "nothing can be seen without a GPU"


SOUND = {"driver": "580.82.07", "CUDA": "13.0", "NCCL": "2.28.9", "cuDNN": "9.15.1"}


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"driver": "575.1"}, "driver is 575.1, needs 580 or newer"),
        ({"CUDA": "12.9"}, "CUDA is 12.9, needs 13 or newer"),
        ({"CUDA": "None"}, "CUDA is None, needs 13 or newer"),
        ({"NCCL": "2.27.5"}, "NCCL 2.27.5 is loaded, installed is 2.28.9"),
        ({"cuDNN": "9.10.2"}, "cuDNN 9.10.2 is loaded, installed is 9.15.1.9"),
    ],
)
def test_a_library_that_does_not_fit_fails(found: dict[str, str], problem: str) -> None:
    requirements = ["nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'", "nvidia-cudnn-cu13==9.15.1.9", "nvidia-cudnn-frontend==1.1"]
    pinned = pinned_libraries(requirements)
    assert pinned == {"NCCL": "2.28.9", "cuDNN": "9.15.1.9"}
    assert library_problems(SOUND, pinned) == library_problems(SOUND, {}) == []
    (said,) = library_problems(SOUND | found, pinned)
    assert said.startswith(problem)
    assert cudnn_version(91501) == "9.15.1"


def test_versions_fail_by_what_does_not_import_and_by_what_was_not_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: set[str] = set()
    monkeypatch.setattr(stack, "check_import", lambda module: Finding(module, "broken" if module in broken else "ok", "it", "mend it"))
    (line,) = LINES["versions"](Node("cpu", num_gpus=2, directory=tmp_path))
    assert line.passed and "megatron-core 0.1" in line.number
    broken.add("sglang.srt.server_args")
    (line,) = LINES["versions"](Node("cpu", num_gpus=2, directory=tmp_path))
    assert not line.passed and line.number.endswith("; sglang.srt.server_args it (mend it)")
    broken.clear()
    monkeypatch.setattr(stack, "installed_version", lambda name: "0.1")
    (line,) = LINES["versions"](Node("cpu", num_gpus=2, directory=tmp_path))
    assert not line.passed and "torch 0.1, tested with" in line.number


def test_a_gpu_needs_the_transformer_engine_that_was_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(SOUND)
    monkeypatch.setattr(stack, "check_import", lambda module: Finding(module, "ok", module))
    monkeypatch.setattr(stack, "known_releases", lambda kind: ())
    monkeypatch.setattr(stack, "_loaded_libraries", lambda: found)
    node, release = Node("cuda", num_gpus=2, directory=tmp_path), transformer_engine_release()
    assert installed_version(release.distribution) is None, "on this machine"
    (line,) = LINES["versions"](node)
    assert not line.passed and "transformer-engine not installed" in line.number
    monkeypatch.setattr(stack.importlib.metadata, "version", lambda name: release.version)
    monkeypatch.setattr(stack, "chosen_backends", lambda: {})
    assert [line.passed for line in LINES["versions"](node)] == [True]
    found["driver"] = "570.1"
    assert [line.passed for line in LINES["versions"](node)] == [False]
    found["driver"] = "580.1"
    monkeypatch.setattr(stack.importlib.metadata, "version", lambda name: "1.0")
    assert [line.passed for line in LINES["versions"](node)] == [False]


def test_the_gpus_of_a_node_are_divided_between_ranks_and_an_engine(tmp_path: Path) -> None:
    for num_gpus, trainers, gpus, tp in ((3, 2, [2], 1), (4, 2, [2], 1), (6, 4, [4, 5], 2), (8, 4, [4, 5], 2)):
        node = Node("cuda", num_gpus=num_gpus, directory=tmp_path)
        assert (node.num_trainers, list(node.engine_gpus()), node.engine_tp) == (trainers, gpus, tp)
    with pytest.raises(UserError, match="2 ranks and 1 engine need 3 GPUs, this node has 2"):
        list(LINES["weight sync"](Node("cuda", num_gpus=2, directory=tmp_path)))


def test_what_a_sleep_frees_is_the_cache_and_the_weights_of_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(num_layers=3, num_kv_heads=4, head_dim=5)
    monkeypatch.setattr("megatron_rl.acceptance.node.read_model_spec", lambda path: spec)
    monkeypatch.setattr(Node, "weight_bytes", lambda self, model: 1000)
    # Keys and values of 2 bytes for every token, layer, head and channel.
    cache = 2**22 * 3 * 2 * 4 * 5 * 2
    for num_gpus, expected in ((3, cache + 1000), (8, (cache + 1000) // 2)):
        assert Node("cuda", num_gpus=num_gpus, directory=tmp_path).pool_bytes(tmp_path) == expected
    assert Node("cpu", num_gpus=2, directory=tmp_path).pool_bytes(tmp_path) == 0


def test_one_rank_alone_has_nothing_to_be_compared_with(try_line: Callable[..., list[Line]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoRanks, "count", 1)
    assert [line.passed for line in try_line("layouts")] == [False] * 3


def test_layouts_ask_for_nothing_that_transformer_engine_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Listening(TwoRanks):
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


@pytest.mark.parametrize("count", [1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_checkpoint_is_saved_in_a_layout_that_any_number_of_gpus_has(tmp_path: Path, kind: Any, count: int) -> None:
    opened: list[Any] = []

    class Listening(TwoRanks):
        def open(self, settings: Any) -> None:
            super().open(settings)
            opened.append(settings)

    Listening.count = count
    node = Node(kind, num_gpus=count, directory=tmp_path)
    node._ranks = Listening()  # type: ignore[assignment]
    assert all(line.passed for line in LINES["checkpoints"](node))
    for settings in opened:
        topology = Topology.of(settings.training.topology)
        assert topology.num_ranks <= count
        check_layout(topology, read_model_spec(settings.model.path), {})


def test_an_engine_gets_the_gpu_that_its_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpu(2) == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8,7")
    assert [visible_gpu(number) for number in range(3)] == ["5", "GPU-8", "7"]


@pytest.mark.parametrize("error", [EngineError, FileNotFoundError, WorkerDiedError])
def test_every_line_is_told_whatever_becomes_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(verdict, "LIMITS_S", {"broken": 60.0, "sound": 60.0})

    def broken(node: Node) -> Iterator[Line]:
        yield Line("first half", True, "1")
        raise error("it died")

    monkeypatch.setattr(Node, "deaths", lambda self: ["rank 1 died of this"])

    monkeypatch.setattr(verdict, "LINES", {"broken": broken, "sound": lambda node: iter([Line("sound", node.num_gpus == 3, "2 GB/s")])})
    monkeypatch.setattr(Node, "close", lambda self: closed.append(True))
    assert accept(tmp_path, stand_ins=3, only=("broken", "sound")) == 1
    assert len(closed) == 2, "new ranks after a failure, and none at the end"
    first, *printed = capsys.readouterr().out.splitlines()
    assert first.startswith(f"logs are in {tmp_path}/acceptance-"), "whatever ends it"
    # A rank that died is named once.
    said = [
        "PASS  first half: 1",
        f"FAIL  broken: {error.__name__}: it died",
        *([] if error is WorkerDiedError else ["rank 1 died of this"]),
        "PASS  sound: 2 GB/s",
    ]
    assert [line.partition("  [")[0] for line in printed[:-1]] == said
    assert printed[-1].startswith("2 of 3 lines passed")
    (result,) = tmp_path.glob(f"*/{RESULT_FILE}")
    written = json.loads(result.read_text())
    assert not written["passed"]
    assert [(line["name"], line["passed"]) for line in written["lines"]] == [("first half", True), ("broken", False), ("sound", True)]
    assert accept(tmp_path, stand_ins=3, only=("sound",)) == 0


def test_a_line_that_hangs_fails_and_lets_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(node: Node) -> Iterator[Line]:
        yield Line("first half", True, "1")
        time.sleep(60)

    monkeypatch.setattr(verdict, "LINES", {"hangs": hangs, "sound": lambda node: iter([Line("sound", True, "2 GB/s")])})
    monkeypatch.setattr(verdict, "LIMITS_S", {"hangs": 0.02, "sound": 60.0})
    start = time.monotonic()
    assert accept(tmp_path, stand_ins=2, only=("hangs", "sound")) == 1
    assert time.monotonic() - start < 30
    (result,) = tmp_path.glob(f"*/{RESULT_FILE}")
    rows = json.loads(result.read_text())["lines"]
    assert [row["passed"] for row in rows] == [True, False, True]
    assert rows[1]["number"] == "DeadlineError: hangs took longer than the 0.06 s that it has of 15 minutes"


def test_all_lines_together_have_15_minutes() -> None:
    assert LIMITS_S.keys() == LINES.keys()
    assert sum(LIMITS_S.values()) <= 900


def test_what_ends_the_command_leaves_what_was_found_and_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(node: Node) -> Iterator[Line]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(verdict, "LINES", {"sound": lambda node: iter([Line("sound", True, "1")]), "interrupted": interrupted})
    monkeypatch.setattr(verdict, "LIMITS_S", {"sound": 60.0, "interrupted": 60.0})
    with pytest.raises(KeyboardInterrupt):
        accept(tmp_path, stand_ins=2, only=("sound", "interrupted"))
    (result,) = tmp_path.glob(f"*/{RESULT_FILE}")
    written = json.loads(result.read_text())
    assert (written["complete"], written["passed"], len(written["lines"])) == (False, False, 1)


def test_where_it_cannot_run_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verdict.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="found no GPU here"):
        accept(tmp_path)
    assert main(["doctor", "--on-cpu"]) == 2
    assert "add --gpu" in capsys.readouterr().err
    monkeypatch.setattr(verdict.torch.cuda, "device_count", lambda: 8)
    with pytest.raises(UserError, match="--on-cpu was given on a machine with 8 GPUs; leave it out, or hide them"):
        accept(tmp_path, stand_ins=2)


@pytest.mark.parametrize(("words", "count"), [([], 0), (["--on-cpu"], 2), (["--on-cpu", "6"], 6), (["--on-cpu=3", "--directory", "x"], 3)])
def test_so_many_processes_stand_for_gpus(monkeypatch: pytest.MonkeyPatch, words: list[str], count: int) -> None:
    given: list[int] = []

    def accepted(directory: Path, *, stand_ins: int) -> int:
        given.append(stand_ins)
        return 0

    monkeypatch.setattr(verdict, "accept", accepted)
    assert main(["doctor", "--gpu", *words]) == 0
    assert given == [count]
