"""`megatron-rl status --serve`: the state of runs in Prometheus' text format, on loopback alone."""

import http.server
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_rl.errors import UserError
from megatron_rl.report.status import Publish, RunReport

_Labels = dict[str, str]
_HELP = {
    "up": "1 while the run goes on, late or not",
    "step": "Steps that are done",
    "steps": "Steps of the whole run",
    "state_age_seconds": "Age of the last state that the run wrote",
    "time_left_seconds": "Time to the expected end",
    "wait_seconds": "Longest wait of the driver in progress",
    "late_waits": "Waits in progress that take longer than usual",
    "engine_restarts": "Starts of engines that had died",
    "disk_free_bytes": "Free bytes where the run writes",
    "disk_to_come_bytes": "Bytes that the run still takes",
    "advice": "Sentences of advice",
    "engine_requests": "Requests in flight",
    "engine_request_limit": "Limit of these",
    "engine_answers": "Answers so far",
    "engine_queue": "Requests that wait inside the engine",
    "engine_kv_use": "Share of the key-value memory in use",
    "metric": "Metrics of the newest step, by their names in metrics.jsonl",
}
"""Families of gauges without their prefix megatron_rl_, in order."""


def exposition(reports: Sequence[RunReport]) -> str:
    """Return all gauges of the runs; what is not known is left out."""
    found: dict[str, list[str]] = {name: [] for name in _HELP}
    for report in reports:
        for name, labels, value in _samples(report):
            if value is not None:
                written = ",".join(f'{key}="{_escaped(text)}"' for key, text in {"run": report.directory, **labels}.items())
                found[name].append(f"megatron_rl_{name}{{{written}}} {_number(value)}")
    lines = []
    for name, values in found.items():
        lines += [f"# HELP megatron_rl_{name} {_HELP[name]}", f"# TYPE megatron_rl_{name} gauge", *values] if values else []
    return "".join(f"{line}\n" for line in lines)


def _samples(report: RunReport) -> Iterator[tuple[str, _Labels, float | None]]:
    yield "up", {"life": report.life}, float(report.life in ("running", "late"))
    waits = [] if report.state is None else report.state.waits
    whole = {
        "step": report.step,
        "steps": report.num_steps,
        "state_age_seconds": report.age_s,
        "time_left_seconds": report.left_s,
        "wait_seconds": max((wait.seconds for wait in waits), default=0.0),
        "late_waits": sum(wait.late for wait in waits),
        "engine_restarts": report.restarts,
        "disk_free_bytes": report.disk_free,
        "disk_to_come_bytes": report.disk_to_come,
        "advice": len(report.advice),
    }
    yield from ((name, {}, value) for name, value in whole.items())
    for one in () if report.state is None else report.state.engines:
        numbers = {"requests": one.requests, "request_limit": one.limit, "answers": one.answers, "queue": one.queue, "kv_use": one.kv_use}
        yield from ((f"engine_{name}", {"engine": one.url}, value) for name, value in numbers.items())
    yield from (("metric", {"name": name}, value) for name, value in report.metrics.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Return a number as Prometheus writes it, such as NaN and +Inf."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf")


@contextmanager
def serving(port: int) -> Iterator[Publish]:
    """Serve http://127.0.0.1:PORT/metrics during the body; the yielded call takes the reports.

    Raises UserError for a used port.
    """
    text = b""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the newest text."""
            known = self.path.partition("?")[0] in ("/", "/metrics")
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(text if known else b"")

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    def publish(reports: Sequence[RunReport]) -> None:
        nonlocal text
        text = exposition(reports).encode("utf-8", "replace")

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer)
    except OSError as error:
        raise UserError(f"--serve is {port}, which cannot be listened on ({error.strerror}); give another port") from error
    with server:
        threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()
        print(f"http://127.0.0.1:{server.server_address[1]}/metrics", flush=True)
        try:
            yield publish
        finally:
            server.shutdown()
