"""The Triton kernels compile for the GPUs they are meant for, without one; tests/dist/test_head_kernels.py computes with them."""

from pathlib import Path

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.algorithms.head_statistics import add_product
from megatron_rl.models import head_kernels
from megatron_rl.models.language_model_head import row_maths
from megatron_rl.system.device import chosen_row_maths

PARTIALS = ("logits", "row_stride", "targets", "out", "columns", "start", "inverse_temperature")
GRADIENT = ("logits", "row_stride", "targets", "numbers", "columns", "width", "start", "inverse_temperature")
TYPES = {"targets": "*i64", "out": "*fp32", "numbers": "*fp32", "inverse_temperature": "fp32"}


def compiled(kernel: triton.JITFunction, names: tuple[str, ...], dtype: str, constants: dict[str, int | bool]) -> str:
    """PTX for an H100, with pointers and sizes as aligned as real ones."""
    signature = {name: TYPES.get(name, f"*{dtype}" if name == "logits" else "i32") for name in names} | dict.fromkeys(
        constants, "constexpr"
    )
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name not in ("start", "inverse_temperature")}
    source = ASTSource(kernel, signature, {**constants, "TILE": head_kernels._TILE}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=head_kernels._OPTIONS).asm["ptx"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_an_h100(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for with_entropy in (False, True):
        ptx = compiled(head_kernels._partials_kernel, PARTIALS, dtype, {"WITH_ENTROPY": with_entropy, "TILE": 0})
        # 16 bytes a load: what a thread reads one by one takes several times as long.
        assert "ld.global.v4" in ptx
    for degree in range(3):
        ptx = compiled(head_kernels._gradient_kernel, GRADIENT, dtype, {"DEGREE": degree, "TILE": 0})
        assert "ld.global.v4" in ptx and "st.global.v4" in ptx
        # The interpreter cuts off where a GPU must round to nearest.
        assert dtype == "fp32" or "cvt.rn.bf16" in ptx


@pytest.mark.parametrize(
    ("kind", "dtype", "name"),
    [
        ("cuda", torch.bfloat16, "triton"),
        ("cuda", torch.float32, "triton"),
        ("cuda", torch.float64, "torch"),
        ("cpu", torch.bfloat16, "torch"),
        ("meta", torch.bfloat16, "torch"),
    ],
)
def test_the_rule_names_what_runs(kind: str, dtype: torch.dtype, name: str) -> None:
    with FakeTensorMode():
        assert row_maths(torch.empty(2, 3, dtype=dtype, device=kind)).name == name
    assert chosen_row_maths(kind, str(dtype).removeprefix("torch.")) == name


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
def test_products_are_added_in_the_dtype_of_the_sum(dtype: torch.dtype, wide: torch.dtype) -> None:
    left, right = torch.randn(5, 3).to(dtype), torch.randn(3, 4).to(dtype)
    total = torch.full((5, 4), 7.0, dtype=wide)
    add_product(total, left, right)
    torch.testing.assert_close(total.double(), 7.0 + left.double() @ right.double(), rtol=2**-7, atol=2**-6)


def test_a_gpu_adds_narrow_products_to_a_wide_sum_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call exists on GPUs only; torch's own rule for shapes and dtypes takes it, and nothing between is made."""
    total = torch.empty(5, 4, device="meta")
    left, right = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((5, 3), (3, 4)))
    calls = []

    def addmm(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append((tensors, options))
        return torch.ops.aten.addmm.dtype_out(*tensors, options["out_dtype"], out=options["out"])

    monkeypatch.setattr(torch, "addmm", addmm)
    add_product(total, left, right)
    ((tensors, options),) = calls
    assert tensors[0] is options["out"] is total and options["out_dtype"] == torch.float32
