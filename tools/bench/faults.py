"""What faults cost a run on the real server: an engine's return in cold starts, and the time that each fault takes from the steps.

    python tools/bench/faults.py [--every 8] [--turns 2] [--wait-s 3] [--task DIRECTORY]

One run of the arithmetic example with two ranks and two engines goes on through `--turns` of every fault, one at every `--every` steps.
A cold start is that of such an engine by itself, before the run, the faster of two; an engine's return counts from its death to "is
back", which includes the noticing, a new actor and its imports; goal 1.2 cold starts. The back-off of later deaths (1, 3, 7 s) is told
apart. Each reward waits `--wait-s` seconds, so that a start has the cores to itself; with 0 it shares them with ranks and engines.

The cost of a fault is the time of the steps from the fault on to the next one beyond that of as many undisturbed steps (their median).
Its share of the throughput is that of one such fault in an hour. Ranks go back to the checkpoint of the step before, and load it anew.
"""

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.config.load import load_settings
from megatron_rl.engines.engine import Engine
from megatron_rl.runtime.engine_model import EngineModel
from megatron_rl.runtime.engines import engine_arguments

ROOT = Path(__file__).parents[2]
GOAL_STARTS, HOUR_S = 1.2, 3600.0
FAULTS = {
    "an engine of two": "megatron_rl.engines.sglang_server",
    "a rank of two": "ray::TrainerWorker",
    "all reward workers": "multiprocessing.spawn",
}
WAITING = """import asyncio
from examples.arithmetic import reward
async def score(*, sample, wait_s: float):
    await asyncio.sleep(wait_s)
    return reward.score(sample=sample)
"""
STEP = re.compile(r"^ *(\d+)/\d+ ")
BACK = re.compile(r"engine (\d) is back after (\d+) s")


def overrides(task: Path, *, num_steps: int, wait_s: float) -> list[str]:
    """Return the run's settings: small, saved at every step."""
    paths = [f"run.directory={task.parent}/run", f"model.path={task}/model", f"data.train={task}/train.jsonl", "eval={}"]
    paths += ["reward.function=waiting:score", f"reward.args={{wait_s: {wait_s}}}"]
    sizes = ["data.prompts_per_step=16", "data.samples_per_prompt=4", f"run.num_steps={num_steps}", "run.save_interval=1"]
    sizes += ["training.schedule.warmup_steps=1"]
    counts = ["rollout.num_engines=2", "training.topology.num_ranks=2", "run.keep_checkpoints=1"]
    return [*paths, *sizes, *counts, "runtime.restarts=1000", "rollout.engine_restarts=1000"]


def cold_start_s(task: Path, example: Path, *, wait_s: float) -> float:
    """Return the seconds of one engine's start by itself."""
    settings = load_settings(example, overrides(task, num_steps=100, wait_s=wait_s))
    engine = Engine(
        engine_arguments(settings, model=EngineModel(settings.model.path), device_kind="cpu"), log_path=task.parent / "engine.log"
    )
    begun_s = time.monotonic()
    try:
        engine.start()
        return time.monotonic() - begun_s
    finally:
        engine.stop()


def kill(run: psutil.Process, words: str) -> None:
    """Kill one process with `words` in its command line below the run, of reward workers all."""
    found = []
    for process in run.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] * (words in " ".join(process.cmdline()))
    assert found, f"the run has no process with {words}"
    for process in found if words.startswith("multiprocessing") else found[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def lines_of(run: "subprocess.Popen[str]") -> Iterator[tuple[float, str]]:
    """Yield what the run prints, with the time."""
    assert run.stdout is not None, "a pipe"
    for line in run.stdout:
        yield time.monotonic(), line.rstrip()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=8, help="steps from one fault to the next")
    parser.add_argument("--turns", type=int, default=2, help="times of each fault")
    parser.add_argument("--wait-s", type=float, default=3.0, help="seconds that each reward waits, with idle cores")
    parser.add_argument("--task", type=Path, help="a directory of examples/arithmetic/make_task.py; made where not given")
    asked = parser.parse_args()
    example = ROOT / "examples" / "arithmetic" / "grpo.yaml"
    with tempfile.TemporaryDirectory() as directory:
        task = Path(directory) / "task"
        if asked.task is None:
            subprocess.run([sys.executable, ROOT / "examples/arithmetic/make_task.py", task, "--seed", "1"], check=True)
        else:
            task.symlink_to(asked.task.absolute())
        (task.parent / "waiting.py").write_text(WAITING)
        cold_s = min(cold_start_s(task, example, wait_s=asked.wait_s) for _ in range(2))
        plan = {(number + 1) * asked.every: name for number, name in enumerate(list(FAULTS) * asked.turns)}
        num_steps = (len(plan) + 1) * asked.every
        command = [sys.executable, "-m", "megatron_rl", "train", example, *overrides(task, num_steps=num_steps, wait_s=asked.wait_s)]
        form: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{task.parent}"}
        run = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, **form)
        ends, backs, printed = dict[int, float](), list[tuple[int, float]](), list[str]()
        for now_s, line in lines_of(run):
            printed.append(line)
            backs += [(int(found[1]), float(found[2])) for found in BACK.finditer(line)]
            if (found := STEP.match(line)) is None or int(found[1]) in ends:
                continue
            step = int(found[1])
            ends[step] = now_s
            if step in plan:
                kill(psutil.Process(run.pid), FAULTS[plan[step]])
        if run.wait():
            print("\n".join(printed[-30:]), file=sys.stderr)
            return 1
    report(ends, plan, every=asked.every, cold_s=cold_s, backs=backs)
    return 0


def report(ends: dict[int, float], plan: dict[int, str], *, every: int, cold_s: float, backs: list[tuple[int, float]]) -> None:
    """Print the ratios, of the `ends` of steps in seconds of a clock, and of `backs`, an engine's number and seconds."""
    took_s = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends}
    median_s = statistics.median(took_s[step] for step in range(2, every + 1))
    print(f"an engine's cold start {cold_s:.1f} s; a step {median_s:.2f} s (median of {every - 1})")
    own_s = list[float]()
    for number, (engine, back_s) in enumerate(backs):
        delay_s = 2.0 ** sum(other == engine for other, _ in backs[:number]) - 1
        own_s.append(back_s - delay_s)
        print(f"engine {engine} was back after {back_s:.0f} s, of them {delay_s:.0f} s back-off: {own_s[-1] / cold_s:.2f} cold starts")
    if own_s:
        ratio = statistics.median(own_s) / cold_s
        print(f"median {ratio:.2f} cold starts, goal {GOAL_STARTS}: {'met' if ratio <= GOAL_STARTS else 'missed'}")
    costs: dict[str, list[float]] = defaultdict(list)
    for step, name in plan.items():
        after = range(step + 1, step + every + 1)
        costs[name].append(sum(took_s[each] for each in after) - every * median_s)
    for name, lost_s in costs.items():
        mean_s = statistics.mean(lost_s)
        each = ", ".join(f"{one:.1f}" for one in lost_s)
        print(f"death of {name}: {each} s, {mean_s / median_s:.1f} steps; {100 * mean_s / HOUR_S:.2f} % of an hour's throughput for each")


if __name__ == "__main__":
    sys.exit(main())
