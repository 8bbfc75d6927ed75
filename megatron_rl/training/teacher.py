"""The teacher of on-policy distillation: a second model, asked for log-probs and never trained.
Legend: T tokens of a batch.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.checkpoints.stored_weights import load_hf_weights
from megatron_rl.config.settings import ModelSettings, TopologySettings
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import UserError, counted
from megatron_rl.models.attention.attention_choice import Attention, resolve_attention
from megatron_rl.models.build import PolicyModel, build_model
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.system.device import Device, local_capability
from megatron_rl.training import passes
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.model_check import check_layout
from megatron_rl.training.resting import RestingWeights
from megatron_rl.training.topology import Place, Topology
from megatron_rl.training.trained_model import model_dtype
from megatron_rl.types import Floats


def read_teacher_spec(teacher: Path) -> ModelSpec:
    """Return the architecture of the Hugging Face directory at model.teacher. Raises UserError."""
    if not teacher.is_dir():
        raise UserError(f"model.teacher is {teacher}, which is not a directory; give a Hugging Face model directory")
    return read_model_spec(teacher)


def teacher_config(
    model: ModelSettings, topology: TopologySettings, spec: ModelSpec, *, dtype: torch.dtype, attention: Attention
) -> TransformerConfig:
    """Return megatron-core's configuration of the teacher of `spec`. Raises UserError when it does not fit the layout."""
    try:
        return transformer_config(spec, topology=topology, dtype=dtype, overrides=model.megatron, attention=attention)
    except UserError as error:
        raise UserError(f"model.teacher {model.teacher} is to run in the policy's layout, but: {error}") from error


def build_teacher(model: ModelSettings, topology: TopologySettings, spec: ModelSpec, *, device: Device) -> list[PolicyModel]:
    """Return this rank's chunks of the teacher of `spec`, without weights yet. Raises UserError as `teacher_config`."""
    check_layout(Topology.of(topology), spec, model.megatron)
    attention = resolve_attention(model.attention, spec, overrides=model.megatron, cp=topology.cp, capability=local_capability())
    config = teacher_config(model, topology, spec, dtype=model_dtype(model, device), attention=attention)
    chunks = build_model(spec, config, attention=attention)
    for chunk in chunks:
        chunk.requires_grad_(False)
    return chunks


def teacher_tensors(chunks: Sequence[PolicyModel]) -> list[Tensor]:
    """Return the teacher's tensors for host memory: all parameters and buffers."""
    return [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]


def check_vocabulary(policy: Path, teacher: Path) -> None:
    """Raise UserError when the directories' tokenizers give any token another id, or know other tokens."""
    ours, theirs = (load_tokenizer(path).get_vocab() for path in (policy, teacher))
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if different:
        token = different[0]
        raise UserError(
            f"model.teacher {teacher} has another vocabulary than model.path {policy}: it differs in {counted(len(different), 'token')}, "
            f"the first is {token!r} with ids {theirs.get(token)} and {ours.get(token)}; take a teacher with the policy's tokenizer"
        )


class Teacher:
    """One rank's share of the teacher, with weights at rest in host memory between passes. Methods are collective."""

    def __init__(self, model: ModelSettings, topology: TopologySettings, path: Path, *, device: Device, place: Place) -> None:
        """Build the model of the Hugging Face directory `path`. Raises UserError as `teacher_config`."""
        self._spec, self._place = read_teacher_spec(path), place
        self._chunks = build_teacher(model, topology, self._spec, device=device)
        load_hf_weights(self._chunks, self._spec, path)
        self._weights = RestingWeights(partial(teacher_tensors, self._chunks), replacing=False)

    def log_probs(self, micro_batches: Sequence[MicroBatch], *, num_tokens: int, temperature: float) -> Floats:
        """Return log-probs [T], nats, of the micro-batches' targets among `num_tokens` tokens at `temperature`; else 0."""
        with self._weights.in_place():
            policy = passes.Policy(chunks=self._chunks, place=self._place, vocab_size=self._spec.vocab_size, temperature=temperature)
            return passes.log_probs(policy, micro_batches, num_tokens=num_tokens)
