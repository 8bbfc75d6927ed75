"""Tiny model directories of every family, made by code."""

import json
import string
from pathlib import Path
from typing import Any

# Tiny models of families beyond Qwen3 have few and narrow experts, but every feature: groups of experts to choose
# from, a bias that decides the choice, shared experts, a dense first layer.
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
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
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
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        **SIGMOID_EXPERTS,
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
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 48},
    "ministral": {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": 48},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "router_jitter_noise": 0.0,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 70},
    "glm": {"architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_theta": 500000.0,
        "sliding_window": 6,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": 6,
        # Small, so that some inputs are cut off.
        "swiglu_limit": 0.5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
}
CHARACTERS = string.digits + "+-*= ()?.:\n"


def write_tiny_model(
    path: Path,
    *,
    family: str = "qwen3",
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 32,
    tied: bool = True,
    **config: Any,
) -> Path:
    """Make the directory `path` and return `path`.

    Files are config.json, model.safetensors and a tokenizer of characters with <pad> 0 and <eos> 1.
    Weights are float32 of standard deviation 0.1, so that outputs depend on everything. `config`
    overrides keys of config.json. Two calls with the same arguments give the same files.
    """
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
    } | FAMILIES[family]
    values |= config
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
