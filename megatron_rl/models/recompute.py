"""What megatron-core takes for recomputing activations, but cannot run."""

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.device import chosen_backends
from megatron_rl.errors import UserError

_DEFAULT_MODULES = ["core_attn"]
"""What megatron-core fills in, whatever is recomputed."""
_BY_TRANSFORMER_ENGINE = frozenset({"layernorm", "moe_act"})
"""Modules whose checkpoint drops its own output, which megatron-core does with the state of Transformer Engine alone."""


def check_recompute(config: TransformerConfig) -> None:
    """Raise UserError for uniform units of layers that do not divide a stage's layers, and for modules that would not be recomputed."""
    if config.recompute_granularity == "full" and config.recompute_method == "uniform":
        _check_units(config)
    modules = config.recompute_modules or _DEFAULT_MODULES
    if config.recompute_granularity != "selective" and modules != _DEFAULT_MODULES:
        raise UserError(
            f"model.megatron.recompute_modules is {modules}, which has no effect with recompute_granularity "
            f"{config.recompute_granularity}; set model.megatron.recompute_granularity to selective, or remove recompute_modules"
        )
    lacking = _BY_TRANSFORMER_ENGINE.intersection(modules)
    if config.recompute_granularity == "selective" and lacking and chosen_backends()["transformer-engine"] == "not installed":
        raise UserError(
            f"model.megatron.recompute_modules has {', '.join(sorted(lacking))}, which megatron-core recomputes with Transformer Engine "
            "only; remove it, or install Transformer Engine"
        )


def _check_units(config: TransformerConfig) -> None:
    unit = config.recompute_num_layers
    if unit in (None, 1):
        return
    if config.pipeline_model_parallel_layout is not None:
        raise UserError(
            f"model.megatron.recompute_num_layers is {unit} with a pipeline_model_parallel_layout, whose stages may have any number of "
            "layers; set recompute_num_layers to 1"
        )
    vpp = config.virtual_pipeline_model_parallel_size
    for pp_rank in range(config.pipeline_model_parallel_size):
        layers = get_num_layers_to_build(config, vp_stage=None if vpp is None else 0, pp_rank=pp_rank)
        if layers % unit:
            # The last unit would run past the stage's layers.
            raise UserError(
                f"model.megatron.recompute_num_layers is {unit} with recompute_method uniform, but pipeline stage {pp_rank} has {layers} "
                f"layers, which are not divisible by it; choose a divisor of {layers}, or recompute_method block"
            )
