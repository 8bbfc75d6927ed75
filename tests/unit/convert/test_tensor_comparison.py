"""A target that does not have exactly what was asked for is noticed tensor by tensor, a quantised one by its scales, too."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.convert import tensor_comparison
from megatron_rl.convert.conversion import Options, convert, verify_conversion
from megatron_rl.weights import changes

KEY = "model.layers.0.self_attn.k_proj.weight"


def change_tensors(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(to="hf", dtype=torch.bfloat16),
        Options(dtype=torch.bfloat16, drop_mtp=True),
        Options(quantise=True),
        Options(quantise=True, dtype=torch.bfloat16),
    ],
    ids=["ours", "bfloat16", "ours in bfloat16 without mtp", "codes", "codes of bfloat16"],
)
def test_what_was_asked_for_is_found(tiny_model, tmp_path, options):
    path = tiny_model(family="glm4_moe")
    mtp = {"model.layers.2.eh_proj.weight": torch.randn(64, 128)}
    change_tensors(path, lambda tensors: tensors.update(mtp))
    convert(path, tmp_path / "made", options)
    found = verify_conversion(path, tmp_path / "made", options)
    num_tensors = len(load_file(path / "model.safetensors"))
    assert not found.wrong and found.num_tensors == num_tensors - (1 if options.drop_mtp else 0)
    assert (found.num_quantised > 10) == options.quantise == ("float8 moves" in str(found.check()))
    # Half a step of 32 below the largest code, 448, is the most.
    assert not options.quantise or 0.02 < found.largest_error <= 16 / 448 * 1.001


def test_the_error_of_float8_is_that_of_a_few_lines_of_float64(tiny_model, tmp_path, read_all):
    path = tiny_model(hidden=160)
    convert(path, tmp_path / "fp8", Options(quantise=True))
    got, want = read_all(tmp_path / "fp8", torch.float32), load_file(path / "model.safetensors")
    largest = 0.0
    for name, weight in want.items():
        if "proj" not in name:
            continue
        error = (got[name].double() - weight.double()).abs()
        for i in range(0, weight.shape[0], 128):
            for j in range(0, weight.shape[1], 128):
                part = slice(i, i + 128), slice(j, j + 128)
                largest = max(largest, (error[part].max() / weight[part].abs().max()).item())
    found = verify_conversion(path, tmp_path / "fp8", Options(quantise=True))
    assert found.largest_error == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "name", "change"),
    [
        (Options(quantise=True), f"{KEY}_scale_inv", lambda scale: scale * 1.001),
        (Options(quantise=True), KEY, lambda codes: codes.view(torch.uint8).bitwise_xor(1).view(torch.float8_e4m3fn)),
        (Options(quantise=True), "model.norm.weight", lambda weight: weight * 1.001),
        (Options(to="hf", dtype=torch.bfloat16), KEY, lambda weight: weight * 1.01),
        (Options(to="hf"), KEY, lambda weight: weight.roll(1, dims=0)),
        (Options(to="hf"), KEY, lambda weight: weight.bfloat16()),
    ],
    ids=["scale", "codes", "norm", "bfloat16", "rows", "rounded"],
)
def test_other_numbers_are_named(tiny_model, tmp_path, options, name, change):
    path = tiny_model()
    convert(path, tmp_path / "made", options)
    change_tensors(tmp_path / "made", lambda tensors: tensors.update({name: change(tensors[name])}))
    found = verify_conversion(path, tmp_path / "made", options)
    assert len(found.wrong) == 1
    assert f"the first: {name.removesuffix('_scale_inv')} in {tmp_path / 'made'} has other numbers than {path} gives" in str(found.check())


@pytest.mark.parametrize("wrong", [0.5, 1.07])
def test_a_rule_with_wrong_scales_is_noticed_on_both_sides(tiny_model, tmp_path, monkeypatch, wrong):
    path, quantise = tiny_model(), changes.quantise_blocks

    def quantise_wrongly(weight):
        codes, scales = quantise(weight)
        return [codes, scales * wrong]

    for module in (changes, tensor_comparison):
        monkeypatch.setattr(module, "quantise_blocks", quantise_wrongly)
    convert(path, tmp_path / "fp8", Options(quantise=True))
    found = verify_conversion(path, tmp_path / "fp8", Options(quantise=True))
    assert len(found.wrong) == 14 and "further from its weight than float8 has to be: its scales are wrong" in found.wrong[0]


@pytest.mark.parametrize(("moved", "near"), [(0.0624, True), (0.0626, False)])
def test_a_number_may_be_half_a_step_of_float8_away(moved, near):
    """Three bits behind the first one: half a step is a sixteenth of the smallest number that has it."""
    weight = torch.ones(3, 200)
    got = weight.clone()
    got[2, 150] += moved
    assert tensor_comparison.TensorComparison().add_quantised(weight, got) is near


def test_zeros_and_tiny_numbers_are_as_near_as_float8_has_them(tiny_model, tmp_path):
    path = tiny_model()

    def change(tensors):
        tensors[KEY] = torch.zeros_like(tensors[KEY])
        tensors[KEY.replace("k_proj", "q_proj")] *= torch.logspace(-12, 0, 64)
        tensors[KEY.replace("k_proj", "v_proj")] *= 1e-43

    change_tensors(path, change)
    convert(path, tmp_path / "fp8", Options(quantise=True))
    assert not verify_conversion(path, tmp_path / "fp8", Options(quantise=True)).wrong


def test_another_config_is_named_by_its_field(tiny_model, tmp_path):
    path = tiny_model()
    convert(path, tmp_path / "made", Options(to="hf"))
    file = tmp_path / "made/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 500000.0}))
    assert verify_conversion(path, tmp_path / "made", Options(to="hf")).wrong == [
        f"config.json in {tmp_path / 'made'} gives another rotary than that in {path}"
    ]
