"""Megatron-Core's distributed checkpoints as Hugging Face tensors of one known model: those of runs, converted ones, other programs'."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.errors import UserError, counted
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.tensor_files import TensorFiles
from megatron_rl.models.torch_dist import TorchDist
from megatron_rl.models.weight_table import Rule, Sharding, of_mtp, parameter_shape, rules, split

KEPT = "left-out"
"""Below a directory of our format: tensors of the Hugging Face original that the model does not build, byte for byte."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_EXPERTS_NORM = ".pre_mlp_layernorm.weight"
# What training state has besides the policy's weights.
_STATE = re.compile(r"optimizer\.|chained_|rng|rerun_state|opt_param_scheduler|iteration|critic\.|.*\._extra_state")


class MegatronCheckpoint:
    """A distributed checkpoint, read parameter by parameter. Optimizer state in it is not read. A context manager."""

    def __init__(self, path: Path, spec: ModelSpec, *, directory: Path) -> None:
        """Open `path`, of the model `spec` of the config.json in `directory`. Raises UserError when they do not belong together."""
        self.path = path
        self._spec, self._config_file = spec, directory / "config.json"
        self._state = TorchDist(path)
        self._rules = [rule for rule in rules(spec) if rule.exported]
        self._locations = {rule.megatron: self._location(rule) for rule in self._rules}
        self._check_strangers()
        self.kept = _open_kept(path, spec, directory)
        self._of_tensor = {name: (rule, index) for rule in self._rules for index, name in enumerate(rule.hugging_face)}
        self._last: tuple[Rule, list[Tensor]] | None = None

    def __enter__(self) -> "MegatronCheckpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.kept is not None:
            self.kept.__exit__()

    def names(self) -> set[str]:
        """Names of all tensors, also of those that the model does not build."""
        return self._of_tensor.keys() | (self.kept.names() if self.kept is not None else set())

    def check_files(self) -> None:
        """Raise UserError when a file of the tensors that the model does not build is missing or cut off; others were looked at before."""
        if self.kept is not None:
            self.kept.check_files()

    def dtype(self, rule: Rule) -> torch.dtype:
        """The dtype in which the parameter of `rule` is stored."""
        return self._state.dtype(self._locations[rule.megatron].keys[0])

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape [...]."""
        if name not in self._of_tensor and self.kept is not None:
            return self.kept.shape(name)
        rule, index = self._of_tensor[name]
        return rule.tensors[index].shape

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor [...] of `shape`, on the CPU. Fast in the order of the model: those of one parameter are read together."""
        assert self.shape(name) == shape, f"{name} has shape {self.shape(name)}, {shape} was asked for"
        if name not in self._of_tensor and self.kept is not None:
            return self.kept.read(name)
        rule, index = self._of_tensor[name]
        if self._last is None or self._last[0] is not rule:
            self._last = rule, self.read_parameter(rule)
        return self._last[1][index]

    def read_parameter(self, rule: Rule) -> list[Tensor]:
        """The tensors of `rule`, each [...] of its shape. May be called from several threads."""
        location = self._locations[rule.megatron]
        parts = [self._state.read(key, location.at) for key in location.keys]
        if len(parts) == len(rule.tensors) > 1:
            return parts
        return split(rule.sharding, torch.cat(parts) if len(parts) > 1 else parts[0], self._spec)

    def padding(self, rule: Rule) -> Tensor:
        """The rows [rows, columns] behind the vocabulary in the parameter of `rule`, the embedding or the head."""
        return self._state.read(self._locations[rule.megatron].keys[0])[self._spec.vocab_size :]

    def _location(self, rule: Rule) -> "_Location":
        """Where a parameter is: its layers and the experts of a layer may be stacked, its halves may be apart."""
        keys = self._state.keys()
        for location in _locations(rule):
            if keys.issuperset(location.keys):
                self._check_shape(rule, location)
                return location
        raise UserError(
            f"checkpoint {self.path} has no {next(_locations(rule)).keys[0]}, which the model of {self._config_file} needs for "
            f"{rule.hugging_face[0]}; use the config.json that belongs to these weights"
        )

    def _check_shape(self, rule: Rule, location: "_Location") -> None:
        whole = parameter_shape(rule)
        needed, stacked = (whole[0] // len(location.keys), *whole[1:]), self._stacked_sizes(rule, location)
        for key in location.keys:
            shape = self._state.shape(key)
            got = shape[len(location.at) :]
            padded = rule.sharding is Sharding.VOCABULARY and len(got) == len(needed) and got[0] >= needed[0] and got[1:] == needed[1:]
            if shape[: len(location.at)] != stacked or (got != needed and not padded):
                raise UserError(
                    f"{key} of checkpoint {self.path} has shape {shape}, {self._config_file} needs {(*stacked, *needed)}; use "
                    "the config.json that belongs to these weights"
                )

    def _stacked_sizes(self, rule: Rule, location: "_Location") -> tuple[int, ...]:
        layers = (self._spec.num_layers,) if location.stacked_layers else ()
        return (*layers, self._spec.moe.num_experts) if location.stacked_experts and self._spec.moe is not None else layers

    def _check_strangers(self) -> None:
        used = {key for location in self._locations.values() for key in location.keys}
        extra = sorted(key for key in self._state.keys() - used if not _STATE.match(key))
        if self._spec.tie_embeddings and "output_layer.weight" in extra:
            extra.remove("output_layer.weight")
            head, embedding = (self._state.read(key) for key in ("output_layer.weight", "embedding.word_embeddings.weight"))
            if not torch.equal(head[: self._spec.vocab_size], embedding[: self._spec.vocab_size]):
                raise UserError(
                    f"{self._config_file} ties the embeddings, but output_layer.weight of checkpoint {self.path} differs from "
                    "embedding.word_embeddings.weight; set tie_word_embeddings to false there"
                )
        if extra:
            raise UserError(
                f"checkpoint {self.path} has {counted(len(extra), 'tensor')} that {self._spec.architecture} of {self._config_file} does "
                f"not, the first is {extra[0]}; use the config.json that belongs to these weights"
            )


def stored_key(rule: Rule) -> tuple[str, tuple[int, ...]]:
    """Key and leading indices under which our own checkpoints have a parameter: layers one by one, the experts of a layer stacked."""
    location = next(_locations(rule))
    return location.keys[0], location.at


def _open_kept(path: Path, spec: ModelSpec, directory: Path) -> TensorFiles | None:
    """Tensors that the model does not build: those of our own format, or of a run the layers of multi-token prediction in its `hf`."""
    if (path / KEPT).exists():
        return TensorFiles(path / KEPT)
    if directory == path or directory.parent != path.parent or not any(directory.glob("*.safetensors")):
        return None
    return TensorFiles(directory, only=lambda name: of_mtp(name, spec))


@dataclass(frozen=True, slots=True)
class _Location:
    """The keys that hold a parameter, two where gate and up are apart, and its indices in their stacks of layers and experts."""

    keys: tuple[str, ...]
    at: tuple[int, ...]
    stacked_layers: bool
    stacked_experts: bool


def _locations(rule: Rule) -> Iterator[_Location]:
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
                location = (int(layer[1]), *at) if stacked_layers and layer is not None else at
                yield _Location((whole,), location, stacked_layers, stacked_experts)
                if rule.sharding in (Sharding.GATE_UP, Sharding.STACKED_GATE_UP, Sharding.ALTERNATE_GATE_UP):
                    yield _Location((f"{whole}_w", f"{whole}_v"), location, stacked_layers, stacked_experts)
