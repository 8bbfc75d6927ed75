"""The device layer: CPU or GPU, gloo or NCCL, copies to the device, and megatron-core's import."""

import contextlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.system.megatron_shims import CPU_SHIMS, TE_ABSENCE_MENDED_IN, hide_absent_te
from megatron_rl.system.process_variables import RANK_VARIABLES
from megatron_rl.system.versions import installed_version

OLDEST_MEGATRON = (0, 16)
NEWEST_MEGATRON = (0, 19)


@dataclass(frozen=True, slots=True)
class Device:
    """The compute device of one process: `backend` is the process group backend."""

    kind: Literal["cpu", "cuda"]
    torch_device: torch.device
    backend: Literal["gloo", "nccl"]


def local_device(local_rank: int = 0) -> Device:
    """Return the device for this rank on the machine: a GPU with CUDA, else the CPU."""
    if torch.cuda.is_available():
        return Device("cuda", torch.device("cuda", local_rank), "nccl")
    return Device("cpu", torch.device("cpu"), "gloo")


def local_capability() -> tuple[int, int] | None:
    """Return the CUDA compute capability of this process's GPU, (9, 0) for Hopper; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def megatron_version() -> tuple[int, int]:
    """Return megatron-core's (major, minor). Raises UserError for an unverified release."""
    text = installed_version("megatron-core")
    if text is None:
        raise UserError("megatron-core is not installed, training needs it; install it with: pip install megatron-core")
    major, minor = (int(part) for part in text.split(".")[:2])
    if not OLDEST_MEGATRON <= (major, minor) <= NEWEST_MEGATRON:
        raise UserError(f"megatron-core {text} is installed, needs 0.16 to 0.19; install one with: pip install 'megatron-core>=0.16,<0.20'")
    return major, minor


def chosen_backends() -> dict[str, str]:
    """Return versions of the optional accelerators: package name to version or "not installed".

    The result is for printing. Apex is recognised by the extension `amp_C`, because the package
    named apex on PyPI is another project.
    """
    chosen = {"torch": torch.__version__, "megatron-core": installed_version("megatron-core") or "not installed"}
    for package, module in (("transformer-engine", "transformer_engine"), ("apex", "amp_C")):
        if importlib.util.find_spec(module) is None:
            chosen[package] = "not installed"
        else:
            chosen[package] = installed_version(package) or "installed from source"
    return chosen


def chosen_row_maths(device_kind: str, dtype: str) -> Literal["triton", "torch"]:
    """Return the maker of log-probs, entropies and gradients from logits of `dtype`, a torch dtype's name.

    Triton's kernels serve every GPU, at all sizes, but not float64. `tools/bench/gpu.py` measures both makers, and a size
    with torch as the faster one belongs here.
    """
    return "triton" if device_kind == "cuda" and dtype in ("bfloat16", "float16", "float32") else "torch"


@contextlib.contextmanager
def quiet_megatron_imports() -> Iterator[None]:
    """Hide megatron-core's import-time warnings about missing or unused parts.

    Missing parts are Transformer Engine and Apex: `chosen_backends` prints each once instead.
    Experimental parts are not used here.

    Without a GPU functions decorated with torch.compile stay as written: no compilation happens
    there (`megatron_shims`), and the compiler alone takes longer to import than all of megatron-core.
    FlashMLA counts as absent: megatron-core expects an ImportError from an unusable package, but
    FlashMLA raises OSError where libcuda.so.1, a part of the driver, is missing.
    """
    compile_function = torch.compile
    hides_flash_mla = not torch.cuda.is_available() and "flash_mla" not in sys.modules
    if not torch.cuda.is_available():
        torch.compile = _leave_uncompiled
    if hides_flash_mla:
        sys.modules["flash_mla"] = None  # type: ignore[assignment]  # Python then raises ImportError
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*not installed.*")
            warnings.filterwarnings("ignore", message=r"\w+ is experimental and still under active development.*")
            yield
    finally:
        torch.compile = compile_function
        if hides_flash_mla:
            del sys.modules["flash_mla"]


def _leave_uncompiled(model: Any = None, **_options: Any) -> Any:
    """Return the function, or a decorator without effect, with torch.compile's signature."""
    return model if model is not None else lambda function: function


def import_megatron() -> None:
    """Import megatron-core without warnings. Raises UserError for an unverified release."""
    megatron_version()
    with quiet_megatron_imports():
        import megatron.core.dist_checkpointing
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401
    # Since 0.19 each built model logs the message: a dozen lines in a run, hundreds in `plan`.
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_not_deprecated)


def _not_deprecated(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("GPTModel IS DEPRECATED")


def prepare_megatron(device: Device) -> None:
    """Import megatron-core quietly and prepare it for `device`. Call before building anything.

    Further calls are harmless. A call after imports of more megatron modules prepares the new
    modules too. Raises UserError for a release that was not verified.
    """
    import_megatron()
    if device.kind == "cuda":
        for name, value in RANK_VARIABLES.items():
            # A run's processes have the variables already; ranks started by another program get them here. CUDA and NCCL read them later.
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device.torch_device)
    if megatron_version() < TE_ABSENCE_MENDED_IN:
        hide_absent_te()
    for shim in CPU_SHIMS if device.kind == "cpu" else ():
        shim()


class SideStream:
    """A second queue of a GPU for copies of earlier results beside later work; a CPU needs none."""

    def __init__(self, device: torch.device) -> None:
        """Mark the computing thread's work so far on `device`; copies come after."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Here, because each thread has a current device of its own.
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run the calling thread's copies beside later work of the device; neither waits."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


def to_device(values: Tensor | NDArray[Any], device: torch.device | str) -> Tensor:
    """Copy `values` [T, ...] of host memory to `device`, without a wait for earlier work.

    A copy out of memory that is not page-locked would wait. On the CPU the tensor may share the
    memory of `values`.
    """
    return in_host_memory(values, device).to(device, non_blocking=True)


def in_host_memory(values: Tensor | NDArray[Any], device: torch.device | str) -> Tensor:
    """Return `values` [T, ...] in host memory, page-locked where `device` is a GPU; else the tensor may share an array's memory."""
    host = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory() if torch.device(device).type == "cuda" else host
