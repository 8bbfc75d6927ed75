import re
import resource
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_rl.check import Check, report
from megatron_rl.doctor import machine as doctor
from megatron_rl.doctor.machine import GIB
from megatron_rl.system.versions import Release, installed_version, known_releases, transformer_engine_release

ROOT = Path(__file__).parents[2]
ON_GPU_STACK = installed_version("sglang-kernel") is not None
RAY = Release(distribution="ray", version="2.60.0", accepted=">=2.50", purpose="processes", tested=True)


def required_versions(name: str, python: str) -> dict[str, str]:
    """Pins (`==`) of a requirements file that hold for a Python version."""
    pins: dict[str, str] = {}
    for line in (ROOT / "tools" / "requirements" / name).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text:
            requirement = Requirement(text)
            exact = re.fullmatch(r"==([^*,]+)", str(requirement.specifier))
            if exact and (requirement.marker is None or requirement.marker.evaluate({"python_version": python})):
                pins[requirement.name.lower()] = exact.group(1)
    return pins


@pytest.mark.parametrize("minor", [11, 12])
@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("cpu", ["cpu.txt", "cpu-nodeps.txt", "torchvision.txt", "constraints.txt"]),
        ("cuda", ["gpu.txt", "gpu-build.txt", "gpu-constraints.txt"]),
    ],
)
def test_table_holds_what_the_requirement_files_pin(kind: str, files: list[str], minor: int) -> None:
    python = f"3.{minor}"
    pins = {distribution: version for name in files for distribution, version in required_versions(name, python).items()}
    releases = [*known_releases(kind, python=(3, minor)), transformer_engine_release(python=(3, minor))]  # type: ignore[arg-type]
    table = {release.distribution: release.version for release in releases}
    shared = table.keys() & pins.keys()
    assert {"megatron-core", "sglang"} | ({"transformer-engine"} if kind == "cuda" else set()) <= shared
    assert {name: table[name] for name in shared} == {name: pins[name] for name in shared}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("minor", [11, 12])
def test_tested_versions_are_accepted(kind: str, minor: int) -> None:
    for release in (*known_releases(kind, python=(3, minor)), transformer_engine_release(python=(3, minor))):  # type: ignore[arg-type]
        assert release.accepts(release.version), release
        assert release.is_pinned(f"{release.version}+cpu")


@pytest.mark.skipif(sys.version_info[:2] != ((3, 12) if ON_GPU_STACK else (3, 11)), reason="not a stack that tests/run.sh sets up")
def test_the_releases_called_tested_are_those_that_run_here() -> None:
    releases = known_releases("cuda" if ON_GPU_STACK else "cpu")
    assert all(release.tested for release in releases)
    assert [release for release in releases if not release.is_pinned(installed_version(release.distribution) or "0")] == []


def test_a_stack_that_is_not_run_is_not_called_tested() -> None:
    for kind, python in (("cpu", (3, 12)), ("cuda", (3, 11))):
        for release in known_releases(kind, python=python):  # type: ignore[arg-type]
            assert not release.tested
            assert "tested with" not in doctor.check_package(release, None).text
            assert "as tested" not in doctor.check_package(release, release.version).text


@pytest.mark.parametrize(
    ("installed", "level", "part"),
    [
        ("2.60.0", "ok", "as tested"),
        ("2.51.0", "note", "tested with 2.60.0"),
        ("2.9.0", "broken", "needs >=2.50"),
        (None, "broken", "not installed"),
    ],
)
def test_packages(installed: str | None, level: str, part: str) -> None:
    finding = doctor.check_package(RAY, installed)
    assert (finding.level, part in finding.text) == (level, True)
    assert (finding.fix == "") == (level == "ok")
    assert finding.fix == "" or finding.fix.endswith("-m pip install 'ray==2.60.0'")


@pytest.mark.parametrize(("version", "level"), [((3, 10), "broken"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "broken")])
def test_python(version: tuple[int, int], level: str) -> None:
    assert doctor.check_python(version).level == level


@pytest.mark.parametrize(
    ("proxies", "level"),
    [
        ({}, "ok"),
        ({"http": "http://proxy:3128"}, "broken"),
        ({"all": "socks://proxy:1", "no": "example.org"}, "broken"),
        ({"http": "http://proxy:3128", "no": "example.org, 127.0.0.1"}, "ok"),
        ({"http": "http://proxy:3128", "no": "*"}, "ok"),
        ({"ftp": "http://proxy:3128"}, "ok"),
    ],
)
def test_proxies(proxies: dict[str, str], level: str) -> None:
    assert doctor.check_proxies(proxies).level == level


def test_proxy_fix_keeps_the_exceptions() -> None:
    fix = doctor.check_proxies({"http": "http://proxy:3128", "no": "example.org"}).fix
    assert fix == "export no_proxy=example.org,localhost,127.0.0.1 NO_PROXY=example.org,localhost,127.0.0.1"


def test_limits() -> None:
    assert doctor.check_memory(int(5.9 * GIB)).level == "broken"
    assert doctor.check_memory(6 * GIB).level == "ok"
    assert doctor.check_open_files(1024).level == "note"
    assert doctor.check_open_files(resource.RLIM_INFINITY).level == "ok"


def test_space_of_a_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    finding = doctor.check_space("disk", tmp_path / "runs" / "x", needed_gib=0, fix="")
    assert finding.level == "ok"
    assert str(tmp_path) in finding.text
    assert doctor.check_space("disk", tmp_path, needed_gib=10**9, fix="buy disks").level == "note"


def test_no_program_of_the_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.gpu_kind() == "cpu"


def test_gpu_next_to_a_cpu_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA H100\necho NVIDIA H100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(doctor, "installed_version", lambda name: "2.13.0+cpu")
    assert doctor.gpu_kind() == "cuda"
    finding = list(doctor.check_gpu("cuda"))[-1]
    assert (finding.level, finding.text.startswith("2 × NVIDIA H100")) == ("broken", True)


def findings_of_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, release: str = "13.0", without: str = "") -> list[Check]:
    """Checks on a machine with a toolkit of `release`, ninja and libcudart; the file named `without` is missing."""
    folder, toolkit = tmp_path / "bin", tmp_path / "cuda"
    for directory in (folder, toolkit / "bin", toolkit / "lib64"):
        directory.mkdir(parents=True)
    (toolkit / "bin" / "nvcc").write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.48"\n')
    (toolkit / "lib64" / "libcudart.so").touch()
    (folder / "ninja").write_text("#!/bin/sh\n")
    for program in (toolkit / "bin" / "nvcc", folder / "ninja"):
        program.chmod(0o755)
    (tmp_path / "empty.c").touch()
    subprocess.run(["c++", "-shared", "-x", "c", "empty.c", "-o", "libcudart.so.13"], cwd=tmp_path, check=True, timeout=60)
    for path in tmp_path.rglob(without) if without else ():
        path.unlink()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return list(doctor.check_toolchain("cuda"))


@pytest.mark.parametrize(
    ("machine", "topic", "got"),
    [
        ({}, None, ""),
        ({"release": "12.8"}, "nvcc", "of CUDA 12"),
        ({"without": "nvcc"}, "nvcc", "bin/nvcc"),
        ({"without": "libcudart.so"}, "nvcc", "lib64/libcudart.so"),
        ({"without": "ninja"}, "ninja", "PATH"),
        ({"without": "libcudart.so.13"}, "libcudart.so.13", "loader's path"),
    ],
)
def test_engines_toolchain(machine: dict[str, str], topic: str | None, got: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = Path(sys.executable).parent / "ninja"
    if machine.get("without") == "ninja" and beside.exists():
        pytest.skip(f"{beside} would be found")
    if machine.get("without") == "libcudart.so.13" and (installed_version("torch-memory-saver") or find_library("cudart")):
        pytest.skip("this machine's loader knows another one")
    findings = findings_of_toolchain(tmp_path, monkeypatch, **machine)
    assert [finding.promise for finding in findings] == ["nvcc", "ninja", "libcudart.so.13"]
    broken = [finding for finding in findings if finding.level == "broken"]
    assert [finding.promise for finding in broken] == ([topic] if topic else [])
    assert all(got in finding.text and "install" in finding.fix for finding in broken)


def test_a_cpu_needs_no_toolchain() -> None:
    assert list(doctor.check_toolchain("cpu")) == []


def test_imports_are_tried_in_a_child() -> None:
    assert doctor.check_import("json.decoder").level == "ok"
    finding = doctor.check_import("json.nothing_here")
    assert finding.level == "broken"
    assert "No module named 'json.nothing_here'" in finding.text


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("note", 0), ("broken", 1)])
def test_report_ends_with_the_fixes(level: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Check("a", "ok", "fine"), Check("b", level, "so so", "" if level == "ok" else "mend --it")]  # type: ignore[arg-type]
    assert report(iter(findings)) == (status == 0)
    text = capsys.readouterr().out
    assert ("  b: mend --it\n" in text) == (level != "ok")
    assert ("1 of 2 checks found something broken" in text) == (level == "broken")
