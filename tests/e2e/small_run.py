"""A small GRPO of the arithmetic example, one with an environment, what its directory says, where it listens, who sees its keys."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import psutil

SIZES = ("data.prompts_per_step=16", "data.samples_per_prompt=4", "eval.interval=2", "training.schedule.warmup_steps=1")


def rl_arguments(task: Path, directory: Path, *overrides: str) -> list[str]:
    """The command line's arguments for a run in `directory` on the model and the data of `task`."""
    held_out = (f"eval.sets.{name}.data={task}/held_out.jsonl" for name in ("greedy", "sampled"))
    paths = (f"model.path={task}/model", f"data.train={task}/train.jsonl", *held_out)
    return ["train", "examples/arithmetic/grpo.yaml", f"run.directory={directory}", *paths, *SIZES, *overrides]


def chat_arguments(
    task: Path, directory: Path, *overrides: str, rollout: str = "rollout.environment=tests.e2e.interview:Interview"
) -> list[str]:
    """The command line's arguments for a run of many turns in `directory`, on the model and the data of `task`."""
    # A random model seldom ends a turn: every printable character of ASCII ends it, others do not.
    stops = list(range(94))
    return [
        "train", f"run.directory={directory}", "run.num_steps=2", "run.save_interval=1", f"model.path={task}/model",
        f"data.train={task}/rows.jsonl", "data.prompts_per_step=4", "data.samples_per_prompt=2", "data.max_prompt_tokens=64",
        "rollout.max_turns=4", rollout, "rollout.sampling.max_response_tokens=40",
        f"rollout.sampling.stop_token_ids={stops}", "rollout.sglang.max_total_tokens=8192", "rollout.sglang.log_level=info",
        "rollout.sglang.enable_deterministic_inference=true", "training.topology.num_ranks=1", "training.optimizer.lr=1e-3", *overrides,
    ]  # fmt: skip


def metrics(directory: Path) -> dict[int, dict[str, float]]:
    """All metrics of every step."""
    steps: dict[int, dict[str, float]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], {}).update(row)
    return steps


def listeners(run: Any) -> dict[str, set[tuple[str, int]]]:
    """The addresses and ports on which the run's processes listen, by process."""
    found: dict[str, set[tuple[str, int]]] = {}
    for process in {psutil.Process(run.process.pid), *run.descendants()}:
        with contextlib.suppress(psutil.NoSuchProcess):
            links = [link for link in process.net_connections(kind="tcp") if link.status == psutil.CONN_LISTEN]
            found.setdefault(process.name(), set()).update(tuple(link.laddr) for link in links)
    return found


def exposures(secret: str, *places: Path) -> list[str]:
    """The command lines of this machine, and the files below `places`, in which `secret` is."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process.name()] * (secret in " ".join(process.cmdline()))
    # Unlike Path.rglob, os.walk passes over directories that vanish meanwhile.
    for file in (Path(folder, name) for place in places for folder, _, names in os.walk(place) for name in names):
        with contextlib.suppress(FileNotFoundError):
            found += [str(file)] * (file.is_file() and secret.encode() in file.read_bytes())
    return found


def beyond_loopback(listening: dict[str, set[tuple[str, int]]]) -> dict[str, set[tuple[str, int]]]:
    """Those of `listeners` that other machines could reach."""
    loopback = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    return {name: others for name, found in listening.items() if (others := {each for each in found if each[0] not in loopback})}
