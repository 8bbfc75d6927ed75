"""Adapters merged and weights quantised, against a few lines of float64."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.convert.conversion import Options, convert
from megatron_rl.errors import UserError
from megatron_rl.weights.changes import quantise_blocks

QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def blocks_in_float64(weight, block=128):
    """Codes times scales, block by block."""
    result = weight.double().clone()
    for i in range(0, weight.shape[0], block):
        for j in range(0, weight.shape[1], block):
            part = result[i : i + block, j : j + block]
            scale = (part.abs().max() / 448).float().double()
            if scale:
                part.copy_((part / scale).float().to(torch.float8_e4m3fn).double() * scale)
    return result


@pytest.mark.parametrize("shape", [(128, 256), (130, 300), (7, 129), (300, 5)])
def test_blocks_are_quantised_each_with_its_own_scale(shape):
    weight = torch.randn(shape) * torch.linspace(0.1, 40, shape[1])
    codes, scales = quantise_blocks(weight)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128)) and scales.dtype is torch.float32
    spread = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    torch.testing.assert_close(codes.double() * spread, blocks_in_float64(weight), rtol=1e-6, atol=0)
    assert ((codes.double() * spread - weight.double()).abs() <= weight.double().abs() / 16 + spread / 512).all()


def test_a_block_of_zeros_stays_zero():
    """slime#2256: 0 / 0 made weights that are not numbers."""
    weight = torch.zeros(256, 256)
    weight[:128, :128] = 1.0
    codes, scales = quantise_blocks(weight)
    assert torch.isfinite(scales).all() and (scales > 0).all()
    assert torch.equal(codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1), weight)


@pytest.mark.parametrize("largest", [1.4e-45, 2e-43, 4e-43, 1e-40, 3e-36])
def test_a_block_of_the_smallest_numbers_stays_near(largest):
    weight = (torch.linspace(-1, 1, 128 * 128, dtype=torch.float64) * largest).float().view(128, 128)
    codes, scales = quantise_blocks(weight)
    error = (codes.double() * scales.double() - weight.double()).abs()
    # Half of the smallest code's step, in units of the smallest normal scale.
    assert (error <= torch.clamp_min(weight.double().abs() / 16, 2.0**-126 / 1024) * 1.001).all()


def test_a_quantised_target_says_what_it_is_and_is_read_again(tiny_model, tmp_path, read_all):
    path = tiny_model(family="glm4_moe")
    original = load_file(path / "model.safetensors")
    assert convert(path, tmp_path / "fp8", Options(quantise=True)).startswith("hf, ")
    stored = load_file(tmp_path / "fp8/model.safetensors")
    section = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "fp8" and section["weight_block_size"] == [128, 128]
    plain = {name for name in original if stored[name].dtype is torch.float32}
    assert {name for name in plain if original[name].dim() == 2} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.gate.weight",
    }
    assert set(section["modules_to_not_convert"]) == {"model.embed_tokens", "lm_head", "model.layers.1.mlp.gate"}
    assert all(torch.equal(stored[name], original[name]) for name in plain)
    again = read_all(tmp_path / "fp8")
    assert again.keys() == original.keys()
    for name in original.keys() - plain:
        assert stored[name].dtype is torch.float8_e4m3fn and f"{name}_scale_inv" in stored
        torch.testing.assert_close(again[name].double(), blocks_in_float64(original[name]), rtol=1e-6, atol=0)
    # And back: what the codes mean, without a word of quantisation.
    convert(tmp_path / "fp8", tmp_path / "plain", Options(to="hf"))
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert all(torch.equal(tensor, again[name]) for name, tensor in load_file(tmp_path / "plain/model.safetensors").items())
    file = tmp_path / "fp8/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch_dtype": "bfloat16"}))
    convert(tmp_path / "fp8", tmp_path / "half", Options(to="hf"))
    half = load_file(tmp_path / "half/model.safetensors")
    assert all(torch.equal(half[name], again[name].bfloat16()) for name in original.keys() - plain), "in the dtype of config.json"


def test_the_head_is_named_also_where_it_is_the_embedding(tiny_model, tmp_path):
    """Engines may make a module of it."""
    convert(tiny_model(), tmp_path / "fp8", Options(quantise=True))
    section = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert section["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]


def test_the_gate_of_a_shared_expert_is_a_router_too(tiny_model, tmp_path):
    convert(tiny_model(family="qwen2_moe"), tmp_path / "fp8", Options(quantise=True))
    stored = load_file(tmp_path / "fp8/model.safetensors")
    gates = [name for name in stored if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))]
    assert len(gates) >= 2 and all(stored[name].dtype is torch.float32 for name in gates)


def test_stacks_of_experts_are_left_alone(tiny_model, tmp_path):
    path = tiny_model(family="gpt_oss")
    convert(path, tmp_path / "fp8", Options(quantise=True))
    original, stored = (load_file(place / "model.safetensors") for place in (path, tmp_path / "fp8"))
    stacks = [name for name in original if ".experts." in name]
    assert len(stacks) == 8 and all(torch.equal(stored[name], original[name]) for name in stacks)
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype is torch.float8_e4m3fn
    section = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.experts" in section["modules_to_not_convert"]


def test_our_own_format_is_not_quantised(tiny_model, tmp_path):
    with pytest.raises(UserError, match="--quantize was given for a target in our own format"):
        convert(tiny_model(), tmp_path / "ours", Options(to="megatron", quantise=True))


def save_adapter(path, *, rank=4, shapes=None, **config):
    path.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for module, (rows, columns) in (shapes or {QUERY: (64, 64), DOWN: (64, 192)}).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none"} | config))
    return tensors


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (16 / 4, 16 / 4)),
        ({"use_rslora": True}, (16 / math.sqrt(4), 16 / math.sqrt(4))),
        ({"alpha_pattern": {"down_proj": 3}}, (16 / 4, 3 / 4)),
        # The end of a module's name, from a dot on: neither the middle of it nor of a part.
        ({"alpha_pattern": {"own_proj": 5, "mlp": 5, "mlp.down_proj": 3}}, (16 / 4, 3 / 4)),
        ({"r": 8, "rank_pattern": {".*_proj": 4}}, (16 / 4, 16 / 4)),
    ],
    ids=["alpha / r", "rsLoRA", "alpha by pattern", "alpha by the end of a name", "rank by pattern"],
)
def test_an_adapter_is_merged_with_its_scale(tiny_model, tmp_path, config, scales):
    path = tiny_model()
    adapter = save_adapter(tmp_path / "adapter", **config)
    convert(path, tmp_path / "merged", Options(to="hf", adapter=tmp_path / "adapter"))
    original, merged = (load_file(place / "model.safetensors") for place in (path, tmp_path / "merged"))
    changed = {f"{module}.weight": scale for module, scale in zip((QUERY, DOWN), scales, strict=True)}
    for name, tensor in original.items():
        if name not in changed:
            assert torch.equal(merged[name], tensor), name
            continue
        down, up = (adapter[f"base_model.model.{name.replace('.weight', f'.lora_{which}.weight')}"].double() for which in "AB")
        torch.testing.assert_close(merged[name].double(), tensor.double() + changed[name] * (up @ down), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "has use_dora = True, only False can be merged"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save = .*, only None can be merged"),
        ({"fan_in_fan_out": True}, "has fan_in_fan_out = True"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights = 'pissa', which changes the base"),
        ({"layer_replication": [[0, 2]]}, "has layer_replication = "),
        ({"r": 8}, "gives model.* rank 8, its tensors have 4"),
        ({"lora_alpha": None}, "has lora_alpha = None, needs a number"),
        ({"lora_alpha": True}, "has lora_alpha = True, needs a number"),
        ({"lora_alpha": math.nan}, "has lora_alpha = nan, needs a number that is finite"),
        ({"alpha_pattern": [1]}, r"has alpha_pattern = \[1\], needs a JSON object"),
        ({"alpha_pattern": {"(": 1}}, "has a pattern in alpha_pattern that is no regular expression"),
        ({"rank": 0}, r"of shape \(0, \d+\) with lora_B of \(\d+, 0\), needs \(rank, columns\)"),
        (
            {"shapes": {"model.layers.9.self_attn.q_proj": (64, 64)}},
            "changes model.layers.9.self_attn.q_proj.weight, which the model",
        ),
        ({"shapes": {QUERY: (64, 48)}}, r"of shape \(64, 48\), the model's is \(64, 64\)"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(tiny_model, tmp_path, options, words):
    save_adapter(tmp_path / "adapter", **options)
    with pytest.raises(UserError, match=words):
        convert(tiny_model(), tmp_path / "merged", Options(to="hf", adapter=tmp_path / "adapter"))
    assert not (tmp_path / "merged").exists()


def test_half_an_adapter_is_refused(tiny_model, tmp_path):
    tensors = save_adapter(tmp_path / "adapter")
    tensors.pop(f"base_model.model.{QUERY}.lora_B.weight")
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(UserError, match="needs pairs of lora_A and lora_B alone"):
        convert(tiny_model(), tmp_path / "merged", Options(to="hf", adapter=tmp_path / "adapter"))


def test_a_stored_tied_head_stays_equal_to_the_embedding(tiny_model, tmp_path, read_all):
    path = tiny_model()
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    convert(path, tmp_path / "rounded", Options(to="hf", dtype=torch.bfloat16))
    found = read_all(tmp_path / "rounded")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_layers_that_the_model_does_not_build_keep_their_dtype(tiny_model, tmp_path):
    path, name = tiny_model(family="glm4_moe"), "model.layers.2.eh_proj.weight"
    weights = load_file(path / "model.safetensors")
    save_file(weights | {name: torch.randn(64, 128)}, path / "model.safetensors")
    convert(path, tmp_path / "rounded", Options(to="hf", dtype=torch.bfloat16))
    stored = load_file(tmp_path / "rounded/model.safetensors")
    assert torch.equal(stored[name], load_file(path / "model.safetensors")[name]) and stored[name].dtype is torch.float32
    assert stored[QUERY + ".weight"].dtype is torch.bfloat16


def test_missing_layers_of_the_config_are_named(tiny_model, tmp_path):
    path = tiny_model(family="glm4_moe", num_nextn_predict_layers=1)
    for dropped in (False, True):
        said: list[str] = []
        convert(path, tmp_path / f"dropped {dropped}", Options(drop_mtp=dropped), say=said.append)
        assert sum("no layers of multi-token prediction" in words for words in said) == (0 if dropped else 1)
