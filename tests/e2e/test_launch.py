"""The launch scripts as their users call them: dry runs from a config.json, options, and the end of what they start."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from megatron_rl.config.gpus import GPUS
from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.runtime.target import find_target

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
CONFIGS = ROOT / "tests" / "data" / "configs"
GIB = 2**30

MODELS = {
    "qwen3-4b": "Qwen3-4B",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "glm-4.5-air-106b": "GLM-4.5-Air",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "glm-4.5-355b": "GLM-4.5",
    "deepseek-v3-671b": "DeepSeek-V3",
}
"""Script -> the config.json that it is dry-run with. One dense and one mixture of experts run always, the others in the wide run."""
SHELL_SCRIPTS = sorted(
    [*ROOT.glob("examples/**/*.sh"), *ROOT.glob("tools/*.sh"), *ROOT.glob("tests/*.sh"), LAUNCH / "slurm.sbatch"],
)
ALWAYS = ("qwen3-8b",)
SCRIPTS = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A machine with an environment for the scripts and without a GPU."""
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)
    for name, target in {"python": sys.executable, "ray": Path(sys.executable).with_name("ray")}.items():
        _executable(binaries / name, f'exec {target} "$@"')
    return {**os.environ, "VENV": str(tmp_path / "venv"), "OMP_NUM_THREADS": "1"}


def _executable(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def run(script: str, *arguments: str, environment: Mapping[str, str], timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(LAUNCH / script), *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_every_script_has_a_model_and_settings_beside_it() -> None:
    assert {path.stem for path in LAUNCH.glob("*.sh")} == {*MODELS, "common"}
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_dry_run_fits_and_the_header_says_how_much(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(CONFIGS / f"{MODELS[name]}.json", tmp_path / "model" / "config.json")
    done = run(f"{name}.sh", "--model", str(tmp_path / "model"), "--dry-run", environment=environment)
    assert done.returncode == 0, done.stderr
    assert "# fits: " in done.stdout
    settings = load_settings(LAUNCH / f"{name}.yaml", [f"model.path={tmp_path}/model"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(done.stdout)
    assert load_settings(printed) == settings

    last_rank = settings.training.topology.num_ranks - 1
    assert f"ranks 0-{last_rank}" in done.stdout
    assert f"engines 0-{settings.rollout.num_engines - 1}" in done.stdout
    assert settings.runtime.cluster.gpu is not None
    gpu = GPUS[settings.runtime.cluster.gpu]
    header = memory_of_header(name)
    expected = (*memory_of(done.stdout), gpu.memory_bytes / GIB)
    assert header == pytest.approx(expected, abs=1.0), f"the header of {name}.sh says {header}, the plan says {expected}"


@pytest.mark.slow
def test_deepseek_fits_80_gb_gpus_as_the_page_says(environment: dict[str, str], tmp_path: Path) -> None:
    """With engines over four nodes."""
    shutil.copy(CONFIGS / "DeepSeek-V3.json", tmp_path / "config.json")
    page = (LAUNCH / "README.md").read_text()
    command = page[page.index("bash examples/launch/deepseek-v3-671b.sh") :].partition("```")[0]
    overrides = re.findall(r"\w+(?:\.\w+)+=\S+", command)
    assert "rollout.sglang.nnodes=4" in overrides
    done = run("deepseek-v3-671b.sh", "--model", str(tmp_path), "--dry-run", *overrides, environment=environment)
    assert done.returncode == 0, done.stderr
    assert memory_of(done.stdout) == pytest.approx((64.6, 39.1, 26.6), abs=0.1)
    assert re.search(r"nodes 32-39\W+engines 0-1, 1 a node on GPUs 0-7, on 4 nodes each", done.stdout)


def memory_of_header(name: str) -> tuple[float, ...]:
    """GiB that a script's header names: trainer, engine's weights, engine's cache, one GPU."""
    form = r"# Memory     trainer (\d+) GiB, engine (\d+) GiB of weights and (\d+) GiB of KV cache, of (\d+) GiB per GPU"
    found = re.search(form, (LAUNCH / f"{name}.sh").read_text())
    assert found is not None, f"{name}.sh has no line of the form {form}"
    return tuple(map(float, found.groups()))


def memory_of(dry_run: str) -> tuple[float, float, float]:
    """GiB that a dry run printed: trainer, engine's weights, engine's cache."""
    peak = re.search(r"^# fits: ([\d.]+) of", dry_run, re.MULTILINE)
    assert peak is not None
    weights, cache = _engine_cells(dry_run)
    return float(peak[1]), float(weights), float(cache)


def _engine_cells(dry_run: str) -> tuple[str, str]:
    lines = dry_run.splitlines()
    title = next(index for index, line in enumerate(lines) if line.startswith("# SGLang engines, GiB per GPU"))
    cells = dict(zip(re.split(r"  +", lines[title + 1].strip("# ")), re.split(r"  +", lines[title + 2].strip("# ")), strict=True))
    return cells["weights"], cells["KV cache"]


@pytest.mark.parametrize("name", MODELS)
def test_settings_beside_a_script_are_consistent(name: str) -> None:
    settings = load_settings(LAUNCH / f"{name}.yaml", [])
    nodes = settings.runtime.cluster.num_nodes
    text = (LAUNCH / f"{name}.sh").read_text()
    assert f"# Hardware   {nodes} node{'s' * (nodes != 1)} with 8 × {settings.runtime.cluster.gpu}" in text
    assert ("colocated" in text) == settings.runtime.colocate
    staleness = settings.rollout.max_staleness
    assert f"asynchronous with max_staleness {staleness}" in text if staleness else ", synchronous" in text
    assert f"{settings.run.num_steps} steps" in text
    samples = f"{settings.data.prompts_per_step} × {settings.data.samples_per_prompt} samples"
    assert samples in text
    # Architecture comes from the checkpoint alone.
    assert all(name.startswith("recompute_") or name.endswith("_pipeline_stage") for name in settings.model.megatron)


def test_the_examples_cover_the_modes() -> None:
    modes = {
        (settings.runtime.colocate, settings.rollout.max_staleness > 0)
        for settings in (load_settings(path, []) for path in LAUNCH.glob("*.yaml"))
    }
    assert modes == {(True, False), (False, False), (False, True)}


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_sound(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None, "shellcheck is missing: install the packages of tools/requirements/test.txt"
    # tests/run.sh goes on after a failed section, so it cannot stop at a failed cd either.
    done = subprocess.run([shellcheck, "--external-sources", "--exclude=SC2164", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_scripts_stop_nothing_by_name() -> None:
    for path in [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"]:
        assert re.search(r"\b(pkill|killall|ray stop|scancel)\b(?! or)", _code(path)) is None, f"{path} may stop what it did not start"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_multiple_of_the_nodes_is_filled(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    _executable(tmp_path / "venv" / "bin" / "python", "printf '%s\\n' \"$@\"")

    def settings_of(*arguments: str) -> Settings:
        words = run(f"{name}.sh", "--dry-run", *arguments, environment=environment).stdout.splitlines()
        return load_settings(LAUNCH / f"{name}.yaml", [word for word in words if "=" in word])

    planned = settings_of()
    nodes, ranks, engines = planned.runtime.cluster.num_nodes, planned.training.topology.num_ranks, planned.rollout.num_engines
    assert nodes is not None
    grown = settings_of("--nodes", str(3 * nodes))
    assert (grown.training.topology.num_ranks, grown.rollout.num_engines) == (3 * ranks, 3 * engines)
    placement = find_target(grown.training.topology, grown.rollout, grown.runtime, config_only=True).placement()
    assert placement is not None and len(placement.nodes) == 3 * nodes
    # What the user says goes, and what no multiple fills is left to the check.
    assert settings_of("--nodes", str(2 * nodes), "rollout.num_engines=1").rollout.num_engines == 1
    for other in {2 * nodes + 1, nodes} - {3 * nodes}:
        assert settings_of("--nodes", str(other)).training.topology.num_ranks == ranks


def _code(path: Path) -> str:
    return "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "this machine has no GPU; start on a GPU node, name a Ray cluster with --ray-address, or look at the plan with --dry-run"),
        (["--modle", "x"], "'--modle' is not known"),
        (["--model"], "--model needs a value"),
        (["--nodes", "zero"], "the number of nodes is 'zero', needs a number above 0"),
        (["--dry-run", "run.sed=1"], "did you mean run.seed?"),
    ],
)
def test_mistakes_are_told(arguments: list[str], part: str, environment: dict[str, str], tmp_path: Path) -> None:
    _executable(tmp_path / "path" / "nvidia-smi", "exit 9")
    done = run("qwen3-4b.sh", *arguments, environment={**environment, "PATH": f"{tmp_path}/path:{environment['PATH']}"})
    assert done.returncode == 2
    assert part in done.stderr


def test_help_is_the_header_and_the_options(environment: dict[str, str]) -> None:
    done = run("glm-4.5-355b.sh", "--help", environment=environment)
    assert done.returncode == 0
    assert done.stdout.startswith("DAPO on mathematics with GLM-4.5")
    assert "Hardware   24 nodes" in done.stdout
    assert "--ray-address H:P" in done.stdout
    assert "set -euo" not in done.stdout


STAND_IN = """
trap 'echo "$$ stopped" >>"$RECORD"; exit "${STATUS_AT_TERM:-143}"' TERM
echo "$$ $(basename "$0") $*" >>"$RECORD"
case " $* " in
*get-auth-token*) exit 0 ;;
*" doctor "*) exit "${DOCTOR_STATUS:-0}" ;;
*await_nodes*)
    # As the real one, until all that were started for the cluster are up.
    for pid in $(cat "/proc/$PPID/task/$PPID/children"); do until grep -q "^$pid " "$RECORD"; do sleep 0.05; done; done
    exit 0
    ;;
esac
while :; do sleep 0.1; done
"""


@pytest.fixture
def stand_ins(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Ray, Python and Slurm are replaced by programs that write down how they were called and run until they are stopped."""
    for name in ("python", "ray"):
        _executable(tmp_path / "venv" / "bin" / name, STAND_IN)
    _executable(tmp_path / "path" / "nvidia-smi", "echo GPU 0")
    scontrol = """case $1 in requeue) echo "$*" >>"$RECORD" ;; *) printf 'node1\\nnode2\\nnode3\\n' ;; esac"""
    _executable(tmp_path / "path" / "scontrol", scontrol)
    _executable(tmp_path / "path" / "srun", 'while [[ $1 == --* ]]; do echo "$1" >>"$RECORD.srun"; shift; done; exec "$@"')
    (tmp_path / "record").touch()
    return {**environment, "RECORD": str(tmp_path / "record"), "PATH": f"{tmp_path}/path:{environment['PATH']}", "TMPDIR": str(tmp_path)}


def interrupt_when(line: str, words: list[str], environment: Mapping[str, str], number: signal.Signals) -> tuple[int, str]:
    """Start a script, send it a signal when `line` was recorded, and return its status and the record."""
    record = Path(environment["RECORD"])
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    wait_until(lambda: line in record.read_text())
    process.send_signal(number)
    return process.wait(timeout=60), record.read_text()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "not within a minute"
        time.sleep(0.1)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_script_stops_the_ray_that_it_started_and_no_other(
    stand_ins: dict[str, str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    other = subprocess.Popen([tmp_path / "venv" / "bin" / "ray", "start", "--head"], env=stand_ins)
    try:
        words = ["bash", str(LAUNCH / "qwen3-30b-a3b.sh"), "--model", "m", "--directory", "d"]
        found, record = interrupt_when("megatron_rl train", words, stand_ins, number)
        assert found == status
        started = dict(line.split(" ", 1) for line in record.splitlines() if " start " in line or " train " in line)
        own = {pid for pid in started if pid != str(other.pid)}
        assert len(own) == 2
        assert {line.split()[0] for line in record.splitlines() if line.endswith(" stopped")} == own
        (training,) = (words for words in started.values() if " train " in words)
        assert re.search(r"qwen3-30b-a3b.yaml model.path=m run.directory=d --ray-address [\d.a-f:]+:6379$", training)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_cluster_that_was_given_is_left_running(stand_ins: dict[str, str]) -> None:
    words = ["bash", str(LAUNCH / "qwen3-30b-a3b.sh"), "--ray-address", "10.0.0.1:6379", "--resume"]
    status, record = interrupt_when("megatron_rl train", words, stand_ins, signal.SIGTERM)
    assert status == 143
    assert "ray start" not in record
    assert "--resume --ray-address 10.0.0.1:6379" in record


def test_training_finds_the_programs_beside_its_interpreter(stand_ins: dict[str, str], tmp_path: Path) -> None:
    """Nobody activates the environment, and SGLang compiles kernels with its ninja."""
    _executable(tmp_path / "venv" / "bin" / "ninja", "")
    _executable(tmp_path / "venv" / "bin" / "python", 'command -v ninja >"$RECORD"')
    words = ["bash", str(LAUNCH / "qwen3-4b.sh")]
    subprocess.run(words, env=stand_ins, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    assert Path(stand_ins["RECORD"]).read_text().strip() == str(tmp_path / "venv" / "bin" / "ninja")


def test_a_script_asks_training_to_end_and_has_its_status(stand_ins: dict[str, str]) -> None:
    words = ["bash", str(LAUNCH / "qwen3-4b.sh"), "--resume"]
    status, record = interrupt_when("megatron_rl train", words, {**stand_ins, "STATUS_AT_TERM": "75"}, signal.SIGTERM)
    assert status == 75
    assert len([line for line in record.splitlines() if line.endswith(" stopped")]) == 1


SLURM = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_ID": "17"}


@pytest.mark.parametrize(
    ("job", "requeued", "resumed"),
    [
        ({"STATUS_AT_TERM": "75"}, True, False),
        ({"STATUS_AT_TERM": "75", "SLURM_RESTART_COUNT": "19"}, True, True),
        ({"STATUS_AT_TERM": "75", "SLURM_RESTART_COUNT": "20"}, False, True),
        ({"STATUS_AT_TERM": "75", "SLURM_RESTART_COUNT": "2", "MEGATRON_RL_RESTARTS": "2"}, False, True),
        ({"STATUS_AT_TERM": "1", "SLURM_RESTART_COUNT": "1"}, False, True),
    ],
    ids=["first", "20th", "21st", "fewer", "failed"],
)
def test_slurm_puts_a_job_into_the_queue_again_that_can_go_on(
    stand_ins: dict[str, str], job: dict[str, str], requeued: bool, resumed: bool
) -> None:
    """When everything that it started is stopped."""
    words = ["bash", str(LAUNCH / "slurm.sbatch"), "qwen3-30b-a3b.sh", "--model", "m"]
    status, record = interrupt_when("megatron_rl train", words, {**stand_ins, **SLURM, **job}, signal.SIGTERM)
    assert status == int(job["STATUS_AT_TERM"])
    lines = record.splitlines()
    assert [line for line in lines if "requeue" in line] == ["requeue 17"] * requeued
    assert any("megatron_rl train" in line and " --resume " in line for line in lines) is resumed
    assert not requeued or (lines[-1] == "requeue 17" and len([line for line in lines if line.endswith(" stopped")]) == 4)


def test_slurm_starts_a_head_and_workers_and_stops_them(stand_ins: dict[str, str]) -> None:
    words = ["bash", str(LAUNCH / "slurm.sbatch"), "qwen3-30b-a3b.sh", "--model", "m"]
    status, record = interrupt_when("megatron_rl train", words, {**stand_ins, **SLURM}, signal.SIGTERM)
    assert status == 143
    lines = record.splitlines()
    assert len([line for line in lines if "ray start --head" in line]) == 1
    assert len([line for line in lines if "ray start --address=" in line]) == 2
    assert any("runtime.cluster.num_nodes=3 model.path=m --ray-address" in line for line in lines)
    running = [line.split()[0] for line in lines if "ray start" in line or "megatron_rl train" in line]
    wait_until(lambda: all(f"{pid} stopped" in Path(stand_ins["RECORD"]).read_text() for pid in running))
    used = Path(stand_ins["RECORD"] + ".srun").read_text().split()
    assert [f"--nodelist=node{number}" in used for number in (1, 2, 3)] == [True] * 3
    # A step that does not ask for the job's cores may get one.
    assert used.count("--cpus-per-task=64") == used.count("--cpu-bind=none") == used.count("--overlap")


def test_slurm_asks_the_doctor_on_every_node_before_ray(stand_ins: dict[str, str]) -> None:
    words = ["bash", str(LAUNCH / "slurm.sbatch"), "qwen3-30b-a3b.sh", "--model", "m"]
    environment = {**stand_ins, **SLURM, "DOCTOR_STATUS": "1"}
    done = subprocess.run(words, env=environment, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 2 and "a node cannot train" in done.stderr and "sbatch --exclude" in done.stderr
    record = Path(stand_ins["RECORD"]).read_text()
    assert "-m megatron_rl doctor" in record and "ray start" not in record
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1"} <= set(Path(stand_ins["RECORD"] + ".srun").read_text().split())


def test_one_interface_serves_ray_ranks_and_engines(stand_ins: dict[str, str]) -> None:
    words = ["bash", str(LAUNCH / "slurm.sbatch"), "qwen3-30b-a3b.sh", "--model", "m", "--interface", "lo"]
    _, record = interrupt_when("megatron_rl train", words, {**stand_ins, **SLURM}, signal.SIGTERM)
    assert "ray start --head --node-ip-address=127.0.0.1 --port=6379" in record
    assert record.count("--address=127.0.0.1:6379 --node-ip-address=127.0.0.1") == 2
    assert "runtime.network_interface=lo" in record


def test_the_heads_address_can_be_given(stand_ins: dict[str, str]) -> None:
    words = ["bash", str(LAUNCH / "qwen3-30b-a3b.sh"), "--nodes", "2", "--model", "m"]
    _, record = interrupt_when("megatron_rl train", words, {**stand_ins, "RAY_HEAD_IP": "10.9.8.7"}, signal.SIGTERM)
    assert "ray start --head --node-ip-address=10.9.8.7 --port=6379" in record


def test_an_interface_that_is_not_there_is_told(stand_ins: dict[str, str]) -> None:
    done = run("qwen3-30b-a3b.sh", "--nodes", "2", "--model", "m", "--interface", "nowhere0", environment=stand_ins)
    assert done.returncode == 2 and "no address on the network interface nowhere0; give another --interface, or RAY_HEAD_IP" in done.stderr


def test_slurm_directives_parse() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    directives = re.findall(r"^#SBATCH (--[a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(directives) == text.count("\n#SBATCH")
    options = dict(directives)
    assert {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--output"} <= set(options)
    assert options["--ntasks-per-node"] == "1"
    # To the script alone: a step that got it would take Ray from the ranks that save.
    assert options["--signal"].startswith("B:TERM@") and "--requeue" in options
    # Directives end at the first command.
    assert "#SBATCH" not in text.split("set -euo pipefail")[1]


def test_the_table_lists_every_script() -> None:
    table = (LAUNCH / "README.md").read_text()
    for name in MODELS:
        settings = load_settings(LAUNCH / f"{name}.yaml", [])
        row = next(line for line in table.splitlines() if line.startswith(f"| [{name}.sh]"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == f"{settings.runtime.cluster.num_nodes} × 8 {settings.runtime.cluster.gpu}"
        assert cells[4] == ("colocated" if settings.runtime.colocate else "disaggregated")
        assert cells[5] == (f"asynchronous, {settings.rollout.max_staleness}" if settings.rollout.max_staleness else "synchronous")
        assert cells[6] == f"{memory_of_header(name)[0]:.0f} GiB"


def test_the_models_that_are_dry_run_have_their_config() -> None:
    for model in MODELS.values():
        assert json.loads((CONFIGS / f"{model}.json").read_text())["architectures"]
