"""The report of a run: one self-contained report.html, and curves.png, from the files of its directory.

The directory may be that of a run that goes on, has ended or was killed. Every text of a model or a
user is escaped by the template or inside a block.
"""

import base64
import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from megatron_rl.config.derived import one_reward
from megatron_rl.config.load import load_settings
from megatron_rl.config.section import Section
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import by_path, format_value
from megatron_rl.errors import UserError, sized
from megatron_rl.observe.advice import advise
from megatron_rl.observe.groups_of_interest import Answer, GroupFacts, ends, facts, labels
from megatron_rl.observe.metrics import find_info, is_beyond_healthy
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics, read_times
from megatron_rl.observe.spans import read_spans
from megatron_rl.observe.summary import REPORT_FILE, SETTINGS_FILE, SUMMARY_FILE, Summary, read_summary
from megatron_rl.observe.visible_text import visible
from megatron_rl.report.curves import Steps, draw_curves, drawable
from megatron_rl.report.run_samples import RunSamples, StoredGroup, open_samples
from megatron_rl.report.sample_blocks import QUANTITIES, Spell, group_block, load_spelling, pack, quantities
from megatron_rl.system.files import write_atomic
from megatron_rl.system.versions import installed_version

_PACKAGES = ("megatron-rl", "megatron-core", "sglang", "torch", "transformers", "ray", "transformer-engine")
CURVES_FILE = "curves.png"
EVALUATION_DIRECTORY = "evaluation"  # that of evaluation.evaluator, whose import takes seconds
_NO_CHARTS: dict[str, dict[str, Any]] = {"curves": {}, "distributions": {}}
_EXTRA = ("altair", "vl_convert", "itables")

_MOST_STEPS = 40  # whose samples are looked at
_BLOCK_BYTES = 900_000
"""Of samples in a page; the scripts take 1.6 MB, curves of 200 steps 0.4 MB."""


Row = tuple[Any, ...]
"""Cells of a table."""


def report_run(directory: Path, *, between: tuple[int, int] | None = None, out: Path | None = None, marked: Sequence[str] = ()) -> Path:
    """Write the page of the run in `directory` to `out`, by default with the picture into the directory; return its path.

    `between` are the first and the last step to show; groups `marked` by id are shown in any case.
    Raises UserError for a run without metrics, for a group that is not there and for a full disk.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory; give the run.directory of a run")
    path = directory / METRICS_FILE
    if not path.exists():
        raise UserError(f"{path} does not exist, so there is nothing to report; give the run.directory of a run")
    steps = {step: row for step, row in read_metrics(path).items() if between is None or between[0] <= step <= between[1]}
    if not drawable(steps):
        where = "" if between is None else f" between steps {between[0]} and {between[1]}"
        raise UserError(f"{path} holds no metrics to draw{where}, so there is nothing to report; run at least one step")
    # A name may hold bytes that are no text.
    title = f"Run {os.fsencode(directory.name).decode(errors='replace')}"
    picture = draw_curves(steps, title=title)
    if out is None:
        write_atomic(directory / CURVES_FILE, picture)
    out = out or directory / REPORT_FILE
    write_atomic(out, _page(directory, steps, picture, title=title, marked=marked))
    return out


def _page(directory: Path, steps: Steps, picture: bytes, *, title: str, marked: Sequence[str]) -> str:
    charts, settings, left_out = _charts(), None, list[str]()
    try:
        settings = load_settings(directory / SETTINGS_FILE, on_gpus=False)
    except UserError as error:
        left_out.append(f"settings: {str(error).splitlines()[0]}")
    if charts is None:
        left_out.append("charts that answer the mouse and tables that sort: pip install 'megatron-rl[report]'")
    samples = _Samples()
    try:
        with open_samples(directory) as run:
            spell = load_spelling([directory / "huggingface", *([] if settings is None else [settings.model.path])])
            left_out += samples.read(run, steps, spell, marked=marked)
    except UserError as error:
        if marked:
            raise
        left_out.append(f"samples: {error}")
    evaluated = [row for row in evaluations(directory / EVALUATION_DIRECTORY) if row[0] in steps]
    specs = _NO_CHARTS
    if charts is not None:
        seconds = charts.step_seconds(steps, read_times(directory / METRICS_FILE), read_spans(directory))
        specs = charts.all_charts(steps, evaluated, samples.answers, samples.numbers, seconds)
    summary, own = read_summary(directory), files("megatron_rl.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string((own / "page.html").read_text("utf-8")).render(
        title=visible(title),
        style=(own / "page.css").read_text("utf-8"),
        script=(own / "page.js").read_text("utf-8"),
        scripts=None if charts is None else charts.scripts(),
        facts=_visible(run_facts(directory, summary, settings, steps)),
        advice=[
            visible(sentence)
            for sentence in advise(steps, one_reward="teaches nothing" if settings is None else one_reward(settings.objective))
        ],
        go_on=visible(summary.go_on) if summary is not None else "",
        left_out=[visible(reason) for reason in left_out],
        evaluations=_visible(evaluated),
        charts=specs,
        picture=base64.b64encode(picture).decode(),
        quantities=QUANTITIES,
        groups=_visible(samples.rows),
        blocks=samples.blocks,
        solved=_visible(samples.solved),
        numbers=_visible(metric_rows(steps)),
        changed=_visible(changed_settings(settings)) if settings is not None else [],
        versions=[(name, installed_version(name) or "not installed") for name in _PACKAGES],
    )


def _charts() -> ModuleType | None:
    """Return the module of charts, None without the packages of the extra `report`."""
    try:
        from megatron_rl.report import charts
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        return None
    return charts


def _visible(rows: Any) -> list[tuple[str, ...]]:
    return [tuple(visible(str(cell)) for cell in row) for row in rows]


class _Samples:
    """The samples in a page: `blocks` and `rows` of groups, `answers` of the steps, and `numbers` of tokens by quantity and step."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.rows: list[Row] = []
        self.answers: list[Answer] = []
        self.solved: list[Row] = []
        self.numbers: dict[str, dict[int, list[NDArray[np.float64]]]] = {}

    def read(self, run: RunSamples, steps: Collection[int], spell: Spell | None, *, marked: Sequence[str]) -> Iterator[str]:
        """Read the groups of interest of some of `steps`; yield what is left out, and why."""
        if spell is None:
            yield "tokens of samples: no tokenizer.json in the model's directory"
        present = [step for step in run.steps() if step in steps]
        chosen = spread(present, _MOST_STEPS)
        if len(chosen) < len(present):
            yield f"samples of {len(present) - len(chosen)} of {len(present)} steps; --steps A-B shows others"
        extra = {run.group(name).row["consumed_step"] for name in marked}
        self.answers, sources = run.answers({*chosen, *extra}), run.sources()
        self.solved = solved_by_source(self.answers, sources)
        known = {step: facts([one for one in self.answers if one.step == step], run.num_failures(step)) for step in {*chosen, *extra}}
        wanted = {name: ["marked"] for name in marked}
        for step in spread_order(chosen):
            found = labels(known[step])
            if step == chosen[-1]:
                found.setdefault(known[step][-1].id, []).append("newest")
            wanted |= {name: [*wanted.get(name, []), *words] for name, words in found.items()}
        by_name = {one.id: one for groups in known.values() for one in groups}
        used, shown = 0, list[tuple[int, str, Row]]()
        for name, words in wanted.items():
            group = run.group(name)
            block = pack(group_block(group, words, spell))
            used += len(block)
            if used > _BLOCK_BYTES and "marked" not in words:
                how = "--steps A-B and --group ID choose others"
                yield f"{len(wanted) - len(shown)} of {len(wanted)} groups: the page has {sized(_BLOCK_BYTES)} for samples; {how}"
                break
            shown.append((group.row["consumed_step"], block, _group_row(group, words, by_name[name], sources.get(name, ""))))
            self._count(group)
        shown.sort(key=lambda one: -one[0])
        self.blocks, self.rows = [block for _, block, _ in shown], [row for *_, row in shown]

    def _count(self, group: StoredGroup) -> None:
        step = group.row["consumed_step"]
        for sample in group.samples:
            if sample["token_values"] is not None:
                for name, values in quantities(sample, step=step).items():
                    self.numbers.setdefault(QUANTITIES[name][0], {}).setdefault(step, []).append(values[np.isfinite(values)])


def _group_row(group: StoredGroup, words: Sequence[str], found: GroupFacts, source: str) -> Row:
    """Return the cells of a group in the table of samples."""
    row, rewards = group.row, found.rewards
    numbers = [f"{pick(rewards):.4g}" if rewards else "" for pick in (np.mean, min, max)]
    names = (row["consumed_step"], ", ".join(words), row["id"], source, row["prompt_text"][:80])
    return *names, *numbers, found.longest, found.truncated, found.failed, row["rejection"] or "yes"


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Return up to `most` of `steps`, rising, evenly spread with the first and the last."""
    return [steps[index] for index in sorted({round(place) for place in np.linspace(0, len(steps) - 1, min(most, len(steps)))})]


def spread_order(steps: Sequence[int]) -> list[int]:
    """Return every step, the last, the first and the middle ones in front, so that a cut leaves an even spread."""
    places = [place for size in range(1, len(steps).bit_length() + 1) for place in np.linspace(0, len(steps) - 1, 2**size + 1).astype(int)]
    return [steps[-1 - place] for place in dict.fromkeys([0, len(steps) - 1, *places])] if steps else []


# Facts of a run from its directory, as rows of tables


def run_facts(directory: Path, summary: Summary | None, settings: Settings | None, steps: Steps) -> Iterator[tuple[str, str]]:
    """Yield status, model, layout and data of a run, without absent measurements."""
    path = directory / METRICS_FILE
    written_s = max(read_times(path).values(), default=path.stat().st_mtime)
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
    """Return one row per metric with the first and the last value, those beyond what is healthy first."""
    rows: list[Row] = []
    for name in sorted({name for metrics in steps.values() for name in metrics}):
        values = [metrics[name] for metrics in steps.values() if name in metrics]
        info = find_info(name)
        described = (info.unit, info.meaning, info.healthy) if info is not None else ("", "not in the table of metrics", "")
        mark = " \N{WARNING SIGN}" if is_beyond_healthy(name, values[-1]) else ""
        rows.append((name, _shown(values[0]), f"{_shown(values[-1])}{mark}", *described))
    return sorted(rows, key=lambda row: "\N{WARNING SIGN}" not in row[2])


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
