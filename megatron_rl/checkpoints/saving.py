"""A save in progress: all ranks plan and gather together, then one thread of each rank writes.

    all ranks, at the start    plan of the training state; weights of the policy gathered on rank 0
    thread                     copies in host memory │ files of the state │ Hugging Face directory
    all ranks, at the end      errors of any rank, index, manifest, final names

The thread copies everything before the first write, so that training waits for the copies alone. The format of
the state is megatron-core's, planned and written by torch's own writer. Each rank writes one file, hashed while
it is still in the kernel's cache. Upstream's asynchronous writer forks a process for every file, and keeps one
for the results: these would outlive a killed rank.
"""

import mmap
import threading
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor, distributed
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.hugging_face import save_hf
from megatron_rl.checkpoints.megatron import MadeHere, without_checksums
from megatron_rl.checkpoints.training_state import all_ranks, complete, ordinary_errors, state_to_save, without_torch_notices
from megatron_rl.errors import UserError
from megatron_rl.models.build import TrainedModel
from megatron_rl.system.device import SideStream, local_device
from megatron_rl.system.files import commit_partial, disk_errors, partial_path, start_partial

_LARGE_PAGE_BYTES = 2**21


class HostCopies:
    """Host memory for the copies of one save after the other.

    The kernel takes several times as long to provide memory as the copying takes: it comes in large pages and is kept.
    """

    def __init__(self) -> None:
        self._memory: dict[Hashable, Tensor] = {}

    def copy(self, name: Hashable, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor`, of any shape, in the memory of the last copy of this `name`, if it fits."""
        place = self._memory.get(name)
        if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
            place = self._memory[name] = _host_memory(tensor)
        return place.copy_(tensor.detach())


def _host_memory(like: Tensor) -> Tensor:
    if like.nbytes < 2 * _LARGE_PAGE_BYTES:
        return torch.empty(like.shape, dtype=like.dtype)
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without large pages reports an error and gives small ones.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


class StateFiles:
    """The training state of this rank, planned with the other ranks, in a directory of all ranks."""

    def __init__(self, directory: Path, models: Mapping[str, TrainedModel], *, counters: Mapping[str, Any]) -> None:
        """Plan everything that `load` needs: the models by name, and `counters`, plain and equal on all ranks.

        Collective. Raises UserError when the directory cannot be written.
        """
        self._directory = directory
        with ordinary_errors():
            all_ranks().broadcast("start", lambda: start_partial(directory))
        self._writer = FileSystemWriter(partial_path(directory), sync_files=True)
        planner = _Planner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._planner: SavePlanner = planner
        strategy = _Planning(planner, self._writer)
        with complete(models), without_torch_notices(), disk_errors(directory):
            state = state_to_save(models, counters=counters)
            # torch's planner looks whether the boxes of all ranks fill their tensors; megatron-core's own look knows regular grids alone.
            dist_checkpointing.save(state, str(partial_path(directory)), sharded_strategy=strategy, validate_access_integrity=False)
        (self._plan,), self._index = strategy.plans, strategy.index
        self._stream = SideStream(torch.device(local_device().kind))
        self.written: tuple[list[WriteResult], dict[str, manifest.Entry]] = ([], {})
        """Results and hashes of this rank's file, once written."""

    def copy(self, stage: HostCopies) -> None:
        """Write copies from now on, instead of the models."""
        with self._stream.entered():
            data = [(item.index, self._planner.resolve_data(item)) for item in self._plan.items]
            held = {index: stage.copy(index, value) if isinstance(value, Tensor) else value for index, value in data}
        self._planner = MadeHere(lambda item: held[item.index])

    def write(self) -> None:
        """Write and hash the file of this rank."""
        partial = partial_path(self._directory)
        with disk_errors(partial), without_checksums():
            results = self._writer.write_data(self._plan, self._planner).value()
            names = {result.storage_data.relative_path for result in results}
            self.written = list(results), {name: manifest.entry_of(partial / name) for name in names}

    def commit(self, written: list[tuple[list[WriteResult], dict[str, manifest.Entry]]]) -> None:
        """Write the index of all ranks' files, and give the directory its name. On rank 0."""
        assert self._index is not None, "rank 0 has made the plan"
        with disk_errors(self._directory):
            self._writer.finish(self._index, [results for results, _ in written])
            entries = {name: entry for _, rank_entries in written for name, entry in rank_entries.items()}
            manifest.write(partial_path(self._directory), known=entries)
        commit_partial(self._directory)


class _Planner(MCoreSavePlanner):
    """Plan of a save with a storage of its own size for every view: torch would copy a view before the write."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return the data of the item, in the same memory."""
        data = super().resolve_data(write_item)
        return _own_storage(data) if isinstance(data, Tensor) else data


def _own_storage(tensor: Tensor) -> Tensor:
    """Return `tensor`, of any shape, in the same memory with a storage of its own size, where it is contiguous on the CPU.

    torch copies a view of a larger storage before the write. safetensors makes the storage that it writes
    non-resizable, and putting a model away resizes storages.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        return tensor
    start = tensor.storage_offset() * tensor.itemsize
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


class _Planning(TorchDistSaveShardedStrategy):
    """Strategy of `dist_checkpointing.save` that plans the writes, and writes nothing."""

    def __init__(self, planner: MCoreSavePlanner, writer: FileSystemWriter) -> None:
        super().__init__("torch_dist", 1)
        self._planner, self._writer = planner, writer
        self.plans: list[SavePlan] = []
        self.index: Metadata | None = None
        """On rank 0: the index of all ranks' writes."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Plan the writes of this rank. Collective."""
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        state, is_first = mcore_to_pyt_state_dict(sharded, False), distributed.get_rank() == 0

        def plan_of_rank() -> SavePlan:
            self._planner.set_up_planner(state, storage_meta=self._writer.storage_meta(), is_coordinator=is_first)
            self._writer.set_up_storage_writer(is_first)
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

        def plans_of_all(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self.index = self._planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(plans)

        with ordinary_errors():
            self.plans.append(self._planner.finish_plan(all_ranks().reduce_scatter("plan", plan_of_rank, plans_of_all)))


class PolicyFiles:
    """The policy as a Hugging Face directory, gathered and written by rank 0."""

    def __init__(self, directory: Path, weights: Iterator[tuple[str, Tensor]], *, num_bytes: int | None, **options: Any) -> None:
        """Gather `weights` on rank 0, for `save_hf` with its `options`. Collective.

        Weights of `num_bytes` in all wait in host memory for the thread; for None, or more than half of the free
        memory, the files are written here and now.
        """
        self._directory, self._options = directory, options
        self._held: deque[tuple[str, Tensor, bool]] = deque()
        self._error: UserError | None = None
        self._writes = distributed.get_rank() == 0
        if self._writes:
            if num_bytes is not None and num_bytes <= psutil.virtual_memory().available // 2:
                self._held.extend(_in_host_memory(weights))
            else:
                self._write_now(weights)
        # All ranks gather to the end, whatever becomes of the files.
        deque(weights, maxlen=0)

    def _write_now(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._writes = False
        try:
            save_hf(self._directory, ((name, _own_storage(tensor)) for name, tensor, _ in _in_host_memory(weights)), **self._options)
        except UserError as error:  # raised on all ranks by `finish`
            self._error = error

    def copy(self, stage: HostCopies) -> None:
        """Copy the weights that are memory of the model."""
        self._held = deque((name, stage.copy(name, tensor) if shared else tensor, False) for name, tensor, shared in self._held)

    def write(self) -> None:
        """Write the directory, and free the weights on the way. Raises the error of an earlier writing."""
        if self._error is not None:
            raise self._error
        if self._writes:
            save_hf(self._directory, self._taken(), **self._options)

    def _taken(self) -> Iterator[tuple[str, Tensor]]:
        while self._held:
            name, tensor, _ = self._held.popleft()
            yield name, _own_storage(tensor)


def _in_host_memory(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield names and weights, each with True for memory of the model."""
    for name, tensor in weights:
        here = tensor.detach().cpu()
        yield name, here, here.data_ptr() == tensor.data_ptr()


class Saving:
    """A save in progress. All ranks have to call `finish` before the next save begins."""

    def __init__(self, *, state: StateFiles | None = None, policy: PolicyFiles | None = None, stage: HostCopies | None = None) -> None:
        """Write the given parts. With `stage`, the models may change after `wait_for_copies`, else after `finish`."""
        self._state, self._stage = state, stage
        self._parts = [part for part in (state, policy) if part is not None]
        self._copied = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="save writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Copy and write without a collective; keep every error for `finish`."""
        try:
            if self._stage is not None:
                for part in self._parts:
                    part.copy(self._stage)
            self._copied.set()
            for part in self._parts:
                part.write()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._copied.set()

    def wait_for_copies(self) -> None:
        """Return when this rank has stopped reading its models, or has failed. Not collective."""
        self._copied.wait()

    @property
    def is_written(self) -> bool:
        """Return True when this rank's files are written. Not collective."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for all ranks' files, and give the directory its name; any rank's error is raised on all. Collective."""

        def written() -> tuple[list[WriteResult], dict[str, manifest.Entry]]:
            self._thread.join()
            if self._error is not None:
                raise self._error
            return ([], {}) if self._state is None else self._state.written

        with ordinary_errors():
            all_ranks().all_reduce("save", written, lambda parts: None if self._state is None else self._state.commit(parts))
