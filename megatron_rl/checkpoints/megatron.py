"""Megatron-Core's distributed checkpoints, of this or other programs, as Hugging Face tensors of a known model."""

import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils import serialization

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.hugging_face import HuggingFaceWeights
from megatron_rl.checkpoints.pickles import FORMAT, read_metadata, reading_records_only, stored_part
from megatron_rl.errors import UserError, counted
from megatron_rl.models.config_json import read_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import parse_model_spec
from megatron_rl.models.weight_table import Rule, Sharding, of_mtp, parameter_shape, rules, split
from megatron_rl.system.files import runs_of_bytes

KEPT = "left-out"
"""Below a directory of our format: tensors of the Hugging Face original that the model does not build, byte for byte."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_EXPERTS_NORM = ".pre_mlp_layernorm.weight"
# Keys of training state other than the policy's weights.
_STATE = re.compile(r"optimizer\.|chained_|rng|rerun_state|opt_param_scheduler|iteration|critic\.|.*\._extra_state")


def is_torch_dist(path: Path) -> bool:
    """Return true when the directory `path` holds a distributed checkpoint."""
    return (path / ".metadata").is_file() and (path / "metadata.json").is_file()


class MegatronWeights:
    """A distributed checkpoint, read parameter by parameter; optimizer state is not read. Call `close` when done."""

    def __init__(self, path: Path, *, directory: Path) -> None:
        """Open `path`, of the model with config.json in `directory`. Raises UserError when they do not belong together."""
        self.path, self.directory = path, directory
        self.config = read_config(directory)
        self.spec = parse_model_spec(self.config, origin=str(directory / "config.json"))
        # A pickle with another bit can do anything to the process.
        manifest.check(path, "index")
        metadata = read_metadata(path)
        self._tensors = {key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._check_stored_files()
        self._rules = [rule for rule in rules(self.spec) if rule.exported]
        self._locations = {rule.megatron: self._location(rule) for rule in self._rules}
        self._check_strangers()
        self.kept = _open_kept(path, self.spec, directory)
        kept_by_run = self.kept is not None and self.kept.path == directory and self.kept.names()
        self.places: tuple[Path, ...] = (path, directory) if kept_by_run else (path,)
        """The directories whose tensors are read."""
        self._of_tensor = {name: (rule, index) for rule in self._rules for index, name in enumerate(rule.hugging_face)}
        self._last: tuple[Rule, list[Tensor]] | None = None

    def close(self) -> None:
        """Close the files."""
        if self.kept is not None:
            self.kept.close()

    def names(self) -> set[str]:
        """Return the names of all tensors, also of tensors outside the built model."""
        return self._of_tensor.keys() | (self.kept.names() if self.kept is not None else set())

    def check_files(self) -> None:
        """Raise UserError for a damaged file of tensors outside the built model; `__init__` has checked the others."""
        if self.kept is not None:
            self.kept.check_files()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape [...] of a tensor."""
        if name not in self._of_tensor and self.kept is not None:
            return self.kept.shape(name)
        rule, index = self._of_tensor[name]
        return rule.tensors[index].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        if name not in self._of_tensor and self.kept is not None:
            return self.kept.dtype(name)
        return self._tensors[self._locations[self._of_tensor[name][0].megatron].keys[0]].properties.dtype

    def read(self, name: str) -> Tensor:
        """Return one tensor, of any shape, on the CPU. All tensors of one parameter are read together."""
        if name not in self._of_tensor and self.kept is not None:
            return self.kept.read(name)
        rule, index = self._of_tensor[name]
        if self._last is None or self._last[0] is not rule:
            self._last = None
            self._last = rule, self._read_parameter(rule)
        return self._last[1][index]

    def _read_parameter(self, rule: Rule) -> list[Tensor]:
        location = self._locations[rule.megatron]
        parts = [self.read_stored(key, location.at) for key in location.keys]
        if len(parts) == len(rule.tensors) > 1:
            return parts
        return split(rule.sharding, torch.cat(parts) if len(parts) > 1 else parts[0], self.spec)

    def padding(self, rule: Rule) -> Tensor:
        """Return the rows [rows, columns] behind the vocabulary in the parameter of `rule`, the embedding or the head."""
        return self.read_stored(self._locations[rule.megatron].keys[0])[self.spec.vocab_size :]

    def read_stored(self, key: str, at: Sequence[int] = ()) -> Tensor:
        """Return a stored tensor, of any shape, or its part at the indices `at` of the first dimensions.

        Raises UserError when a region is in no chunk, or for a damaged file.
        """
        rest = tuple(self._tensors[key].size)[len(at) :]
        offsets, sizes = torch.Size((*at, *(0 for _ in rest))), torch.Size((*(1 for _ in at), *rest))
        items = create_read_items_for_chunk_list(key, self._tensors[key], [ChunkStorageMetadata(offsets, sizes)])
        filled = sum(math.prod(item.lengths) for item in items)
        if filled != math.prod(rest):
            raise UserError(
                f"{key} of checkpoint {self.path} has {filled:,} of {math.prod(rest):,} numbers in its files; a rank's part was not saved: "
                "take another checkpoint"
            )
        dtype: torch.dtype = self._tensors[key].properties.dtype
        try:
            with reading_records_only(self.path):
                parts = [stored_part(self._reader, item) for item in items]
            if any(part.dtype != dtype for part in parts):
                raise ValueError("it has another dtype than .metadata says")
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"cannot read {key} from {self.path}: {reason}; take another checkpoint") from error
        if len(parts) == 1:
            aligned = parts[0].data_ptr() % dtype.itemsize == 0
            return (parts[0] if aligned else parts[0].clone()).reshape(rest)
        # Regions outside all chunks stay visible, even when chunks overlap and the count is right.
        result = torch.full(sizes, float("nan") if dtype.is_floating_point else 0, dtype=dtype)
        for item, part in zip(items, parts, strict=True):
            narrow_tensor_by_index(result, item.dest_offsets, item.lengths).copy_(part)
        return result.view(rest)

    def _check_stored_files(self) -> None:
        """Raise UserError for a tensor part without a place, and for a missing or truncated file."""
        ends: dict[str, int] = {}
        for key, entry in self._tensors.items():
            for chunk in entry.chunks:
                place = self._reader.storage_data.get(MetadataIndex(key, chunk.offsets))
                if place is None:
                    words = f"{self.path / '.metadata'} does not say where the part of {key} at {tuple(chunk.offsets)} is"
                    raise UserError(f"{words}; take another checkpoint")
                ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            file = self.path / name
            if not file.is_file():
                raise UserError(f"checkpoint {self.path} lacks the file {name}, which its .metadata names; copy the checkpoint again")
            if file.stat().st_size < end:
                raise UserError(f"{file} is cut off: it has {file.stat().st_size:,} bytes, needs {end:,}; copy the checkpoint again")

    def _location(self, rule: Rule) -> "_Location":
        """Find a parameter: layers and experts may be stacked, and halves may be apart."""
        for location in _locations(rule):
            if self._tensors.keys() >= set(location.keys):
                self._check_shape(rule, location)
                return location
        raise UserError(
            f"checkpoint {self.path} has no {next(_locations(rule)).keys[0]}, which the model of {self.directory / 'config.json'} needs "
            f"for {rule.hugging_face[0]}; use the config.json that belongs to these weights"
        )

    def _check_shape(self, rule: Rule, location: "_Location") -> None:
        whole = parameter_shape(rule)
        needed = (whole[0] // len(location.keys), *whole[1:])
        stacked = (self.spec.num_layers,) if location.stacked_layers else ()
        if location.stacked_experts and self.spec.moe is not None:
            stacked = (*stacked, self.spec.moe.num_experts)
        for key in location.keys:
            shape = tuple(self._tensors[key].size)
            got = shape[len(location.at) :]
            padded = rule.sharding is Sharding.VOCABULARY and len(got) == len(needed) and got[0] >= needed[0] and got[1:] == needed[1:]
            if shape[: len(location.at)] != stacked or (got != needed and not padded):
                raise UserError(
                    f"{key} of checkpoint {self.path} has shape {shape}, {self.directory / 'config.json'} needs {(*stacked, *needed)}; use "
                    "the config.json that belongs to these weights"
                )

    def _check_strangers(self) -> None:
        used = {key for location in self._locations.values() for key in location.keys}
        extra = sorted(key for key in self._tensors.keys() - used if not _STATE.match(key))
        file = self.directory / "config.json"
        if self.spec.tie_embeddings and "output_layer.weight" in extra:
            extra.remove("output_layer.weight")
            head, embedding = (self.read_stored(key) for key in ("output_layer.weight", "embedding.word_embeddings.weight"))
            if not torch.equal(head[: self.spec.vocab_size], embedding[: self.spec.vocab_size]):
                raise UserError(
                    f"{file} ties the embeddings, but output_layer.weight of checkpoint {self.path} differs from "
                    "embedding.word_embeddings.weight; set tie_word_embeddings to false there"
                )
        if extra:
            raise UserError(
                f"checkpoint {self.path} has {counted(len(extra), 'tensor')} that {self.spec.architecture} of {file} does "
                f"not, the first is {extra[0]}; use the config.json that belongs to these weights"
            )


def _open_kept(path: Path, spec: ModelSpec, directory: Path) -> HuggingFaceWeights | None:
    """Open the tensors outside the built model: any in our own format, of multi-token prediction in `hf` of a run."""
    if (path / KEPT).exists():
        return HuggingFaceWeights(path / KEPT)
    if directory == path or directory.parent != path.parent or not any(directory.glob("*.safetensors")):
        return None
    return HuggingFaceWeights(directory, only=lambda name: of_mtp(name, spec))


@dataclass(frozen=True, slots=True)
class _Location:
    """The keys of a parameter, two where gate and up are apart, and its indices in stacks of layers and experts."""

    keys: tuple[str, ...]
    at: tuple[int, ...]
    stacked_layers: bool
    stacked_experts: bool


def _locations(rule: Rule) -> Iterator[_Location]:
    """Yield the places of a parameter in releases of megatron-core, our own checkpoints' first."""
    # Whatever built the layers, megatron-core saves norms under Transformer Engine's names and experts
    # under a name of their own.
    names = [rule.megatron] if rule.transformer_engine is None or rule.of_expert else [rule.transformer_engine, rule.megatron]
    if rule.megatron.endswith(_EXPERTS_NORM):
        # With torch layers the norm is stored under the name of a dense layer.
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


def write_megatron(
    directory: Path,
    dtypes: Sequence[tuple[Rule, torch.dtype]],
    make: Callable[[Rule], Tensor],
    spec: ModelSpec,
    *,
    max_file_bytes: int,
) -> dict[str, manifest.Entry]:
    """Write a distributed checkpoint of one parameter by `make` at a time, for the rules of `dtypes`.

    Layers are stored one by one, the experts of a layer stacked. Returns the manifest's entries of the files.
    """
    items = [_write_item(rule, dtype, spec) for rule, dtype in dtypes]
    (plan,), metadata = create_default_global_save_plan([SavePlan(items)])
    rules_by_place = dict(zip(map(_place, items), (rule for rule, _ in dtypes), strict=True))
    planner = MadeHere(lambda item: make(rules_by_place[_place(item)]).contiguous().view(_data(item).chunk.sizes))
    writer = FileSystemWriter(directory, sync_files=False)
    writer.set_up_storage_writer(True)
    written: list[list[WriteResult]] = []

    def num_bytes(item: WriteItem) -> int:
        return math.prod(_data(item).chunk.sizes) * int(_data(item).properties.dtype.itemsize)

    def files() -> Iterator[Path]:
        for index, inside in enumerate(runs_of_bytes(plan.items, num_bytes, max_bytes=max_file_bytes)):
            with without_checksums():
                written.append(writer.write_data(SavePlan(inside, storage_data=_StoragePrefix(f"__{index}_")), planner).value())
            yield directory / written[-1][0].storage_data.relative_path

    entries = manifest.entries_of(files())
    writer.finish(metadata, written)
    torch.save({}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(FORMAT))
    return entries


without_checksums = partial(serialization.config.patch, "save.compute_crc32", False)  # type: ignore[attr-defined]
"""Has `torch.save` in this thread write no CRC, which nothing reads and takes longer than writing the numbers."""


class MadeHere(DefaultSavePlanner):
    """Plan of a save with data by `make` at the time of writing, in place of the state's."""

    def __init__(self, make: Callable[[WriteItem], Tensor | BytesIO]) -> None:
        self._make = make

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return the data of the item, of any shape."""
        return self._make(write_item)


def _place(item: WriteItem) -> MetadataIndex:
    # A plan of several ranks adds an index to the item's own.
    return MetadataIndex(item.index.fqn, item.index.offset)


def _write_item(rule: Rule, dtype: torch.dtype, spec: ModelSpec) -> WriteItem:
    location, shape = next(_locations(rule)), parameter_shape(rule)
    stacked = (spec.moe.num_experts,) if location.at and spec.moe is not None else ()
    offsets = torch.Size((*location.at, *(0 for _ in shape)))
    chunk = ChunkStorageMetadata(offsets, torch.Size((*(1 for _ in location.at), *shape)))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size((*stacked, *shape)))
    return WriteItem(MetadataIndex(location.keys[0], offsets), WriteItemType.SHARD, tensor_data=data)


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "an item is a tensor"
    return item.tensor_data
