"""Selection of the ranks to build for a layout: one for each kind of pipeline stage."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rl.config.settings import Settings
from megatron_rl.device import local_device
from megatron_rl.models.experts.moe_fields import has_experts
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.planning.meta import rank_without_memory
from megatron_rl.planning.rank import RankMemory, TeacherMemory, full_batch, measure_rank, measure_teacher
from megatron_rl.training.teacher import teacher_config
from megatron_rl.training.topology import Topology
from megatron_rl.training.trained_model import model_dtype

Memory = TypeVar("Memory", RankMemory, TeacherMemory)


def measure_stages(settings: Settings, spec: ModelSpec, *, fused: bool, critic: bool) -> tuple[RankMemory, ...]:
    """Return the memory of the first rank of each pipeline stage, of the policy or a `critic`.

    The order is the pipeline's. Raises UserError for refusals of the model or megatron-core.
    """
    topology, device = Topology.of(settings.training.topology), local_device()
    dtype, fields = model_dtype(settings.model, device), settings.model.megatron
    config = transformer_config(spec, topology=settings.training.topology, dtype=dtype, overrides=fields, attention="torch")
    batch = full_batch(settings, topology)
    measure = partial(measure_rank, settings, spec, topology, device=device, batch=batch, fused=fused, critic=critic)
    return _stages(config, topology, measure, fused=fused)


def measure_teacher_stages(settings: Settings, spec: ModelSpec, *, fused: bool) -> tuple[TeacherMemory, ...]:
    """Return the same for the teacher of `spec`.

    Raises UserError also for a teacher that does not fit the policy's layout.
    """
    topology, device = Topology.of(settings.training.topology), local_device()
    dtype = model_dtype(settings.model, device)
    config = teacher_config(settings.model, settings.training.topology, spec, dtype=dtype, attention="torch")
    batch = full_batch(settings, topology)
    measure = partial(measure_teacher, settings, spec, topology, device=device, batch=batch, fused=fused)
    return _stages(config, topology, measure, fused=fused)


def _stages(config: TransformerConfig, topology: Topology, measure: Callable[[], Memory], *, fused: bool) -> tuple[Memory, ...]:
    """Return the result of `measure` on the first rank of each stage.

    Stages of the same layers are built once.
    """
    measured: dict[object, Memory] = {}
    stages = []
    for stage in range(topology.pp):
        kind = (stage == 0, stage == topology.pp - 1, _layers(config, topology, stage))
        if kind not in measured:
            with rank_without_memory(topology, rank=topology.first_rank(stage), fused=fused):
                measured[kind] = measure()
        stages.append(measured[kind])
    return tuple(stages)


def _layers(config: TransformerConfig, topology: Topology, stage: int) -> tuple[tuple[bool, ...], ...]:
    """Return True for each layer with experts, for each chunk of a stage."""
    layers = []
    for chunk in [None] if topology.vpp == 1 else range(topology.vpp):
        first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
        count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
        layers.append(tuple(has_experts(config, layer) for layer in range(first, first + count)))
    return tuple(layers)
