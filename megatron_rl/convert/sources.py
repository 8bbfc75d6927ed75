"""What can be converted: Hugging Face directories and distributed checkpoints, both as Hugging Face tensors of one known model.

A unit is what is read at once: the tensors of one Megatron parameter. A source is checked when it is opened: each of its tensors is one
of the model or known to be left out, and the other way round.
"""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.convert.torch_dist import TorchDist, is_torch_dist
from megatron_rl.errors import UserError
from megatron_rl.models.config_json import read_config
from megatron_rl.models.hf_files import Checkpoint
from megatron_rl.models.hf_weights import check_names
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import parse_model_spec
from megatron_rl.models.tensor_files import TensorFiles
from megatron_rl.models.weight_table import Rule, Sharding, parameter_shape, rules, split
from megatron_rl.weights.bucket import WeightSpec

KEPT = "left-out"
"""Below a directory of our format: tensors of the Hugging Face original that the model does not build, byte for byte."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_EXPERTS_NORM = ".pre_mlp_layernorm.weight"
# What training state has besides the policy's weights.
_STATE = re.compile(r"optimizer\.|chained_|rng|rerun_state|opt_param_scheduler|iteration|critic\.|.*\._extra_state")
_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are read together, as the source has them; those of `rule`, or None for a tensor that the model does not build."""

    tensors: tuple[WeightSpec, ...]
    rule: Rule | None = field(default=None, compare=False)


class Source(Protocol):
    """Weights that can be read unit by unit, from several threads. `directory` has the model's other files."""

    path: Path
    directory: Path
    config: dict[str, Any]
    spec: ModelSpec

    def units(self) -> list[Unit]:
        """All tensors, in the order of the model, then those that the model does not build."""

    def read(self, unit: Unit) -> list[Tensor]:
        """The tensors of `unit`, each [...] of its shape."""

    def close(self) -> None:
        """Close the files."""


def config_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that a config.json names, bfloat16 where it names none."""
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)


class HuggingFaceSource:
    """A directory with config.json and safetensors. Quantised tensors come in the dtype that config.json names."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises UserError when the files and config.json do not belong together."""
        self.path = self.directory = path
        self.config = read_config(path)
        self.spec = parse_model_spec(self.config, origin=str(path / "config.json"))
        self.checkpoint = Checkpoint(path, dequantised_dtype=config_dtype(self.config))
        check_names(self.checkpoint, self.spec)
        self.quantised = bool(self.config.get("quantization_config"))

    def units(self) -> list[Unit]:
        """All tensors. Raises UserError for one of another shape than config.json says."""
        found = [Unit(tuple(map(self._describe, rule.hugging_face)), rule) for rule in rules(self.spec) if rule.exported]
        for unit in found:
            assert unit.rule is not None
            for tensor, wanted in zip(unit.tensors, unit.rule.tensors, strict=True):
                if tensor.shape != wanted.shape:
                    self.checkpoint.read(tensor.name, wanted.shape)
        used = {tensor.name for unit in found for tensor in unit.tensors}
        return found + [Unit((self._describe(name),)) for name in sorted(self.checkpoint.names() - used)]

    def _describe(self, name: str) -> WeightSpec:
        return WeightSpec(name, str(self.checkpoint.dtype(name)).removeprefix("torch."), self.checkpoint.shape(name))

    def read(self, unit: Unit) -> list[Tensor]:
        """The tensors of `unit`, each [...] of its shape."""
        return [self.checkpoint.read(tensor.name, tensor.shape) for tensor in unit.tensors]

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.__exit__()


class MegatronSource:
    """A distributed checkpoint: of a run, converted, or of another program. Optimizer state in it is not read."""

    def __init__(self, path: Path, *, directory: Path) -> None:
        """Open `path`, of the model whose config.json is in `directory`. Raises UserError when they do not belong together."""
        self.path, self.directory = path, directory
        self.config = read_config(directory)
        self.spec = parse_model_spec(self.config, origin=str(directory / "config.json"))
        self._state = TorchDist(path)
        self._places = {rule.megatron: self._place(rule) for rule in rules(self.spec) if rule.exported}
        self._check_strangers()
        self._kept = TensorFiles(path / KEPT) if (path / KEPT).exists() else None

    def units(self) -> list[Unit]:
        """All tensors."""
        found = []
        for rule in rules(self.spec):
            if rule.exported:
                dtype = str(self._state.dtype(self._places[rule.megatron].keys[0])).removeprefix("torch.")
                found.append(Unit(tuple(WeightSpec(tensor.name, dtype, tensor.shape) for tensor in rule.tensors), rule))
        if self._kept is not None:
            kept = self._kept
            found += [
                Unit((WeightSpec(name, str(kept.dtype(name)).removeprefix("torch."), kept.shape(name)),)) for name in sorted(kept.names())
            ]
        return found

    def read(self, unit: Unit) -> list[Tensor]:
        """The tensors of `unit`, each [...] of its shape."""
        if unit.rule is None:
            assert self._kept is not None, "a unit without a rule comes from the kept tensors"
            return [self._kept.read(tensor.name) for tensor in unit.tensors]
        place = self._places[unit.rule.megatron]
        parts = [self._state.read(key, place.at) for key in place.keys]
        if len(parts) == len(unit.tensors) > 1:
            return parts
        return split(unit.rule.sharding, torch.cat(parts) if len(parts) > 1 else parts[0], self.spec)

    def close(self) -> None:
        """Close the files."""
        if self._kept is not None:
            self._kept.__exit__()

    def _place(self, rule: Rule) -> "_Place":
        """Where a parameter is: its layers and the experts of a layer may be stacked, its halves may be apart."""
        keys = self._state.keys()
        for place in _places(rule):
            if keys.issuperset(place.keys):
                self._check_shape(rule, place)
                return place
        raise UserError(
            f"checkpoint {self.path} has no {next(_places(rule)).keys[0]}, which the model of {self.directory / 'config.json'} needs for "
            f"{rule.hugging_face[0]}; use the config.json that belongs to these weights"
        )

    def _check_shape(self, rule: Rule, place: "_Place") -> None:
        whole = parameter_shape(rule, self.spec)
        needed, stacked = (whole[0] // len(place.keys), *whole[1:]), self._stacked_sizes(rule, place)
        for key in place.keys:
            shape = self._state.shape(key)
            got = shape[len(place.at) :]
            padded = rule.sharding is Sharding.VOCABULARY and len(got) == len(needed) and got[0] >= needed[0] and got[1:] == needed[1:]
            if shape[: len(place.at)] != stacked or (got != needed and not padded):
                raise UserError(
                    f"{key} of checkpoint {self.path} has shape {shape}, {self.directory / 'config.json'} needs {(*stacked, *needed)}; use "
                    "the config.json that belongs to these weights"
                )

    def _stacked_sizes(self, rule: Rule, place: "_Place") -> tuple[int, ...]:
        layers = (self.spec.num_layers,) if place.stacked_layers else ()
        return (*layers, self.spec.moe.num_experts) if place.stacked_experts and self.spec.moe is not None else layers

    def _check_strangers(self) -> None:
        used = {key for place in self._places.values() for key in place.keys}
        extra = sorted(key for key in self._state.keys() - used if not _STATE.match(key))
        if self.spec.tie_embeddings and "output_layer.weight" in extra:
            extra.remove("output_layer.weight")
            head, embedding = (self._state.read(key) for key in ("output_layer.weight", "embedding.word_embeddings.weight"))
            if not torch.equal(head[: self.spec.vocab_size], embedding[: self.spec.vocab_size]):
                raise UserError(
                    f"{self.directory / 'config.json'} ties the embeddings, but output_layer.weight of checkpoint {self.path} differs from "
                    "embedding.word_embeddings.weight; set tie_word_embeddings to false there"
                )
        if extra:
            raise UserError(
                f"checkpoint {self.path} has {len(extra)} tensors that {self.spec.architecture} of {self.directory / 'config.json'} does "
                f"not, the first is {extra[0]}; use the config.json that belongs to these weights"
            )


def stored_key(rule: Rule) -> tuple[str, tuple[int, ...]]:
    """Key and leading indices under which our own checkpoints have a parameter: layers one by one, the experts of a layer stacked."""
    place = next(_places(rule))
    return place.keys[0], place.at


@dataclass(frozen=True, slots=True)
class _Place:
    """The keys that hold a parameter, two where gate and up are apart, and its indices in their stacks of layers and experts."""

    keys: tuple[str, ...]
    at: tuple[int, ...]
    stacked_layers: bool
    stacked_experts: bool


def _places(rule: Rule) -> Iterator[_Place]:
    """Where a parameter can be, as releases of megatron-core have stored it; first where our own checkpoints have it."""
    # megatron-core saves norms under the names of Transformer Engine, experts under one of their own, whatever built them.
    names = [rule.megatron] if rule.transformer_engine is None or rule.of_expert else [rule.transformer_engine, rule.megatron]
    if rule.megatron.endswith(_EXPERTS_NORM):
        # With the layers of torch it is stored as if it were a dense layer's.
        names.append(f"{rule.megatron.removesuffix(_EXPERTS_NORM)}.mlp.linear_fc1.layer_norm_weight")
    for name in names:
        expert, layer = _EXPERT.search(name), _LAYER.match(name)
        for stacked_experts in (False,) if expert is None else (True, False):
            key = name
            at: tuple[int, ...] = ()
            if expert is not None:
                key = _EXPERT.sub(".experts.experts." if stacked_experts else rf".experts.experts.{expert[1]}.", name)
                at = (int(expert[1]),) if stacked_experts else ()
            for stacked_layers in (False,) if layer is None else (False, True):
                whole = _LAYER.sub("decoder.layers.", key) if stacked_layers else key
                place = (int(layer[1]), *at) if stacked_layers and layer is not None else at
                yield _Place((whole,), place, stacked_layers, stacked_experts)
                if rule.sharding in (Sharding.GATE_UP, Sharding.STACKED_GATE_UP):
                    yield _Place((f"{whole}_w", f"{whole}_v"), place, stacked_layers, stacked_experts)


def open_source(path: Path, *, config: Path | None = None) -> Source:
    """Whatever `path` is: a Hugging Face directory, a checkpoint of ours or of a run, or another program's.

    `config` is the Hugging Face directory of a checkpoint that has no config.json. Raises UserError.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give a Hugging Face directory or a checkpoint")
    state = _find_state(path)
    if state is None:
        if (path / "config.json").exists():
            return HuggingFaceSource(path)
        raise UserError(
            f"{path} is neither a Hugging Face directory (config.json and safetensors) nor a distributed checkpoint (.metadata); give one"
        )
    directory = config or _find_config(state)
    if directory is None:
        raise UserError(f"checkpoint {state} has no config.json beside it; name the Hugging Face directory of its model with --config")
    return MegatronSource(state, directory=directory)


def _find_state(path: Path) -> Path | None:
    """The distributed checkpoint in `path`: itself, that of a saved step, or the latest one of a directory of Megatron-LM."""
    tracker = path / "latest_checkpointed_iteration.txt"
    places = [path, path / "megatron", path / "dist_ckpt", path / "actor" / "dist_ckpt"]
    if tracker.is_file():
        latest = tracker.read_text(encoding="utf-8").strip()
        places.append(path / (f"iter_{int(latest):07d}" if latest.isdecimal() else latest))
    return next((place for place in places if is_torch_dist(place)), None)


def _find_config(state: Path) -> Path | None:
    places = (state, state.parent / "hf", state.parent / "huggingface")
    return next((place for place in places if (place / "config.json").exists()), None)


def read_all(source: Source) -> Iterator[tuple[WeightSpec, Tensor]]:
    """Every tensor of `source`, which is closed at the end, and what it is."""
    with closing(source):
        for unit in source.units():
            yield from zip(unit.tensors, source.read(unit), strict=True)
