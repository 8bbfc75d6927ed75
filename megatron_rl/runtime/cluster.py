"""The nodes of a Ray cluster: their resources, and a reserved place for every process before the start."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_rl.config.gpus import GPUS
from megatron_rl.config.settings import ClusterSettings
from megatron_rl.errors import DeadlineError, UserError, counted
from megatron_rl.runtime.placement import Needs, Placement, count_slots, match_bundles, place

DeviceKind = Literal["cpu", "cuda"]


def cluster_device_kind() -> DeviceKind:
    """Device of the run: cuda when the Ray cluster has a GPU, else cpu."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def cluster_capability() -> tuple[int, int]:
    """Return the compute capability of the run's GPUs, by Ray's GPU name, this machine, or Hopper's."""
    # torch, whose import an engine's process should not wait for.
    from megatron_rl.system.device import local_capability

    names = {name.removeprefix("accelerator_type:") for name in ray.cluster_resources()}
    named = (gpu.capability for gpu in GPUS.values() if gpu.name.partition("-")[0] in names)
    return next(named, None) or local_capability() or GPUS["H100-80"].capability


def enter_directory(directory: Path) -> None:
    """Work in the driver's `directory`, which relative paths start from. Raises UserError when it is missing."""
    if not directory.is_dir():
        raise UserError(
            f"{ray.util.get_node_ip_address()} has no directory {directory}, from which this run was started and to which its relative "
            f"paths belong; start it from a directory that all nodes share"
        )
    os.chdir(directory)


def own_gpus() -> tuple[str, ...]:
    """Return the GPUs that Ray gave this process, as in CUDA_VISIBLE_DEVICES: numbers, or UUIDs (also of MIG parts)."""
    return tuple(map(str, ray.get_gpu_ids()))


def gpu_order(gpus: Sequence[str]) -> list[tuple[int, str]]:
    """Return a sort key of GPUs: 9 before 10, and UUIDs, without a place, in a stable order."""
    return [(int(gpu), "") if gpu.isdecimal() else (-1, gpu) for gpu in gpus]


@dataclass(frozen=True, slots=True)
class Reservation:
    """A placement on machines: node i of `placement` is bundle `bundles[i]` of the reserved
    `group`.

    `variables` of the environment are set in every process of the reservation.
    """

    placement: Placement
    group: PlacementGroup
    bundles: tuple[int, ...]
    device_kind: DeviceKind
    variables: Mapping[str, str]

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Return Ray's names of the nodes, in the order of bundles."""
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        return tuple(nodes[bundle] for bundle in range(len(self.bundles)))

    def rank_options(self, node: int) -> dict[str, Any]:
        """Ray's options for the actor of a rank on this node."""
        return self._options(node, num_cpus=1, num_gpus=int(self.device_kind == "cuda"))

    def engine_options(self, number: int) -> list[dict[str, Any]]:
        """Return Ray's options for the actor on each node of this engine. Beside ranks no slot is reserved."""
        needs = self.placement.needs
        own, gpus = not needs.colocated, self.device_kind == "cuda"
        slots = {"num_cpus": int(own or gpus), "num_gpus": needs.slots_per_part if own and gpus else 0}
        return [self._options(node, **slots) for node in self.placement.nodes_of_engine(number)]

    def _options(self, node: int, *, num_cpus: int, num_gpus: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[node])
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": strategy}
        return options | ({"runtime_env": {"env_vars": dict(self.variables)}} if self.variables else {})


def reserve(
    needs: Needs, *, cluster: ClusterSettings, device_kind: DeviceKind, timeout_s: float, variables: Mapping[str, str] | None = None
) -> Reservation:
    """Place everything on the nodes of the Ray cluster and reserve the slots until the process leaves Ray.

    A call to release them would block where Ray's control service is gone. `variables` of the
    environment are set in every process there.

    Raises:
        UserError: the cluster has not enough nodes, CPUs or GPUs, with the arithmetic.
        DeadlineError: other users hold the slots.
    """
    slots = [int(node["Resources"].get(needs.unit, 0)) for node in ray.nodes() if node["Alive"]]
    nodes = usable_nodes(slots, cluster, unit=needs.unit)
    placement = place(needs, nodes=nodes)
    # One bundle for all processes of a node: nothing else could keep groups of ranks together, whatever order Ray fills nodes in.
    on_gpus = needs.unit == "GPU"
    bundles = [
        {"CPU": share.processes if on_gpus else share.slots} | ({"GPU": share.slots} if on_gpus else {}) for share in placement.nodes
    ]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    if not group.wait(timeout_seconds=timeout_s):
        raise DeadlineError(
            f"Ray could not reserve {' + '.join(str(share.slots) for share in placement.nodes)} {needs.unit}s, each number on a node "
            f"of its own, within {timeout_s:.0f} s, although the cluster has {count_slots(nodes, needs.unit)}; another job holds some "
            f"of them: stop it, or wait for it"
        )
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    addresses = [(address[node_ids[bundle]], node_ids[bundle]) for bundle in range(len(bundles))]
    return Reservation(placement, group, match_bundles(placement, addresses), device_kind, variables or {})


def usable_nodes(slots: list[int], cluster: ClusterSettings, *, unit: str) -> list[int]:
    """Return the slots of the nodes to use, largest first. Raises UserError for fewer than runtime.cluster says."""
    largest_first = sorted((number for number in slots if number), reverse=True)
    if cluster.gpus_per_node is not None and unit == "GPU":
        enough = [cluster.gpus_per_node for number in largest_first if number >= cluster.gpus_per_node]
        if not enough:
            raise UserError(
                f"runtime.cluster.gpus_per_node is {cluster.gpus_per_node}, but the largest node of the Ray cluster has "
                f"{counted(max(largest_first, default=0), 'GPU')}; set it to that or less, or leave it out"
            )
        largest_first = enough
    if cluster.num_nodes is None:
        return largest_first
    if cluster.num_nodes > len(largest_first):
        raise UserError(
            f"runtime.cluster.num_nodes is {cluster.num_nodes}, but the Ray cluster has {counted(len(largest_first), 'usable node')}; "
            f"start Ray on {cluster.num_nodes - len(largest_first)} more, or lower runtime.cluster.num_nodes"
        )
    return largest_first[: cluster.num_nodes]
