"""The command line: options, exit status, and the two thin scripts."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.cli import main
from megatron_rl.convert import conversion
from megatron_rl.convert.conversion import parse_options
from megatron_rl.convert.tensor_comparison import TensorComparison
from megatron_rl.errors import UserError

TOOLS = Path(__file__).parents[3] / "tools"


def test_there_and_back_by_the_scripts(tiny_model, tmp_path, monkeypatch, capsys, read_all):
    path = tiny_model()
    for script, source, target in (("hf_to_megatron", path, "ours"), ("megatron_to_hf", tmp_path / "ours", "back")):
        monkeypatch.setattr(sys, "argv", [script, str(source), str(tmp_path / target), "--dtype", "bfloat16", "--max-shard-size", "50KB"])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(TOOLS / f"convert_{script}.py"), run_name="__main__")
        assert not left.value.code
    assert re.search(r"ours: megatron, \d+\.\d\d MB in \d+\.\d s \(\d+\.\d\d MB/s\)", capsys.readouterr().out)
    assert {tensor.dtype for tensor in read_all(tmp_path / "back").values()} == {torch.bfloat16}
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1


def test_damage_ends_with_status_2(tiny_model, monkeypatch, capsys):
    path = tiny_model()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    monkeypatch.setattr(sys, "argv", ["verify_checkpoint", str(path)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(TOOLS / "verify_checkpoint.py"), run_name="__main__")
    assert left.value.code == 2
    assert "BROKEN  files, names and config.json belong together" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["convert"], ["verify-checkpoint"]])
def test_a_config_that_would_not_be_read_is_refused(tiny_model, tmp_path, capsys, command):
    path, target = tiny_model(), tmp_path / "ours"
    status = main([*command, str(path), *([str(target)] if command == ["convert"] else []), "--config", "/nope"])
    words = f"--config is /nope, but {path} is a Hugging Face directory with its own config.json; remove --config"
    assert status and words in "".join(capsys.readouterr())
    assert not target.exists()


def test_a_config_of_a_distributed_checkpoint_is_read(tiny_model, tmp_path, capsys):
    assert main(["convert", str(tiny_model()), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--config", str(tmp_path)])
    assert f"--config is {tmp_path}, which has no config.json; give the Hugging Face directory" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "num_bytes"), [("500MB", 500_000_000), ("4gb", 4_000_000_000), ("1.5KiB", 1536), ("123", 123)])
def test_sizes(words, num_bytes):
    assert parse_options(max_shard_size=words, to=None, dtype=None, quantize=None).max_shard_bytes == num_bytes


@pytest.mark.parametrize("words", ["big", "0", "-1GB", "4 GB of it"])
def test_sizes_that_are_none(words):
    with pytest.raises(UserError, match=r"--max-shard-size is .*, needs a size such as 500MB"):
        parse_options(max_shard_size=words, to=None, dtype=None, quantize=None)


def test_two_sides_that_differ_end_with_status_2(tiny_model, tmp_path, monkeypatch, capsys):
    path = tiny_model()
    assert main(["convert", str(path), str(tmp_path / "ours"), "--verify"]) == 0
    assert "tensors have exactly the numbers that were asked for" in capsys.readouterr().out
    found = TensorComparison()
    found.wrong.append("one is wrong")
    monkeypatch.setattr(conversion, "verify_conversion", lambda *arguments: found)
    assert main(["convert", str(path), str(tmp_path / "again"), "--verify"]) == 2
    assert "BROKEN  tensors have exactly the numbers that were asked for" in (out := capsys.readouterr().out) and "one is wrong" in out
