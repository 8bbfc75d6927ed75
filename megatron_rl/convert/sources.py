"""What can be converted: Hugging Face directories and distributed checkpoints, both as Hugging Face tensors of one known model.

A unit is what is read at once: the tensors of one Megatron parameter. A source is checked when it is opened: each of its tensors is one
of the model or known to be left out, and the other way round.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import read_config
from megatron_rl.models.hf_files import Checkpoint
from megatron_rl.models.hf_weights import check_names
from megatron_rl.models.megatron_files import MegatronCheckpoint
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import parse_model_spec
from megatron_rl.models.stored_weights import NamedTensors
from megatron_rl.models.torch_dist import is_torch_dist
from megatron_rl.models.weight_table import Rule, rules
from megatron_rl.weights.bucket import WeightSpec

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

    @property
    def tensors(self) -> NamedTensors:
        """The same tensors by their names."""

    @property
    def weights(self) -> tuple[Path, ...]:
        """The directories whose tensors are read."""

    def units(self) -> list[Unit]:
        """All tensors, in the order of the model, then those that the model does not build."""

    def read(self, unit: Unit) -> list[Tensor]:
        """The tensors of `unit`, each [...] of its shape."""

    def close(self) -> None:
        """Close the files."""


def config_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that a config.json names, bfloat16 where it names none."""
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)


def most_common_dtype(source: Source) -> str:
    """The dtype that most bytes of `source` have, as "bfloat16"."""
    num_bytes: Counter[str] = Counter()
    for unit in source.units():
        for tensor in unit.tensors:
            num_bytes[tensor.dtype] += tensor.num_bytes
    return max(num_bytes, key=num_bytes.__getitem__)


def num_not_finite(tensor: Tensor) -> int:
    """How many numbers of a tensor of any shape are not finite. They are looked at one by one only where there are such."""
    if not tensor.is_floating_point() or not tensor.numel() or all(extreme.isfinite() for extreme in tensor.aminmax()):
        return 0
    return int((~torch.isfinite(tensor)).sum())


class HuggingFaceSource:
    """A directory with config.json and safetensors. Quantised tensors come in `dequantised_dtype`, None for that of config.json."""

    def __init__(self, path: Path, *, dequantised_dtype: torch.dtype | None = None) -> None:
        """Open it. Raises UserError when the files and config.json do not belong together."""
        self.path = self.directory = path
        self.weights = (path,)
        self.config = read_config(path)
        self.spec = parse_model_spec(self.config, origin=str(path / "config.json"))
        self.tensors = Checkpoint(path, dequantised_dtype=dequantised_dtype or config_dtype(self.config))
        check_names(self.tensors, self.spec)
        self.quantised = bool(self.config.get("quantization_config"))

    def units(self) -> list[Unit]:
        """All tensors. Raises UserError for one of another shape than config.json says."""
        found = [Unit(tuple(map(self._describe, rule.hugging_face)), rule) for rule in rules(self.spec) if rule.exported]
        for unit in found:
            assert unit.rule is not None
            for tensor, wanted in zip(unit.tensors, unit.rule.tensors, strict=True):
                if tensor.shape != wanted.shape:
                    self.tensors.read(tensor.name, wanted.shape)
        used = {tensor.name for unit in found for tensor in unit.tensors}
        return found + [Unit((self._describe(name),)) for name in sorted(self.tensors.names() - used)]

    def _describe(self, name: str) -> WeightSpec:
        return WeightSpec(name, str(self.tensors.dtype(name)).removeprefix("torch."), self.tensors.shape(name))

    def read(self, unit: Unit) -> list[Tensor]:
        """The tensors of `unit`, each [...] of its shape."""
        return [self.tensors.read(tensor.name, tensor.shape) for tensor in unit.tensors]

    def close(self) -> None:
        """Close the files."""
        self.tensors.__exit__()


class MegatronSource:
    """A distributed checkpoint: of a run, converted, or of another program."""

    def __init__(self, path: Path, *, directory: Path) -> None:
        """Open `path`, of the model whose config.json is in `directory`. Raises UserError when they do not belong together."""
        self.path, self.directory = path, directory
        self.config = read_config(directory)
        self.spec = parse_model_spec(self.config, origin=str(directory / "config.json"))
        self.tensors = MegatronCheckpoint(path, self.spec, directory=directory)
        kept = self.tensors.kept
        self.weights = (path, directory) if kept is not None and kept.path == directory and kept.names() else (path,)

    def units(self) -> list[Unit]:
        """All tensors."""
        found = []
        for rule in rules(self.spec):
            if rule.exported:
                dtype = str(self.tensors.dtype(rule)).removeprefix("torch.")
                found.append(Unit(tuple(WeightSpec(tensor.name, dtype, tensor.shape) for tensor in rule.tensors), rule))
        kept = self.tensors.kept
        if kept is not None:
            found += [
                Unit((WeightSpec(name, str(kept.dtype(name)).removeprefix("torch."), kept.shape(name)),)) for name in sorted(kept.names())
            ]
        return found

    def read(self, unit: Unit) -> list[Tensor]:
        """The tensors of `unit`, each [...] of its shape."""
        if unit.rule is not None:
            return self.tensors.read_parameter(unit.rule)
        assert self.tensors.kept is not None, "a unit without a rule comes from the kept tensors"
        return [self.tensors.kept.read(tensor.name) for tensor in unit.tensors]

    def close(self) -> None:
        """Close the files."""
        self.tensors.__exit__()


def open_source(path: Path, *, config: Path | None = None, dequantised_dtype: torch.dtype | None = None) -> Source:
    """Whatever `path` is: a Hugging Face directory, a checkpoint of ours or of a run, or another program's.

    `config` is the Hugging Face directory of a checkpoint that has no config.json; quantised tensors come in `dequantised_dtype`, None
    for that of config.json. Raises UserError.
    """
    check_place(path)
    state = _find_state(path)
    if state is None:
        if (path / "config.json").exists():
            return HuggingFaceSource(path, dequantised_dtype=dequantised_dtype)
        raise UserError(
            f"{path} is neither a Hugging Face directory (config.json and safetensors) nor a distributed checkpoint (.metadata); give one"
        )
    directory = config or _find_config(state)
    if directory is None:
        raise UserError(f"checkpoint {state} has no config.json beside it; name the Hugging Face directory of its model with --config")
    return MegatronSource(state, directory=directory)


def check_place(path: Path) -> None:
    """Raise UserError where `path` is no directory, or is the directory of a run, of whose checkpoints one has to be named."""
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give a Hugging Face directory or a checkpoint")
    for checkpoints in (path / "checkpoints", path):
        steps = [step for step in checkpoints.glob("step-*") if is_torch_dist(step / "megatron")]
        if steps:
            newest = max(steps, key=lambda step: (len(step.name), step.name))
            raise UserError(f"{path} holds the checkpoints of a run; give one of them, the newest is {newest}")


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
