"""What rank 0 does alone, or each rank a share of, with an outcome that every rank knows."""

from collections.abc import Callable
from pathlib import Path

from torch import distributed

from megatron_rl.errors import UserError
from megatron_rl.training.collectives import reports_of_ranks


def on_rank_zero(function: Callable[[Path], object], path: Path) -> None:
    """Run `function(path)` on rank 0; a UserError of rank 0 is raised on every rank. Collective."""
    message: list[str | None] = [None]
    if distributed.get_rank() == 0:
        try:
            function(path)
        except UserError as error:
            message[0] = str(error)
    distributed.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise UserError(message[0])


def check_on_ranks(check: Callable[..., None]) -> None:
    """Call `check(share=..., num_shares=...)` on each rank; the first one's UserError is raised on every rank. Collective."""
    found: UserError | None = None
    try:
        check(share=distributed.get_rank(), num_shares=distributed.get_world_size())
    except UserError as error:
        found = error
    for report in reports_of_ranks(found):
        if report is not None:
            raise report
