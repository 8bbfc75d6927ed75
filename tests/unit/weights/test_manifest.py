"""The manifest and the buckets of whole models, from public config.json files: no number of theirs is made up."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_rl.models.read_spec import parse_model_spec
from megatron_rl.weights.transport import BUCKET_BYTES, WeightSpec, exported_specs, make_buckets, num_bucket_bytes

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


@functools.cache
def manifest_of(name: str) -> tuple[WeightSpec, ...]:
    return exported_specs(parse_model_spec(json.loads((CONFIGS / f"{name}.json").read_text()), origin=name), dtype="bfloat16")


def cut_attentions(buckets: Sequence[Sequence[WeightSpec]], *, num_layers: int) -> list[int]:
    """Layers whose attention is in more than one bucket, or in none."""
    holders: list[set[int]] = [set() for _ in range(num_layers)]
    for number, bucket in enumerate(buckets):
        for spec in bucket:
            parts = spec.name.split(".")
            if "self_attn" in parts:
                holders[int(parts[2])].add(number)
    return [layer for layer, found in enumerate(holders) if len(found) != 1]


@pytest.mark.parametrize("name", ["Qwen3-4B", "Qwen3-30B-A3B", "GLM-4.5-Air", "DeepSeek-V3"])
def test_no_bucket_ends_within_an_attention(name: str) -> None:
    """SGLang fuses two projections of latent attention, and forgets the one that it gets without the other."""
    manifest = manifest_of(name)
    num_layers = json.loads((CONFIGS / f"{name}.json").read_text())["num_hidden_layers"]
    for max_bytes in (1, BUCKET_BYTES):
        buckets = make_buckets(manifest, max_bytes=max_bytes)
        assert [spec for bucket in buckets for spec in bucket] == list(manifest)
        assert cut_attentions(buckets, num_layers=num_layers) == []
    largest = max(spec.num_bytes for spec in manifest)
    assert max(map(num_bucket_bytes, buckets)) <= max(BUCKET_BYTES, largest)


def test_what_is_kept_in_float32_is_sent_in_float32() -> None:
    dtypes = {spec.name.split(".")[-1]: spec.dtype for spec in manifest_of("DeepSeek-V3") if ".mlp.gate." in spec.name}
    assert dtypes == {"weight": "bfloat16", "e_score_correction_bias": "float32"}
