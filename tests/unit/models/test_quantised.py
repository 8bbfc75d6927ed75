"""Quantised weights mean the numbers that a few lines of float64 say, block by block and code by code."""

import itertools
import json
import re
from contextlib import closing

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from layout_table import QUANTISED
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.checkpoints.hugging_face import HuggingFaceWeights, save_hf
from megatron_rl.checkpoints.quantised import Quantised, dequantise
from megatron_rl.errors import UserError
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import part_name, tensor_names

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}},
}


def change_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def quantise_fp8(weight, block=16):
    """Codes and scales, block by block."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // block), -(-columns // block))
    codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def meaning_of_fp8(codes, scales, block=16):
    result = codes.double()
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            result[i * block : (i + 1) * block, j * block : (j + 1) * block] *= scales[i, j].item()
    return result


def quantised_model(path):
    """Make the linear layers of a tiny model float8, and return what every tensor means now."""
    tensors, meaning = load_file(path / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        meaning[name] = tensor
        if tensor.dim() == 2 and "proj" in name:
            codes, scales = quantise_fp8(tensor)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            meaning[name] = meaning_of_fp8(codes, scales).float()
    save_file(tensors, path / "model.safetensors")
    change_config(path, quantization_config=FP8)
    return meaning


@pytest.mark.parametrize("shape", [(32, 48), (37, 21), (16, 16), (5, 40)])
def test_every_fp8_block_has_its_own_scale_also_at_ragged_edges(shape):
    weight = torch.randn(shape) * torch.linspace(0.01, 50, shape[0])[:, None]
    codes, scales = quantise_fp8(weight)
    quantised = Quantised("w.weight", "fp8", "w.weight", "w.weight_scale_inv", (16, 16))
    got = dequantise(quantised, codes, scales, dtype=torch.float32)
    assert torch.equal(got, meaning_of_fp8(codes, scales).float())
    rounded = dequantise(quantised, codes, scales, dtype=torch.bfloat16)
    assert torch.equal(rounded, got.bfloat16())
    powers = scales.to(torch.float8_e8m0fnu)
    assert torch.equal(dequantise(quantised, codes, powers, dtype=torch.float32), meaning_of_fp8(codes, powers.float()).float())


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_fp8_with_one_scale_for_the_tensor_or_a_row(per):
    weight = torch.randn(12, 20)
    scales = weight.abs().amax(dim=1, keepdim=True) / 448 if per == "row" else weight.abs().max().reshape(1) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    got = dequantise(Quantised("w.weight", "fp8", "w.weight", "w.weight_scale"), codes, scales, dtype=torch.float32)
    assert torch.equal(got, (codes.double() * scales.double()).float())


@pytest.mark.parametrize("family", [family for family, form in QUANTISED.items() if form == "fp8"])
def test_a_run_loads_the_numbers_that_fp8_codes_mean(tiny_model, family, tmp_path):
    path = tiny_model(family=family)
    meaning = quantised_model(path)
    with closing(HuggingFaceWeights(path)) as checkpoint:
        assert checkpoint.names() == meaning.keys()
        for name, tensor in meaning.items():
            assert torch.equal(checkpoint.read(name), tensor), name
    save_hf(tmp_path / "saved", meaning, source=path)
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
# How compressed-tensors writes float8: what the group says of weights, and the shape of a scale for each of which rows and columns.
COMPRESSED_FLOAT8 = {
    "channel": ({"strategy": "channel"}, lambda rows, columns: (1, columns), lambda scale: scale),
    "tensor": ({"strategy": "tensor"}, lambda rows, columns: (rows, columns), lambda scale: scale.reshape(1)),
    "block": ({"strategy": "block", "block_structure": [16, 16]}, lambda rows, columns: (16, 16), lambda scale: scale),
}


@pytest.mark.parametrize("strategy", COMPRESSED_FLOAT8)
def test_compressed_tensors_float8_is_codes_times_scales(tiny_model, strategy):
    path = tiny_model()
    entry, block_of, stored_shape = COMPRESSED_FLOAT8[strategy]
    tensors, meaning = load_file(path / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        meaning[name] = weight
        if "proj" in name:
            rows, columns = block_of(*weight.shape)
            blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
            scales = (blocks.abs().amax(dim=(1, 3)) / 448).bfloat16()
            spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors |= {name: codes, f"{name}_scale": stored_shape(scales)}
            meaning[name] = (codes.double() * spread.double()).float()
    save_file(tensors, path / "model.safetensors")
    group = {"targets": ["Linear"], "weights": FLOAT8 | entry, "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}
    section = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    change_config(path, quantization_config=section)
    with closing(HuggingFaceWeights(path)) as checkpoint:
        assert checkpoint.names() == meaning.keys()
        for name, weight in meaning.items():
            assert torch.equal(checkpoint.read(name), weight), name


def test_packed_int4_means_what_its_packer_was_given(tmp_path):
    values = torch.randint(-8, 8, (6, 60), dtype=torch.int8)
    scales = torch.rand(6, 2).bfloat16() + 0.5
    packed = pack_to_int32(values, 4)
    stored = {"w.weight_packed": packed, "w.weight_scale": scales, "w.weight_shape": torch.tensor([6, 60])}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": INT4}))
    with closing(HuggingFaceWeights(tmp_path)) as files:
        assert files.names() == {"w.weight"} and files.shape("w.weight") == (6, 60)
        got = files.read("w.weight")
    want = torch.tensor([[values[i, j].item() * scales[i, j // 32].double().item() for j in range(60)] for i in range(6)])
    assert torch.equal(got, want.float())


def test_mxfp4_means_what_transformers_says(tmp_path):
    codes = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (3, 10, 2), dtype=torch.uint8)
    want = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    save_file({"experts.gate_up_proj_blocks": codes, "experts.gate_up_proj_scales": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    with closing(HuggingFaceWeights(tmp_path)) as files:
        assert files.shape("experts.gate_up_proj") == tuple(want.shape) == (3, 64, 10)
        assert torch.equal(files.read("experts.gate_up_proj"), want)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def quantise_mxfp4(weight):
    """Blocks and scales of the experts' [in, out], as gpt-oss's files have them [out, in], and what they mean, number by number."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    codes = ((groups / 2 ** exponents[..., None])[..., None] - FP4).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    meaning = torch.empty_like(groups)
    for place in itertools.product(*map(range, groups.shape)):
        meaning[place] = FP4[codes[place]].item() * 2.0 ** exponents[place[:-1]].item()
    return blocks, (exponents + 127).to(torch.uint8), meaning.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("family", [family for family, form in QUANTISED.items() if form == "mxfp4"])
def test_a_run_loads_the_numbers_that_mxfp4_codes_mean(tiny_model, family):
    path = tiny_model(family=family, layers=1, hidden=32, num_local_experts=2, intermediate_size=32)
    tensors = load_file(path / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    for name in tensors.keys() - plain.keys():
        plain[f"{name}_blocks"], plain[f"{name}_scales"], tensors[name] = quantise_mxfp4(tensors[name])
    save_file(plain, path / "model.safetensors")
    change_config(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    with closing(HuggingFaceWeights(path)) as checkpoint:
        assert checkpoint.names() == tensor_names(read_model_spec(path))
        for name, tensor in tensors.items():
            parts = [(name, tensor)] if ".experts." not in name else [(part_name(name, expert), one) for expert, one in enumerate(tensor)]
            for part, meant in parts:
                assert torch.equal(checkpoint.read(part), meant), part


def save_changed(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


NAME = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{NAME}_scale_inv"), rf"{NAME} in .* is quantised \(F8_E4M3\) and has no scale beside it"),
        (lambda t: t.pop(NAME), rf"has the scale {NAME}_scale_inv without the tensor"),
        (
            lambda t: t.update({f"{NAME}_scale_inv": torch.ones(1, 4)}),
            r"has shape \(32, 64\) and its scale .* \(1, 4\), needs",
        ),
        # Weights that were made numbers again beside their old scales, and exponents in bytes.
        (lambda t: t.update({NAME: t[NAME].bfloat16()}), f"{NAME} in .* is stored as BF16, which fp8 is not made of; use"),
        (
            lambda t: t.update({f"{NAME}_scale_inv": t[f"{NAME}_scale_inv"].to(torch.float8_e8m0fnu).view(torch.uint8)}),
            f"{NAME}_scale_inv in .* is stored as U8, which fp8 is not made of",
        ),
        (lambda t: t.update({"w.weight_zero_point": torch.ones(1)}), "w.weight_zero_point, of a way to quantise that is not supported"),
    ],
)
def test_codes_and_scales_that_do_not_belong_together_are_named(tiny_model, change, words):
    path = tiny_model()
    quantised_model(path)
    save_changed(path, change)
    with pytest.raises(UserError, match=words), closing(HuggingFaceWeights(path)) as checkpoint:
        checkpoint.read(NAME)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "has the scale .* but its config.json has no quantization_config"),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "quantised by method FP8 of ModelOpt, supported are fp8,"),
        ({"quant_method": "gptq"}, "quantised by method gptq, supported are fp8, mxfp4 and compressed-tensors"),
        (
            INT4 | {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
            "compressed as pack-quantized .*'int', 8",
        ),
        (
            INT4 | {"format": "int-quantized", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
            "compressed as int-quantized .*'int', 8",
        ),
        (FP8 | {"weight_block_size": [16]}, r"has a block of \[16\], needs two positive integers"),
    ],
)
def test_other_ways_to_quantise_are_refused(tiny_model, config, words):
    path = tiny_model()
    quantised_model(path)
    change_config(path, quantization_config=config)
    with pytest.raises(UserError, match=words):
        HuggingFaceWeights(path)


def test_codes_are_never_taken_for_numbers(tiny_model):
    """Bridge#5851: raw codes that are cast look like weights."""
    path = tiny_model()
    save_changed(path, lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.float8_e4m3fn)}))
    with pytest.raises(UserError, match=f"{re.escape(NAME)} in .* is quantised"), closing(HuggingFaceWeights(path)) as checkpoint:
        checkpoint.read(NAME)


def test_a_cut_off_file_says_so(tiny_model):
    path = tiny_model()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="cut off"):
        HuggingFaceWeights(path)
