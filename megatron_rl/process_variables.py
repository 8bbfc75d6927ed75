"""Variables of the environment that every rank and engine of a run has alike, whoever started its process.

A communicator between trainer and engines fails when its two ends are set up differently (NCCL's "unhandled cuda error"), and SGLang turns
off what NCCL would otherwise use. Imports nothing heavy: engines' actors use it.
"""

import socket
from collections.abc import Mapping
from typing import Literal

NCCL_VARIABLES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang (0.5.23, entrypoints/engine.py) sets in its processes where nothing else is set, so what ranks need as well."""
RANK_VARIABLES = {**NCCL_VARIABLES, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""With one queue, kernels of tensor parallelism start in the order in which Megatron issues them. SGLang sets its own number."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
GPU_OF_RANK_VARIABLES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Lets each rank see the GPU that Ray gave it and no other, as it takes the first that it sees. Other trainers set 1 for their Ray."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch's allocator options; an engine that shares its GPUs would keep its memory with the expandable segments that trainers like."""


def shared_variables(
    environment: Mapping[str, str], *, device_kind: Literal["cpu", "cuda"], interface: str | None = None
) -> dict[str, str]:
    """The variables of every process of a run, by the driver's `environment`: all that name NCCL, and the interface to meet on.

    On GPUs also what decides which of them a process sees, whatever the environment has.
    """
    chosen = {} if interface is None else dict.fromkeys(INTERFACE_VARIABLES, interface)
    if device_kind == "cpu":
        return chosen
    own = {name: value for name, value in environment.items() if name.startswith("NCCL_") or name in RANK_VARIABLES}
    return RANK_VARIABLES | own | chosen | GPU_OF_RANK_VARIABLES


def interface_names() -> list[str]:
    """The network interfaces of this machine."""
    return [name for _, name in socket.if_nameindex()]
