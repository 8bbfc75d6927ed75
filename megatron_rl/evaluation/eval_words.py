"""The words of `megatron-rl eval` as settings, and the print of its results."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.checkpoints.run_checkpoints import POLICY_LINK
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import format_value
from megatron_rl.errors import UserError
from megatron_rl.evaluation.evaluator import EVALUATION_DIRECTORY, SetResult

_SETTINGS_FILES = (".yaml", ".yml")
GENERATED = ("rollout.max_staleness=0", "rollout.order={kind: in_order}", "weights={}")
"""Settings of later steps, which generation alone does not read. Those of objective and training choose and bound samples."""
UNTRAINED = (
    *("data.train=unused", "data.source=null", "data.args={}", "data.samples_per_prompt=8", *GENERATED, "run={directory: unused}"),
    *("objective={}", "training={}", "model.teacher=null", "runtime.colocate=false", "rollout.sampling.entropy=null"),
)
"""Those that an evaluation does not read."""


def split_models(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the models, which are words without `=` and no settings file, and the others. Raises UserError."""
    models, others, is_value = list[str](), list[str](), False
    for word in words:
        (others if is_value or word.startswith("--") or "=" in word or word.endswith(_SETTINGS_FILES) else models).append(word)
        is_value = word.startswith("--") and "=" not in word
    if len(set(models)) < len(models):
        raise UserError(f"a model is given twice in {' '.join(models)}, needs each once")
    if any(word.removeprefix("--").startswith("run.") for word in others):
        raise UserError("a setting of the section run was given, but an evaluation is no run; name its directory by --out")
    return models, others


def data_words(data: Path | None) -> list[str]:
    """Return the words of a set of the file `data`, which is named after it."""
    if data is None:
        return []
    name = re.sub(r"[^A-Za-z0-9_-]", "_", data.stem).lstrip("_-") or "held_out"
    return [f"eval.sets={{{name}: {{data: {format_value(str(data))}}}}}"]


def policy_in(path: Path) -> Path:
    """Return the Hugging Face directory of a run, of a checkpoint of a run, or `path` itself."""
    inside = (path / name for name in (POLICY_LINK, "hf") if not (path / "config.json").exists())
    return next((each for each in inside if each.is_dir()), path)


def with_options(settings: Settings, *, samples: int | None, out: Path | None) -> Settings:
    """Return the settings with `samples` for every set, and results in `out`, or beside the model. Raises UserError without a set."""
    sets, path = settings.eval.sets, settings.model.path
    if not sets:
        raise UserError("there is nothing to evaluate on; give a file of held-out rows by --data FILE, or eval.sets.NAME=FILE")
    if samples is not None:
        sets = {name: each.model_copy(update={"samples": samples}) for name, each in sets.items()}
    directory = out or path.with_name(f"{path.name}-{EVALUATION_DIRECTORY}")
    evaluation, run = (
        settings.eval.model_copy(update={"sets": sets}),
        settings.run.model_copy(update={"directory": directory}),
    )
    return settings.model_copy(update={"eval": evaluation, "run": run})


def print_results(results: Mapping[str, Sequence[SetResult]]) -> None:
    """Print the estimates of each set with intervals, or of several models a table of values, and the files."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for of_set in zip(*results.values(), strict=True):
        first, num_models = of_set[0], len(of_set)
        table = Table(first.name, *(results if num_models > 1 else ["value [95 % interval over prompts] of denominator"]))
        for key in dict.fromkeys(key for result in of_set for key in result.estimates):
            found = [result.estimates.get(key) for result in of_set]
            table.add_row(key, *("" if one is None else f"{one.value:.4f}" if num_models > 1 else str(one) for one in found))
        console.print(table)
        for result in of_set:
            console.print(f"{result.path}{result.failed}")
