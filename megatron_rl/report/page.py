"""The report of a run: one self-contained report.html, and curves.png, from the files of its directory.

The directory may be that of a run that goes on, has ended or was killed. Every text of a model or a
user is escaped by the template or inside a block.
"""

import base64
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError, sized
from megatron_rl.observe.groups_of_interest import labels
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics
from megatron_rl.observe.summary import REPORT_FILE, read_summary
from megatron_rl.observe.visible_text import visible
from megatron_rl.report import overview
from megatron_rl.report.curves import Steps, draw_curves, drawable
from megatron_rl.report.run_samples import Answer, RunSamples, facts, open_samples
from megatron_rl.report.sample_blocks import QUANTITIES, Spell, group_block, load_spelling, pack, quantities
from megatron_rl.system.files import write_atomic

CURVES_FILE = "curves.png"
# Those of checkpoints.run_checkpoints and evaluation.evaluator, whose imports take seconds.
SETTINGS_FILE, EVALUATION_DIRECTORY = "settings.yaml", "evaluation"
_EXTRA = ("altair", "vl_convert", "itables")

_MOST_STEPS = 40  # whose samples are looked at
_BLOCK_BYTES = 900_000
"""Of samples in a page; the scripts take 1.6 MB, curves of 200 steps 0.4 MB."""


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
    charts, left_out = _charts(), []
    settings = None
    try:
        settings = load_settings(directory / SETTINGS_FILE, on_gpus=False)
    except UserError as error:
        left_out.append(f"settings: {str(error).splitlines()[0]}")
    if charts is None:
        left_out.append("charts that answer the mouse and tables that sort: pip install 'megatron-rl[report]'")
    samples = _Samples.read(directory, settings, steps, marked=marked, left_out=left_out)
    evaluated = [row for row in overview.evaluations(directory / EVALUATION_DIRECTORY) if row[0] in steps]
    specs: dict[str, dict[str, Any]] = {"curves": {}, "distributions": {}}
    if charts is not None:
        specs = {
            "curves": charts.curve_charts(steps, evaluated),
            "distributions": charts.sample_charts(samples.answers, samples.numbers),
            "others": {"positions": charts.position_chart()},
        }
    summary, own = read_summary(directory), files("megatron_rl.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    scripts = None if charts is None else charts.scripts()
    raw = {name: Markup((own / f"page.{kind}").read_text("utf-8")) for name, kind in (("style", "css"), ("script", "js"))}
    page = environment.from_string((own / "page.html").read_text("utf-8")).render(
        title=visible(title),
        **raw,
        scripts=scripts and {name: Markup(text) for name, text in scripts._asdict().items()},
        facts=_visible(overview.run_facts(directory, summary, settings, steps)),
        go_on=visible(summary.go_on) if summary is not None else "",
        left_out=[visible(reason) for reason in left_out],
        evaluations=_visible(evaluated),
        charts={name: list(found) for name, found in specs.items()},
        picture=base64.b64encode(picture).decode(),
        quantities=QUANTITIES,
        groups=_visible(samples.rows),
        blocks=samples.blocks,
        blocks_json=_inside_script(samples.blocks),
        specs=_inside_script({name: spec for found in specs.values() for name, spec in found.items()}),
        solved=_visible(samples.solved),
        numbers=_visible(overview.metric_rows(steps)),
        changed=_visible(overview.changed_settings(settings)) if settings is not None else [],
        versions=overview.versions(),
    )
    return page


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


def _inside_script(value: Any) -> Any:
    """Return JSON that no HTML parser takes for markup."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


class _Samples:
    """The samples in a page: `blocks` and `rows` of groups, `answers` of the steps, and `numbers` of tokens by quantity and step."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.rows: list[tuple[Any, ...]] = []
        self.answers: list[Answer] = []
        self.solved: list[tuple[Any, ...]] = []
        self.numbers: dict[str, dict[int, list[float]]] = {}

    @classmethod
    def read(
        cls, directory: Path, settings: Settings | None, steps: Collection[int], *, marked: Sequence[str], left_out: list[str]
    ) -> "_Samples":
        """Read the groups of interest of up to _MOST_STEPS of `steps`; append what is not shown, and why, to `left_out`."""
        made = cls()
        spell = load_spelling([directory / "huggingface", *([settings.model.path] if settings is not None else [])])
        if spell is None:
            left_out.append("tokens of samples: no tokenizer.json in the model's directory")
        try:
            with open_samples(directory) as run:
                present = [step for step in run.steps() if step in steps]
                chosen = spread(present, _MOST_STEPS)
                if len(chosen) < len(present):
                    left_out.append(f"samples of {len(present) - len(chosen)} of {len(present)} steps; --steps A-B shows others")
                made._add(run, chosen, spell, marked=marked, left_out=left_out)
        except UserError as error:
            if marked:
                raise
            left_out.append(f"samples: {error}")
        return made

    def _add(self, run: RunSamples, steps: Sequence[int], spell: Spell | None, *, marked: Sequence[str], left_out: list[str]) -> None:
        self.answers, num_failures, sources = run.answers(steps), run.num_failures(), run.sources()
        self.solved = overview.solved_by_source(self.answers, sources)
        by_step: dict[int, list[Answer]] = {}
        for answer in self.answers:
            by_step.setdefault(answer.step, []).append(answer)
        wanted = {name: ["marked"] for name in marked}
        for step in spread_order(steps):
            found = labels(facts(by_step[step], num_failures))
            if step == steps[-1]:
                found.setdefault(by_step[step][-1].group, []).append("newest")
            wanted |= {name: [*wanted.get(name, []), *names] for name, names in found.items()}
        self._pack(run, wanted, spell, sources=sources, left_out=left_out)

    def _pack(
        self, run: RunSamples, wanted: Mapping[str, list[str]], spell: Spell | None, *, sources: Mapping[str, str], left_out: list[str]
    ) -> None:
        shown, used = [], 0
        for name, group_labels in wanted.items():
            group = run.group(name)
            block = pack(group_block(group, group_labels, spell))
            if used + len(block) > _BLOCK_BYTES and "marked" not in group_labels:
                left_out.append(
                    f"{len(wanted) - len(shown)} of {len(wanted)} groups of interest: the page has {sized(_BLOCK_BYTES)} for samples; "
                    "--steps A-B and --group ID choose others"
                )
                break
            used += len(block)
            shown.append((group, group_labels, block))
            for sample in group.samples:
                if sample.values is not None:
                    for quantity, values in quantities(sample, step=group.step).items():
                        of_step = self.numbers.setdefault(QUANTITIES[quantity][0], {}).setdefault(group.step, [])
                        of_step += values[np.isfinite(values)].tolist()
        for group, group_labels, block in sorted(shown, key=lambda each: -each[0].step):
            self.blocks.append(block)
            mine = [
                Answer(group.step, group.id, sample.trajectory, sample.index, sample.reward, sample.stop, sample.num_tokens)
                for sample in group.samples
            ]
            rewards = [answer.reward for answer in mine if answer.reward is not None]
            (numbers,) = facts(mine, {group.id: len(group.failures)}) if mine else (None,)
            self.rows.append((
                group.step, ", ".join(group_labels), group.id, sources.get(group.id, ""), group.prompt[:80],
                "" if numbers is None or numbers.reward is None else f"{numbers.reward:.3f}",
                *(f"{pick(rewards):.3g}" if rewards else "" for pick in (min, max)),
                *((numbers.longest, numbers.truncated, numbers.failed) if numbers is not None else ("", "", len(group.failures))),
                group.rejection or "yes",
            ))  # fmt: skip


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Return up to `most` of `steps`, rising, evenly spread with the first and the last."""
    return [steps[index] for index in sorted({round(place) for place in np.linspace(0, len(steps) - 1, min(most, len(steps)))})]


def spread_order(steps: Sequence[int]) -> Iterator[int]:
    """Yield every step: the last, the first, the middle ones, and so on, so that a cut leaves an even spread."""
    waiting, seen = [(0, len(steps) - 1)], set()
    for end in (len(steps) - 1, 0) if steps else ():
        if end not in seen:
            seen.add(end)
            yield steps[end]
    for low, high in waiting:
        middle = (low + high) // 2
        if middle not in seen:
            seen.add(middle)
            yield steps[middle]
        if high - low > 1:
            waiting += [(middle, high), (low, middle)]
