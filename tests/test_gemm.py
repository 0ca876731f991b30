"""The matrix product: both CPU libraries and the Triton kernel against float64, in every layout of
the operands; the kernel's epilogues against the reference."""

import math
import random
from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
from close import assert_close_f64, assert_error_budget, assert_same_bits, relative_error
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import interpreter_builder
from well_formed import well_formed

from warpweave.kernels import reference
from warpweave.kernels.activation import activation_fwd
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import cpu as module
from warpweave.kernels.gemm import fused, fused_gemm, gemm, gemm_into, mainloop
from warpweave.kernels.gemm import fused as kernel
from warpweave.kernels.gemm.epilogue import Epilogue, find_precision
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.tile_table import GemmTile
from warpweave.kernels.runtime.tiles import pinned

LAYOUTS = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "part of wider rows": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
}
# The last three products are large enough for oneDNN; one is wider, one taller than the other.
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
    for of_a, of_b in product(LAYOUTS.values(), repeat=2):
        a, b = of_a(torch.randn(m, k)), of_b(torch.randn(k, n))
        y = gemm(a, b, bias)
        truth = a.double() @ b.double() + (0 if bias is None else bias.double())
        assert (y.shape, y.dtype) == ((m, n), torch.float32)
        assert y.is_contiguous()
        assert_close_f64(y, truth, 1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_it_writes_or_adds_into_a_buffer_at_every_layout(library, sizes, add):
    m, k, n = sizes
    for of_a, of_b in product(LAYOUTS.values(), repeat=2):
        a, b = of_a(torch.randn(m, k)), of_b(torch.randn(k, n))
        out = torch.randn(m, n) if add else torch.full((m, n), math.nan)  # must not be read
        truth = a.double() @ b.double() + (out.double() if add else 0)
        gemm_into(a, b, out, add)
        assert_close_f64(out, truth, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("add", [False, True])
def test_it_adds_to_a_wider_buffer_without_rounding(library, dtype, add):
    a, b = torch.randn(128, 120).to(dtype), torch.randn(120, 130).to(dtype)
    out = torch.ones(128, 130, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    gemm_into(a, b, out, add)
    assert_close_f64(out, a.double() @ b.double() + int(add), 1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_onednn_never_gets_columns_out_of_wider_rows(monkeypatch):
    """It multiplies them in a reference loop, a thousand times slower."""
    monkeypatch.setattr(module, "_has_onednn", lambda: True)
    right, seen = torch.ops.mkldnn._linear_pointwise, []

    def spy(a, bt, *rest):
        seen.extend([a, bt])
        return right(a, bt, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
    for of_a, of_b in product(LAYOUTS.values(), repeat=2):
        a, b = of_a(torch.ones(130, 120)), of_b(torch.ones(120, 140))
        gemm(a, b)
        gemm_into(a, b, torch.ones(130, 140), True)
    assert len(seen) == 2 * 2 * len(LAYOUTS) ** 2
    assert all(x.is_contiguous() or x.t().is_contiguous() for x in seen)


def test_onednn_is_for_cpus_with_avx512_that_are_not_intels(monkeypatch):
    told = {"cpu_name": "AMD EPYC", "capability": "AVX512", "available": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: told["available"])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: told["capability"])

    def taken(**other) -> bool:
        with mock.patch.dict(told, other):
            return module._has_onednn.__wrapped__()

    assert taken() == hasattr(torch.ops.mkldnn, "_linear_pointwise")
    assert taken(capability="AVX512_VNNI") == taken(cpu_name="") == taken()
    assert not taken(cpu_name="Intel(R) Xeon(R)")
    assert not taken(capability="AVX2")
    assert not taken(capability="DEFAULT")
    assert not taken(available=False)


def test_onednn_runs_float32_products_of_2_to_the_20_terms_with_sides_of_32(monkeypatch):
    seen = []

    def onednn(a, bt, bias):
        seen.append((*a.shape, len(bt)))
        return a @ bt.t()

    monkeypatch.setattr(module, "_onednn", onednn)

    def takes(m, k, n, **kind):
        seen.clear()
        gemm(torch.ones(m, k, **kind), torch.ones(k, n, **kind))
        return seen

    large = 128, 64, 128
    monkeypatch.setattr(module, "_has_onednn", lambda: True)
    for shape in (large, (32, 1024, 32)):
        assert takes(*shape) == [shape]
    for shape in ((127, 64, 128), (128, 63, 128), (128, 64, 127)):  # small
        assert not takes(*shape)
    for shape in ((31, 2048, 32), (2048, 31, 32), (32, 2048, 31)):  # thin
        assert not takes(*shape)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert not takes(*large, dtype=dtype)
    assert not takes(*large, device="meta")
    with pytest.raises(RuntimeError):
        gemm(torch.ones(128, 128), torch.ones(129, 128))
    monkeypatch.setattr(module, "_has_onednn", lambda: False)
    assert not takes(*large)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_results_of_narrow_operands_are_not_rounded(library, dtype):
    a, b = torch.randn(128, 120).to(dtype), torch.randn(120, 130).to(dtype)
    truth = a.double() @ b.double()
    wide = gemm(a, b, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_close_f64(wide, truth, 1e-5)
    with pytest.raises(AssertionError):
        assert_close_f64(wide.to(dtype), truth, 1e-5)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("of_bias", FLOATS, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["rounded", "wide"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bias_of_any_dtype_goes_into_a_result_of_any(dtype, wide, of_bias, impl):
    """Operands of two dtypes in one sum; in `fused_gemm` an added residual as well."""
    a, b = torch.randn(7, 20).to(dtype), torch.randn(20, 6).to(dtype)
    bias, residual = torch.randn(6).to(of_bias), torch.randn(7, 6).to(of_bias)
    out = reference.compute_dtype(a) if wide else dtype
    truth = a.double() @ b.double() + bias.double()
    fuse = partial(fused_gemm, a, b, bias, out_dtype=out, impl=impl)
    found = {
        "gemm": (gemm(a, b, bias, out_dtype=out, impl=impl), truth),
        "fused": (fuse()[0], truth),
        "residual": (fuse(residual=residual)[0], truth + residual.double()),
        "activation": (fuse(activation="relu2")[0], truth.relu().square()),
    }
    for name, (y, expected) in found.items():
        assert y.dtype == out
        # A few roundings to the result's dtype; an activation is rounded to the operands' dtype.
        assert_close_f64(y, expected, 8 * torch.finfo(dtype if name == "activation" else out).eps)


# ---------------------------------------------------------------- Triton


FEW_SIZES = [(1, 1, 1), (7, 13, 5), (70, 130, 67), (67, 64, 131), (0, 4, 3), (4, 3, 0), (5, 0, 6)]
ACTIVATIONS = ("gelu", "gelu_erf", "relu2", "swiglu", "geglu")


def _draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("sizes", FEW_SIZES, ids=str)
def test_the_kernel_is_the_product_at_every_layout(sizes):
    """Each layout is combined with itself and with the next."""
    (m, k, n), layouts = sizes, [*LAYOUTS.values()]
    for of_a, of_b in (*zip(layouts, layouts), *zip(layouts, layouts[1:] + layouts[:1])):
        a, b, bias = of_a(_draw(m, k)), of_b(_draw(k, n)), _draw(n)
        y = gemm(a, b, bias, impl="triton")
        assert y.shape == (m, n)
        assert y.is_contiguous()
        assert_close_f64(y, a @ b + bias, 1e-13)


@pytest.mark.parametrize("add", [False, True])
def test_the_kernel_writes_or_adds_into_any_buffer(add):
    a, b = _draw(70, 67), _draw(67, 50)
    for of_out in LAYOUTS.values():
        for k in (67, 0):
            out = of_out(_draw(70, 50) if add else torch.full((70, 50), math.nan).double())
            truth = a[:, :k] @ b[:k] + (out if add else 0)
            gemm_into(a[:, :k], b[:k], out, add, impl="triton")
            assert_close_f64(out, truth, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_keeps_the_error_budget_and_wide_results_are_not_rounded(dtype):
    a, b, bias = _draw(67, 130, dtype=dtype), _draw(130, 70, dtype=dtype), _draw(70, dtype=dtype)
    truth = a.double() @ b.double() + bias.double()
    y = gemm(a, b, bias, impl="triton")
    assert y.dtype == dtype
    assert_error_budget(y, a @ b + bias, truth)
    wide = gemm(a, b, bias, out_dtype=torch.float32, impl="triton")
    assert_close_f64(wide, truth, 2e-6)
    out = torch.ones(67, 70)
    gemm_into(a, b, out, True, impl="triton")
    assert_close_f64(out, truth - bias.double() + 1, 2e-6)
    for x in (wide, out) if dtype != torch.float32 else ():
        assert not torch.equal(x, x.to(dtype).float())


def test_what_the_kernel_adds_to_a_product_is_added_before_it_is_rounded():
    """257 + 1: bfloat16 has 258, but not 257, which it would round to 256."""
    a, b = torch.ones(3, 257, dtype=torch.bfloat16), torch.ones(257, 64, dtype=torch.bfloat16)
    one = torch.ones(3, 64, dtype=torch.bfloat16)
    assert (gemm(a, b, impl="triton") == 256).all()
    for out in (one.clone(), one.clone().t().contiguous().t(), one.float()):
        gemm_into(a, b, out, True, impl="triton")
        assert (out == 258).all()
    few = torch.arange(3)
    for options in (
        {"bias": one[0]},
        {"residual": one},
        {"bias": 2 * one[0], "residual": -one},
        {"residual": one, "drop": Drop(2**-32, 1, 2, few)},  # drops none of these
    ):
        assert (fused_gemm(a, b, **options, impl="triton")[0] == 258).all(), options
    short, options = a[:, :129] / 8, {"activation": "relu2", "save_z": True, "impl": "triton"}
    y, z = fused_gemm(short, b[:129], residual=one, **options)
    assert (z == 16.125).all()
    assert (y == 262).all()  # 16.125 ** 2 is slightly more than 260


def test_cublas_writes_a_first_16_bit_product_into_its_fp32_buffer():
    """A second matrix and a copy would cost as much memory traffic as the product itself."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):
            called.append(str(call))
            return call(*args, **kwargs or {})

    called: list[str] = []
    with FakeTensorMode():
        sizes = {"dtype": torch.bfloat16, "device": "cuda"}
        a, b = torch.empty(8, 4, **sizes), torch.empty(4, 6, **sizes)
        out = torch.empty(8, 6, device="cuda")
        with Seen():
            module.product_into(a, b, out, False)
    sums = [name for name in called if "aten.m" in name or "aten.add" in name]
    assert sums == ["aten.mm.dtype_out"]
    assert "aten.copy_.default" not in called


def test_on_cuda_the_kernel_adds_16_bit_products_to_fp32_and_torch_the_rest(monkeypatch):
    """The test checks which one is called, with fake tensors on a GPU."""
    seen = []
    monkeypatch.setattr(kernel, "choose", lambda impl, *tensors: impl or "triton")
    monkeypatch.setattr(kernel, "launch_gemm", lambda *a, **k: seen.append("kernel"))
    monkeypatch.setattr(module, "product_into", lambda *a: seen.append("torch"))
    tile = mainloop.find_tile(*2 * (torch.empty(2, 2, dtype=torch.bfloat16),), "heavy")
    monkeypatch.setattr(mainloop, "processors", lambda device: 4)
    with FakeTensorMode():
        K, sizes = 64, {"dtype": torch.bfloat16, "device": "cuda"}
        a, b = torch.empty(2 * tile.m, K, **sizes), torch.empty(K, 2 * tile.n, **sizes)
        out, few = torch.empty(2 * tile.m, 2 * tile.n, **sizes), torch.empty(K, tile.n, **sizes)
        gemm_into(a, b, out.float(), True)
        gemm_into(a, b, out, True)
        gemm_into(a.cpu(), b.cpu(), out.cpu().float(), True)
        gemm_into(a, b, out.float(), True, impl="torch")
        wide = torch.empty(2 * tile.m, tile.n, device="cuda")  # two tiles, for four multiprocessors
        gemm_into(a, few, wide, True)
        gemm_into(a, few, wide, True, impl="triton")
    assert seen == ["kernel", "torch", "torch", "torch", "torch", "kernel"]


def _epilogue(activation, M=70, N=66, dtype=torch.float64):
    n = N // 2 if activation in ("swiglu", "geglu") else N
    drop = Drop(0.3, 2**40 + 5, 3, torch.arange(M) * 7919 * 2**28)
    residual = _draw(M, 2 * n, dtype=dtype)[:, ::2]
    return {"activation": activation, "drop": drop, "residual": residual}


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_every_epilogue_is_the_reference(activation, impl):
    a, b, bias = _draw(70, 20), _draw(66, 20).t(), _draw(66)
    whole = _epilogue(activation)
    for left_out in ((), ("drop",), ("residual",), ("drop", "residual")):
        options = {key: value for key, value in whole.items() if key not in left_out}
        save_z = activation is not None
        y, z = fused_gemm(a, b, bias, save_z=save_z, **options, impl=impl)
        assert_close_f64(y, reference.fused_gemm(a, b, bias, **options), 1e-13)
        if save_z:
            assert_close_f64(z, a @ b + bias, 1e-13)
        else:
            assert z is None
    y, z = fused_gemm(a[:0], b, None, activation=activation, impl=impl)
    assert z is None
    assert y.shape[0] == 0


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        *(("gelu", torch.float32), ("gelu", torch.bfloat16)),
        *(("swiglu", torch.float16), ("swiglu", torch.bfloat16)),
    ],
    ids=str,
)
def test_epilogues_keep_the_error_budget(activation, dtype):
    a, b, bias = _draw(70, 50, dtype=dtype), _draw(50, 66, dtype=dtype), _draw(66, dtype=dtype)
    options = _epilogue(activation, dtype=dtype)
    y, z = fused_gemm(a, b, bias, save_z=True, **options, impl="triton")
    same = reference.fused_gemm(a, b, bias, **options)
    wide = options | {"residual": options["residual"].double()}
    truth = reference.fused_gemm(a.double(), b.double(), bias.double(), **wide)
    assert y.dtype == z.dtype == dtype
    assert_error_budget(y, same, truth)
    h, z = fused_gemm(a, b, bias, activation=activation, save_z=True, impl="triton")
    assert torch.equal(h, activation_fwd(z, activation, impl="triton"))  # as backward does
    unkept, _ = fused_gemm(a, b, bias, **options, impl="triton")
    assert torch.equal(y, unkept)  # from the rounded z, kept or not
    wide_y, _ = fused_gemm(a, b, bias, **options, out_dtype=torch.float32, impl="triton")
    assert wide_y.dtype == torch.float32
    assert torch.equal(wide_y.to(dtype), y)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_wide_result_is_of_the_z_that_the_operands_dtype_holds(activation, dtype, impl):
    a, b, bias = _draw(20, 50, dtype=dtype), _draw(50, 66, dtype=dtype), _draw(66, dtype=dtype)
    options = {"activation": activation, "out_dtype": torch.float32, "impl": impl}
    y, z = fused_gemm(a, b, bias, save_z=True, **options)
    assert (y.dtype, z.dtype) == (torch.float32, dtype)
    assert_close_f64(z, a.double() @ b.double() + bias.double(), torch.finfo(dtype).eps)
    assert_close_f64(y, reference.activate(z.double(), activation), 1e-6)
    unkept, _ = fused_gemm(a, b, bias, **options)
    assert torch.equal(y, unkept)


def test_epilogue_dropout_equals_dropout_on_any_shard_of_the_tokens():
    a, b, tokens = _draw(40, 8), _draw(8, 130), torch.randperm(40) + 2**33
    y, _ = fused_gemm(a, b, drop=Drop(0.5, 1, 2, tokens), impl="triton")
    expected = reference.dropout(a @ b, 0.5, seed=1, site=2, tokens=tokens)
    assert torch.equal(y == 0, expected == 0)
    part, _ = fused_gemm(a[1::3], b, drop=Drop(0.5, 1, 2, tokens[1::3]), impl="triton")
    assert torch.equal(part, y[1::3])


def test_offsets_past_two_to_the_31_reach_their_elements():
    """Two rows lie 2^31 elements apart; the memory between them is never touched."""
    far = 2**31 + 64
    flats = (torch.empty(far + 64, dtype=torch.float16) for _ in range(3))
    a, r, out = (flat.as_strided((2, 8), (far, 1)) for flat in flats)
    for x in (a, r):
        x.copy_(_draw(2, 8, dtype=torch.float16))
    b = torch.eye(8, dtype=torch.float16)
    y, _ = fused_gemm(a, b, residual=r, impl="triton")
    assert torch.equal(y, (a.float() + r.float()).half())
    gemm_into(a, b, out, False, impl="triton")
    assert torch.equal(out, a)
    gemm_into(b, a.t(), out.t(), True, impl="triton")
    assert torch.equal(out, (2 * a.float()).half())


def test_rows_times_strides_past_two_to_the_31_do_not_wrap():
    """Many rows of a moderate stride: neither factor is large, but their product is."""
    rows, stride = 2**11 + 16, 2**20
    a = torch.empty(rows * stride, dtype=torch.float16).as_strided((rows, 2), (stride, 1))
    a.copy_(_draw(rows, 2, dtype=torch.float16))
    eye = torch.eye(2, dtype=torch.float16)
    assert torch.equal(gemm(a, eye, impl="triton"), a)


@contextmanager
def _in_any_order(programs: int, tiles: int, seed: int):
    """Return draws of tiles from a counter as if programs ran concurrently: each gets its first
    tile, an ascending share of the others, then one past the end."""
    rng, left = random.Random(seed), dict[int, list[int]]()
    take = interpreter_builder.create_atomic_rmw

    def begin(x, y, z):
        if x == 0:  # a launch
            shares = [rng.randrange(programs) for _ in range(programs, tiles)]
            for p in range(programs):
                left[p] = [t - programs for t, of in enumerate(shares, programs) if of == p]
        type(interpreter_builder).set_grid_idx(interpreter_builder, x, y, z)

    def taken(*args):
        found, (mine, *_) = take(*args), interpreter_builder.grid_idx
        found.data[...] = left[mine].pop(0) if left[mine] else tiles
        return found

    interpreter_builder.set_grid_idx, interpreter_builder.create_atomic_rmw = begin, taken
    try:
        yield
    finally:
        del interpreter_builder.set_grid_idx, interpreter_builder.create_atomic_rmw


@pytest.mark.parametrize("programs", [1, 7, 132])
def test_every_tile_is_summed_once_whichever_program_takes_it(monkeypatch, programs):
    """More and fewer tiles than programs, an incomplete group of rows, tiles of every residue."""
    a, b = _draw(16 * 7 + 3, 5), _draw(5, 16 * 4 + 9)
    before, tiles = _draw(115, 73), 8 * 3
    many = min(programs, tiles)

    def made():
        out = before.clone()
        with pinned({("gemm", 8, "small"): GemmTile(16, 32, 16, 3, 1, 4, 1)}):  # odd strides
            gemm_into(a, b, out, True, impl="triton")
        return out

    dealt = made()
    assert_close_f64(dealt, before + a @ b, 1e-13)
    monkeypatch.setattr(mainloop, "processors", lambda device: programs + 16)
    with mainloop.leaving(16):
        assert torch.equal(made(), dealt)
        assert torch.equal(made(), dealt)  # its counter restarts
        for seed in range(2):
            with _in_any_order(many, tiles, seed):
                assert torch.equal(made(), dealt)


def test_products_leave_room_where_it_is_asked_for(monkeypatch):
    tile, device = GemmTile(128, 256, 64, 8, 1, 8, 3), torch.device("cpu")
    monkeypatch.setattr(mainloop, "processors", lambda device: 132)
    assert mainloop.grid(tile, 8192, 4096, device) == (132,)
    assert mainloop.grid(tile, 100, 100, device) == (1,)
    assert mainloop.grid(tile, 2 * tile.m + 1, 2 * tile.n, device) == (6,)
    assert mainloop.tile_counter(device) is None
    with mainloop.leaving(8):
        assert mainloop.grid(tile, 8192, 4096, device) == (124,)
        assert mainloop.grid(tile._replace(residents=2), 8192, 4096, device) == (248,)
    with mainloop.leaving(200):
        assert mainloop.grid(tile, 8192, 4096, device) == (1,)
    assert mainloop.grid(tile, 8192, 4096, device) == (132,)


def test_tiles_are_found_by_device_dtype_and_size(monkeypatch):
    def tile(arch, dtype=torch.bfloat16, rows=8192, kind="large", cols=4096, step=1):
        monkeypatch.setattr(tiles, "capability", lambda device: arch)
        monkeypatch.setattr(mainloop, "processors", lambda device: 132)
        a, b = torch.empty(rows, 4096 * step, dtype=dtype), torch.empty(4096, cols, dtype=dtype)
        return mainloop.find_tile(a[:, ::step], b, kind)

    monkeypatch.setattr(tiles, "INTERPRET", False)
    shipped = {
        (arch, size, kind): row.tile
        for arch in (0, 80, 90, 100)
        for size in (2, 4, 8)
        for kind, row in tiles.shipped_rows("gemm", arch, size).items()
    }
    assert tile(90) == tile(89 + 10) == shipped[90, 2, "large"]
    assert tile(86) == shipped[80, 2, "large"]
    assert tile(90, kind="heavy") == shipped[90, 2, "heavy"]
    assert tile(80, kind="heavy") == shipped[80, 2, "large"]
    assert tile(90, rows=128) == shipped[90, 2, "small"]
    assert tile(90, cols=4099) == tile(90, step=2) == shipped[90, 2, "small"]
    assert tile(90, torch.float32) == shipped[80, 4, "large"]
    assert tile(90, torch.float64, rows=64) == shipped[80, 8, "large"]
    assert tile(75) == shipped[0, 2, "large"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", ["ab", "a", "b", ""], ids="contiguous rows: {!r}".format)
def test_descriptors_read_what_pointers_do(monkeypatch, dtype, rows):
    """Either operand has contiguous rows or columns, with sides that are no multiple of the tile.
    Elements beyond them are NaN and must not be read."""

    def draw(m, n, name):
        m, n = (m, n) if name in rows else (n, m)
        x = torch.full((m, n + 16 - n % 16), math.nan, dtype=dtype)[:, :n]
        x.copy_(_draw(m, n, dtype=dtype))
        return x if name in rows else x.t()

    a, b, bias = draw(131, 77, "a"), draw(77, 67, "b"), _draw(67)
    with pinned({("gemm", 2, "large"): GemmTile(128, 32, 32, 2, 1, 4, 1)}):
        by_pointers = fused_gemm(a, b, bias, activation="gelu", save_z=True, impl="triton")
        monkeypatch.setattr(mainloop, "capability", lambda device: 90)
        monkeypatch.delattr(mainloop, "mainloop")  # the one that uses pointers
        found = fused_gemm(a, b, bias, activation="gelu", save_z=True, impl="triton")
    assert_same_bits(found, by_pointers)
    assert_error_budget(found[1], a @ b + bias.to(dtype), a.double() @ b.double() + bias.double())


def test_descriptors_are_used_for_large_aligned_16_bit_products_from_sm_90(monkeypatch):
    def described(a, b, rows=128, arch=90):
        monkeypatch.setattr(mainloop, "capability", lambda device: arch)
        a, b, strides = mainloop.operands(a, b, GemmTile(rows, 64, 32, 8, 1, 8, 3))
        assert (strides.count(None) == 2) == (not isinstance(a, torch.Tensor))
        return None if isinstance(a, torch.Tensor) else (strides, a.block_shape, b.block_shape)

    a, b = torch.zeros(128, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
    assert described(a, b.t()) == ((None, 1, 1, None), [128, 32], [64, 32])
    assert described(a.t(), a, arch=100) == ((1, None, None, 1), [32, 128], [32, 64])
    for x in (a.float(), a[:, 1:], a[:, ::2], a[:, :0], a[:1].expand(128, -1), a[:, :250].clone()):
        assert described(x, b[:, : x.shape[1]].to(x.dtype).t()) is None
    assert described(a, b.t(), rows=64) is described(a, b.t(), arch=89) is None


def test_float32_is_multiplied_as_torch_is_set_to_or_as_asked():
    assert find_precision(None) == "ieee"
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert find_precision(None) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
    assert find_precision("tf32x3") == "tf32x3"
    a = torch.randn(4, 4)
    for impl in (None, "torch", "triton"):
        for multiply in (gemm, partial(gemm_into, out=a.new_empty(4, 4), add=False)):
            with pytest.raises(ValueError, match=r"precision must be None, .* got 'fp32'"):
                multiply(a, a, precision="fp32", impl=impl)


def test_launches_that_ptxas_would_spill_may_take_all_registers(monkeypatch):
    tile = tiles.shipped_table()[-1].tile
    assert "maxnreg" not in mainloop.gemm_options(tile, torch.empty(1, dtype=torch.float16))
    assert mainloop.gemm_options(tile, torch.empty(1))["maxnreg"] == 255
    monkeypatch.setattr(mainloop, "capability", lambda device: 100)
    found = mainloop.gemm_options(tile, torch.empty(1, dtype=torch.float16))
    assert found == {"num_warps": tile.warps, "maxnreg": 255, "num_stages": tile.stages}


@pytest.mark.parametrize("fault", ["bias of the next column", "gate and up swapped", "K cut short"])
def test_planted_faults_exceed_the_tolerance(fault):
    a, b, bias = _draw(70, 20), _draw(20, 66), _draw(66)
    truth, _ = fused_gemm(a, b, bias, activation="swiglu", impl="triton")
    if fault == "bias of the next column":
        bias = bias.roll(1)
    elif fault == "gate and up swapped":
        b, bias = (t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) for t in (b, bias))
    else:
        a, b = a[:, :-1], b[:-1]
    wrong, _ = fused_gemm(a, b, bias, activation="swiglu", impl="triton")
    assert relative_error(wrong, truth) > 1e-3


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_gemm_into_writes_nothing_but_out(impl):
    """torch resizes an `out` of another shape, overwriting the memory after it."""
    a, b, flat = torch.ones(5, 7), torch.ones(7, 6), torch.zeros(60)
    with pytest.raises(ValueError, match=r"out must be \[M, N\] .* got \[5, 5\]"):
        gemm_into(a, b, flat[:25].view(5, 5), False, impl=impl)
    assert not flat.any()
    with pytest.raises(ValueError, match="out is written to, so its elements must not"):
        gemm_into(a, b, torch.zeros(1, 6).expand(5, 6), True, impl=impl)


# ---------------------------------------------------------------- compilers


IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


def _compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@IMPLS
def test_operators_pass_opcheck(impl):
    ops, (a, b) = torch.ops.warpweave, (_draw(7, 5), _draw(6, 5).t())
    narrow, tokens = (a.half(), b.half()), torch.arange(7)
    if impl == "torch":
        torch.library.opcheck(ops.gemm.default, (a, b, None, torch.float64, None))
        torch.library.opcheck(ops.gemm.default, (*narrow, _draw(6), torch.float32, "ieee"))
        wanted = [x.clone().requires_grad_() for x in (a, b.t(), _draw(6))]
        torch.library.opcheck(ops.cpu_linear.default, wanted)
        torch.library.opcheck(ops.cpu_linear.default, (*wanted[:2], None))
        torch.autograd.gradcheck(ops.cpu_linear.default, wanted)
        torch.autograd.gradgradcheck(ops.cpu_linear.default, wanted)
    for add in (False, True):
        into = (*narrow, torch.zeros(7, 6), add, None, impl, False)
        torch.library.opcheck(ops.gemm_into.default, into)
    bare, more = (None, None, None), (_draw(6), _draw(7, 6), Drop(0.25, 2**40, 3, tokens))
    gated = (more[0], _draw(7, 3), more[2])
    for activation, save_z, (bias, residual, drop) in (
        *((None, False, bare), ("gelu", False, more)),
        *(("relu2", True, bare), ("swiglu", True, gated), (None, False, more)),
    ):
        after = Epilogue(bias, activation, save_z, None, residual, torch.float64)
        well_formed(fused._fused, a, b, after, drop, impl)


# The last is large enough for oneDNN.
@pytest.mark.parametrize(("impl", "size"), [("torch", 20), ("triton", 20), ("torch", 130)])
def test_products_compile_whole(impl, size):
    def run(a, b, bias, out, more):
        gemm_into(a, b, out, False, impl=impl)
        gemm_into(a, b, more[:, ::2], True, impl=impl)
        y = gemm(a, b, impl=impl)
        return y, gemm(a, b, bias, precision="ieee", impl=impl), gemm(a, b, impl=impl) * out

    shared = [_draw(size, 60, dtype=torch.float32), _draw(60, size + 9, dtype=torch.float32)]
    shared.append(_draw(size + 9, dtype=torch.float32))
    written = [torch.ones(size, size + 9), torch.ones(size, 2 * size + 18)]
    twin = [x.clone() for x in written]
    with torch.no_grad():
        expected, made = run(*shared, *written), _compiled(run)(*shared, *twin)
    assert_same_bits(written, twin)
    assert_same_bits(expected, made)
    truth = torch.ones(size, size + 9).double() + shared[0].double() @ shared[1].double()
    assert_close_f64(twin[1][:, ::2], truth, 1e-5)
    assert (twin[1][:, 1::2] == 1).all()


def test_compiled_products_choose_the_library_by_size_at_run_time(monkeypatch):
    """In forward and backward. One trace serves all sizes: a dim is not a constant of it."""
    monkeypatch.setattr(module, "_has_onednn", lambda: True)
    right, seen = module._onednn, []

    def onednn(a, bt, bias):
        seen.append((*a.shape, len(bt)))
        return right(a, bt, bias)

    monkeypatch.setattr(module, "_onednn", onednn)
    traces = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gemm, fullgraph=True, backend=traces)
    b = _draw(128, 96, dtype=torch.float32).requires_grad_()
    for m in (*range(40, 50), 300, *range(130, 140)):
        a = _draw(m, 128, dtype=torch.float32).requires_grad_()
        seen.clear()
        y = compiled(a, b)
        assert_close_f64(y, a.double() @ b.double(), 1e-5)
        y.sum().backward()
        assert seen == ([(m, 128, 96), (m, 96, 128), (96, m, 128)] if m > 100 else [])
    assert traces.frame_count <= 2
    with torch.no_grad():
        compiled(a.double(), b.double())
    assert len(seen) == 3  # none for float64


def test_a_compiled_product_has_forward_derivatives_and_those_of_torch_func():
    a, b, t = _draw(64, 128, dtype=torch.float32), _draw(128, 256, dtype=torch.float32), 0.5
    along = _draw(64, 128, dtype=torch.float32)

    def tangent(a):
        return torch.func.jvp(lambda a: gemm(a, b), (a,), (along,))[1]

    def gradient(a):
        return torch.func.grad(lambda a: (gemm(a, b) * t).sum())(a)

    assert_close_f64(_compiled(tangent)(a), along.double() @ b.double(), 1e-5)
    truth = (t * b.double().sum(1)).expand(64, 128)
    assert_close_f64(_compiled(gradient)(a), truth, 1e-5)


@pytest.mark.parametrize(("activation", "impl"), [(None, "torch"), ("swiglu", "triton")])
def test_fused_products_compile_whole(activation, impl):
    save_z = activation is not None

    def run(a, b, bias, residual, tokens, seed):
        drop = Drop(0.3, seed, 3, tokens)
        options = {"activation": activation, "impl": impl}
        everything = fused_gemm(a, b, bias, save_z=save_z, drop=drop, residual=residual, **options)
        return *everything, fused_gemm(a, b, drop=drop._replace(p=0.0), **options)[0]

    residual = _epilogue(activation)["residual"]
    tensors = _draw(70, 20), _draw(66, 20).t(), _draw(66), residual, torch.arange(70) * 7919
    compiled = _compiled(run)
    with torch.no_grad():
        for seed in (5, 2**40 + 5):  # the second is not a constant
            for x, y in zip(run(*tensors, seed), compiled(*tensors, seed), strict=True):
                assert (x is y is None) or torch.equal(x, y)


@IMPLS
def test_what_has_no_gradient_refuses_to_drop_one_compiled_or_not(impl):
    a, b, out = torch.randn(3, 4), torch.randn(4, 6, requires_grad=True), torch.zeros(3, 6)
    words = r"is not differentiable, but an argument of shape \[4, 6\]"
    calls = [
        (lambda b: fused_gemm(a, b, impl=impl)[0], f"fused_gemm {words}"),
        (lambda b: gemm_into(a, b, out, False, impl=impl), "is not differentiable"),
        (lambda b: gemm(a, b, impl="triton"), "the Triton kernel of gemm is not differentiable"),
    ]
    for call, said in calls if impl == "triton" else calls[:2]:
        with pytest.raises(ValueError, match=said):
            call(b)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="is not differentiable"):
            _compiled(call)(b)
        with torch.no_grad():
            _compiled(call)(b)
    with torch.no_grad():
        assert_close_f64(fused_gemm(a, b, impl=impl)[0].double(), (a @ b).double(), 1e-6)
    assert gemm(a, b, impl="torch").requires_grad  # torch's own


@pytest.mark.parametrize("size", [5, 130])
def test_torchs_products_are_differentiable_whichever_library_they_go_to(library, size):
    """oneDNN's product has no gradient and no tangent, so by itself it would give none."""

    def grads(product):
        given = [x.clone().requires_grad_() for x in tensors]
        return torch.autograd.grad(product(*given).square().sum(), given)

    tensors = [_draw(*s, dtype=torch.float32) for s in ((size, 100), (100, size), (size,))]
    truth = grads(lambda a, b, bias: a.double() @ b.double() + bias.double())
    for product_of in (gemm, _compiled(lambda a, b, bias: gemm(a, b, bias, impl="torch"))):
        for x, y in zip(grads(product_of), truth, strict=True):
            assert_close_f64(x, y, 1e-5)
    a, b, _ = tensors
    tangent = torch.func.jvp(lambda a: gemm(a, b), (a,), (torch.ones_like(a),))[1]
    assert_close_f64(tangent, torch.ones_like(a).double() @ b.double(), 1e-5)
    with forward_ad.dual_level():
        y = gemm(forward_ad.make_dual(a, torch.ones_like(a)), b)
        assert_close_f64(forward_ad.unpack_dual(y).tangent, tangent, 1e-6)
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):  # for the operator that compilers see
        given = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
        y = module._cpu_linear(given[0], given[1].t(), given[2]).square().sum()
        for i, found in zip(wanted, torch.autograd.grad(y, [given[i] for i in wanted])):
            assert_close_f64(found, truth[i], 1e-5)
    given = a.bfloat16().requires_grad_()
    gemm(given, b.bfloat16(), out_dtype=torch.float32).sum().backward()
    assert given.grad.any()


def test_on_cuda_a_wide_result_has_a_gradient(monkeypatch):
    """torch has no derivative for a product of 16-bit operands with float32 results."""

    class OnCuda(torch.Tensor):
        is_cuda = True

    def sums(a, b, *, out_dtype):
        seen.append(out_dtype)
        return a.to(out_dtype).detach() @ b.to(out_dtype).detach()

    seen = []
    monkeypatch.setattr(torch, "mm", sums)  # torch's own needs a GPU
    drawn = (_draw(*s, dtype=torch.bfloat16) for s in ((4, 5), (5, 6), (6,)))
    a, b, bias = (x.as_subclass(OnCuda) for x in drawn)
    truth = a.double() @ b.double() + bias.double()
    assert_close_f64(gemm(a, b, bias, out_dtype=torch.float32), truth, 1e-6)
    assert seen == [torch.float32]
    for x in (a, b, bias):
        x.requires_grad_()
        y = gemm(a, b, bias, out_dtype=torch.float32)
        assert_close_f64(y, truth, 1e-6)
        assert torch.autograd.grad(y.sum(), x)[0].any()
        x.requires_grad_(False)
    tangent = torch.func.jvp(lambda a: gemm(a, b, out_dtype=torch.float32), (a,), (a,))[1]
    assert_close_f64(tangent, truth - bias.double(), 1e-6)
    assert len(seen) == 1


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("activation", "impl"), [(None, "torch"), ("swiglu", "torch"), ("swiglu", "triton")]
)
def test_under_autocast_a_fused_product_keeps_the_dtype_of_its_operands(activation, impl):
    a, b, bias = (_draw(*s, dtype=torch.float32) for s in ((70, 50), (50, 66), (66,)))
    options = _epilogue(activation, dtype=torch.float32)
    save_z = activation is not None

    def run():
        return fused_gemm(a, b, bias, save_z=save_z, **options, impl=impl)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = [run(), _compiled(run)()]
    for x, y in ((x, y) for made in found for x, y in zip(made, expected, strict=True)):
        assert (x is y is None) or (x.dtype == torch.float32 and torch.equal(x, y))
