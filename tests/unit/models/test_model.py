"""The Megatron model against transformers' with the same weights, and weights there and back, on one rank."""

import itertools
import json
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints.hugging_face import HuggingFaceWeights, save_hf
from megatron_rl.checkpoints.stored_weights import load_hf_weights
from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.build import build_model, forward_selected
from megatron_rl.models.families import family_table
from megatron_rl.models.hf_weights import export_hf_weights
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.packed_sequences import packed_sequences
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import rules, tensor_shapes

LENGTHS = (9, 10, 1, 10, 80, 3, 12)
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = Path(__file__).parents[2] / "data" / "configs"
# Widths and numbers of layers, experts and tokens are small, everything else is as published. transformers has no class of its name.
KIMI_K2 = {
    key: value
    for key, value in json.loads((CONFIGS / "Kimi-K2-Instruct.json").read_text()).items()
    if key not in ("auto_map", "quantization_config")
}
KIMI_K2 |= {"model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32, "n_routed_experts": 12}
KIMI_K2 |= {"intermediate_size": 144, "moe_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
KIMI_K2 |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "pad_token_id": 0}
FAMILIES = {
    "qwen3 tied": {},
    "qwen3 untied, odd vocabulary": {"tied": False, "vocab": 33},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama, scaled rotary": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 500.0, **LLAMA3_SCALING},
        "tied": False,
    },
    "llama, transformers 4 spelling": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "qwen3, yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "qwen2, yarn, transformers 5 spelling": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "qwen3, sliding window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen2, sliding window by layer types": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 70,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3 moe": {"family": "qwen3_moe"},
    "qwen3 moe, weights as they are": {"family": "qwen3_moe", "norm_topk_prob": False},
    "glm 4.5": {"family": "glm4_moe"},
    "glm 4.5 air, one group, whole rotary": {
        "family": "glm4_moe",
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "partial_rotary_factor": 1.0,
        "num_experts_per_tok": 2,
    },
    "deepseek v3": {"family": "deepseek_v3"},
    "mistral": {"family": "mistral", "sliding_window": 5},
    "mistral without a window": {"family": "mistral", "sliding_window": None, "tied": False},
    "ministral": {"family": "ministral", "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"family": "mixtral"},
    "qwen2 moe": {"family": "qwen2_moe", "tied": False},
    "phi 3": {"family": "phi3"},
    "phi 3, longrope": {
        "family": "phi3",
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0], "long_factor": [1.1, 2.0, 4.0, 6.0, 8.0, 9.0]},
    },
    "phi 4": {"family": "phi3", "partial_rotary_factor": 1.0, "sliding_window": None, "tied": False},
    "glm 4 of 2024": {"family": "glm"},
    "glm 4": {"family": "glm4", "tied": False},
    "olmo 2": {"family": "olmo2"},
    "olmo 3": {"family": "olmo3", "layers": 4},
    "olmo 3, yarn": {
        "family": "olmo3",
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "gemma 3": {"family": "gemma3"},
    "gemma 3, transformers 5 spelling": {
        "family": "gemma3",
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "gpt-oss": {"family": "gpt_oss", "tied": False},
    "kimi k2": {"family": "deepseek_v3", **KIMI_K2},
    "deepseek v3 without a latent of queries": {"family": "deepseek_v3", "q_lora_rank": None, "first_k_dense_replace": 0},
}


def load(path, **overrides):
    spec = read_model_spec(path)
    config = transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides=overrides)
    chunks = build_model(spec, config, attention="torch")
    load_hf_weights(chunks, spec, path)
    return spec, chunks


def packed_input(vocab, lengths=LENGTHS):
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    input_ids = torch.randint(0, vocab, (1, int(cu_seqlens[-1])), generator=torch.Generator().manual_seed(1))
    return cu_seqlens, input_ids, packed_sequences(cu_seqlens)


def test_every_family_is_compared_with_transformers(tiny_model):
    paths = [tiny_model(name=f"model{index}", **config) for index, config in enumerate(FAMILIES.values())]
    assert {read_model_spec(path).architecture for path in paths} == family_table.FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tiny_model, one_rank):
    path = tiny_model(**FAMILIES[family])
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    spec, (model,) = load(path)
    cu_seqlens, input_ids, packed = packed_input(spec.vocab_size)
    log_probs = model(input_ids, packed.positions[None], None, packed_seq_params=packed).double().log_softmax(-1)
    for start, stop in itertools.pairwise(cu_seqlens):
        with torch.no_grad():
            expected = reference(input_ids[:, start:stop]).logits.log_softmax(-1)
        assert expected.std() > 0.1, "the reference must depend on its input for this test to be able to fail"
        torch.testing.assert_close(log_probs[:, start:stop], expected, rtol=0, atol=1e-5)
        assert torch.equal(log_probs[:, start:stop].argmax(-1), expected.argmax(-1))


def test_gradients_equal_transformers(tiny_model, one_rank):
    # transformers gives the embedding of a padding token no gradient.
    path = tiny_model(tied=True, pad_token_id=None)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    spec, (model,) = load(path)
    cu_seqlens, input_ids, packed = packed_input(spec.vocab_size)
    weights = torch.randn(input_ids.shape[1], spec.vocab_size, generator=torch.Generator().manual_seed(2))
    logits = model(input_ids, packed.positions[None], None, packed_seq_params=packed)
    (logits[0].log_softmax(-1) * weights).sum().backward()
    for start, stop in itertools.pairwise(cu_seqlens):
        (reference(input_ids[:, start:stop]).logits[0].log_softmax(-1) * weights[start:stop].double()).sum().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.grad
    for name, gradient in export_hf_weights([model], spec):
        scale = expected[name].abs().max()
        torch.testing.assert_close(gradient.double() / scale, expected[name] / scale, rtol=0, atol=1e-5)


def test_full_recompute_gives_the_same_gradients(tiny_model, one_rank):
    path = tiny_model()
    gradients = []
    for overrides in ({}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}):
        _, (model,) = load(path, **overrides)
        _, input_ids, packed = packed_input(32)
        model.train()
        model(input_ids, packed.positions[None], None, packed_seq_params=packed).square().mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0


def test_chosen_positions_get_the_same_logits(tiny_model, one_rank):
    spec, (model,) = load(tiny_model())
    _, input_ids, packed = packed_input(spec.vocab_size)
    positions = torch.tensor([0, 5, 5, 124, 30])
    whole = model(input_ids, packed.positions[None], None, packed_seq_params=packed)
    hidden = forward_selected(model, input_ids, packed.positions[None], packed, positions)
    targets = torch.tensor([3, 1, 31, 0, 7])
    chosen = model.token_statistics(hidden, targets=targets, temperature=0.7, vocab_size=spec.vocab_size).log_prob
    expected = (whole[0, positions] / 0.7).log_softmax(-1)[torch.arange(5), targets]
    torch.testing.assert_close(chosen, expected, rtol=0, atol=1e-6)
    nothing = forward_selected(model, input_ids, packed.positions[None], packed, positions[:0])
    assert nothing.shape == (0, 64)
    none = model.token_statistics(nothing, targets=targets[:0], temperature=0.7, vocab_size=spec.vocab_size)
    (none.log_prob.sum() + nothing.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "every parameter needs a gradient, also without a token"


def test_bfloat16_differs_by_rounding_only(tiny_model, one_rank):
    path = tiny_model()
    spec = read_model_spec(path)
    config = transformer_config(spec, topology=TopologySettings(), dtype=torch.bfloat16, overrides={})
    (model,) = chunks = build_model(spec, config, attention="torch")
    load_hf_weights(chunks, spec, path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    _, input_ids, packed = packed_input(spec.vocab_size)
    rounded = model(input_ids, packed.positions[None], None, packed_seq_params=packed).double().log_softmax(-1)
    _, (exact_model,) = load(path)
    exact = exact_model(input_ids, packed.positions[None], None, packed_seq_params=packed).double().log_softmax(-1)
    assert 1e-4 < (rounded - exact).abs().mean() < 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_export_returns_what_was_loaded(family, tiny_model, one_rank):
    path = tiny_model(**FAMILIES[family])
    spec, chunks = load(path)
    exported = dict(export_hf_weights(chunks, spec))
    original = load_file(path / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    assert {name: tuple(tensor.shape) for name, tensor in original.items()} == dict(tensor_shapes(spec))
    assert [(name, tuple(tensor.shape)) for name, tensor in exported.items()] == list(tensor_shapes(spec))


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_that_transformers_saves(family, tiny_model, tmp_path):
    path = tiny_model(**FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path)).save_pretrained(tmp_path / "saved")
    shapes = {tensor.name: tensor.shape for rule in rules(read_model_spec(path)) for tensor in rule.tensors}
    with closing(HuggingFaceWeights(tmp_path / "saved")) as checkpoint:
        assert checkpoint.names() == shapes.keys()
        for name, shape in shapes.items():
            assert checkpoint.read(name).shape == shape


@pytest.mark.parametrize("max_shard_bytes", (2**30, 50_000))
def test_saved_directory_loads_in_transformers(max_shard_bytes, tiny_model, tmp_path, one_rank):
    path = tiny_model(torch_dtype="bfloat16")
    spec, chunks = load(path)
    save_hf(tmp_path / "saved", export_hf_weights(chunks, spec), source=path, max_shard_bytes=max_shard_bytes)
    saved, original = (transformers.AutoModelForCausalLM.from_pretrained(place) for place in (tmp_path / "saved", path))
    assert saved.dtype is torch.float32, "the dtype in config.json must be the one that was written"
    assert original.dtype is torch.bfloat16
    state = load_file(path / "model.safetensors")
    assert all(torch.equal(parameter, state[name]) for name, parameter in saved.named_parameters())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").encode("1+2") == [3, 12, 4]
    assert (tmp_path / "saved/model.safetensors.index.json").exists() == (max_shard_bytes == 50_000)


def change_weights(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_wrong_weights_are_named(tiny_model, one_rank):
    cases = {
        "missing": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks 1 tensor .*model.layers.1.mlp.up_proj.weight"),
        "extra": (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}),
            "has 1 tensor that Qwen3ForCausalLM does not",
        ),
        "shape": (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"shape \(3,\), config.json needs \(64,\)"),
        "infinite": (lambda t: t["model.layers.1.mlp.down_proj.weight"][3, 5:6].fill_(-torch.inf), r"1\.mlp\.down_proj.* not finite"),
        "head": (lambda t: t.update({"lm_head.weight": torch.zeros(32, 64)}), "ties the embeddings, but lm_head.weight differs"),
    }
    for name, (change, message) in cases.items():
        path = tiny_model(name=name)
        change_weights(path, change)
        with pytest.raises(UserError, match=message):
            load(path)
    path = tiny_model(name="none")
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load(path)
    (path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        load(path)


def test_redundant_tensors_are_accepted(tiny_model, one_rank):
    path = tiny_model()
    change_weights(
        path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone(), "x.rotary_emb.inv_freq": torch.zeros(8)})
    )
    load(path)


def test_save_refuses_a_source_without_config(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        save_hf(tmp_path / "saved", {"a": torch.zeros(1)}, source=tmp_path)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)], ids=["others", "group", "owner"])
def test_who_may_read_the_saved_weights_is_what_the_umask_says(tiny_model, tmp_path, umask, mode):
    path, before = tiny_model(), os.umask(umask)
    try:
        save_hf(tmp_path / "saved", {"a": torch.zeros(4), "b": torch.zeros(4)}, source=path, max_shard_bytes=16)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "saved").iterdir()}
    assert {name for name in modes if name.endswith(".safetensors")} >= {"model-00001-of-00002.safetensors"}
    assert set(modes.values()) == {mode}, modes


def test_json_of_the_saved_config_is_otherwise_the_source(tiny_model, tmp_path, one_rank):
    path = tiny_model()
    save_hf(tmp_path / "saved", {"a": torch.zeros(1)}, source=path)
    assert json.loads((tmp_path / "saved/config.json").read_text()) == json.loads((path / "config.json").read_text())


def test_a_model_of_torch_layers_leaves_no_switches_behind(tiny_model, one_rank, monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    load(tiny_model())
    assert (os.environ["NVTE_UNFUSED_ATTN"], os.environ.get("NVTE_FLASH_ATTN")) == ("0", None)


def test_an_attention_missing_in_transformer_engine_is_refused(tiny_model, one_rank, monkeypatch):
    _, (chunk,) = load(tiny_model())
    complaint = "No dot product attention backend is available for the provided inputs."
    monkeypatch.setattr(chunk, "forward", lambda *_arguments, **_named: raises(ValueError(complaint)))
    arguments = (torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], packed_sequences(np.array([0, 4])), torch.arange(4))
    with pytest.raises(UserError, match=r"attention_backend names .* set attention_backend to flash .* or model\.attention to torch"):
        forward_selected(chunk, *arguments)
    monkeypatch.setattr(chunk, "forward", lambda *_arguments, **_named: raises(ValueError("another")))
    with pytest.raises(ValueError, match="another"):
        forward_selected(chunk, *arguments)


def raises(error):
    raise error
