"""The shims change megatron-core alone and are still needed."""

import inspect
import sys
import types

import pytest
import torch

from megatron_rl.system import device, megatron_shims
from megatron_rl.system.megatron_shims import CPU_SHIMS, TE_ABSENCE_MENDED_IN, hide_absent_te

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shims are applied on machines without a GPU only")


@pytest.fixture
def prepared():
    device.prepare_megatron(device.local_device())


def make_caller(name: str, source: str) -> types.FunctionType:
    """A function that belongs to a module of this name."""
    namespace = {"__name__": name}
    exec(source, namespace)
    return namespace["call"]


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
    assert sys.modules["torch"].zeros.__module__ != megatron_shims.__name__
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
    "redirect_torch": ("megatron.core.optimizer.clip_grads", "device='cuda'"),
    "redirect_rng": ("megatron.core.tensor_parallel.random", "def _set_cuda_rng_state"),
    "answer_cuda_type_names": ("megatron.core.optimizer.optimizer", "'torch.cuda.FloatTensor'"),
    "keep_tensors_on_cpu": ("megatron.core.models.common.language_module.language_module", "weight.data.cuda()"),
    "run_uncompiled": ("megatron.core.jit", "jit_fuser = torch.compile"),
    "hide_absent_te": ("megatron.core.transformer.moe.moe_utils", "except ImportError:\n    HAVE_TE = False\n"),
    "hand_over_splits": ("megatron.core.transformer.moe.moe_utils", "if torch.is_tensor(tensor) and tensor.is_cuda:"),
    "pad_uneven_collectives": ("megatron.core.tensor_parallel.mappings", "torch.split(output, output_split_sizes"),
}


@pytest.mark.parametrize("shim", [*CPU_SHIMS, hide_absent_te], ids=lambda shim: shim.__name__)
def test_upstream_still_needs_the_shim(shim, prepared):
    module, text = STILL_NEEDED[shim.__name__]
    needed = shim is not hide_absent_te or device.megatron_version() < TE_ABSENCE_MENDED_IN
    assert (text in inspect.getsource(sys.modules[module])) == needed, f"{module} changed: see whether the shim {shim.__name__} can go"


def test_some_release_needs_each_shim():
    assert TE_ABSENCE_MENDED_IN > device.OLDEST_MEGATRON, "no release needs hide_absent_te any more"
