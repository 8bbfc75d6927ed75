"""Work of rank 0 alone, or of each rank by shares, with the outcome known to every rank."""

from collections.abc import Callable
from pathlib import Path

from torch import distributed

from megatron_rl.errors import UserError


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
    """Call `check(share=(rank, ranks))` on each rank; the first one's UserError is raised on every rank. Collective."""
    found: UserError | None = None
    try:
        check(share=(distributed.get_rank(), distributed.get_world_size()))
    except UserError as error:
        found = error
    reports: list[UserError | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(reports, found)
    for report in reports:
        if report is not None:
            raise report
