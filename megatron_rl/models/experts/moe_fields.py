"""Experts and their routers in megatron-core's configuration: refusals and valid layouts."""

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.experts.moe_spec import MoeSpec

BALANCED_BY = "seq_aux_loss"
"""The one load-balancing type with a coefficient that is supported: the balance of each sequence."""


def check_expert_layout(moe: MoeSpec | None, topology: TopologySettings) -> None:
    """Raise UserError, with the arithmetic, when the ranks of `topology` cannot share the experts; `moe` None is a model without."""
    etp = topology.expert_tp
    if moe is None:
        _check_no_expert_layout(topology)
        return
    if moe.num_experts % topology.ep:
        ranks = topology.num_ranks // (etp * topology.pp)
        fitting = [size for size in range(1, ranks + 1) if moe.num_experts % size == 0 and ranks % size == 0]
        raise UserError(
            f"training.topology.ep is {topology.ep}, but {moe.num_experts} experts / {topology.ep} ranks is not a whole number; "
            f"choose ep among {fitting}"
        )
    if etp != topology.tp and topology.ep == 1:
        raise UserError(
            f"training.topology.etp is {etp} with tp {topology.tp} and ep 1, but megatron-core sums the gradients of experts over their "
            "own data-parallel ranks only under expert parallelism; unset etp, or set ep to 2 or more"
        )
    if moe.ffn_hidden_size % etp:
        raise UserError(
            f"training.topology.etp is {etp}, but the {moe.ffn_hidden_size} columns of an expert / {etp} ranks is not a whole number; "
            "set training.topology.etp to a divisor, 1 keeps experts whole"
        )
    if moe.shared_ffn_hidden_size % topology.tp:
        raise UserError(
            f"training.topology.tp is {topology.tp}, but the {moe.shared_ffn_hidden_size} columns of the shared experts / {topology.tp} "
            "ranks is not a whole number; choose another tp"
        )
    if topology.tp > 1 and not topology.sequence_parallel:
        raise UserError(
            f"training.topology.tp is {topology.tp} without sequence parallelism, but experts get their tokens sharded over the tensor "
            "parallel ranks; set training.topology.sequence_parallel to true"
        )


def _check_no_expert_layout(topology: TopologySettings) -> None:
    given = ({"ep": topology.ep} if topology.ep > 1 else {}) | ({"etp": topology.etp} if topology.etp not in (None, 1, topology.tp) else {})
    if given:
        sizes = " and ".join(f"{name} {size}" for name, size in given.items())
        raise UserError(f"training.topology has {sizes}, but the model has no experts; unset {' and '.join(given)}")


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Return true when the layer, counted from 0 over the whole model, is a mixture of experts."""
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    return bool(pattern[layer]) if isinstance(pattern, list) else layer % pattern == 0


def num_mixture_layers(config: TransformerConfig, *, before: int | None = None) -> int:
    """Count the model's layers with experts, among all layers or the first `before`."""
    return sum(has_experts(config, layer) for layer in range(config.num_layers if before is None else before))


def check_routing(config: TransformerConfig) -> None:
    """Raise UserError for fields that tie a router to the packing, the layout or chance."""
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


def balance_coefficient(config: TransformerConfig) -> float:
    """Return the coefficient of the sequence-wise loss. Raises UserError for other losses."""
    kinds, coefs = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    num_given = [len(value) if isinstance(value, list) else None for value in (kinds, coefs)]
    if num_given[0] != num_given[1]:
        raise UserError(
            f"model.megatron.moe_aux_loss_coeff is {coefs} for moe_router_load_balancing_type {kinds!r}; give a number for each kind"
        )
    pairs = list(zip(kinds, coefs, strict=True)) if isinstance(kinds, list) else [(kinds, coefs)]
    for kind, coef in pairs:
        stateful = kind in ("sinkhorn", "quantile_balancing")
        if stateful or (coef and kind != BALANCED_BY):
            strength = "" if stateful else f" with moe_aux_loss_coeff {coef}"
            raise UserError(
                f"model.megatron.moe_router_load_balancing_type is {kind!r}{strength}, which balances experts over the sequences that "
                f"share a micro-batch, so that two layouts would train differently; use {BALANCED_BY}, the balance of each sequence"
            )
    return float(sum(coef for kind, coef in pairs if kind == BALANCED_BY))
