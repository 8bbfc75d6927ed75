"""The device layer: CPU or GPU, gloo or NCCL, default dtype, and shims for megatron-core on CPU.

Released megatron-core (0.16 to 0.19) assumes CUDA in a handful of places. On a machine without a
GPU `prepare_megatron` applies `CPU_SHIMS`: each entry names the upstream behaviour behind the shim,
touches megatron's own modules only, and changes nothing for any other caller. On a GPU only shims
for the absence of Transformer Engine are applied.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.process_variables import RANK_VARIABLES

OLDEST_MEGATRON = (0, 16)
NEWEST_MEGATRON = (0, 19)

_TENSOR_FACTORIES = (
    *("empty", "full", "ones", "rand", "randn", "zeros", "arange", "tensor", "as_tensor"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
)


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
    """Return major and minor version of the installed megatron-core.

    Raises UserError outside the verified releases.
    """
    try:
        text = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError("megatron-core is not installed, training needs it; install it with: pip install megatron-core") from error
    major, minor = (int(part) for part in text.split(".")[:2])
    if not OLDEST_MEGATRON <= (major, minor) <= NEWEST_MEGATRON:
        raise UserError(f"megatron-core {text} is installed, needs 0.16 to 0.19; install one with: pip install 'megatron-core>=0.16,<0.20'")
    return major, minor


def chosen_backends() -> dict[str, str]:
    """Return versions of the optional accelerators: package name to version or "not installed".

    The result is for printing. Apex is recognised by the extension `amp_C`, because the package
    named apex on PyPI is another project.
    """
    chosen = {"torch": torch.__version__, "megatron-core": importlib.metadata.version("megatron-core")}
    for package, module in (("transformer-engine", "transformer_engine"), ("apex", "amp_C")):
        if importlib.util.find_spec(module) is None:
            chosen[package] = "not installed"
            continue
        try:
            chosen[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            chosen[package] = "installed from source"
    return chosen


def chosen_row_maths(device_kind: str, dtype: str) -> Literal["triton", "torch"]:
    """Return the maker of log-probs, entropies and gradients from logits of `dtype` on a kind of
    device.

    Runs and `--check` print the name. `dtype` is the name of a torch dtype. Triton's kernels serve
    every GPU, at all sizes, but not float64. `tools/bench/gpu.py` measures both makers, and a size
    with torch as the faster one belongs here.
    """
    return "triton" if device_kind == "cuda" and dtype in ("bfloat16", "float16", "float32") else "torch"


@contextlib.contextmanager
def quiet_megatron_imports() -> Iterator[None]:
    """Hide megatron-core's import-time warnings about missing or unused parts.

    Missing parts are Transformer Engine and Apex: `chosen_backends` prints each once instead.
    Experimental parts are not used here.

    Without a GPU functions decorated with torch.compile stay as written: no compilation happens
    there (`CPU_SHIMS`), and the compiler alone takes longer to import than all of megatron-core.
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
    """Return the function itself, or a decorator without effect; the signature is
    torch.compile's.
    """
    return model if model is not None else lambda function: function


def import_megatron() -> None:
    """Import the used parts of megatron-core, without warnings.

    Raises UserError for a release that was not verified.
    """
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
    for shim in CPU_SHIMS:
        if device.kind == "cpu" or shim.without_te:
            shim.apply()


class SideStream:
    """A second queue of a GPU for a thread that copies earlier results while other threads go on.

    A CPU needs none.
    """

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


@dataclass(frozen=True, slots=True)
class Shim:
    """One workaround: `behaviour` is the reason in megatron-core without a GPU. `apply` is
    idempotent.

    `without_te`: the absence of Transformer Engine is the reason, on a GPU too; with Transformer
    Engine the shim changes nothing.
    """

    name: str
    behaviour: str
    apply: Callable[[], None]
    without_te: bool = False


def _megatron_modules() -> list[types.ModuleType]:
    modules = [sys.modules[name] for name in list(sys.modules) if name.startswith("megatron.core")]
    return [module for module in modules if module is not None]


class _Delegate(types.ModuleType):
    """A module with attributes of its own first and the attributes of `target` otherwise."""

    def __init__(self, target: types.ModuleType, attributes: dict[str, Any]) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(attributes, _delegate_target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_delegate_target"], name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _Inert:
    """A stand-in for a CUDA stream or event: methods do nothing and return a stand-in.

    A stand-in is also a context manager.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> "type[_Inert]":
        return _Inert

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *args: object) -> None:
        pass


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _get_cpu_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _cpu_torch() -> types.ModuleType:
    """A stand-in for the name `torch` inside megatron's modules: CUDA calls land on the CPU, everything else is torch's own."""
    random = {"get_rng_state": _get_cpu_rng_state, "set_rng_state": _set_cpu_rng_state, "manual_seed": torch.manual_seed}
    inert = dict.fromkeys(("Stream", "Event", "stream", "current_stream", "default_stream"), _Inert)
    nothing = dict.fromkeys(("synchronize", "empty_cache", "set_stream", "set_device"), _nothing)
    cuda = _Delegate(
        torch.cuda,
        {
            **random,
            **inert,
            **nothing,
            "current_device": lambda: torch.device("cpu"),
            "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_Inert),
            "random": _Delegate(torch.cuda.random, dict(random)),
        },
    )
    return _Delegate(torch, {"cuda": cuda} | {name: _on_cpu(getattr(torch, name)) for name in _TENSOR_FACTORIES})


def _redirect_torch() -> None:
    stand_in = None
    for module in _megatron_modules():
        if vars(module).get("torch") is torch:
            stand_in = stand_in or _cpu_torch()
            module.__dict__["torch"] = stand_in


def _redirect_rng() -> None:
    random = sys.modules["megatron.core.tensor_parallel.random"]
    vars(random).update(_get_cuda_rng_state=_get_cpu_rng_state, _set_cuda_rng_state=_set_cpu_rng_state)


def _called_by_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.core")


def _answer_cuda_type_names() -> None:
    original = torch.Tensor.type
    if isinstance(original, types.FunctionType):  # not the C method any more: already replaced
        return

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if not args and not kwargs and _called_by_megatron() else answer

    torch.Tensor.type = tensor_type  # type: ignore[assignment,method-assign]


def _keep_tensors_on_cpu() -> None:
    original = torch.Tensor.cuda
    if isinstance(original, types.FunctionType):  # not the C method any more: already replaced
        return

    def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else original(self, *args, **kwargs)

    torch.Tensor.cuda = tensor_cuda  # type: ignore[assignment,method-assign]


def _run_uncompiled() -> None:
    for module in _megatron_modules():
        _uncompile(module)


@functools.cache
def _uncompile(module: types.ModuleType) -> None:
    """Once for each module, because the search takes longer than all other shims."""
    classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    for owner in (module, *classes):
        for name, value in list(vars(owner).items()):
            if isinstance(value, types.FunctionType) and "_torchdynamo_orig_callable" in vars(value):
                setattr(owner, name, vars(value)["_torchdynamo_orig_callable"])


_MOE_TE_NAMES = (
    "te_general_gemm",
    "fused_permute",
    "fused_permute_with_probs",
    "fused_unpermute",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
)


def _hide_mocked_te() -> None:
    latent = sys.modules.get("megatron.core.transformer.multi_latent_attention")
    if latent is not None and importlib.util.find_spec("transformer_engine") is None:
        vars(latent)["HAVE_TE"] = False


def _on_the_host_already(tensor: Any, as_numpy: bool = False, **_unused: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" else tensor


def _hand_over_splits() -> None:
    for module in _megatron_modules():
        if "maybe_move_tensor_to_cpu" in vars(module):
            vars(module)["maybe_move_tensor_to_cpu"] = _on_the_host_already


def _gather_uneven(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def gather_along_first_dim(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return ranks' tensors [n, ...] of the given sizes n, whole and one after the other."""
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, None, *args, **kwargs)
        sizes = [int(size) for size in output_split_sizes]
        padded = torch.cat([input_, input_.new_zeros(max(sizes) - len(input_), *input_.shape[1:])])
        parts = gather(padded, group).chunk(len(sizes)) if max(sizes) else [padded] * len(sizes)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather_along_first_dim


def _reduce_scatter_uneven(reduce_scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce_scatter_along_first_dim(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return this rank's part, by the given sizes, of the sum of tensors [n, ...]."""
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, None, *args, **kwargs)
        sizes = [int(size) for size in input_split_sizes]
        own = sizes[group.rank()]
        parts = [torch.cat([part, part.new_zeros(max(sizes) - len(part), *part.shape[1:])]) for part in input_.split(sizes)]
        return reduce_scatter(torch.cat(parts), group)[:own] if max(sizes) else input_[:0]

    return reduce_scatter_along_first_dim


def _pad_uneven_collectives() -> None:
    mappings = vars(sys.modules["megatron.core.tensor_parallel.mappings"])
    for name, wrapped in (("_gather_along_first_dim", _gather_uneven), ("_reduce_scatter_along_first_dim", _reduce_scatter_uneven)):
        if mappings[name].__module__ != __name__:
            mappings[name] = wrapped(mappings[name])


def _define_missing_te_names() -> None:
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    for name in _MOE_TE_NAMES if moe_utils is not None else ():
        vars(moe_utils).setdefault(name, None)


CPU_SHIMS = (
    Shim(
        "torch stand-in",
        "buffers, p2p, schedules, gradient clipping and the RNG tracker ask torch.cuda for device, streams and pinned memory",
        _redirect_torch,
    ),
    Shim("rng state", "the RNG tracker and activation recompute read and write the generator of a CUDA device", _redirect_rng),
    Shim(
        "tensor type names",
        "the optimizers select parameters by Tensor.type() == 'torch.cuda.FloatTensor', so they refuse those on the CPU",
        _answer_cuda_type_names,
    ),
    Shim("tensor.cuda", "tied embeddings under pipeline parallelism move their weight with Tensor.cuda()", _keep_tensors_on_cpu),
    Shim(
        "compiled helpers",
        "small functions are wrapped in torch.compile at import, which on a CPU costs seconds each and needs a C++ compiler",
        _run_uncompiled,
    ),
    Shim(
        "latent attention",
        "without Transformer Engine the stand-ins for its classes are taken for the real ones, and asking whether a layer is one fails",
        _hide_mocked_te,
        without_te=True,
    ),
    Shim(
        "expert splits",
        "the token counts that experts exchange become numbers only when they leave a GPU, and torch takes no tensors for them",
        _hand_over_splits,
    ),
    Shim(
        "uneven collectives",
        "experts that are split over ranks gather and reduce-scatter different numbers of tokens from each, which gloo cannot",
        _pad_uneven_collectives,
    ),
    Shim("moe names", "the MoE layers import names of Transformer Engine from moe_utils without a guard", _define_missing_te_names, True),
)
