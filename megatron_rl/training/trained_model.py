"""A model in training: chunks on this rank with gradient buffers, optimizer, and learning rate."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from megatron_rl.checkpoints.stored_weights import load_hf_weights
from megatron_rl.config.derived import dtype_name
from megatron_rl.config.settings import ModelSettings, TrainingSettings
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import resolve_attention
from megatron_rl.models.build import PolicyModel, TrainedModel, build_model
from megatron_rl.models.freezing import freeze
from megatron_rl.models.hf_weights import global_parameters, held_name
from megatron_rl.models.language_model_head import replace_heads
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import Sharding, rules
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


def mark_parameters(chunks: Sequence[PolicyModel], spec: ModelSpec) -> None:
    """Give every parameter of this rank's chunks the mark of its layout, for megatron-core's sums over ranks.

    Gradients are clipped by the gradient norm, and `tensor_model_parallel` decides the ranks counting
    a parameter: every tensor parallel rank with the mark, rank 0 alone without. With Transformer
    Engine the builder of a layer sets the marks, and releases differ. megatron-core 0.16 leaves the
    mark on the replicated down projections of latent attention; Transformer Engine 2.18 leaves the
    mark off the weights of experts. The chunks are not wrapped in DDP yet. The other marks are asserted to fit: `sequence_parallel`
    on parameters replicated over ranks with different tokens, and `allreduce` false on the experts
    of expert parallel ranks.
    """
    config, parameters = chunks[0].config, global_parameters(chunks)
    for rule in rules(spec):
        parameter = parameters.pop(held_name(rule, parameters), None)
        if parameter is None or rule.float32:
            continue  # of another rank, or a router's bias
        replicated = rule.sharding is Sharding.REPLICATED
        marks = vars(parameter)
        # Replicated means the same values on all tensor parallel ranks. Biases of whole experts are
        # different: each rank has its own.
        marks["tensor_model_parallel"] = not replicated or rule.of_expert
        sums_over_tokens, own_group = bool(marks.get("sequence_parallel", False)), not marks.get("allreduce", True)
        assert sums_over_tokens == (config.sequence_parallel and replicated and not rule.of_expert), (
            f"{rule.megatron} is {rule.sharding.value} with sequence parallelism {config.sequence_parallel}, but its mark "
            f"sequence_parallel is {sums_over_tokens}: its gradient would not be the sum over ranks"
        )
        assert own_group == (rule.of_expert and config.expert_model_parallel_size > 1), (
            f"{rule.megatron} is {'' if rule.of_expert else 'not '}of an expert, but its mark allreduce is {not own_group}: its gradient "
            "would be summed over the wrong ranks"
        )
    assert not parameters, f"the weight table has no row for {next(iter(parameters))}"


def model_dtype(model: ModelSettings, device: Device) -> torch.dtype:
    """Return the parameters' dtype for `model.dtype` on `device`."""
    return DTYPES[dtype_name(model, device_kind=device.kind)]
