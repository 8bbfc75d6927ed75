"""The trial of a node says what is wrong with ranks, engines and runs that are not as they should be; stand-ins have the faults."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.check import Check
from megatron_rl.doctor import trial
from megatron_rl.doctor.machine import library_problems, pinned_libraries
from megatron_rl.doctor.node import Node
from megatron_rl.doctor.trial import LINES, RESULT_FILE, accept, sleep_problems
from megatron_rl.errors import DeadlineError, UserError
from megatron_rl.models.attention.attention_choice import lacking_in_transformer_engine
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.planning.run_plan import CONTEXT_BYTES
from megatron_rl.planning.step_time import Rates
from megatron_rl.training.model_check import check_layout
from megatron_rl.training.topology import Topology

PLANNED = 1000


class TwoRanks:
    """Two ranks that give one log-prob to every token: -2, after a step -1. `faults` names what is wrong with them."""

    def __init__(self, *faults: str) -> None:
        self._faults, self._several, self._away, self._back = faults, False, False, False
        self._log_prob = self._saved = math.nan
        self.opened: list[Any] = []

    def _wrong_layout(self, name: str) -> bool:
        return name in self._faults and self._several

    def open(self, settings: Any) -> None:
        for fault, error in (("windows", UserError("these kernels have no windows")), ("late", DeadlineError("layouts took longer"))):
            if fault in self._faults and "windows" in str(settings.model.path):
                raise error
        self._several, self._log_prob = settings.training.topology.num_ranks > 1, -2.0
        self.opened.append(settings)

    def apply(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """The answers of both, of which the second is twice as fast."""
        answer = getattr(self, f"_{function.__name__}")(**arguments)
        if function.__name__ == "step":
            return [answer, {**answer, "seconds": answer["seconds"] / 2}]
        return [answer, Rates(*(2 * rate for rate in astuple(answer))) if function.__name__ == "device_rates" else answer]

    def log_probs(self, batch: Any, *, temperature: float) -> Any:
        return np.full(len(batch.tokens), self._log_prob + 0.1 * self._wrong_layout("log-probs"), np.float32)

    def _step(self, *, batch: Any) -> dict[str, float]:
        self._log_prob = -1.0 - 0.1 * self._wrong_layout("update")
        seconds = {"slow": 0.6, "fast": 0.04}.get(next(iter(self._faults), ""), 0.1)
        return {"train/grad_norm": 2.0 + 0.1 * self._wrong_layout("gradients"), "seconds": seconds}

    def _device_rates(self, *, spec: Any, num_tokens: int, length: int, dtype: str) -> Rates:
        assert (num_tokens, length) == (4 * 64, 64), "of a micro-batch of four sequences"
        return Rates(products=10.0, attention=20.0, memory=30.0, node=math.inf, network=math.inf)

    def _foreign_bytes(self) -> int:
        return CONTEXT_BYTES + ("crowded" in self._faults)

    def _state_bytes(self) -> int:
        if self._away:
            return 600 if "stays" in self._faults else 500
        return 10_000 + 90 * self._back - 200 * (self._back and "less" in self._faults)

    def _peak_of_step(self, *, batch: Any) -> int:
        return round(PLANNED * (1.11 if "memory" in self._faults else 1.09))

    def _all_reduce(self, *, num_bytes: int, repeats: int) -> float:
        return 100.0 if "slow" in self._faults else 0.001

    def call(self, method: str, *arguments: Any) -> None:
        getattr(self, method)(*arguments)

    def put_away(self, parts: Any) -> None:
        self._away = True

    def take_back(self, parts: Any) -> None:
        self._away, self._back = "gone" in self._faults, True
        self._log_prob += 1e-7 * ("bits" in self._faults)

    def begin_save(self, directory: Path) -> None:
        self._saved = self._log_prob

    def finish_save(self) -> None:
        """It is written."""

    def load(self, directory: Path, *, weights_only: bool) -> None:
        self._log_prob = self._log_prob if "load" in self._faults else self._saved


@pytest.fixture
def try_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`try_line("layouts", "gradients")`: how the checks of ranks with that fault stand."""
    monkeypatch.setattr(trial, "make_job", lambda settings, spec, attention: None)
    monkeypatch.setattr(trial, "measure", lambda jobs: [SimpleNamespace(refused=None)])
    monkeypatch.setattr(trial, "stage_memories", lambda job, answer, frees_outputs: (SimpleNamespace(trained=PLANNED),))
    monkeypatch.setattr(trial, "read_model_spec", lambda path: None)
    # Of bare work that takes a tenth of a second.
    work = SimpleNamespace(parts=lambda rates: {"products": 0.6 / rates.products, "optimizer": 1.2 / rates.memory})
    monkeypatch.setattr(trial, "ModelSize", SimpleNamespace(of=lambda spec: None))
    of_step = {"recompute": None, "longest": 64, "num_sequences": 16, "per_node": 2, "itemsize": 4}
    monkeypatch.setattr(trial, "Step", SimpleNamespace(of=lambda training, size, **given: work if given == of_step else None))
    monkeypatch.setattr(Node, "model", lambda self, name, **config: tmp_path)

    def run(title: str, *faults: str) -> list[str]:
        node = Node("cpu", num_gpus=2, directory=tmp_path)
        node._ranks = TwoRanks(*faults)  # type: ignore[assignment]
        return [check.level for check in LINES[title](node)]

    return run


FAULTS = [
    ("all-reduce", "slow"),
    ("layouts", "log-probs"),
    ("layouts", "gradients"),
    ("layouts", "update"),
    ("put away and take back", "stays"),
    ("put away and take back", "gone"),
    ("put away and take back", "less"),
    ("put away and take back", "bits"),
    ("checkpoints", "load"),
]


@pytest.mark.parametrize(("title", "fault"), FAULTS)
def test_a_line_is_broken_by_its_fault_alone(try_line: Callable[..., list[str]], title: str, fault: str) -> None:
    assert set(try_line(title)) == {"ok"}
    assert set(try_line(title, fault)) == {"broken"}


@pytest.mark.parametrize(("fault", "broken"), [("none", ()), ("memory", (0,)), ("crowded", (1,)), ("slow", (2,)), ("fast", (2,))])
def test_a_step_needs_what_the_plan_says(try_line: Callable[..., list[str]], fault: str, broken: tuple[int, ...]) -> None:
    """A step that is faster than its arithmetic shows that this is wrong."""
    assert try_line("plan", fault) == ["broken" if number in broken else "ok" for number in range(3)]


RUN = [{"step": 0, "time/start": 40.0}] + [
    {"step": step, "weights/version": step, "train/log_prob_diff": 1e-6, "time/rollout": 1.0, "time/train": 1.0, "time/sync": 0.5}
    for step in (1, 2, 3)
]


@pytest.mark.parametrize(("fault", "level"), [({}, "ok"), ({"train/log_prob_diff": 2e-4}, "broken"), ({"weights/version": 1}, "broken")])
def test_runs_are_judged_by_their_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, float], level: str) -> None:
    node = Node("cpu", num_gpus=2, directory=tmp_path)
    asked: list[Any] = []

    def run(settings: Any) -> list[dict[str, float]]:
        asked.append(settings)
        return [*RUN[:-1], RUN[-1] | fault]

    monkeypatch.setattr(node, "run", run)
    checks = list(LINES["runs"](node))
    assert [check.level for check in checks] == [level, "skipped", level]
    assert "started in 40 s" in checks[0].text
    assert asked[0]["training"]["routing_replay"] and asked[0]["training"]["topology"]["tp"] == 2
    assert asked[1]["runtime"]["colocate"] and asked[1]["rollout"]["sampling"]["temperature"] == 0.7


def test_sleep_is_judged_by_what_it_frees_and_keeps() -> None:
    assert sleep_problems(awake=[1950, 1950], asleep=[1000, 1000], pool=1000) == []
    assert sleep_problems(awake=[1950, 1950], asleep=[1000, 1060], pool=1000) == ["a sleep frees 890 bytes of 1000"]
    kept = ["asleep it holds 150 bytes more than after its first sleep"]
    assert sleep_problems(awake=[2000, 2150], asleep=[1000, 1150], pool=1000) == kept
    assert sleep_problems(awake=[5], asleep=[5], pool=0) == [], "nothing can be seen without a GPU"


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"driver": "575.1"}, "driver is 575.1, needs 580 or newer"),
        ({"CUDA": "None"}, "CUDA is None, needs 13 or newer"),
        ({"NCCL": "2.27.5"}, "NCCL 2.27.5 is loaded, installed is 2.28.9"),
        ({"cuDNN": "9.10.2"}, "cuDNN 9.10.2 is loaded, installed is 9.15.1.9"),
    ],
)
def test_a_library_that_does_not_fit_is_a_problem(found: dict[str, str], problem: str) -> None:
    sound = {"driver": "580.82.07", "CUDA": "13.0", "NCCL": "2.28.9", "cuDNN": "9.15.1"}
    requirements = ["nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'", "nvidia-cudnn-cu13==9.15.1.9", "nvidia-cudnn-frontend==1.1"]
    pinned = pinned_libraries(requirements)
    assert pinned == {"NCCL": "2.28.9", "cuDNN": "9.15.1.9"}
    assert library_problems(sound, pinned) == []
    (said,) = library_problems(sound | found, pinned)
    assert said.startswith(problem)


@pytest.mark.parametrize(("num_gpus", "count"), [(2, 1 + 2 + 2), (4, 3 + 4 + 4)])
def test_layouts_ask_for_nothing_that_is_refused(tmp_path: Path, num_gpus: int, count: int) -> None:
    node, ranks = Node("cuda", num_gpus=num_gpus, directory=tmp_path), TwoRanks()
    node._ranks = ranks  # type: ignore[assignment]
    assert all(check.level == "ok" for check in (*LINES["layouts"](node), *LINES["checkpoints"](node)))
    for settings in ranks.opened:
        topology, spec = Topology.of(settings.training.topology), read_model_spec(settings.model.path)
        assert topology.num_ranks <= num_gpus
        check_layout(topology, spec, {})
        if settings.model.attention == "transformer_engine":
            assert lacking_in_transformer_engine(spec, cp=topology.cp, capability=(9, 0), fused=True) is None
    assert sum(settings.model.attention == "transformer_engine" for settings in ranks.opened) >= count


def test_a_refused_model_leaves_the_other_layouts(tmp_path: Path) -> None:
    node, ranks = Node("cuda", num_gpus=2, directory=tmp_path), TwoRanks("windows")
    node._ranks = ranks  # type: ignore[assignment]
    checks = LINES["layouts"](node)
    sound, refused = next(checks), next(checks)
    assert (sound.level, refused.level, refused.text) == ("ok", "broken", "these kernels have no windows")
    node._ranks = ranks  # type: ignore[assignment]
    (last,) = checks
    assert last.level == "ok" and "deepseek_v3" in last.promise
    (tmp_path / "late").mkdir()
    node = Node("cuda", num_gpus=2, directory=tmp_path / "late")
    node._ranks = TwoRanks("late")  # type: ignore[assignment]
    with pytest.raises(DeadlineError):
        list(LINES["layouts"](node))


def test_lines_are_told_whatever_becomes_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that raises, one that hangs, one that is sound; an interruption leaves what was found."""

    def raises(node: Node) -> Iterator[Check]:
        yield Check("first half")
        raise FileNotFoundError("it died")

    def hangs(node: Node) -> Iterator[Check]:
        time.sleep(60)
        yield Check("never")

    def interrupted(node: Node) -> Iterator[Check]:
        raise KeyboardInterrupt
        yield

    closed: list[bool] = []
    lines = {"raises": raises, "hangs": hangs, "interrupted": interrupted, "sound": lambda node: iter([Check("sound", text="2 GB/s")])}
    monkeypatch.setattr(trial, "LINES", lines)
    monkeypatch.setattr(trial, "LINE_TIMEOUT_S", {"cpu": 0.5})
    monkeypatch.setattr(Node, "close", lambda self: closed.append(True))
    start = time.monotonic()
    assert not accept(tmp_path, stand_ins=3, only=("raises", "hangs", "sound"))
    assert time.monotonic() - start < 30 and len(closed) == 3, "new ranks after a failure, and none at the end"
    (result,) = tmp_path.glob(f"*/{RESULT_FILE}")
    written = json.loads(result.read_text())
    assert [(each["promise"], each["level"]) for each in written["checks"]] == [
        ("first half", "ok"), ("raises", "broken"), ("hangs", "broken"), ("sound", "ok")
    ]  # fmt: skip
    assert written["complete"] and "FileNotFoundError: it died" in written["checks"][1]["text"]
    out = capsys.readouterr().out
    assert "BROKEN  hangs: DeadlineError: hangs took longer than 0.5 s\n" in out and "2 of 4 checks" in out
    assert accept(tmp_path / "sound", stand_ins=3, only=("sound",))
    with pytest.raises(KeyboardInterrupt):
        accept(tmp_path / "interrupted", stand_ins=2, only=("sound", "interrupted"))
    (result,) = (tmp_path / "interrupted").glob(f"*/{RESULT_FILE}")
    written = json.loads(result.read_text())
    assert not written["complete"] and len(written["checks"]) == 1


def test_where_it_cannot_run_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match=r"found no GPU here; .* add --on-cpu"):
        accept(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="--on-cpu was given on a machine with 2 GPUs; leave it out"):
        accept(tmp_path, stand_ins=2)
