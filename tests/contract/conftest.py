"""The option with which users check a plug-in of theirs: `pytest tests/contract --plugin package.module:name --kind reward`."""

from pathlib import Path
from typing import get_args

import pytest

from megatron_rl.plugins.kinds import PluginKind


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plugin", help="plug-in to check, instead of ours")
    parser.addoption("--kind", choices=get_args(PluginKind), default="reward", help="kind of the plug-in")


@pytest.fixture(autouse=True)
def _our_plugins_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (Path(__file__).parent, Path(__file__).parents[2]):
        monkeypatch.syspath_prepend(folder)
