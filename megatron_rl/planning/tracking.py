"""Memory of tensors over time, and calls of collectives, real or without memory."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.planning.records import Collective

_KINDS = {"allgather": "all-gather", "allreduce": "all-reduce", "reduce_scatter": "reduce-scatter", "alltoall": "all-to-all"}
_GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp·cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp·ep",
    "EXPERT_DATA_PARALLEL_GROUP": "expert dp",
}


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of living storages made inside the block.

    `live` bytes now, `peak` the most since `reset_peak`, `largest_collective` the largest message
    of a collective seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.largest_collective = Collective("none", 0)
        self._sizes: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Forget the peak: the new peak is at least the living bytes."""
        self.peak = self.live

    def __enter__(self) -> "MemoryTracker":
        # Recomputation frees and restores storages behind the back of every tensor operation.
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` and count the new storages. Tensors of any shape."""
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "c10d":
            self._see_collective(func, args, given)
            if given and given[0].is_meta and func._schema.name.endswith("coalesced_"):
                # torch has no kernels of these collectives for meta tensors.
                return FakeWork().boxed()
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        for leaf in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # A view brings storage from outside along, which is not counted.
                if storage._cdata not in known or storage._cdata in self._sizes:
                    self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._release, key)
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def _see_collective(self, func: Any, args: Sequence[Any], given: Sequence[Tensor]) -> None:
        num_bytes = max((tensor.numel() * tensor.element_size() for tensor in given), default=0)
        objects = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)]
        groups = [distributed.ProcessGroup.unbox(leaf) for leaf in objects if str(leaf._type()).endswith(".ProcessGroup")]
        if num_bytes > self.largest_collective.num_bytes and groups and groups[0].size() > 1:
            kind = func._schema.name.removeprefix("c10d::").strip("_")
            plain = next((name for start, name in _KINDS.items() if kind.startswith(start)), kind)
            group = _GROUPS.get(groups[0].group_desc, groups[0].group_desc)
            self.largest_collective = Collective(f"{plain} over {group} {groups[0].size()}", num_bytes)
