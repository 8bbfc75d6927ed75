"""GPU types that can be planned for."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.errors import UserError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU type: `memory_bytes` of one, `per_node` of them in a machine whose main memory is `host_bytes`."""

    name: str
    memory_bytes: int
    per_node: int = 8
    host_bytes: int = 1536 * GIB


# Memory is what the driver reports as total, a little less than the number in the name.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40", 40 * GIB, host_bytes=1024 * GIB),
        Gpu("A100-80", 80 * GIB),
        Gpu("H100-80", 81559 * 2**20),
        Gpu("H200-141", 143771 * 2**20),
        Gpu("B200-192", 183359 * 2**20),
    )
}
"""By the names that `--gpu` and `runtime.cluster.gpu` take."""


def find_gpu(name: str) -> Gpu:
    """The GPU type called `name`, in any case. Raises UserError, with the closest name, for one that is not known."""
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() in known:
        return known[name.lower()]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.3)
    hint = f"did you mean {known[close[0]].name}?" if close else "give one of them"
    raise UserError(f"GPU type {name!r} is not known, known are {', '.join(GPUS)}; {hint}")
