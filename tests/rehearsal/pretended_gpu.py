"""A process that takes itself for one with a GPU, so that code for GPUs runs on a machine without: for rehearsals only.

`pretend()` answers what is asked of torch.cuda and lets every tensor that is to be made on cuda be made on the CPU; `load_te` imports
TransformerEngine's Python sources on top of `te_kernels`. Both change the whole process: call them first, in a process of their own.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_rl.system.megatron_shims import Delegate, pad_uneven_collectives, redirect_rng

_BASE = torch._C.TensorBase


_DEVICE, _IS_CUDA, _DATA = _BASE.device, _BASE.is_cuda, _BASE.data  # type: ignore[attr-defined]
_ON_HOST: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensor -> whether its memory is page-locked."""


def on_host(value: Any) -> bool:
    """Whether a tensor would be in host memory: made there, moved there, or computed of such ones alone. All others are on the GPU."""
    return isinstance(value, torch.Tensor) and value in _ON_HOST


def is_locked(value: Any) -> bool:
    """Whether a tensor would be in page-locked host memory."""
    return isinstance(value, torch.Tensor) and bool(_ON_HOST.get(value))


class TensorsOnCpu(TorchFunctionMode):
    """Puts on the CPU what is to be made on or moved to cuda, and lets a tensor say where it would be."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` with every device that is a GPU replaced."""
        kwargs = dict(kwargs or {})
        if func == _IS_CUDA.__get__:
            return not on_host(args[0])
        if func == _DEVICE.__get__:
            real = func(*args)
            return torch.device("cuda", 0) if real.type == "cpu" and not on_host(args[0]) else real
        if func is torch.device:
            # torch reads the number of a device as one of an accelerator that it was built for.
            return func("cuda", args[0]) if args and _is_number(args[0]) else func(*args, **kwargs)
        if func in (_BASE.type, torch.Tensor.type) and len(args) == 1 and not kwargs:
            return func(*args) if on_host(args[0]) else func(*args).replace("torch.", "torch.cuda.", 1)
        if func == _BASE.is_pinned:
            return is_locked(args[0])
        if func in _PINS:
            return _placed(args[0].clone(), host=True, locked=True)
        host = _goes_to_host(func, args, kwargs)
        locked = bool(kwargs.pop("pin_memory", False))
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func in _MOVES:
            args = tuple("cpu" if _is_gpu(argument) else argument for argument in args)
        result = args[0] if func in _TO_GPU else func(*args, **kwargs)
        if func == _DATA.__set__:
            _placed(args[0], host=host, locked=is_locked(args[1]))
        elif isinstance(result, list | tuple):
            for one in result:
                if isinstance(one, torch.Tensor):
                    _placed(one, host=host, locked=_is_view(one, args))
        elif isinstance(result, torch.Tensor) and not any(result is argument for argument in args):
            _placed(result, host=host, locked=locked or _is_view(result, args))
        elif func in _MOVES and on_host(result) != host:
            # Here a tensor that is where it belongs is given back; between host and GPU it is copied.
            result = _placed(result.clone(), host=host)
        return result


_TO_GPU = frozenset((_BASE.cuda, torch.Tensor.cuda))
_TO_HOST = frozenset((_BASE.cpu, torch.Tensor.cpu))
_PINS = frozenset((_BASE.pin_memory, torch.Tensor.pin_memory))
_MOVES = _TO_GPU | _TO_HOST | {_BASE.to}


def _goes_to_host(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether what `func` gives is in host memory: as a device says or the tensor to move to, else where all given tensors are."""
    if kwargs.get("device") is not None:
        return not _is_gpu(kwargs["device"])
    if func in _MOVES:
        if func != _BASE.to:
            return func in _TO_HOST
        for argument in (*args[1:], kwargs.get("other")):
            if isinstance(argument, torch.Tensor):
                return on_host(argument)
            if isinstance(argument, str | torch.device) or _is_number(argument):
                return not _is_gpu(argument)
        return on_host(args[0])
    given = args[1:] if func == _DATA.__set__ else args
    values = (one for argument in given for one in (argument if isinstance(argument, list | tuple) else (argument,)))
    return all(on_host(value) for value in values if isinstance(value, torch.Tensor))


def _placed(tensor: torch.Tensor, *, host: bool, locked: bool = False) -> torch.Tensor:
    if host:
        _ON_HOST[tensor] = locked
    else:
        _ON_HOST.pop(tensor, None)
    return tensor


def _is_view(tensor: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether it is a part of the page-locked tensor that comes first."""
    return bool(args) and is_locked(args[0]) and tensor.untyped_storage()._cdata == args[0].untyped_storage()._cdata


def _is_number(device: Any) -> bool:
    return isinstance(device, int) and not isinstance(device, bool)


def _is_gpu(device: Any) -> bool:
    if _is_number(device):
        return True
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class _Inert:
    """A stream or an event."""

    def __init__(self, *_unused: Any, **_named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_unused, **_named: self

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *_error: object) -> None:
        pass


@cache
def pretend(capability: tuple[int, int] = (9, 0)) -> TensorsOnCpu:
    """Make this process one with a GPU of this compute capability; the mode is entered, also in backward passes. Once is enough."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    importlib.import_module("torch._dynamo")  # it takes stock of torch.cuda as it is
    properties = types.SimpleNamespace(
        major=capability[0], minor=capability[1], name="pretended", multi_processor_count=132, total_memory=80 << 30
    )

    chosen: list[Any] = []  # what set_device was given

    def nothing(*_unused: Any, **_named: Any) -> None:
        pass

    torch.cuda.__dict__.update(
        {
            **dict.fromkeys(("synchronize", "empty_cache", "set_stream", "manual_seed", "ipc_collect"), nothing),
            **dict.fromkeys(("Stream", "Event", "stream", "current_stream", "default_stream"), _Inert),
            "is_available": lambda: True,
            "set_device": chosen.append,
            "is_current_stream_capturing": lambda: False,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_capability": lambda *_unused: capability,
            "get_device_properties": lambda *_unused: properties,
            "get_device_name": lambda *_unused: "pretended",
            "get_rng_state": lambda *_unused: torch.get_rng_state(),
            "set_rng_state": lambda state, *_unused: torch.set_rng_state(state),
            "nvtx": types.SimpleNamespace(range_push=nothing, range_pop=nothing, range=_Inert),
        }
    )
    vars(torch.accelerator)["current_stream"] = lambda *_unused: types.SimpleNamespace(is_capturing=lambda: False)  # for optimizers of 2.14
    torch.cuda.random.__dict__.update({name: vars(torch.cuda)[name] for name in ("get_rng_state", "set_rng_state", "manual_seed")})
    meet, make_group = torch.distributed.init_process_group, vars(torch.distributed.distributed_c10d)["_new_process_group_helper"]

    def make_gloo_group(*arguments: Any, device_id: Any = None, **named: Any) -> Any:
        return make_group(*arguments, **named)

    vars(torch.distributed.distributed_c10d).update(_new_process_group_helper=make_gloo_group, _get_split_source=nothing)

    def meet_over_gloo(backend: str = "nccl", *, device_id: Any = None, **named: Any) -> None:
        assert chosen or backend == "gloo", "every rank would join NCCL with GPU 0: torch.cuda.set_device comes first"
        meet("gloo", **named)
        if device_id is not None:
            # So that torch asks for the group to split from, of which nccl_rules takes note.
            torch.distributed.group.WORLD.bound_device_id = torch.device("cpu", 0)

    vars(torch.distributed).update(init_process_group=meet_over_gloo, get_backend=lambda _group=None: "nccl")
    torch.cuda.nccl.__dict__["version"] = lambda: (2, 28, 0)
    from_numpy = torch.from_numpy
    vars(torch)["from_numpy"] = lambda array: _placed(from_numpy(array), host=True)
    mode = TensorsOnCpu()
    run = vars(torch.autograd)["_engine_run_backward"]

    def run_inside(*arguments: Any, **named: Any) -> Any:
        with mode:
            return run(*arguments, **named)

    vars(torch.autograd)["_engine_run_backward"] = run_inside
    mode.__enter__()
    device = importlib.import_module("megatron_rl.system.device")
    import_alone = vars(device)["import_megatron"]
    # Of the GPU stack, it loads a part of the driver, which nobody pretends.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]

    def import_and_prepare() -> None:
        import_alone()
        without_any_gpu()

    vars(device)["import_megatron"] = import_and_prepare
    return mode


def load_te(sources: Sequence[str]) -> None:
    """Import TransformerEngine from `sources`, the directories of a pair (`te_sources.unpacked`), with `te_kernels` for its compiled half.

    megatron-core is that of the pair from here on: nothing of it may have been imported before.
    """
    import te_kernels

    assert "megatron.core" not in sys.modules, "megatron-core was imported before the pair was chosen"
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no search for its libraries and those of CUDA
    sys.path[:0] = sources
    sys.modules["transformer_engine_torch"] = te_kernels.Kernels()
    # It alone asks for the packages of ONNX.
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = MagicMock()
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.loader is not None, f"none of {sources} has transformer_engine"
    package = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    vars(importlib.import_module("transformer_engine.common"))["load_framework_extension"] = lambda _framework: None
    spec.loader.exec_module(package)
    importlib.import_module("transformer_engine.pytorch")
    attention = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.backends")
    # By their names, because the order of the compiled functions' arguments changes between releases.
    for name, kernel in (
        ("fused_attn_fwd", te_kernels.attention_forward),
        ("fused_attn_bwd", te_kernels.attention_backward),
        ("attn_forward_func_with_cp", te_kernels.attention_over_ranks),
    ):
        vars(attention)[name] = _by_name(inspect.signature(vars(attention)[name]), kernel)

    choose = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    chosen = vars(choose)["get_attention_backend"]
    # Its attention is for half precision. The kernels here have any, and in float32 they can be compared to the last digits.
    vars(attention)["torch"] = Delegate(torch, {"float16": torch.float32})
    vars(choose)["get_attention_backend"] = lambda parameters: chosen(dataclasses.replace(parameters, qkv_dtype=torch.bfloat16))
    config = importlib.import_module("megatron_rl.models.megatron_config")
    check_backend = vars(config)["check_attention_backend"]
    vars(config)["check_attention_backend"] = lambda backend, **named: check_backend(backend, **{**named, "dtype": torch.bfloat16})
    vars(importlib.import_module("megatron_rl.system.device"))["import_megatron"]()


def without_any_gpu() -> None:
    """What megatron-core needs where no GPU is: the CPU's generator, and even tensors for gloo, where NCCL gathers uneven ones."""
    importlib.import_module("megatron.core.tensor_parallel.mappings")
    redirect_rng()
    pad_uneven_collectives()
    # Triton compiles for real GPUs alone; its interpreter, in which tests/dist/test_head_kernels.py runs the head's kernels, is slow.
    head, rows = (importlib.import_module(f"megatron_rl.{name}") for name in ("models.language_model_head", "algorithms.head_statistics"))
    vars(head)["row_maths"] = lambda _logits: rows.TORCH_ROWS


def _by_name(signature: inspect.Signature, kernel: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        return kernel(bound.arguments)

    return call
