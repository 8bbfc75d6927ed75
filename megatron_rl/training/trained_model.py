"""A model in training: chunks on this rank with gradient buffers, optimizer, and learning rate."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from megatron_rl.checkpoints.stored_weights import load_hf_weights
from megatron_rl.config.derived import dtype_name
from megatron_rl.config.settings import ModelSettings, TrainingSettings
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import resolve_attention
from megatron_rl.models.build import TrainedModel, build_model
from megatron_rl.models.freezing import freeze
from megatron_rl.models.language_model_head import replace_heads
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.parameter_marks import mark_parameters
from megatron_rl.system.device import Device, local_capability, prepare_megatron
from megatron_rl.training.collectives import reports_of_ranks
from megatron_rl.training.optimizer import build_optimizer, build_scheduler, make_configs, wrap_ddp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_trained_model(
    model: ModelSettings,
    training: TrainingSettings,
    spec: ModelSpec,
    *,
    device: Device,
    optimizer: Mapping[str, Any],
    total_steps: int | None,
    with_value_head: bool = False,
    with_weights: bool = True,
) -> TrainedModel:
    """Build the model of `model.path` with weights, and an optimizer of the fields `optimizer`, over `total_steps` steps.

    `with_value_head` makes a critic: one value for each position in place of logits. Without
    weights only sizes can be asked. Collective; megatron's parallel state must be initialised.
    Raises UserError for contradictions with the model, the layout or the installed megatron-core.
    """
    dtype = model_dtype(model, device)
    attention = resolve_attention(model.attention, spec, overrides=model.megatron, cp=training.topology.cp, capability=local_capability())
    config = transformer_config(spec, topology=training.topology, dtype=dtype, overrides=model.megatron, attention=attention)
    chunks = build_model(spec, config, attention=attention)
    mark_parameters(chunks, spec)
    if with_weights:
        load_hf_weights(chunks, spec, model.path)
    # Runs before a critic's head takes the name of the replaced head, which may be tied to frozen embeddings.
    freeze(chunks, spec, training.frozen)
    if with_value_head:
        replace_heads(chunks)
    # Building a model imports more of megatron-core, and the shims must reach the new modules too.
    prepare_megatron(device)
    optimizer_config, ddp_config = make_configs(optimizer, training.ddp, dtype=dtype)
    trains = any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters())
    if training.frozen and optimizer_config.use_distributed_optimizer and not all(reports_of_ranks(trains)):
        raise UserError(
            "training.frozen leaves a pipeline stage with nothing to train, which megatron-core's distributed optimizer cannot save; "
            "set training.optimizer.use_distributed_optimizer to false, freeze less, or choose another training.topology.pp"
        )
    wrapped = wrap_ddp(chunks, config, ddp_config)
    built = build_optimizer(optimizer_config, wrapped)
    scheduler = build_scheduler(built, optimizer_config, training.schedule, total_steps=total_steps)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = built.scale_loss
    return TrainedModel(wrapped, built, scheduler)


def model_dtype(model: ModelSettings, device: Device) -> torch.dtype:
    """Return the parameters' dtype for `model.dtype` on `device`."""
    return DTYPES[dtype_name(model, device_kind=device.kind)]
