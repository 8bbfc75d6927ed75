"""A trainer from every form of a model directory has the same weights, and exports what it does not train as it found it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.convert.conversion import Options, convert
from megatron_rl.convert.verification import verify
from megatron_rl.training.trainer import Trainer

MTP = {"model.layers.2.eh_proj.weight": torch.randn(64, 128), "model.layers.2.mlp.experts.0.up_proj.weight": torch.randn(32, 64)}
FORMS = {
    "safetensors": Options(to="hf"),
    "our own format": Options(to="megatron"),
    "codes": Options(to="hf", quantise=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_trained_is_exported_whole_or_not_at_all(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, read_all: Any, form: str
) -> None:
    path = tiny_model(family="glm4_moe")
    save_file(load_file(path / "model.safetensors") | MTP, path / "model.safetensors")
    convert(path, tmp_path / "start", FORMS[form])
    want = read_all(tmp_path / "start")
    trainer = make_trainer(tmp_path / "start", {"policy_loss": "sft"})
    trainer.save_hf(tmp_path / "saved")
    trainer.save_hf(tmp_path / "for engines", durable=False)
    saved, engines = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "for engines"))
    assert saved.keys() == want.keys() and engines.keys() == want.keys() - MTP.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in want.items())
    assert json.loads((tmp_path / "saved/manifest.json").read_text())["stale_once_trained"] == sorted(MTP)
    assert str(next(verify(tmp_path / "saved"))) == "ok      files are those of the manifest"
    assert not (tmp_path / "for engines/manifest.json").exists()
    promised = [json.loads((tmp_path / name / "config.json").read_text())["num_nextn_predict_layers"] for name in ("saved", "for engines")]
    assert promised == [1, 0]
