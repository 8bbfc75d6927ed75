"""Runs from weights that engines cannot read: codes, and our own format. The engines start empty and serve what the trainer has read."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from scoring import score
from small_run import metrics, rl_arguments
from transformers import AutoModelForCausalLM

from megatron_rl.convert.conversion import Options, convert
from megatron_rl.doctor.tiny_models import write_tiny_model
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import Engine
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.types import Floats
from tests.tiny_families import FAMILIES


def assert_trained(run: Any, directory: Path) -> None:
    """Two steps, in each of which engines and trainer have the same weights."""
    assert run.wait() == 0, run.output
    assert re.search(r"note: engines cannot read the weights in .*: they start without, from .*/engine-model", run.output)
    steps = metrics(directory)
    assert steps[0]["weights/parity_mean"] <= 1e-4
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 for step in (1, 2))


TOKENS = np.arange(2, 14)


async def scores(model: Path, log: Path) -> Floats:
    """Log-probs of TOKENS by an SGLang server on the exported directory."""
    engine = Engine(server_arguments({}, model_path=model, device_kind="cpu", dtype="float32", seed=7), log_path=log)
    try:
        async with EngineClient(engine.start(), request_timeout_s=60) as client:
            return await score(client, TOKENS)
    finally:
        engine.stop()


@pytest.mark.slow
def test_training_and_evaluating_from_codes(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    convert(task / "model", tmp_path / "fp8", Options(quantise=True))
    words = rl_arguments(task, tmp_path / "rl", f"model.path={tmp_path / 'fp8'}", "run.num_steps=2", "weights.transport=broadcast")
    assert_trained(start(*words), tmp_path / "rl")
    exported = json.loads((tmp_path / "rl/huggingface/config.json").read_text())
    assert "quantization_config" not in exported
    first = metrics(tmp_path / "rl")[0]["eval/greedy/accuracy"]

    served = asyncio.run(scores(tmp_path / "rl/huggingface", tmp_path / "served.log"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "rl/huggingface", dtype=torch.float32)
    expected = model(torch.from_numpy(TOKENS)[None]).logits[0].log_softmax(-1)[:-1].gather(1, torch.from_numpy(TOKENS)[1:, None])[:, 0]
    np.testing.assert_allclose(served[1:], expected.detach(), atol=1e-4)

    data = f"eval.sets={{greedy: {{data: {task}/held_out.jsonl, sampling: {{temperature: 0}}}}}}"
    evaluation = start("eval", tmp_path / "fp8", "examples/arithmetic/grpo.yaml", data, "--out", tmp_path / "eval")
    assert evaluation.wait() == 0, evaluation.output
    assert re.search(rf"accuracy\W+{first:.4f} ", evaluation.output)
    assert json.loads((tmp_path / "eval/greedy.json").read_text())["estimates"]["accuracy"]["num"] == 50
    assert not list((tmp_path / "eval").glob("engine-weights*"))


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUPS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}}, "ignore": ["lm_head"]}


def write_int4(model: Path, target: Path) -> None:
    """`model` with four bits for each number of its linear layers and a scale for each 32 in a row, as Kimi-K2-Thinking is stored."""
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        groups = weight.unflatten(1, (-1, 32))
        scales = groups.abs().amax(-1) / 7
        codes = (groups / scales[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int8)
        tensors |= {f"{name}_packed": pack_to_int32(codes, 4), f"{name}_scale": scales, f"{name}_shape": torch.tensor(weight.shape)}
    write_changed(model, target, tensors, {"quant_method": "compressed-tensors", "format": "pack-quantized"} | GROUPS)


def write_changed(model: Path, target: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object]) -> None:
    shutil.copytree(model, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))


@pytest.mark.slow
def test_training_from_packed_integers(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    write_int4(task / "model", tmp_path / "int4")
    words = rl_arguments(task, tmp_path / "rl", f"model.path={tmp_path / 'int4'}", "run.num_steps=2", "weights.transport=broadcast")
    assert_trained(start(*words), tmp_path / "rl")


@pytest.mark.slow
def test_training_gpt_oss_from_mxfp4(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """Any bytes are codes of MXFP4, and any near 127 the powers of two by which they are multiplied."""
    config = json.loads((task / "model/config.json").read_text())
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    model = write_tiny_model(tmp_path / "gpt_oss", family=FAMILIES["gpt_oss"], vocab=config["vocab_size"], intermediate_size=64, **special)
    for file in (task / "model").glob("*token*"):
        shutil.copyfile(file, model / file.name)
    tensors, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in list(tensors):
        if name.endswith("sinks"):
            # SGLang keeps them in bfloat16.
            tensors[name] = tensors[name].bfloat16().float()
        elif name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            blocks, scales = (experts, rows, columns // 32, 16), (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(121, 124, scales, generator=generator, dtype=torch.uint8)
    write_changed(model, tmp_path / "mxfp4", tensors, {"quant_method": "mxfp4"})
    words = rl_arguments(task, tmp_path / "rl", f"model.path={tmp_path / 'mxfp4'}", "run.num_steps=2", "weights.transport=broadcast")
    assert_trained(start(*words), tmp_path / "rl")


@pytest.mark.slow
def test_training_from_our_own_format_through_the_disk(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    convert(task / "model", tmp_path / "ours", Options(to="megatron"))
    words = rl_arguments(task, tmp_path / "rl", f"model.path={tmp_path / 'ours'}", "run.num_steps=2", "weights.transport=disk")
    assert_trained(start(*words), tmp_path / "rl")
