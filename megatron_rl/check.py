"""One promise with its state: a line of `doctor`, `check-plugin` or `verify-checkpoint`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "skipped", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """A promise, its state, the observation, and the command or advice that mends a failure.

    `note`: the promise holds, but differs from the tested state or may be slow. `skipped`: the
    promise could not be checked.
    """

    promise: str
    level: Level = "ok"
    text: str = ""
    fix: str = ""

    def __str__(self) -> str:
        label = "BROKEN" if self.level == "broken" else self.level
        return f"{label:<8}{self.promise}{f': {self.text}' if self.text else ''}"


def report(checks: Iterable[Check]) -> bool:
    """Print checks as they arrive, then every fix; return True when none is broken."""
    seen: list[Check] = []
    for check in checks:
        seen.append(check)
        print(check, flush=True)
    for title, level in (("To mend what is broken:", "broken"), ("To come closer to what was tested:", "note")):
        fixes = [f"  {check.promise}: {check.fix}" for check in seen if check.level == level and check.fix]
        if fixes:
            print("\n".join(["", title, *fixes]))
    num_broken = sum(check.level == "broken" for check in seen)
    print(f"\n{num_broken} of {len(seen)} checks found something broken" if num_broken else f"\nAll {len(seen)} checks passed")
    return not num_broken
