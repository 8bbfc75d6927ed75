"""What NCCL would refuse, mix up or wait for, where gloo does as it is asked: every collective of a rank is written down and judged.

`record()` wraps torch.distributed's functions, before megatron-core takes them into its own modules; `broken_rules` compares what all ranks
wrote down. On a pretended GPU tensors of host memory are refused too. Legend: n numbers of a message.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pretended_gpu import on_host
from torch import Tensor, distributed

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single")
OTHERS = (
    *("all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_single", "broadcast", "gather", "scatter"),
    *("all_to_all_single", "all_to_all"),
)
MESSAGES = ("send", "recv", "isend", "irecv")
OF_OBJECTS = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "barrier")
# Numbers of elements of these may differ between ranks: splits are given.
UNEVEN = ("all_to_all_single", "all_to_all")
NO_DTYPES_OF_NCCL = (torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a rank: over the global ranks `group`, a message with one `peer` or, without, a collective, of n numbers of `dtype`.

    `batch` numbers the batch_isend_irecv that a message belongs to.
    """

    name: str
    group: tuple[int, ...]
    dtype: str
    numel: int
    peer: int | None = None
    batch: int | None = None


@functools.cache
def record() -> list[Call]:
    """The list into which this process writes its calls from now on; there is one."""
    calls: list[Call] = []
    batches = itertools.count()
    for name in (*REDUCTIONS, *OTHERS):
        if name in vars(distributed):
            vars(distributed)[name] = _recorded(name, vars(distributed)[name], calls)
    for name in OF_OBJECTS:
        vars(distributed)[name] = _recorded_objects(name, vars(distributed)[name], calls)
    for name in MESSAGES:
        vars(distributed)[name] = _recorded_message(name, vars(distributed)[name], calls)
    send_in_batch, operation_of = distributed.batch_isend_irecv, distributed.P2POp

    def make_operation(op: Callable[..., Any], *arguments: Any, **named: Any) -> distributed.P2POp:
        return operation_of(getattr(op, "__wrapped__", op), *arguments, **named)

    def batch_isend_irecv(operations: list[distributed.P2POp]) -> Any:
        number = next(batches)
        for operation in operations:
            members = _members((operation.group,), {})
            _note_message(operation.op.__name__, operation.tensor, operation.peer, members, calls, number)
        return send_in_batch(operations)

    vars(distributed).update(batch_isend_irecv=batch_isend_irecv, P2POp=make_operation)
    split_source = vars(distributed.distributed_c10d)["_get_split_source"]

    def recorded_split(parent: distributed.ProcessGroup) -> Any:
        calls.append(Call("split", tuple(distributed.get_process_group_ranks(parent)), "", 0))
        return split_source(parent)

    # Asked where a group is made of one that is bound to a device: NCCL splits that one's communicator, and all its ranks have to come.
    vars(distributed.distributed_c10d)["_get_split_source"] = recorded_split
    return calls


def _recorded_objects(name: str, function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        members = _members(arguments, named)
        if len(members) > 1:
            calls.append(Call(name, members, "objects", 0))
        return function(*arguments, **named)

    return wrapper


def _members(arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[int, ...]:
    """Global ranks of the group that is given, else of all."""
    group = named.get("group") or next((one for one in arguments if isinstance(one, distributed.ProcessGroup)), None)
    return tuple(distributed.get_process_group_ranks(group or distributed.group.WORLD))


def _recorded(name: str, function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        tensor, members = _message(name, arguments, named), _members(arguments, named)
        # A group of one sends nothing.
        if len(members) > 1:
            refuse(name, tensor)
            calls.append(Call(name, members, str(tensor.dtype), tensor.numel()))
        return function(*arguments, **named)

    return wrapper


def _message(name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """The tensor whose size and dtype all ranks have to agree on."""
    tensors = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
    # An output comes before the input, and is there on some ranks only; of a gather in one tensor both are.
    return tensors[1] if name.endswith(("_into_tensor", "_tensor", "_base", "_single")) and len(tensors) > 1 else tensors[0]


def _recorded_message(name: str, function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        words = ("dst", "src")
        peer = arguments[0] if arguments else next(named[word] for word in words if named.get(word) is not None)
        _note_message(name, tensor, peer, _members(arguments, named), calls, None)
        return function(tensor, *arguments, **named)

    return wrapper


def _note_message(name: str, tensor: Tensor, peer: int, members: tuple[int, ...], calls: list[Call], batch: int | None) -> None:
    refuse(name, tensor)
    calls.append(Call(name, members, str(tensor.dtype), tensor.numel(), peer=peer, batch=batch))


def refuse(name: str, tensor: Tensor) -> None:
    """Raise TypeError for what NCCL does not take of gloo's habits."""
    if on_host(tensor):
        raise TypeError(f"NCCL takes tensors of the GPU, {name} got one of host memory")
    if tensor.dtype in NO_DTYPES_OF_NCCL and (tensor.dtype is not torch.bool or name in REDUCTIONS):
        raise TypeError(f"NCCL has no {name} of {tensor.dtype}")
    if not tensor.is_contiguous():
        raise TypeError(f"NCCL takes contiguous tensors, {name} got one of strides {tensor.stride()}")


def broken_rules(logs: Sequence[Sequence[Call]]) -> list[str]:
    """One sentence for each rule that the calls of all ranks, in rank order, break."""
    return [*_different_collectives(logs), *_waiting_messages(logs)]


def _different_collectives(logs: Sequence[Sequence[Call]]) -> Iterator[str]:
    """Members of a group have to make the same collectives, in one order, of one dtype and one size: NCCL compares nothing."""
    by_group: dict[tuple[int, ...], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, log in enumerate(logs):
        for call in log:
            if call.peer is None:
                by_group[call.group][rank].append(call)
    for group, ranks in by_group.items():
        for number, calls in enumerate(itertools.zip_longest(*(ranks[rank] for rank in group))):
            wanted = {(call.name, call.dtype, None if call.name in UNEVEN else call.numel) if call is not None else None for call in calls}
            if len(wanted) > 1:
                yield f"collective {number} of ranks {group}: {sorted(map(str, wanted))}"
                break


def _waiting_messages(logs: Sequence[Sequence[Call]]) -> Iterator[str]:
    """Two ranks that both send first, outside of one batch, wait for each other: NCCL's messages of a pair run one after the other."""
    pairs = {(min(rank, call.peer), max(rank, call.peer)) for rank, log in enumerate(logs) for call in log if call.peer is not None}
    for low, high in sorted(pairs):
        first, second = (_in_turn(logs[rank], peer) for rank, peer in ((low, high), (high, low)))
        for number, (one, other) in enumerate(itertools.zip_longest(first, second, fillvalue=())):
            sent = sorted(("send" if "send" in name else "recv", dtype, numel) for name, dtype, numel in one)
            answered = sorted(("recv" if "send" in name else "send", dtype, numel) for name, dtype, numel in other)
            if sent != answered:
                yield f"message {number} between ranks {low} and {high}: {list(one)} and {list(other)}"
                break


def _in_turn(log: Sequence[Call], peer: int) -> list[tuple[tuple[str, str, int], ...]]:
    """The messages with `peer`, those of one batch together."""
    turns: list[tuple[tuple[str, str, int], ...]] = []
    messages = [(number, call) for number, call in enumerate(log) if call.peer == peer]
    for _, together in itertools.groupby(messages, key=lambda entry: ("batch", entry[1].batch) if entry[1].batch is not None else entry[0]):
        turns.append(tuple((call.name, call.dtype, call.numel) for _, call in together))
    return turns
