"""Settings of experts in `config.json`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import MOST_PARTS, JsonObject

if TYPE_CHECKING:
    from megatron_rl.models.families.family import Family

ScoreFunction = Literal["softmax", "sigmoid"]
# Of how many experts transformers sums the scores to compare groups. megatron-core sums experts per token / groups per token.
_EXPERTS_THAT_RANK_A_GROUP = 2


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Mixture of experts: number of experts, experts per token, width, and weighing by the router.

    The first `num_dense_layers` layers have a plain MLP. `shared_ffn_hidden_size` is the width of
    all shared experts together, 0 without. `score_function` makes scores of the router's logits.
    The scores of taken experts are normalised to sum to 1 with `normalize_top_k`, then multiplied
    by `routed_scaling_factor`. With `expert_bias` experts are chosen by score + bias, and weighed
    by the score. A token's experts come from `groups_per_token` of `num_groups` groups of experts;
    None means no restriction. With `shared_gate` the output of the shared experts is multiplied by
    the sigmoid of one more logit of the token.
    """

    num_experts: int
    num_experts_per_token: int
    ffn_hidden_size: int
    normalize_top_k: bool
    num_dense_layers: int = 0
    shared_ffn_hidden_size: int = 0
    score_function: ScoreFunction = "softmax"
    expert_bias: bool = False
    num_groups: int | None = None
    groups_per_token: int | None = None
    routed_scaling_factor: float = 1.0
    shared_gate: bool = False

    def is_dense(self, layer: int) -> bool:
        """Return true when the layer, counted from 0 over the whole model, has a plain MLP."""
        return layer < self.num_dense_layers


def parse_moe(file: JsonObject, family: "Family", *, num_layers: int) -> MoeSpec | None:
    """Return the experts of a config.json; None without experts and when all layers are dense.

    Sigmoid scores come with a bias, as in DeepSeek-V3 (https://arxiv.org/abs/2412.19437, 2.1.2).
    Raises UserError for sizes missing, in contradiction, or computed in another way by
    megatron-core's router.
    """
    if family.router is None:
        return None
    sigmoid = family.router == "sigmoid"
    num_dense_layers = file.integer("first_k_dense_replace", least=0) if sigmoid else 0
    if num_dense_layers >= num_layers:
        return None
    spellings = ("n_routed_experts", "num_experts", "num_local_experts")
    given = [key for key in spellings if file.values.get(key) is not None] or ["n_routed_experts" if sigmoid else "num_experts"]
    width, normalised = file.integer(family.expert_width_key), family.normalize_top_k
    moe = MoeSpec(
        num_experts=file.integer(given[0], most=MOST_PARTS),
        num_experts_per_token=file.integer("num_experts_per_tok"),
        ffn_hidden_size=width,
        normalize_top_k=file.boolean("norm_topk_prob", optional=True) if normalised is None else normalised,
        num_dense_layers=num_dense_layers,
        score_function=family.router,
        expert_bias=sigmoid,
        shared_gate=family.shared_gate,
        **(_sigmoid_fields(file, width) if sigmoid else {}),
    )
    if family.shared_gate:
        moe = replace(moe, shared_ffn_hidden_size=file.integer("shared_expert_intermediate_size"))
    _check_router(moe, file.origin)
    return moe


def _sigmoid_fields(file: JsonObject, width: int) -> dict[str, Any]:
    """Return the fields read with sigmoid scores; those about groups only with a restriction to groups."""
    shared = width * file.integer("n_shared_experts", least=0)
    num_groups, per_token = file.integer("n_group"), file.integer("topk_group")
    if per_token > num_groups:
        raise UserError(f"{file.origin} takes experts from {per_token} of {num_groups} groups (topk_group, n_group); correct the file")
    groups = {} if per_token == num_groups else {"num_groups": num_groups, "groups_per_token": per_token}
    # Families differ in the meaning of an absent factor or number of groups, so both are required.
    return {"shared_ffn_hidden_size": shared, **groups, "routed_scaling_factor": file.number("routed_scaling_factor")}


def _check_router(moe: MoeSpec, origin: str) -> None:
    taken = moe.num_experts_per_token
    if taken > moe.num_experts:
        raise UserError(f"{origin} takes {taken} of {moe.num_experts} experts for each token; correct the file")
    if moe.score_function == "sigmoid" and moe.normalize_top_k != (taken > 1):
        raise UserError(
            f"{origin} has norm_topk_prob {moe.normalize_top_k} with {taken} experts per token, but megatron-core normalises sigmoid "
            "scores of more than one expert always, and of one never; use another model"
        )
    if moe.score_function == "softmax" and moe.normalize_top_k and taken == 1:
        raise UserError(
            f"{origin} has num_experts_per_tok 1 with normalised weights, needs 2 or more: the weight of one expert is always 1, and its "
            "router would never learn; use another model"
        )
    if moe.num_groups is None or moe.groups_per_token is None:
        return
    if moe.num_experts % moe.num_groups:
        raise UserError(f"{origin} has {moe.num_experts} experts in {moe.num_groups} groups, needs a multiple; correct the file")
    ranked_by = taken // moe.groups_per_token
    if ranked_by != _EXPERTS_THAT_RANK_A_GROUP:
        raise UserError(
            f"{origin} takes {taken} experts from {moe.groups_per_token} groups, so megatron-core would compare groups by their best "
            f"{ranked_by}, the model compares them by their best {_EXPERTS_THAT_RANK_A_GROUP}; use another model"
        )
