"""A placement in words: ranges of nodes, ranks and engines, and how many nodes each kind of parallel group spans."""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from megatron_rl.runtime.placement import NodeShare, Placement
from megatron_rl.training.topology import Topology


def placement_rows(placement: Placement, topology: Topology) -> dict[str, str]:
    """Every rank and engine with its node and slots, equal nodes in one row, and the nodes that the parallel groups span."""
    rows: dict[str, str] = {}
    for (ranks_each, seats), run in groupby(enumerate(placement.nodes), key=lambda pair: _shape(pair[1])):
        numbered = list(run)
        first, last = numbered[0], numbered[-1]
        name = f"node {first[0]}" if first is last else f"nodes {_span(first[0], last[0])}"
        each = ", {} a node" if first is not last else ""
        unit, parts = placement.needs.unit, []
        if ranks_each:
            ranks = _count("rank", _span(first[1].ranks.start, last[1].ranks.stop - 1))
            parts.append(f"{ranks}{each.format(ranks_each)} on {_count(unit, _span(0, ranks_each - 1))}")
        if seats:
            engines = _count("engine", _span(first[1].engines[0].number, last[1].engines[-1].number))
            slots = _count(unit, _span(seats[0].start, seats[-1].stop - 1))
            parts.append(f"{engines}{each.format(len(seats))} on {slots}{f', {len(seats[0])} each' * (len(seats) > 1)}")
        rows[name] = "; ".join(parts)
    return rows | dict(_group_rows(placement, topology))


def crossing_notes(placement: Placement, topology: Topology) -> list[str]:
    """A sentence for tensor parallel groups that no node holds whole: every layer then waits for the network."""
    spans = _spans(placement, topology.tp)
    if topology.tp == 1 or max(spans) == 1:
        return []
    crossing = sum(count for nodes, count in spans.items() if nodes > 1)
    return [
        f"{crossing} of {spans.total()} tensor parallel groups of tp {topology.tp} ranks lie on {max(spans)} nodes of "
        f"{placement.nodes[0].slots} {placement.needs.unit}s, so that every layer waits for the network; choose a tp that divides "
        f"{placement.nodes[0].slots}, and more pp or cp instead"
    ]


def _group_rows(placement: Placement, topology: Topology) -> Iterator[tuple[str, str]]:
    """One row for each kind of parallel group with more than one rank, in rank order: these are blocks of consecutive ranks."""
    if len(placement.nodes) == 1 or not placement.needs.num_ranks:
        return
    blocks = {
        f"tensor parallel: tp {topology.tp}": topology.tp,
        f"context parallel: tp {topology.tp} × cp {topology.cp}": topology.tp * topology.cp if topology.cp > 1 else 1,
        f"expert parallel: etp {topology.etp} × ep {topology.ep}": topology.etp * topology.ep if topology.ep > 1 else 1,
    }
    for name, size in blocks.items():
        if size > 1:
            yield name, ", ".join(_on_nodes(nodes, count) for nodes, count in sorted(_spans(placement, size).items()))
    per_stage = topology.num_ranks // topology.pp
    if topology.pp > 1:
        stages = [placement.nodes_of_block(stage * per_stage, per_stage) for stage in range(topology.pp)]
        spans = ", ".join(_span(nodes.start, nodes.stop - 1) for nodes in stages)
        yield f"stages 0-{topology.pp - 1}, {per_stage} ranks each", f"on nodes {spans}"


def _spans(placement: Placement, size: int) -> Counter[int]:
    """How many blocks of `size` consecutive ranks lie on how many nodes."""
    return Counter(len(placement.nodes_of_block(first, size)) for first in range(0, placement.needs.num_ranks, size))


def _on_nodes(nodes: int, count: int) -> str:
    groups = f"{count} group{'s' * (count > 1)}"
    return f"{groups} within one node" if nodes == 1 else f"{groups} over {nodes} nodes{' each' if count > 1 else ''}"


def _shape(share: NodeShare) -> tuple[int, tuple[range, ...]]:
    return len(share.ranks), tuple(seat.slots for seat in share.engines)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _count(name: str, span: str) -> str:
    return f"{name}s {span}" if "-" in span else f"{name} {span}"
