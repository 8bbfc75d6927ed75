"""Fields of megatron-core's configuration that say how routers behave, and those that this trainer refuses."""

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.errors import UserError

BALANCED_BY = "seq_aux_loss"
"""The one load-balancing type with a coefficient that is supported: the balance of each sequence."""


def num_mixture_layers(config: TransformerConfig, *, before: int | None = None) -> int:
    """How many of the model's layers have experts, of all or of the first `before`."""
    count, pattern = config.num_layers if before is None else before, config.moe_layer_freq
    return sum(pattern[:count]) if isinstance(pattern, list) else -(-count // pattern)


def check_routing(config: TransformerConfig) -> None:
    """Raise UserError for fields by which a router would do what depends on the packing or the layout, or differs between two runs."""
    balance_coefficient(config)
    for name in ("moe_expert_capacity_factor", "moe_input_jitter_eps"):
        if getattr(config, name) is not None:
            raise UserError(
                f"model.megatron.{name} is {getattr(config, name)}, which makes a token's experts depend on the other tokens of its "
                "micro-batch or on chance, so that two layouts would train differently; remove it"
            )
    if config.moe_router_topk_limited_devices is not None:
        raise UserError(
            f"model.megatron.moe_router_topk_limited_devices is {config.moe_router_topk_limited_devices}, which lets training.topology.ep "
            "decide among which experts a token chooses; remove it"
        )
    if config.recompute_granularity == "selective" and "moe" in config.recompute_modules and (config.fp8 or config.fp4):
        raise UserError(
            "model.megatron.recompute_modules has moe together with fp8, which would route tokens of another micro-batch when it runs "
            "again; set model.megatron.recompute_granularity to full"
        )


def balance_coefficient(config: TransformerConfig) -> float:
    """Coefficient of the sequence-wise balance loss. Raises UserError for the other kinds, whose value depends on the packing."""
    kinds, coefs = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    lengths = [len(value) if isinstance(value, list) else None for value in (kinds, coefs)]
    if lengths[0] != lengths[1]:
        raise UserError(
            f"model.megatron.moe_aux_loss_coeff is {coefs} for moe_router_load_balancing_type {kinds!r}; give a number for each kind"
        )
    pairs = list(zip(kinds, coefs, strict=True)) if isinstance(kinds, list) else [(kinds, coefs)]
    for kind, coef in pairs:
        stateful = kind in ("sinkhorn", "quantile_balancing")
        if stateful or (coef and kind != BALANCED_BY):
            strength = "" if stateful else f" with moe_aux_loss_coeff {coef}"
            raise UserError(
                f"model.megatron.moe_router_load_balancing_type is {kind!r}{strength}, which balances experts over whichever sequences "
                f"share a micro-batch, so that two layouts would train differently; use {BALANCED_BY}, the balance of each sequence"
            )
    return float(sum(coef for kind, coef in pairs if kind == BALANCED_BY))
