"""Facts of a run from its directory, as rows of tables."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.section import Section
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import by_path, format_value
from megatron_rl.observe.groups_of_interest import Answer, ends
from megatron_rl.observe.metrics import find_info, is_beyond_healthy
from megatron_rl.observe.sinks import METRICS_FILE
from megatron_rl.observe.summary import SUMMARY_FILE, Summary
from megatron_rl.report.curves import Steps

Row = tuple[Any, ...]


def run_facts(directory: Path, summary: Summary | None, settings: Settings | None, steps: Steps) -> Iterator[tuple[str, str]]:
    """Yield status, model, layout and data of a run, without absent measurements."""
    written_s = (directory / METRICS_FILE).stat().st_mtime
    status = f"no {SUMMARY_FILE}: the run goes on, or was killed" if summary is None else summary.status
    yield "status", f"{status}; the last row of metrics is of {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(written_s))}"
    yield "steps", str(max(steps, default=0)) + ("" if settings is None else f" of {settings.run.num_steps}")
    if summary is not None:
        yield "peak memory", f"{summary.peak_memory_bytes / 2**30:.2f} GiB"
        yield "seconds", ", ".join(f"{name} {seconds:.0f}" for name, seconds in summary.seconds.items())
        if summary.checkpoint is not None:
            yield "checkpoint", summary.checkpoint
        for name, before in summary.evaluation_before.items():
            set_name, _, kind = name.rpartition("/")
            if kind == "accuracy" or (kind == "reward" and f"{set_name}/accuracy" not in summary.evaluation_before):
                yield f"held-out {name}", f"{before:.3f} → {summary.evaluation_after.get(name, before):.3f}"
    if settings is not None:
        topology, rollout = settings.training.topology, settings.rollout
        layout = ", ".join(f"{name} {value}" for name, value in topology.model_dump().items() if isinstance(value, int))
        yield "model", str(settings.model.path)
        yield "layout", f"{layout}; engines {rollout.num_engines}; staleness at most {rollout.max_staleness}"
        yield (
            "data",
            f"{settings.data.train}, {settings.data.prompts_per_step} prompts a step with {settings.data.samples_per_prompt} samples",
        )
        yield "seed", str(settings.run.seed)


def changed_settings(section: Section) -> list[Row]:
    """Return the settings of a section, or of all, with other values than their defaults."""
    return [(name, format_value(value)) for name, value in by_path(section.model_dump(mode="json", exclude_defaults=True)).items()]


def evaluations(directory: Path) -> list[Row]:
    """Return the estimates of every evaluation kept in `directory`: step, set, name, value, low and high end of the interval, number."""
    rows = []
    for path in sorted(directory.glob("step-*/*.json"), reverse=True):
        try:
            estimates = json.loads(path.read_text("utf-8"))["estimates"]
            step = int(path.parent.name.removeprefix("step-"))
            for name, each in estimates.items():
                of = f"{each['num']} {each['unit']}"
                rows.append((step, path.stem, name, *(float(f"{each[key]:.4g}") for key in ("value", "low", "high")), of))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # written at this moment, or by another program
    return rows


def solved_by_source(answers: Sequence[Answer], sources: Mapping[str, str]) -> list[Row]:
    """Return for each source its prompts, those always and never solved, and the mean reward.

    A prompt is solved by an answer with the highest reward of all `answers`. Without two different
    rewards nothing is known.
    """
    scored = [end for end in ends(answers) if end.reward is not None]
    best = max((end.reward for end in scored if end.reward is not None), default=0.0)
    if len({end.reward for end in scored}) < 2:
        return []
    prompts: dict[tuple[str, str], list[float]] = {}
    for end in scored:
        # The id of a prompt has the epoch first.
        row = end.group.partition("-")[2] or end.group
        prompts.setdefault((sources.get(end.group, "all"), row), []).append(end.reward or 0.0)
    rows = []
    for source in sorted({name for name, _ in prompts}):
        mine = [rewards for (name, _), rewards in prompts.items() if name == source]
        always, never = sum(min(rewards) == best for rewards in mine), sum(max(rewards) < best for rewards in mine)
        total = sum(map(sum, mine)) / sum(map(len, mine))
        rows.append((source, len(mine), always, never, f"{total:.4g}"))
    return rows


def metric_rows(steps: Steps) -> list[Row]:
    """Return one row per metric with the first and the last value."""
    rows: list[Row] = []
    for name in sorted({name for metrics in steps.values() for name in metrics}):
        values = [metrics[name] for metrics in steps.values() if name in metrics]
        info = find_info(name)
        described = (info.unit, info.meaning, info.healthy) if info is not None else ("", "not in the table of metrics", "")
        mark = " \N{WARNING SIGN}" if is_beyond_healthy(name, values[-1]) else ""
        rows.append((name, _shown(values[0]), f"{_shown(values[-1])}{mark}", *described))
    return rows


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
