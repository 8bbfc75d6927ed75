"""The target of a run: this machine, or the GPU nodes described by `runtime.cluster`, maybe
elsewhere.
"""

import os
from dataclasses import dataclass

import torch

from megatron_rl.config.gpus import find_gpu
from megatron_rl.config.settings import Settings
from megatron_rl.device import Device, local_capability, local_device, quiet_megatron_imports
from megatron_rl.runtime.placement import Needs, Placement, nodes_needed, place

with quiet_megatron_imports():
    from megatron_rl.models.attention.attention_choice import Attention, resolve_attention
    from megatron_rl.models.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Device of the ranks, compute capability of the GPUs, and the slots of every node.

    `nodes` is None when only a Ray cluster knows. With `here` the ranks have this machine's
    packages; otherwise Transformer Engine is assumed.
    """

    device: Device
    capability: tuple[int, int] | None
    here: bool
    nodes: tuple[int, ...] | None

    def attention(self, settings: Settings, spec: ModelSpec) -> Attention:
        """Return the attention of a model of `spec`.

        Raises UserError for a requested but missing one.
        """
        model, cp = settings.model, settings.training.topology.cp
        installed = None if self.here else True
        return resolve_attention(model.attention, spec, overrides=model.megatron, cp=cp, capability=self.capability, installed=installed)

    def placement(self, settings: Settings) -> Placement | None:
        """Return the placement, None when only a Ray cluster knows.

        Raises UserError for too few slots.
        """
        return None if self.nodes is None else place(Needs.of(settings, device_kind=self.device.kind), nodes=self.nodes)


def find_target(settings: Settings, *, config_only: bool) -> Target:
    """Return the target of a run of these settings, here, or with `config_only` elsewhere.

    Raises UserError for an unknown GPU type and for an engine larger than a node.
    """
    runtime = settings.runtime
    if runtime.cluster.gpu is not None and (config_only or runtime.ray_address is not None):
        return _described(settings, runtime.cluster.gpu)
    device = local_device()
    if runtime.ray_address is not None:
        return Target(device=device, capability=local_capability(), here=True, nodes=None)
    if device.kind == "cuda":
        return Target(device=device, capability=local_capability(), here=True, nodes=(torch.cuda.device_count(),))
    # A CPU is shared where there are too few: slower, but right.
    slots = max(os.cpu_count() or 1, Needs.of(settings, device_kind="cpu").slots)
    return Target(device=device, capability=local_capability(), here=True, nodes=(slots,))


def _described(settings: Settings, gpu: str) -> Target:
    cluster, kind = settings.runtime.cluster, find_gpu(gpu)
    slots = cluster.gpus_per_node or kind.per_node
    count = cluster.num_nodes or nodes_needed(Needs.of(settings, device_kind="cuda"), slots_per_node=slots)
    return Target(
        device=Device("cuda", torch.device("cuda", 0), "nccl"),
        capability=kind.capability,
        here=False,
        nodes=(slots,) * count,
    )
