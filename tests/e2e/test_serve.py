"""`megatron-rl serve`, as its user runs it: text in, text out, nobody without the key, nothing left behind."""

import json
import shlex
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.engines.engine import free_port

TIMEOUT_S = 60.0


@pytest.mark.slow
def test_an_export_is_served_as_transformers_reads_it(task: Path, start: Callable[..., Any]) -> None:
    port = free_port("127.0.0.1", claim=socket.socket(socket.AF_UNIX))
    server = start("serve", task / "model", "--port", port, "max_total_tokens=4096")
    server.wait_for("\ncurl ")
    words = shlex.split(server.output.splitlines()[-1])
    assert words[1].startswith(f"http://127.0.0.1:{port}/") and words[-2] == "-d"
    body = json.loads(words[-1])
    headers = dict(words[index + 1].split(": ") for index, word in enumerate(words) if word == "-H")
    asked = urllib.request.Request(words[1], words[-1].encode(), headers)
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as response:
        answer = json.load(response)["choices"][0]["text"]

    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    ids = tokenizer(body["prompt"], return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=body["max_tokens"], do_sample=False)[0, ids.shape[1] :]
    assert answer == tokenizer.decode(expected, skip_special_tokens=True) != ""

    # SGLang itself takes these, and its scheduler ends.
    for odd in ({"prompt": [10**6]}, {"prompt": [[2], [-1]]}, {"logprobs": 10**6}):
        deadly = urllib.request.Request(words[1], json.dumps(body | odd).encode(), headers)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(deadly, timeout=TIMEOUT_S)
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as response:
        assert json.load(response)["choices"][0]["text"] == answer

    stranger = urllib.request.Request(words[1], words[-1].encode(), {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(stranger, timeout=TIMEOUT_S)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in server.output and server.survivors() == []
