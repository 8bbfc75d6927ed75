"""`megatron-rl trace`: one step of a run as a trace for Perfetto and Chrome."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.observe.sinks import METRICS_FILE, read_times
from megatron_rl.observe.spans import SPANS_FILE, Span, read_spans
from megatron_rl.system.files import write_atomic


def trace_step(directory: Path, *, step: int | None, out: Path | None) -> tuple[Path, int]:
    """Write the trace of `step`, by default the newest; return its path and the number of spans in it.

    A step is the time between the rows of the step before and of its own. Raises UserError for one
    without spans.
    """
    path = directory / METRICS_FILE
    times = read_times(path) if path.is_file() else {}
    if not times:
        raise UserError(f"{path} has no row of a step; give the run.directory of a run")
    step = max(times) if step is None else step
    if step not in times:
        raise UserError(f"--step is {step}, but {path} has rows of steps {min(times)} to {max(times)}; name one of them")
    begin, end = times.get(step - 1, 0.0), times[step]
    spans = [span for span in read_spans(directory) if span.end > begin and span.begin < end]
    if not spans:
        raise UserError(f"{directory / SPANS_FILE} has no span of step {step}: it keeps the newest steps; name a later one")
    whole = Span("driver", f"step {step}", begin or min(span.begin for span in spans), end)
    out = out or directory / f"trace-{step:06}.json"
    write_atomic(out, json.dumps({"traceEvents": list(_events([whole, *spans])), "displayTimeUnit": "ms"}))
    return out, len(spans)


def _events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Yield events of the Trace Event Format, in microseconds since the first span.

    Each `who` is a process, where spans that overlap get lanes of their own. Engines have a count of
    the samples in them, too.
    """
    start_s = min(span.begin for span in spans)
    owners = sorted({span.who for span in spans}, key=lambda who: ("driver rank engine groups rewards".find(who.split()[0]), len(who), who))
    for number, who in enumerate(owners, start=1):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": who}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        lanes: list[float] = []
        own = sorted((span for span in spans if span.who == who), key=lambda span: (span.begin, -span.end))
        for span in own:
            lane = next((index for index, free_s in enumerate(lanes) if free_s <= span.begin), len(lanes))
            lanes[lane : lane + 1] = [span.end]
            counted = {} if span.count is None else {"samples": span.count}
            times = {"ts": _microseconds(span.begin - start_s), "dur": _microseconds(span.end - span.begin)}
            yield {"ph": "X", "name": span.name, "pid": number, "tid": lane, **times, "args": counted}
        if who.startswith("engine"):
            yield from _samples_in_flight(own, number, start_s)


def _samples_in_flight(spans: Sequence[Span], number: int, start_s: float) -> Iterator[dict[str, Any]]:
    changes = sorted((at, change) for span in spans if span.count for at, change in ((span.begin, span.count), (span.end, -span.count)))
    samples = 0
    for at, change in changes:
        samples += change
        times = {"ts": _microseconds(at - start_s), "args": {"samples": samples}}
        yield {"ph": "C", "name": "samples in flight", "pid": number, **times}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)
