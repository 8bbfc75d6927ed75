"""Multi-head latent attention with packed sequences, right under tensor parallelism.

Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, 2.1.

Legend: T tokens on this rank, t tokens of a layer's input (T, or T / tp under sequence
parallelism), H query heads of this rank.

Three things differ from megatron-core's version. The rotary embedding comes from the attention
plan's positions, and so handles packed sequences and context parallelism without a loop over
sequences. The down projections are replicated; upstream's torch layers split the projections over
ranks, and the norm behind then covers only a part of the latent. Without sequence parallelism the
gradient of the shared rotary key is summed over tensor parallel ranks, because each rank has its
heads' part. Values keep their own width.

The norms of the latents take the checkpoint's `rms_norm_eps`, as inference engines do. transformers
always has 1e-6 there.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_rl.models.attention.rotary import RotarySpec, rotate
from megatron_rl.models.packed_sequences import PackedSequences


class ReplicatedLinear(nn.Module):
    """A linear layer without bias, whole on every tensor parallel rank.

    Under sequence parallelism each rank processes its share of the tokens. The mark on the weight
    makes megatron sum the gradient.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig) -> None:
        device = None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, device=device, dtype=config.params_dtype))
        assert config.init_method is not None, "megatron-core fills in a method"
        config.init_method(self.weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - a mark that megatron reads

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        """Outputs [t, output_size] of inputs [t, input_size], and no bias."""
        return nn.functional.linear(inputs, self.weight), None


class LatentAttention(MLASelfAttention):
    """megatron-core's latent attention with this project's projections and rotary embedding.

    The core attention comes from the layer spec. The model's builder sets `rotary`, because
    megatron-core passes only its own config to this class.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self.rotary: RotarySpec | None = None
        del self.rotary_pos_emb
        for name in ("linear_q_down_proj", "linear_kv_down_proj") if config.q_lora_rank is not None else ("linear_kv_down_proj",):
            linear = getattr(self, name)
            if isinstance(linear, ColumnParallelLinear):
                setattr(self, name, ReplicatedLinear(linear.input_size, linear.output_size, config=config))
        if config.q_lora_rank is not None and not config.sequence_parallel:
            for weight in self.q_layernorm.parameters():
                # By the name, megatron takes the weight for a norm of single heads and sums the gradient. Here the
                # gradient is whole on every rank.
                setattr(weight, "average_gradients_across_tp_domain", True)  # noqa: B010 - a mark that megatron reads

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the classes of projections and norms. Called since megatron-core 0.19.

        Of queries without a latent megatron-core norms the hidden states, a second time; no model does.
        """
        if self.config.q_lora_rank is not None:
            return dict(super()._resolve_qk_norm_config(submodules))
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: None = None,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of hidden states [t, 1, hidden]: query and key [T, H, nope + rope], value [T, H, value], latents of query and key [t, rank]."""
        assert isinstance(packed_seq_params, PackedSequences), "call the model with packed_seq_params=packed_sequences(...)"
        assert self.rotary is not None, "build_model sets the rotary embedding"
        assert key_value_states is None and inference_context is None, "only training's self-attention is built"
        queries, latents, rotary_key = self._down(hidden_states.squeeze(1))
        angles = packed_seq_params.angles(self.rotary, dtype=hidden_states.dtype)
        inputs = (queries, latents, rotary_key, *angles)
        if self.recompute_up_proj:
            self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=None)
            query, key, value = self.qkv_up_checkpoint.checkpoint(self._up, *inputs)
        else:
            query, key, value = self._up(*inputs)
        return query, key, value, queries, latents

    def _run_core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        attn_mask_type: AttnMaskType | None = None,
        **others: Any,
    ) -> Tensor:
        """Attend: query and key [T, H, nope + rope], value [T, H, value] to [T, H value].

        Since 0.18 megatron-core pads packed values to the width of their keys, as flash-attn needs.
        cuDNN needs no padding: from Blackwell on cuDNN trains heads of 192 and 128 channels,
        DeepSeek-V3's, and none of 192 and 192.
        """
        attend = super()._run_core_attention if self.config.attention_backend is AttnBackend.flash else self.core_attention
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        return attend(query, key, value, attention_mask, packed_seq_params=packed_seq_params, attn_mask_type=mask_type, **others)

    def _down(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return latents of queries, or hidden states, and keys [t, rank]; rotary key [T, 1, rope]."""
        config = self.config
        queries = hidden_states
        if config.q_lora_rank is not None:
            queries = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        both, _ = self.linear_kv_down_proj(hidden_states)
        latents, rotary_key = both.split((config.kv_lora_rank, config.qk_pos_emb_head_dim), dim=-1)
        if config.sequence_parallel:
            # The backward pass sums over ranks and scatters.
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.pg_collection.tp)
        else:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key, group=self.pg_collection.tp)
        return queries, self.kv_layernorm(latents), rotary_key.unsqueeze(1)

    def _up(self, queries: Tensor, latents: Tensor, rotary_key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of all heads of this rank, rotary embedding included."""
        assert self.rotary is not None, "the caller checked it"
        config, heads, interleaved = self.config, self.num_attention_heads_per_partition, self.rotary.interleaved
        query, _ = (self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj)(queries)
        plain, rotary_query = query.unflatten(-1, (heads, -1)).split((config.qk_head_dim, config.qk_pos_emb_head_dim), dim=-1)
        query = torch.cat((plain, rotate(rotary_query, cosine, sine, interleaved=interleaved)), dim=-1)
        both, _ = self.linear_kv_up_proj(latents)
        plain, value = both.unflatten(-1, (heads, -1)).split((config.qk_head_dim, config.v_head_dim), dim=-1)
        rotary_key = rotate(rotary_key, cosine, sine, interleaved=interleaved).expand(-1, heads, -1)
        return query, torch.cat((plain, rotary_key), dim=-1), value.contiguous()
