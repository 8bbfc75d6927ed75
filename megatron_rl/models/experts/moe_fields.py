"""Experts and their routers in megatron-core's configuration: fields, refusals and valid layouts."""

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.errors import UserError
from megatron_rl.models.experts.moe_spec import MoeSpec

if TYPE_CHECKING:
    from megatron_rl.config.settings import TopologySettings

BALANCED_BY = "seq_aux_loss"
"""The one load-balancing type with a coefficient that is supported: the balance of each sequence."""


def moe_fields(moe: MoeSpec | None, *, num_layers: int) -> dict[str, Any]:
    """Return the fields of megatron-core's TransformerConfig fixed by these experts.

    `moe` None is a model without experts.
    """
    if moe is None:
        return {"num_moe_experts": None}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [0 if moe.is_dense(layer) else 1 for layer in range(num_layers)],
        "moe_router_topk": moe.num_experts_per_token,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_score_function": moe.score_function,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.groups_per_token,
        "moe_router_topk_scaling_factor": None if moe.routed_scaling_factor == 1.0 else moe.routed_scaling_factor,
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.normalize_top_k,
        "moe_router_force_load_balancing": False,
        "moe_apply_probs_on_input": False,
        "moe_latent_size": None,
    }


def default_moe_fields(*, grouped: bool) -> dict[str, Any]:
    """Return the defaults open to overrides.

    `grouped` computes all experts of a rank in one call, a feature of Transformer Engine.
    """
    return {
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": grouped,
        # Sums of many products decide the choice of experts: in bfloat16 near ties would fall either way.
        "moe_router_dtype": "fp32",
        # Pre-training moves the bias until all experts are used alike. A prompt set of RL is narrow. The
        # bias would push its tokens away from the best experts, and change the policy behind the
        # objective's back.
        "moe_router_bias_update_rate": 0.0,
    }


def check_expert_layout(moe: MoeSpec | None, topology: "TopologySettings") -> None:
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


def _check_no_expert_layout(topology: "TopologySettings") -> None:
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
    """Raise UserError for fields giving a router unwanted dependencies.

    A router must not depend on the packing or the layout, nor differ between two runs.
    """
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
    """Return the coefficient of the sequence-wise balance loss.

    Raises UserError for the other kinds of losses, because their values depend on the packing.
    """
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
                f"model.megatron.moe_router_load_balancing_type is {kind!r}{strength}, which balances experts over the sequences that "
                f"share a micro-batch, so that two layouts would train differently; use {BALANCED_BY}, the balance of each sequence"
            )
    return float(sum(coef for kind, coef in pairs if kind == BALANCED_BY))
