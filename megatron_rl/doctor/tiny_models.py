"""Tiny model directories, made by code."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Experts are few and narrow, with every feature: groups of experts to choose from, a bias that decides the choice,
# shared experts, a dense first layer.
SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
        **SIGMOID_EXPERTS,
    },
}
"""Keys of config.json of the families that the trial of a node trains."""
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
CHARACTERS = string.digits + "+-*= ()?.:\n"


def write_tiny_model(
    path: Path,
    *,
    family: Mapping[str, Any] | None = None,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 32,
    tied: bool = True,
    **config: Any,
) -> Path:
    """Make the directory `path` and return `path`.

    Files are config.json, model.safetensors and a tokenizer of characters with <pad> 0 and <eos> 1.
    Weights are float32 of standard deviation 0.1, so that outputs depend on everything. config.json
    has the keys of Qwen3, then those of `family` and `config`. Two calls with the same arguments
    give the same files.
    """
    path.mkdir()
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "head_dim": hidden // 4,
        "intermediate_size": 3 * hidden,
        "tie_word_embeddings": tied,
    }
    values = {**_QWEN3, **sizes, **(family or {}), **config}
    (path / "config.json").write_text(json.dumps(values, indent=2))
    _write_weights(path, seed)
    _write_tokenizer(path, vocab)
    return path


def _write_weights(path: Path, seed: int) -> None:
    # Imported here, because callers without a model should not wait for megatron-core.
    import torch
    from safetensors.torch import save_file

    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.models.weight_table import tensor_shapes

    generator, spec = torch.Generator().manual_seed(seed), read_model_spec(path)
    # Norms multiply by about 1.
    center = 0.0 if spec.zero_centered_norms else 1.0
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1 + (center if "norm" in name else 0.0) for name, shape in tensor_shapes(spec)
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(path: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = CHARACTERS + "".join(character for character in string.ascii_letters if character not in CHARACTERS)
    tokens = ["<pad>", "<eos>", *characters][:vocab]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(path)
