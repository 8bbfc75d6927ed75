"""Rotary embeddings against transformers: frequencies of every kind, what config.json says, and the rotation itself."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_rl.errors import UserError
from megatron_rl.models.attention.rotary import RotarySpec, rotate
from megatron_rl.models.packed_sequences import packed_sequences
from megatron_rl.models.read_spec import parse_model_spec, read_model_spec

YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 512}
YARNS = {
    "plain": YARN,
    "without original length": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    "deepseek": YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "two different factors": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "one factor alone": YARN | {"mscale": 0.707},
    "attention factor": YARN | {"attention_factor": 1.25, "mscale": 0.5, "mscale_all_dim": 2.0},
    "other turns, not truncated": YARN | {"beta_fast": 20.5, "beta_slow": 2.5, "truncate": False},
    "theta so small that the ramp leaves the channels": YARN | {"rope_theta": 10.0, "beta_slow": 0.1},
    "ramp of no width": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}


SIZES = {
    **{"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"intermediate_size": 96, "head_dim": 64, "max_position_embeddings": 4096},
}


def spec_of(config, architecture="Qwen3ForCausalLM", **changes):
    return parse_model_spec(SIZES | {"architectures": [architecture]} | config | changes, origin="config.json")


def parse(config, **changes):
    return spec_of(config, **changes).rotary


def frequencies(config, kind, **arguments):
    """transformers' frequencies and factor."""
    found, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", **arguments)
    return tuple(found.tolist()), factor


@pytest.mark.parametrize("case", YARNS)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_yarn_equals_transformers(case, head_dim):
    config = transformers.Qwen3Config(head_dim=head_dim, max_position_embeddings=4096, rope_parameters=dict(YARNS[case]))
    spec = parse({"rope_parameters": YARNS[case]}, head_dim=head_dim)
    assert (spec.frequencies, spec.attention_factor) == frequencies(config, "yarn")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0}


DEFAULT = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("scaling", (LLAMA3 | {"rope_theta": 5e5}, LLAMA3 | {"rope_theta": 1e4, "low_freq_factor": 1.5}, LINEAR))
def test_other_scalings_equal_transformers(scaling):
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=dict(scaling))
    spec = parse({"rope_parameters": scaling}, architecture="LlamaForCausalLM")
    assert (spec.frequencies, spec.attention_factor) == frequencies(config, scaling["rope_type"])


def test_unscaled_frequencies_equal_transformers():
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=dict(DEFAULT))
    expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    assert parse({"rope_parameters": DEFAULT}).frequencies == tuple(expected.tolist())
    assert factor == parse({"rope_parameters": DEFAULT}).attention_factor == 1.0
    torch.testing.assert_close(torch.tensor(parse({"rope_theta": 100.0}, head_dim=4).frequencies), torch.tensor([1.0, 0.1]))


SHORT, LONG = [1.0 + 0.1 * pair for pair in range(32)], [1.5 + 0.5 * pair for pair in range(32)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 512}
LONGROPES = {
    "factor from the lengths": LONGROPE,
    "factor of its own": LONGROPE | {"factor": 32.0},
    "no stretch": LONGROPE | {"factor": 1.0},
    "attention factor": LONGROPE | {"attention_factor": 1.1},
}


@pytest.mark.parametrize("case", LONGROPES)
def test_longrope_equals_transformers(case):
    config = transformers.Qwen3Config(head_dim=64, max_position_embeddings=4096, rope_parameters=dict(LONGROPES[case]))
    spec = parse({"rope_parameters": LONGROPES[case]})
    assert (spec.frequencies, spec.attention_factor) == frequencies(config, "longrope", seq_len=512)
    assert (spec.long_frequencies, spec.attention_factor) == frequencies(config, "longrope", seq_len=513)


def test_longrope_takes_long_factors_by_length_without_padding():
    spec = RotarySpec(1e4, (1.0, 0.01 / 2), "longrope", long_frequencies=(1.0 / 3, 0.01 / 5), original_max_position_embeddings=6)
    # Sequences of 7, of 6 padded to 8, and of 2 tokens, on the second of two context-parallel ranks.
    packed = packed_sequences(np.array([0, 8, 16, 20]), lengths=np.array([7, 6, 2]), cp_size=2, cp_rank=1)
    positions = [2, 3, 4, 5, 2, 3, 4, 5, 1, 2]
    factors = [(3.0, 5.0)] * 4 + [(1.0, 2.0)] * 6
    expected = [[position / first, position * 0.01 / second] for position, (first, second) in zip(positions, factors, strict=True)]
    cosine, sine = packed.angles(spec, dtype=torch.float32)
    torch.testing.assert_close(cosine[:, 0], torch.tensor(expected).cos())
    torch.testing.assert_close(sine[:, 0], torch.tensor(expected).sin())


def test_longrope_in_the_spelling_of_phi_3():
    config = {"rope_theta": 1e4, "original_max_position_embeddings": 512, "head_dim": 64}
    scaling = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    assert parse(config | {"rope_scaling": scaling}, architecture="Phi3ForCausalLM") == parse({"rope_parameters": LONGROPE})


@pytest.mark.parametrize("given", [{}, {"original_max_position_embeddings": 512}], ids=["absent", "in the scaling alone"])
def test_phi_3_takes_its_top_level_original_length(given, tiny_model):
    scaling = {"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6], **given}
    path = tiny_model(family="phi3", max_position_embeddings=32768, rope_scaling=scaling)
    config = transformers.AutoConfig.from_pretrained(path)
    spec = read_model_spec(path).rotary
    assert spec.original_max_position_embeddings == config.rope_parameters["original_max_position_embeddings"] == 4096
    assert (spec.long_frequencies, spec.attention_factor) == frequencies(config, "longrope", seq_len=4097)


def test_both_spellings_of_yarn_agree():
    scaling = {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1}
    old = parse({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **scaling}})
    assert old == parse({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", **scaling}})
    assert (old.factor, old.original_max_position_embeddings, old.attention_factor, old.mscale_all_dim) == (40.0, 4096, 1.0, 1.0)


def test_partial_rotary():
    partly = partial(spec_of, architecture="GlmForCausalLM")
    assert spec_of({}).rotary_dim == 64
    assert partly({}).rotary_dim == 32
    assert partly({"partial_rotary_factor": 0.25}).rotary_dim == 16
    assert partly({"rope_parameters": {"partial_rotary_factor": 0.75}}).rotary_dim == 48
    with pytest.raises(UserError, match=r"partial_rotary_factor to 0\.5, needs 1\.0, because this family rotates all"):
        spec_of({"partial_rotary_factor": 0.5})
    with pytest.raises(UserError, match=r"partial_rotary_factor to 1\.5, needs a number above 0 and up to 1"):
        partly({"partial_rotary_factor": 1.5})
    for value in ("half", 0, -0.5, math.nan, True):
        with pytest.raises(UserError, match=f"has partial_rotary_factor = {value!r}, needs a positive number"):
            partly({"partial_rotary_factor": value})


def test_theta_inside_of_rope_scaling_counts():
    assert parse({"rope_scaling": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}, "rope_theta": 1e4}).theta == 5e5


def test_yarn_without_a_factor_takes_the_ratio_of_lengths():
    config = transformers.Qwen3Config(head_dim=64, max_position_embeddings=4096, rope_parameters=YARN | {"factor": None})
    spec = parse({"rope_parameters": YARN | {"factor": None}})
    assert (spec.frequencies, spec.attention_factor) == frequencies(config, "yarn")
    assert spec.factor == 8.0
    with pytest.raises(KeyError, match="factor"):
        transformers.Qwen3Config(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 512})


@pytest.mark.parametrize(
    ("scaling", "message"),
    (
        ({"type": "yarn"}, "has rope type yarn without factor"),
        ({"type": "yarn", "original_max_position_embeddings": 512}, "has rope type yarn without factor"),
        ({"type": "yarn", "factor": None}, r"rope_scaling in config\.json has factor = None, needs a positive number"),
        *((YARN | {"factor": value}, f"has factor = {value!r}, needs a positive number") for value in ("4", 0, -4, math.nan, math.inf)),
        *((YARN | {key: "x"}, f"has {key} = 'x', needs a positive number") for key in ("beta_fast", "beta_slow", "attention_factor")),
        *((YARN | {key: -1}, f"has {key} = -1, needs a number >= 0") for key in ("mscale", "mscale_all_dim")),
        (YARN | {"original_max_position_embeddings": "512"}, "original_max_position_embeddings = '512', needs a positive integer"),
        (YARN | {"truncate": "no"}, "has truncate = 'no', needs true or false"),
        ({"rope_type": "linear", "factor": "2"}, "has factor = '2', needs a positive number"),
        (LLAMA3 | {"low_freq_factor": None}, "has low_freq_factor = None, needs a positive number"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "has low_freq_factor 1 and high_freq_factor 1, needs the second larger"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings = 0, needs a positive integer"),
        (LONGROPE | {"short_factor": 1.0}, r"has short_factor = 1\.0, needs a list of positive numbers"),
        (LONGROPE | {"long_factor": [1.0, 0]}, "has long_factor = 0, needs a positive number"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "has rope type longrope without long_factor"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "original_max_position_embeddings = 1, needs 2 or more"),
        ({"rope_type": "dynamic", "factor": 2.0}, r"rope type dynamic, which cannot be trained: SGLang turns .* by theta itself up to max"),
        ({"rope_type": ["yarn"]}, r"asks for rope type \['yarn'\], supported are"),
        ({"rope_type": 5}, "asks for rope type 5, supported are"),
    ),
)
def test_scalings_that_cannot_be_are_refused(scaling, message):
    with pytest.raises(UserError, match=message):
        parse({"rope_scaling": scaling})


def angles(num_tokens, dim):
    angle = torch.arange(num_tokens)[:, None].double() * 100.0 ** -(torch.arange(0, dim, 2).double() / dim)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dim", (4, 12))
def test_rotation_equals_transformers(dim):
    query, key = torch.randn(2, 7, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cosine, sine = angles(7, dim)
    whole = [torch.cat((part, part), dim=-1)[None] for part in (cosine, sine)]
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], *whole)
    for x, want in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rotate(x, cosine[:, None], sine[:, None]), want[0].transpose(0, 1))


def test_interleaved_rotation_equals_transformers():
    query, key = torch.randn(2, 7, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cosine, sine = angles(7, 8)
    whole = [torch.cat((part, part), dim=-1)[None] for part in (cosine, sine)]
    expected = apply_rotary_pos_emb_interleave(query.transpose(0, 1)[None], key.transpose(0, 1)[None], *whole)
    for x, want in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rotate(x, cosine[:, None], sine[:, None], interleaved=True), want[0].transpose(0, 1))


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("dim", (4, 8))
def test_gradient_of_a_rotation(interleaved, dim):
    x = torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cosine, sine = (part[:, None] * 1.3 for part in angles(3, dim))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cosine, sine, interleaved=interleaved), (x,))
