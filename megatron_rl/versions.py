"""The releases that this package was tested with, in one table, and what is installed."""

import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

_PYTHON = sys.version_info[:2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One distribution: the `version` that the tests ran with, the versions `accepted`, what it does here, and the `options`
    that pip needs to install it without moving other packages.
    """

    distribution: str
    version: str
    accepted: str
    purpose: str
    options: str = ""

    @property
    def install_command(self) -> str:
        """The command that installs the tested version into the running Python."""
        options = f"{self.options} " if self.options else ""
        return f"{sys.executable} -m pip install {options}'{self.distribution}=={self.version}'"

    def accepts(self, version: str) -> bool:
        """True when `version` is within the accepted range; a local part such as +cpu does not matter."""
        return SpecifierSet(self.accepted, prereleases=True).contains(Version(version).public)

    def is_tested(self, version: str) -> bool:
        """True when `version` is the tested one, apart from a local part such as +cpu."""
        return Version(Version(version).public) == Version(self.version)


def known_releases(device_kind: Literal["cpu", "cuda"], *, python: tuple[int, int] = _PYTHON) -> tuple[Release, ...]:
    """The table for a machine with or without GPU and a Python (major, minor).

    On CPU, SGLang and its exact pins are installed without their declared dependencies, which name CUDA builds. On GPU, torch
    is the release that SGLang pins.
    """
    # The reasons for the pins stand in setup.py and tools/requirements/.
    megatron, megatron_range = ("0.16.1", ">=0.16,<0.17") if python < (3, 12) else ("0.19.2", ">=0.17,<0.20")
    sglang, sglang_range = ("0.5.21", ">=0.5.21,<0.5.22") if python < (3, 11) else ("0.5.23", ">=0.5.22,<0.5.24")
    torch = "2.13.0" if device_kind == "cpu" else "2.14.1"
    no_deps = "--no-deps" if device_kind == "cpu" else ""
    table = (
        Release(distribution="torch", version=torch, accepted=">=2.13,<2.15", purpose="tensors and process groups"),
        Release(distribution="megatron-core", version=megatron, accepted=megatron_range, purpose="training", options=no_deps),
        Release(distribution="sglang", version=sglang, accepted=sglang_range, purpose="generation", options=no_deps),
        Release(distribution="ray", version="2.60.0", accepted=">=2.50", purpose="processes"),
        Release(distribution="transformers", version="5.19.0", accepted=">=5.12,<6", purpose="configurations and tokenizers"),
    )
    if device_kind == "cuda":
        return table
    xgrammar = Release(distribution="xgrammar", version="0.2.7", accepted="==0.2.7", purpose="imported by SGLang", options=no_deps)
    vision = Release(distribution="torchvision", version="0.16.2", accepted=">=0.16", purpose="imported by SGLang", options=no_deps)
    return (*table, xgrammar, vision)


def transformer_engine_release(*, python: tuple[int, int] = _PYTHON) -> Release:
    """Of TransformerEngine, which only GPUs can have: the one that this Python's megatron-core was read against, and those that it names.

    tools/setup_env.sh installs it, because its build needs more than pip's command.
    """
    version, accepted = ("2.11.0", ">=2.9,<2.12") if python < (3, 12) else ("2.18.0", ">=2.18,<2.19")
    return Release(distribution="transformer-engine", version=version, accepted=accepted, purpose="attention and linear layers on GPUs")


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
