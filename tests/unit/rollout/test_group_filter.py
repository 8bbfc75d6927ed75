from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.settings import FilterSettings
from megatron_rl.errors import UserError
from megatron_rl.rollout.group_filter import load_filter
from megatron_rl.types import Group, Prompt

FILTERS = """
def keep(*, group, digit: int):
    return "its number ends with the digit" if group.prompt.text.endswith(str(digit)) else None

def empty(*, group):
    return ""

def number(*, group):
    return 0

def fails(*, group):
    return group.samples[9]
"""


@pytest.fixture(autouse=True)
def filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "filters_by_path.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(tmp_path)


def group_of(text: str) -> Group:
    return Group(id="p", prompt=Prompt(id="p", token_ids=np.array([1]), text=text), samples=())


def test_without_a_filter_every_group_is_kept() -> None:
    assert load_filter(None)(group_of("11")) is None


def test_a_reason_names_the_filter() -> None:
    keep = load_filter(FilterSettings(function="filters_by_path:keep", args={"digit": 1}))
    assert keep(group_of("11")) == "rollout.filter.function filters_by_path:keep: its number ends with the digit"
    assert keep(group_of("12")) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "returned '' of type str for the group of prompt p, needs None"),
        ("number", "returned 0 of type int"),
        ("fails", "failed for the group of prompt p: IndexError: tuple index"),
    ],
)
def test_a_filter_that_breaks_its_contract_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^rollout.filter.function filters_by_path:{name} {message}"):
        load_filter(FilterSettings(function=f"filters_by_path:{name}"))(group_of("1"))
