"""GPU types known to the planner."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.errors import UserError

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
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.3)
    hint = f"did you mean {known[close[0]].name}?" if close else "give one of them"
    raise UserError(f"GPU type {name!r} is not known, known are {', '.join(GPUS)}; {hint}")
