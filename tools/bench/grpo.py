"""A GRPO step against TRL's GRPOTrainer: one model, the same prompts, group size, token budget, optimizer and reward.

    python tools/bench/grpo.py --peer PYTHON [--steps 10] [--turns 2] [--threads 1 2]

PYTHON is the interpreter of a virtual environment that has TRL besides everything that is installed here:

    python -m venv /tmp/peer
    python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$(echo /tmp/peer/lib/python3*/site-packages)/here.pth"
    /tmp/peer/bin/pip install --no-deps trl accelerate datasets multiprocess xxhash dill pandas pytz

Both run in turns, each in processes of its own: the runs' start and their first two steps do not count. Printed are seconds a step,
split into generation with reward and training, CPU seconds a step of the whole process tree, and their ratios. On a machine that others use
too only ratios of one call and CPU seconds mean anything. `--threads 1` pins both to one core, `2` to two, on which our
two ranks and the engine share what TRL has for its two threads.

How far generation can come down by another client: the floor. Our engine, with the arguments of our run, is asked for the samples of a step
by the same HTTP calls that our client makes, recorded from it, by a client that keeps them as bytes, decodes nothing, scores nothing and
has the cores to itself. What a step takes above the floor is ours; that the floor is above TRL's time is SGLang's work per request.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import psutil

if TYPE_CHECKING:
    from megatron_rl.config.settings import Settings
    from megatron_rl.engines.engine import EngineAddress

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES, RESPONSE_TOKENS = 128, 8, 4
WARM_UP_STEPS = 2
LR = 2e-4
PEER_PACKAGES = ("trl", "accelerate", "datasets")


def cpu_seconds() -> float:
    """CPU seconds so far of this process's children and theirs, dead ones that were waited for included."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def run_and_watch(command: Sequence[str], metrics: Path, *, environment: Mapping[str, str], steps: int) -> dict[str, float]:
    """Run `command`, which appends a JSON line to `metrics` after every step; medians of the steps after warming up.

    Raises RuntimeError with the end of its output when it fails.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(list(command), cwd=ROOT, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)
        first: tuple[int, float] | None = None
        last: tuple[int, float] | None = None
        seen = 0
        while process.poll() is None:
            done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if done > seen:
                seen, last = done, (done, cpu_seconds())
                if first is None and done >= WARM_UP_STEPS:
                    first = last
            time.sleep(0.02)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}:\n{output.read()[-2000:]}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][WARM_UP_STEPS:]
    assert first is not None and last is not None and last[0] > first[0], f"{steps} steps are too few to be seen apart"
    parts = {name: statistics.median(row[name] for row in rows) for name in ("time/rollout_wait", "time/train")}
    step = statistics.median(row["time/rollout_wait"] + row["time/train"] + row.get("time/sync", 0.0) for row in rows)
    return {
        "step": step,
        "generation and reward": parts["time/rollout_wait"],
        "training": parts["time/train"],
        "CPU": (last[1] - first[1]) / (last[0] - first[0]),
    }


def ours(task: Path, directory: Path, *, steps: int) -> list[str]:
    """The command of our run."""
    config, overrides = ours_settings(task, directory, steps=steps)
    return [sys.executable, "-m", "megatron_rl", "train", str(config), *overrides]


def ours_settings(task: Path, directory: Path, *, steps: int) -> tuple[Path, list[str]]:
    """Settings file and overrides of our run: the quickstart's, without evaluation and saves."""
    return ROOT / "examples" / "arithmetic" / "grpo.yaml", [
        f"run.directory={directory}",
        f"model.path={task / 'model'}",
        f"data.train={task / 'train.jsonl'}",
        f"data.prompts_per_step={PROMPTS}",
        f"data.samples_per_prompt={SAMPLES}",
        f"rollout.sampling.max_response_tokens={RESPONSE_TOKENS}",
        f"training.optimizer.lr={LR}",
        *(f"run.num_steps={steps}", "eval.sets={}", "run.save_interval=0", "training.schedule={}"),
    ]


def peer_main(task: Path, metrics: Path, *, steps: int, threads: int) -> None:
    """TRL's run, in its own environment; the same metrics as ours, one line a step."""
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(threads)
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()][: PROMPTS * steps]
    generation_s = 0.0

    def score(completions: list[str], label: list[str], **_: Any) -> list[float]:
        return [float(completion == answer) for completion, answer in zip(completions, label, strict=True)]

    class Timed(trl.GRPOTrainer):  # type: ignore[misc, name-defined, unused-ignore]
        """Measures what makes the samples, generation and reward, and the whole step."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            nonlocal generation_s
            start = time.perf_counter()
            result = super()._generate_and_score_completions(inputs)
            generation_s += time.perf_counter() - start
            return result

    class Steps(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Writes a line a step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal generation_s
            self.start, generation_s = time.perf_counter(), 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            # The samples are made inside the step, before its loss.
            training_s = time.perf_counter() - self.start - generation_s
            with metrics.open("a") as file:
                file.write(json.dumps({"time/rollout_wait": generation_s, "time/train": training_s}) + "\n")

    trainer = Timed(
        model=transformers.AutoModelForCausalLM.from_pretrained(task / "model"),
        processing_class=transformers.AutoTokenizer.from_pretrained(task / "model", padding_side="left"),
        reward_funcs=score,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[Steps()],
        args=trl.GRPOConfig(
            output_dir=str(metrics.parent / "peer"),
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=RESPONSE_TOKENS,
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            top_k=0,
            epsilon_high=0.28,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            logging_steps=steps,
            disable_tqdm=True,
        ),
    )
    trainer.train()


def floor_main(task: Path, metrics: Path, *, steps: int) -> None:
    """SGLang's server, and the barest client that makes the HTTP calls of our run; the seconds of each step in `metrics`."""
    from megatron_rl.config.load import load_settings
    from megatron_rl.engines.engine import Engine
    from megatron_rl.engines.server_args import server_arguments

    settings = load_settings(*ours_settings(task, metrics.parent / "floor", steps=steps))
    arguments = server_arguments(
        settings.rollout.sglang,
        model_path=settings.model.path,
        device_kind="cpu",
        dtype="float32",
        seed=settings.run.seed,
        max_prompt_tokens=settings.data.max_prompt_tokens,
    )
    engine = Engine(arguments, log_path=metrics.with_suffix(".log"))
    try:
        asyncio.run(_time_floor(engine.start(), settings, metrics))
    finally:
        engine.stop()


async def _time_floor(address: "EngineAddress", settings: "Settings", metrics: Path) -> None:
    import aiohttp

    recorded = await _calls_of_each_step(address, settings)
    headers = {"Authorization": f"Bearer {address.api_key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(path: str, body: bytes) -> None:
            async with session.post(address.url + path, data=body) as response:
                await response.read()
                assert response.status == 200, f"HTTP {response.status}"

        for calls in recorded:
            start = time.perf_counter()
            await asyncio.gather(*(ask(*call) for call in calls))
            row = {"time/rollout_wait": time.perf_counter() - start, "time/train": 0.0}
            with metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")


async def _calls_of_each_step(address: "EngineAddress", settings: "Settings") -> list[list[tuple[str, bytes]]]:
    """Path and body of each HTTP call that our client makes for the samples of each step, with its own way of putting them together."""
    from megatron_rl.config.derived import request_deadline_s
    from megatron_rl.data.source import PromptSource
    from megatron_rl.data.tokenizer import load_tokenizer
    from megatron_rl.engines.client import EngineClient
    from megatron_rl.engines.engine_pool import EnginePool
    from megatron_rl.rollout.generator import together
    from megatron_rl.rollout.groups import GroupMaker, single_turn

    calls: list[tuple[str, bytes]] = []
    call = EngineClient._call

    async def recorded(self: EngineClient, method: str, path: str, body: Any = None, **options: Any) -> Any:
        calls.append((path, json.dumps(body).encode()))
        return await call(self, method, path, body, **options)

    tokenizer = load_tokenizer(settings.model.path)
    source = PromptSource(settings.data.train, tokenizer, settings=settings.data, seed=settings.run.seed)
    steps = []
    with patch.object(EngineClient, "_call", recorded):
        request_s = request_deadline_s(settings.model, settings.rollout.sampling)
        async with EngineClient(address, request_timeout_s=request_s) as client:
            pool = EnginePool([client], max_requests=settings.rollout.max_concurrent_requests or 256)
            parts = {"pool": pool, "tokenizer": tokenizer, "score": None, "seed": settings.run.seed}
            maker = GroupMaker(settings.rollout, single_turn, max_tokens=settings.training.max_tokens_per_micro_batch, **parts)
            for _ in range(settings.run.num_steps):
                await together(maker.make(prompt, num_samples=SAMPLES) for prompt in source.next_prompts(PROMPTS))
                steps.append(list(calls))
                calls.clear()
    return steps


def check_peer(python: str) -> None:
    """Exit with a sentence when the peer's environment lacks something."""
    probe = f"import importlib.util as u; print(*[n for n in {(*PEER_PACKAGES, 'torch', 'transformers')!r} if u.find_spec(n) is None])"
    try:
        missing = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"grpo: the peer's interpreter {python} does not run ({error}); make its environment as the head of this file says")
    if missing:
        sys.exit(f"grpo: {python} cannot import {', '.join(missing)}; make its environment as the head of this file says")


def compare(task: Path, directory: Path, *, peer: str, steps: int, turns: int, threads: int) -> None:
    """Print the figures of all, taken in turns on `threads` cores."""
    found: dict[str, list[dict[str, float]]] = {"megatron_rl": [], "floor": [], "TRL": []}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    pinned = ["taskset", "-c", ",".join(map(str, cores))]
    this = [str(Path(__file__).resolve()), "--peer", peer, "--steps", str(steps), "--threads", str(threads)]
    for turn in range(turns):
        run = directory / f"ours-{threads}-{turn}"
        floor, other = (directory / f"{name}-{threads}-{turn}.jsonl" for name in ("floor", "peer"))
        for name, command, metrics, num_threads in (
            ("megatron_rl", ours(task, run, steps=steps), run / "metrics.jsonl", 1),
            ("floor", [sys.executable, *this, "--as-floor", str(task), str(floor)], floor, 1),
            ("TRL", [peer, *this, "--as-peer", str(task), str(other)], other, threads),
        ):
            variables = {**environment, "OMP_NUM_THREADS": str(num_threads)}
            found[name].append(run_and_watch([*pinned, *command], metrics, environment=variables, steps=steps))
    figures = {name: {key: min(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}
    print(
        f"{PROMPTS} prompts × {SAMPLES} samples of at most {RESPONSE_TOKENS} tokens, {threads} cores, seconds a step, best of {turns} runs"
    )
    for key, own_s in figures["megatron_rl"].items():
        other_s = figures["TRL"][key]
        print(f"  {key:<24}{own_s:>7.2f} megatron_rl{other_s:>7.2f} TRL{own_s / other_s:>7.2f} times as long")
    own, least_s = figures["megatron_rl"], figures["floor"]["generation and reward"]
    bound = (own["step"] - own["generation and reward"] + least_s) / figures["TRL"]["step"]
    print(
        f"  SGLang's server for the same HTTP calls of the barest client {least_s:.2f} s ({figures['floor']['CPU']:.2f} CPU s): "
        f"{own['generation and reward'] - least_s:.2f} s are ours, and a step at that floor would be {bound:.2f} times TRL's"
    )


def main() -> int:
    """Compare, or be the peer."""
    parser = argparse.ArgumentParser(description="A GRPO step against TRL's.")
    parser.add_argument("--peer", required=True, help="python of the environment that has TRL")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run, of which the first two do not count")
    parser.add_argument("--turns", type=int, default=2, help="runs of each")
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="cores to run on")
    parser.add_argument("--as-peer", nargs=2, metavar=("TASK", "METRICS"), help=argparse.SUPPRESS)
    parser.add_argument("--as-floor", nargs=2, metavar=("TASK", "METRICS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_floor:
        task, metrics = map(Path, arguments.as_floor)
        floor_main(task, metrics, steps=arguments.steps)
        return 0
    if arguments.as_peer:
        task, metrics = map(Path, arguments.as_peer)
        peer_main(task, metrics, steps=arguments.steps, threads=arguments.threads[0])
        return 0
    check_peer(arguments.peer)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_task = [sys.executable, "examples/arithmetic/make_task.py", str(directory / "task"), "--seed", "1"]
        subprocess.run(make_task, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        for threads in arguments.threads:
            compare(
                directory / "task",
                directory,
                peer=arguments.peer,
                steps=arguments.steps,
                turns=arguments.turns,
                threads=threads,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
