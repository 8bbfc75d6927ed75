"""A checkpoint in which somebody has planted code: nothing of it runs, and the file is named as what it is."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, metadata

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.pickles import FORMAT, RecordsUnpickler
from megatron_rl.errors import UserError
from megatron_rl.system.device import megatron_version
from megatron_rl.system.files import MANIFEST

SUPERVISED = {"policy_loss": "sft"}


class Payload:
    """Pickled, it makes the file `trace` when it is loaded by an ordinary unpickler."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.mknod, (str(self._trace),)


def plant(file: Path, trace: Path) -> None:
    """Put the payload where the file's reader finds it first."""
    if file.name == ".metadata":
        file.write_bytes(pickle.dumps(Payload(trace)))
    elif file.name == "common.pt":
        torch.save(Payload(trace), file)
    else:
        plant_object(file, trace)


def plant_object(file: Path, trace: Path) -> None:
    """Replace the generator's state, an object in a .distcp file, as a forger would who also writes its place into .metadata."""
    metadata = FileSystemReader(file.parent).read_metadata()
    index = next(index for index in metadata.storage_data if index.fqn.startswith("rng"))
    content = io.BytesIO()
    torch.save(Payload(trace), content)
    place = metadata.storage_data[index]
    assert place.relative_path == file.name
    place.offset, place.length = file.stat().st_size, len(content.getvalue())
    with file.open("ab") as end:
        end.write(content.getvalue())
    (file.parent / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("unsafe", [False, True], ids=["", "with torch's unsafe switch"])
@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_planted_code_is_not_run(
    make_trainer: Callable[..., Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    unsafe: bool,
) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    directory, trace = tmp_path / "checkpoint", tmp_path / "trace"
    trainer.save(directory)
    trainer.load(directory)
    if unsafe:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    plant(directory / name, trace)
    # A forger who can write there can write the manifest, too.
    (directory / MANIFEST).unlink()
    manifest.write(directory)
    with pytest.raises(UserError, match="holds more than the records of a checkpoint"):
        trainer.load(directory)
    assert not trace.exists()


def test_every_file_of_a_checkpoint_is_known(make_trainer: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A file that another release adds has to be looked at: it may be one more pickle."""
    make_trainer(tiny_model(), SUPERVISED).save(tmp_path / "checkpoint")
    before_0_19 = {"common.pt"} if megatron_version() < (0, 19) else set()
    known = {".metadata", "metadata.json", "__0_0.distcp", MANIFEST} | before_0_19
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == known


@pytest.mark.parametrize("name", ["torch.hub\nload", "os\nsystem", "builtins\neval", "torch.serialization\nload", "torch\nload"])
def test_no_function_is_found_by_its_name(name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no record of a checkpoint"):
        RecordsUnpickler(io.BytesIO(f"c{name}\n.".encode())).load()


def test_the_format_of_the_checkpoint_is_ours(make_trainer: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model(), SUPERVISED)
    trainer.save(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "metadata.json"
    sound = file.read_text()
    # Since 0.19 megatron-core has no common backend to name.
    named = json.loads(sound)
    assert FORMAT | named == FORMAT
    assert len(named) == (4 if megatron_version() < (0, 19) else 2)
    for key, value in (("sharded_backend", "zarr"), ("common_backend", "msgpack"), ("common_backend_version", 2)):
        file.write_text(json.dumps(FORMAT | {key: value}))
        (tmp_path / "checkpoint" / MANIFEST).unlink()
        manifest.write(tmp_path / "checkpoint")
        with pytest.raises(UserError, match=f"{key} {value!r} .*needs {FORMAT[key]!r}"):
            trainer.load(tmp_path / "checkpoint")


def test_members_that_old_pythons_pickle_by_getattr_are_read() -> None:
    """Python before 3.11.4, as Debian 12 has, writes them so; nothing else is reached by getattr."""
    call = b"cbuiltins\ngetattr\n(c%b\n%b\nV%b\ntR."
    encoding = (metadata.__name__.encode(), b"_MEM_FORMAT_ENCODING")
    member = metadata._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    assert RecordsUnpickler(io.BytesIO(call % (*encoding, member.name.encode()))).load() is member
    for owner, name in ((encoding, b"__class__"), ((b"pathlib", b"PosixPath"), b"unlink")):
        with pytest.raises(pickle.UnpicklingError, match="no member"):
            RecordsUnpickler(io.BytesIO(call % (*owner, name))).load()
