"""The experts that an engine of a mixture of experts chose for each token, as the server reports them."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.errors import EngineError
from megatron_rl.types import Experts


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """Shape of a model's records: `num_layers`, the first `num_dense_layers` without experts; K
    experts.

    K is the number of experts of a token.
    """

    num_layers: int
    num_dense_layers: int
    num_experts: int
    experts_per_token: int


def read_routed_experts(meta: dict[str, Any], shape: MixtureShape, *, prompt_length: int, response_length: int) -> Experts:
    """Return the experts [P + R - 1, L, K] of `meta`, the `meta_info` of a response, in L expert
    layers.

    SGLang routes every token of prompt and response except the last, only drawn and not yet
    computed. For a dense layer SGLang reports zeros. A response aborted before the first token has
    no record:
    [0, L, K].

    Raises EngineError for a missing record, one of another length, or one with experts unknown to
    the model.
    """
    kind: Any = np.uint8 if shape.num_experts <= 256 else np.uint16
    num_mixture_layers = shape.num_layers - shape.num_dense_layers
    text = meta.get("routed_experts")
    if text is None:
        if response_length:
            raise EngineError(
                f"the engine answered {response_length} tokens without the experts that it routed them to, which training.routing_replay "
                "needs; use an SGLang release that records them for this model, or turn training.routing_replay off"
            )
        return np.empty((0, num_mixture_layers, shape.experts_per_token), kind)
    flat = np.frombuffer(base64.b64decode(text), "<i4")
    num_tokens = prompt_length + response_length - 1
    needed = num_tokens * shape.num_layers * shape.experts_per_token
    if len(flat) != needed:
        raise EngineError(
            f"the engine recorded {len(flat)} experts for a prompt of {prompt_length} and a response of {response_length} tokens, needs "
            f"{num_tokens} tokens x {shape.num_layers} layers x {shape.experts_per_token} experts = {needed}"
        )
    experts = flat.reshape(num_tokens, shape.num_layers, shape.experts_per_token)[:, shape.num_dense_layers :]
    if experts.size and not 0 <= experts.min() <= experts.max() < shape.num_experts:
        raise EngineError(f"the engine recorded experts {experts.min()} to {experts.max()}, the model has 0 to {shape.num_experts - 1}")
    return experts.astype(kind)
