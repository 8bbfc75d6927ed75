"""What the directory of a sync leaves behind: nothing."""

from pathlib import Path

from megatron_rl.weights.disk import DiskTransport
from megatron_rl.weights.transport import Surroundings


def test_a_version_goes_whole_or_half_written_and_others_stay(tmp_path: Path) -> None:
    for name in ("version-000001", ".version-000001.partial", "version-000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * 72)
    transport = DiskTransport(
        Surroundings(
            manifest=(), directory=tmp_path, free_address=lambda: ("", 0), backend="gloo", num_engines=1, ranks_per_engine=1, timeout_s=1.0
        )
    )
    assert transport.finish(version=1) == 72
    assert [path.name for path in tmp_path.iterdir()] == ["version-000002"]
    assert transport.finish(version=3) == 0, "of a sync that wrote nothing there is nothing to remove"
