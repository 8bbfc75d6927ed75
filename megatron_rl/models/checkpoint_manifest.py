"""The manifest of a checkpoint: size and BLAKE3 of each of its files, looked at before any of them is read.

BLAKE3 is as strong a hash as SHA-256 and four to five times as fast on one core, which SHA-256 would be busy with for longer than with all
else of a save; `b3sum` prints the same digits. Every rank hashes what it writes, while it writes it, and reads a share of the files for
the check, so that a large checkpoint takes no longer than its bytes on one rank do.
"""

import ctypes
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from blake3 import blake3

from megatron_rl.errors import DamagedCheckpointError, UserError
from megatron_rl.files import MANIFEST, sync_file, write_atomic
from megatron_rl.models.model_spec import ModelSpec

HASH: Final = "blake3"
"""The key of a file's hash in a manifest. Manifests that were written on the way to 0.2 may have `sha256` there."""
STALE: Final = "stale_once_trained"
"""Key of a manifest: names of tensors that training leaves as they were, so that they fit the weights around them less and less."""
_ALGORITHMS: Mapping[str, Callable[[], Any]] = {HASH: blake3, "sha256": hashlib.sha256}
_PART = "manifest-part-{rank}.json"
_PIECE_BYTES = 2**18
"""Bytes that are hashed and written, or read and hashed, at once: the second of the two finds them in the processor's cache."""
_WRITE_BACK_BYTES = 64 * 2**20
_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of linux/fs.h."""
_ADVICE = "copy it again from where it came"
_ADVICE_OF_MODEL = f"{_ADVICE}, or remove its {MANIFEST} if the change is yours"
_OF_WEIGHTS = (".safetensors", ".safetensors.index.json", ".distcp", ".metadata", "metadata.json", "common.pt")
"""How the files end that weights are read from. What else a model has, its tokenizer for one, may be changed on purpose."""
_DESCRIPTIONS = (".metadata", "metadata.json")
_ALWAYS_OF_WEIGHTS = (".safetensors", ".safetensors.index.json", ".distcp", ".metadata")
"""Those that no other file of a model has: one that the manifest does not name is what some programs would read, instead or besides."""
_NUM_THREADS = 2


class HashedFile:
    """A file that is written from its start to its end: its bytes and their hash so far, and a report of each piece.

    The kernel is asked to begin with what was written; by itself it does so when a tenth of all memory waits for the disk, which until
    then would idle while bytes are made, and this thread while it writes. What brings a file to the disk is an fsync behind it all.
    """

    def __init__(self, stream: BinaryIO, report: Callable[[int], None] = lambda num_bytes: None) -> None:
        """`stream`: of a file, without a buffer of its own, which would be copied into."""
        self._stream, self._report = stream, report
        self._digest = blake3()
        self._num_begun = 0
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Write the bytes of any buffer."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._digest.update(piece)
            while piece:
                piece = piece[self._stream.write(piece) :]
            num_bytes = min(_PIECE_BYTES, len(view) - start)
            self.num_bytes += num_bytes
            self._write_back()
            self._report(num_bytes)
        return len(view)

    def _write_back(self) -> None:
        start, length = self._num_begun, self.num_bytes - self._num_begun
        if length >= _WRITE_BACK_BYTES:
            ctypes.CDLL(None).sync_file_range(self._stream.fileno(), ctypes.c_int64(start), ctypes.c_int64(length), ctypes.c_uint(_WRITE))
            self._num_begun = self.num_bytes

    def flush(self) -> None:
        """torch asks for it; nothing is kept back."""

    @property
    def entry(self) -> dict[str, Any]:
        """What a manifest says of the file: bytes and hash, in hexadecimal digits."""
        return {"bytes": self.num_bytes, HASH: self._digest.hexdigest()}


def entry_of(path: Path) -> dict[str, Any]:
    """What a manifest says of the file at `path`."""
    return {"bytes": path.stat().st_size, HASH: _hash(path, HASH)}


def has_content(path: Path, entry: Mapping[str, Any]) -> bool:
    """Whether the content of a file has the hash that its `entry` in a manifest names. Raises KeyError where it names none."""
    algorithm = HASH if HASH in entry else "sha256"
    return bool(_hash(path, algorithm) == entry[algorithm])


def _hash(path: Path, algorithm: str) -> str:
    digest, buffer = _ALGORITHMS[algorithm](), bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return str(digest.hexdigest())


def write_part(directory: Path, entries: Mapping[str, Mapping[str, Any]], *, rank: int) -> None:
    """Note what the manifest will say, by name, of the files of `directory` that `rank` has written."""
    (directory / _PART.format(rank=rank)).write_text(json.dumps(entries))


def write_manifest(directory: Path, *, num_parts: int = 0) -> None:
    """Write the manifest of all files in `directory`: those of the parts of so many ranks, which go, and the others, which are hashed now.

    Raises UserError when a part is not there.
    """
    known: dict[str, dict[str, Any]] = {}
    # By their names: of what other nodes have written a listing may know nothing yet.
    for part in (directory / _PART.format(rank=rank) for rank in range(num_parts)):
        try:
            known |= json.loads(part.read_text())
        except FileNotFoundError as error:
            raise UserError(f"{part}, which a rank has written, is not there for rank 0; give a directory that all nodes share") from error
        part.unlink()
    known |= {path.name: entry_of(path) for path in directory.iterdir() if path.name not in known}
    (directory / MANIFEST).write_text(json.dumps({"files": dict(sorted(known.items()))}, indent=1))
    sync_file(directory / MANIFEST)


def write_model_manifest(directory: Path, weights: Mapping[str, Mapping[str, Any]], spec: ModelSpec, *, stale: Iterable[str]) -> None:
    """Write the manifest of the model `spec` in `directory`: what it says of the files of its `weights` by name, its other files, which are
    hashed now, and the names of `stale` tensors. Raises UserError when it cannot be written.
    """
    others = {path.name: entry_of(path) for path in sorted(directory.iterdir()) if path.is_file() and path.name not in weights}
    content = {"model": dataclasses.asdict(spec), "files": {**weights, **others}, STALE: sorted(stale)}
    write_atomic(directory / MANIFEST, json.dumps(content, indent=2) + "\n")


def check_sizes(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """What the manifest says of each file. Raise DamagedCheckpointError when one is missing, too many or of another size."""
    files = _read(directory, advice=_ADVICE)
    present = {path.name for path in directory.iterdir()} - {MANIFEST}
    for name in sorted(present - files.keys()):
        raise DamagedCheckpointError(
            f"checkpoint {directory} is not as it was saved: {name} is there, but not in its manifest; remove it, or {_ADVICE}"
        )
    _check_sizes(directory, files, advice=_ADVICE)
    return files


def check_manifest(directory: Path, *, share: int, num_shares: int) -> None:
    """Raise as `check_sizes`, and when one of this `share` of the files has other content."""
    _check_content(directory, check_sizes(directory), share=share, num_shares=num_shares, advice=_ADVICE)


def check_descriptions(directory: Path) -> None:
    """`check_weights` of the small files that say where tensors are, of which one is a pickle. Raises UserError."""
    files = {name: entry for name, entry in hashed_files(directory).items() if name.endswith(_DESCRIPTIONS)}
    _check(directory, files, share=0, num_shares=1, advice=_ADVICE_OF_MODEL)


def check_weights(directory: Path, *, share: int, num_shares: int) -> None:
    """Raise UserError as `check_manifest` does, of the files that weights are read from. A directory without hashes passes."""
    hashed = hashed_files(directory)
    _check_strangers(directory, hashed)
    files = {name: entry for name, entry in hashed.items() if name.endswith(_OF_WEIGHTS)}
    _check(directory, files, share=share, num_shares=num_shares, advice=_ADVICE_OF_MODEL)


def check_weights_alone(directory: Path) -> None:
    """`check_weights` of all files in two threads. Raises UserError."""
    in_threads(partial(check_weights, directory))


def check_model(directory: Path) -> None:
    """As `check_weights_alone`, of all files but config.json, whose fields are compared one by one elsewhere. Raises UserError."""
    hashed = hashed_files(directory)
    _check_strangers(directory, hashed)
    files = {name: entry for name, entry in hashed.items() if name != "config.json"}
    in_threads(partial(_check, directory, files, advice=_ADVICE_OF_MODEL))


def in_threads(check: Callable[..., None]) -> None:
    """Call `check(share=..., num_shares=...)` for every share in a thread of its own. Raises the first one's error."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for done in [pool.submit(check, share=share, num_shares=_NUM_THREADS) for share in range(_NUM_THREADS)]:
            done.result()


def changed_texts(directory: Path) -> list[str]:
    """Names of the files beside the weights that are there, but not as the manifest of `directory` has them. Raises UserError."""
    files = {name: entry for name, entry in hashed_files(directory).items() if not name.endswith(_OF_WEIGHTS)}
    return sorted(name for name, entry in files.items() if (directory / name).is_file() and not has_content(directory / name, entry))


def hashed_files(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """What the manifest of `directory` says of its files, by name; empty without one that has hashes. Raises UserError."""
    # One that names stale tensors alone has no hashes.
    return _read(directory, advice=_ADVICE_OF_MODEL) if "files" in read_manifest(directory) else {}


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of `directory`, empty where there is none or one of another program's. Raises UserError."""
    file = directory / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); {_ADVICE_OF_MODEL}") from error
    return content if isinstance(content, dict) else {}


def _check_strangers(directory: Path, hashed: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise DamagedCheckpointError for weights, or an index of them, beside those of the manifest. It has none where `hashed` is empty."""
    for place in sorted({(directory / name).parent for name in hashed}):
        for file in sorted(place.glob("*")):
            name = str(file.relative_to(directory))
            # Programs read no other hidden file, and macOS leaves one beside every file on disks that are not its own.
            hidden = file.name.startswith(".") and file.name != ".metadata"
            if name.endswith(_ALWAYS_OF_WEIGHTS) and not hidden and name not in hashed:
                raise DamagedCheckpointError(
                    f"checkpoint {directory} is not as it was saved: {name} is there, but not in its {MANIFEST}, and programs differ in "
                    f"whether they read it; remove it, or {MANIFEST} if the change is yours"
                )


def _check(directory: Path, files: Mapping[str, Mapping[str, Any]], *, share: int, num_shares: int, advice: str) -> None:
    """Raise as `_check_sizes` of all `files`, and as `_check_content` of this `share` of them."""
    _check_sizes(directory, files, advice=advice)
    _check_content(directory, files, share=share, num_shares=num_shares, advice=advice)


def _check_sizes(directory: Path, files: Mapping[str, Mapping[str, Any]], *, advice: str) -> None:
    """Raise DamagedCheckpointError when one of `files` is missing or has another size."""
    for name, entry in sorted(files.items()):
        if not (directory / name).is_file():
            raise DamagedCheckpointError(f"checkpoint {directory} is damaged: {name} is in its manifest, but not there; {advice}")
        size = (directory / name).stat().st_size
        if size != entry["bytes"]:
            raise DamagedCheckpointError(
                f"checkpoint {directory} is damaged: {name} has {size:,} bytes, its manifest says {entry['bytes']:,}; {advice}"
            )


def _check_content(directory: Path, files: Mapping[str, Mapping[str, Any]], *, share: int, num_shares: int, advice: str) -> None:
    """Raise DamagedCheckpointError when one of this `share` of `files` has other content."""
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name))[share::num_shares]:
        if not has_content(directory / name, files[name]):
            raise DamagedCheckpointError(f"checkpoint {directory} is damaged: the content of {name} is not that of its manifest; {advice}")


def _read(directory: Path, *, advice: str) -> Mapping[str, Mapping[str, Any]]:
    try:
        files: Mapping[str, Mapping[str, Any]] = json.loads((directory / MANIFEST).read_text())["files"]
        for name, entry in files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"it names {name}, a file elsewhere")
            if not isinstance(entry["bytes"], int) or not any(isinstance(entry.get(algorithm), str) for algorithm in _ALGORITHMS):
                raise ValueError(f"it has no size and {HASH} of {name}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{directory} is not a complete checkpoint: its {MANIFEST} cannot be read ({error}); {advice}"
        ) from error
    return files
