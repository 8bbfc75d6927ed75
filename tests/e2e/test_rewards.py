"""Every kind of reward in a real run, by a field of the row, one of whole groups in an evaluation, a judge that we serve."""

import importlib.util
import itertools
import json
import re
import shutil
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_parts import chat_tokenizer
from small_run import chat_arguments, metrics
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rl.engines.engine import free_port

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


def make_judge(directory: Path, reply: str) -> Path:
    """A model that knows the next letter by the last one alone, and gives each question this reply, without a letter twice."""
    tokenizer, size = chat_tokenizer(), 272
    config = Qwen3Config(
        vocab_size=size, hidden_size=size, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config)
    ids = tokenizer.encode(f"\n{reply}<|im_end|>", add_special_tokens=False)
    assert len(set(ids)) == len(ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for letter, following in itertools.pairwise(ids):
            model.lm_head.weight[following, letter] = 1.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_judge_that_we_serve_scores_a_run(
    chat_task: Path, tmp_path: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port("127.0.0.1", claim=socket.socket(socket.AF_UNIX))
    server = start("serve", make_judge(tmp_path / "judge", "Verdict: X"), "--port", port, "max_total_tokens=16384")
    server.wait_for("\ncurl ")
    (key,) = re.findall(r"Bearer ([^'\s]+)'", server.output)
    monkeypatch.setenv("JUDGE_KEY", key)
    url = {"url": f"http://127.0.0.1:{port}/v1", "model": "judge", "key": "JUDGE_KEY"}
    args = {**url, "verdicts": {"X": 0.75, "Y": 0.0}, "max_tokens": 32}
    overrides = ("reward.function=judge", f"reward.args={json.dumps(args)}", "reward.max_error_rate=0")
    run = start(*chat_arguments(chat_task, tmp_path / "run", *overrides, rollout="rollout.max_turns=1"))
    assert run.wait() == 0, run.output
    steps = metrics(tmp_path / "run")
    assert [steps[step]["rollout/reward"] for step in (1, 2)] == [0.75, 0.75]
    assert server.process.poll() is None and run.survivors() == []
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM and server.survivors() == []
