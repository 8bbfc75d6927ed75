"""Meeting of the training's ranks: given explicitly, by torchrun's environment, or of one process alone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core import parallel_state
from torch import distributed

from megatron_rl.errors import UserError, counted
from megatron_rl.system.device import Device, local_device, prepare_megatron
from megatron_rl.training.topology import Topology, initialize, initialize_groups

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Meeting:
    """The meeting point of a training's ranks, as one of them sees it.

    `init_method`, as torch.distributed has it, and `rank` go together; None: an initialised process
    group, else the environment of torchrun, else a process alone. `local_rank` numbers the
    process's GPU, by default LOCAL_RANK, else 0.
    """

    rank: int | None = None
    local_rank: int | None = None
    init_method: str | None = None


def find_meeting(num_ranks: int, given: Meeting, *, environment: Mapping[str, str], existing: int | None = None) -> Meeting:
    """Return the meeting point of `num_ranks` ranks, with rank and local rank; `existing` is an initialised group's size.

    Raises UserError for incomplete arguments or another number of ranks.
    """
    rank, local_rank = given.rank, given.local_rank
    if (rank is None) != (given.init_method is None):
        named, missing = ("rank", "init_method") if given.init_method is None else ("init_method", "rank")
        raise UserError(f"Trainer got {named} without {missing}; pass both in its meeting, or neither under torchrun")
    if rank is not None:
        if not 0 <= rank < num_ranks:
            raise UserError(
                f"Trainer got rank {rank}, but training.topology.num_ranks is {num_ranks}; pass one of 0 to {num_ranks - 1}, or set "
                "num_ranks"
            )
        return Meeting(rank, local_rank or 0, given.init_method)
    if existing is not None:
        if existing != num_ranks:
            raise UserError(
                f"the process group that is initialised has {counted(existing, 'rank')}, but training.topology.num_ranks is {num_ranks}; "
                "set num_ranks to their number, or make the Trainer before the group"
            )
        return Meeting(0, int(environment.get("LOCAL_RANK", "0")) if local_rank is None else local_rank)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _torchrun(num_ranks, local_rank, environment)
    if num_ranks > 1:
        raise UserError(
            f"training.topology.num_ranks is {num_ranks}, but this process was told of no other; start it with "
            f"`torchrun --nproc-per-node {num_ranks}`, or pass rank and init_method"
        )
    return Meeting(0, local_rank or 0)


def _torchrun(num_ranks: int, local_rank: int | None, environment: Mapping[str, str]) -> Meeting:
    missing = [name for name in _TORCHRUN if name not in environment]
    if missing:
        raise UserError(
            f"the environment has {' and '.join(name for name in _TORCHRUN if name in environment)} without {' and '.join(missing)}; "
            "start the program with torchrun, which sets all of them, or pass rank and init_method"
        )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not environment[name].isdecimal():
            raise UserError(
                f"the environment variable {name} is {environment[name]!r}, needs a whole number; start the program with torchrun"
            )
    if int(environment["WORLD_SIZE"]) != num_ranks:
        raise UserError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but training.topology.num_ranks is {num_ranks}; start as many processes as there "
            "are ranks, or set num_ranks to their number"
        )
    return Meeting(int(environment["RANK"]), int(environment["LOCAL_RANK"]) if local_rank is None else local_rank, "env://")


def join(topology: Topology, given: Meeting, *, timeout_s: float, seed: int) -> tuple[Device, bool]:
    """Join the other ranks and build Megatron's groups: this process's device, and True for a process group made here.

    `topology.initialize` describes the arguments. Collective over all ranks.
    """
    existing = distributed.get_world_size() if distributed.is_initialized() and given.rank is None and given.init_method is None else None
    meeting = find_meeting(topology.num_ranks, given, environment=os.environ, existing=existing)
    assert meeting.rank is not None and meeting.local_rank is not None, "a meeting that was found has both"
    if parallel_state.model_parallel_is_initialized():
        raise UserError("this process has a Trainer already, and megatron-core can have one at a time; close() the other one first")
    device = local_device(meeting.local_rank)
    prepare_megatron(device)
    if existing is not None:
        initialize_groups(topology, timeout_s=timeout_s, seed=seed)
    else:
        initialize(topology, rank=meeting.rank, init_method=meeting.init_method, device=device, timeout_s=timeout_s, seed=seed)
    return device, existing is None
