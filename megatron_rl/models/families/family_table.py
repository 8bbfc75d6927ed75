"""Proved features of each family, as printed by `megatron-rl models`."""

from collections.abc import Iterator

from megatron_rl.models.attention.rotary import REFUSED_KINDS
from megatron_rl.models.families import FAMILIES, REFUSED
from megatron_rl.models.families.family import Family

_LAYOUTS = ("tp", "pp", "cp", "ep")
_COLUMNS = ("architecture", "load", "sync", "export", "quantised source", *_LAYOUTS, "equals transformers")


def table() -> list[str]:
    """Return the families as lines of a Markdown table, of equal width."""
    rows = [_COLUMNS, *(_row(family) for family in FAMILIES.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [lines[0], _line("-" * width for width in widths), *lines[1:]]


def not_synced() -> list[str]:
    """Return a line, with the reason, for each family that tests send to no real engine."""
    return [f"{name}: {family.not_synced}" for name, family in FAMILIES.items() if family.not_synced is not None]


def refused() -> list[str]:
    """Return one line for each untrainable architecture and rope type, with the reason."""
    kinds = (f"rope type {kind}: {reason}" for kind, reason in REFUSED_KINDS.items())
    return [*(f"{architecture}: {reason}" for architecture, reason in REFUSED.items()), *kinds]


def _line(cells: Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(family: Family) -> tuple[str, ...]:
    """Return the row of a family. Loading, export and equality are tested for every family."""

    def proved(name: str) -> str:
        return "yes" if name in family.proved else "no"

    layouts = (proved(size) if size != "ep" or family.router is not None else "-" for size in _LAYOUTS)
    return (family.architecture, "yes", proved("sync"), "yes", proved("quantised source"), *layouts, "yes")
