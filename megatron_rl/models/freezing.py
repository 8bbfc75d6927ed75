"""Weights left unchanged by training, chosen by patterns over Hugging Face tensor names."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from megatron_rl.errors import UserError
from megatron_rl.models.build import PolicyModel
from megatron_rl.models.hf_weights import global_parameters
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import Rule, rules, stored_name, tensor_shapes


def frozen_rules(spec: ModelSpec, patterns: Sequence[str]) -> list[Rule]:
    """Return the parameters frozen by `patterns` (of fnmatch, over Hugging Face names).

    Raises UserError for a pattern without a matching tensor, for patterns matching only some of the
    tensors of one Megatron parameter, and when nothing is left to train.
    """
    names = [name for name, _ in tensor_shapes(spec)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            closest = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
            raise UserError(
                f"training.frozen has the pattern {pattern!r}, which matches no tensor of the model; the closest name is {closest}"
            )
    every = list(rules(spec))
    found = [rule for rule in every if _frozen_names(rule, patterns)]
    for rule in found:
        frozen = _frozen_names(rule, patterns)
        if len(frozen) < len(rule.hugging_face):
            others = [name for name in rule.hugging_face if name not in frozen]
            raise UserError(
                f"training.frozen {list(patterns)} freezes {', '.join(frozen)} but not {', '.join(others)}, which are one parameter in "
                "Megatron and train or stay together; freeze all of them or none"
            )
    if len(found) == len(every):
        raise UserError(f"training.frozen {list(patterns)} freezes every weight, so there is nothing to train; leave some out")
    return found


def _frozen_names(rule: Rule, patterns: Sequence[str]) -> list[str]:
    return [name for name in rule.hugging_face if any(fnmatchcase(stored_name(name), pattern) for pattern in patterns)]


def freeze(chunks: Sequence[PolicyModel], spec: ModelSpec, patterns: Sequence[str]) -> None:
    """Turn off gradients by `patterns`, before DDP. Raises UserError as `frozen_rules`."""
    parameters = global_parameters(chunks)
    bias_rate = chunks[0].config.moe_router_bias_update_rate
    for rule in frozen_rules(spec, patterns):
        if rule.megatron.endswith(".router.expert_bias") and bias_rate:
            raise UserError(
                f"training.frozen {list(patterns)} freezes {rule.hugging_face[0]}, but model.megatron.moe_router_bias_update_rate "
                f"{bias_rate} moves it; set the rate to 0, or leave the bias out"
            )
        for name in (rule.megatron, rule.transformer_engine):
            if name in parameters:
                parameters[name].requires_grad_(False)
    for chunk in chunks:
        recomputes = chunk.config.recompute_granularity is not None and any(parameter.requires_grad for parameter in chunk.parameters())
        if recomputes and chunk.pre_process and not chunk.embedding.word_embeddings.weight.requires_grad:
            chunk.embedding.register_forward_hook(_start_graph)


def _start_graph(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """Let frozen embeddings [T, 1, H] take a gradient, without which recomputed layers get none."""
    return output.requires_grad_() if module.training else output
