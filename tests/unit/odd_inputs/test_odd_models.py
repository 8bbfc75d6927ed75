"""Odd model directories."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Refuse = Callable[..., str]


def edit(path: Path, **keys: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def config(**keys: Any) -> Callable[[Path], None]:
    return lambda model: edit(model / "config.json", **keys)


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return damage


def without_end(model: Path) -> None:
    edit(model / "tokenizer_config.json", eos_token=None)


def end_beyond_vocabulary(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<eos>"]
    content["model"]["vocab"]["<eos>"] = 99
    (model / "tokenizer.json").write_text(json.dumps(content))


def digits_beyond_vocabulary(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["vocab"]["1"] = 77
    (model / "tokenizer.json").write_text(json.dumps(content))


def cut(name: str, by: int) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[:-by])

    return change


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
MODELS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "tokenizer without an end": (without_end, ["has no end-of-sequence token", "set eos_token"]),
    "end beyond the vocabulary": (end_beyond_vocabulary, ["token 99", "vocab_size 32", "tokenizer"]),
    "prompt beyond the vocabulary": (digits_beyond_vocabulary, ["rows.jsonl:1", "token 77", "vocab_size 32"]),
    "norm of NaN": (weights(lambda t: t[NORM].fill_(float("nan"))), [NORM, "not finite"]),
    "infinite embedding": (weights(lambda t: t[EMBEDDING][0].fill_(float("inf"))), [EMBEDDING, "not finite"]),
    "header of another width": (weights(lambda t: t.update({NORM: torch.ones(65)})), [NORM, "(65,)", "(64,)", "config.json"]),
    "a tensor is missing": (weights(lambda t: t.pop(NORM)), ["lacks 1 tensor", NORM]),
    "no model_type": (config(model_type=None), ["model_type = None", "Qwen3ForCausalLM", "config.json"]),
    "model_type a list": (config(model_type=["qwen3"]), ["model_type = ['qwen3']"]),
    "no config.json": (remove("config.json"), ["has no config.json"]),
    "empty config.json": (write("config.json", ""), ["config.json is not valid JSON"]),
    "config.json a list": (write("config.json", "[]"), ["config.json holds a list", "JSON object"]),
    "config.json not text": (write("config.json", b"\xff\xfe\x00"), ["config.json"]),
    "config.json nested": (write("config.json", '{"a":' * 10**5 + "1" + "}" * 10**5), ["config.json"]),
    "architecture unknown": (config(architectures=["GPT2LMHeadModel"]), ["GPT2LMHeadModel", "supported are"]),
    "architectures a word": (config(architectures="Qwen3ForCausalLM"), ["architectures", "list of strings"]),
    "no layers": (config(num_hidden_layers=0), ["num_hidden_layers = 0", "positive integer"]),
    "layers a word": (config(num_hidden_layers="two"), ["num_hidden_layers = 'two'"]),
    "layers true": (config(num_hidden_layers=True), ["num_hidden_layers = True"]),
    "width a fraction": (config(hidden_size=64.5), ["hidden_size = 64.5"]),
    "heads that do not divide": (config(num_key_value_heads=3), ["4 attention heads for 3 key-value heads"]),
    "epsilon negative": (config(rms_norm_eps=-1e-6), ["rms_norm_eps = -1e-06", "positive number"]),
    "epsilon a word": (config(rms_norm_eps="1e-6"), ["rms_norm_eps = '1e-6'"]),
    "theta zero": (config(rope_theta=0), ["rope_theta = 0"]),
    "rope of no kind": (config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), ["spiral"]),
    "rope a word": (config(rope_scaling="yarn"), ["rope_scaling", "yarn"]),
    "odd head": (config(head_dim=15), ["head"]),
    "tied a word": (config(tie_word_embeddings="yes"), ["tie_word_embeddings = 'yes'", "true or false"]),
    "key of nobody": (config(invented_scale=2), ["invented_scale = 2", "not known"]),
    "activation unknown": (config(hidden_act="relu"), ["hidden_act", "relu", "silu"]),
    "vocabulary negative": (config(vocab_size=-1), ["vocab_size = -1"]),
    "vocabulary larger than the weights": (config(vocab_size=64), [EMBEDDING, "(32, 64)", "(64, 64)"]),
    "quantisation of nobody": (config(quantization_config={"quant_method": "bitmap"}), ["bitmap"]),
    "quantisation a word": (config(quantization_config="fp8"), ["quantization_config"]),
    "no weights": (remove("model.safetensors"), ["has no model.safetensors"]),
    "weights cut off": (cut("model.safetensors", 100), ["cut off", "405,308 bytes", "405,408"]),
    "weights empty": (write("model.safetensors", b""), ["safetensors in", "cannot be read"]),
    "weights text": (write("model.safetensors", "version https://git-lfs.github.com/spec/v1"), ["safetensors"]),
    "header longer than the file": (write("model.safetensors", b"\xff" * 7 + b"\x00" + b"{}"), ["safetensors"]),
    "index not JSON": (write("model.safetensors.index.json", "{"), ["safetensors in", "cannot be read"]),
    "index a list": (write("model.safetensors.index.json", "[]"), ["safetensors in", "cannot be read"]),
    "index without a map": (write("model.safetensors.index.json", "{}"), ["weight_map"]),
    "index of numbers": (write("model.safetensors.index.json", '{"weight_map": {"a": 1}}'), ["index"]),
    "index of a file elsewhere": (
        write("model.safetensors.index.json", '{"weight_map": {"' + NORM + '": "gone.safetensors"}}'),
        ["model.safetensors", "index"],
    ),
    "no tokenizer": (remove("tokenizer.json"), ["has no tokenizer", "tokenizer.json"]),
    "tokenizer empty": (write("tokenizer.json", ""), ["cannot load a tokenizer"]),
    "tokenizer a list": (write("tokenizer.json", "[]"), ["cannot load a tokenizer"]),
    "tokenizer without a model": (write("tokenizer.json", "{}"), ["cannot load a tokenizer"]),
    "tokenizer of a later library": (
        lambda model: edit(model / "tokenizer.json", model={"type": "Tomorrow"}),
        ["cannot load a tokenizer", "untagged enum"],
    ),
    "tokenizer_config not JSON": (write("tokenizer_config.json", "{"), ["cannot load a tokenizer"]),
    "tokenizer_config a list": (write("tokenizer_config.json", "[]"), ["cannot load a tokenizer"]),
    "manifest not JSON": (write("manifest.json", "{"), ["manifest.json"]),
    "manifest nested": (write("manifest.json", '{"a":' * 10**5), ["manifest.json cannot be read (maximum recursion"]),
    "manifest of a list": (write("manifest.json", '{"model": [1]}'), ["manifest.json cannot be read", "its model is no JSON object"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_directories(name: str, words: list[str], model: Path, refuse: Refuse) -> None:
    change, parts = MODELS[name]
    change(model)
    assert len(refuse(words, *parts)) < 1500
