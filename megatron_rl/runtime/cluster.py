"""Ray: start a local one or join a cluster, and reserve a place for every process before any of them starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import psutil

from megatron_rl.config.settings import RuntimeSettings
from megatron_rl.errors import DeadlineError, UserError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

OBJECT_STORE_BYTES = 256 * 1024 * 1024
SHUTDOWN_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Needs:
    """Processes to place: Megatron ranks with one GPU each and engines with `gpus_per_engine`, or one CPU each without GPUs."""

    num_ranks: int
    num_engines: int
    gpus_per_engine: int

    def bundles(self, *, device_kind: str) -> list[dict[str, float]]:
        """One Ray resource bundle per process, ranks first."""
        if device_kind == "cpu":
            return [{"CPU": 1.0}] * (self.num_ranks + self.num_engines)
        return [{"CPU": 1.0, "GPU": 1.0}] * self.num_ranks + [{"CPU": 1.0, "GPU": float(self.gpus_per_engine)}] * self.num_engines


def prepare_environment(settings: RuntimeSettings) -> None:
    """Set what Ray reads when it is imported: call before. No usage reports, and a local Ray talks over loopback only."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's notes about GPU variables and token authentication would be the first lines a new user reads.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # Ray gives its workers the lowest priority by default: on a shared machine a train step then takes ten times as long.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    if settings.ray_address is None:
        # Makes ray use 127.0.0.1 where it would look up the machine's own address.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


@contextmanager
def ray_cluster(*, address: str | None, needs: Needs) -> Iterator[None]:
    """A Ray session: a local one that ends with the block, every process of it gone, or the cluster at `address`, which goes on."""
    import ray

    before = set(psutil.Process().children())
    if address is None:
        ray.init(
            num_cpus=max(os.cpu_count() or 1, needs.num_ranks + needs.num_engines),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
    else:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        roots = set(psutil.Process().children()) - before
        started = [process for root in roots for process in (root, *_descendants(root))]
        ray.shutdown()
        _, alive = psutil.wait_procs(started, timeout=SHUTDOWN_GRACE_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=SHUTDOWN_GRACE_S)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def cluster_device_kind() -> Literal["cpu", "cuda"]:
    """Device of the run: cuda when the Ray cluster has a GPU, else cpu."""
    import ray

    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


@contextmanager
def reserved_places(needs: Needs, *, device_kind: str, timeout_s: float) -> "Iterator[PlacementGroup]":
    """Reserve one bundle per process, ranks first; released with the block.

    Raises:
        UserError: the cluster has not enough CPUs or GPUs, with the arithmetic.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = needs.bundles(device_kind=device_kind)
    total = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    have = ray.cluster_resources()
    for kind, needed in total.items():
        if needed > have.get(kind, 0):
            raise UserError(
                f"{needs.num_ranks} Megatron ranks and {needs.num_engines} engines with {needs.gpus_per_engine} GPUs each need"
                f" {needed:.0f} {kind}s, the Ray cluster has {have.get(kind, 0):.0f}; lower training.topology.num_ranks or"
                " rollout.num_engines, or add nodes"
            )
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=timeout_s):
            raise DeadlineError(
                f"Ray could not reserve {total} within {timeout_s:.0f} s although the cluster has them;"
                " another job holds them, stop it or wait"
            )
        yield group
    finally:
        remove_placement_group(group)
