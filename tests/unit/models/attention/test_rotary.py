"""Rotary embeddings against transformers: frequencies of every kind, what config.json says, and the rotation itself."""

import math

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

from megatron_rl.errors import UserError
from megatron_rl.models.attention.rotary import RotarySpec, parse_rotary, parse_rotary_fraction, rotate
from megatron_rl.models.packed_sequences import packed_sequences
from megatron_rl.models.read_spec import read_model_spec

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


def parse(config, **arguments):
    return parse_rotary(config, "config.json", max_position_embeddings=4096, interleaved=False, **arguments)


@pytest.mark.parametrize("case", YARNS)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_yarn_equals_transformers(case, head_dim):
    config = transformers.Qwen3Config(head_dim=head_dim, max_position_embeddings=4096, rope_parameters=dict(YARNS[case]))
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    spec = parse({"rope_parameters": YARNS[case]})
    torch.testing.assert_close(spec.inverse_frequencies(head_dim), expected, rtol=1e-6, atol=0)
    assert spec.attention_factor == pytest.approx(attention_factor, rel=1e-12)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0}


@pytest.mark.parametrize("scaling", (LLAMA3 | {"rope_theta": 5e5}, LLAMA3 | {"rope_theta": 1e4, "low_freq_factor": 1.5}, LINEAR))
def test_other_scalings_equal_transformers(scaling):
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=dict(scaling))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    spec = parse({"rope_parameters": scaling})
    torch.testing.assert_close(spec.inverse_frequencies(64), expected, rtol=1e-6, atol=0)
    assert spec.attention_factor == attention_factor


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
    for length in (512, 513):
        expected, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
        torch.testing.assert_close(spec.inverse_frequencies(64, long=length > 512), expected, rtol=1e-6, atol=0)
        assert spec.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_longrope_takes_long_factors_by_length_without_padding():
    spec = RotarySpec(1e4, "longrope", original_max_position_embeddings=6, short_factor=(1.0, 2.0), long_factor=(3.0, 5.0))
    # Sequences of 7, of 6 padded to 8, and of 2 tokens, on the second of two context-parallel ranks.
    packed = packed_sequences(np.array([0, 8, 16, 20]), lengths=np.array([7, 6, 2]), cp_size=2, cp_rank=1)
    positions = [2, 3, 4, 5, 2, 3, 4, 5, 1, 2]
    factors = [(3.0, 5.0)] * 4 + [(1.0, 2.0)] * 6
    expected = [[position / first, position * 0.01 / second] for position, (first, second) in zip(positions, factors, strict=True)]
    cosine, sine = packed.angles(spec, dim=4, dtype=torch.float32)
    torch.testing.assert_close(cosine[:, 0], torch.tensor(expected).cos())
    torch.testing.assert_close(sine[:, 0], torch.tensor(expected).sin())


def test_longrope_in_the_spelling_of_phi_3():
    config = {"rope_theta": 1e4, "original_max_position_embeddings": 512}
    scaling = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    assert parse(config | {"rope_scaling": scaling}) == parse({"rope_parameters": LONGROPE})


@pytest.mark.parametrize("given", [{}, {"original_max_position_embeddings": 512}], ids=["absent", "in the scaling alone"])
def test_phi_3_takes_its_top_level_original_length(given, tiny_model):
    scaling = {"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6], **given}
    path = tiny_model(family="phi3", max_position_embeddings=32768, rope_scaling=scaling)
    config = transformers.AutoConfig.from_pretrained(path)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=4097)
    spec = read_model_spec(path).rotary
    assert spec.original_max_position_embeddings == config.rope_parameters["original_max_position_embeddings"] == 4096
    assert spec.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(spec.inverse_frequencies(12, long=True), expected, rtol=1e-6, atol=0)


def test_both_spellings_of_yarn_agree():
    scaling = {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1}
    old = parse({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **scaling}})
    assert old == parse({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", **scaling}})
    assert (old.factor, old.original_max_position_embeddings, old.attention_factor, old.mscale_all_dim) == (40.0, 4096, 1.0, 1.0)


def test_partial_rotary():
    assert parse_rotary_fraction({}, "config.json", default=None) == 1.0
    assert parse_rotary_fraction({}, "config.json", default=0.5) == 0.5
    assert parse_rotary_fraction({"partial_rotary_factor": 0.25}, "config.json", default=0.5) == 0.25
    assert parse_rotary_fraction({"rope_parameters": {"partial_rotary_factor": 0.75}}, "config.json", default=0.5) == 0.75
    with pytest.raises(UserError, match=r"partial_rotary_factor to 0\.5, needs 1\.0, because this family rotates all"):
        parse_rotary_fraction({"partial_rotary_factor": 0.5}, "config.json", default=None)
    with pytest.raises(UserError, match=r"partial_rotary_factor to 1\.5, needs a number above 0 and up to 1"):
        parse_rotary_fraction({"partial_rotary_factor": 1.5}, "config.json", default=0.5)
    for value in ("half", 0, -0.5, math.nan, True):
        with pytest.raises(UserError, match=f"has partial_rotary_factor = {value!r}, needs a positive number"):
            parse_rotary_fraction({"partial_rotary_factor": value}, "config.json", default=0.5)


def test_theta_inside_of_rope_scaling_counts():
    assert parse({"rope_scaling": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}, "rope_theta": 1e4}).theta == 5e5


def test_yarn_without_a_factor_takes_the_ratio_of_lengths():
    config = transformers.Qwen3Config(max_position_embeddings=4096, rope_parameters=YARN | {"factor": None})
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    spec = parse({"rope_parameters": YARN | {"factor": None}})
    torch.testing.assert_close(spec.inverse_frequencies(config.head_dim), expected, rtol=1e-6, atol=0)
    assert (spec.factor, spec.attention_factor) == (8.0, pytest.approx(attention_factor, rel=1e-12))
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
        ({"rope_type": "dynamic", "factor": 2.0}, r"rope type dynamic, which cannot be trained: SGLang turns .* by theta itself up to max"),
        ({"rope_type": ["yarn"]}, r"asks for rope type \['yarn'\], supported are"),
        ({"rope_type": 5}, "asks for rope type 5, supported are"),
    ),
)
def test_scalings_that_cannot_be_are_refused(scaling, message):
    with pytest.raises(UserError, match=message):
        parse({"rope_scaling": scaling})


def angles(num_tokens, dim):
    angle = torch.arange(num_tokens)[:, None].double() * RotarySpec(100.0).inverse_frequencies(dim).double()
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
