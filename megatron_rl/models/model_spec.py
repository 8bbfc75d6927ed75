"""The architecture of a model, as the record used to build everything else in this room."""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.models.attention.attention_spec import MlaSpec
from megatron_rl.models.attention.rotary import RotarySpec
from megatron_rl.models.experts.moe_spec import MoeSpec
from megatron_rl.models.tensor_names import USUAL_NAMES, TensorNames

Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"]
"""Of the gate of an MLP. The clamped one is gpt-oss's: x sigmoid(1.702 x) of a gate of at most the limit, times 1 + up within the limit."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model's architecture, in whole-model sizes before any parallel split.

    `vocab_size` is without padding. `head_dim` are channels of a query and of a key head. The first
    `rotary_fraction` of these channels are rotated; with latent attention, `mla`, all of the rotary
    part is. Layers in `sliding_layers`, counted from 0, see only the last `sliding_window` tokens,
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
    rotary_fraction: float = 1.0
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
        """Number of rotated channels of a head."""
        return self.mla.qk_rope_head_dim if self.mla is not None else int(self.head_dim * self.rotary_fraction)

    @property
    def value_dim(self) -> int:
        """Channels of a value head, as passed by attention to the output projection per head."""
        return self.mla.v_head_dim if self.mla is not None else self.head_dim

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor parallel size."""
        return -(-self.vocab_size // tp) * tp
