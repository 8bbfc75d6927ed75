"""Names of a layer's tensors in Hugging Face checkpoints, for families with different names."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names below `model.layers.N.`, with the most common names as defaults.

    The norms stand before attention, behind attention, before the MLP and behind the MLP. A name of
    None means no such norm. `qkv` and `gate_up` name one tensor with all parts one above the other;
    None means a tensor for each part. `mixture` is the module of router and experts, `router` its
    router, `expert` the gate, up and down projection of an expert. With `stacked_experts`, files
    have the projections of all experts in one tensor each, gate and up in turns, see
    `expert_stacks`.
    """

    attention_input_norm: str | None = "input_layernorm"
    attention_output_norm: str | None = None
    mlp_input_norm: str | None = "post_attention_layernorm"
    mlp_output_norm: str | None = None
    qkv: str | None = None
    gate_up: str | None = None
    mixture: str = "mlp"
    router: str = "gate"
    stacked_experts: bool = False
    shared_experts: str = "shared_experts"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def has_output_norms(self) -> bool:
        """Return true when outputs of attention and MLP are normalised before the addition."""
        return self.attention_output_norm is not None or self.mlp_output_norm is not None


USUAL_NAMES = TensorNames()
