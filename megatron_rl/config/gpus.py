"""GPU types known to the planner, and settings in conflict on GPUs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.messages import closest, joined_error
from megatron_rl.errors import UserError
from megatron_rl.system.process_variables import ALLOCATOR_VARIABLES

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU type: CUDA's compute `capability`, and `memory_bytes` of one GPU.

    A machine has `per_node` GPUs and `host_bytes` of memory.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    per_node: int = 8
    host_bytes: int = 1536 * GIB


# The driver's total memory is a little less than the number in the name.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("L4-24", (8, 9), 23034 * 2**20, host_bytes=768 * GIB),
        Gpu("L40S-48", (8, 9), 46068 * 2**20),
        Gpu("A100-40", (8, 0), 40 * GIB, host_bytes=1024 * GIB),
        Gpu("A100-80", (8, 0), 80 * GIB),
        Gpu("H100-80", (9, 0), 81559 * 2**20),
        Gpu("H200-141", (9, 0), 143771 * 2**20),
        Gpu("B200-192", (10, 0), 183359 * 2**20),
    )
}
"""GPU types by the names for `--gpu` and `runtime.cluster.gpu`."""


def find_gpu(name: str) -> Gpu:
    """Return the GPU type called `name`, in any case. Raises UserError with the closest name."""
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() in known:
        return known[name.lower()]
    close = closest(name.lower(), known, cutoff=0.3)
    hint = f"did you mean {known[close].name}?" if close else "give one of them"
    raise UserError(f"GPU type {name!r} is not known, known are {', '.join(GPUS)}; {hint}")


_NCCL_ARGUMENTS = {"enable_nccl_nvls": ("NCCL_NVLS_ENABLE",), "enable_symm_mem": ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")}
"""Arguments with which SGLang sets these variables to 1 in its processes (entrypoints/engine.py).

Any earlier value is lost.
"""


def check_on_gpus(sglang: Mapping[str, Any], transport: str, *, colocate: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError for settings in conflict on GPUs: of engines with these `sglang` arguments, and their weights' `transport`."""
    wrong = list[str]()
    if not colocate and transport == "broadcast":
        wrong = _nccl_ends(sglang, environment)
    elif transport == "broadcast":
        wrong = [
            "weights.transport is broadcast with runtime.colocate true, but NCCL cannot join a Megatron rank and an engine on the same GPU "
            "into one group; leave it out, which means ipc, or set it to disk"
        ]
    elif colocate and transport == "ipc":
        wrong = [
            f"weights.transport is ipc with {name}={environment[name]} in the environment, but expandable segments cannot be shared with "
            "an engine; remove expandable_segments there, or set weights.transport to disk"
            for name in ALLOCATOR_VARIABLES
            if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower()
        ]
    if wrong:
        raise joined_error(wrong, origin="on GPUs")


def _nccl_ends(sglang: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Compare the NCCL settings of ranks and engines: NCCL fails in a group with unequal ends."""
    return [
        f"rollout.sglang.{name} is true, with which SGLang sets {variable} to 1 in the engines, but the ranks, which NCCL joins with them, "
        f"have {environment.get(variable, '0')}; set {variable}=1 in the environment of the run, or remove it"
        for name, variables in _NCCL_ARGUMENTS.items()
        for variable in variables
        if sglang.get(name) and environment.get(variable) != "1"
    ]
