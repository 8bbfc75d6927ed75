"""Checkpoint writing in two halves: a collective plan, and a writing thread on each rank.

The plan says what each rank writes. A thread with copies releases the state after copying, before
the first write.

The format is megatron-core's, planned and written by torch's own writer. Each rank writes one file,
hashed while the file is still in the kernel's cache. Upstream's asynchronous writer forks a process
for every file and keeps a manager process for the results. Such processes would outlive a killed
rank.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.host_copies import HostCopies
from megatron_rl.checkpoints.megatron import without_checksums
from megatron_rl.device import SideStream, local_device
from megatron_rl.files import disk_errors


class TwoHalves(TorchDistSaveShardedStrategy):
    """Strategy of `dist_checkpointing.save` with a return at the start of the writing thread.

    `finish` waits for the files of all ranks.
    """

    def __init__(self, *, stage: HostCopies | None) -> None:
        """With `stage`, write copies in the memory of `stage`; else write the state itself.

        With `stage` the state may change after `wait_for_copies`, else after `finish`.
        """
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
        self._entries: dict[str, manifest.Entry] = {}
        self.entries: dict[str, manifest.Entry] = {}
        """On rank 0, once finished: the manifest's entries of the files of all ranks."""
        self._error: BaseException | None = None

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Plan the writes of this rank, and begin. Collective."""
        self._directory = Path(checkpoint_dir)
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._writer = FileSystemWriter(checkpoint_dir, sync_files=True)
        with ordinary_errors():
            plan = self._plan(planner, mcore_to_pyt_state_dict(state, False))
        self._stream = SideStream(torch.device(local_device().kind))
        self._thread = threading.Thread(target=self._write, args=(planner, plan), name="checkpoint writer", daemon=True)
        self._thread.start()

    def _plan(self, planner: MCoreSavePlanner, state: dict[str, Any]) -> SavePlan:
        """Plan the writes of this rank for `state`. Collective.

        torch checks that the boxes of all ranks fill their tensors.
        """

        def plan_of_rank() -> SavePlan:
            planner.set_up_planner(state, storage_meta=self._writer.storage_meta(), is_coordinator=self._ranks.is_coordinator)
            self._writer.set_up_storage_writer(self._ranks.is_coordinator)
            return self._writer.prepare_local_plan(planner.create_local_plan())

        def plans_of_all(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(plans)

        return planner.finish_plan(self._ranks.reduce_scatter("plan", plan_of_rank, plans_of_all))

    def _write(self, planner: MCoreSavePlanner, plan: SavePlan) -> None:
        """Run the thread: no collective, and every error is kept for `finish`."""
        try:
            with disk_errors(self._directory):
                source: SavePlanner = planner if self._stage is None else self._copy(planner, plan, self._stage)
                self._copied.set()
                with without_checksums():
                    self._written = self._writer.write_data(plan, source).value()
                names = {result.storage_data.relative_path for result in self._written}
                self._entries = {name: manifest.entry_of(self._directory / name) for name in names}
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._copied.set()

    def _copy(self, planner: MCoreSavePlanner, plan: SavePlan, stage: HostCopies) -> "_Copies":
        """Return copies of everything in the plan."""
        with self._stream.entered():
            data = [planner.resolve_data(item) for item in plan.items]
            self._copies = stage.copies_of(value for value in data if isinstance(value, Tensor))
        copies = iter(self._copies)
        held = (next(copies) if isinstance(value, Tensor) else value for value in data)
        return _Copies(dict(zip((item.index for item in plan.items), held, strict=True)))

    def wait_for_copies(self) -> None:
        """Return when this rank's thread has stopped reading the state. Not collective.

        The thread may also have failed; `finish` raises the error.
        """
        self._copied.wait()

    @property
    def is_written(self) -> bool:
        """Return true when this rank's thread has ended."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the files of all ranks and write their index. Collective.

        Raises the error of a rank's failed writing on every rank.
        """

        def results() -> tuple[list[WriteResult], dict[str, manifest.Entry]]:
            self._thread.join()
            if self._error is not None:
                raise self._error
            return self._written, self._entries

        def index(results: list[tuple[list[WriteResult], dict[str, manifest.Entry]]]) -> None:
            self._writer.finish(self._metadata, [written for written, _ in results])
            self.entries = {name: entry for _, entries in results for name, entry in entries.items()}

        with disk_errors(self._directory), ordinary_errors():
            self._ranks.all_reduce("write", results, index)
        if self._stage is not None:
            self._stage.give_back(self._copies)


class _Copies(DefaultSavePlanner):
    """Plan of a save with copies in place of the state."""

    def __init__(self, data: dict[MetadataIndex, Tensor | BytesIO]) -> None:
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return the copy of the item."""
        return self._data[write_item.index]


@contextmanager
def ordinary_errors() -> Iterator[None]:
    """Raise torch's CheckpointException as the ordinary error of a rank.

    CheckpointException is no subclass of Exception, so no handler would catch the original.
    """
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, Exception):
            raise cause from error
        raise RuntimeError(str(error)) from error
