"""Several nodes on one machine: Ray's virtual nodes, each with its own scheduler, stand for machines."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import chat_arguments, metrics, rl_arguments

ROOT = Path(__file__).parents[2]

SEATS = """
import json, os, sys
from pathlib import Path
import ray
from megatron_rl.config.settings import ClusterSettings, Settings
from megatron_rl.errors import DeadlineError
from megatron_rl.runtime.await_nodes import await_nodes
from megatron_rl.runtime.cluster import own_gpus, reserve
from megatron_rl.runtime.ray_session import ray_cluster
from megatron_rl.runtime.placement import Needs
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.watchdog import Watchdog

settings = Settings.model_validate({"run": {"directory": "x"}, "model": {"path": "x"}, "data": {"train": "x"}})
needs = Needs(num_ranks=3, num_engines=2, slots_per_engine=1)

@ray.remote
class Engine:
    def seat(self):
        return ray.get_runtime_context().get_node_id(), own_gpus(), os.environ.get("NCCL_NVLS_ENABLE")

await_nodes(sys.argv[1], 3, timeout_s=60)
try:
    await_nodes(sys.argv[1], 4, timeout_s=1)
    raise AssertionError("there are three")
except DeadlineError as error:
    assert "3 of 4 nodes joined" in str(error), error

with ray_cluster(address=sys.argv[1], num_processes=0, logs=Path("logs")):
    reservation = reserve(needs, cluster=ClusterSettings(), device_kind="cuda", timeout_s=60, variables={"NCCL_NVLS_ENABLE": "0"})
    trainers = TrainerGroup(settings, reservation=reservation, watchdog=Watchdog())
    gpus = trainers.gpus
    actors = {actor["ActorID"]: actor["Address"]["NodeID"] for actor in ray._private.state.actors().values()}
    ranks = [(actors[worker._actor_id.hex()], list(held)) for worker, held in zip(trainers.workers, gpus)]
    engines = [Engine.options(**reservation.engine_options(number)[0]).remote() for number in range(2)]
    print(json.dumps({"ranks": ranks, "engines": ray.get([engine.seat.remote() for engine in engines])}))
"""


GPUS = """
import json, sys
from pathlib import Path
import ray
from megatron_rl.config.settings import ClusterSettings, Settings
from megatron_rl.engines.engine import Engine
from megatron_rl.runtime import engines
from megatron_rl.runtime.cluster import reserve
from megatron_rl.runtime.engine_model import EngineModel
from megatron_rl.runtime.placement import Needs
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.watchdog import Watchdog

class Seen(Engine):
    \"""An engine that starts no server, and answers which GPUs it would see.\"""

    def start(self, *, timeout_s):
        return self._environment()["CUDA_VISIBLE_DEVICES"]

engines.Engine = Seen
settings = Settings.model_validate({
    "run": {"directory": "x"}, "model": {"path": sys.argv[2]}, "data": {"train": "x"}, **json.loads(sys.argv[1]),
})
ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, object_store_memory=150 * 2**20, log_to_driver=False)
needs = Needs.of(settings.training.topology, settings.rollout, colocate=settings.runtime.colocate, device_kind="cuda")
with Watchdog() as watchdog:
    reservation = reserve(needs, cluster=ClusterSettings(), device_kind="cuda", timeout_s=60)
    trainers = TrainerGroup(settings, reservation=reservation, watchdog=watchdog)
    shared = {"gpus_of_ranks": trainers.gpus} if needs.colocated else {}
    group = engines.EngineGroup(
        settings, model=EngineModel(Path(sys.argv[2])), reservation=reservation, watchdog=watchdog, **shared
    )
    print(json.dumps({"ranks": trainers.gpus, "engines": [start.result(timeout=100) for start in group.begin_start()]}))
    watchdog.forget()
ray.shutdown()
"""


AGENTS = """
import asyncio, sys, time
from contextlib import suppress
from pathlib import Path
import numpy as np, psutil
sys.path.insert(0, "tests/unit/rollout")
from chat_parts import chat_tokenizer
from endpoint_parts import Gate
from megatron_rl.config.settings import AgentSettings, ClusterSettings, RolloutSettings
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import TrajectoryError
from megatron_rl.rollout.opened_rollout import opened_rollout
from megatron_rl.runtime.agent_nodes import spread_agents
from megatron_rl.runtime.cluster import reserve
from megatron_rl.runtime.placement import Needs
from megatron_rl.runtime.ray_session import ray_cluster
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.types import Prompt

address, logs = sys.argv[1], Path(sys.argv[2])
command = (sys.executable, "tests/e2e/asking.py")
tokenizer, policy = chat_tokenizer(), Gate(chat_tokenizer(), lambda text: "4")
prompt = Prompt(id="p", token_ids=np.array([1]), text="Hi.", label="4")

class Manager:
    async def spread_agents(self, nodes, *, host, end):
        self.end = end
        await rollout.spread(nodes, host=host)

async def until(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)

async def play():
    try:
        (sample,) = await rollout(prompt=prompt, generator=policy, sampling=Sampling(max_tokens=9), num_samples=1, tokenizer=tokenizer)
        return sample.reward.value
    except TrajectoryError as error:
        return error.cause

async def begin_four():
    policy.opened.clear()
    playing = [asyncio.ensure_future(play()) for _ in range(4)]
    await until(lambda: policy.num_running == 4)
    return playing

def found(words):
    processes = [each for each in psutil.process_iter(["cmdline"]) if words in " ".join(each.info["cmdline"] or ())]
    return [each for each in processes if each.info["cmdline"][0] != "bash"]

async def work():
    assert await asyncio.gather(*(play() for _ in range(4))) == [1.0] * 4
    assert (logs / "agents.log").read_text().count("asked http://127.0.0.1:") == 2
    assert (logs / "agents-1.log").read_text().count(f"asked {rollout._nodes[1].url}/v1") == 2
    (actor,) = found("ray::AgentWorker")
    playing = await begin_four()
    for each in playing:
        each.cancel()
    await until(lambda: not found("asking.py"))
    playing = await begin_four()
    below = actor.children(recursive=True)
    actor.kill()
    await until(lambda: sum(each.done() for each in playing) == 2)
    policy.opened.set()
    assert sorted(map(str, await asyncio.gather(*playing))) == ["1.0", "1.0", "error", "error"]
    assert psutil.wait_procs(below, timeout=30)[1] == [] and rollout._nodes[1].num_playing == 0
    assert await asyncio.gather(*(play() for _ in range(3))) == [1.0] * 3
    begun, deadline_s = (logs / "agents-1.log").read_text().count("asked"), time.monotonic() + 60
    while (logs / "agents-1.log").read_text().count("asked") == begun and time.monotonic() < deadline_s:
        rollout._nodes[1].lost_s = 0.0  # as after LOST_S
        await asyncio.sleep(0.2)
        await asyncio.gather(*(play() for _ in range(2)))
    assert time.monotonic() < deadline_s, "the actor is not back"
    (actor,), playing = found("ray::AgentWorker"), await begin_four()
    (raylet,) = (each for each in actor.parents() if "/raylet/raylet " in " ".join(each.cmdline()))
    machine = [raylet, *raylet.children(recursive=True)]
    assert set(found("asking.py")) & set(machine)
    for each in machine:  # it has lost power
        with suppress(psutil.NoSuchProcess):
            each.kill()
    assert psutil.wait_procs(machine[1:], timeout=30)[1] == []  # nobody reaps the raylet
    await until(lambda: sum(each.done() for each in playing) == 2)
    policy.opened.set()
    assert sorted(map(str, await asyncio.gather(*playing))) == ["1.0", "1.0", "error", "error"]
    assert await asyncio.gather(*(play() for _ in range(3))) == [1.0] * 3
    rollout._nodes[1].lost_s = 0.0  # as after LOST_S: one trajectory finds that the node is still gone
    assert sorted(map(str, await asyncio.gather(play(), play()))) == ["1.0", "error"]
    await manager.end()
    await until(lambda: not found("ray::AgentWorker"))

del __file__  # spawned workers would import it
with ray_cluster(address=address, num_processes=0, logs=logs), Watchdog() as watchdog:
    needs = Needs(num_ranks=1, num_engines=1, slots_per_engine=1, unit="CPU")
    reservation = reserve(needs, cluster=ClusterSettings(), device_kind="cpu", timeout_s=60)
    settings, manager = RolloutSettings(agent=AgentSettings(command=command)), Manager()
    opening = opened_rollout(settings, tokenizer=tokenizer, model_type="qwen3", must_reward=True, log_path=logs / "agents.log")
    with watchdog.entered(opening, name="opening", owner="the test", timeout_s=120) as rollout:
        spread_agents(manager, command, reservation=reservation, logs=logs, watchdog=watchdog)
        watchdog.wait(work(), name="the test", owner="it", timeout_s=200)
"""


def test_ranks_and_engines_are_where_the_placement_says(cluster: Callable[..., str]) -> None:
    """3 ranks and 2 engines on nodes of 2 GPUs: ranks 0 and 1, then rank 2 and engine 0, then engine 1."""
    address = cluster("4,2", "4,2", "4,2")
    done = subprocess.run([sys.executable, "-c", SEATS, address], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (node_0, gpus_0), (node_1, gpus_1), (node_2, gpus_2) = found["ranks"]
    (beside, engine_gpus, variable), (alone, _, _) = found["engines"]
    assert node_0 == node_1
    assert (gpus_0, gpus_1) == (["0"], ["1"])
    assert beside == node_2
    assert sorted(gpus_2 + engine_gpus) == ["0", "1"]
    assert variable == "0"
    assert len({node_0, node_2, alone}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "ranks", "engines"),
    [
        pytest.param(
            {
                "training": {"topology": {"num_ranks": 4}},
                "rollout": {"num_engines": 2, "sglang": {"tp_size": 2}},
                "runtime": {"colocate": True},
            },
            [["0"], ["1"], ["2"], ["3"]],
            ["0,1", "2,3"],
            id="shared",
        ),
        pytest.param({"training": {"topology": {"num_ranks": 2}}}, [["0"], ["1"]], ["2", "3"], id="own"),
    ],
)
def test_each_process_sees_its_gpus_in_order(
    tiny_model: Callable[..., Path], sections: dict[str, Any], ranks: list[list[str]], engines: list[str]
) -> None:
    """Rank i of an engine beside ranks is on the GPU of the rank whose weights it opens; Ray has 4 GPUs that are not there."""
    command = [sys.executable, "-c", GPUS, json.dumps({"rollout": {"num_engines": 2}, **sections}), str(tiny_model())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == ranks
    # Engines with GPUs of their own are equal, and Ray deals these out in any order.
    assert (found["engines"] if "runtime" in sections else sorted(found["engines"])) == engines


@pytest.mark.slow
def test_a_run_over_three_nodes(task: Path, tmp_path: Path, start: Callable[..., Any], cluster: Callable[..., str]) -> None:
    """Two ranks and an engine on a node each, reached by the nodes' address; the cluster, started elsewhere, outlives the run."""
    address = cluster("1,0", "1,0", "1,0")
    for name in ("first", "second"):
        directory = tmp_path / name
        run = start(*rl_arguments(task, directory, "run.num_steps=2"), "--ray-address", address)
        assert run.wait() == 0, run.output
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["steps"] == 2
        assert (directory / "checkpoints").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "says", "weights"),
    [
        ("killed", "killed by signal 9", ()),
        ("stopped", "its processes did no work", ("weights.delta=true", "weights.transport=disk")),
    ],
    ids=["killed, broadcast", "stopped, deltas by disk"],
)
def test_an_engine_on_two_nodes_returns_as_one(
    task: Path, tmp_path: Path, start: Callable[..., Any], cluster: Callable[..., str], fault: str, says: str, weights: tuple[str, ...]
) -> None:
    """A rank on a node, an engine on two others, asynchronous: its second server fails, and both come back with current weights."""
    directory, sglang = tmp_path / "run", ("rollout.sglang.tp_size=2", "rollout.sglang.nnodes=2")
    words = (
        *sglang,
        "training.topology.num_ranks=1",
        "run.num_steps=14",
        "rollout.max_staleness=1",
        "objective.proximal=rollout",
        *weights,
    )
    run = start(*rl_arguments(task, directory, *words), "--ray-address", cluster("1,0", "1,0", "1,0"))
    run.wait_until(lambda: (directory / "metrics.jsonl").exists() and 1 in metrics(directory), what="a step", timeout_s=400)
    before = _servers(directory)
    if fault == "killed":
        before[1].kill()
    else:
        (scheduler,) = (each for each in before[1].children() if each.name().startswith("sglang::scheduler_TP1"))
        scheduler.suspend()
    run.wait_for("engine 0 is back after", timeout_s=400)
    assert not any(server.is_running() for server in before)
    after = _servers(directory)
    assert run.wait() == 0, run.output
    assert "engine 0 is started again" in run.output and says in run.output
    assert psutil.wait_procs(after, timeout=30)[1] == []
    steps = metrics(directory)
    assert max(steps) == 14 and _agrees(steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_shares_the_slots_of_ranks_on_two_nodes(
    task: Path, tmp_path: Path, start: Callable[..., Any], cluster: Callable[..., str]
) -> None:
    """Each rank gives its memory to the engine's server beside it; the death of the second server ends the run in a sentence."""
    directory, sglang = tmp_path / "run", ("rollout.sglang.tp_size=2", "rollout.sglang.nnodes=2")
    words = (*sglang, "training.topology.num_ranks=2", "run.num_steps=40", "runtime.colocate=true")
    run = start(*rl_arguments(task, directory, *words), "--ray-address", cluster("1,0", "1,0"))
    run.wait_until(lambda: (directory / "metrics.jsonl").exists() and 3 in metrics(directory), what="three steps", timeout_s=400)
    servers = _servers(directory)
    servers[1].kill()
    assert run.wait() != 0 and "killed by signal 9" in run.output
    assert psutil.wait_procs(servers, timeout=30)[1] == []
    assert _agrees(metrics(directory))


def _agrees(steps: dict[int, dict[str, float]]) -> bool:
    """Return True when the engine scored fixed tokens as the ranks do, after every sync of the `steps`."""
    scored = [row["weights/scored_mean"] for row in steps.values() if "weights/scored_mean" in row]
    return len(scored) >= 3 and max(scored) <= 1e-4


def _servers(directory: Path) -> list[psutil.Process]:
    """Return the servers of engine 0 of the run in `directory`, by the logs that they write."""
    names, found = ["engine-0.log", "engine-0-node-1.log"], dict[str, psutil.Process]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "megatron_rl.engines.sglang_server" in process.cmdline() and process.parent().name().startswith("ray::EngineWorker"):
                found |= {Path(file.path).name: process for file in process.open_files() if Path(file.path).parent == directory / "logs"}
    return [found[name] for name in names]


@pytest.mark.slow
def test_agents_play_on_two_nodes(tmp_path: Path, cluster: Callable[..., str]) -> None:
    """Each by the URL that its node sees; a cancelled one ends, a killed actor costs an attempt and comes back, a lost node does not."""
    (script := tmp_path / "agents.py").write_text(AGENTS)
    command = [sys.executable, str(script), cluster("1,0", "1,0"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_agents_play_on_all_nodes(chat_task: Path, tmp_path: Path, start: Callable[..., Any], cluster: Callable[..., str]) -> None:
    """A rank and an engine on a node each, agents on both; those of a killed actor are tried again elsewhere."""
    directory, address = tmp_path / "run", cluster("1,0", "1,0")
    rollout = f"rollout.agent={{command: [{sys.executable}, tests/e2e/interviewer.py], max_processes: 4}}"
    given = chat_arguments(chat_task, directory, "rollout.max_turns=8", "rollout.max_error_rate=0", rollout=rollout)
    run, elsewhere = start(*given, "--ray-address", address), directory / "logs" / "agents-1.log"
    deadline = time.monotonic() + 600
    while not (elsewhere.exists() and "reward" in elsewhere.read_text()):
        assert run.process.poll() is None and time.monotonic() < deadline, run.output
        time.sleep(0.05)
    (actor,) = (each for each in psutil.process_iter() if each.name().startswith("ray::AgentWorker"))
    below = actor.children(recursive=True)
    # A server, the processes of agents and their programs.
    assert any("interviewer.py" in " ".join(each.cmdline()) for each in below)
    actor.kill()
    assert run.wait() == 0, run.output
    assert psutil.wait_procs(below, timeout=30)[1] == []
    steps = metrics(directory)
    assert [steps[step]["rollout/failures"] for step in (1, 2)] == [0, 0]
    assert sum(steps[step]["rollout/retries"] for step in (1, 2)) > 0
    made = [(directory / "logs" / name).read_text().count('{"reward"') for name in ("agents.log", "agents-1.log")]
    # One may have said its reward just before the kill.
    assert min(made) > 0 and sum(made) >= 16
