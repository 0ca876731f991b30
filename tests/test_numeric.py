"""The device helpers, run in Triton's interpreter (their GPU side is checked by test_compiles)."""

import pytest
import torch
from close import assert_close_f64, relative_error

from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.dtypes import dot, to_dtype, upcast


@triton.jit
def _cast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, HELPER: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = to_dtype(x, y_ptr.dtype.element_ty) if HELPER else x
    tl.store(y_ptr + i, y, mask=i < n)


def _cast(x: torch.Tensor, dtype: torch.dtype, helper: bool = True) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    _cast_kernel[(1,)](x, y, x.numel(), triton.next_power_of_2(x.numel()), helper)
    return y


def test_bfloat16_cast_equals_torch_on_every_upper_half_and_at_ties() -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    x = (upper[:, None] | lower).flatten().view(torch.float32)
    x = x[~x.isnan()]
    assert torch.equal(_cast(x, torch.bfloat16).view(torch.int16), x.bfloat16().view(torch.int16))
    # the error that it repairs
    assert not torch.equal(_cast(x, torch.bfloat16, helper=False), x.bfloat16())


def test_bfloat16_cast_keeps_nan_and_infinity() -> None:
    nan = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32)
    assert _cast(nan.view(torch.float32), torch.bfloat16).isnan().all()
    inf = torch.tensor([float("inf"), -float("inf")])
    assert torch.equal(_cast(inf, torch.bfloat16), inf.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_casts_equal_torch(dtype: torch.dtype) -> None:
    x = torch.randn(1000) * 100
    assert torch.equal(_cast(x, dtype), x.to(dtype))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    acc = tl.zeros((N, N), c_ptr.dtype.element_ty)
    acc = dot(tl.load(a_ptr + i * N + j), tl.load(b_ptr + i * N + j), acc)
    tl.store(c_ptr + i * N + j, acc)


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.bfloat16, 1e-6), (torch.float16, 1e-6), (torch.float32, 1e-6), (torch.float64, 1e-14)],
)
def test_dot_multiplies_every_dtype_and_accumulates_in_full(
    dtype: torch.dtype, rtol: float
) -> None:
    a, b = torch.randn(2, 32, 32, dtype=torch.float64).to(dtype)
    c = torch.empty(32, 32, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    _dot_kernel[(1,)](a, b, c, 32)
    truth = a.double() @ b.double()
    assert_close_f64(c, truth, rtol)
    assert (
        relative_error(truth.half(), truth) > rtol
    )  # the tolerance would detect a float16 accumulator


@triton.jit
def _upcast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = upcast(tl.load(x_ptr + i, i < n))
    tl.store(y_ptr + i, x * x, i < n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_upcast_computes_in_float32_or_float64(dtype: torch.dtype) -> None:
    x = torch.randn(37, dtype=torch.float64).to(dtype)
    wide = x.double() if dtype == torch.float64 else x.float()
    y = torch.empty_like(wide)
    _upcast_kernel[(1,)](x, y, 37, 64)
    assert torch.equal(y, wide * wide)
