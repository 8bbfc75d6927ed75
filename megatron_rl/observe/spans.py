"""Spans of the work of driver, ranks and engines, one JSON line each in spans.jsonl, for `megatron-rl trace`."""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from megatron_rl.system.files import disk_errors

SPANS_FILE, EARLIER_FILE = "spans.jsonl", "spans.1.jsonl"
MOST_SPANS = 10_000
"""Spans of a source that wait to be written; older ones are dropped, as of a step with more requests."""
MOST_BYTES = 2**25
"""Size at which spans.jsonl becomes spans.1.jsonl, in place of an earlier one."""


@dataclass(frozen=True, slots=True)
class Span:
    """Work `name` of the process or queue `who`, of `count` samples where known; times in seconds since 1970."""

    who: str
    name: str
    begin: float
    end: float
    count: int | None = None


class Spans:
    """Spans that have ended and are not written. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._ended: deque[Span] = deque(maxlen=MOST_SPANS)

    def add(self, who: str, name: str, *, seconds: float, count: int | None = None) -> None:
        """Add work that ends now and has taken `seconds`."""
        now_s = time.time()
        self._ended.append(Span(who, name, now_s - seconds, now_s, count))

    @contextmanager
    def measure(self, name: str, *, who: str = "", count: int | None = None) -> Iterator[None]:
        """Add the body, also when it raises."""
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(who, name, seconds=time.perf_counter() - begun_s, count=count)

    def extend(self, spans: Iterable[Span], *, who: str) -> None:
        """Add the spans of another process under the name `who`."""
        self._ended.extend(replace(span, who=who) for span in spans)

    def take(self) -> list[Span]:
        """Return the spans since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]


def write_spans(directory: Path, spans: Iterable[Span]) -> None:
    """Append spans to the file of the run in `directory`. Raises UserError when the disk is full."""
    path = directory / SPANS_FILE
    lines = b"".join(msgspec.json.encode(span) + b"\n" for span in spans)
    with disk_errors(path), path.open("ab") as file:
        # Behind half a line of a kill nothing is read as its rest.
        file.write(b"\n" * (file.tell() > 0) + lines)
        full = file.tell() > MOST_BYTES
    if full:
        os.replace(path, directory / EARLIER_FILE)


def read_spans(directory: Path) -> Iterator[Span]:
    """Yield the spans of a run, none without a file; half a line of a kill is left out."""
    for path in (directory / EARLIER_FILE, directory / SPANS_FILE):
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            try:
                yield msgspec.json.decode(line, type=Span)
            except msgspec.DecodeError:
                continue
