"""Pairs of megatron-core and TransformerEngine's Python half, from the package index: those that are pinned, and what is allowed between.

Neither needs its compiled half here, and megatron-core's Python sources run on every Python that is supported: a pair for another Python
than the one at hand is fetched as that Python's and put first on the path. So is a pair that nobody installed.
"""

import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_rl.system.versions import installed_version, known_releases

_UNREACHABLE = re.compile(r"connection|timed out|timeout|proxy|resolve host|name resolution|ssl", re.IGNORECASE)
_PINS = Path(__file__).parents[2] / "tools/requirements/gpu-build.txt"


@dataclass(frozen=True, slots=True)
class Pair:
    """Releases that run together on this Python (major, minor)."""

    megatron_core: str
    transformer_engine: str
    python: tuple[int, int]

    def __str__(self) -> str:
        return f"megatron-core-{self.megatron_core}"


def pinned_pair(python: tuple[int, int]) -> Pair:
    """What tools/setup_env.sh installs on a machine with GPUs and this Python."""
    marker = {"python_version": f"{python[0]}.{python[1]}"}
    lines = [Requirement(line) for line in _PINS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    (engine,) = [str(line.specifier).removeprefix("==") for line in lines if line.marker is None or line.marker.evaluate(marker)]
    (megatron,) = [release.version for release in known_releases("cuda", python=python) if release.distribution == "megatron-core"]
    return Pair(megatron, engine, python)


OLDEST, NEWEST = pinned_pair((3, 11)), pinned_pair((3, 12))
PAIRS = (OLDEST, NEWEST)
ALLOWED = tuple(Pair(release, NEWEST.transformer_engine, NEWEST.python) for release in ("0.17.1", "0.18.2"))
"""setup.py allows them; nothing installs them."""


def unpacked(pair: Pair, cache: Path) -> tuple[str, ...]:
    """The directories below `cache` that hold the pair, for the front of sys.path; without megatron-core where that release is installed.

    What is not there is fetched. Skips the test where no package index can be reached.
    """
    wanted = [("transformer-engine", pair.transformer_engine)]
    if installed_version("megatron-core") != pair.megatron_core:
        wanted.append(("megatron-core", pair.megatron_core))
    return tuple(str(_unpacked(name, version, pair.python, cache)) for name, version in wanted)


def _unpacked(name: str, version: str, python: tuple[int, int], cache: Path) -> Path:
    directory = cache / f"{name}-{version}"
    if not (directory / "complete").exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(cache)]
        command += ["--python-version", f"{python[0]}.{python[1]}", f"{name}=={version}"]
        pip = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if pip.returncode and _UNREACHABLE.search(pip.stdout + pip.stderr):
            pytest.skip(f"no package index can be reached, from which {name} {version} would come: {pip.stderr[-300:]}")
        assert pip.returncode == 0, f"the package index has no {name} {version}:\n{pip.stderr}"
        (wheel,) = cache.glob(f"{name.replace('-', '_')}-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)
        (directory / "complete").touch()
    return directory
