"""Environment variables with equal values in all ranks and engines of a run.

A communicator between trainer and engines fails with different setups at both ends (NCCL's
"unhandled cuda error"), and SGLang turns off defaults of NCCL. Imports nothing heavy: engines'
actors use this module.
"""

import io
import os
import socket
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from megatron_rl.errors import UserError
from megatron_rl.system.versions import CUDA_MAJOR

NCCL_VARIABLES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Variables set by SGLang (0.5.23, entrypoints/engine.py) where unset, so also needed by ranks."""
RANK_VARIABLES = {**NCCL_VARIABLES, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""One queue, where kernels of tensor parallelism start in the order of Megatron's calls.

SGLang sets its own number.
"""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
GPU_OF_RANK_VARIABLES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Restriction of each rank to the GPU from Ray; a rank takes the first visible GPU.

Other trainers set 1 for their Ray.
"""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch's allocator options of the ranks; an engine does not get the variables.

Trainers like expandable segments, with which an engine on shared GPUs would keep memory.
"""


def shared_variables(
    environment: Mapping[str, str], *, device_kind: Literal["cpu", "cuda"], interface: str | None = None
) -> dict[str, str]:
    """Return the variables of every process of a run, by the driver's `environment`.

    All NCCL variables, the allocator's options, and the interface to meet on. On GPUs also the
    variables that decide the visible GPUs, whatever the environment has.
    """
    chosen = {} if interface is None else dict.fromkeys(INTERFACE_VARIABLES, interface)
    if device_kind == "cpu":
        return chosen
    named = (*RANK_VARIABLES, *ALLOCATOR_VARIABLES)
    # NVIDIA's images have their release in NCCL_VERSION, which is no option.
    own = {name: value for name, value in environment.items() if name in named or (name.startswith("NCCL_") and name != "NCCL_VERSION")}
    return RANK_VARIABLES | own | chosen | GPU_OF_RANK_VARIABLES


def tool_variables(environment: Mapping[str, str], *, device_kind: Literal["cpu", "cuda"]) -> dict[str, str]:
    """Return the search paths of an engine, by the inherited `environment`.

    PATH begins with the interpreter's directory: SGLang compiles kernels at first use with the
    `ninja` installed there, and nothing activates the environment. On GPUs the loader also searches
    the CUDA libraries installed with torch: the memory saver's hook needs libcudart and has no path
    of its own to the library.
    """
    paths = {"PATH": [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]}
    libraries = Path(sysconfig.get_path("purelib"), "nvidia", f"cu{CUDA_MAJOR}", "lib")
    if device_kind == "cuda" and libraries.is_dir():
        paths["LD_LIBRARY_PATH"] = [*filter(None, [environment.get("LD_LIBRARY_PATH")]), str(libraries)]
    return {name: os.pathsep.join(parts) for name, parts in paths.items()}


def interface_names() -> list[str]:
    """Return the names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def settle_output() -> None:
    """Take any text to the standard streams; hide a warning here and in processes started from now on."""
    _fill_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # torchvision is only a dependency of transformers and SGLang here; image files are never read.
    message = "Failed to load image Python extension"
    warnings.filterwarnings("ignore", message=message, category=UserWarning)
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), f"ignore:{message}")))


def _fill_closed() -> None:
    """Open /dev/null in the place of each standard stream that the caller has closed.

    Python has no stream there, and the next opened file would get the number.
    """
    closed = [number for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)) if stream is None]
    for number in closed:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
        os.set_inheritable(number, True)
    if 1 in closed:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if 2 in closed:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def check_directory() -> None:
    """Raise UserError where the working directory was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory does not exist any more; change into one that does") from None


def check_home() -> None:
    """Raise UserError where the home directory cannot hold the caches that torch and SGLang make at import."""
    try:
        cache = Path("~/.cache").expanduser()
    except RuntimeError:
        raise UserError("HOME is not set and this user has no home directory; set HOME to a directory that can be written") from None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        writable = os.access(cache, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise UserError(
            f"HOME is {Path.home()}, where {cache} cannot be written, but torch and SGLang keep compiled code there; "
            f"set HOME to a directory that can be written, such as HOME={tempfile.gettempdir()}"
        )
