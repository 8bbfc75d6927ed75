"""Weights in every form in which they come: experts one by one or fused, layers that are left out, quantised ones."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints.hugging_face import MAX_SHARD_BYTES, HuggingFaceWeights, save_hf
from megatron_rl.checkpoints.manifest import entry_of
from megatron_rl.checkpoints.model_files import describe_hf
from megatron_rl.checkpoints.stored_weights import load_hf_weights
from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.build import build_model
from megatron_rl.models.hf_weights import export_hf_weights
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.read_spec import read_model_spec

FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3")


def change_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load(path: Path):
    spec = read_model_spec(path)
    config = transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides={})
    chunks = build_model(spec, config, attention="torch")
    load_hf_weights(chunks, spec, path)
    return chunks, spec


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("one_by_one", (True, False), ids=["one by one", "fused"])
def test_both_forms_of_experts_in_transformers_are_read(tiny_model, tmp_path, family, one_by_one):
    path = tiny_model(family=family)
    original = load_file(path / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved", save_original_format=one_by_one)
    fused = any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "saved" / "model.safetensors"))
    assert fused is not one_by_one
    with closing(HuggingFaceWeights(tmp_path / "saved")) as checkpoint:
        assert checkpoint.names() - {"lm_head.weight"} == original.keys() - {"lm_head.weight"}
        for name, tensor in original.items():
            assert torch.equal(checkpoint.read(name), tensor), name


def test_a_fused_tensor_of_another_shape_is_refused(tiny_model, one_rank):
    path = tiny_model(family="qwen3_moe")
    tensors = {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if "layers.0.mlp.experts" not in name}
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(4, 94, 64)
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(4, 64, 48)
    save_file(tensors, path / "model.safetensors")
    words = r"model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight .* has shape \(47, 64\), config\.json needs \(48, 64\)"
    with pytest.raises(UserError, match=words):
        load(path)


def test_config_names_the_dtype_of_most_weights_in_any_order(tiny_model, tmp_path):
    path = tiny_model()
    weights = {"matrix": torch.zeros(8, 8, dtype=torch.bfloat16), "bias": torch.zeros(8, dtype=torch.float32)}
    for number, names in enumerate((("matrix", "bias"), ("bias", "matrix"))):
        saved = tmp_path / str(number)
        save_hf(saved, ((name, weights[name]) for name in names), source=path, max_shard_bytes=128)
        config = json.loads((saved / "config.json").read_text())
        assert (config.get("dtype") or config["torch_dtype"]) == "bfloat16"
        assert len(list(saved.glob("*.safetensors"))) == 2


def test_lasting_directories_have_hashes_and_engines_get_none(tiny_model, tmp_path):
    path = tiny_model()
    tensors = load_file(path / "model.safetensors")
    for name, size in (("whole", MAX_SHARD_BYTES), ("shards", 60_000)):
        save_hf(tmp_path / name, tensors, source=path, stale={"b": torch.ones(3), "a": torch.ones(1)}.items(), max_shard_bytes=size)
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        files = {file.name: entry_of(file) for file in (tmp_path / name).iterdir() if file.name != "manifest.json"}
        assert manifest["files"] == files and manifest["stale_once_trained"] == ["a", "b"]
        assert manifest["model"] == json.loads(json.dumps(dataclasses.asdict(read_model_spec(tmp_path / name))))
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    save_hf(tmp_path / "for engines", tensors, source=path, durable=False)
    assert not (tmp_path / "for engines/manifest.json").exists()
    assert load_file(tmp_path / "for engines/model.safetensors").keys() == tensors.keys()


def test_an_export_names_no_code_which_it_does_not_have(tiny_model, tmp_path):
    """transformers, allowed to run code, would look for it, and not fall back on its own."""
    path = tiny_model(auto_map={"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"})
    (path / "modeling.py").write_text("raise SystemExit('ran')")
    save_hf(tmp_path / "saved", load_file(path / "model.safetensors"), source=path)
    describe_hf(tmp_path / "described", source=path, dtype=torch.float32)
    for name in ("saved", "described"):
        assert transformers.AutoConfig.from_pretrained(tmp_path / name, trust_remote_code=True).model_type == "qwen3"
        assert not list((tmp_path / name).glob("*.py"))
    change_config(tmp_path / "saved", auto_map={"AutoConfig": "modeling.Config"})
    with pytest.raises(OSError, match="modeling"):
        transformers.AutoConfig.from_pretrained(tmp_path / "saved", trust_remote_code=True)


def test_numbers_are_aligned_and_files_have_the_usual_mode(tiny_model, tmp_path):
    """Views of one memory, one of them by columns."""
    flat = torch.randn(4, 4)
    tensors = {"half": flat[0, :3].bfloat16(), "first": flat[1], "other": flat[2:].T}
    save_hf(tmp_path / "saved", tensors, source=tiny_model())
    file = tmp_path / "saved" / "model.safetensors"
    got = load_file(file)
    assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    header = json.loads(file.read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert [header[name]["data_offsets"] for name in ("first", "other", "half")] == [[0, 16], [16, 48], [48, 54]]
    assert file.stat().st_mode == (tmp_path / "saved" / "config.json").stat().st_mode


def test_multi_token_prediction_is_left_out_and_nothing_else(tiny_model, tmp_path, one_rank):
    path = tiny_model(family="glm4_moe")
    tensors = load_file(path / "model.safetensors")
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128), "model.layers.2.mlp.experts.0.up_proj.weight": torch.zeros(32, 64)}
    save_file(tensors | extra, path / "model.safetensors")
    chunks, spec = load(path)
    exported = dict(export_hf_weights(chunks, spec))
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())
    save_hf(tmp_path / "saved", exported, source=path)
    assert read_model_spec(tmp_path / "saved").num_mtp_layers == 0, "the saved directory must not promise layers that it lacks"
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"has 1 tensor that Glm4MoeForCausalLM does not, the first is model\.layers\.3\.eh_proj"):
        load(path)
