"""Shims for megatron-core on a machine without a GPU or without Transformer Engine.

Released megatron-core (0.16 to 0.19) assumes CUDA in a handful of places. `prepare_megatron` applies
the shims: each names the upstream behaviour behind it, is idempotent, and changes nothing for any
other caller.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_TENSOR_FACTORIES = (
    *("empty", "full", "ones", "rand", "randn", "zeros", "arange", "tensor", "as_tensor"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
)
TE_ABSENCE_MENDED_IN = (0, 17)
"""The first release without need of `hide_absent_te`."""


def _megatron_modules() -> list[types.ModuleType]:
    modules = [sys.modules[name] for name in list(sys.modules) if name.startswith("megatron.core")]
    return [module for module in modules if module is not None]


class Delegate(types.ModuleType):
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
    """A stand-in for a CUDA stream or event: methods return a stand-in, also a context manager."""

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
    cuda = Delegate(
        torch.cuda,
        {
            **random,
            **inert,
            **nothing,
            "current_device": lambda: torch.device("cpu"),
            "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_Inert),
            "random": Delegate(torch.cuda.random, dict(random)),
        },
    )
    return Delegate(torch, {"cuda": cuda} | {name: _on_cpu(getattr(torch, name)) for name in _TENSOR_FACTORIES})


def redirect_torch() -> None:
    """Replace the name `torch`: buffers, p2p, schedules, gradient clipping and the RNG tracker ask torch.cuda for device and streams."""
    stand_in = None
    for module in _megatron_modules():
        if vars(module).get("torch") is torch:
            stand_in = stand_in or _cpu_torch()
            module.__dict__["torch"] = stand_in


def redirect_rng() -> None:
    """Replace the generator of a CUDA device, which the RNG tracker and activation recompute read and write."""
    random = sys.modules["megatron.core.tensor_parallel.random"]
    vars(random).update(_get_cuda_rng_state=_get_cpu_rng_state, _set_cuda_rng_state=_set_cpu_rng_state)


def _called_by_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.core")


def answer_cuda_type_names() -> None:
    """Name types as on a GPU: the optimizers select parameters by Tensor.type() == 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type
    if isinstance(original, types.FunctionType):  # not the C method any more: already replaced
        return

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if not args and not kwargs and _called_by_megatron() else answer

    torch.Tensor.type = tensor_type  # type: ignore[assignment,method-assign]


def keep_tensors_on_cpu() -> None:
    """Ignore Tensor.cuda(), with which tied embeddings under pipeline parallelism move their weight."""
    original = torch.Tensor.cuda
    if isinstance(original, types.FunctionType):  # not the C method any more: already replaced
        return

    def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else original(self, *args, **kwargs)

    torch.Tensor.cuda = tensor_cuda  # type: ignore[assignment,method-assign]


def run_uncompiled() -> None:
    """Unwrap small functions from torch.compile, which on a CPU costs seconds each and needs a C++ compiler."""
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


def hide_absent_te() -> None:
    """Say that Transformer Engine is absent, also on a GPU: latent attention takes stand-ins of its classes for the real ones.

    Asking whether a layer is one fails, and the router asks for a product whose name was never defined.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    vars(sys.modules["megatron.core.transformer.multi_latent_attention"])["HAVE_TE"] = False
    vars(sys.modules["megatron.core.transformer.moe.moe_utils"])["te_general_gemm"] = None


def _on_the_host_already(tensor: Any, as_numpy: bool = False, **_unused: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" else tensor


def hand_over_splits() -> None:
    """Make numbers of the token counts that experts exchange: they become such only when they leave a GPU, and torch takes no tensors."""
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


def pad_uneven_collectives() -> None:
    """Pad what experts that are split over ranks gather and reduce-scatter: different numbers of tokens from each, which gloo cannot."""
    mappings = vars(sys.modules["megatron.core.tensor_parallel.mappings"])
    for name, wrapped in (("_gather_along_first_dim", _gather_uneven), ("_reduce_scatter_along_first_dim", _reduce_scatter_uneven)):
        if mappings[name].__module__ != __name__:
            mappings[name] = wrapped(mappings[name])


CPU_SHIMS = (
    redirect_torch,
    redirect_rng,
    answer_cuda_type_names,
    keep_tensors_on_cpu,
    run_uncompiled,
    hand_over_splits,
    pad_uneven_collectives,
)
"""For a machine without a GPU."""
