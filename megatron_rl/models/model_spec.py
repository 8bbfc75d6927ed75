"""The architecture of a model as records, from which everything else in this room is built."""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.models.attention.rotary import RotarySpec
from megatron_rl.models.experts.moe_spec import MoeSpec

Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"]
"""Of the gate of an MLP. The clamped one is gpt-oss's: x sigmoid(1.702 x) of a gate of at most the limit, times 1 + up within the limit."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names below `model.layers.N.`, with the most common names as defaults.

    The norms stand before attention, behind attention, before the MLP and behind the MLP. A name of
    None means no such norm. `qkv` and `gate_up` name one tensor with all parts one above the other;
    None means a tensor for each part. `mixture` is the module of router and experts, `router` its
    router, `expert` the gate, up and down projection of an expert. With `stacked_experts`, files
    have the projections of all experts in one tensor each, gate and up in turns, see
    `weight_table`.
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


USUAL_NAMES = TensorNames()


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, 2.1).

    Sizes are widths of the latents and of one head, in channels. `q_lora_rank` None means queries
    without a latent. Queries and keys have `qk_nope_head_dim` channels without and
    `qk_rope_head_dim` with rotary embedding; all key heads share the channels with rotary
    embedding.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query and of a key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model's architecture, in whole-model sizes before any parallel split.

    `vocab_size` is without padding. `head_dim` are channels of a query and of a key head, `mla` is
    latent attention. Layers in `sliding_layers`, counted from 0, see only the last `sliding_window` tokens,
    the querying one included. `num_mtp_layers` layers of multi-token prediction may stand behind
    the last layer in a checkpoint and are not built. With `qk_norm_over_heads` the norm of queries
    (and of keys) is over the channels of all heads together. `names` are the names in the files.
    Layers with a window are rotated by `window_rotary` when given. The embedding is multiplied by
    `embedding_scale`, scores by `softmax_scale` (None is 1 / sqrt(`head_dim`)). Norms multiply by 1
    + weight with `zero_centered_norms`. With `linear_bias` every linear layer but the head has a
    bias. `attention_sinks` are logits, one for each head; sinks have a share in every softmax of
    attention and no value.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    norm_epsilon: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    rotary: RotarySpec
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    num_mtp_layers: int = 0
    qk_norm_over_heads: bool = False
    names: TensorNames = USUAL_NAMES
    window_rotary: RotarySpec | None = None
    zero_centered_norms: bool = False
    embedding_scale: float = 1.0
    softmax_scale: float | None = None
    activation: Activation = "silu"
    activation_limit: float | None = None
    linear_bias: bool = False
    attention_sinks: bool = False

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of a head, the first ones."""
        return 2 * len(self.rotary.frequencies)

    @property
    def value_dim(self) -> int:
        """Channels of a value head, as passed by attention to the output projection per head."""
        return self.mla.v_head_dim if self.mla is not None else self.head_dim

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor parallel size."""
        return -(-self.vocab_size // tp) * tp
