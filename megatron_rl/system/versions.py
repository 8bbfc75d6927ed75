"""Releases of the set-up and of the tests in one table, and the installed releases."""

import importlib.metadata
import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

_PYTHON = sys.version_info[:2]
_TESTED = {("cpu", (3, 11)), ("cuda", (3, 12))}
"""Stacks tested by tests/run.sh.

All tests run in the first; with --wide those of torch, megatron-core and SGLang run in the second.
"""
CUDA_MAJOR = 13
"""CUDA release of the torch pinned by SGLang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One distribution.

    The `version` of the set-up, the `accepted` versions, the purpose here, and `options` that pip
    needs for not moving other packages. `tested` is False where the tests do not run this stack.
    """

    distribution: str
    version: str
    accepted: str
    purpose: str
    options: str = ""
    tested: bool

    @property
    def install_command(self) -> str:
        """Return the command for installing this version into the running Python."""
        options = f"{self.options} " if self.options else ""
        return f"{sys.executable} -m pip install {options}'{self.distribution}=={self.version}'"

    def accepts(self, version: str) -> bool:
        """Return True for a `version` in the accepted range; parts such as +cpu are ignored."""
        return SpecifierSet(self.accepted, prereleases=True).contains(Version(version).public)

    def is_pinned(self, version: str) -> bool:
        """Return True for the table's `version`, apart from a local part such as +cpu."""
        return Version(Version(version).public) == Version(self.version)


def known_releases(device_kind: Literal["cpu", "cuda"], *, python: tuple[int, int] = _PYTHON) -> tuple[Release, ...]:
    """Return the table for a machine with or without GPU and a Python (major, minor).

    On CPU, SGLang and its exact pins are installed without their declared dependencies, because the
    dependencies name CUDA builds. On GPU, torch is the release that SGLang pins.
    """
    # setup.py and tools/requirements/ give the reasons for the pins.
    megatron, megatron_range = ("0.16.1", ">=0.16,<0.17") if python < (3, 12) else ("0.19.2", ">=0.17,<0.20")
    torch = "2.13.0" if device_kind == "cpu" else "2.14.1"
    no_deps = "--no-deps" if device_kind == "cpu" else ""
    release = partial(Release, tested=(device_kind, python) in _TESTED)
    table = (
        release(distribution="torch", version=torch, accepted=">=2.13,<2.15", purpose="tensors and process groups"),
        release(distribution="megatron-core", version=megatron, accepted=megatron_range, purpose="training", options=no_deps),
        release(distribution="sglang", version="0.5.23", accepted="==0.5.23", purpose="generation", options=no_deps),
        release(distribution="ray", version="2.60.0", accepted=">=2.50", purpose="processes"),
        release(distribution="transformers", version="5.19.0", accepted=">=5.12,<6", purpose="configurations and tokenizers"),
    )
    if device_kind == "cuda":
        return table
    xgrammar = release(distribution="xgrammar", version="0.2.7", accepted="==0.2.7", purpose="imported by SGLang", options=no_deps)
    vision = release(distribution="torchvision", version="0.16.2", accepted=">=0.16", purpose="imported by SGLang", options=no_deps)
    return (*table, xgrammar, vision)


def transformer_engine_release(*, python: tuple[int, int] = _PYTHON) -> Release:
    """Return the TransformerEngine for this Python's megatron-core, and the accepted versions.

    For GPUs alone. tools/setup_env.sh installs TransformerEngine, because the build needs more than
    pip's command.
    """
    version, accepted = ("2.11.0", ">=2.9,<2.12") if python < (3, 12) else ("2.18.0", ">=2.18,<2.19")
    purpose = "attention and linear layers on GPUs"
    return Release(distribution="transformer-engine", version=version, accepted=accepted, purpose=purpose, tested=False)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
