"""What `megatron-rl serve` does not hand to SGLang, and why."""

import json
from pathlib import Path

import pytest

from megatron_rl.cli import main


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
