"""Rates of bare work from what is done and the seconds that it takes, which are made up here."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.doctor import on_rank as module
from megatron_rl.planning.step_time import Rates
from megatron_rl.system.device import Device, local_device

SECONDS = 4.0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Operations by kind of every work whose seconds are asked for."""
    counted: list[dict[str, int]] = []

    def seconds(call: Callable[[], object], device: Any) -> float:
        with FlopCounterMode(display=False) as counter:
            call()
        counted.append({str(name): count for name, count in counter.get_flop_counts().get("Global", {}).items()})
        return SECONDS

    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setitem(module.COPIED_BYTES, "cpu", 4000)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return counted


def rates(model_spec: Callable[[str], Any]) -> Rates:
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_hidden_size": 192}
    spec = replace(model_spec("Qwen3-4B"), vocab_size=32, **sizes)
    trainer: Any = None
    return module.device_rates(trainer, spec=spec, num_tokens=33, length=11, dtype="float32")


def test_rates_are_work_over_seconds(work: list[dict[str, int]], model_spec: Callable[[str], Any]) -> None:
    """Of 64 channels, queries 64, keys and values 32 each, 192 in the MLP; three sequences of 11 tokens in 4 heads of 16."""
    found = rates(model_spec)
    assert found.products == 6 * 33 * 64 * (2 * 64 + 2 * 32 + 3 * 192) / SECONDS
    assert [count["aten.mm"] / SECONDS for count in work if "aten.mm" in count] == [found.products]
    assert found.attention == 3.5 * 3 * (11 * 12 / 2) * 4 * 2 * (16 + 16) / SECONDS
    assert found.memory == 2 * 4000 / SECONDS
    assert found.node == found.network == math.inf, "nobody is there to send to"


def test_ranks_send_twice_what_the_others_have(
    work: list[dict[str, int]], model_spec: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    summed: list[int] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: summed.append(tensor.nbytes))
    found = rates(model_spec)
    assert (found.node, found.network, summed) == (2 * 3 / 4 * 4000 / SECONDS, 2 * 3 / 4 * 4000 / SECONDS, [4000])


def test_the_fastest_turn_after_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.3, 1.0, 2.8, 3.0, 4.5, 5.0, 8.0, 10.0, 16.0, 20.0, 29.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(process_time=lambda: next(ticks)))
    called: list[int] = []
    assert module._seconds(lambda: called.append(1), local_device()) == pytest.approx(1.5 / 3), "not 0.3 / 3 of the turn that warms up"
    assert len(called) == 3 * 6


def test_a_gpu_has_done_its_work_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(f"synchronize {device}"))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: order.append("clock") or 7.0))
    assert module.now(Device("cuda", torch.device("cuda", 1), "nccl")) == 7.0
    assert order == ["synchronize cuda:1", "clock"]
