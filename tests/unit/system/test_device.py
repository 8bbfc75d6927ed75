"""The device layer: what is chosen, and how megatron-core is imported."""

import importlib.metadata
import logging
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch

from megatron_rl.errors import UserError
from megatron_rl.system import device


@pytest.fixture
def prepared():
    device.prepare_megatron(device.local_device())


def test_device_follows_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = device.local_device(3)
    assert (chosen.kind, chosen.backend, str(chosen.torch_device)) == ("cpu", "gloo", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = device.local_device(3)
    assert (chosen.kind, chosen.backend, str(chosen.torch_device)) == ("cuda", "nccl", "cuda:3")


def test_megatron_imports_beside_a_package_without_driver(tmp_path):
    (tmp_path / "flash_mla.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    # As a rank enters: without FlashMLA, the compiler and warnings of absent packages.
    code = (
        "import megatron_rl.checkpoints.training_state, megatron.core.transformer.attention as used, sys; "
        "print(used.HAVE_FMLA, 'flash_mla' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120)
    # Packages of the GPU stack import the compiler by themselves.
    compiler = torch.version.cuda is not None
    assert (done.returncode, done.stdout, "not installed" in done.stderr) == (0, f"False False {compiler}\n", False), done.stderr


def test_a_side_stream_follows_earlier_work_and_is_the_thread_s(monkeypatch):
    events = []

    class Stream:
        def __init__(self, which):
            events.append(f"made on {which}")

        def wait_stream(self, other):
            events.append(f"waits for {other}")

    @contextmanager
    def entered(stream):
        events.append("in")
        yield
        events.append("out")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda which: f"that of {which}")
    monkeypatch.setattr(torch.cuda, "stream", entered)
    side = device.SideStream(torch.device("cuda", 1))
    assert events == ["made on cuda:1", "waits for that of cuda:1"]
    with side.entered():
        events.append("copy")
    assert events[2:] == ["in", "copy", "out"]
    with device.SideStream(torch.device("cpu")).entered():
        assert len(events) == 5


@pytest.mark.parametrize("version", ("0.15.3", "0.20.0", "1.0.0"))
def test_unverified_releases_are_refused(version, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(UserError, match=f"{version} is installed, needs 0.16 to 0.19"):
        device.megatron_version()


@pytest.mark.parametrize("version", ("0.16.1", "0.17.0", "0.19.2", "0.18.0rc1"))
def test_verified_releases_are_accepted(version, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert device.megatron_version() == (0, int(version.split(".")[1]))


def test_an_absent_megatron_is_refused(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    with pytest.raises(UserError, match="megatron-core is not installed, training needs it; install it with: pip install megatron-core"):
        device.megatron_version()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "amp_C" else object())
    chosen = device.chosen_backends()
    assert (chosen["transformer-engine"], chosen["apex"]) == ("installed from source", "not installed")


def test_backends_are_named():
    chosen = device.chosen_backends()
    assert chosen["torch"] == torch.__version__
    assert set(chosen) == {"torch", "megatron-core", "transformer-engine", "apex"}


def test_only_warnings_of_missing_packages_are_hidden():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with device.quiet_megatron_imports():
            warnings.warn("Apex is not installed. Falling back to Torch Norm", stacklevel=1)
            warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.", stacklevel=1)
            warnings.warn("MimoModelConfig is experimental and still under active development. The API may change", stacklevel=1)
            with pytest.raises(UserWarning, match="something else"):
                warnings.warn("something else", stacklevel=1)


def test_megatron_s_model_does_not_warn_at_every_build(prepared):
    def passes(message: str) -> bool:
        logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
        return bool(logger.filter(logger.makeRecord(logger.name, logging.WARNING, "", 0, message, (), None)))

    assert not passes("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
    assert passes("GPTModel has no such layer")
