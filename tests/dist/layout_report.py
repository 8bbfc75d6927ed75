"""The layout matrix as a table."""

from collections.abc import Sequence

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
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
