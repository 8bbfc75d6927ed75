"""What a conversion says of a source that is not as it was written: damage is refused, other changes and wrong numbers are named."""

import json
import pickle
import shutil
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.hugging_face import HuggingFaceWeights, save_hf
from megatron_rl.convert import conversion
from megatron_rl.convert.conversion import Options, convert, num_not_finite
from megatron_rl.errors import UserError


def flip(file):
    content = bytearray(file.read_bytes())
    content[-600] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("to", "pattern"), [("megatron", "__1*.distcp"), ("megatron", "left-out/*"), ("hf", "*-00002-of-*")])
def test_damage_is_not_passed_on_under_a_new_manifest(tiny_model, tmp_path, to, pattern):
    path = tiny_model(family="glm4_moe")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}, path / "model.safetensors")
    convert(path, tmp_path / "made", Options(to=to, max_shard_bytes=60_000))
    (damaged,) = (tmp_path / "made").glob(pattern)
    flip(damaged)
    words = f"the content of {damaged.relative_to(tmp_path / 'made')} is not that of its manifest; copy it again .* if the change is yours"
    with pytest.raises(UserError, match=words):
        convert(tmp_path / "made", tmp_path / "back", Options())
    assert not (tmp_path / "back").exists()
    (tmp_path / "made/manifest.json").unlink()
    convert(tmp_path / "made", tmp_path / "back", Options())


@pytest.mark.parametrize(
    "name", ["model-00003-of-00002.safetensors", "other.safetensors.index.json", ".metadata", "left-out/old.safetensors"]
)
def test_weights_beside_those_of_a_manifest_are_refused(tiny_model, tmp_path, name):
    path = tiny_model(family="glm4_moe")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}, path / "model.safetensors")
    made = tmp_path / "made"
    convert(path, made, Options(to="megatron" if "/" in name else "hf"))
    (made / "._model.safetensors").touch()
    manifest.check(made, "weights")
    (made / name).touch()
    words = (
        f"made is not as it was saved: {name} is there, but not in its manifest.json, and programs differ in whether they read it; remove"
    )
    for kind in ("weights", "model"):
        with pytest.raises(UserError, match=words):
            manifest.check(made, kind)
    if name != ".metadata":
        with pytest.raises(UserError, match=words):
            convert(made, tmp_path / "never", Options())
    (made / "manifest.json").unlink()
    manifest.check(made, "weights")


def test_a_manifest_of_another_program_can_be_removed(tiny_model):
    path = tiny_model()
    (path / "manifest.json").write_text(json.dumps({"files": ["model.safetensors"]}))
    with pytest.raises(
        UserError, match=r"manifest\.json cannot be read .*; copy it again from where it came, or remove its manifest\.json"
    ):
        manifest.check(path, "weights")


def test_an_index_beside_a_single_file_is_refused(tiny_model):
    path = tiny_model()
    index = path / "model.safetensors.index.json"
    for file, refused in (("model.safetensors", False), ("model-00001-of-00001.safetensors", True)):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(path / "model.safetensors"), file)}))
        shutil.copyfile(path / "model.safetensors", path / "model-00001-of-00001.safetensors")
        with pytest.raises(UserError, match="which transformers reads, and model") if refused else nullcontext():
            HuggingFaceWeights(path)
    (path / "model.safetensors").unlink()
    HuggingFaceWeights(path)


def test_the_export_of_a_run_is_checked_where_tensors_are_read(tiny_model, tmp_path, read_all):
    path = tiny_model(family="glm4_moe")
    tensors, mtp = read_all(path), {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    for name, stale in (("with", mtp), ("without", {})):
        step = tmp_path / name
        convert(path, step / "megatron", Options())
        (step / "megatron/config.json").unlink()
        save_hf(step / "hf", tensors, source=path, stale=stale.items())
        flip(step / "hf/model.safetensors")
    with pytest.raises(UserError, match=r"with/hf is damaged: the content of model\.safetensors"):
        convert(tmp_path / "with", tmp_path / "never", Options())
    convert(tmp_path / "without", tmp_path / "made", Options())


def test_words_that_are_to_stay_have_a_line_of_their_own(capsys, monkeypatch):
    monkeypatch.setattr(conversion.sys.stderr, "isatty", lambda: True, raising=False)
    for words in ("1 of 2", "warning\n", "2 of 2"):
        conversion.say_on_terminal(words)
    assert capsys.readouterr().err == f"\r{'1 of 2':<78}\r{'warning':<78}\n\r{'2 of 2':<78}"


def test_the_index_is_not_unpickled_before_its_hash_is_checked(tiny_model, tmp_path):
    """One bit of a pickle ends the process in places."""
    convert(tiny_model(), tmp_path / "ours", Options())
    flip(tmp_path / "ours/.metadata")
    with pytest.raises(UserError, match=r"the content of \.metadata is not that of its manifest"):
        convert(tmp_path / "ours", tmp_path / "back", Options())


def test_an_index_of_another_kind_is_refused(tiny_model, tmp_path):
    convert(tiny_model(), tmp_path / "ours", Options())
    (tmp_path / "ours/manifest.json").unlink()
    (tmp_path / "ours/.metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(UserError, match=r"\.metadata holds less than the records of a checkpoint .*; take another one"):
        convert(tmp_path / "ours", tmp_path / "back", Options())


def test_each_file_of_the_weights_is_hashed_once(tiny_model, tmp_path, monkeypatch):
    convert(tiny_model(), tmp_path / "ours", Options(max_shard_bytes=60_000))
    hashed, original = [], manifest.entry_of
    monkeypatch.setattr(manifest, "entry_of", lambda path: hashed.append(path) or original(path))
    convert(tmp_path / "ours", tmp_path / "back", Options())
    hashed = [path.name for path in hashed if path.parent == tmp_path / "ours"]
    weights = {path.name for path in (tmp_path / "ours").iterdir() if path.name == "common.pt" or path.suffix == ".distcp"}
    assert len(weights) > 2 and {hashed.count(name) for name in weights} == {1} and {".metadata", "metadata.json"} <= set(hashed)


def test_other_files_may_be_changed_and_are_named(tiny_model, tmp_path):
    convert(tiny_model(), tmp_path / "ours", Options())
    (tmp_path / "ours/notes.txt").touch()
    file = tmp_path / "ours/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 500.0}))
    said = []
    convert(tmp_path / "ours", tmp_path / "back", Options(), say=said.append)
    assert [words for words in said if "manifest" in words] == [f"{file} is not the file of its manifest: it is converted as it is\n"]


def test_a_manifest_without_hashes_is_no_reason_to_refuse(tiny_model, tmp_path, read_all):
    path = tiny_model()
    save_hf(tmp_path / "saved", read_all(path), source=path)
    for content in ({"stale_once_trained": []}, ["another program's"]):
        (tmp_path / "saved/manifest.json").write_text(json.dumps(content))
        convert(tmp_path / "saved", tmp_path / f"ours of {type(content).__name__}", Options())
    (tmp_path / "saved/manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        convert(tmp_path / "saved", tmp_path / "never", Options())


@pytest.mark.parametrize("options", [Options(), Options(to="hf", quantise=True)])
def test_numbers_that_are_not_finite_are_named_and_converted(tiny_model, tmp_path, options):
    path = tiny_model()
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, :2] = torch.tensor([float("nan"), float("-inf")])
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, path / "model.safetensors")
    said = []
    convert(path, tmp_path / "made", options, say=said.append)
    size = tensors["model.layers.1.mlp.down_proj.weight"].numel()
    words = f"model.layers.1.mlp.down_proj.weight has 2 of {size:,} numbers that are not finite, the first of 2 such tensors"
    assert [line for line in said if "finite" in line] == [f"warning: {words}; they are converted as they are\n"]
    assert (tmp_path / "made/manifest.json").exists()


def test_numbers_that_a_smaller_dtype_cannot_hold_are_named(tiny_model, tmp_path):
    path = tiny_model()
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, path / "model.safetensors")
    said = []
    convert(path, tmp_path / "whole", Options(), say=said.append)
    assert not [words for words in said if "finite" in words]
    convert(path, tmp_path / "half", Options(dtype=torch.float16), say=said.append)
    assert [words for words in said if "finite" in words] == [
        "warning: model.norm.weight has 1 of 64 numbers that are not finite, the first of 1 such tensor; they are converted as they are\n"
    ]


def test_numbers_are_counted_whatever_they_are():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        numbers = torch.tensor([[1.0, float("nan"), -2.0], [float("inf"), 0.0, float("-inf")]]).to(dtype)
        assert [num_not_finite(numbers), num_not_finite(numbers[:, ::2]), num_not_finite(numbers[0, 2:])] == [3, 2, 0]
    assert num_not_finite(torch.tensor([60000.0, 60000.0], dtype=torch.float16)) == num_not_finite(torch.ones(3, dtype=torch.int32)) == 0
    assert num_not_finite(torch.ones(0)) == 0
