"""A training run: what the loop calls by name, with its clock, its console and its metrics."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.config.settings import Settings
from megatron_rl.files import write_atomic
from megatron_rl.observe.console import PhaseProgress, RunConsole
from megatron_rl.observe.memory import PeakMemory
from megatron_rl.observe.metrics import Max, Mean, Metric, merge_metrics, metric_values
from megatron_rl.observe.report import write_report
from megatron_rl.observe.sinks import Sinks
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.runtime.checkpoint import RunState, checkpoint_paths, newest_checkpoint, oldest_step, save_checkpoint
from megatron_rl.runtime.samples import SampleSource
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.turns import Turn, Turns
from megatron_rl.types import TrainBatch

SETTINGS_FILE = "settings.yaml"
SUMMARY_FILE = "summary.json"
POLICY_LINK = "huggingface"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a run, as summary.json holds it. Accuracies are of held-out prompts, None without data.eval; `seconds` per phase.

    `checkpoint` is the Hugging Face directory of the final policy.
    """

    steps: int
    seed: int
    accuracy_before: float | None
    accuracy_after: float | None
    accuracy_sampled_before: float | None
    accuracy_sampled_after: float | None
    seconds: dict[str, float]
    peak_memory_bytes: int
    checkpoint: str


class TrainingRun:
    """The methods that `train_loop` calls."""

    def __init__(
        self,
        settings: Settings,
        *,
        samples: SampleSource,
        trainers: TrainerGroup,
        turns: Turns,
        console: RunConsole,
        sinks: Sinks,
        memory: PeakMemory,
        timer: PhaseTimer,
    ) -> None:
        self._settings, self._samples, self._trainers, self._turns = settings, samples, trainers, turns
        self._console, self._sinks, self._memory, self._timer = console, sinks, memory, timer
        self._metrics: list[dict[str, Metric]] = []
        self._first_evaluation: dict[str, float] = {}
        self._last_evaluation: dict[str, float] = {}
        self._busy_logged_s = 0.0

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return self._settings.run.directory

    @property
    def num_steps(self) -> int:
        """Rollout batches in all."""
        return self._settings.run.num_steps

    @contextmanager
    def _phase(self, name: str, *, clock: str | None = None, total: int | None = None, unit: str = "") -> Iterator[PhaseProgress]:
        """Show the phase `name` and measure it, as `clock` where that differs."""
        with self._timer.measure(clock or name), self._console.phase(name, total=total, unit=unit) as progress:
            yield progress

    def _turn(self, turn: Turn) -> None:
        """Have what is needed on the devices, where ranks and engines share them."""
        if self._turns.changes(turn):
            with self._phase("swap"):
                self._turns.take(turn)

    def resume(self) -> int:
        """Load the newest checkpoint and return the number of steps done, 0 when there is none."""
        found = newest_checkpoint(self.directory)
        if found is None:
            self._samples.rewind(step=0, state=None)
            return 0
        path, state = found
        self._turn(Turn.TRAINING)
        with self._phase("load"):
            self._trainers.load(path / "megatron")
            self._samples.rewind(step=state.step, state=state.source)
        self._first_evaluation = state.first_evaluation
        self._console.say(f"resumed from {path} after {state.step} steps")
        return state.step

    def next_batch(self, step: int) -> TrainBatch:
        """The sequences of this step."""
        self._turn(Turn.GENERATION)
        with self._phase("rollout", clock="rollout_wait", total=self._settings.data.prompts_per_step, unit="groups") as progress:
            batch, metrics = self._samples.next_batch(step, progress=progress)
        self._metrics.append(metrics)
        return batch

    def train(self, batch: TrainBatch, *, step: int) -> None:
        """Optimizer steps on one batch."""
        self._turn(Turn.TRAINING)
        start_s, busy_before_s = time.perf_counter(), self._samples.busy_s
        with self._phase("train"):
            results = self._trainers.train(batch, step=step)
        self._metrics += results
        if self._samples.generates:
            overlap_s, train_s = self._samples.busy_s - busy_before_s, time.perf_counter() - start_s
            self._metrics.append({"rollout/overlap_fraction": Mean(min(overlap_s, train_s), train_s)})

    def begin(self, *, step: int) -> None:
        """Before the first step, engines get the trainer's weights, must agree with the trainer about them, and are evaluated."""
        if self._samples.generates:
            self.publish(version=step)
            self._check_parity()
            self.evaluate(step=step)
            self.log(step=step)

    def publish(self, *, version: int) -> None:
        """Sync the engines' weights."""
        if not self._samples.generates:
            return
        self._turn(Turn.SYNC)
        with self._phase("sync"):
            self._metrics.append(self._samples.publish(version=version))

    def _check_parity(self) -> None:
        self._turn(Turn.GENERATION)
        with self._phase("parity probe"):
            scored = self._samples.score_probe()
        self._turn(Turn.SYNC)
        with self._phase("parity probe"):
            metrics = self._samples.check_parity(scored)
        values = metric_values(metrics)
        free = values.get("weights/parity_mean_without_replay")
        note = "" if free is None else f", {free:.1e} without routing replay"
        self._console.say(f"parity of engine and trainer: mean |Δ log-prob| {values['weights/parity_mean']:.1e} nats{note}")
        self._metrics.append(metrics)

    def evaluates_after(self, step: int) -> bool:
        """True for every eval_interval-th step and the last."""
        return self._due(self._settings.run.eval_interval, step) or (step + 1 == self.num_steps and self._settings.run.eval_interval > 0)

    def saves_after(self, step: int) -> bool:
        """True for every save_interval-th step and the last."""
        return self._due(self._settings.run.save_interval, step) or step + 1 == self.num_steps

    @staticmethod
    def _due(interval: int, step: int) -> bool:
        return interval > 0 and (step + 1) % interval == 0

    def evaluate(self, *, step: int) -> None:
        """Evaluate the weights that `step` steps have made."""
        if not self._samples.num_eval_prompts or not self._settings.run.eval_interval:
            return
        self._turn(Turn.GENERATION)
        with self._phase("eval", total=2 * self._samples.num_eval_prompts, unit="prompts") as progress:
            metrics = self._samples.evaluate(progress=progress)
        self._last_evaluation = metric_values(metrics)
        self._first_evaluation = self._first_evaluation or self._last_evaluation
        self._metrics.append(metrics)

    def save(self, *, step: int) -> None:
        """Write a checkpoint that `--resume` continues from, with the policy as a Hugging Face directory."""
        self._turn(Turn.TRAINING)
        with self._phase("save"):
            state = RunState(step=step, source=self._samples.state(), first_evaluation=self._first_evaluation)
            path = save_checkpoint(self.directory, state=state, trainers=self._trainers, keep=self._settings.run.keep_checkpoints)
            self._samples.forget(before_step=oldest_step(self.directory))
            _link(self.directory / POLICY_LINK, path / "hf")

    def log(self, *, step: int) -> None:
        """Write and show everything measured since the last call, as that of the first `step` steps."""
        self._metrics.append({"memory/peak_bytes": Max(self._memory.peak_bytes)})
        if self._samples.generates:
            busy_s = self._samples.busy_s
            self._timer.add("rollout", busy_s - self._busy_logged_s)
            self._busy_logged_s = busy_s
        metrics = merge_metrics([*self._metrics, self._timer.take()])
        tokens, seconds = metrics.get("train/num_tokens"), metrics.get("time/train")
        if tokens is not None and seconds is not None:
            metrics["train/tokens_per_second"] = Mean(tokens.value, seconds.value)
        values = metric_values(metrics)
        self._metrics = []
        self._sinks.log(step, values)
        self._console.row(step, values)

    def finish(self, *, resume_command: str) -> Summary:
        """Write the curves, the page and last of all the summary."""
        summary = Summary(
            steps=self.num_steps,
            seed=self._settings.run.seed,
            accuracy_before=self._first_evaluation.get("eval/accuracy_greedy"),
            accuracy_after=self._last_evaluation.get("eval/accuracy_greedy"),
            accuracy_sampled_before=self._first_evaluation.get("eval/accuracy_sampled"),
            accuracy_sampled_after=self._last_evaluation.get("eval/accuracy_sampled"),
            seconds={name: round(value, 2) for name, value in self._timer.totals().items()},
            peak_memory_bytes=self._memory.peak_bytes,
            checkpoint=str((checkpoint_paths(self.directory)[-1] / "hf").resolve()),
        )
        with self._console.phase("report"):
            write_report(self.directory, title=f"Run {self.directory.name}", facts=_facts(summary), commands=[resume_command])
        write_atomic(self.directory / SUMMARY_FILE, json.dumps(asdict(summary), indent=2) + "\n")
        return summary


def _facts(summary: Summary) -> dict[str, str]:
    """The summary as rows of a table; what was not measured is left out."""
    facts = {
        "steps": str(summary.steps),
        "seed": str(summary.seed),
        "peak memory": f"{summary.peak_memory_bytes / 2**30:.2f} GiB",
        "checkpoint": summary.checkpoint,
        "seconds": ", ".join(f"{name} {seconds:.0f}" for name, seconds in summary.seconds.items()),
    }
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        facts["held-out accuracy, greedy"] = f"{summary.accuracy_before:.3f} → {summary.accuracy_after:.3f}"
    if summary.accuracy_sampled_before is not None and summary.accuracy_sampled_after is not None:
        facts["held-out accuracy, sampled"] = f"{summary.accuracy_sampled_before:.3f} → {summary.accuracy_sampled_after:.3f}"
    return facts


def _link(link: Path, target: Path) -> None:
    """Point `link` at `target`, which lies below the same directory, replacing an older link in one step."""
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target.relative_to(link.parent), target_is_directory=True)
    os.replace(partial, link)
