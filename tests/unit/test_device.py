"""The device layer: what is chosen, and that the CPU shims change megatron-core alone and are still needed."""

import inspect
import logging
import os
import subprocess
import sys
import types
import warnings
from contextlib import contextmanager

import pytest
import torch

from megatron_rl import device
from megatron_rl.errors import UserError

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shims are applied on machines without a GPU only")


@pytest.fixture
def prepared():
    device.prepare_megatron(device.local_device())


def make_caller(name: str, source: str) -> types.FunctionType:
    """A function that belongs to a module of this name."""
    namespace = {"__name__": name}
    exec(source, namespace)
    return namespace["call"]


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
    code = "import megatron_rl.models, megatron.core.transformer.attention as used, sys; print(used.HAVE_FMLA, 'flash_mla' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr


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


@needs_cpu
def test_preparing_twice_changes_nothing(prepared):
    before = (torch.Tensor.type, torch.Tensor.cuda, sys.modules["megatron.core.parallel_state"].torch)
    device.prepare_megatron(device.local_device())
    assert before == (torch.Tensor.type, torch.Tensor.cuda, sys.modules["megatron.core.parallel_state"].torch)


@needs_cpu
def test_cuda_calls_of_megatron_land_on_the_cpu(prepared):
    stand_in = sys.modules["megatron.core.tensor_parallel.layers"].torch
    assert stand_in is not torch
    assert stand_in.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"
    assert stand_in.empty(2, device=stand_in.cuda.current_device()).device.type == "cpu"
    assert stand_in.zeros(2, device="meta").device.type == "meta"
    assert stand_in.Tensor is torch.Tensor
    with stand_in.cuda.stream(stand_in.cuda.Stream()):
        stand_in.cuda.current_stream().wait_stream(stand_in.cuda.Stream())
    stand_in.cuda.synchronize()


@needs_cpu
def test_everybody_else_sees_torch_as_it_is(prepared):
    assert sys.modules["torch"].zeros.__module__ != device.__name__
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64


@needs_cpu
def test_tensor_methods_answer_megatron_as_on_a_gpu(prepared):
    tensor = torch.zeros(1)
    type_of = "def call(tensor): return tensor.type()"
    assert make_caller("megatron.core.optimizer.optimizer", type_of)(tensor) == "torch.cuda.FloatTensor"
    assert make_caller("megatron.core.optimizer.optimizer", type_of)(tensor.bfloat16()) == "torch.cuda.BFloat16Tensor"
    assert make_caller("user.code", type_of)(tensor) == "torch.FloatTensor"
    assert make_caller("megatron.core.models", "def call(tensor): return tensor.cuda()")(tensor) is tensor


@needs_cpu
def test_the_rng_tracker_forks_and_restores_the_cpu_generator(prepared):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tracker.add("model-parallel-rng", 7)
    with tracker.fork():
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(inside, expected)


@needs_cpu
def test_no_helper_of_megatron_is_compiled(prepared):
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.moe.router import TopKRouter

    for function in (fused_bias_swiglu.swiglu, TopKRouter._apply_expert_bias):
        assert "_torchdynamo_orig_callable" not in vars(function)


@needs_cpu
def test_a_module_imported_compiled_is_prepared_by_the_next_call(prepared, monkeypatch):
    def written(x):
        return x

    def compiled(x):
        raise AssertionError("compiled")

    compiled._torchdynamo_orig_callable = written
    late = types.ModuleType("megatron.core.imported_by_others")
    late.Router = type("Router", (), {"__module__": late.__name__, "route": compiled})
    late.helper = compiled
    monkeypatch.setitem(sys.modules, late.__name__, late)
    device.prepare_megatron(device.local_device())
    assert late.helper is written and late.Router.route is written


@needs_cpu
def test_token_counts_of_experts_are_numbers(prepared):
    from megatron.core.transformer.moe import token_dispatcher

    counts = torch.tensor([3, 0, 2])
    assert list(token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True, record_stream=False)) == [3, 0, 2]
    assert token_dispatcher.maybe_move_tensor_to_cpu(counts) is counts
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


# Where the behaviour that a shim works around is written. A failure says that upstream changed: the shim may be removed.
STILL_NEEDED = {
    "torch stand-in": ("megatron.core.optimizer.clip_grads", "device='cuda'"),
    "rng state": ("megatron.core.tensor_parallel.random", "def _set_cuda_rng_state"),
    "tensor type names": ("megatron.core.optimizer.optimizer", "'torch.cuda.FloatTensor'"),
    "tensor.cuda": ("megatron.core.models.common.language_module.language_module", "weight.data.cuda()"),
    "compiled helpers": ("megatron.core.jit", "jit_fuser = torch.compile"),
    "latent attention": ("megatron.core.transformer.multi_latent_attention", "isinstance(self.linear_proj, TELinear)"),
    "expert splits": ("megatron.core.transformer.moe.moe_utils", "if torch.is_tensor(tensor) and tensor.is_cuda:"),
    "uneven collectives": ("megatron.core.tensor_parallel.mappings", "torch.split(output, output_split_sizes"),
    "moe names": ("megatron.core.transformer.moe.moe_utils", "te_general_gemm"),
}


@pytest.mark.parametrize("shim", device.CPU_SHIMS, ids=lambda shim: shim.name)
def test_upstream_still_needs_the_shim(shim, prepared):
    module, text = STILL_NEEDED[shim.name]
    assert text in inspect.getsource(sys.modules[module]), f"{module} changed: see whether the shim {shim.name!r} can go"
    assert len(shim.behaviour) > 20
