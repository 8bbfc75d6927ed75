"""How many micro-batches a pipeline stage holds at once under megatron-core's schedules.

1F1B (Narayanan et al. 2021, section 2.2) lets stage s of p run p - s forwards before its first backward; interleaved, each of v chunks
on a rank counts for itself (section 2.2.2).
"""

from collections.abc import Sequence


def most_held(held: Sequence[int], *, stage: int, pp: int, num_micro_batches: int) -> tuple[int, float]:
    """The most bytes that the chunks of pipeline rank `stage` hold at one time, and how many micro-batches of all chunks these are.

    `held` [vpp] are bytes of one micro-batch in each chunk. The schedule has `num_micro_batches`, for interleaved chunks a multiple of
    `pp`.
    """
    forwards = _order(len(held), pp=pp, num_micro_batches=num_micro_batches)
    backwards = [len(held) - 1 - chunk for chunk in forwards]
    ahead = 2 * (pp - stage - 1) + (len(held) - 1) * pp if len(held) > 1 else pp - stage - 1
    ahead = min(ahead, len(forwards))
    now = most = sum(held[chunk] for chunk in forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        now += held[forward]
        most = max(most, now)
        now -= held[backward]
    return most, most / max(1, sum(held))


def _order(vpp: int, *, pp: int, num_micro_batches: int) -> list[int]:
    """The chunk of each forward: `pp` micro-batches in one chunk, then the same ones in the next."""
    if vpp == 1:
        return [0] * num_micro_batches
    assert num_micro_batches % pp == 0, f"{num_micro_batches} micro-batches for interleaved chunks of {pp} ranks"
    return [chunk for _ in range(num_micro_batches // pp) for chunk in range(vpp) for _ in range(pp)]
