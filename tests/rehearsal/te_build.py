"""Builds a rank of many layouts with TransformerEngine's layers, and reads what came out: run as `te_build.py ORDERS RESULTS`.

ORDERS is a JSON file with the `sources` of a pair (`te_sources.unpacked`) and a list of `orders` {model, megatron, topology, rank}; RESULTS
gets megatron-core's version and, for each order, the parameters with their marks, or the error; and for an order with `lengths` the
arguments with which a forward pass of packed sequences asked the kernels.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pretended_gpu
import te_kernels
import torch


def build(order: Mapping[str, Any]) -> dict[str, Any]:
    """What one order asks for."""
    from megatron.core import parallel_state
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rl.config.settings import TopologySettings
    from megatron_rl.models.attention.attention_choice import resolve_attention
    from megatron_rl.models.build import build_model
    from megatron_rl.models.megatron_config import transformer_config
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.training.topology import Topology, initialize_groups
    from megatron_rl.training.trained_model import mark_parameters

    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # of the order before
    spec, settings = read_model_spec(Path(order["model"])), TopologySettings(**order["topology"])
    topology = Topology.of(settings)
    distributed.distributed_c10d.init_process_group("fake", store=FakeStore(), rank=order["rank"], world_size=topology.num_ranks)
    try:
        initialize_groups(topology, timeout_s=60.0, seed=0)
        overrides = order.get("megatron", {})
        capability = torch.cuda.get_device_capability()
        attention = resolve_attention(
            order.get("attention", "transformer_engine"), spec, overrides=overrides, cp=settings.cp, capability=capability
        )
        config = transformer_config(spec, topology=settings, dtype=torch.bfloat16, overrides=overrides, attention=attention)
        chunks = build_model(spec, config, attention=attention)
        mark_parameters(chunks, spec)
        kernels = ask_kernels(chunks[0], order["lengths"], settings.cp, order["rank"]) if "lengths" in order else {}
        return {"parameters": parameters(chunks, spec), "kernels": kernels}
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def parameters(chunks: list[Any], spec: Any) -> dict[str, Any]:
    """Name in the table -> shape, dtype and marks."""
    from megatron_rl.models.hf_weights import global_parameters, held_name
    from megatron_rl.models.weight_table import rules

    held = global_parameters(chunks)
    found = {}
    for rule in rules(spec):
        parameter = held.get(held_name(rule, held))
        if parameter is not None:
            marks = {name: vars(parameter).get(name) for name in ("tensor_model_parallel", "sequence_parallel", "allreduce")}
            found[rule.megatron] = {"shape": list(parameter.shape), "dtype": str(parameter.dtype), **marks}
    return found


def ask_kernels(chunk: torch.nn.Module, lengths: list[int], cp: int, rank: int) -> dict[str, Any]:
    """Arguments of the kernels in the last layer of a forward pass of one packed micro-batch, as text and numbers."""
    from megatron_rl.models.build import forward_selected
    from megatron_rl.models.packed_sequences import packed_sequences

    bounds = np.cumsum([0, *lengths])
    packed = packed_sequences(bounds, device="cuda", cp_size=cp, cp_rank=rank)
    # Index arrays are made by no layer of TransformerEngine, lengths of sequences are copied to the GPU for longrope alone.
    if chunk.config.transformer_impl == "transformer_engine":
        packed = dataclasses.replace(packed, make_plan=never_asked, make_lengths=never_asked)
    num_tokens = int(bounds[-1]) // cp
    te_kernels.CALLS.clear()
    forward_selected(chunk, torch.zeros(1, num_tokens, dtype=torch.int64), packed.positions[None], packed, torch.arange(num_tokens))
    return {kernel: {name: plain(value) for name, value in arguments.items()} for kernel, arguments in te_kernels.CALLS}


def never_asked() -> Any:
    """In the place of what makes an array that nobody reads."""
    raise AssertionError("an array was made that TransformerEngine's attention does not read")


def plain(value: Any) -> Any:
    """A value that JSON has; of a large tensor or one of numbers its shape and dtype."""
    if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() < 20:
        return {"values": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, torch.distributed.ProcessGroup):
        return {"group of": value.size()}
    return value if isinstance(value, bool | int | float | str | None) else (list(value) if isinstance(value, tuple) else str(value))


def main(orders: str, results: str) -> None:
    """Carry out all orders."""
    from megatron_rl.system.device import chosen_backends, local_device, prepare_megatron

    given = json.loads(Path(orders).read_text(encoding="utf-8"))
    pretended_gpu.pretend(tuple(given.get("capability", (9, 0))))
    pretended_gpu.load_te(given["sources"])
    prepare_megatron(local_device())
    found = []
    for order in given["orders"]:
        try:
            found.append(build(order))
        except Exception as error:  # the parent shows it
            found.append({"error": f"{type(error).__name__}: {error}"})
    Path(results).write_text(json.dumps({"versions": chosen_backends(), "results": found}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
