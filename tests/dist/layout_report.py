"""The layout matrix, and the changes of layout, as tables."""

from collections.abc import Mapping, Sequence

from layout_runs import Differences
from layout_table import CASES, Case

HEADER = ("layout", "model", "objective", "loss", "metrics", "gradient norm", "log-probs", "weights")


def markdown_table(rows: Sequence[tuple[Case, Differences]]) -> list[str]:
    """Lines of a Markdown table of `rows` in the order of the table of cases, columns aligned."""
    order = {case: index for index, case in enumerate(CASES)}
    cells = [HEADER]
    for case, found in sorted(rows, key=lambda row: order[row[0]]):
        model = case.model if case.dtype == "float32" else f"{case.model}, {case.dtype}"
        numbers = (found.loss, found.metrics, found.grad_norm, found.log_probs, found.weights)
        cells.append((case.layout, model, case.objective, *(f"{number:.0e}" for number in numbers)))
    return _aligned(cells)


def changes_table(found: Mapping[tuple[str, str, str], float]) -> list[str]:
    """Lines of one Markdown table for each model: a row for the layout that saved, a column for the one that went on."""
    lines: list[str] = []
    for model in dict.fromkeys(model for model, _, _ in found):
        pairs = {(saved, loaded): value for (name, saved, loaded), value in found.items() if name == model}
        columns = sorted({loaded for _, loaded in pairs}, key=_simplest_first)
        rows = [[saved, *_numbers(pairs, saved, columns)] for saved in sorted({saved for saved, _ in pairs}, key=_simplest_first)]
        lines += ["", *_aligned([[f"{model}: from, to", *columns], *rows])]
    return lines[1:]


def _simplest_first(layout: str) -> tuple[bool, int, str]:
    """A sort key that no order of tests changes."""
    return layout != "one", len(layout.split()), layout


def _numbers(pairs: Mapping[tuple[str, str], float], saved: str, columns: Sequence[str]) -> list[str]:
    return [f"{pairs[saved, loaded]:.0e}" if (saved, loaded) in pairs else "" for loaded in columns]


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table whose first row is the header."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
