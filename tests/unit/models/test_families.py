"""What the table of families claims is what tests show."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from layout_table import CASES, LAYOUTS, MODELS, SYNCED

from megatron_rl.cli import main
from megatron_rl.errors import UserError
from megatron_rl.models.families import FAMILIES, REFUSED, family_table
from megatron_rl.models.read_spec import parse_model_spec

README = Path(family_table.__file__).with_name("README.md")


@pytest.fixture
def architecture(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """The architecture of `tiny_model(**config)`."""

    def find(**config: object) -> str:
        path = tiny_model(name=f"model-{len(list(tmp_path.iterdir()))}", hidden=8, **config)
        return str(json.loads((path / "config.json").read_text())["architectures"][0])

    return find


def test_what_is_proved_is_what_tests_show(architecture):
    shown: dict[str, set[str]] = {name: set() for name in FAMILIES}
    named = {name: architecture(**config) for name, config in MODELS.items()}
    for case in CASES:
        shown[named[case.model]] |= LAYOUTS[case.layout].topology.keys() & {"tp", "pp", "cp", "ep"}
    for family in SYNCED:
        shown[architecture(family=family)].add("sync")
    assert shown == {name: set(family.proved) - {"quantised source"} for name, family in FAMILIES.items()}


def test_the_table_in_the_docs_is_the_one_that_is_printed(capsys):
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    table = "\n".join(family_table.table())
    assert table in printed and table in README.read_text(encoding="utf-8"), f"write this into {README}:\n{table}"
    assert all(f"{name}: {reason}" in printed for name, reason in REFUSED.items())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_architectures_are_refused_with_the_reason(name):
    assert name not in FAMILIES
    with pytest.raises(UserError, match="cannot be trained: ") as refusal:
        parse_model_spec({"architectures": [name]}, origin="config.json")
    assert REFUSED[name] in str(refusal.value)
