"""The manifest of a checkpoint: size and BLAKE3 of each of its files, looked at before any of them is read.

BLAKE3 is as strong a hash as SHA-256 and four to five times as fast on one core, which SHA-256 would be busy with for longer than with all
else of a save; `b3sum` prints the same digits. Every rank hashes what it writes, while it writes it, and reads a share of the files for
the check, so that a large checkpoint takes no longer than its bytes on one rank do.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from blake3 import blake3

from megatron_rl.errors import DamagedCheckpointError
from megatron_rl.files import MANIFEST, sync_file

HASH: Final = "blake3"
"""The key of a file's hash in a manifest. Manifests that were written on the way to 0.2 may have `sha256` there."""
_ALGORITHMS: Mapping[str, Callable[[], Any]] = {HASH: blake3, "sha256": hashlib.sha256}
_PART = "manifest-part-{rank}.json"
_PIECE_BYTES = 2**18
"""Bytes that are hashed and written, or read and hashed, at once: the second of the two finds them in the processor's cache."""
_ADVICE = "copy it again from where it came"


class HashedFile:
    """A file that is written from its start to its end: its bytes and their hash so far, and a report of each piece."""

    def __init__(self, stream: BinaryIO, report: Callable[[int], None] = lambda num_bytes: None) -> None:
        """`stream`: without a buffer of its own, which would be copied into."""
        self._stream, self._report = stream, report
        self._digest = blake3()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Write the bytes of any buffer."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._digest.update(piece)
            while piece:
                piece = piece[self._stream.write(piece) :]
            self._report(min(_PIECE_BYTES, len(view) - start))
        self.num_bytes += len(view)
        return len(view)

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


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files in `directory`: those of the parts, which go, and the others, which are hashed now."""
    known: dict[str, dict[str, Any]] = {}
    for part in directory.glob(_PART.format(rank="*")):
        known |= json.loads(part.read_text())
        part.unlink()
    known |= {path.name: entry_of(path) for path in directory.iterdir() if path.name not in known}
    (directory / MANIFEST).write_text(json.dumps({"files": dict(sorted(known.items()))}, indent=1))
    sync_file(directory / MANIFEST)


def check_sizes(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """What the manifest says of each file. Raise DamagedCheckpointError when one is missing, too many or of another size."""
    files = _read(directory)
    present = {path.name for path in directory.iterdir()} - {MANIFEST}
    for name in sorted(files.keys() ^ present):
        what = "is in its manifest, but not there" if name in files else "is there, but not in its manifest"
        raise DamagedCheckpointError(f"checkpoint {directory} is not as it was saved: {name} {what}; {_ADVICE}")
    for name, entry in files.items():
        size = (directory / name).stat().st_size
        if size != entry["bytes"]:
            raise DamagedCheckpointError(
                f"checkpoint {directory} is damaged: {name} has {size:,} bytes, its manifest says {entry['bytes']:,}; {_ADVICE}"
            )
    return files


def check_manifest(directory: Path, *, share: int, num_shares: int) -> None:
    """Raise as `check_sizes`, and when one of this `share` of the files has other content."""
    files = check_sizes(directory)
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name))[share::num_shares]:
        if not has_content(directory / name, files[name]):
            raise DamagedCheckpointError(f"checkpoint {directory} is damaged: the content of {name} is not that of its manifest; {_ADVICE}")


def _read(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        files: Mapping[str, Mapping[str, Any]] = json.loads((directory / MANIFEST).read_text())["files"]
        for name, entry in files.items():
            if Path(name).name != name:
                raise ValueError(f"it names {name}, a file elsewhere")
            if not isinstance(entry["bytes"], int) or not any(isinstance(entry.get(algorithm), str) for algorithm in _ALGORITHMS):
                raise ValueError(f"it has no size and {HASH} of {name}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{directory} is not a complete checkpoint: its {MANIFEST} cannot be read ({error}); {_ADVICE}"
        ) from error
    return files
