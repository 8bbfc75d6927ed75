from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from megatron_rl.config.gpus import GIB, GPUS
from megatron_rl.config.settings import RolloutSettings
from megatron_rl.planning.command import _engine_size
from megatron_rl.planning.records import EngineMemory
from megatron_rl.planning.run_plan import plan_engine


def planned(spec: Any, gpu: str, *, shared_with: int = 0, **sglang: Any) -> EngineMemory:
    return plan_engine(RolloutSettings(sglang=sglang), spec, GPUS[gpu], longest=8192, shared_with=shared_with)


def test_grouped_queries(model_spec: Callable[[str], Any]) -> None:
    """Qwen3-8B: 36 layers, 8 KV heads of 128, in bf16."""
    engine = planned(model_spec("Qwen3-8B"), "H100-80", tp_size=2)
    assert engine.bytes_per_token == 36 * 4 * 2 * 128 * 2
    assert engine.weights == pytest.approx(8.19e9, rel=1e-3)
    assert engine.cache_tokens == engine.cache // engine.bytes_per_token
    assert engine.weights + engine.cache + engine.reserved == GPUS["H100-80"].memory_bytes
    assert engine.longest_sequence == 8192 and engine.fits


def test_fewer_kv_heads_than_gpus_are_repeated(model_spec: Callable[[str], Any]) -> None:
    spec = model_spec("Qwen3-235B-A22B")
    four, eight = (planned(spec, "H200-141", tp_size=n) for n in (4, 8))
    assert four.bytes_per_token == eight.bytes_per_token == 94 * 2 * 128 * 2


def test_a_latent_is_on_every_gpu(model_spec: Callable[[str], Any]) -> None:
    """DeepSeek-V3 keeps 512 + 64 numbers for each token and layer."""
    engine = planned(model_spec("DeepSeek-V3"), "B200-192", tp_size=8)
    assert engine.bytes_per_token == 61 * 576 * 2
    assert engine.weights / GIB == pytest.approx(671.03e9 * 2 / 8 / GIB, rel=1e-3)


def test_an_engine_larger_than_a_node_is_on_the_fewest_that_hold_it(model_spec: Callable[[str], Any]) -> None:
    """671 B parameters in bf16 take 84 GB on each of 16 GPUs."""
    spec, rollout = model_spec("DeepSeek-V3"), RolloutSettings()
    sized = partial(_engine_size, spec=spec, longest=16384)
    assert sized(rollout, gpu=GPUS["H100-80"]) == {"nnodes": 4, "tp_size": 32}
    assert sized(rollout, gpu=GPUS["B200-192"])["tp_size"] == 8
    given = RolloutSettings(sglang={"tp_size": 16, "nnodes": 4})
    assert sized(given, gpu=GPUS["H100-80"]) == given.sglang


def test_what_does_not_fit(model_spec: Callable[[str], Any]) -> None:
    engine = planned(model_spec("Qwen3-235B-A22B"), "H100-80")
    assert not engine.fits and engine.cache_tokens == 0


def test_a_share_that_the_user_set(model_spec: Callable[[str], Any]) -> None:
    engine = planned(model_spec("Qwen3-4B"), "H100-80", shared_with=GIB, mem_fraction_static=0.5)
    assert engine.weights + engine.cache + GIB == int(GPUS["H100-80"].memory_bytes * 0.5)
