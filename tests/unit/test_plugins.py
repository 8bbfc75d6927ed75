import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl import plugins
from megatron_rl.errors import UserError
from megatron_rl.plugins import KINDS, load

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
        ("odd", {"own": 1}, "annotation that no setting can be checked by .*NoSuchName"),
        ("scoer", {}, r"has no scoer; it has: .*did you mean my_plugins:score\?"),
    ],
)
def test_what_does_not_fit_is_one_sentence(path: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(f"my_plugins:{path}", kind="reward", args=args)
    assert "\n" not in str(caught.value)


def test_the_arguments_of_a_kind_are_those_of_its_protocol() -> None:
    protocols = {
        "reward": plugins.Reward,
        "rollout": plugins.Rollout,
        "filter": plugins.Filter,
        "advantage": plugins.Advantage,
        "policy_loss": plugins.PolicyLoss,
    }
    assert protocols.keys() | {"data_source"} == KINDS.keys()
    assert tuple(inspect.signature(plugins.DataSource.__init__).parameters)[1:] == KINDS["data_source"].arguments
    for kind, protocol in protocols.items():
        assert tuple(inspect.signature(protocol.__call__).parameters)[1:] == KINDS[kind].arguments
