"""`megatron-rl doctor`: parts of this machine, misfits and the mending commands.

Changes nothing.
"""

import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import requires
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from megatron_rl.check import Check, Level
from megatron_rl.errors import sized
from megatron_rl.observe.memory import available_memory_bytes
from megatron_rl.system.deadlines import IMPORT_S
from megatron_rl.system.process_variables import tool_variables
from megatron_rl.system.versions import CUDA_MAJOR, Release, installed_version, known_releases

GIB = 2**30
LOOPBACK = "127.0.0.1"
NEEDED_MEMORY_GIB = 6
NEEDED_SHM_GIB = 1
NEEDED_DISK_GIB = 10
NEEDED_OPEN_FILES = 4096
LEAST_DRIVER, LEAST_CUDA = 580, 13
"""Oldest driver with CUDA 13."""
IMPORTS = ("torch", "ray", "transformers", "megatron.core.transformer", "sglang.srt.server_args")
"""Modules whose import fails first when installed packages do not fit together."""


def examine(directory: Path) -> Iterator[Check]:
    """Check everything, cheap checks first, imports in child processes; `directory` is for runs."""
    yield check_python()
    kind = gpu_kind()
    yield from check_gpu(kind)
    yield from (check_package(release, installed_version(release.distribution)) for release in known_releases(kind))
    yield from check_accelerators(kind)
    yield from check_toolchain(kind)
    yield from (check_import(module) for module in IMPORTS)
    yield check_memory(available_memory_bytes())
    yield check_space(
        "/dev/shm", Path("/dev/shm"), needed_gib=NEEDED_SHM_GIB, fix="mount -o remount,size=4G /dev/shm, or docker run --shm-size=4g"
    )
    yield check_space("disk", directory, needed_gib=NEEDED_DISK_GIB, fix=f"free space on the file system of {directory}")
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_proxies(urllib.request.getproxies_environment())


def _needs(promise: str, met: bool, text: str, *, lack: str, fix: str, level: Level = "broken") -> Check:
    """Return a check of an observation: ok where the need is `met`, else with the lack and the fix."""
    return Check(promise, "ok", text) if met else Check(promise, level, f"{text}, {lack}", fix)


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """Require Python 3.11 or 3.12."""
    text, fix = f"{version[0]}.{version[1]} ({sys.executable})", "PYTHON=python3.11 bash tools/setup_env.sh"
    return _needs("Python", (3, 11) <= version <= (3, 12), text, lack="needs 3.11 or 3.12", fix=fix)


def gpu_kind() -> Literal["cpu", "cuda"]:
    """Return "cuda" where the driver knows an NVIDIA GPU, asked without importing torch."""
    return "cuda" if nvidia_smi("name") else "cpu"


def check_gpu(kind: Literal["cpu", "cuda"]) -> Iterator[Check]:
    """Check CPU cores, GPUs, and the use of GPUs by the installed torch."""
    yield Check("CPU", "ok", f"{len(os.sched_getaffinity(0))} cores")
    if kind == "cpu":
        yield Check("GPU", "ok", "none found (no nvidia-smi, or no device): everything runs on the CPU")
        return
    names = nvidia_smi("name")
    torch_version = installed_version("torch") or "no torch"
    lack = f"but torch {torch_version} cannot use it"
    yield _needs("GPU", not torch_version.endswith("+cpu"), f"{len(names)} × {names[0]}", lack=lack, fix="bash tools/setup_env.sh")


def check_package(release: Release, installed: str | None) -> Check:
    """Compare an installed version with the table of `versions.py`."""
    topic = release.distribution
    known = f"tested with {release.version}" if release.tested else f"pinned to {release.version}, which the tests do not run here"
    if installed is None:
        return Check(topic, "broken", f"not installed (for {release.purpose}), {known}", release.install_command)
    if release.is_pinned(installed):
        return Check(topic, "ok", f"{installed}, as {'tested' if release.tested else 'pinned, not run by the tests here'}")
    text = f"{installed}, {known}"
    if release.accepts(installed):
        return Check(topic, "note", text, release.install_command)
    return Check(topic, "broken", f"{text}, needs {release.accepted}", release.install_command)


def check_accelerators(kind: Literal["cpu", "cuda"]) -> Iterator[Check]:
    """Check TransformerEngine and Apex, never needed; Apex by its extension, as PyPI's is another project."""
    for topic, module, advice in (
        ("transformer-engine", "transformer_engine", "DEVICE=gpu bash tools/setup_env.sh"),
        ("apex", "amp_C", "build it from https://github.com/NVIDIA/apex; the package of that name on PyPI is another project"),
    ):
        present = importlib.util.find_spec(module) is not None
        if present or kind == "cpu":
            yield Check(topic, "ok", "installed" if present else "not installed, not used on a CPU")
        else:
            yield Check(topic, "note", "not installed: the slower torch path is used", advice)


def check_toolchain(kind: Literal["cpu", "cuda"]) -> Iterator[Check]:
    """Yield the programs and libraries that an engine on GPUs calls at run time; nothing on a CPU.

    SGLang compiles kernels at first use, on every node, and searches the CUDA toolkit in this
    order.
    """
    if kind == "cpu":
        return
    paths = tool_variables(os.environ, device_kind=kind)
    found = shutil.which("nvcc", path=paths["PATH"])
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (str(Path(found).parents[1]) if found else "/usr/local/cuda")
    fix = f"install the CUDA {CUDA_MAJOR} toolkit and set CUDA_HOME to it, or start from a container of type devel"
    compiler, library = Path(home, "bin", "nvcc"), Path(home, "lib64", "libcudart.so")
    missing = [str(path) for path in (compiler, library) if not path.is_file()]
    problem = f"no {missing[0]}" if missing else _other_release(compiler)
    text = f"{problem}, engines compile kernels with CUDA {CUDA_MAJOR} at first use" if problem else str(compiler)
    yield Check("nvcc", "broken" if problem else "ok", text, fix if problem else "")
    ninja = shutil.which("ninja", path=paths["PATH"])
    install = f"{sys.executable} -m pip install ninja"
    yield Check("ninja", "ok", ninja) if ninja else Check("ninja", "broken", "not beside the interpreter nor on PATH", install)
    name = f"libcudart.so.{CUDA_MAJOR}"
    load = [sys.executable, "-c", f"import ctypes; ctypes.CDLL('{name}')"]
    done = subprocess.run(load, env={**os.environ, **paths}, capture_output=True, text=True, timeout=IMPORT_S, check=False)
    lack = "not on the loader's path, and colocated engines give memory back with it"
    install = f"{sys.executable} -m pip install 'nvidia-cuda-runtime=={CUDA_MAJOR}.*'"
    yield Check(name, "broken", lack, install) if done.returncode else Check(name, "ok", "on the loader's path of engines")


def _other_release(compiler: Path) -> str:
    """Return a sentence when nvcc is not of CUDA_MAJOR, else an empty string."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=IMPORT_S, check=False)
    release = re.search(r"release (\d+)", done.stdout)
    return "" if release and int(release[1]) == CUDA_MAJOR else f"{compiler} is of CUDA {release[1] if release else '?'}"


def check_import(module: str) -> Check:
    """Check the import of `module` in a child process, ended after `IMPORT_S` seconds."""
    promise, command = f"import {module.partition('.')[0]}", [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        fix = f"{sys.executable} -X importtime -c 'import {module}'"
        return Check(promise, "broken", f"{module} did not import within {IMPORT_S:.0f} s", fix)
    if child.returncode == 0:
        return Check(promise, "ok", module)
    last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
    return Check(promise, "broken", f"{module} does not import: {last}", "bash tools/setup_env.sh")


def check_memory(available: int) -> Check:
    """Compare the available memory in bytes with the need of the smallest run."""
    lack, fix = f"the smallest run needs {NEEDED_MEMORY_GIB} GiB", "stop other programs, or raise the container's limit"
    return _needs("memory", available >= NEEDED_MEMORY_GIB * GIB, f"{available / GIB:.1f} GiB available", lack=lack, fix=fix)


def check_space(topic: str, path: Path, *, needed_gib: int, fix: str) -> Check:
    """Check the free space of the file system of `path` or, without one, of its nearest parent."""
    present = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(present).free
    text, lack = f"{sized(free)} free in {present}", f"{needed_gib} GiB are better"
    return _needs(topic, free >= needed_gib * GIB, text, lack=lack, fix=fix, level="note")


def check_open_files(limit: int) -> Check:
    """Check the limit of open files, because Ray opens a file per worker and connection."""
    if limit == resource.RLIM_INFINITY:
        return Check("open files", "ok", "unlimited")
    lack = f"{NEEDED_OPEN_FILES} are better"
    return _needs("open files", limit >= NEEDED_OPEN_FILES, f"at most {limit}", lack=lack, fix="ulimit -n 65536", level="note")


def check_proxies(proxies: Mapping[str, str]) -> Check:
    """Check for a proxy without an exception for loopback.

    Such a proxy would receive the traffic between driver and engines. `proxies` maps schemes to
    URLs, and "no" to the exceptions, separated by commas.
    """
    captured = [scheme for scheme in ("http", "https", "all") if scheme in proxies]
    exceptions = [entry.strip() for entry in proxies.get("no", "").split(",")]
    if not captured or "*" in exceptions or LOOPBACK in exceptions:
        return Check("proxy", "ok", "set, with an exception for loopback" if captured else "none set")
    text = f"{captured[0]}_proxy is set without an exception for {LOOPBACK}: it would receive the traffic to the engines"
    names = ",".join([*filter(None, exceptions), "localhost", LOOPBACK])
    return Check("proxy", "broken", text, f"export no_proxy={names} NO_PROXY={names}")


def nvidia_smi(field: str) -> list[str]:
    """Return a `field` of each GPU that nvidia-smi lists; nothing without the program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listing = subprocess.run(
            [program, f"--query-gpu={field}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30.0, check=False
        )
    except subprocess.TimeoutExpired:
        return []
    return listing.stdout.strip().splitlines() if listing.returncode == 0 else []


def loaded_libraries() -> dict[str, str]:
    """Return the releases of driver, CUDA, NCCL and cuDNN loaded by torch."""
    import torch

    number = torch.backends.cudnn.version() or 0
    return {
        "driver": next(iter(nvidia_smi("driver_version")), "unknown"),
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": f"{number // 10000}.{number // 100 % 100}.{number % 100}",
    }


def library_problems(found: Mapping[str, str], pinned: Mapping[str, str]) -> list[str]:
    """Return the misfits of driver, CUDA, and loaded libraries against `pinned` wheels."""
    problems = []
    for name, least in (("driver", LEAST_DRIVER), ("CUDA", LEAST_CUDA)):
        if _numbers(found[name])[:1] < (least,):
            problems.append(f"{name} is {found[name]}, needs {least} or newer")
    for name, version in pinned.items():
        # The pin of a wheel has a fourth part, absent in the library's own release.
        if _numbers(found[name])[:3] != _numbers(version)[:3]:
            problems.append(f"{name} {found[name]} is loaded, installed is {version}; take another one off LD_LIBRARY_PATH")
    return problems


def pinned_libraries(requirements: Sequence[str] | None = None) -> dict[str, str]:
    """Return the releases of NCCL and cuDNN pinned by wheels: torch's, then SGLang's, of which the last counts."""
    pinned = {}
    for requirement in map(Requirement, requirements or [*(requires("torch") or ()), *(requires("sglang") or ())]):
        for prefix, name in (("nvidia-nccl", "NCCL"), ("nvidia-cudnn-cu", "cuDNN")):
            exact = [one.version for one in requirement.specifier if one.operator == "=="]
            if requirement.name.startswith(prefix) and exact:
                pinned[name] = exact[0]
    return pinned


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
