"""Odd arguments of every command, and odd surroundings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.runtime import preflight

Refuse = Callable[..., str]

PLUGINS = """
def nothing(): return 1.0
def needs(*, sample, weight): return 1.0
def odd(*, sample, weight: "NoSuchType" = 1): return 1.0
async def roll(*, prompt, generator, sampling, num_samples, tokenizer): return 3
value = 3
"""
SUMMARY = {"status": "", "steps": 1, "seed": 0, "seconds": {}, "peak_memory_bytes": 0, "checkpoint": None, "go_on": ""} | {
    "evaluation_before": {}, "evaluation_after": {}
}  # fmt: skip
COMMANDS: list[tuple[str, list[str]]] = [
    ("", ["Usage"]),
    ("trian", ["No such command 'trian'"]),
    ("check-plugin", ["Missing argument"]),
    ("check-plugin odd_plugins", ["is 'odd_plugins'", "package.module:function"]),
    ("check-plugin odd_plugins:", ["package.module:function"]),
    ("check-plugin no_such:x", ["no_such:x cannot be imported", "PYTHONPATH"]),
    ("check-plugin odd_syntax:x", ["SyntaxError"]),
    ("check-plugin odd_exits:x", ["odd_exits:x raised SystemExit", "while being imported"]),
    ("check-plugin odd_plugins:value", ["is a int, needs a function"]),
    ("check-plugin odd_plugins:nothing", ["takes nothing", "reward(sample)"]),
    ("check-plugin odd_plugins:nothing --kind nothing", ["'--kind'"]),
    ("check-plugin odd_plugins:needs --args weight=[", ["override 'weight=['"]),
    ("check-plugin odd_plugins:needs --args weight", ["'weight'", "key.path=value"]),
    ("check-plugin odd_plugins:roll --model /nope", ["model.path is /nope"]),
    ("check-plugin odd_plugins:needs --model {model}", ["kind reward gets no tokenizer"]),
    ("convert /nope {tmp}/o", ["/nope is not a directory", "give a Hugging Face directory"]),
    ("convert {tmp}/empty {tmp}/o", ["/empty is neither a Hugging Face directory"]),
    ("convert {model} {model}", ["/model exists already", "another target"]),
    ("convert {model} {tmp}/full", ["/full exists already", "another target"]),
    ("convert {model} {tmp}/loop", ["/loop exists already", "another target"]),
    ("convert {model} {tmp}/file/x", ["cannot write", "a part of this path is a file"]),
    ("convert {model} {tmp}/o --max-shard-size x", ["--max-shard-size is 'x'", "500MB or 4GB"]),
    ("convert {model} {tmp}/o --max-shard-size 0", ["--max-shard-size is '0'", "500MB or 4GB"]),
    ("convert {model} {tmp}/o --max-shard-size 1.2.3GB", ["--max-shard-size is '1.2.3GB'", "500MB or 4GB"]),
    (f"convert {{model}} {{tmp}}/o --max-shard-size {'9' * 400}", ["--max-shard-size is '999", "500MB or 4GB"]),
    (f"convert {{model}} {{tmp}}/{'o' * 300}", ["cannot be used (File name too long)", "a shorter path"]),
    ("convert {model} {tmp}/o --adapter /nope", ["/nope/adapter_config.json cannot be read", "PEFT"]),
    ("convert {model} {tmp}/o --to pickle", ["'pickle'", "'hf'"]),
    ("convert {model}", ["Missing argument 'TARGET'"]),
    ("verify-checkpoint /nope", ["/nope is not a directory"]),
    ("verify-checkpoint {tmp}/file", ["/file is not a directory"]),
    (f"verify-checkpoint /{'o' * 300}", ["cannot be used (File name too long)", "a shorter path"]),
    ("verify-checkpoint {tmp}/tracked", ["/tracked/iter_999", "cannot be used (File name too long)"]),
    ("verify-checkpoint {model} --equal-to /nope", ["/nope is not a directory"]),
    ("plan", ["plan was given no model", "model.path"]),
    ("plan /nope", ["/nope cannot be read", "config.json"]),
    ("plan {tmp}/file", ["/file is not valid JSON"]),
    ("plan {tmp}/deep", ["/deep is not valid JSON (maximum recursion depth"]),
    ("plan {tmp}/many.json", ["num_hidden_layers = 1000000000", "at most 10000"]),
    ("plan {model} --gpu T4", ["'T4' is not known", "H100-80"]),
    ("plan {model} --gpus 0", ["0 is not in the range"]),
    ("plan {model} --tp 3", ["4 attention heads are not divisible by tp 3", "[1, 2, 4]"]),
    ("plan {model} nothing=1", ["unknown setting nothing"]),
    ("plan {model} {model}", ["at most one"]),
    ("report /nope", ["/nope is no directory", "run.directory"]),
    ("report {tmp}/file", ["/file is no directory"]),
    ("report {tmp}/words", ["metrics.jsonl:1: not a line of metrics", "remove that line"]),
    ("report {tmp}/cut", ["metrics.jsonl:1: not a line of metrics"]),
    ("report {tmp}/infinite", ["metrics.jsonl:1: not a line of metrics", "remove that line"]),
    ("report {tmp}/typed", ["summary.json is not the summary of a run (", "peak_memory_bytes", "remove it"]),
    ("report {tmp}/inside", ["metrics.jsonl cannot be used (Is a directory)", "a file is needed"]),
    ("doctor --on-cpu", ["--on-cpu was given without --gpu"]),
    ("doctor --on-cpu 1 --gpu", ["1 is not in the range"]),
    ("eval model.path=/nope data.train=b", ["nothing to evaluate on", "--data FILE", "eval.sets.NAME=FILE"]),
    ("eval {model} {model} --data x.jsonl", ["is given twice", "each once"]),
    ("eval {model} --data x.jsonl run.directory=a", ["a setting of the section run", "--out"]),
    ("eval --url http://127.0.0.1:9/v1 --data x.jsonl", ["--url was given without MODEL", "the name by which"]),
    ("serve", ["Missing argument"]),
    ("serve /nope", ["/nope has no config.json"]),
    ("serve {tmp}/file", ["file has no config.json"]),
    ("serve {model} x", ["'x' is not of the form key.path=value"]),
    ("serve {model} tp_size=x", ["tp_size is 'x'", "`int`"]),
    ("serve {model} tp_size=-1", ["tp_size is -1", ">= 1"]),
    ("serve {model} tp_size=[", ["override 'tp_size=['"]),
    ("serve {model} context_length=-5", ["context_length is -5"]),
    ("serve {model} dtype=float8", ["cannot be set here"]),
    ("serve {model} quantization=nothing", ["quantization is 'nothing'", "needs one of"]),
    ("serve {model} mem_fraction_static=2", ["mem_fraction_static is 2", "at most 1"]),
    ("serve {model} dp_size=2", ["dp_size is 2"]),
    ("serve {model} a.b=1", ["a is not a field"]),
    ("serve {model} --port 0", ["0 is not in the range"]),
    ("serve {model} --host=", ["--host is empty"]),
    ("serve {model} --host ::1::", ["::1:: is no address of this machine"]),
    ("serve {model} --host \u00ad", ["\u00ad is no address of this machine (encoding of hostname failed)"]),
    ("serve {model} --host 203.0.113.9", ["203.0.113.9 is no address of this machine"]),
]


@pytest.mark.parametrize(("line", "parts"), COMMANDS, ids=[case[0] or "nothing" for case in COMMANDS])
def test_commands(
    line: str, parts: list[str], tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("plugins", PLUGINS), ("syntax", "def ("), ("exits", "import sys; sys.exit(3)")):
        (tmp_path / f"odd_{name}.py").write_text(text)
    for name in ("empty", "full", "words", "cut", "tracked", "infinite", "typed", "inside"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "full" / "x").write_text("x")
    (tmp_path / "words" / "metrics.jsonl").write_text('{"step": 1, "train/loss": "x"}\n')
    (tmp_path / "cut" / "metrics.jsonl").write_text('{"step": \n')
    (tmp_path / "tracked" / "latest_checkpointed_iteration.txt").write_bytes(b"9" * 5000)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "deep").write_text("[" * 10**5)
    (tmp_path / "many.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 10**9}))
    (tmp_path / "infinite" / "metrics.jsonl").write_text('{"step": 1e999}\n')
    (tmp_path / "typed" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    (tmp_path / "typed" / "summary.json").write_text(json.dumps(SUMMARY | {"peak_memory_bytes": "much"}))
    (tmp_path / "inside" / "metrics.jsonl").mkdir()
    words = line.replace("{tmp}", str(tmp_path)).replace("{model}", str(model)).split()
    assert main(words) == 2
    printed = capsys.readouterr()
    said = printed.out + printed.err
    assert "Traceback" not in said, said
    # A plug-in's broken promise is the last line of its checks, and a plan says before what it builds.
    last = said if not words else said.splitlines()[-1]
    assert last.startswith(("megatron-rl: ", "BROKEN  ", "Usage: ")) and all(part in last for part in parts), said


def no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**3))


def unwritable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The superuser may write anywhere: the system is asked, and answers as to others.
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: tmp_path not in (Path(path), *Path(path).parents))


SURROUNDINGS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], Any], list[str]]] = {
    "log-probs without temperature": (
        lambda patch, tmp: patch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1"),
        ["SGLANG_RETURN_ORIGINAL_LOGPROB=1", "unset it"],
    ),
    "answers cut": (lambda patch, tmp: patch.setenv("SGLANG_MAX_NEW_TOKENS_LIMIT", "4"), ["SGLANG_MAX_NEW_TOKENS_LIMIT=4", "unset it"]),
    "no room": (no_room, ["has 1 KiB free", "a checkpoint of this model takes", "run.directory"]),
    "unwritable": (unwritable, ["is not writable", "another directory"]),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings(name: str, words: list[str], tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    change, parts = SURROUNDINGS[name]
    change(monkeypatch, tmp_path)
    refuse(words, *parts)
