"""The policy as megatron-core modules: one `PolicyModel` per virtual pipeline stage of this rank.

Legend: T tokens on this rank, N chosen positions, V padded vocabulary, tp tensor parallel size.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.device import local_device
from megatron_rl.models.attention import PackedAttention, PackedSequences
from megatron_rl.models.layer_spec import layer_specs
from megatron_rl.models.spec import Attention, ModelSpec


class PolicyModel(GPTModel):
    """A GPTModel whose language model head can run at chosen positions only.

    Called as `model(input_ids [1, T], position_ids [1, T], None, packed_seq_params=packed)`. The last pipeline stage answers logits
    [1, T, V / tp], or [N, V / tp] when `packed.logit_positions` names N positions; other stages answer hidden states.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.post_process:
            # Choosing positions needs the gathered sequence, so the head must not gather again; it sums its input's gradient over ranks.
            self.output_layer.sequence_parallel = False

    def _postprocess(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        packed: PackedSequences = arguments["packed_seq_params"]
        positions = packed.logit_positions
        if positions is not None:
            hidden_states = hidden_states.index_select(0, positions)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_states, weight=weight)
        return logits.squeeze(1) if positions is not None else logits.transpose(0, 1).contiguous()


def build_model(spec: ModelSpec, config: TransformerConfig, *, attention: Attention) -> list[PolicyModel]:
    """Build this rank's model chunks, one per virtual pipeline stage, on its device, not wrapped in DDP.

    `config` comes from `transformer_config`. megatron's parallel state must be initialised. The weights are zero: load them.
    """
    num_stages = config.virtual_pipeline_model_parallel_size or 1
    chunks = [_build_chunk(spec, config, attention, stage if num_stages > 1 else None) for stage in range(num_stages)]
    device = torch.device("cuda", torch.cuda.current_device()) if local_device().kind == "cuda" else local_device().torch_device
    for chunk in chunks:
        chunk.to(device)
        _set_rotary(chunk, spec)
    return chunks


def _build_chunk(spec: ModelSpec, config: TransformerConfig, attention: Attention, vp_stage: int | None) -> PolicyModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return PolicyModel(
        config=config,
        transformer_layer_spec=layer_specs(config, attention=attention, vp_stage=vp_stage),
        vocab_size=spec.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tie_embeddings,
        # The torch attention rotates by the plan's positions; upstream's rotary loops over sequences in Python.
        position_embedding_type="none" if attention == "torch" else "rope",
        rotary_base=spec.rotary.theta,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=vp_stage,
    )


def _set_rotary(chunk: PolicyModel, spec: ModelSpec) -> None:
    """Give attention the checkpoint's frequencies. Upstream's own scaling has Llama 3.1's constants written into it."""
    for module in chunk.modules():
        if isinstance(module, PackedAttention):
            module.rotary = spec.rotary
    if chunk.position_embedding_type == "rope":
        chunk.rotary_pos_emb.inv_freq = spec.rotary.inverse_frequencies(spec.head_dim).to(chunk.rotary_pos_emb.inv_freq.device)


def forward_selected(model: torch.nn.Module, input_ids: Tensor, position_ids: Tensor, packed: PackedSequences, positions: Tensor) -> Tensor:
    """Logits [N, V / tp] at the local tokens `positions` [N] only, for `input_ids` and `position_ids` [1, T].

    `model` is a PolicyModel, bare or wrapped. No [T, V] tensor is made. Pipeline stages before the last answer hidden states instead.
    """
    return model(input_ids, position_ids, None, packed_seq_params=packed.at(positions))
