"""What takes the place of SGLang's kernels where there is no GPU."""

import importlib
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.engines.on_cpu.deterministic_cpu import murmur_hash
from megatron_rl.engines.on_cpu.sglang_shims import (
    add_gated,
    check_request,
    compile_at_first_call,
    draw_each_request_by_its_own_seed,
    hide_megatron,
    import_needed_models,
    take_cpu_for_the_device,
)


def test_the_shared_experts_are_weighed_token_by_token() -> None:
    hidden, shared, before = (torch.randn(3, 4) for _ in range(3))
    gate, output = torch.randn(4), before.clone()
    add_gated(hidden, gate, shared, output)
    for token in range(3):
        weight = 1 / (1 + math.exp(-sum(hidden[token, channel].item() * gate[channel].item() for channel in range(4))))
        for channel in range(4):
            want = before[token, channel].item() + weight * shared[token, channel].item()
            assert output[token, channel].item() == pytest.approx(want, abs=1e-6)


def test_a_cuda_build_of_torch_names_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: original(device or "cuda"))
    take_cpu_for_the_device()
    assert callable(vars(torch.get_device_module)["__wrapped__"]), "torch.compile looks there"
    assert torch.get_device_module() is torch.cpu
    assert torch.get_device_module("cuda") is torch.cuda


def test_a_function_is_compiled_once_and_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_now(model: Any, **options: Any) -> Any:
        compiled.append((model, options))
        return lambda *numbers: 10 * model(*numbers)

    monkeypatch.setattr(torch, "compile", compile_now)
    compile_at_first_call()

    def double(number: int) -> int:
        return 2 * number

    plain, decorated = torch.compile(double), torch.compile(dynamic=True)(double)
    assert compiled == [] and decorated.__name__ == "double"
    assert [plain(1), decorated(2), decorated(3)] == [20, 40, 60]
    assert compiled == [(double, {}), (double, {"dynamic": True})]
    # A module is compiled as its owner asks for it.
    assert callable(torch.compile(torch.nn.Identity())) and len(compiled) == 3


def test_an_engine_has_no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    hide_megatron()
    with pytest.raises(ImportError):
        importlib.import_module("megatron")


@pytest.mark.parametrize(
    ("keys", "arguments", "kept"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, {}, {"qwen3_moe"}),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, {}, {"deepseek_v2", "deepseek_nextn"}),
        # A class beside others, and one of transformers.
        ({"architectures": ["Phi3ForCausalLM"]}, {}, {"llama"}),
        ({"architectures": ["Olmo3ForCausalLM"]}, {}, None),
        ({}, {}, None),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, {"speculative_algorithm": "EAGLE"}, None),
    ],
)
def test_only_modules_that_name_the_model_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], arguments: dict[str, Any], kept: set[str] | None
) -> None:
    # Set first, so that the variable is taken back in the end.
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS")
    (tmp_path / "config.json").write_text(json.dumps(keys))
    import_needed_models({"model_path": str(tmp_path), **arguments})
    others = os.environ.get("SGLANG_DISABLED_MODEL_ARCHS", "").split(",")
    assert others == [""] if kept is None else len(others) > 200 and kept.isdisjoint(others) and "gemma3_causal" in others


@pytest.mark.parametrize(
    ("ids", "num", "parts"),
    [
        ([0, 31, 32], None, ["from 0 to 32", "0 to 31"]),
        ([-1], None, ["-1"]),
        ([1], 33, ["33 log-probs", "0 to 32"]),
        ([1], -1, ["-1"]),
        ([1], [2], ["[2]"]),
    ],
)
def test_a_server_refuses_what_its_scheduler_cannot_hold(ids: list[int], num: Any, parts: list[str]) -> None:
    manager: Any = SimpleNamespace(model_config=SimpleNamespace(vocab_size=32))
    with pytest.raises(ValueError) as caught:
        check_request(manager, SimpleNamespace(top_logprobs_num=num, logprob_start_len=-1, sampling_params={}), ids)  # type: ignore[arg-type]
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    for odd in ({"logprob_start_len": -2}, {"sampling_params": {"stop_token_ids": [32]}}):
        whole = {"top_logprobs_num": None, "logprob_start_len": None, "sampling_params": None, **odd}
        with pytest.raises(ValueError, match=r"-2|32"):
            check_request(manager, SimpleNamespace(**whole), [1])  # type: ignore[arg-type]
    check_request(manager, SimpleNamespace(top_logprobs_num=32, logprob_start_len=0, sampling_params={"stop_token_ids": [31]}), [0, 31])  # type: ignore[arg-type]


def test_a_seeded_draw_ignores_the_sampling_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 0 to 3: all candidates, greedy, top-k, top-p; each alone and among the others."""
    sampler = pytest.importorskip("sglang.srt.layers.sampler")
    parts = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(sampler, "get_exec", lambda: parts)
    monkeypatch.setattr(sampler, "murmur_hash32", murmur_hash)
    monkeypatch.setattr(sampler.Sampler, "_sample_from_probs", sampler.Sampler._sample_from_probs)
    draw_each_request_by_its_own_seed()
    probs = torch.softmax(torch.randn(4, 50, generator=torch.Generator().manual_seed(1)), -1)
    positions = torch.tensor([5, 6, 7, 8])
    top_ks, top_ps = torch.tensor([sampler.TOP_K_ALL, 1, 3, sampler.TOP_K_ALL], dtype=torch.int32), torch.tensor([1.0, 1.0, 1.0, 0.5])

    def draw(rows: list[int], seed: int) -> list[int]:
        given = {"sampling_mask_batch_indices": None, "need_min_p_sampling": False, "min_ps": torch.zeros(len(rows)), "max_top_k": None}
        info = SimpleNamespace(top_ks=top_ks[rows], top_ps=top_ps[rows], sampling_seed=torch.full((len(rows),), seed), **given)
        tokens, _ = sampler.Sampler._sample_from_probs(None, probs[rows], info, positions[rows], rows == [0])
        return tokens.tolist()

    drawn = {}
    for seed in range(200):
        drawn[seed] = draw([0, 1, 2, 3], seed)
        assert drawn[seed] == [draw([row], seed)[0] for row in range(4)]
    every, *others = ({tokens[row] for tokens in drawn.values()} for row in range(4))
    likeliest = [sorted(range(50), key=lambda token, row=row: -probs[row, token].item()) for row in range(4)]
    half = next(count for count in range(50) if sum(probs[3, token].item() for token in likeliest[3][:count]) >= 0.5)
    assert others == [set(likeliest[1][:1]), set(likeliest[2][:3]), set(likeliest[3][:half])]
    assert len(every) > 20
