"""The node of every Megatron rank and engine, as a value. Pure: no process, no Ray, no GPU is asked.

A slot is the need of one rank: a GPU, or a CPU where there is no GPU. Ranks fill the nodes in
Megatron's own order: the tensor parallel rank changes fastest, then context, data and pipeline
parallel rank. So the groups with the most traffic lie closest. Engines come behind the ranks, each
on one node or with equal parts on neighbouring ones; colocated engines sit on the slots of ranks
instead.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.settings import RolloutSettings, TopologySettings
from megatron_rl.errors import UserError, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Processes to place: ranks with one slot each, engines with `slots_per_engine`; `colocated` ones share the slots of ranks.

    An engine lies on `nodes_per_engine` neighbouring nodes, with equal parts.
    """

    num_ranks: int
    num_engines: int
    slots_per_engine: int
    nodes_per_engine: int = 1
    colocated: bool = False
    unit: Literal["CPU", "GPU"] = "GPU"

    @classmethod
    def of(
        cls, topology: TopologySettings | None, rollout: RolloutSettings | None, *, colocate: bool, device_kind: Literal["cpu", "cuda"]
    ) -> "Needs":
        """Return the needs of a run: no ranks without a `topology`, as in an evaluation, no engines without a `rollout`, as in a replay."""
        num_ranks = 0 if topology is None else topology.num_ranks
        unit: Literal["CPU", "GPU"] = "GPU" if device_kind == "cuda" else "CPU"
        if rollout is None:
            return cls(num_ranks=num_ranks, num_engines=0, slots_per_engine=1, unit=unit)
        return cls(
            num_ranks=num_ranks,
            num_engines=rollout.num_engines,
            slots_per_engine=rollout.ranks_per_engine if device_kind == "cuda" else rollout.nodes_per_engine,
            nodes_per_engine=rollout.nodes_per_engine,
            colocated=colocate and topology is not None,
            unit=unit,
        )

    @property
    def slots_per_part(self) -> int:
        """Slots of an engine on one of its nodes."""
        return self.slots_per_engine // self.nodes_per_engine

    @property
    def slots(self) -> int:
        """Slots of the whole run."""
        return self.num_ranks if self.colocated else self.num_ranks + self.num_engines * self.slots_per_engine

    def __str__(self) -> str:
        ranks, slots = counted(self.num_ranks, "rank"), counted(self.slots, self.unit)
        if self.colocated:
            return f"{ranks} = {slots}, shared by {self.engines}"
        parts = [ranks] * (self.num_ranks > 0) + [self.engines] * (self.num_engines > 0)
        return f"{' + '.join(parts)} = {slots}"

    @property
    def engines(self) -> str:
        """The engines' slots as arithmetic."""
        return f"{counted(self.num_engines, 'engine')} × {counted(self.slots_per_engine, self.unit)}"


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Content of one node: `ranks`, one on each slot from the first, and the slots of `engines`, or of their parts here, by number."""

    ranks: range
    engines: Mapping[int, range]

    @property
    def slots(self) -> int:
        """Number of taken slots."""
        return max([len(self.ranks), *(slots.stop for slots in self.engines.values())])

    @property
    def processes(self) -> int:
        """Ranks and parts of engines."""
        return len(self.ranks) + len(self.engines)


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes in order, without nodes that have no process."""

    needs: Needs
    nodes: tuple[NodeShare, ...]

    def spans(self, size: int) -> Counter[int]:
        """Count the blocks of `size` consecutive ranks by the number of nodes on which they lie."""
        node_of = [number for number, share in enumerate(self.nodes) for _ in share.ranks]
        return Counter(len(set(node_of[first : first + size])) for first in range(0, len(node_of), size))

    def nodes_of_engine(self, engine: int) -> tuple[int, ...]:
        """Return the nodes of engine number `engine`, in the order of its own ranks."""
        return tuple(node for node, share in enumerate(self.nodes) if engine in share.engines)

    def ranks_beside(self, engine: int) -> tuple[int, ...]:
        """Return the ranks that share slots with a colocated engine, in the order of its own ranks."""
        shares = [self.nodes[node] for node in self.nodes_of_engine(engine)]
        return tuple(share.ranks[slot] for share in shares for slot in share.engines[engine])


def place(needs: Needs, *, nodes: Sequence[int]) -> Placement:
    """Place everything on nodes with so many slots each.

    Raises UserError, with the arithmetic, for too few slots or an engine too large for its nodes.
    """
    _check_room(needs, nodes)
    ranks, engines = _place_engines(needs, nodes)
    if len(engines) < needs.num_engines:
        where = "one node" if needs.nodes_per_engine == 1 else f"{needs.nodes_per_engine} neighbouring nodes (rollout.sglang.nnodes)"
        raise UserError(
            f"{needs} on {count_slots(nodes, needs.unit)}: an engine lives on {where}, and only {len(engines)} of {needs.num_engines} find "
            f"{needs.slots_per_part} free {needs.unit}s there; add nodes, or let rollout.sglang.tp_size divide what a node has left"
        )
    shares = [
        NodeShare(own, {number: parts[node] for number, parts in enumerate(engines) if node in parts}) for node, own in enumerate(ranks)
    ]
    return Placement(needs, tuple(share for share in shares if share.ranks or share.engines))


def _place_engines(needs: Needs, nodes: Sequence[int]) -> tuple[list[range], list[dict[int, range]]]:
    """Return the ranks of each node and the slots of each engine by node; fewer engines than needed where there is no room."""
    starts = [min(needs.num_ranks, sum(nodes[:node])) for node in range(len(nodes) + 1)]
    ranks = [range(first, stop) for first, stop in itertools.pairwise(starts)]
    free = [range(len(own)) if needs.colocated else range(len(own), slots) for own, slots in zip(ranks, nodes, strict=True)]
    size, engines, node = needs.slots_per_part, list[dict[int, range]](), 0
    while len(engines) < needs.num_engines and node + needs.nodes_per_engine <= len(nodes):
        here = range(node, node + needs.nodes_per_engine)
        full = [number for number in here if len(free[number]) < size]
        if full:
            node = full[-1] + 1
            continue
        engines.append({number: free[number][:size] for number in here})
        for number in here:
            free[number] = free[number][size:]
    return ranks, engines


def nodes_needed(needs: Needs, *, slots_per_node: int) -> int:
    """Return the fewest equal nodes for everything. Raises UserError for an engine too large for its nodes."""
    _check_engine_size(needs, slots_per_node)
    count = -(-needs.slots // slots_per_node)
    while not needs.colocated and len(_place_engines(needs, [slots_per_node] * count)[1]) < needs.num_engines:
        count += 1
    return count


def count_slots(nodes: Sequence[int], unit: str) -> str:
    """Return the slots of these nodes as arithmetic: `15 nodes × 8 = 120 GPUs`."""
    if len(set(nodes)) == 1:
        return f"{counted(len(nodes), 'node')} × {nodes[0]} = {counted(sum(nodes), unit)}"
    return f"{len(nodes)} nodes with {' + '.join(map(str, nodes)) or 0} = {counted(sum(nodes), unit)}"


def match_bundles(placement: Placement, addresses: Sequence[tuple[str, str]]) -> tuple[int, ...]:
    """Return the Ray bundle of every node.

    Bundle i was requested with the slots of node i and lies at `addresses[i]` (IP, node id). Ray
    puts equal bundles onto any nodes. Nodes with equal shares are ordered by address, so that
    neighbours in rank are neighbours in the network, where machines are numbered as cabled.
    """
    assert len(addresses) == len(placement.nodes), f"{len(addresses)} bundles for {len(placement.nodes)} nodes"
    order = sorted(range(len(addresses)), key=lambda bundle: _natural(addresses[bundle]))
    kinds = [(share.slots, share.processes) for share in placement.nodes]
    waiting = {kind: [bundle for bundle in order if kinds[bundle] == kind] for kind in set(kinds)}
    return tuple(waiting[kind].pop(0) for kind in kinds)


def _natural(address: tuple[str, str]) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key with 10.0.0.9 and node9 before 10.0.0.10 and node10."""
    parts = re.findall(r"\d+|\D+", address[0])
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts], address[1]


def _check_room(needs: Needs, nodes: Sequence[int]) -> None:
    _check_engine_size(needs, max(nodes, default=0))
    if needs.slots > sum(nodes):
        raise UserError(
            f"{needs}, {count_slots(nodes, needs.unit)}; add nodes, or lower training.topology.num_ranks, rollout.num_engines or "
            f"rollout.sglang.tp_size"
        )
    engine_slots = needs.num_engines * needs.slots_per_engine
    if needs.colocated and engine_slots > needs.num_ranks:
        raise UserError(
            f"runtime.colocate: {needs.engines} = {engine_slots}, but they share those of {counted(needs.num_ranks, 'rank')}; set "
            f"rollout.num_engines to {needs.num_ranks // needs.slots_per_engine} or less"
        )


def _check_engine_size(needs: Needs, slots_per_node: int) -> None:
    if needs.num_engines and needs.slots_per_part > slots_per_node:
        raise UserError(
            f"an engine of {counted(needs.slots_per_engine, needs.unit)} needs {needs.slots_per_engine} / {slots_per_node} = "
            f"{needs.slots_per_engine / max(1, slots_per_node):.3g} nodes of {slots_per_node}, but rollout.sglang.nnodes is "
            f"{needs.nodes_per_engine}; set it to {-(-needs.slots_per_engine // max(1, slots_per_node))}, or rollout.sglang.tp_size to "
            f"{slots_per_node * needs.nodes_per_engine} or less, or use nodes with more {needs.unit}s or more memory"
        )
