"""Writing a checkpoint in two halves: a collective one that plans what each rank writes, and a thread of each rank that does it.

A thread that takes copies first lets the state go as soon as it has them, before anything is written.

The format is megatron-core's, planned by torch's own writer; each rank writes one file, hashed on the way. Upstream's asynchronous writer
forks a process for every file and keeps a manager process for the results, which would outlive a rank that is killed; torch's copies
each tensor that is a view, as those of the optimizer are, and each takes a CRC that nothing reads.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor, distributed
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_rl.device import SideStream
from megatron_rl.files import disk_errors
from megatron_rl.models.checkpoint_manifest import HashedFile, write_part
from megatron_rl.models.tensor_writing import save_tensor
from megatron_rl.training.collectives import collective_device
from megatron_rl.training.host_copies import HostCopies

_ALIGNMENT = 64
"""Of the items in a file, in bytes, so that numbers can be used where they are: torch.save aligns them within its own."""


class TwoHalves(TorchDistSaveShardedStrategy):
    """Strategy of `dist_checkpointing.save` that returns when a thread has begun to write; `finish` waits for all ranks' files."""

    def __init__(self, *, stage: HostCopies | None) -> None:
        """`stage`: what is written are copies, in memory of theirs, so that the state may change after `wait_for_copies`; else `finish`."""
        super().__init__("torch_dist", 1)
        self._stage = stage
        self._copies: list[Tensor] = []
        self._copied = threading.Event()
        self._stream: SideStream
        self._ranks = _DistWrapper(None, use_dist=True, coordinator_rank=0)
        self._directory: Path
        self._writer: FileSystemWriter
        self._metadata: Metadata
        self._thread: threading.Thread
        self._written: list[WriteResult] = []
        self._error: BaseException | None = None

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Plan what this rank writes, and begin. Collective."""
        self._directory = Path(checkpoint_dir)
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._writer = FileSystemWriter(checkpoint_dir, sync_files=True)
        with ordinary_errors():
            plan = self._plan(planner, mcore_to_pyt_state_dict(state, False))
        self._stream = SideStream(collective_device())
        self._thread = threading.Thread(target=self._write, args=(planner, plan), name="checkpoint writer", daemon=True)
        self._thread.start()

    def _plan(self, planner: MCoreSavePlanner, state: dict[str, Any]) -> SavePlan:
        """What this rank writes of its `state`; torch looks whether the boxes of all ranks fill their tensors. Collective."""

        def plan_of_rank() -> SavePlan:
            planner.set_up_planner(state, storage_meta=self._writer.storage_meta(), is_coordinator=self._ranks.is_coordinator)
            self._writer.set_up_storage_writer(self._ranks.is_coordinator)
            return self._writer.prepare_local_plan(planner.create_local_plan())

        def plans_of_all(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(plans)

        return planner.finish_plan(self._ranks.reduce_scatter("plan", plan_of_rank, plans_of_all))

    def _write(self, planner: MCoreSavePlanner, plan: SavePlan) -> None:
        """Body of the thread: no collective, and no error that nobody would see."""
        try:
            with disk_errors(self._directory):
                data = map(planner.resolve_data, plan.items) if self._stage is None else self._copy(planner, plan, self._stage)
                self._copied.set()
                name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
                self._written, entry = write_items(self._directory / name, plan.items, data)
                write_part(self._directory, {name: entry}, rank=distributed.get_rank())
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._copied.set()

    def _copy(self, planner: MCoreSavePlanner, plan: SavePlan, stage: HostCopies) -> list[Tensor | BytesIO]:
        """What each item of the plan writes, apart from the state."""
        with self._stream.entered():
            data = [planner.resolve_data(item) for item in plan.items]
            self._copies = stage.copies_of(value for value in data if isinstance(value, Tensor))
        copies = iter(self._copies)
        return [next(copies) if isinstance(value, Tensor) else value for value in data]

    def wait_for_copies(self) -> None:
        """Return when this rank's thread reads the state no more, or has failed, which `finish` tells. Not collective."""
        self._copied.wait()

    @property
    def is_written(self) -> bool:
        """Whether this rank's thread has ended."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the files of all ranks and write their index. Collective. Raises what made a rank's writing fail, on every rank."""

        def results() -> list[WriteResult]:
            self._thread.join()
            if self._error is not None:
                raise self._error
            return self._written

        def index(all_results: list[list[WriteResult]]) -> None:
            self._writer.finish(self._metadata, all_results)

        with disk_errors(self._directory), ordinary_errors():
            self._ranks.all_reduce("write", results, index)
        if self._stage is not None:
            self._stage.give_back(self._copies)


def write_items(path: Path, items: Sequence[WriteItem], data: Iterable[Tensor | BytesIO]) -> tuple[list[WriteResult], dict[str, Any]]:
    """Write the file `path`, the `data` of each of `items`, to the disk itself; what torch's index and what the manifest say of it."""
    written: list[WriteResult] = []
    with path.open("wb", buffering=0) as stream:
        file = HashedFile(stream)
        for item, value in zip(items, data, strict=True):
            file.write(bytes(-file.num_bytes % _ALIGNMENT))
            start = file.num_bytes
            if isinstance(value, Tensor):
                save_tensor(value.cpu(), cast("IO[bytes]", file))
            else:
                file.write(value.getbuffer())
            length = file.num_bytes - start
            written.append(WriteResult(item.index, length, _StorageInfo(path.name, start, length)))
        os.fsync(stream.fileno())
    return written, file.entry


@contextmanager
def ordinary_errors() -> Iterator[None]:
    """Raise torch's CheckpointException, which is no subclass of Exception and so would not be handled, as the error of a rank."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, Exception):
            raise cause from error
        raise RuntimeError(str(error)) from error
