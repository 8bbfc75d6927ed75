"""What a model, by its config.json alone, forbids a run: asked by `train --check` and by `plan` alike."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_fields import Attention
from megatron_rl.models.freezing import frozen_rules
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.training.expert_load import check_routing_replay
from megatron_rl.training.topology import Topology


def check_layout(topology: Topology, spec: ModelSpec, megatron: Mapping[str, Any]) -> None:
    """Raise UserError when the model cannot be divided as `topology` and the user's fields of megatron-core's configuration ask."""
    topology.check_model(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_groups=spec.num_kv_heads,
        ffn_size=spec.ffn_hidden_size,
        megatron=megatron,
    )


def check_model(settings: Settings, spec: ModelSpec, *, dtype: torch.dtype, attention: Attention) -> None:
    """Raise UserError when a model of `spec` cannot be divided, configured, frozen or asked for tokens as `settings` say."""
    check_layout(Topology.of(settings.training.topology), spec, settings.model.megatron)
    transformer_config(spec, topology=settings.training.topology, dtype=dtype, overrides=settings.model.megatron, attention=attention)
    frozen_rules(spec, settings.training.frozen)
    check_routing_replay(settings.model, settings.training, spec)
    if not settings.supervised:
        _check_context(settings, spec)


def _check_context(settings: Settings, spec: ModelSpec) -> None:
    prompt, response = settings.data.max_prompt_tokens, settings.rollout.sampling.max_response_tokens
    context = spec.max_position_embeddings
    if prompt + response > context:
        raise UserError(
            f"data.max_prompt_tokens {prompt} + rollout.sampling.max_response_tokens {response} = {prompt + response} tokens, more than "
            f"the {context} that the model at {settings.model.path} can attend to (max_position_embeddings); allow fewer tokens"
        )
