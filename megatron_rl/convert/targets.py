"""What can be written: a Hugging Face directory, and our own format, which is Megatron-Core's with the model's other files beside.

Both are planned before the first byte: which file has which tensors follows from their names, shapes and dtypes alone.
"""

import itertools
import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from megatron_rl.convert.resumable import FileJob
from megatron_rl.convert.sources import Unit
from megatron_rl.files import write_atomic
from megatron_rl.models.checkpoint_manifest import HashedFile
from megatron_rl.models.expert_stacks import stored_name, stored_tensors
from megatron_rl.models.megatron_files import KEPT, stored_key
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.tensor_writing import raw_bytes, safetensors_header, save_tensor
from megatron_rl.models.weight_table import combine, fill, parameter_shape
from megatron_rl.weights.bucket import WeightSpec

_NOT_FINITE = "not_finite"
_BLOB_ALIGNMENT = 64
_BLOB_BYTES = 2048
"""About what torch.save adds to the numbers of a tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A unit on its way into a file: the tensors that it becomes, and what makes them.

    Once they are made, `not_finite` has how many numbers of which tensor are not finite.
    """

    unit: Unit
    tensors: tuple[WeightSpec, ...]
    make: Callable[[], list[Tensor]]
    not_finite: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def in_files(pieces: Sequence[Piece], max_bytes: int) -> list[list[Piece]]:
    """`pieces` in order, divided into runs of at most `max_bytes` bytes; what is larger has a file of its own.

    What is one tensor in Hugging Face's files stays together.
    """
    files: list[list[Piece]] = []
    room = 0
    for _, run in itertools.groupby(pieces, key=lambda piece: stored_name(piece.tensors[0].name)):
        together = list(run)
        num_bytes = sum(piece.num_bytes for piece in together)
        if not files or num_bytes > room:
            files.append([])
            room = max_bytes
        files[-1] += together
        room -= num_bytes
    return files


def hugging_face_jobs(pieces: Sequence[Piece], max_bytes: int) -> list[FileJob]:
    """The safetensors files of a Hugging Face directory."""
    files = in_files(pieces, max_bytes)
    if len(files) == 1:
        return [safetensors_job("model.safetensors", files[0])]
    return [safetensors_job(f"model-{index + 1:05d}-of-{len(files):05d}.safetensors", file) for index, file in enumerate(files)]


def safetensors_job(name: str, pieces: Sequence[Piece]) -> FileJob:
    """One safetensors file of all tensors of `pieces`."""
    stored = list(_stored(pieces))
    header = safetensors_header((tensor.name, tensor.torch_dtype, tensor.shape) for tensor in stored)

    def write(file: HashedFile) -> dict[str, Any]:
        file.write(header)
        for piece in pieces:
            for tensor, told in zip(_made(piece), piece.tensors, strict=True):
                assert WeightSpec.of(told.name, tensor) == told, f"{told} was planned, {WeightSpec.of(told.name, tensor)} came"
                file.write(raw_bytes(tensor))
        return {"tensors": [tensor.name for tensor in stored], _NOT_FINITE: _not_finite(pieces)}

    return FileJob(name, len(header) + sum(tensor.num_bytes for tensor in stored), write)


def _not_finite(pieces: Sequence[Piece]) -> dict[str, int]:
    return {name: count for piece in pieces for name, count in piece.not_finite.items()}


def not_finite(records: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """How many numbers of which tensor are not finite in the files of `records`, also in those that an earlier attempt wrote."""
    return {name: count for record in records.values() for name, count in record["content"][_NOT_FINITE].items()}


def _stored(pieces: Sequence[Piece]) -> Iterator[WeightSpec]:
    """The tensors of a file: those of `pieces`, of which experts' parts may follow one another as a stack."""
    tensors = ((tensor.name, tensor) for piece in pieces for tensor in piece.tensors)
    for name, parts, stacked in stored_tensors(tensors):
        yield WeightSpec(name, parts[0].dtype, (len(parts), *parts[0].shape)) if stacked else parts[0]


def _made(piece: Piece) -> Iterator[Tensor]:
    tensors = piece.make()
    while tensors:
        yield tensors.pop(0)


def write_index(partial: Path, records: dict[str, dict[str, Any]], *, total_bytes: int) -> None:
    """The index of a Hugging Face directory of more than one file."""
    if len(records) > 1:
        content = {
            "metadata": {"total_size": total_bytes},
            "weight_map": {tensor: name for name, record in records.items() for tensor in record["content"]["tensors"]},
        }
        write_atomic(partial / "model.safetensors.index.json", json.dumps(content, indent=2, sort_keys=True))


def megatron_jobs(pieces: Sequence[Piece], spec: ModelSpec, max_bytes: int) -> list[FileJob]:
    """The files of our own format, and one for the tensors that the model does not build."""
    built = [piece for piece in pieces if piece.unit.rule is not None]
    kept = [piece for piece in pieces if piece.unit.rule is None]
    jobs = [_chunks_job(f"__{index}_0.distcp", file, spec) for index, file in enumerate(in_files(built, max_bytes))]
    return [*jobs, safetensors_job(f"{KEPT}/model.safetensors", kept)] if kept else jobs


def _chunks_job(name: str, pieces: Sequence[Piece], spec: ModelSpec) -> FileJob:
    def write(file: HashedFile) -> dict[str, Any]:
        places = []
        # One memory for all of them: the kernel takes longer to provide it than putting a parameter together takes.
        scratch = torch.empty(max(_made_bytes(piece) for piece in pieces), dtype=torch.uint8)
        for piece in pieces:
            # So that the numbers can be used where they are in the file.
            file.write(bytes(-file.num_bytes % _BLOB_ALIGNMENT))
            start = file.num_bytes
            save_tensor(_parameter(piece, spec, scratch), cast("IO[bytes]", file))
            places.append([start, file.num_bytes - start])
        return {"places": places, _NOT_FINITE: _not_finite(pieces)}

    return FileJob(name, sum(piece.num_bytes + _BLOB_BYTES for piece in pieces), write)


def _made_bytes(piece: Piece) -> int:
    """Bytes of a parameter that is made of several tensors, 0 of one that is there already."""
    assert piece.unit.rule is not None
    return math.prod(parameter_shape(piece.unit.rule)) * _dtype(piece).itemsize if len(piece.tensors) > 1 else 0


def _parameter(piece: Piece, spec: ModelSpec, scratch: Tensor) -> Tensor:
    """One Megatron parameter, with the dimension of the experts in front; in `scratch` [bytes] uint8 if it is made of several tensors."""
    rule = piece.unit.rule
    assert rule is not None
    if len(piece.tensors) > 1:
        whole = scratch[: _made_bytes(piece)].view(_dtype(piece)).view(parameter_shape(rule))
        fill(whole, rule.sharding, piece.make(), spec, tp_rank=0, tp=1)
    else:
        whole = combine(rule.sharding, piece.make(), spec, tp=1)
    return whole[None] if stored_key(rule)[1] else whole


def write_metadata(partial: Path, pieces: Sequence[Piece], spec: ModelSpec, records: dict[str, dict[str, Any]], max_bytes: int) -> None:
    """What makes the files a distributed checkpoint: `.metadata`, `metadata.json` and an empty common state."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    files = in_files([piece for piece in pieces if piece.unit.rule is not None], max_bytes)
    for index, file in enumerate(files):
        name = f"__{index}_0.distcp"
        for piece, (start, length) in zip(file, records[name]["content"]["places"], strict=True):
            assert piece.unit.rule is not None
            key, at = stored_key(piece.unit.rule)
            sizes = parameter_shape(piece.unit.rule)
            stacked = (spec.moe.num_experts,) if at and spec.moe is not None else ()
            if key not in tensors:
                properties = TensorProperties(dtype=_dtype(piece))
                tensors[key] = TensorStorageMetadata(properties, torch.Size((*stacked, *sizes)), [])
            offsets = torch.Size((*at, *(0 for _ in sizes)))
            tensors[key].chunks.append(ChunkStorageMetadata(offsets, torch.Size((*(1 for _ in at), *sizes))))
            storage[MetadataIndex(key, offsets)] = _StorageInfo(name, start, length)
    write_atomic(partial / ".metadata", pickle.dumps(Metadata(tensors, storage_data=storage)))
    common = partial / "common.pt"
    torch.save({}, common)
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    write_atomic(partial / "metadata.json", json.dumps(backends))


def _dtype(piece: Piece) -> torch.dtype:
    dtype = piece.tensors[0].torch_dtype
    for tensor in piece.tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.torch_dtype)
    return dtype
