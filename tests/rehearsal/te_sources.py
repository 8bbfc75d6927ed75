"""TransformerEngine's Python half, of the release that setup.py pins for this Python, from the package index."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

_UNREACHABLE = re.compile(r"connection|timed out|timeout|proxy|resolve host|name resolution|ssl", re.IGNORECASE)


def pinned_version() -> str:
    """The exact version in setup.py."""
    setup = ast.parse((Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8"))
    words = [node.value for node in ast.walk(setup) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    pins = [Requirement(word) for word in words if re.match(r"transformer-engine\[", word)]
    (pin,) = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    return str(pin.specifier).removeprefix("==")


def unpacked_te(cache: Path) -> Path:
    """The directory below `cache` that holds the package; it is fetched once. Skips the test where no package index can be reached."""
    version = pinned_version()
    directory = cache / version
    if not (directory / "complete").exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(cache)]
        pip = subprocess.run([*command, f"transformer-engine=={version}"], capture_output=True, text=True, timeout=240, check=False)
        if pip.returncode and _UNREACHABLE.search(pip.stdout + pip.stderr):
            pytest.skip(f"no package index can be reached, from which TransformerEngine {version} would come: {pip.stderr[-300:]}")
        assert pip.returncode == 0, f"the package index has no TransformerEngine {version}:\n{pip.stderr}"
        (wheel,) = cache.glob(f"transformer_engine-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)
        (directory / "complete").touch()
    return directory
