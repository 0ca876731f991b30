"""The matrix product: both CPU libraries against float64, at every layout of the operands."""

import math

import pytest
import torch
from close import assert_close_f64

from warpweave.kernels import gemm as module
from warpweave.kernels.gemm import gemm, gemm_into

LAYOUTS = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "part of wider rows": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
}
# The last three products are large enough for oneDNN; one is wider, one taller than the other side.
SIZES = [
    *((1, 1, 1), (7, 13, 5), (3, 1031, 5), (0, 4, 3), (4, 3, 0)),
    *((131, 97, 101), (67, 64, 509), (509, 64, 67)),
]


@pytest.fixture(params=["oneDNN", "MKL"])
def library(request, monkeypatch):
    if request.param == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(module, "_has_onednn", lambda: request.param == "oneDNN")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_the_product_at_every_layout(library, sizes, with_bias):
    m, k, n = sizes
    bias = torch.randn(n) if with_bias else None
    for of_a in LAYOUTS.values():
        for of_b in LAYOUTS.values():
            a, b = of_a(torch.randn(m, k)), of_b(torch.randn(k, n))
            y = gemm(a, b, bias)
            truth = a.double() @ b.double() + (0 if bias is None else bias.double())
            assert y.shape == (m, n)
            assert y.dtype == torch.float32
            assert y.is_contiguous()
            if y.numel():
                assert_close_f64(y, truth, 1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_it_writes_or_adds_into_a_buffer_at_every_layout(library, sizes, add):
    m, k, n = sizes
    for of_a in LAYOUTS.values():
        for of_b in LAYOUTS.values():
            a, b = of_a(torch.randn(m, k)), of_b(torch.randn(k, n))
            out = torch.randn(m, n) if add else torch.full((m, n), math.nan)  # not to be read
            truth = a.double() @ b.double() + (out.double() if add else 0)
            gemm_into(a, b, out, add)
            if out.numel():
                assert_close_f64(out, truth, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("add", [False, True])
def test_it_adds_to_a_wider_buffer_without_rounding(library, dtype, add):
    a, b = torch.randn(128, 120).to(dtype), torch.randn(120, 130).to(dtype)
    out = torch.ones(128, 130, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    gemm_into(a, b, out, add)
    assert_close_f64(out, a.double() @ b.double() + int(add), 1e-5)


def test_large_products_go_to_onednn_and_small_thin_or_wide_ones_do_not(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "_has_onednn", lambda: True)

    def onednn(a, bt, bias):
        seen.append((*a.shape, len(bt)))
        return a @ bt.t()

    monkeypatch.setattr(module, "_onednn", onednn)
    gemm(torch.ones(128, 128), torch.ones(128, 128))
    assert seen == [(128, 128, 128)]
    gemm(torch.ones(64, 64), torch.ones(64, 64))  # small
    gemm(torch.ones(1024, 4), torch.ones(4, 1024))  # thin
    gemm(torch.ones(128, 128).double(), torch.ones(128, 128).double())
    gemm(torch.ones(128, 128).bfloat16(), torch.ones(128, 128).bfloat16())
    assert len(seen) == 1
    with pytest.raises(RuntimeError):
        gemm(torch.ones(128, 128), torch.ones(129, 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_results_of_narrow_operands_are_not_rounded(library, dtype):
    a, b = torch.randn(128, 120).to(dtype), torch.randn(120, 130).to(dtype)
    truth = a.double() @ b.double()
    wide = gemm(a, b, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_close_f64(wide, truth, 1e-5)
    with pytest.raises(AssertionError):
        assert_close_f64(wide.to(dtype), truth, 1e-5)


def test_float64_stays_float64():
    a, b, bias = (torch.randn(*s, dtype=torch.float64) for s in ((140, 130), (130, 120), (120,)))
    y = gemm(a, b, bias)
    assert y.dtype == torch.float64
    assert_close_f64(y, a @ b + bias, 1e-14)
