"""Latent attention and sliding windows read from config.json, and megatron-core's fields for them."""

import dataclasses

import pytest
import torch
import transformers

from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import lacking_in_transformer_engine
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import MlaSpec
from megatron_rl.models.read_spec import parse_model_spec

LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
}


def window(config, *, architecture="Qwen3ForCausalLM"):
    spec = parse_model_spec(QWEN3 | {"architectures": [architecture]} | config, origin="config.json")
    return spec.sliding_window, spec.sliding_layers


def config_of(spec, attention):
    return transformer_config(spec, topology=TopologySettings(), dtype=torch.bfloat16, overrides={}, attention=attention)


def test_latent_attention_of_deepseek_v3():
    def mla(**changes):
        config = QWEN3 | LATENT | {"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 4}
        return parse_model_spec(config | changes, origin="config.json").mla

    assert mla() == MlaSpec(1536, 512, 128, 64, 128)
    assert mla().qk_head_dim == 192
    assert mla(q_lora_rank=None).q_lora_rank is None
    with pytest.raises(UserError, match=r"config\.json has kv_lora_rank = None, needs a positive integer"):
        mla(kv_lora_rank=None)


def test_layers_with_a_window_equal_transformers():
    cases = ({"max_window_layers": 2}, {"max_window_layers": 0}, {"max_window_layers": 4}, {})
    cases += ({"layer_types": ["sliding_attention", "full_attention"] * 2, "max_window_layers": 1},)
    for case in cases:
        config = {"use_sliding_window": True, "sliding_window": 128, "num_hidden_layers": 4, **case}
        expected = [index for index, kind in enumerate(transformers.Qwen2Config(**config).layer_types) if kind == "sliding_attention"]
        assert window(config) == ((128, tuple(expected)) if expected else (None, ())), case


def test_windows_that_are_off_and_windows_that_cannot_be():
    assert window({"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 0}) == (None, ())
    assert window({"layer_types": ["full_attention"] * 4}) == (None, ())
    with pytest.raises(UserError, match="layers of type chunked_attention, supported are"):
        window({"layer_types": ["chunked_attention"] * 4})
    with pytest.raises(UserError, match="3 layer_types for 4 layers"):
        window({"layer_types": ["full_attention"] * 3})
    with pytest.raises(UserError, match="sliding_attention without use_sliding_window"):
        window({"layer_types": ["sliding_attention"] * 4})
    with pytest.raises(UserError, match="not supported in this family"):
        window({"use_sliding_window": True}, architecture="LlamaForCausalLM")
    assert window({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 4}) == (None, ())
    mixed = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert window(mixed, architecture="MinistralForCausalLM") == (8, (0, 2))
    with pytest.raises(UserError, match="layers of type full_attention, but this family has its window in every layer"):
        window(mixed, architecture="MistralForCausalLM")
    assert window({"sliding_window": 8}, architecture="MistralForCausalLM") == (8, (0, 1, 2, 3))
    assert window({"sliding_window": None, "layer_types": ["full_attention"] * 4}, architecture="MistralForCausalLM") == (None, ())


@pytest.mark.parametrize("first", (0, 4))
@pytest.mark.parametrize(
    ("changes", "message"),
    (
        *(({"sliding_window": value}, f"has sliding_window = {value!r}, needs a positive integer") for value in (0, -3, "4096", 4096.0)),
        *(({"max_window_layers": value}, f"has max_window_layers = {value!r}, needs an integer >= 0") for value in (-1, "2", 2.0, True)),
        ({"use_sliding_window": "true"}, "has use_sliding_window = 'true', needs true or false"),
    ),
)
def test_windows_of_a_wrong_type_are_refused_without_layers_too(first, changes, message):
    with pytest.raises(UserError, match=message):
        window({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": first, **changes})


@pytest.mark.parametrize("value", ("false", 0))
def test_interleaving_is_a_boolean(value):
    config = QWEN3 | LATENT | {"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 4, "rope_interleave": value}
    with pytest.raises(UserError, match=f"has rope_interleave = {value!r}, needs true or false"):
        parse_model_spec(config, origin="config.json")


def test_windows_for_transformer_engine():
    spec = parse_model_spec(QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, origin="config.json")
    config = config_of(spec, "transformer_engine")
    assert (config.window_size, config.window_attn_skip_freq) == ((7, 0), [0, 0, 0, 1])
    assert config_of(spec, "torch").window_size is None


def test_yarn_for_transformer_engine_is_in_the_softmax():
    spec = parse_model_spec(QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, origin="config.json")
    assert spec.rotary.attention_factor == pytest.approx(1.1386294)
    assert config_of(spec, "transformer_engine").softmax_scale == pytest.approx(1.1386294**2 / 4)
    assert config_of(spec, "torch").softmax_scale is None
    half = dataclasses.replace(spec, rotary=dataclasses.replace(spec.rotary, frequencies=spec.rotary.frequencies[::2]))
    whole, part = (lacking_in_transformer_engine(each, cp=1, capability=(9, 0), fused=True) for each in (spec, half))
    assert whole is None and part is not None and "YaRN on a part of the channels" in part


def test_latent_fields_reach_megatron():
    config = {
        **QWEN3,
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 4,
        **LATENT,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0},
    }
    spec = parse_model_spec(config, origin="config.json")
    assert (spec.head_dim, spec.num_kv_heads, spec.rotary_dim, spec.value_dim, spec.rotary.interleaved) == (192, 4, 64, 128, True)
    built = transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides={})
    assert (built.q_lora_rank, built.kv_lora_rank, built.qk_head_dim, built.qk_pos_emb_head_dim, built.v_head_dim) == (
        1536,
        512,
        128,
        64,
        128,
    )
    assert (built.multi_latent_attention, built.qk_layernorm, built.rotary_scaling_factor, built.mscale_all_dim) == (True, True, 40.0, 1.0)
    with pytest.raises(UserError, match=r"kv_lora_rank is 8, but the checkpoint needs 512"):
        transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides={"kv_lora_rank": 8})
    with pytest.raises(UserError, match=r"apply_rope_fusion is True, but the checkpoint needs False"):
        transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides={"apply_rope_fusion": True})
