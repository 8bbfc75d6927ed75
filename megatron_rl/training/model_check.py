"""Limits of a run by the model's config.json alone, for `train --check` and `plan` alike."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.settings import ModelSettings, SamplingSettings, TrainingSettings
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import Attention
from megatron_rl.models.freezing import frozen_rules
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.training.expert_load import check_routing_replay
from megatron_rl.training.topology import Topology


def check_layout(topology: Topology, spec: ModelSpec, megatron: Mapping[str, Any]) -> None:
    """Raise UserError when the model cannot be divided as `topology` and the user's fields of megatron-core's configuration ask."""
    topology.check_model(spec, megatron)
    if spec.qk_norm_over_heads and spec.num_kv_heads % topology.tp:
        raise UserError(
            f"training.topology: {topology}: tp {topology.tp} ranks would share {spec.num_kv_heads} key-value heads, over all of which "
            f"{spec.architecture} has one norm; choose a tp that divides {spec.num_kv_heads}"
        )
    if spec.linear_bias and spec.moe is not None and topology.etp != 1:
        raise UserError(
            f"training.topology: {topology}: etp is {topology.etp}, but megatron-core keeps experts with biases, as {spec.architecture} "
            "has them, whole; set training.topology.etp to 1, and with a tp above 1 ep to 2 or more"
        )


def check_model(model: ModelSettings, training: TrainingSettings, spec: ModelSpec, *, dtype: torch.dtype, attention: Attention) -> None:
    """Raise UserError when a model of `spec` cannot be divided, configured or frozen as the settings say."""
    check_layout(Topology.of(training.topology), spec, model.megatron)
    transformer_config(spec, topology=training.topology, dtype=dtype, overrides=model.megatron, attention=attention)
    frozen_rules(spec, training.frozen)
    check_routing_replay(model, training, spec)


def check_tokens(
    spec: ModelSpec,
    *,
    path: Path,
    max_prompt_tokens: int,
    sampling: SamplingSettings,
    name: str = "rollout.sampling",
    biased: Iterable[int] = (),
) -> None:
    """Raise UserError when the model of `spec` at `path` cannot attend to a whole response, or lacks a stop token or a `biased` one.

    `name` is the section of the settings that has `sampling`.
    """
    response, context = sampling.max_response_tokens, spec.max_position_embeddings
    total = max_prompt_tokens + response
    tokens = f"data.max_prompt_tokens {max_prompt_tokens} + {name}.max_response_tokens {response} = {total}"
    if spec.rotary.kind == "longrope" and total > spec.rotary.original_max_position_embeddings:
        raise UserError(
            f"{tokens} tokens, more than the {spec.rotary.original_max_position_embeddings} (original_max_position_embeddings) up to which "
            "SGLang's longrope is the trainer's: above, it turns all tokens of a batch by the long factors and leaves what it has cached; "
            "allow fewer tokens"
        )
    if total > context:
        raise UserError(
            f"{tokens} tokens, more than the {context} that the model at {path} can attend to (max_position_embeddings); allow fewer tokens"
        )
    named = [*(("stop_token_ids", token) for token in sampling.stop_token_ids), *(("logit_bias", token) for token in biased)]
    for field, token in (each for each in named if each[1] >= spec.vocab_size):
        raise UserError(f"{name}.{field} has {token}, needs ids below vocab_size {spec.vocab_size} of config.json in {path}; remove it")
