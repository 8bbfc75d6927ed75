"""The target of a run: this machine, or the GPU nodes described by `runtime.cluster`, maybe elsewhere."""

import os
from dataclasses import dataclass
from functools import partial

import torch

from megatron_rl.config.gpus import find_gpu
from megatron_rl.config.settings import ModelSettings, RolloutSettings, RuntimeSettings, TopologySettings
from megatron_rl.models.attention.attention_choice import Attention, resolve_attention
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.runtime.placement import Needs, Placement, nodes_needed, place
from megatron_rl.system.device import Device, local_capability, local_device


def no_gpu(gpu: str, where: str) -> str:
    """Return a sentence for a GPU run without a GPU."""
    return (
        f"runtime.cluster.gpu is {gpu}, but {where} has no GPU; start the run on GPU nodes or give the address of their Ray cluster "
        f"(--ray-address), or look at its plan alone with --check --config-only"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Device of the ranks, compute capability of the GPUs, the run's needs, and the slots of every node.

    `nodes` is None when only a Ray cluster knows. With `here` the ranks have this machine's
    packages; otherwise Transformer Engine is assumed.
    """

    device: Device
    capability: tuple[int, int] | None
    here: bool
    needs: Needs
    nodes: tuple[int, ...] | None

    def attention(self, model: ModelSettings, spec: ModelSpec, *, cp: int) -> Attention:
        """Return the attention of a model of `spec`. Raises UserError for a requested but missing one."""
        installed = None if self.here else True
        return resolve_attention(model.attention, spec, overrides=model.megatron, cp=cp, capability=self.capability, installed=installed)

    def placement(self) -> Placement | None:
        """Return the placement, None when only a Ray cluster knows. Raises UserError for too few slots."""
        return None if self.nodes is None else place(self.needs, nodes=self.nodes)


def find_target(topology: TopologySettings, rollout: RolloutSettings | None, runtime: RuntimeSettings, *, config_only: bool) -> Target:
    """Return the target of a run, here, or with `config_only` elsewhere; a run without a `rollout` has no engines.

    Raises UserError for an unknown GPU type and for an engine larger than a node.
    """
    cluster, ray_address = runtime.cluster, runtime.ray_address
    needs_on = partial(Needs.of, topology, rollout, colocate=runtime.colocate)
    if cluster.gpu is not None and (config_only or ray_address is not None):
        kind, needs = find_gpu(cluster.gpu), needs_on(device_kind="cuda")
        slots = cluster.gpus_per_node or kind.per_node
        described = (slots,) * (cluster.num_nodes or nodes_needed(needs, slots_per_node=slots))
        device = Device("cuda", torch.device("cuda", 0), "nccl")
        return Target(device=device, capability=kind.capability, here=False, needs=needs, nodes=described)
    device = local_device()
    needs = needs_on(device_kind=device.kind)
    nodes: tuple[int, ...] | None = None
    if ray_address is None:
        # A CPU is shared where there are too few: slower, but right.
        nodes = (torch.cuda.device_count() if device.kind == "cuda" else max(os.cpu_count() or 1, needs.slots),)
    return Target(device=device, capability=local_capability(), here=True, needs=needs, nodes=nodes)
