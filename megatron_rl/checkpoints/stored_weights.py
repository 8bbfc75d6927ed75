"""The weights of a stored model in any form: opened, compared with config.json, and loaded into a Megatron model."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoints.hugging_face import HuggingFaceWeights
from megatron_rl.checkpoints.megatron import MegatronWeights, is_torch_dist
from megatron_rl.errors import UserError, counted
from megatron_rl.models.build import PolicyModel
from megatron_rl.models.config_json import read_config
from megatron_rl.models.hf_weights import global_parameters, held_name, tensor_ranks
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import Rule, fill, of_mtp, rules, tensor_names

# Tensors recomputed here, but present in some checkpoints.
_RECOMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
_SAMPLED_TENSORS, _SAMPLED_NUMBERS = 256, 2**18


StoredWeights = HuggingFaceWeights | MegatronWeights
"""A stored model: Hugging Face tensors at `path`, the `directory` of other files, and the `config` there."""


def open_weights(path: Path, *, config: Path | None = None, dequantised_dtype: torch.dtype | None = torch.float32) -> StoredWeights:
    """Open a Hugging Face directory, or a distributed checkpoint of ours, of a run or of another program.

    `config` is the Hugging Face directory of a distributed checkpoint, in place of a config.json beside it. Quantised
    tensors come in `dequantised_dtype`; None means the dtype of config.json. Raises UserError for anything else, and
    for a distributed checkpoint with a config.json of another model.
    """
    check_place(path)
    state = _find_state(path)
    if state is None:
        if (path / "config.json").exists():
            if config is not None:
                raise UserError(f"--config is {config}, but {path} is a Hugging Face directory with its own config.json; remove --config")
            return HuggingFaceWeights(path, dequantised_dtype=dequantised_dtype)
        raise UserError(
            f"{path} is neither a Hugging Face directory (config.json and safetensors) nor a distributed checkpoint (.metadata); give one"
        )
    places = (state, state.parent / "hf", state.parent / "huggingface")
    if config is not None and not (config / "config.json").is_file():
        raise UserError(f"--config is {config}, which has no config.json; give the Hugging Face directory of the model of {state}")
    directory = config or next((place for place in places if (place / "config.json").exists()), None)
    if directory is None:
        raise UserError(f"checkpoint {state} has no config.json beside it; name the Hugging Face directory of its model with --config")
    return MegatronWeights(state, directory=directory)


def check_place(path: Path) -> None:
    """Raise UserError when `path` is no directory, or is a run's: one of its checkpoints has to be named."""
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give a Hugging Face directory or a checkpoint")
    for checkpoints in (path / "checkpoints", path):
        steps = [step for step in checkpoints.glob("step-*") if is_torch_dist(step / "megatron")]
        if steps:
            newest = max(steps, key=lambda step: (len(step.name), step.name))
            raise UserError(f"{path} holds the checkpoints of a run; give one of them, the newest is {newest}")


def _find_state(path: Path) -> Path | None:
    """Find the distributed checkpoint in `path`: itself, a saved step's, or the latest in a directory of Megatron-LM."""
    tracker = path / "latest_checkpointed_iteration.txt"
    places = [path, path / "megatron", path / "dist_ckpt", path / "actor" / "dist_ckpt"]
    if tracker.is_file():
        latest = tracker.read_text(encoding="utf-8", errors="replace").strip()
        places.append(path / (f"iter_{latest.zfill(7)}" if latest.isdecimal() else latest))
    return next((place for place in places if is_torch_dist(place)), None)


def in_order(weights: StoredWeights) -> dict[str, Rule | None]:
    """Return all names in `weights` with their rules, in the order of the model, names outside of it last."""
    built: dict[str, Rule | None] = {name: rule for rule in rules(weights.spec) if rule.exported for name in rule.hugging_face}
    return built | dict.fromkeys(sorted(weights.names() - built.keys()))


def mtp_tensors(path: Path, spec: ModelSpec, *, dequantised_dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor of multi-token prediction in the model directory `path`. Raises UserError."""
    with closing(open_weights(path, dequantised_dtype=dequantised_dtype)) as weights:
        for name in sorted(weights.names()):
            if of_mtp(name, spec):
                yield name, weights.read(name)


def engines_read(path: Path) -> bool:
    """Return true when engines can load the model directory `path`: plain safetensors.

    Engines do not know our own format, and would keep codes, which the trainer's weights cannot replace.
    """
    return not is_torch_dist(path) and not read_config(path).get("quantization_config")


def names_code(path: Path) -> bool:
    """Return true when config.json in `path` names Python code (`auto_map`), there or on the Hugging Face hub.

    SGLang imports the code for a model without an SGLang class, also without `trust_remote_code`.
    """
    return bool(read_config(path).get("auto_map"))


def load_hf_weights(chunks: Sequence[PolicyModel], spec: ModelSpec, path: Path) -> None:
    """Fill this rank's chunks, in their dtype, from the model directory `path`; padded vocabulary rows become zero.

    Raises UserError without weights, for a missing or unknown tensor, and for a shape different from config.json.
    """
    parameters = global_parameters(chunks)
    with closing(open_weights(path)) as weights, torch.no_grad():
        check_names(weights, spec)
        for rule in rules(spec):
            parameter = parameters.pop(held_name(rule, parameters), None)
            if parameter is None:
                continue
            ranks = tensor_ranks(rule)
            load_parameter(parameter, rule, spec, weights.read, tp_rank=ranks.rank(), tp=ranks.size())
            _check_finite(parameter, rule.hugging_face, weights.path)
    assert not parameters, f"no table row loads {next(iter(parameters))}"


def load_parameter(parameter: Tensor, rule: Rule, spec: ModelSpec, read: Callable[[str], Tensor], *, tp_rank: int, tp: int) -> None:
    """Fill `parameter`, of any shape, the part of rank `tp_rank` of `tp` of the one of `rule`, with tensors by `read`."""
    fill(parameter, rule.sharding, [read(name) for name in rule.hugging_face], spec, tp_rank=tp_rank, tp=tp)


def check_names(weights: StoredWeights, spec: ModelSpec) -> None:
    """Raise UserError as `check_complete`, and for a tensor neither in the model nor optional."""
    expected, stored = tensor_names(spec), weights.names()
    check_complete(weights, spec)
    two_heads = spec.tie_embeddings and "lm_head.weight" in stored
    if two_heads and not torch.equal(weights.read("lm_head.weight"), weights.read("model.embed_tokens.weight")):
        raise UserError(
            f"config.json in {weights.path} ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
            "set tie_word_embeddings to false there"
        )
    extra = sorted(name for name in stored - expected if not may_be_left_out(name, spec))
    if extra:
        raise UserError(
            f"{weights.path} has {counted(len(extra), 'tensor')} that {spec.architecture} does not, the first is {extra[0]}; use the "
            "config.json that belongs to these weights"
        )


def check_complete(weights: StoredWeights, spec: ModelSpec) -> None:
    """Raise UserError for a tensor of the model when missing or of another shape. Reads headers alone."""
    missing = sorted(tensor_names(spec) - weights.names())
    if missing:
        raise UserError(
            f"{weights.path} lacks {counted(len(missing), 'tensor')} that its config.json asks for, the first is {missing[0]}; use the "
            "config.json that belongs to these weights"
        )

    for tensor in (tensor for rule in rules(spec) for tensor in rule.tensors):
        if weights.shape(tensor.name) != tensor.shape:
            raise UserError(
                f"tensor {tensor.name} in {weights.path} has shape {weights.shape(tensor.name)}, config.json needs {tensor.shape}; "
                "use the config.json that belongs to these weights"
            )


def check_stored(weights: StoredWeights, spec: ModelSpec) -> None:
    """Raise UserError as `check_complete`, and for non-finite weights in a sample; ranks check all while loading.

    The sample is bounded for a model of any size: up to 256 tensors of at most 1 MiB, evenly spread, norms first.
    A diverged training leaves no norm finite.
    """
    check_complete(weights, spec)
    tensors = (tensor for rule in rules(spec) if rule.exported for tensor in rule.tensors)
    small = [tensor.name for tensor in tensors if math.prod(tensor.shape) <= _SAMPLED_NUMBERS]
    for name in small[:: max(1, len(small) // _SAMPLED_TENSORS)]:
        _check_finite(weights.read(name), [name], weights.path)


def _check_finite(tensor: Tensor, names: Sequence[str], path: Path) -> None:
    if num_not_finite(tensor):
        raise UserError(f"{' or '.join(names)} in {path} has numbers that are not finite; take weights of before the training diverged")


def num_not_finite(tensor: Tensor) -> int:
    """Count the non-finite numbers of a tensor of any shape; they would reach its extremes, which are looked at first."""
    if not tensor.is_floating_point() or not tensor.numel() or all(extreme.isfinite() for extreme in torch.aminmax(tensor)):
        return 0
    return int((~torch.isfinite(tensor)).sum())


def may_be_left_out(name: str, spec: ModelSpec) -> bool:
    """Return true when no parameter needs the tensor: recomputed here, of multi-token prediction, or a tied head."""
    tied = spec.tie_embeddings and name == "lm_head.weight"
    return tied or of_mtp(name, spec) or name.endswith(_RECOMPUTED_SUFFIXES)
