"""Fixtures shared by all tests: a tiny Qwen3 model directory, made by code."""

import json
import signal
import string
from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Take SIGINT even where a shell has started the tests in the background and so told them, and all their children, to ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


TINY_CHARACTERS = string.digits + "+-*= ()?.:\n"


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Make a Qwen3 directory: `tiny_model(seed=0, hidden=64, layers=2, vocab=32, tied=True, **config)` returns its path.

    config.json, model.safetensors (float32, standard deviation 0.1 so that outputs depend on everything) and a character
    tokenizer with <pad> 0 and <eos> 1. `config` overrides keys of config.json. Two calls with the same arguments give the same files.
    """

    def make(
        *, seed: int = 0, hidden: int = 64, layers: int = 2, vocab: int = 32, tied: bool = True, name: str = "model", **config: object
    ) -> Path:
        path = tmp_path / name
        path.mkdir()
        values = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "intermediate_size": 3 * hidden,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        } | config
        (path / "config.json").write_text(json.dumps(values, indent=2))
        _write_weights(path, seed)
        _write_tokenizer(path, vocab)
        return path

    return make


def _write_weights(path: Path, seed: int) -> None:
    # Imported here: tests of rooms that need no model should not wait for megatron-core.
    import torch
    from safetensors.torch import save_file

    from megatron_rl.models.spec import read_model_spec
    from megatron_rl.models.weights import hf_shapes

    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0)
        for name, shape in hf_shapes(read_model_spec(path)).items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(path: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = TINY_CHARACTERS + "".join(character for character in string.ascii_letters if character not in TINY_CHARACTERS)
    tokens = ["<pad>", "<eos>", *characters][:vocab]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(path)
