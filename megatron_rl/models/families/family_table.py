"""The supported families of models by the architecture name in `config.json`, and the refused ones."""

from collections.abc import Mapping

from megatron_rl.models.attention.rotary import REFUSED_KINDS
from megatron_rl.models.families.family import DENSE_LAYOUTS, MIXTURE_LAYOUTS, Family
from megatron_rl.models.model_spec import TensorNames

_OLMO_NAMES = TensorNames(
    attention_input_norm=None,
    attention_output_norm="post_attention_layernorm",
    mlp_input_norm=None,
    mlp_output_norm="post_feedforward_layernorm",
)
_FAMILIES = (
    # Norms on queries and keys, and optional sliding windows.
    Family(
        architecture="Qwen3ForCausalLM",
        proved=DENSE_LAYOUTS | {"sync", "quantised source"},
        qk_norm=True,
        windows="switched",
    ),
    # Qwen2 and Qwen2.5: biases on queries, keys and values, and optional sliding windows.
    Family(architecture="Qwen2ForCausalLM", proved=DENSE_LAYOUTS | {"sync"}, qkv_bias=True, windows="switched"),
    # Llama 2 and 3: the reference for the descriptions of the other families.
    Family(
        architecture="LlamaForCausalLM",
        proved=DENSE_LAYOUTS | {"sync"},
        # A key in SmolLM2's files.
        ignored=frozenset(["is_llama_config"]),
        fixed={"rope_interleaved": False},
    ),
    # Mistral 7B and its successors: Llama with a sliding window in every layer unless it is null.
    Family(architecture="MistralForCausalLM", proved=DENSE_LAYOUTS | {"sync"}, windows="everywhere"),
    # Mistral with a window in the layers named by config.json, by default in all. SGLang has no
    # Ministral model of its own and runs transformers' model.
    Family(architecture="MinistralForCausalLM", proved=DENSE_LAYOUTS | {"sync"}, windows="given"),
    # Phi-3 and Phi-4: Llama with q, k and v in one tensor, gate and up in another, optional windows.
    Family(
        architecture="Phi3ForCausalLM",
        proved=DENSE_LAYOUTS | {"sync"},
        partly_rotated=True,
        windows="everywhere",
        # Read with longrope; meaningless without longrope.
        ignored=frozenset(["original_max_position_embeddings"]),
        fixed={"embd_pdrop": 0.0, "resid_pdrop": 0.0, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
        names=TensorNames(qkv="qkv_proj", gate_up="gate_up_proj"),
    ),
    # GLM-4 9B of 2024: half of the channels rotated in neighbouring pairs, gate and up in one tensor.
    Family(
        architecture="GlmForCausalLM",
        proved=DENSE_LAYOUTS,
        not_synced="SGLang has no model of its own for it, and refuses that of transformers 5: "
        "Unsupported TP style 'colwise_gather_output'",
        qkv_bias=None,
        partly_rotated=True,
        rotary_interleaved=True,
        names=TensorNames(gate_up="gate_up_proj"),
    ),
    # GLM-4 (0414): also norms behind attention and MLP.
    Family(
        architecture="Glm4ForCausalLM",
        proved=DENSE_LAYOUTS | {"sync"},
        qkv_bias=None,
        partly_rotated=True,
        rotary_interleaved=True,
        names=TensorNames(attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm", gate_up="gate_up_proj"),
    ),
    # Norms behind attention and MLP, and one norm over the queries (the keys) of all heads.
    Family(
        architecture="Olmo2ForCausalLM",
        proved=DENSE_LAYOUTS | {"sync"},
        qk_norm=True,
        qk_norm_over_heads=True,
        names=_OLMO_NAMES,
    ),
    # OLMo-2 with a window in three of four layers, which keep the default rotary embedding.
    Family(
        architecture="Olmo3ForCausalLM",
        proved=DENSE_LAYOUTS | {"sync"},
        qk_norm=True,
        qk_norm_over_heads=True,
        # In the older spelling transformers 5 takes this base for layers with a window whatever the file says, transformers 4 the file's.
        fixed={"rope_theta": 500000.0},
        windows="given",
        window_theta_key="rope_theta",
        names=_OLMO_NAMES,
    ),
    # Text alone: four norms of 1 + weight, scaled embedding, GELU, and layers with a window, rotated by another base.
    Family(
        architecture="Gemma3ForCausalLM",
        config_class="Gemma3TextConfig",
        # Proved with a tied head, as in published models. SGLang omits a separate head, and a run's parity
        # probe refuses this.
        proved=DENSE_LAYOUTS | {"sync"},
        qk_norm=True,
        activation="gelu_pytorch_tanh",
        zero_centered_norms=True,
        scaled_embedding=True,
        query_scalar_key="query_pre_attn_scalar",
        windows="given",
        window_theta_key="rope_local_base_freq",
        # Layer types without `layer_types` follow from the pattern, in transformers' class. The class writes the
        # pattern under its private name beside the resulting types.
        ignored=frozenset(["_sliding_window_pattern", "cache_implementation", "sliding_window_pattern"]),
        # Softcaps are Gemma-2's; Gemma-3 has null there.
        fixed={
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        names=TensorNames(
            attention_output_norm="post_attention_layernorm",
            mlp_input_norm="pre_feedforward_layernorm",
            mlp_output_norm="post_feedforward_layernorm",
        ),
    ),
    # Qwen3 with experts in every layer, chosen by softmax scores.
    Family(
        architecture="Qwen3MoeForCausalLM",
        proved=MIXTURE_LAYOUTS | {"sync", "quantised source"},
        qk_norm=True,
        router="softmax",
        # Qwen3-Coder's files have keys about features of other families, absent from this one.
        fixed={"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    ),
    # Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in every layer and a shared expert behind a gate.
    Family(
        architecture="Qwen2MoeForCausalLM",
        proved=MIXTURE_LAYOUTS | {"sync"},
        qkv_bias=True,
        router="softmax",
        shared_gate=True,
        fixed={"qkv_bias": True},
        names=TensorNames(shared_experts="shared_expert"),
    ),
    # Mistral with experts in every layer, whose taken scores sum to 1.
    Family(
        architecture="MixtralForCausalLM",
        proved=MIXTURE_LAYOUTS | {"sync"},
        windows="everywhere",
        router="softmax",
        expert_width_key="intermediate_size",
        normalize_top_k=True,
        # Noise on the router's input would differ between two runs.
        fixed={"router_jitter_noise": 0.0},
        names=TensorNames(mixture="block_sparse_moe", expert=("w1", "w3", "w2")),
    ),
    # GLM-4.5 and GLM-4.5-Air: sigmoid router with a bias, shared experts, dense first layers, half of the channels rotated.
    Family(
        architecture="Glm4MoeForCausalLM",
        proved=MIXTURE_LAYOUTS | {"sync", "quantised source"},
        qkv_bias=None,
        qk_norm=None,
        router="sigmoid",
        partly_rotated=True,
    ),
    # Attention sinks, windows in every other layer, YaRN, and experts of a clamped SwiGLU with biases, as is every linear layer.
    Family(
        architecture="GptOssForCausalLM",
        proved=MIXTURE_LAYOUTS | {"quantised source", "sync"},
        qkv_bias=True,
        linear_bias=True,
        attention_sinks=True,
        scaled_by_default=True,
        windows="given",
        router="softmax",
        expert_width_key="intermediate_size",
        normalize_top_k=True,
        activation="clamped_swiglu",
        activation_limit_key="swiglu_limit",
        # Repetitions of num_experts_per_tok and of the length before YaRN.
        ignored=frozenset(["experts_per_token", "initial_context_length"]),
        fixed={"attention_bias": True, "hidden_act": "silu", "swiglu_alpha": 1.702},
        names=TensorNames(router="router", stacked_experts=True),
    ),
    # V3 and R1: latent attention, sigmoid router with a bias and groups of experts, shared experts, dense first layers.
    Family(architecture="DeepseekV3ForCausalLM", proved=MIXTURE_LAYOUTS | {"sync", "quantised source"}, mla=True, router="sigmoid"),
)
FAMILIES: Mapping[str, Family] = {family.architecture: family for family in _FAMILIES}

_GATED_DELTA_NET = (
    "gated delta nets of megatron-core take packed sequences from release 0.18 on, by flash-linear-attention's GPU kernels alone, and "
    "none is built here yet"
)
REFUSED: Mapping[str, str] = {
    "Gemma2ForCausalLM": "attention here has no softcap on scores",
    "Gemma3ForConditionalGeneration": "only text is trained: save the text model as Gemma3ForCausalLM first, as the README beside the "
    "families shows",
    "Qwen3NextForCausalLM": _GATED_DELTA_NET,
    "Qwen3_5ForCausalLM": _GATED_DELTA_NET,
    "Qwen3_5MoeForCausalLM": _GATED_DELTA_NET,
    "DeepseekV32ForCausalLM": "attention here is not sparse",
}
"""Architectures that are asked for and cannot be trained, and why."""

_LAYOUTS = ("tp", "pp", "cp", "ep")


def printed_table() -> list[str]:
    """Return lines: proved features of each family, families without a sync, and refusals with reasons."""
    rows = [["architecture", "load", "sync", "export", "quantised source", *_LAYOUTS, "equals transformers"]]
    for family in _FAMILIES:
        proved = {feature: "yes" if feature in family.proved else "no" for feature in ("sync", "quantised source", *_LAYOUTS)}
        if family.router is None:
            proved["ep"] = "-"
        # Loading, export and equality are tested for every family.
        layouts = (proved[size] for size in _LAYOUTS)
        rows.append([family.architecture, "yes", proved["sync"], "yes", proved["quantised source"], *layouts, "yes"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    table = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    not_synced = [f"{family.architecture}: {family.not_synced}" for family in _FAMILIES if family.not_synced is not None]
    refused = [f"{architecture}: {reason}" for architecture, reason in REFUSED.items()]
    refused += [f"rope type {kind}: {reason}" for kind, reason in REFUSED_KINDS.items()]
    return [*table, "", "No sync into SGLang on a CPU:", *not_synced, "", "Refused:", *refused]
