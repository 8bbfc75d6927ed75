"""Every kind of damage has its words, and two checkpoints that compute different things are told apart."""

import dataclasses
import json
import pickle
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.convert import comparison, verification
from megatron_rl.convert.comparison import Outputs, difference, outputs, prompts
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.convert.sources import open_source
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
    return [found.problem for found in verify(path) if found.problem is not None]


def change_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_sound_checkpoint_keeps_every_promise(tiny_model, tmp_path):
    path = tiny_model(family="glm4_moe")
    convert(path, tmp_path / "ours", Options())
    convert(tmp_path / "ours", tmp_path / "back", Options())
    for place in (path, tmp_path / "ours", tmp_path / "back"):
        assert [found.problem for found in verify(place)] == [None] * 7


def test_a_saved_step_has_its_manifest_beside_its_files(tiny_model, tmp_path):
    path = tiny_model()
    convert(path, tmp_path / "step/megatron", Options())
    path.rename(tmp_path / "step/hf")
    assert problems(tmp_path / "step") == []
    flip(tmp_path / "step/megatron", "*.distcp")
    assert "its hash" in problems(tmp_path / "step")[0]
    (tmp_path / "step/megatron/manifest.json").unlink()
    assert next(verify(tmp_path / "step")).promise.startswith("there is no manifest")


def cut(path, pattern):
    file = sorted(path.glob(pattern))[-1]
    file.write_bytes(file.read_bytes()[:-1000])


def flip(path, pattern):
    file = sorted(path.glob(pattern))[-1]
    content = bytearray(file.read_bytes())
    content[-600] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "cut off": (lambda path, pattern: cut(path, pattern), "is cut off: it has"),
    "one bit": (lambda path, pattern: flip(path, pattern), "was changed since it was written: its hash"),
    "missing": (lambda path, pattern: sorted(path.glob(pattern))[-1].unlink(), "lacks the file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("to", "pattern"), [("megatron", "*.distcp"), ("hf", "*.safetensors")])
def test_damaged_files_are_named(tiny_model, tmp_path, damage, to, pattern):
    convert(tiny_model(), tmp_path / "made", Options(to=to, max_shard_bytes=60_000))
    change, words = DAMAGE[damage]
    change(tmp_path / "made", pattern)
    assert words in problems(tmp_path / "made")[0]
    (tmp_path / "made/manifest.json").unlink()
    if damage != "one bit":
        assert words.split(":")[0].removeprefix("is ") in problems(tmp_path / "made")[0], "also without a manifest"


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_a_swapped_config_is_named_field_by_field(tiny_model, tmp_path, to):
    convert(tiny_model(), tmp_path / "made", Options(to=to))
    change_config(tmp_path / "made", rope_theta=500000.0)
    assert problems(tmp_path / "made") == [
        f"config.json in {tmp_path / 'made'} gives rotary.theta = 500000.0, the weights were written with 10000.0; restore the config.json"
    ]
    change_config(tmp_path / "made", rope_theta=10000.0, num_hidden_layers=3)
    assert "layers.2" in problems(tmp_path / "made")[0]


def test_a_vocabulary_that_is_too_small_is_seen_where_rows_may_be_padding(tiny_model, tmp_path):
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
    assert (
        "linear_fc1.weight of checkpoint" in problems(tmp_path / "ours")[0] and "has 0 of 6,144 numbers" in problems(tmp_path / "ours")[0]
    )


def test_pickles_that_name_anything_else_are_not_read(tiny_model, tmp_path):
    convert(tiny_model(), tmp_path / "ours", Options())
    (tmp_path / "ours/.metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(UserError, match=r"builtins\.print, which is no record of a checkpoint"):
        open_source(tmp_path / "ours")


def test_prompts_reach_beyond_the_original_length(tiny_model):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    with closing(open_source(tiny_model(rope_scaling=scaling))) as source:
        assert max(len(ids) for ids in prompts(source.spec)) > 100
        assert all(int(ids.max()) < source.spec.vocab_size for ids in prompts(source.spec))


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_megatron_computes_what_transformers_does(tiny_model, tmp_path, one_rank, family):
    path = tiny_model(family=family, **(YARN if family == "qwen3" else {}))
    convert(path, tmp_path / "ours", Options())
    compared = comparison.compare(path, tmp_path / "ours")
    assert compared.same and compared.max_difference < 1e-4 and compared.same_argmax == 1.0
    assert compared.num_tokens == sum(map(len, prompts(open_source(path).spec)))


def test_a_directory_of_another_model_type_is_run_by_the_class_of_its_architecture(tiny_model, tmp_path, one_rank):
    """Kimi-K2 names code that is not run, and a type by which transformers would leave its experts at random numbers."""
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    path = tiny_model(family="deepseek_v3", model_type="kimi_k2", auto_map=code)
    convert(path, tmp_path / "ours", Options())
    assert comparison.compare(path, tmp_path / "ours").same


def test_transformers_never_fills_up_what_it_does_not_find(tiny_model, monkeypatch):
    path = tiny_model(family="deepseek_v3")
    given = comparison.transformers_config

    def of_another_type(source):
        config = given(source)
        config.model_type = "kimi_k2"
        return config

    monkeypatch.setattr(comparison, "transformers_config", of_another_type)
    with closing(open_source(path)) as source, pytest.raises(UserError, match=r"finds nothing for model\.layers\.1\.mlp\.experts\."):
        outputs(source, [torch.arange(3)])


def test_a_model_that_transformers_does_not_have_is_named(tiny_model):
    with closing(open_source(tiny_model())) as source, pytest.raises(UserError, match=r"is to be run, has no NewForCausalLM; install"):
        source.spec = dataclasses.replace(source.spec, architecture="NewForCausalLM")
        outputs(source, [torch.arange(3)])


def test_a_wrong_layer_is_named(tiny_model, tmp_path, one_rank):
    path = tiny_model(layers=3)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 1.5
    other = tiny_model(layers=3, name="other")
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    convert(other, tmp_path / "ours", Options())
    compared = comparison.compare(path, tmp_path / "ours")
    assert compared.layer == 1 and not compared.same
    assert "hidden states part behind layer 1" in compared.line()


def test_a_wrong_rope_base_shows_in_the_first_layer(tiny_model, tmp_path, one_rank):
    path = tiny_model()
    convert(path, tmp_path / "ours", Options())
    change_config(tmp_path / "ours", rope_theta=500.0)
    assert comparison.compare(path, tmp_path / "ours").layer == 0


def test_the_numbers_of_a_comparison():
    ids = torch.tensor([0, 1, 0])
    one = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]).log()
    other = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.9, 0.1]]).log()
    hidden = (torch.ones(3, 2), torch.ones(3, 2))
    shifted = (torch.ones(3, 2), torch.tensor([[1.0, 1.0], [1.0, 1.1], [1.0, 1.0]]))
    compared = difference([ids], [Outputs(one, hidden)], [Outputs(other, shifted)], tolerance=0.01)
    assert compared.max_difference == pytest.approx(1.0986123)
    assert compared.mean_difference == pytest.approx(1.0986123 / 2)
    assert compared.same_argmax == pytest.approx(2 / 3) and compared.layer == 1
    assert difference([ids], [Outputs(one, hidden)], [Outputs(one * float("nan"), hidden)], tolerance=0.01).max_difference == float("inf")
    early, undefined = (shifted[1], hidden[1]), (hidden[0], torch.full((3, 2), float("nan")))
    both = [Outputs(other, shifted), Outputs(other, early)]
    assert difference([ids, ids], both, [Outputs(other, hidden)] * 2, tolerance=0.01).layer == 0, "of all prompts"
    assert difference([ids], [Outputs(other, hidden)], [Outputs(other, undefined)], tolerance=0.01).layer == 1


def test_what_rounding_does_is_said_and_not_judged():
    ids, hidden = torch.tensor([0, 1]), (torch.ones(2, 2),)
    one, other = (torch.tensor(rows).log() for rows in ([[0.5, 0.5]] * 2, [[0.9, 0.1]] * 2))
    moved = difference([ids], [Outputs(one, hidden)], [Outputs(other, (-hidden[0],))], tolerance=None)
    assert moved.same and moved.layer is None and moved.max_difference == pytest.approx(1.6094379)
    assert "max 1.61e+00" in moved.line() and moved.line().endswith("that is what rounding the weights does")
    assert not difference([ids], [Outputs(one, hidden)], [Outputs(other * float("nan"), hidden)], tolerance=None).same


def test_what_nobody_loads_is_not_a_number(tiny_model, one_rank, monkeypatch):
    """Bridge#5262: models were compared whose parameters had never been loaded."""
    monkeypatch.setattr(comparison, "load_weights", lambda *arguments: None)
    with closing(open_source(tiny_model())) as source:
        source.quantised = True
        assert all(made.log_probs.isnan().all() for made in outputs(source, prompts(source.spec)))
