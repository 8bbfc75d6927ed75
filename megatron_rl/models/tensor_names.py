"""What a family calls the tensors of a layer in its Hugging Face checkpoints, where families differ."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names below `model.layers.N.`, as most families have them.

    The norms stand before attention, behind it, before the MLP and behind it; a layer lacks one whose name is None. `qkv` and `gate_up`
    name the one tensor that holds them one above the other; None says that each has its own. `mixture` is the module of router and experts,
    `router` its router, `expert` the gate, up and down projection of an expert. Where `stacked_experts`, files have those of all experts in
    one tensor each, gate and up in turns, see `expert_stacks`.
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
        """Whether what attention and MLP give is normalised before it is added."""
        return self.attention_output_norm is not None or self.mlp_output_norm is not None


USUAL_NAMES = TensorNames()
