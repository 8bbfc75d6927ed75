"""What a run is meant for: this machine, or the GPU nodes that `runtime.cluster` describes, which need not be here."""

import os
from dataclasses import dataclass

import torch

from megatron_rl.config.settings import Settings
from megatron_rl.device import Device, local_device, quiet_megatron_imports
from megatron_rl.planning.gpus import find_gpu
from megatron_rl.runtime.placement import Needs, Placement, nodes_needed, place

with quiet_megatron_imports():
    from megatron_rl.models.attention.attention_fields import Attention
    from megatron_rl.models.megatron_config import resolve_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Device and attention of the ranks, and the slots of every node; `nodes` None when only a Ray cluster knows."""

    device: Device
    attention: Attention
    nodes: tuple[int, ...] | None

    def placement(self, settings: Settings) -> Placement | None:
        """Where everything goes; None when that is only known to a Ray cluster. Raises UserError when it has no room."""
        return None if self.nodes is None else place(Needs.of(settings, device_kind=self.device.kind), nodes=self.nodes)


def find_target(settings: Settings, *, config_only: bool) -> Target:
    """The target of a run of these settings that starts here, or with `config_only` of one that is to start elsewhere.

    Raises UserError for a GPU type that is not known and for an engine that is larger than a node.
    """
    runtime = settings.runtime
    if runtime.cluster.gpu is not None and (config_only or runtime.ray_address is not None):
        return _described(settings, runtime.cluster.gpu)
    device = local_device()
    attention = resolve_attention(settings.model.attention)
    if runtime.ray_address is not None:
        return Target(device=device, attention=attention, nodes=None)
    if device.kind == "cuda":
        return Target(device=device, attention=attention, nodes=(torch.cuda.device_count(),))
    # A CPU is shared where there are too few: slower, but right.
    slots = max(os.cpu_count() or 1, Needs.of(settings, device_kind="cpu").slots)
    return Target(device=device, attention=attention, nodes=(slots,))


def _described(settings: Settings, gpu: str) -> Target:
    cluster = settings.runtime.cluster
    slots = cluster.gpus_per_node or find_gpu(gpu).per_node
    count = cluster.num_nodes or nodes_needed(Needs.of(settings, device_kind="cuda"), slots_per_node=slots)
    choice = settings.model.attention
    return Target(
        device=Device("cuda", torch.device("cuda", 0), "nccl"),
        attention="transformer_engine" if choice == "auto" else choice,
        nodes=(slots,) * count,
    )
