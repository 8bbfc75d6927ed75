import inspect
import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import UserError
from megatron_rl.plugins import kinds, loader
from megatron_rl.plugins.kinds import KINDS
from megatron_rl.plugins.loader import load, without_exits

MODULE = """
from __future__ import annotations
from pathlib import Path
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    from megatron_rl.types import Sample

def score(*, sample: Sample, threshold: float, copy: Literal["a", "b"] = "a", pair: tuple[int, int] = (1, 2), file: Path | None = None):
    return threshold, copy, pair, file

def text(*, sample, digit: str): ...
def bare(*, sample, threshold): ...
def positional(sample, /): ...
def odd(*, sample, own: NoSuchName): ...
def no_setting(*, sample, own: type(sys)): ...
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plugins.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_plugins", raising=False)


@pytest.mark.parametrize(
    ("args", "got"),
    [
        ({"threshold": 0.5}, (0.5, "a", (1, 2), None)),
        ({"threshold": 1, "copy": "b", "pair": [3, 4], "file": "x/y"}, (1.0, "b", (3, 4), Path("x/y"))),
    ],
)
def test_own_arguments_have_the_annotated_types(args: dict[str, Any], got: tuple[Any, ...]) -> None:
    assert load("my_plugins:score", kind="reward", args=args)(sample=None) == got


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("score", {}, "reward.args.threshold is missing, my_plugins:score needs threshold: float; set reward.args.threshold=VALUE"),
        ("score", {"threshold": 1, "treshold": 2}, r"^reward.args.treshold is no argument of .*did you mean reward.args.threshold\?$"),
        ("score", {"threshold": 1, "x": 2}, "its own arguments are: threshold, copy, pair, file"),
        ("score", {"threshold": 1, "sample": 2}, "reward.args.sample is no argument of"),
        ("score", {"threshold": "0.5"}, "reward.args.threshold is '0.5', my_plugins:score needs threshold: float"),
        ("score", {"threshold": True}, "reward.args.threshold is True, .* needs threshold: float"),
        ("score", {"threshold": 1, "copy": "c"}, "reward.args.copy is 'c', .*Literal"),
        ("score", {"threshold": 1, "pair": [1, "x"]}, r"reward.args.pair.1 is 'x', my_plugins:score needs pair: tuple\[int, int\]"),
        ("text", {"digit": 7}, r"digit is 7, my_plugins:text needs digit: str .*; put quotes around it .* as text: digit='\"7\"'$"),
        ("bare", {"threshold": 1}, "takes threshold, which is no argument of its kind .* no annotation, needs one"),
        ("positional", {}, r"has the signature \(sample, /\) but is called as \(sample=..\)"),
        ("odd", {"own": 1}, "annotation that no value can be checked by .*NoSuchName"),
        ("scoer", {}, r"has no scoer; it has: .*did you mean my_plugins:score\?"),
    ],
)
def test_what_does_not_fit_is_one_sentence(path: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(f"my_plugins:{path}", kind="reward", args=args)
    assert "\n" not in str(caught.value)


def test_the_arguments_of_a_kind_are_those_of_its_protocol() -> None:
    protocols = {
        "reward": kinds.Reward,
        "rollout": kinds.Rollout,
        "filter": kinds.Filter,
        "advantage": kinds.Advantage,
        "policy_loss": kinds.PolicyLoss,
    }
    assert protocols.keys() | {"data_source", "environment"} == KINDS.keys()
    assert tuple(inspect.signature(kinds.DataSource.__init__).parameters)[1:] == KINDS["data_source"].arguments
    for kind, protocol in protocols.items():
        assert tuple(inspect.signature(protocol.__call__).parameters)[1:] == KINDS[kind].arguments


BAD_IMPORTS = {
    "exits": "import sys\nsys.exit(3)",
    "interrupts": "raise KeyboardInterrupt",
    "sleeps": "import time\ntry:\n    time.sleep(60)\nexcept Exception:\n    pass",
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exits", "raised SystemExit while being imported, needs to return, or to raise an Exception"),
        ("interrupts", "raised KeyboardInterrupt while being imported"),
        ("sleeps", "has not ended being imported after 0.2 s, needs less; move slow work"),
    ],
)
def test_an_import_that_exits_or_never_ends_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / f"import_that_{name}.py").write_text(BAD_IMPORTS[name])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loader, "PLUGIN_IMPORT_S", 0.2)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    with pytest.raises(UserError, match=rf"^reward.function import_that_{name}:score {message}"):
        load(f"import_that_{name}:score", kind="reward")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == handlers


def test_an_interrupt_of_the_user_ends_an_import_as_ever() -> None:
    with pytest.raises(KeyboardInterrupt), without_exits("reward.function a:b", doing="being imported", timeout_s=60):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_reaches_no_plug_in(number: float) -> None:
    with pytest.raises(UserError, match=rf"reward.args.threshold is {number}, my_plugins:score needs threshold: float \(.*finite"):
        load("my_plugins:score", kind="reward", args={"threshold": number})
