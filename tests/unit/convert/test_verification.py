"""Every kind of damage has its words, and two checkpoints that compute different things are told apart."""

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.hugging_face import save_hf
from megatron_rl.checkpoints.stored_weights import open_weights
from megatron_rl.cli import main
from megatron_rl.convert import verification
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.convert.verification import verify
from megatron_rl.errors import UserError
from megatron_rl.models.weight_table import parameter_shape, rules

YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}


@pytest.fixture(autouse=True)
def cheap_model(monkeypatch):
    """That the model has the parameters that the table makes is tested beside this file."""

    def of_the_table(spec):
        return {rule.megatron: parameter_shape(rule) for rule in rules(spec) if rule.exported}

    monkeypatch.setattr(verification, "model_shapes", of_the_table)


def problems(path):
    return [found.text for found in verify(path) if found.level == "broken"]


def change_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_sound_checkpoint_keeps_every_promise(tiny_model, tmp_path):
    path = tiny_model(family="glm4_moe")
    convert(path, tmp_path / "ours", Options())
    convert(tmp_path / "ours", tmp_path / "back", Options())
    for place in (tmp_path / "ours", tmp_path / "back"):
        assert [str(found)[:8] for found in verify(place)] == ["ok      "] * 7


def test_what_cannot_be_looked_at_is_skipped_and_not_ok(tiny_model):
    path = tiny_model()
    change_config(path, rope_theta=500.0)
    (path / "tokenizer.json").unlink()
    assert {found.promise: found.text for found in verify(path) if found.level == "skipped"} == {
        "files are those of the manifest": "there is no manifest to compare with",
        "config.json is the one that the weights were written with": "there is no manifest to compare with",
        "the tokenizer's tokens are in the vocabulary": "there is no tokenizer.json",
    }
    assert str(next(verify(path))) == "skipped files are those of the manifest: there is no manifest to compare with"


def test_only_our_own_format_is_broken_without_its_manifest(tiny_model, tmp_path):
    path = tiny_model()
    convert(path, tmp_path / "ours", Options())
    (tmp_path / "ours/manifest.json").unlink()
    words = f"{tmp_path / 'ours'} has no manifest.json with hashes, which our own format always has; copy the checkpoint again"
    assert problems(tmp_path / "ours") == [words]
    assert next(verify(tmp_path / "ours", config=path)).text == "there is no manifest to compare with"
    (tmp_path / "ours/config.json").unlink()
    assert next(verify(tmp_path / "ours", config=path)).text == "there is no manifest to compare with"


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-1000])])
def test_promises_that_rest_on_a_broken_one_are_skipped(tiny_model, tmp_path, damage):
    convert(tiny_model(), tmp_path / "ours", Options())
    damage(next((tmp_path / "ours").glob("*.distcp")))
    lines = [str(found) for found in verify(tmp_path / "ours")]
    assert [line[:8] for line in lines] == ["BROKEN  "] * 2 + ["skipped "] * 5
    assert lines[-1].endswith(': because "files, names and config.json belong together" is broken')


def test_a_cut_file_is_told_once(tiny_model, tmp_path):
    convert(tiny_model(), tmp_path / "made", Options(to="hf", max_shard_bytes=60_000))
    (tmp_path / "made/manifest.json").unlink()
    cut(tmp_path / "made", "*.safetensors")
    found = list(verify(tmp_path / "made"))
    assert len(found) == 7 and len([one for one in found if one.level == "broken"]) == 1
    assert found[-1].text == 'because "files, names and config.json belong together" is broken'


def test_a_manifest_that_cannot_be_read_is_told_once(tiny_model, tmp_path):
    convert(tiny_model(), tmp_path / "made", Options(to="hf"))
    (tmp_path / "made/manifest.json").write_text("{")
    found = list(verify(tmp_path / "made"))
    assert [one.level == "broken" for one in found] == [True] + [False] * 6 and "manifest.json cannot be read" in found[0].text
    assert found[2].text == 'because "files are those of the manifest" is broken'


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"vocab": 3}}', '{"added_tokens": [3]}'])
def test_a_tokenizer_that_is_none_is_told(tiny_model, tmp_path, text):
    path = tiny_model()
    (path / "tokenizer.json").write_text(text)
    (told,) = problems(path)
    assert str(path / "tokenizer.json") in told and "take the tokenizer.json of these weights" in told


def test_a_path_without_checkpoint_is_one_sentence(tiny_model, tmp_path):
    for path in (tmp_path / "nothing", tiny_model() / "config.json"):
        with pytest.raises(UserError, match="is not a directory; give a Hugging Face directory or a checkpoint"):
            next(verify(path))


def test_of_a_run_the_newest_checkpoint_is_named(tiny_model, tmp_path):
    path = tiny_model()
    for step in ("step-000004", "step-999999", "step-1000000"):
        convert(path, tmp_path / "run/checkpoints" / step / "megatron", Options())
    (tmp_path / "run/checkpoints/step-2000000").mkdir()
    newest = tmp_path / "run/checkpoints/step-1000000"
    for place in (tmp_path / "run", tmp_path / "run/checkpoints"):
        words = f"{place} holds the checkpoints of a run; give one of them, the newest is {newest}$"
        with pytest.raises(UserError, match=words):
            next(verify(place))
        with pytest.raises(UserError, match=words):
            convert(place, tmp_path / "made", Options())


def test_a_saved_step_has_its_manifest_beside_its_files(tiny_model, tmp_path):
    path = tiny_model()
    convert(path, tmp_path / "step/megatron", Options())
    path.rename(tmp_path / "step/hf")
    assert problems(tmp_path / "step") == []
    (tmp_path / "step/megatron/more").touch()
    assert "more is there, but not in its manifest" in problems(tmp_path / "step")[0], "a run would not resume from it"
    (tmp_path / "step/megatron/more").unlink()
    flip(tmp_path / "step/megatron", "*.distcp")
    assert "is not that of its manifest" in problems(tmp_path / "step")[0]
    (tmp_path / "step/megatron/manifest.json").unlink()
    for place in (tmp_path / "step", tmp_path / "step/megatron"):
        assert "megatron has no manifest.json with hashes" in problems(place)[0]


def test_the_export_beside_a_steps_state_is_looked_at_too(tiny_model, tmp_path, read_all):
    path, step = tiny_model(), tmp_path / "step"
    convert(path, step / "megatron", Options())
    for name in ("config.json", "manifest.json"):
        (step / "megatron" / name).unlink()
    manifest.write(step / "megatron")
    save_hf(step / "hf", read_all(path), source=path, max_shard_bytes=60_000)
    lines = [str(found) for found in verify(step)]
    assert lines[:2] == ["ok      files are those of the manifest in megatron", "ok      files are those of the manifest in hf"]
    assert [line[:8] for line in lines] == ["ok      "] * 8
    change_config(step / "hf", rope_theta=500.0)
    assert any("gives rotary.theta = 500.0, the weights were written with 10000.0" in problem for problem in problems(step))
    flip(step / "hf", "*-00002-of-*.safetensors")
    for place in (step, step / "hf"):
        assert any("the content of model-00002-of-" in problem for problem in problems(place))
    (step / "hf/manifest.json").unlink()
    assert [str(found) for found in verify(step)][
        1
    ] == "skipped files are those of the manifest in hf: there is no manifest to compare with"


def cut(path, pattern):
    file = sorted(path.glob(pattern))[-1]
    file.write_bytes(file.read_bytes()[:-1000])


def flip(path, pattern):
    file = sorted(path.glob(pattern))[-1]
    content = bytearray(file.read_bytes())
    content[-600] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "cut off": (lambda path, pattern: cut(path, pattern), "bytes, its manifest says", "cut off"),
    "one bit": (lambda path, pattern: flip(path, pattern), "is not that of its manifest", None),
    "missing": (lambda path, pattern: sorted(path.glob(pattern))[-1].unlink(), "is in its manifest, but not there", "lacks the file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("to", "pattern"), [("megatron", "*.distcp"), ("hf", "*.safetensors")])
def test_damaged_files_are_named(tiny_model, tmp_path, damage, to, pattern):
    convert(tiny_model(), tmp_path / "made", Options(to=to, max_shard_bytes=60_000))
    change, words, without_manifest = DAMAGE[damage]
    change(tmp_path / "made", pattern)
    assert words in problems(tmp_path / "made")[0]
    (tmp_path / "made/manifest.json").unlink()
    if without_manifest is not None:
        assert any(without_manifest in problem for problem in problems(tmp_path / "made"))


SQUARE, LAYER = "model.layers.1.self_attn.o_proj.weight", "model.layers.1."


def changed(path, change):
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {name: tensor.contiguous() for name, tensor in change(tensors).items()}, path / "model.safetensors")


FITTING = {
    "wrong rope base": (lambda path: change_config(path, rope_theta=500.0), r"gives rotary\.theta = 500\.0, that in .* 10000\.0; take"),
    "transposed square": (
        lambda path: changed(path, lambda t: {SQUARE: t[SQUARE].T}),
        rf"{SQUARE} in .* has other numbers than .* gives; t",
    ),
    "duplicated layer": (
        lambda path: changed(path, lambda t: {name: t[name.replace(".1.", ".0.")].clone() for name in t if name.startswith(LAYER)}),
        r"model\.layers\.1\..* in .* has other numbers than .* gives; \d+ more differ",
    ),
    "one bit": (lambda path: flip(path, "*.safetensors"), r"model\..* has other numbers than"),
    "another seed": (
        lambda path: changed(path, lambda t: {name: t[name] + 1e-6 for name in t}),
        r"has other numbers than .*; \d+ more differ",
    ),
}


@pytest.mark.parametrize("damage", FITTING)
def test_damage_that_fits_is_seen_beside_a_sound_checkpoint(tiny_model, tmp_path, damage):
    path, (change, words) = tiny_model(), FITTING[damage]
    convert(path, tmp_path / "ours", Options())
    for sound in (tmp_path / "ours", path):
        assert [str(found) for found in verify(path, equal_to=sound)][-1] == f"ok      {verification.SAME}"
    change(path)
    assert problems(path) == []
    (problem,) = [found.text for found in verify(path, equal_to=tmp_path / "ours") if found.level == "broken"]
    assert re.search(words, problem), problem
    for equal_to, status in ([], 0), (["--equal-to", str(tmp_path / "ours")], 2):
        assert main(["verify-checkpoint", str(path), *equal_to]) == status


def test_prediction_layers_may_be_in_one_of_two_checkpoints(tiny_model, tmp_path):
    path = tiny_model(family="glm4_moe")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}, path / "model.safetensors")
    convert(path, tmp_path / "without", Options(drop_mtp=True))
    for one, other in ((path, tmp_path / "without"), (tmp_path / "without", path)):
        assert "broken" not in [found.level for found in verify(one, equal_to=other)]
    changed(path, lambda t: {"model.layers.2.eh_proj.weight": t["model.layers.2.eh_proj.weight"] + 1})
    convert(path, tmp_path / "with", Options())
    changed(path, lambda t: {"model.layers.2.eh_proj.weight": t["model.layers.2.eh_proj.weight"] + 1})
    assert "eh_proj.weight in" in [found.text for found in verify(path, equal_to=tmp_path / "with")][-1]


def test_a_checkpoint_to_be_equal_to_has_to_be_sound_itself(tiny_model, tmp_path):
    path = tiny_model()
    convert(path, tmp_path / "ours", Options())
    flip(tmp_path / "ours", "*.distcp")
    for place, words in ((tmp_path / "ours", "is not that of its manifest"), (tmp_path / "nowhere", "is not a directory")):
        with pytest.raises(UserError, match=words):
            next(verify(path, equal_to=place))
    other = tiny_model(layers=3, name="other")
    assert "gives num_layers = 2, that in" in [found.text for found in verify(path, equal_to=other)][-1]
    changed(path, lambda tensors: {SQUARE: tensors[SQUARE][1:]})
    assert [found.text for found in verify(path, equal_to=other)][-1] == f'because "{verification.TOGETHER}" is broken'
    assert len(problems(path)) == 1


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_a_swapped_config_is_named_field_by_field(tiny_model, tmp_path, to):
    convert(tiny_model(), tmp_path / "made", Options(to=to))
    change_config(tmp_path / "made", rope_theta=500000.0)
    assert problems(tmp_path / "made") == [
        f"config.json in {tmp_path / 'made'} gives rotary.theta = 500000.0, the weights were written with 10000.0; restore the config.json"
    ]
    change_config(tmp_path / "made", rope_theta=10000.0, num_hidden_layers=3)
    assert "layers.2" in problems(tmp_path / "made")[0]


def test_a_small_vocabulary_is_seen_where_rows_may_be_padding(tiny_model, tmp_path):
    convert(tiny_model(), tmp_path / "ours", Options())
    (tmp_path / "ours/manifest.json").unlink()
    change_config(tmp_path / "ours", vocab_size=31)
    assert any("has token 31, config.json's vocabulary ends at 30" in problem for problem in problems(tmp_path / "ours"))


def test_numbers_that_are_not_finite_are_counted(tiny_model):
    path = tiny_model()
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.input_layernorm.weight"
    tensors[name][3] = float("nan")
    save_file(tensors, path / "model.safetensors")
    assert problems(path) == [f"{name} in {path} has 1 of 64 numbers not finite; take another checkpoint"]


def test_a_dtype_that_config_does_not_say_is_named(tiny_model):
    path = tiny_model(torch_dtype="bfloat16")
    assert "says bfloat16, the weights in" in problems(path)[0]


def test_tied_embeddings_that_differ_are_named(tiny_model):
    path = tiny_model()
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path / "model.safetensors")
    assert "ties the embeddings, but lm_head.weight differs" in problems(path)[0]


def test_a_part_that_no_rank_saved_is_named(tiny_model, tmp_path):
    """Bridge#4189: chunks at the boundaries of shards were dropped."""
    convert(tiny_model(family="qwen3_moe"), tmp_path / "ours", Options())
    file = tmp_path / "ours/.metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"].chunks.pop(2)
    file.write_bytes(pickle.dumps(metadata))
    (tmp_path / "ours/manifest.json").unlink()
    assert "linear_fc1.weight of checkpoint" in problems(tmp_path / "ours")[1]
    assert "has 0 of 6,144 numbers" in problems(tmp_path / "ours")[1]


def test_pickles_that_name_anything_else_are_not_read(tiny_model, tmp_path):
    convert(tiny_model(), tmp_path / "ours", Options())
    (tmp_path / "ours/.metadata").write_bytes(pickle.dumps(print))
    (tmp_path / "ours/manifest.json").unlink()
    with pytest.raises(UserError, match=r"builtins\.print, which is no record of a checkpoint"):
        open_weights(tmp_path / "ours")
