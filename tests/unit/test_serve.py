"""What `megatron-rl serve` does not hand to SGLang, and why."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.serve import _how_to_ask


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["serve", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_is_no_hugging_face_directory_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path} has no config.json, needs a Hugging Face directory" in refusal(capsys, tmp_path)
    (tmp_path / "step-000004" / "hf").mkdir(parents=True)
    (tmp_path / "step-000004" / "hf" / "config.json").write_text("{}")
    step = tmp_path / "step-000004"
    assert refusal(capsys, step).endswith(f"{step} is a checkpoint of a run, needs a Hugging Face directory; give {step / 'hf'}")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8, "auto_map": {"AutoConfig": "strange.Config"}}))
    assert "names code (auto_map), which SGLang might run" in refusal(capsys, tmp_path)
    for name in (".metadata", "metadata.json"):
        (tmp_path / name).write_text("{}")
    assert "is in Megatron's format, which SGLang does not read" in refusal(capsys, tmp_path)


def test_arguments_are_the_servers_and_not_those_of_the_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    assert "api_key is 'x' but cannot be set here" in refusal(capsys, tmp_path, "api_key=x")
    assert "tp_sise" in refusal(capsys, tmp_path, "tp_sise=2")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["tp_size=2", "nnodes=2"], ["nnodes is 2", "needs 1", "remove it"]),
        (["tp_size=3"], ["num_attention_heads 4", "3 ranks", "divisor of 4"]),
        (["--host", "203.0.113.1"], ["203.0.113.1 is no address of this machine", "127.0.0.1"]),
        (["--host", "no such host"], ["no such host is no address of this machine"]),
        (["--port", "{used}"], ["port {used} on 127.0.0.1 is in use", "choose another"]),
    ],
)
def test_what_cannot_be_served_is_said_before_the_start(
    words: list[str], parts: list[str], tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        line = refusal(capsys, tiny_model(), *(word.replace("{used}", port) for word in words))
    assert all(part.replace("{used}", port) in line for part in parts), line


@pytest.mark.parametrize(("chats", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_the_example_is_of_the_models_kind(chats: bool, path: str) -> None:
    address = EngineAddress("http://127.0.0.1:1", "key", vocab_size=8, context_length=8, max_total_tokens=8, has_tokenizer=True)
    said = _how_to_ask(address, Path("m"), chats=chats)
    assert f"curl http://127.0.0.1:1{path} -H 'Authorization: Bearer key'" in said and ('"messages"' in said) == chats
