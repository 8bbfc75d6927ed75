"""What engines are started on: model.path, or what is made for them where they cannot read its weights."""

import json
import os
import tempfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoints import hugging_face
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.errors import UserError
from megatron_rl.runtime.engine_model import EngineModel, evaluated_model, make_model
from megatron_rl.runtime.resumption import check_run_directory
from megatron_rl.system import files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run."""
    return tmp_path / "run"


FORMS: dict[str, Options] = {"codes": Options(to="hf", quantise=True), "our own format": Options(to="megatron")}


@pytest.fixture(params=FORMS)
def unreadable(request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model directory whose weights no engine can take."""
    convert(tiny_model(), tmp_path / "unreadable", FORMS[request.param])
    # What codes mean is not rounded on the way to a wider dtype.
    file = tmp_path / "unreadable/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch_dtype": "bfloat16"}))
    return tmp_path / "unreadable"


def test_plain_safetensors_are_read_by_engines_without_a_trainer(tiny_model: Callable[..., Path], run: Path, tmp_path: Path) -> None:
    path = tiny_model()
    assert make_model(path, directory=run, sglang={}, dtype="float32", note=pytest.fail) == EngineModel(path, has_weights=False)
    with evaluated_model(path, directory=run, dtype="float32", note=pytest.fail) as model:
        assert model == EngineModel(path)
    assert not (tmp_path / "run").exists()


def test_engines_start_on_the_same_model_without_its_code(
    tiny_model: Callable[..., Path], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its layers of multi-token prediction, if any are in the files, stay promised with the files.
    path = tiny_model(family="glm4_moe", auto_map={"AutoConfig": "modeling.Config"}, torch_dtype="bfloat16")
    (path / "modeling.py").write_text("raise SystemExit('ran')")
    notes: list[str] = []

    asked = json.loads((path / "config.json").read_text())

    def assert_same_model(model: EngineModel, wanted: EngineModel, *, without: set[str], **changed: int) -> None:
        assert model == wanted
        assert {file.name for file in model.path.iterdir()} == {file.name for file in path.iterdir()} - without
        found = json.loads((model.path / "config.json").read_text())
        assert found == {key: value for key, value in asked.items() if key != "auto_map"} | {"torch_dtype": "float32"} | changed

    monkeypatch.chdir(path.parent)
    made = make_model(Path(path.name), directory=run, sglang={}, dtype="float32", note=notes.append)
    described = EngineModel(tmp_path / "run/engine-model", has_weights=False)
    assert_same_model(made, described, without={"modeling.py", "model.safetensors"}, num_nextn_predict_layers=0)
    with evaluated_model(path, directory=run, dtype="float32", note=notes.append) as model:
        assert_same_model(model, EngineModel(tmp_path / f"run/engine-weights-{os.getpid()}"), without={"modeling.py"})
        assert (model.path / "model.safetensors").readlink() == path / "model.safetensors", "the weights are where they were"
    assert not model.path.exists() and (path / "model.safetensors").exists()
    assert len(notes) == 2 and all("(auto_map)" in note for note in notes)


def test_a_model_without_weights_waits_for_the_trainer_s(unreadable: Path, run: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    model = make_model(unreadable, directory=run, sglang={}, dtype="float32", note=notes.append)
    assert model == EngineModel(tmp_path / "run/engine-model", has_weights=False)
    assert not list(model.path.glob("*.safetensors")) and (model.path / "tokenizer.json").exists()
    config = json.loads((model.path / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "float32"
    assert len(notes) == 1 and str(unreadable) in notes[0]
    # A start that fails after this may be repeated.
    assert check_run_directory(tmp_path / "run", resume=False) == []


def test_engines_without_a_trainer_get_its_first_weights(unreadable: Path, run: Path, read_all: Any) -> None:
    meant = {name: tensor.float() for name, tensor in read_all(unreadable, torch.float32).items()}
    path = run / f"engine-weights-{os.getpid()}"
    notes: list[str] = []
    with evaluated_model(unreadable, directory=run, dtype="float32", note=notes.append) as model:
        assert model == EngineModel(path)
        written = load_file(path / "model.safetensors")
        assert written.keys() == meant.keys() and all(torch.equal(written[name], tensor) for name, tensor in meant.items())
        assert "quantization_config" not in json.loads((path / "config.json").read_text())
    assert not path.exists() and str(path) in notes[0]


def test_an_evaluation_ended_while_converting_leaves_no_weights(
    unreadable: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is killed, what removes the leftovers of dead processes knows of all that is there."""
    noted: list[str] = []

    def stop(*arguments: Any, **keywords: Any) -> None:
        (file,) = tmp_path.glob("megatron-rl-*/elsewhere.json")
        noted.extend(json.loads(file.read_text()))
        assert {str(place) for place in (tmp_path / "run").iterdir()} <= set(noted) and any(".partial" in place for place in noted)
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(hugging_face, "copy_model_files", stop)
    with pytest.raises(KeyboardInterrupt), evaluated_model(unreadable, directory=run, dtype="float32", note=lambda words: None):
        pytest.fail("engines must not start")
    assert len(noted) == 2 and list((tmp_path / "run").iterdir()) == []


def test_the_disk_is_asked_before_weights_are_written(unreadable: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage(1, 1, 0))
    with (
        pytest.raises(UserError, match=r"the target needs .* GB, but .*run has 0\.00 GB free"),
        evaluated_model(unreadable, directory=run, dtype="float32", note=lambda words: None),
    ):
        pytest.fail("engines must not start")


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_engines_without_a_trainer_get_no_damaged_weights(tiny_model: Any, run: Path, tmp_path: Path, to: Any) -> None:
    convert(tiny_model(), tmp_path / "made", Options(to=to))
    (file,) = (tmp_path / "made").glob("*.safetensors" if to == "hf" else "*.distcp")
    content = bytearray(file.read_bytes())
    content[-600] ^= 1
    file.write_bytes(content)
    with (
        pytest.raises(UserError, match=f"the content of {file.name} is not that of its manifest"),
        evaluated_model(tmp_path / "made", directory=run, dtype="float32", note=lambda words: None),
    ):
        pytest.fail("engines must not start")
