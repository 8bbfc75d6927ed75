"""The weights of a model directory in whichever form they are stored there: safetensors, also quantised ones, or our own format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.models.config_json import read_config
from megatron_rl.models.hf_files import Checkpoint
from megatron_rl.models.megatron_files import MegatronCheckpoint
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.torch_dist import is_torch_dist
from megatron_rl.models.weight_table import of_mtp


class NamedTensors(Protocol):
    """Hugging Face tensors by name, of the directory or checkpoint `path`."""

    path: Path

    def names(self) -> set[str]:
        """Names of all tensors."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor [...] of `shape`. Raises UserError for one of another shape."""


def open_weights(path: Path, spec: ModelSpec, *, dequantised_dtype: torch.dtype = torch.float32) -> Checkpoint | MegatronCheckpoint:
    """The tensors of the model directory `path`, whose config.json says `spec`; quantised ones in `dequantised_dtype`.

    Raises UserError when there are none, or when they and config.json do not belong together.
    """
    return MegatronCheckpoint(path, spec, directory=path) if is_torch_dist(path) else Checkpoint(path, dequantised_dtype=dequantised_dtype)


def mtp_tensors(path: Path, spec: ModelSpec, *, dequantised_dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor of multi-token prediction in the model directory `path`, as it is stored. Raises UserError."""
    with open_weights(path, spec, dequantised_dtype=dequantised_dtype) as weights:
        for name in sorted(weights.names()):
            if of_mtp(name, spec):
                yield name, weights.read(name, weights.shape(name))


def engines_read(path: Path) -> bool:
    """Whether engines can take their weights from the model directory `path`: plain safetensors.

    They would keep codes as codes, which the trainer's weights cannot replace, and do not know our own format.
    """
    return not is_torch_dist(path) and not read_config(path).get("quantization_config")


def names_code(path: Path) -> bool:
    """Whether config.json in the model directory `path` names Python code (`auto_map`), there or on the Hugging Face hub.

    SGLang imports it for a model that it has no class of its own for, also without `trust_remote_code`.
    """
    return bool(read_config(path).get("auto_map"))
