"""`tools/setup_env.sh --check` on machines that are pretended by stand-ins on PATH, and the GPU stack as a resolver sees it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "tools" / "requirements"


def run_setup(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the set-up in this environment and no other."""
    command = ["bash", "tools/setup_env.sh", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)


def check(
    tmp_path: Path,
    *,
    driver: str | None = "580.65.06",
    cuda: str | None = "13.0",
    libraries: bool = True,
    glibc: str = "2.35",
    headers: bool = True,
    options: tuple[str, ...] = (),
    **environment: str,
) -> tuple[int, str]:
    """Exit status and output of `setup_env.sh --check` on a machine with a GPU, `driver`, a toolkit of `cuda` with `libraries` and `glibc`;
    None is missing. Its Pythons have the `headers` that extensions are compiled with.
    """
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    (tmp_path / "lib64").mkdir()
    if libraries:
        (tmp_path / "lib64" / "libcudart.so").touch()
    python = 'case "$*" in --version) echo "Python of %s" ;; *Python.h*) exit %d ;; *) exec %s "$@" ;; esac'
    stand_ins = {
        "getconf": f"echo glibc {glibc}",
        "python3.11": python % ("3.11", not headers, sys.executable),
        "python3.12": python % ("3.12", not headers, sys.executable),
        "df": "printf 'header\\nx 1 1 99999999 1%% /\\n'",
    }
    if driver is not None:
        stand_ins["nvidia-smi"] = f'case $1 in -L) echo "GPU 0: NVIDIA H100" ;; *) echo {driver} ;; esac'
    if cuda is not None:
        stand_ins["nvcc"] = f'echo "Cuda compilation tools, release {cuda}, V{cuda}.48"'
    for name, body in stand_ins.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    # Only what the script calls: a machine's own nvcc must not be found behind the stand-ins.
    for name in ("bash", "sh", "uname", "lscpu", "c++", "awk", "sed", "head", "sort", "cat", "sha256sum", "cut", "dirname"):
        found = shutil.which(name)
        assert found is not None, f"{name} is missing on this machine"
        if not (programs / name).exists():
            (programs / name).symlink_to(found)
    surroundings = {"PATH": str(programs), "VENV": str(tmp_path / "venv"), "CUDA_HOME": str(tmp_path), **environment}
    done = run_setup(*options, "--check", **surroundings)
    assert not (tmp_path / "venv").exists(), "--check must change nothing"
    return done.returncode, done.stdout + done.stderr


def test_gpu_machines_get_the_newest_python_cpu_the_tested_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert check(tmp_path / "a")[1].startswith("environment: gpu stack, because nvidia-smi lists a GPU; Python of 3.12;")
    assert check(tmp_path / "b", DEVICE="cpu")[1].startswith("environment: cpu stack, because DEVICE=cpu is set; Python of 3.11;")


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        ({"driver": "570.172.08"}, "the NVIDIA driver is 570.172.08, and CUDA 13 needs 580 or newer"),
        ({"driver": None, "DEVICE": "gpu"}, "the NVIDIA driver is not found, and CUDA 13 needs 580 or newer"),
        ({"cuda": None}, "/bin/nvcc"),
        ({"cuda": None, "WITHOUT_TRANSFORMER_ENGINE": "1"}, "/bin/nvcc"),
        ({"libraries": False}, "/lib64/libcudart.so"),
        ({"cuda": "12.8"}, "is of CUDA 12, and torch of this stack is built for CUDA 13"),
        ({"glibc": "2.31"}, "this system has glibc 2.31, and SGLang's wheels need 2.34"),
        ({"headers": False}, "python3.12 has no Python.h, with which Triton compiles"),
    ],
)
def test_what_would_fail_late_is_said_first(tmp_path: Path, machine: dict[str, Any], sentence: str) -> None:
    status, text = check(tmp_path, **machine)
    assert (status, sentence in text, len(text.splitlines())) == (1, True, 1), text


@pytest.mark.parametrize(
    ("variable", "place"), [("PYENV_ROOT", "versions/3.12.9"), ("UV_PYTHON_INSTALL_DIR", "cpython-3.12.9-linux-x86_64-gnu")]
)
def test_an_interpreter_that_pyenv_or_uv_keeps_is_found(tmp_path: Path, variable: str, place: str) -> None:
    check(tmp_path)
    for name in ("python3.11", "python3.12"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
    kept = tmp_path / place / "bin" / "python"
    kept.parent.mkdir(parents=True)
    kept.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Python of {variable}"\nexit 0\n')
    kept.chmod(0o755)
    done = run_setup("--rehearsal", "--check", PATH=str(tmp_path / "bin"), **{variable: str(tmp_path)})
    assert done.stdout.startswith(f"environment: rehearsal stack, because --rehearsal asks for it; Python of {variable};"), done.stderr
    assert done.stdout.rstrip().endswith(".venv-rehearsal")


def test_a_rehearsal_needs_neither_driver_nor_toolkit(tmp_path: Path) -> None:
    status, text = check(tmp_path, driver=None, cuda=None, libraries=False, options=("--rehearsal",))
    assert (status, "Python of 3.12" in text) == (0, True), text


def test_headers_of_python_are_asked_of_gpu_machines_alone(tmp_path: Path) -> None:
    status, text = check(tmp_path, headers=False, DEVICE="cpu")
    assert (status, "cpu stack" in text) == (0, True), text


def test_the_environment_of_another_checkout_is_left_alone(tmp_path: Path) -> None:
    other, shared = tmp_path / "other", tmp_path / "venv"
    (other / "tools").mkdir(parents=True)
    (other / "tools" / "setup_env.sh").touch()
    shared.mkdir()
    for name, content in ((".made_by_setup_env", str(other)), (".setup_complete", "of the other checkout")):
        (shared / name).write_text(content)
    done = run_setup(**{**os.environ, "VENV": str(shared), "DEVICE": "cpu"})
    assert done.returncode == 1
    assert f"is the environment of {other}, and one for {ROOT} would replace it" in done.stderr
    assert {path.name for path in shared.iterdir()} == {".made_by_setup_env", ".setup_complete"}


def test_a_checkout_is_the_same_one_by_another_path(tmp_path: Path) -> None:
    """On a machine that it goes no further on."""
    check(tmp_path, glibc="2.31")
    (tmp_path / "link").symlink_to(ROOT)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".made_by_setup_env").write_text(str(tmp_path / "link"))
    done = run_setup(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", VENV=str(tmp_path / "venv"))
    assert done.returncode == 1 and "this system has glibc 2.31" in done.stderr, done.stderr


def test_help_of_the_test_command_sets_nothing_up() -> None:
    done = subprocess.run(["bash", "tests/run.sh", "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("Sets up the environment if needed") and "environment: " not in done.stdout


def test_unknown_options_are_refused() -> None:
    done = run_setup("--chek", **os.environ)
    assert (done.returncode, "'--chek' is not an option" in done.stderr) == (1, True)


def test_transformer_engine_is_compiled_after_its_build_needs(tmp_path: Path) -> None:
    """Into an environment that is there already, whose interpreter only notes what it is asked for.

    Headers come from torch's wheels: a small toolkit lacks cusparse.h, each lacks cuDNN's and NCCL's. ninja is beside the interpreter.
    """
    check(tmp_path)
    python, record = tmp_path / "venv" / "bin" / "python", tmp_path / "record"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "${{NVTE_BUILD_USE_NVIDIA_WHEELS:-}} ${{PATH%%:*}} $*" >> {record}\n')
    python.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = run_setup(PATH=path, VENV=str(tmp_path / "venv"), CUDA_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = record.read_text().splitlines()
    needs, engine = (next(index for index, step in enumerate(steps) if name in step) for name in ("gpu-build-needs.txt", "gpu-build.txt"))
    assert needs < engine and "--no-build-isolation" in steps[engine]
    assert [index for index, step in enumerate(steps) if step.startswith(f"1 {python.parent} ")] == [engine]
    assert steps[-1].endswith(" - gpu torch transformers ray megatron.core sglang transformer_engine.pytorch")


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_gpu_stack_resolves(python: str, tmp_path: Path) -> None:
    """All pins of the GPU stack fit together. TransformerEngine's torch extension has no metadata before it is built, so it is left out."""
    engine = tmp_path / "engine.txt"
    constraints = ["-c", str(REQUIREMENTS / "gpu-constraints.txt")] if python == "3.12" else []
    engine.write_text((REQUIREMENTS / "gpu-build.txt").read_text().replace("core-cu13,pytorch", "core-cu13"))
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-build"]
        + ["--python-version", python, "--python-platform", "x86_64-manylinux_2_34"]
        + constraints
        + [str(path) for path in (REQUIREMENTS / "gpu.txt", REQUIREMENTS / "gpu-build-needs.txt", REQUIREMENTS / "test.txt", engine)],
        env={name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    pins = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    assert pins["torch"] == "2.14.1"
    assert any(name.endswith("-cu13") for name in pins), "setup_env.sh checks for CUDA 13"
    assert pins["transformer-engine"] == {"3.11": "2.11.0", "3.12": "2.18.0"}[python]


@pytest.mark.parametrize(("stack", "broken"), [("cpu", False), ("gpu", True), ("gpu", False)])
def test_the_last_step_imports_and_asks_for_the_toolchain(tmp_path: Path, stack: str, broken: bool) -> None:
    """The step runs in the new environment alone, behind minutes of installation."""
    text = (ROOT / "tools" / "setup_env.sh").read_text()
    script = text.split("<<'PYTHON'\n", 1)[1].split("\nPYTHON\n", 1)[0]
    stand_in = "import megatron_rl.doctor.machine as machine\nmachine.check_toolchain = lambda kind: iter(())\n"
    done = subprocess.run(
        [sys.executable, "-c", script if broken else stand_in + script, stack, "json"],
        env={**os.environ, "CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode == 0) != broken, done.stdout + done.stderr
    assert ("what engines need at run time is missing" in done.stderr) == broken
