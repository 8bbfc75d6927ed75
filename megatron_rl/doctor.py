"""`megatron-rl doctor`: what this machine has, what of it does not fit, and the command that mends it. Changes nothing."""

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_rl.deadlines import IMPORT_S
from megatron_rl.runtime.resources import available_memory_bytes
from megatron_rl.versions import Release, installed_version, known_releases

GIB = 2**30
LOOPBACK = "127.0.0.1"
NEEDED_MEMORY_GIB = 6
NEEDED_SHM_GIB = 1
NEEDED_DISK_GIB = 10
NEEDED_OPEN_FILES = 4096
IMPORTS = ("torch", "ray", "transformers", "megatron.core.transformer", "sglang.srt.server_args")
"""Modules whose import fails first when installed packages do not fit together."""

Level = Literal["ok", "note", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `level` note: works, but differs from what was tested or may be slow. `fix` is a command or an advice."""

    topic: str
    level: Level
    text: str
    fix: str = ""


def examine(directory: Path) -> Iterator[Finding]:
    """All findings, cheap ones first; `directory` is where runs are to be written. Imports run in child processes."""
    yield check_python()
    kind = gpu_kind()
    yield from check_gpu(kind)
    yield from (check_package(release, installed_version(release.distribution)) for release in known_releases(kind))
    yield from check_accelerators(kind)
    yield from (check_import(module) for module in IMPORTS)
    yield check_memory(available_memory_bytes())
    yield check_space(
        "/dev/shm", Path("/dev/shm"), needed_gib=NEEDED_SHM_GIB, fix="mount -o remount,size=4G /dev/shm, or docker run --shm-size=4g"
    )
    yield check_space("disk", directory, needed_gib=NEEDED_DISK_GIB, fix=f"free space on the file system of {directory}")
    yield check_lscpu(kind)
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_proxies(urllib.request.getproxies_environment())
    yield check_loopback()


def report(findings: Iterator[Finding]) -> int:
    """Print findings as they come, then every fix; the exit status, 1 when something is broken."""
    seen: list[Finding] = []
    for finding in findings:
        seen.append(finding)
        label = {"ok": "ok    ", "note": "note  ", "broken": "BROKEN"}[finding.level]
        print(f"{label}  {finding.topic:<20} {finding.text}", flush=True)
    broken = [finding for finding in seen if finding.level == "broken"]
    for title, level in (("To mend what is broken:", "broken"), ("To come closer to what was tested:", "note")):
        fixes = [finding for finding in seen if finding.level == level and finding.fix]
        if fixes:
            print(f"\n{title}")
        for finding in fixes:
            print(f"  {finding.topic}: {finding.fix}")
    print(f"\n{len(broken)} of {len(seen)} checks found something broken" if broken else f"\nAll {len(seen)} checks passed")
    return 1 if broken else 0


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """Python 3.10 to 3.12."""
    text = f"{version[0]}.{version[1]} ({sys.executable})"
    if (3, 10) <= version <= (3, 12):
        return Finding("Python", "ok", text)
    return Finding("Python", "broken", f"{text}, needs 3.10 to 3.12", "PYTHON=python3.11 bash tools/setup_env.sh")


def gpu_kind() -> Literal["cpu", "cuda"]:
    """Whether this machine has an NVIDIA GPU that its driver knows, asked without importing torch."""
    return "cuda" if _gpu_names() else "cpu"


def check_gpu(kind: Literal["cpu", "cuda"]) -> Iterator[Finding]:
    """CPU cores, GPUs, and whether the installed torch can use them."""
    yield Finding("CPU", "ok", f"{len(os.sched_getaffinity(0))} cores")
    if kind == "cpu":
        yield Finding("GPU", "ok", "none found (no nvidia-smi, or no device): everything runs on the CPU")
        return
    names = _gpu_names()
    torch_version = installed_version("torch") or "no torch"
    if torch_version.endswith("+cpu"):
        yield Finding("GPU", "broken", f"{len(names)} × {names[0]}, but torch {torch_version} cannot use it", "bash tools/setup_env.sh")
    else:
        yield Finding("GPU", "ok", f"{len(names)} × {names[0]}")


def check_package(release: Release, installed: str | None) -> Finding:
    """An installed version against the table of `versions.py`."""
    topic = release.distribution
    if installed is None:
        return Finding(topic, "broken", f"not installed (for {release.purpose}), tested with {release.version}", release.install_command)
    if release.is_tested(installed):
        return Finding(topic, "ok", f"{installed}, as tested")
    text = f"{installed}, tested with {release.version}"
    if release.accepts(installed):
        return Finding(topic, "note", text, release.install_command)
    return Finding(topic, "broken", f"{text}, needs {release.accepted}", release.install_command)


def check_accelerators(kind: Literal["cpu", "cuda"]) -> Iterator[Finding]:
    """TransformerEngine and Apex: used when importable, never needed. Apex is known by its extension, PyPI's apex is another project."""
    for topic, module, advice in (
        ("transformer-engine", "transformer_engine", "DEVICE=gpu bash tools/setup_env.sh"),
        ("apex", "amp_C", "build it from https://github.com/NVIDIA/apex; the package of that name on PyPI is another project"),
    ):
        present = importlib.util.find_spec(module) is not None
        if present or kind == "cpu":
            yield Finding(topic, "ok", "installed" if present else "not installed, not used on a CPU")
        else:
            yield Finding(topic, "note", "not installed: the slower torch path is used", advice)


def check_import(module: str) -> Finding:
    """Whether `module` imports, tried in a child process that is ended after `IMPORT_S` seconds."""
    topic = f"import {module.partition('.')[0]}"
    try:
        child = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(
            topic,
            "broken",
            f"{module} did not import within {IMPORT_S:.0f} s",
            f"{sys.executable} -X importtime -c 'import {module}'",
        )
    if child.returncode == 0:
        return Finding(topic, "ok", module)
    last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
    return Finding(topic, "broken", f"{module} does not import: {last}", "bash tools/setup_env.sh")


def check_memory(available: int) -> Finding:
    """Available memory in bytes against what the smallest run needs."""
    text = f"{available / GIB:.1f} GiB available"
    if available >= NEEDED_MEMORY_GIB * GIB:
        return Finding("memory", "ok", text)
    return Finding(
        "memory", "broken", f"{text}, the smallest run needs {NEEDED_MEMORY_GIB} GiB", "stop other programs, or raise the container's limit"
    )


def check_space(topic: str, path: Path, *, needed_gib: int, fix: str) -> Finding:
    """Free space of the file system that holds `path` or, where it does not exist yet, its nearest parent."""
    present = next((folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()), None)
    if present is None:
        return Finding(topic, "broken", f"{path} does not exist", fix)
    free = shutil.disk_usage(present).free
    text = f"{free / GIB:.1f} GiB free in {present}"
    return Finding(topic, "ok", text) if free >= needed_gib * GIB else Finding(topic, "note", f"{text}, {needed_gib} GiB are better", fix)


def check_lscpu(kind: Literal["cpu", "cuda"]) -> Finding:
    """SGLang's CPU path asks lscpu for the cores."""
    path = shutil.which("lscpu")
    if path is not None or kind == "cuda":
        return Finding("lscpu", "ok", path or "not needed on a GPU")
    return Finding("lscpu", "broken", "not on PATH, SGLang on a CPU calls it", "apt-get install util-linux")


def check_open_files(limit: int) -> Finding:
    """Ray opens a file per worker and connection."""
    if limit == resource.RLIM_INFINITY or limit >= NEEDED_OPEN_FILES:
        return Finding("open files", "ok", "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit}")
    return Finding("open files", "note", f"at most {limit}, {NEEDED_OPEN_FILES} are better", "ulimit -n 65536")


def check_proxies(proxies: Mapping[str, str]) -> Finding:
    """A proxy without an exception for loopback would receive the traffic between driver and engines.

    `proxies` maps schemes to URLs, and "no" to the exceptions, separated by commas.
    """
    captured = [scheme for scheme in ("http", "https", "all") if scheme in proxies]
    exceptions = [entry.strip() for entry in proxies.get("no", "").split(",")]
    if not captured or "*" in exceptions or LOOPBACK in exceptions:
        return Finding("proxy", "ok", "set, with an exception for loopback" if captured else "none set")
    text = f"{captured[0]}_proxy is set without an exception for {LOOPBACK}: it would receive the traffic to the engines"
    names = ",".join([*filter(None, exceptions), "localhost", LOOPBACK])
    return Finding("proxy", "broken", text, f"export no_proxy={names} NO_PROXY={names}")


def check_loopback() -> Finding:
    """Whether a port on loopback can be bound and connected to."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), timeout=5.0):
            return Finding("loopback", "ok", f"ports on {LOOPBACK} can be bound and reached")
    except OSError as error:
        return Finding("loopback", "broken", f"no port on {LOOPBACK} can be bound and reached ({error})", "ip link set lo up")


def _gpu_names() -> list[str]:
    """Names of the GPUs that nvidia-smi lists; none where there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listing = subprocess.run(
            [program, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30.0, check=False
        )
    except subprocess.TimeoutExpired:
        return []
    return listing.stdout.strip().splitlines() if listing.returncode == 0 else []
