"""Builds and runs a rank without memory and without peers.

Tensors of numbers have shapes only, and collectives do nothing. Inside `rank_without_memory`
floating-point tensors are made on torch's meta device, whatever device the code asks for. Tensors
of integers and booleans stay real on the CPU unless the code asks otherwise: indices, lengths and
counts decide shapes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor, distributed
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_rl.algorithms.head_statistics import _CHUNK_LOGITS
from megatron_rl.algorithms.log_prob import _CHUNK_ELEMENTS
from megatron_rl.training.topology import Topology, initialize_groups

META = torch.device("meta")
_BASE = torch._C.TensorBase
_FACTORIES = frozenset([torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye])
_VALUE_FACTORIES = frozenset([torch.full, torch.tensor, torch.as_tensor, torch.arange])
_MOVES = frozenset([_BASE.to, _BASE.cpu, _BASE.cuda])
_LIKE_FACTORIES = frozenset([_BASE.new_empty, _BASE.new_zeros, _BASE.new_ones, _BASE.new_full])
_READS = frozenset([_BASE.tolist, _BASE.item, _BASE.numpy, torch.equal])


@contextmanager
def rank_without_memory(topology: Topology, *, rank: int, fused: bool) -> Iterator[None]:
    """Make this process `rank` of `topology`, alone, inside the block.

    Floating-point tensors have no memory there. `fused` counts attention and norms as a GPU's fused
    kernels keep tensors, otherwise as torch runs them on the CPU. megatron-core must be prepared.
    The process must be in no process group.
    """
    # The import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mode = MetaTensors(fused=fused)
    with mode, _kept_in_backward(mode), _chunks_as_on("cuda" if fused else "cpu"):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.num_ranks)
        try:
            initialize_groups(topology, timeout_s=60.0, seed=0)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()


@contextmanager
def _chunks_as_on(device_kind: str) -> Iterator[None]:
    """Take this device's chunk sizes in chunked code, not the small ones of an unknown device."""
    for sizes in (_CHUNK_LOGITS, _CHUNK_ELEMENTS):
        sizes["meta"] = sizes[device_kind]
    try:
        yield
    finally:
        for sizes in (_CHUNK_LOGITS, _CHUNK_ELEMENTS):
            del sizes["meta"]


@contextmanager
def _kept_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """Keep `mode` in a backward pass: one call to torch, which leaves a mode while the mode handles a call."""
    run = vars(torch.autograd)["_engine_run_backward"]

    def run_inside(*arguments: Any, **keywords: Any) -> Any:
        with mode:
            return run(*arguments, **keywords)

    vars(torch.autograd)["_engine_run_backward"] = run_inside
    try:
        yield
    finally:
        vars(torch.autograd)["_engine_run_backward"] = run


class MetaTensors(TorchFunctionMode):
    """Send floating-point tensors to the meta device, and attention and norms to stand-ins for fused kernels."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self._replaced: dict[Callable[..., Any], Callable[..., Any]] = {
            F.scaled_dot_product_attention: lambda query, key, value, *mask, **options: _Attention.apply(query, key, value),
            _BASE.masked_select: _masked_select,
            torch.masked_select: _masked_select,
            distributed.all_to_all_single: _all_to_all_single,
        }
        if fused:
            self._replaced[F.rms_norm] = lambda rows, shape, weight=None, eps=None: _RmsNorm.apply(rows, weight)
        self._handlers: tuple[tuple[frozenset[Any], Callable[..., Any]], ...] = (
            (frozenset(self._replaced), lambda func, args, kwargs: self._replaced[func](*args, **kwargs)),
            (_FACTORIES, _make),
            (_LIKE_FACTORIES, lambda func, args, kwargs: _make(func, args, {"dtype": args[0].dtype, **kwargs})),
            (_VALUE_FACTORIES, _make_values),
            (_READS, lambda func, args, kwargs: func(*args, **kwargs)),
        )
        self._twins = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, on tensors of any shape, on the meta device for new numbers or arguments without memory."""
        if func.__name__ == "__get__":
            return func(*args)
        kwargs = dict(kwargs or {})
        for tables, handler in self._handlers:
            if func in tables:
                return handler(func, args, kwargs)
        tensors = list(_tensors(args)) + list(_tensors(kwargs.values()))
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if func is _BASE.__bool__:
            # Code asks numbers only about exceptional values.
            return False
        if func in _MOVES or func is Tensor.cuda:
            return _move(func, args, kwargs)
        if func is _BASE.type or func is Tensor.type:
            # The optimizers select parameters by this name, and a meta tensor's device would appear in the name.
            answer = func(*args, **kwargs)
            return answer.replace(".meta", "") if isinstance(answer, str) else answer
        if not all(tensor.is_meta or tensor.ndim == 0 for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, self._twin, (args, kwargs))
        return func(*args, **kwargs)

    def _twin(self, tensor: Tensor) -> Tensor:
        """Return the one meta tensor that stands for a real tensor among meta tensors; a number needs none."""
        if tensor.is_meta or tensor.ndim == 0:
            return tensor
        if tensor not in self._twins:
            self._twins[tensor] = tensor.detach().to(META)
        twin: Tensor = self._twins[tensor]
        return twin


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments and in lists of arguments."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _asks_for_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _make(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor of a given shape: on the meta device for floating-point numbers, else real."""
    kwargs.pop("pin_memory", None)
    wanted, dtype = kwargs.pop("device", None), kwargs.get("dtype")
    meta = dtype is None or dtype.is_floating_point or _asks_for_meta(wanted)
    return func(*args, **kwargs, device=META if meta else "cpu")


def _make_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor whose dtype may follow from values: real, then moved to meta for floats."""
    kwargs.pop("pin_memory", None)
    wanted = kwargs.pop("device", None)
    made = func(*args, **kwargs, device="cpu") if not _asks_for_meta(wanted) else func(*args, **kwargs, device=META)
    return made.to(META) if made.is_floating_point() and made.numel() > 1 else made


def _all_to_all_single(output: Tensor, input: Tensor, *arguments: Any, **keywords: Any) -> Any:
    """Run the collective on lengths as tensors: without a GPU megatron-core leaves lengths so."""
    arguments, keywords = tree_map_only(Tensor, Tensor.tolist, (arguments, keywords))
    return distributed.all_to_all_single(output, input, *arguments, **keywords)


def _move(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move a meta tensor: the dtype may change, the device stays."""
    tensor, *rest = args
    dtypes = [argument.dtype if isinstance(argument, Tensor) else argument for argument in (*rest, kwargs.get("dtype"))]
    wanted = next((dtype for dtype in dtypes if isinstance(dtype, torch.dtype)), tensor.dtype)
    return tensor if func is not _BASE.to else func(tensor, wanted, copy=kwargs.get("copy", False))


# Stand-ins for torch's kernels for real tensors only; they keep the same tensors for the backward pass.
# Legend: S sequences, H query heads, G key-value heads, C queries, K keys, D channels of a query, E of a value.


def _masked_select(values: Tensor, mask: Tensor) -> Any:
    return _MaskedSelect.apply(values, mask) if values.is_meta else torch.masked_select(values, mask)


class _MaskedSelect(torch.autograd.Function):
    """As many of the values, of any shape, as a real mask of the same shape selects, [N]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(values, mask)
        return values.new_empty(int(mask.expand_as(values).sum()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


class _Attention(torch.autograd.Function):
    """Flash attention of query [S, H, C, D], key [S, G, K, D], value [S, G, K, E].

    Kept are the inputs, the output [S, H, C, E] and a logarithm for each query in fp32, but no
    scores.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1]).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _RmsNorm(torch.autograd.Function):
    """A fused norm, which keeps rows of any shape, the weight, and one fp32 number for each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None) -> Tensor:
        saved = [rows, rows.new_empty(rows.shape[:-1], dtype=torch.float32)]
        ctx.save_for_backward(*saved, *([] if weight is None else [weight]))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, _, *weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight[0]) if weight else None
