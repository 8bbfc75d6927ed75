"""Architectures read from config.json."""

import json
import math

import pytest
import transformers

from megatron_rl.errors import UserError
from megatron_rl.models.read_spec import parse_model_spec, read_model_spec

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 33,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


# Of which transformers writes every key, also those that change nothing.
NEW_CONFIGS = (
    "MistralConfig",
    "MixtralConfig",
    "Qwen2MoeConfig",
    "Phi3Config",
    "GlmConfig",
    "Glm4Config",
    "Olmo2Config",
    "Olmo3Config",
    "Gemma3TextConfig",
    "GptOssConfig",
    "MinistralConfig",
)


def spec_of(**changes):
    return parse_model_spec(QWEN3 | changes, origin="config.json")


def test_qwen3():
    spec = spec_of()
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.ffn_hidden_size) == (4, 8, 4, 16, 96)
    assert (spec.tie_embeddings, spec.qk_norm, spec.qkv_bias, spec.norm_epsilon, spec.rotary.theta) == (True, True, False, 1e-5, 1e6)
    assert spec.padded_vocab_size(1) == 33
    assert spec.padded_vocab_size(4) == 36


def test_missing_head_dim_follows_the_family():
    assert spec_of(head_dim=None).head_dim == 128
    assert spec_of(head_dim=None, architectures=["LlamaForCausalLM"]).head_dim == 8


@pytest.mark.parametrize("name", ("Qwen3Config", "Qwen2Config", "LlamaConfig", "Qwen3MoeConfig", *NEW_CONFIGS))
def test_every_key_that_transformers_writes_is_accounted_for(name, tmp_path):
    config = getattr(transformers, name)()
    config.architectures = [name.replace("TextConfig", "Config").replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    assert spec.num_layers == config.num_hidden_layers
    assert (spec.moe is not None) == (name in ("MixtralConfig", "GptOssConfig") or "Moe" in name)


def test_published_files_are_read(model_spec):
    gpt_oss = model_spec("gpt-oss-120b")
    assert (gpt_oss.sliding_window, gpt_oss.sliding_layers, gpt_oss.activation_limit) == (128, tuple(range(0, 36, 2)), 7.0)
    assert (gpt_oss.moe.num_experts, gpt_oss.moe.num_experts_per_token, gpt_oss.moe.ffn_hidden_size) == (128, 4, 2880)
    assert gpt_oss.attention_sinks and gpt_oss.linear_bias and gpt_oss.qkv_bias
    phi4 = model_spec("Phi-4-mini-instruct")
    assert (phi4.rotary.kind, phi4.rotary.original_max_position_embeddings, phi4.rotary_dim) == ("longrope", 4096, 96)
    assert phi4.rotary.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert phi4.rotary.frequencies[-1] / phi4.rotary.long_frequencies[-1] == pytest.approx(47.77)
    kimi = model_spec("Kimi-K2-Instruct")
    assert (kimi.moe.num_experts, kimi.moe.num_groups, kimi.moe.routed_scaling_factor, kimi.num_layers) == (384, None, 2.827, 61)
    assert (kimi.rotary.theta, kimi.rotary.factor, kimi.mla.qk_head_dim) == (50000.0, 32.0, 192)


def test_both_spellings_of_rotary_scaling_agree():
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = spec_of(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = spec_of(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old.rotary == new.rotary
    assert (old.rotary.theta, old.rotary.kind, old.rotary.factor) == (5e5, "llama3", 32.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"architectures": ["MambaForCausalLM"]}, "names architecture MambaForCausalLM, supported are Qwen3ForCausalLM"),
        ({"architectures": None}, "names architecture none"),
        ({"hidden_act": "gelu"}, "sets hidden_act to 'gelu', only 'silu' is supported"),
        ({"use_sliding_window": True, "architectures": ["LlamaForCausalLM"]}, "sets use_sliding_window to True, which is not supported"),
        ({"attention_bias": True}, "sets attention_bias to True"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layers of type linear_attention"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding_attention without use_sliding_window"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 4 layers"),
        ({"partial_rotary_factor": 0.5}, "sets partial_rotary_factor to 0.5, needs 1.0"),
        ({"logit_scale": 0.5}, "has the key logit_scale = 0.5, whose effect on Qwen3ForCausalLM is not known"),
        ({"num_experts": 8}, "has the key num_experts = 8"),
        ({"use_mrope": True}, "sets use_mrope to True, only False is supported"),
        *(({"planted": value}, rf"has the key planted = {value!r}, whose".replace("[]", r"\[\]")) for value in (False, 0, 0.0, "", [], {})),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope type 'ntk', supported are default, linear, llama3, yarn, longrope"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}},
            "7 numbers in long_factor for 8 pairs of rotated channels",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type linear without factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "mystery": 2}}, "sets mystery = 2 for rope type default"),
        ({"vocab_size": "32"}, "has vocab_size = '32', needs a positive integer"),
        ({"num_key_value_heads": 3}, "8 attention heads for 3 key-value heads"),
        ({"architectures": 5}, r"config\.json has architectures = 5, needs a list of strings"),
        ({"architectures": "Qwen3ForCausalLM"}, "has architectures = 'Qwen3ForCausalLM', needs a list of strings"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "needs a list of strings"),
        ({"layer_types": 5}, "has layer_types = 5, needs a list of strings"),
        ({"layer_types": "full_attention"}, "needs a list of strings"),
        *(({"rms_norm_eps": value}, f"has rms_norm_eps = {value!r}, needs a positive number") for value in ("abc", -1, math.nan, True, 0)),
        *(({"rope_theta": value}, f"rope_theta = {value!r}, needs a positive number") for value in ("1e6", -5, math.nan, 0, 10**400)),
        ({"rope_theta": 1}, "has rope_theta = 1, needs a number above 1"),
        ({"rope_scaling": "yarn"}, "has rope_scaling = 'yarn', needs a JSON object"),
        ({"rope_parameters": 5}, "has rope_parameters = 5, needs a JSON object"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, r"rope_parameters in config\.json has rope_theta = '1e6'"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "rope_parameters and another rope_sc",
        ),
        ({"partial_rotary_factor": "half"}, "has partial_rotary_factor = 'half', needs a positive number"),
        *(({key: "false"}, f"has {key} = 'false', needs true or false") for key in ("tie_word_embeddings", "use_sliding_window")),
        ({"tie_word_embeddings": 1}, "has tie_word_embeddings = 1, needs true or false"),
        ({"head_dim": 15}, "rotates 15 of 15 channels, which turn in pairs"),
    ),
)
def test_what_is_not_supported_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        spec_of(**changes)


def test_keys_of_generation_and_training_do_not_describe_models():
    assert spec_of(do_sample=False, num_beams=1, temperature=0.6, gradient_checkpointing=False, use_mrope=False) == spec_of()


def test_null_is_absent():
    assert spec_of(planted=None) == spec_of()
    assert (spec_of(rms_norm_eps=None).norm_epsilon, spec_of(tie_word_embeddings=None).tie_embeddings) == (1e-6, False)
    assert spec_of(rope_theta=None, rope_scaling=None, rope_parameters=None).rotary == spec_of(rope_theta=1e4).rotary


def test_missing_and_malformed_files(tmp_path):
    with pytest.raises(UserError, match="not a directory"):
        read_model_spec(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="holds a list"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"model_type": "qwen3"}))
    assert read_model_spec(tmp_path) == spec_of()


def test_a_run_or_foreign_directory_is_told_from_a_model(tmp_path):
    for name, words in (("hf", "give .*/step/hf"), ("megatron", "convert the checkpoint first: megatron-rl convert .*/step TARGET")):
        step = tmp_path / name / "step"
        (step / name).mkdir(parents=True)
        (step / name / "config.json").touch()
        (step / ".metadata").touch()
        with pytest.raises(UserError, match=rf"has no config\.json; {words}"):
            read_model_spec(step)
    with pytest.raises(UserError, match="give a Hugging Face model directory"):
        read_model_spec(tmp_path)
