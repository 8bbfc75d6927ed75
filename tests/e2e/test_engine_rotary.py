"""SGLang's own rotary embeddings where they follow from lengths: up to which length they are the trainer's, and which never are."""

import pytest
import torch

from megatron_rl.models.attention.rotary import RotarySpec, rotate

SHORT, LONG = (1.0, 1.5, 2.0, 3.0), (1.2, 4.0, 9.0, 16.0)
ORIGINAL = 12
HEAD = 8


def frequencies(theta: float) -> tuple[float, ...]:
    return tuple(theta ** -(pair / HEAD) for pair in range(0, HEAD, 2))


def turned_by_sglang(embedding: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Queries [T, HEAD] at the positions of one sequence of T tokens that comes as one batch."""
    forward = getattr(embedding, "forward_native", embedding.forward)
    query, _ = forward(torch.arange(len(x)), x.clone(), x.clone())
    return query


def turned_here(spec: RotarySpec, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(x))
    angle = spec.angles(positions, lambda: torch.full_like(positions, len(x)))[:, None]
    factor = spec.attention_factor
    return rotate(x[:, None], angle.cos() * factor, angle.sin() * factor)[:, 0]


@pytest.mark.slow
def test_longrope_is_the_same_up_to_the_original_length() -> None:
    from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding

    embedding = Phi3LongRoPEScaledRotaryEmbedding(HEAD, HEAD, 48, ORIGINAL, 10000, True, torch.float32, list(SHORT), list(LONG))
    plain = frequencies(1e4)
    spec = RotarySpec(
        1e4,
        tuple(frequency / factor for frequency, factor in zip(plain, SHORT, strict=True)),
        "longrope",
        long_frequencies=tuple(frequency / factor for frequency, factor in zip(plain, LONG, strict=True)),
        original_max_position_embeddings=ORIGINAL,
        attention_factor=embedding.short_mscale,
    )
    x = torch.randn(ORIGINAL + 1, HEAD, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(turned_by_sglang(embedding, x[:ORIGINAL]), turned_here(spec, x[:ORIGINAL]))
    longer = (turned_by_sglang(embedding, x) - turned_here(spec, x)).abs().amax(-1)
    assert longer.max() > 0.1, "one token more: runs may go on to it now"


@pytest.mark.slow
def test_dynamic_is_another_rotation_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.rotary_embedding import base as sglang_base
    from sglang.srt.layers.rotary_embedding.rope_variant import DynamicNTKScalingRotaryEmbedding

    # Without it a kernel of another package is asked for, which what is tested does not use.
    monkeypatch.setattr(sglang_base, "_is_cpu", True)
    factor, longest = 4.0, 16
    embedding = DynamicNTKScalingRotaryEmbedding(HEAD, HEAD, longest, 10000, True, factor, torch.float32)
    x = torch.randn(6, HEAD, generator=torch.Generator().manual_seed(0))
    # Transformers leaves sequences up to max_position_embeddings as they are without the scaling.
    plain = turned_here(RotarySpec(1e4, frequencies(1e4)), x)
    found = turned_by_sglang(embedding, x)
    assert (found - plain).abs().max() > 0.01, "SGLang agrees with transformers now: support it"
    base = 1e4 * (factor**2 - factor + 1) ** (HEAD / (HEAD - 2))
    torch.testing.assert_close(found, turned_here(RotarySpec(base, frequencies(base)), x))
