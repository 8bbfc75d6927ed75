"""Variables that every process of a run has alike."""

import contextlib
import os
import subprocess
import sys
import unittest.mock
import warnings
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from megatron_rl.config.load import load_settings
from megatron_rl.errors import UserError
from megatron_rl.runtime import start
from megatron_rl.system import device
from megatron_rl.system.process_variables import (
    RANK_VARIABLES,
    check_directory,
    check_home,
    interface_names,
    settle_output,
    shared_variables,
)


def test_ranks_and_engines_of_a_gpu_run_set_up_nccl_alike():
    assert shared_variables({"PATH": "/bin"}, device_kind="cuda") == {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
    }
    assert shared_variables({"NCCL_NVLS_ENABLE": "1"}, device_kind="cpu") == {}


def test_what_the_driver_has_of_nccl_goes_to_every_node():
    own = {"NCCL_NVLS_ENABLE": "1", "NCCL_IB_HCA": "mlx5_0", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_VERSION": "2.28", "HOME": "/root"}
    shared = shared_variables(own, device_kind="cuda", interface="ib0")
    assert shared == {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "1",
        "NCCL_IB_HCA": "mlx5_0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
    }
    assert shared_variables({}, device_kind="cpu", interface="eth0") == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}


def test_ray_shows_a_rank_its_own_gpu_against_other_variables(monkeypatch):
    """Ranks that see all GPUs of their node would all take the first."""
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in shared_variables(os.environ, device_kind="cuda").items():
        monkeypatch.setenv(name, value)
    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_nccl_is_set_up_as_the_installed_sglang_does_it():
    from importlib.metadata import distribution

    source = Path(str(distribution("sglang").locate_file("sglang/srt/entrypoints/engine.py"))).read_text()
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        assert f'"{name}" not in os.environ' in source, f"SGLang sets {name} in another way: are ranks and engines still set up alike?"
    for name in ("enable_nccl_nvls", "enable_symm_mem"):
        assert f".{name}" in source, f"SGLang's {name} has another effect: may it be set beside ranks again?"


def test_a_rank_that_somebody_else_started_gets_them_too(monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device.prepare_megatron(device.Device("cuda", torch.device("cuda", 3), "nccl"))
    # NCCL would join with GPU 0.
    assert chosen == [torch.device("cuda", 3)]
    assert {name: os.environ[name] for name in RANK_VARIABLES} == RANK_VARIABLES | {"NCCL_NVLS_ENABLE": "1"}


def test_a_rank_on_the_cpu_is_left_as_it_is(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    device.prepare_megatron(device.local_device())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


def test_options_of_the_allocator_reach_ranks_on_gpus():
    own = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PATH": "/bin"}
    shared = shared_variables(own, device_kind="cuda")
    assert shared["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True" and "PATH" not in shared
    assert shared_variables(own, device_kind="cpu") == {}


def test_every_machine_has_its_loopback_interface():
    assert "lo" in interface_names()


def test_a_run_hands_variables_to_its_processes_and_says_so(monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    monkeypatch.setattr(start, "cluster_device_kind", lambda: "cuda")
    monkeypatch.setattr(start, "ray_cluster", lambda **_unused: contextlib.nullcontext(Future()))
    monkeypatch.setattr(start, "reserve", lambda _needs, **named: named["variables"])
    report, notes = unittest.mock.MagicMock(), []
    report.note = notes.append
    settings = load_settings(None, ["run.directory=run", "model.path=model", "data.train=train.jsonl"])
    with contextlib.ExitStack() as stack:
        variables = start.RunStart(settings, stack, report).reserve()
    assert variables["NCCL_IB_HCA"] == "mlx5_0" and variables["NCCL_NVLS_ENABLE"] == "0"
    assert "NCCL_CUMEM_ENABLE=0" in notes[0] and "CUDA_DEVICE_MAX_CONNECTIONS=1" in notes[0]


def test_a_missing_image_library_is_no_concern_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's warning was the first line of nearly every command, and came again from every process that it started."""
    monkeypatch.setenv("PYTHONWARNINGS", "error::DeprecationWarning")
    warn = "import warnings; warnings.warn('Failed to load image Python extension: libjpeg.so.8, without which, ...')"
    other = "warnings.warn('another')"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        settle_output()
        exec(f"{warn}; {other}")
    done = subprocess.run([sys.executable, "-c", f"{warn}; {other}"], capture_output=True, text=True, check=True, timeout=60)
    assert [str(warning.message) for warning in told] == ["another"]
    assert "another" in done.stderr and "image" not in done.stderr
    assert os.environ["PYTHONWARNINGS"].startswith("error::DeprecationWarning,")


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(UserError, match=r"HOME is not set .* set HOME to a directory that can be written"):
        check_home()


def test_a_working_directory_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UserError, match="the working directory does not exist any more; change into one that does"):
        check_directory()


@pytest.mark.parametrize("home", ["/dev/null/home", "/proc/home"])
def test_a_home_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    with pytest.raises(UserError, match=rf"HOME is {home}.* set HOME to a directory that can be written"):
        check_home()
