"""When a line of the acceptance is good enough: limits, and judgements of measured numbers alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import requires

from packaging.requirements import Requirement

from megatron_rl.doctor import Finding

LEAST_GB_PER_S = {"cuda": 20.0, "cpu": 0.01}
"""Of an all-reduce: less on a GPU means that it goes through the host's memory, or over the wrong network."""
PLAN_TOLERANCE = 0.1
GRADIENT_TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}
"""Of a gradient norm, relative."""
UPDATE_TOLERANCE = {"cuda": 0.2, "cpu": 1e-3}
"""Of what a step changes in log-probs, relative. Adam starts with the signs of gradients, and rounding turns those of small ones."""
STEP_SECONDS = {"cuda": (0.7, 2.0), "cpu": (0.5, 5.0)}
"""Least and most of a step's seconds over those of its arithmetic at the device's rates in bare work.

Not 10 %, because the arithmetic leaves out what is no work: on a CPU, one thread, a step takes 1.2 times as long with 1,024 channels, 1.3
with 512, 1.9 with 256, where calls cost as much as their work. What the starts of kernels and their fusion make of it on a GPU is not known
without one. There, by arithmetic, attention that writes out its T x T scores is beyond twice; less than 0.7 would show that the arithmetic
is wrong.
"""
LEAST_FREED = 0.9
"""Of an engine's cache and weights, when it sleeps."""
LEAST_DRIVER = 580
"""The oldest driver that runs CUDA 13."""
LEAST_CUDA = 13


@dataclass(frozen=True, slots=True)
class Line:
    """What was tried, whether it `passed`, and the number."""

    name: str
    passed: bool
    number: str


def judged(name: str, number: str, problems: Sequence[str]) -> Line:
    """A line that passes where there are no problems, and says them where there are."""
    return Line(name, not problems, "; ".join([number, *problems]))


def broken(findings: Sequence[Finding]) -> list[str]:
    """What `doctor` finds broken, with its remedy."""
    return [f"{finding.topic} {finding.text} ({finding.fix})" for finding in findings if finding.level == "broken"]


def library_problems(found: Mapping[str, str], pinned: Mapping[str, str]) -> list[str]:
    """What does not fit of the driver, of CUDA, and of the libraries that are loaded against those that torch was released with.

    `found` has driver, CUDA, NCCL and cuDNN as versions; `pinned` names those that torch or SGLang ask for.
    """
    problems = []
    for name, least in (("driver", LEAST_DRIVER), ("CUDA", LEAST_CUDA)):
        if _numbers(found[name])[:1] < (least,):
            problems.append(f"{name} is {found[name]}, needs {least} or newer")
    for name, version in pinned.items():
        # The pin of a wheel has a fourth part, which the library does not tell.
        if _numbers(found[name])[:3] != _numbers(version)[:3]:
            problems.append(f"{name} {found[name]} is loaded, installed is {version}; take another one off LD_LIBRARY_PATH")
    return problems


def pinned_libraries(requirements: Sequence[str]) -> dict[str, str]:
    """The releases of NCCL and cuDNN that these requirements of wheels pin, the last one of each."""
    pinned = {}
    for requirement in map(Requirement, requirements):
        for prefix, name in (("nvidia-nccl", "NCCL"), ("nvidia-cudnn-cu", "cuDNN")):
            exact = [one.version for one in requirement.specifier if one.operator == "=="]
            if requirement.name.startswith(prefix) and exact:
                pinned[name] = exact[0]
    return pinned


def pinned_here() -> dict[str, str]:
    """Those of the installed torch and SGLang, which goes before."""
    return pinned_libraries([*(requires("torch") or ()), *(requires("sglang") or ())])


def cudnn_version(number: int) -> str:
    """9.15.1 of 91501, as cuDNN numbers its releases from 9 on."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def sleep_problems(*, awake: Sequence[int], asleep: Sequence[int], pool: int) -> list[str]:
    """What is wrong with an engine, of which a device held `awake` bytes at each turn and `asleep` bytes after it, when `pool` has to go.

    Without a `pool` nothing can be seen.
    """
    if not pool:
        return []
    problems = []
    freed = min(before - after for before, after in zip(awake, asleep, strict=True))
    if freed < LEAST_FREED * pool:
        problems.append(f"a sleep frees {freed} bytes of {pool}")
    if max(asleep) - asleep[0] > (1 - LEAST_FREED) * pool:
        problems.append(f"asleep it holds {max(asleep) - asleep[0]} bytes more than after its first sleep")
    return problems


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
