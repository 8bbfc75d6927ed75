"""Every kind of reward in a real run, by a field of the row, and one of whole groups in an evaluation beside it."""

import importlib.util
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from small_run import chat_arguments, metrics

ASKED: Counter[str] = Counter()


class Grader(BaseHTTPRequestHandler):
    """Grades and judges each response by its length."""

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.rfile.read(length)
        ASKED[self.path] += 1
        grade, verdict = {"reward": length % 2}, {"choices": [{"message": {"content": f"Verdict: {'in' * (length % 2)}correct"}}]}
        body = json.dumps(grade if self.path == "/grade" else verdict).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Grader)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.timeout(540)
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap (Debian: apt-get install bubblewrap)")
def test_every_kind_of_reward_scores_a_run(chat_task: Path, tmp_path: Path, url: str, start: Callable[..., Any]) -> None:
    ASKED.clear()
    functions: dict[str, Any] = {
        "math": "math", "exact": "exact", "choice": "choice", "tags": "tags", "code": "code", "program": "tests.e2e.graded:program",
        "regex": {"function": "regex", "args": {"pattern": "[a-m]"}},
        "overlong": {"function": "overlong", "args": {"max_tokens": 40, "buffer_tokens": 30}},
        "remote": {"function": "remote", "args": {"url": f"{url}/grade"}},
        "judge": {"function": "judge", "args": {"url": f"{url}/v1", "model": "m"}},
        "mixture": {"function": "mixture", "args": {"parts": {
            "tags": 1.0, "short": {"function": "overlong", "args": {"max_tokens": 40, "buffer_tokens": 30}, "weight": 0.5},
        }}},
    }  # fmt: skip
    fields: dict[str, dict[str, Any]] = {kind: {"label": "A"} for kind in functions} | {"program": {"tests": "assert f() > 0"}}
    fields["code"] = {"tests": {"inputs": ["1"], "outputs": ["2"]}}
    if importlib.util.find_spec("reasoning_gym"):
        from examples.agents.reasoning import rows_of

        functions["reasoning_gym"] = "reasoning_gym"
        fields["reasoning_gym"] = next(rows_of("spell_backward", seed=1, size=1))
    rows = [{**row, "prompt": f"Question of {kind}", "kind": kind} for kind, row in fields.items()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "data.train": tmp_path / "rows.jsonl", "data.prompts_per_step": len(rows), "rollout.max_staleness": 1,
        "objective.off_policy": "{mode: truncate, high: 2.0}",
        "reward.function": "by_row", "reward.args": json.dumps({"key": "kind", "functions": functions}), "reward.max_error_rate": 0,
        "eval.sets": json.dumps({
            "all": {"data": str(tmp_path / "rows.jsonl"), "samples": 2},
            "groups": {"data": str(tmp_path / "rows.jsonl"), "samples": 3, "reward": {"function": "tests.e2e.graded:longest"}},
        }),
    }  # fmt: skip
    overrides = [f"{name}={value}" for name, value in settings.items()]
    run = start(*chat_arguments(chat_task, tmp_path / "run", *overrides, rollout="rollout.max_turns=1"))
    assert run.wait(timeout_s=480.0) == 0, run.output
    steps = metrics(tmp_path / "run")
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 and steps[step]["rollout/num_samples"] == 2 * len(rows) for step in (1, 2))
    assert min(ASKED["/grade"], ASKED["/v1/chat/completions"]) >= 2 * 2 + 2, "in each step and in the evaluations"
    answers = {name: read_lines(tmp_path / "run" / "evaluation" / "step-000002" / f"{name}.jsonl") for name in ("all", "groups")}
    assert [answer["cause"] for answer in (*answers["all"], *answers["groups"])] == [None] * 5 * len(rows)
    assert {answer["components"]["group"] for answer in answers["groups"]} == {3.0}
    assert run.survivors() == []


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
