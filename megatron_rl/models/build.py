"""The policy as megatron-core modules: one `PolicyModel` per virtual pipeline stage of this rank.

Legend: T tokens on this rank, N chosen positions, H hidden channels, V padded vocabulary, tp tensor parallel size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_rl.algorithms.log_prob import TokenStatistics
from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_choice import Attention
from megatron_rl.models.attention.latent import LatentAttention
from megatron_rl.models.attention.packed import PackedAttention
from megatron_rl.models.experts.router import allow_uneven_tokens
from megatron_rl.models.language_model_head import LanguageModelHead
from megatron_rl.models.layer_spec import layer_specs
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.packed_sequences import PackedSequences
from megatron_rl.system.device import local_device


class PolicyModel(GPTModel):
    """A GPTModel with a language model head able to run later.

    The head can run at chosen positions only, and without all logits at once. Called as
    `model(input_ids [1, T], position_ids [1, T], None, packed_seq_params=packed)`. The last
    pipeline stage answers logits [1, T, V / tp]. When `packed.logit_positions` names N positions,
    the last stage answers their hidden states [N, H], for `token_statistics`. Other stages answer
    hidden states.
    """

    output_layer: nn.Module

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.post_process:
            self.output_layer = LanguageModelHead.in_place_of(self.output_layer)

    def _set_attention_backend(self) -> None:
        """Keep torch's layers from setting variables of the environment, which children inherit."""
        if self.config.transformer_impl == "transformer_engine":
            super()._set_attention_backend()

    def _postprocess(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        packed: PackedSequences = arguments["packed_seq_params"]
        if packed.logit_positions is None:
            output, _ = self.output_layer(hidden_states, weight=self._tied_weight())
            return output.transpose(0, 1).contiguous()
        chosen = hidden_states.index_select(0, packed.logit_positions)
        if isinstance(self.output_layer, LanguageModelHead):
            return chosen.squeeze(1)
        values, _ = self.output_layer(chosen)
        return values.squeeze(1)

    def _tied_weight(self) -> Tensor | None:
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

    def token_statistics(self, hidden_states: Tensor, **question: Any) -> TokenStatistics:
        """Return the head's answer to `question` about the next tokens [N] on every tensor parallel rank.

        `hidden_states` [N, H] come from the last stage. The answer is the same on every rank.
        Collective over tensor parallel ranks.
        """
        return self.output_layer(hidden_states, self._tied_weight(), **question)


def build_model(spec: ModelSpec, config: TransformerConfig, *, attention: Attention) -> list[PolicyModel]:
    """Build this rank's model chunks, one per virtual pipeline stage, on its device.

    The chunks are not wrapped in DDP. `config` comes from `transformer_config`. megatron's parallel
    state must be initialised. The weights are zero until loaded.
    """
    num_stages = config.virtual_pipeline_model_parallel_size or 1
    chunks = [_build_chunk(spec, config, attention, stage if num_stages > 1 else None) for stage in range(num_stages)]
    device = torch.device("cuda", torch.cuda.current_device()) if local_device().kind == "cuda" else local_device().torch_device
    if config.batch_invariant_mode and device.type == "cuda":
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import enable_batch_invariant_mode

        # megatron-core's attention follows the field by itself, its other kernels this call, for the whole process.
        enable_batch_invariant_mode()
    for chunk in chunks:
        chunk.to(device)
        _set_rotary(chunk, spec)
        allow_uneven_tokens(chunk)
    return chunks


def _build_chunk(spec: ModelSpec, config: TransformerConfig, attention: Attention, vp_stage: int | None) -> PolicyModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    model = PolicyModel(
        config=config,
        transformer_layer_spec=layer_specs(spec, config, attention=attention, vp_stage=vp_stage),
        vocab_size=spec.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tie_embeddings,
        # The torch attention and latent attention rotate by the plan's positions; upstream's rotary loops over sequences in Python.
        position_embedding_type="none" if attention == "torch" or spec.mla is not None else "rope",
        rotary_base=spec.rotary.theta,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=vp_stage,
    )
    if first and spec.embedding_scale != 1.0:
        model.embedding.register_forward_hook(partial(_scaled, scale=spec.embedding_scale))
    return model


def _scaled(_module: nn.Module, _inputs: Any, embedded: Tensor, *, scale: float) -> Tensor:
    """Return the embedding times `scale`, rounded to its dtype as transformers does."""
    return embedded * torch.tensor(scale, dtype=embedded.dtype).item()


def _set_rotary(chunk: PolicyModel, spec: ModelSpec) -> None:
    """Set attention's windows and frequencies; upstream's own scaling is Llama 3.1's."""
    for module in chunk.modules():
        if isinstance(module, PackedAttention):
            windowed = module.layer_number - 1 in spec.sliding_layers
            module.rotary = spec.window_rotary if windowed and spec.window_rotary is not None else spec.rotary
            module.window = spec.sliding_window if windowed else None
        elif isinstance(module, LatentAttention):
            module.rotary = spec.rotary
    if chunk.position_embedding_type == "rope":
        device = chunk.rotary_pos_emb.inv_freq.device
        chunk.rotary_pos_emb.inv_freq = torch.tensor(spec.rotary.frequencies, dtype=torch.float32, device=device)


def forward_selected(model: torch.nn.Module, input_ids: Tensor, position_ids: Tensor, packed: PackedSequences, positions: Tensor) -> Tensor:
    """Hidden states [N, H] at the local tokens `positions` [N] only, for `input_ids` and `position_ids` [1, T]; a critic's values [N, 1].

    `model` is a PolicyModel, bare or wrapped. Pipeline stages before the last answer hidden states of all tokens. Raises UserError when
    the chosen attention of Transformer Engine does not compute this model on this GPU.
    """
    try:
        output: Tensor = model(input_ids, position_ids, None, packed_seq_params=replace(packed, logit_positions=positions))
    except ValueError as error:
        if "No dot product attention backend" not in str(error):
            raise
        raise UserError(
            "Transformer Engine's attention that model.megatron.attention_backend names (fused, cuDNN's, by default) does not compute this "
            "model on this GPU; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 in the environment make it say why; set attention_backend to flash where "
            "flash-attn is installed, or model.attention to torch"
        ) from error
    return output


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """`chunks`, one for each virtual pipeline stage of this rank, and what changes their weights."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def lr(self) -> float:
        """Learning rate of the coming optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])


@contextmanager
def complete_parameters(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Inside, every parameter is gathered and stays so: needed to read or replace weights while their gather overlaps the forward."""
    overlapping = [chunk for chunk in chunks if chunk.use_forward_hook]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapping:
            chunk.enable_forward_pre_hook()
