"""Weights between Hugging Face directories and the Megatron model, by the tables in `families`.

One parameter at a time, in the order of the tables on every rank. Nothing family-specific is here.
"""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.models.build import PolicyModel
from megatron_rl.models.families import Layout, Rule, rules
from megatron_rl.models.layouts import combine, hugging_face_shapes, join, shard, split
from megatron_rl.models.saving import save_hf
from megatron_rl.models.spec import ModelSpec

__all__ = ["Checkpoint", "export_hf_weights", "global_parameters", "hf_shapes", "load_hf_weights", "save_hf"]

# Tensors that some checkpoints carry and that are recomputed here.
_RECOMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor of the model, in export order, from its architecture alone."""
    return {
        name: shape
        for rule in rules(spec)
        if rule.exported
        for name, shape in zip(rule.hugging_face, hugging_face_shapes(rule, spec), strict=True)
    }


def load_hf_weights(chunks: Sequence[PolicyModel], spec: ModelSpec, path: Path) -> None:
    """Fill this rank's chunks from the safetensors of the Hugging Face directory `path`, casting to the parameters' dtype.

    Padded vocabulary rows become zero. Raises UserError when there are no safetensors, and for a tensor that is missing, has another
    shape than config.json says, or is not known.
    """
    parameters = global_parameters(chunks)
    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    with Checkpoint(path) as checkpoint, torch.no_grad():
        _check_names(checkpoint, spec)
        for rule in rules(spec):
            parameter = parameters.pop(_present_name(rule, parameters), None)
            if parameter is None:
                continue
            tensors = [checkpoint.read(name, shape) for name, shape in zip(rule.hugging_face, hugging_face_shapes(rule, spec), strict=True)]
            local = shard(rule.layout, combine(rule.layout, tensors, spec, tp=tp), tp_rank=tp_rank, tp=tp)
            assert local.shape == parameter.shape, f"{rule.megatron}: table gives {tuple(local.shape)}, model has {tuple(parameter.shape)}"
            parameter.copy_(local)
    assert not parameters, f"no table row loads {next(iter(parameters))}"


def export_hf_weights(chunks: Sequence[PolicyModel], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor of the model as (name, whole tensor on this rank's device, in the parameters' dtype).

    Collective over tensor and pipeline parallel ranks: each iterates to the end and gets the same names in the same order. A tensor can
    be a view of a live parameter: copy what is kept beyond the next optimizer step.
    """
    parameters = global_parameters(chunks)
    owners = _pipeline_owners(parameters)
    for rule in rules(spec):
        if not rule.exported:
            continue
        parameter = parameters.get(_present_name(rule, parameters))
        tensors = None if parameter is None else _gathered(rule.layout, parameter.detach(), spec)
        if owners is not None:
            tensors = _from_owner(rule, tensors, spec, owners, chunks[0].config.params_dtype)
        assert tensors is not None, f"no rank has {rule.megatron}"
        yield from zip(rule.hugging_face, tensors, strict=True)


def global_parameters(chunks: Sequence[PolicyModel]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by their names in the whole model: layers counted from 0 over all pipeline stages."""
    named = {}
    for chunk in chunks:
        offsets = {index: layer.layer_number - 1 for index, layer in enumerate(chunk.decoder.layers)}
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, index, rest = name.split(".", 3)
                name = f"decoder.layers.{offsets[int(index)]}.{rest}"
            named[name] = parameter
    return named


class Checkpoint:
    """The safetensors of a directory, one file or sharded with an index, read tensor by tensor. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _tensor_files(path)
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, on the CPU. Raises UserError when its shape is not `shape` or its file is damaged."""
        file = self._files[name]
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {name} from {file}: {error}; download or save the model again") from error
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"tensor {name} in {file} has shape {tuple(tensor.shape)}, config.json needs {shape}; "
                "use the config.json that belongs to these weights"
            )
        return tensor


def _tensor_files(path: Path) -> dict[str, Path]:
    index = path / "model.safetensors.index.json"
    try:
        if index.exists():
            return {name: path / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
        single = path / "model.safetensors"
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except FileNotFoundError as error:
        raise UserError(f"{path} has no model.safetensors; give a Hugging Face directory with safetensors weights") from error
    except (json.JSONDecodeError, KeyError, AttributeError, OSError, SafetensorError) as error:
        raise UserError(f"the safetensors in {path} cannot be read ({error}); download or save the model again") from error


def _check_names(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    expected, present = set(hf_shapes(spec)), checkpoint.names()
    missing = sorted(expected - present)
    if missing:
        raise UserError(
            f"{checkpoint.path} lacks {len(missing)} tensors that its config.json asks for, the first is {missing[0]}; "
            "use the config.json that belongs to these weights"
        )
    extra = sorted(name for name in present - expected if not name.endswith(_RECOMPUTED_SUFFIXES))
    if spec.tie_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        shape = (spec.vocab_size, spec.hidden_size)
        if not torch.equal(checkpoint.read("lm_head.weight", shape), checkpoint.read("model.embed_tokens.weight", shape)):
            raise UserError(
                f"config.json in {checkpoint.path} ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
                "set tie_word_embeddings to false there"
            )
    if extra:
        raise UserError(
            f"{checkpoint.path} has {len(extra)} tensors that {spec.architecture} does not, the first is {extra[0]}; "
            "use the config.json that belongs to these weights"
        )


def _present_name(rule: Rule, names: Container[str]) -> str:
    if rule.transformer_engine is not None and rule.transformer_engine in names:
        return rule.transformer_engine
    return rule.megatron


def _gathered(layout: Layout, local: Tensor, spec: ModelSpec) -> list[Tensor]:
    """The Hugging Face tensors of a parameter of which each tensor parallel rank holds a part."""
    shards = [local]
    tp = parallel_state.get_tensor_model_parallel_world_size()
    if tp > 1 and layout is not Layout.REPLICATED:
        shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(tp)]
        dist.all_gather(shards, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return split(layout, join(layout, shards), spec)


def _pipeline_owners(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, int] | None:
    """Global rank that holds each parameter name within this pipeline group; None without pipeline parallelism."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return None
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    names: list[list[str]] = [[] for _ in ranks]
    dist.all_gather_object(names, list(parameters), group=group)
    return {name: rank for rank, held in zip(reversed(ranks), reversed(names), strict=True) for name in held}


def _from_owner(rule: Rule, tensors: list[Tensor] | None, spec: ModelSpec, owners: Mapping[str, int], dtype: torch.dtype) -> list[Tensor]:
    """Send the tensors of `rule` from the pipeline stage that has them to the others."""
    name = _present_name(rule, owners)
    if tensors is None:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in hugging_face_shapes(rule, spec)]
    tensors = [tensor.contiguous() for tensor in tensors]
    for tensor in tensors:
        dist.broadcast(tensor, owners[name], group=parallel_state.get_pipeline_model_parallel_group())
    return tensors
