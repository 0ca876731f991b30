"""What kernels move and multiply, counted in the interpreter; and that the meter counts right."""

from functools import partial

import pytest
import torch
import traffic as meter
from traffic import Measure, measure, traffic

from warpweave.kernels import norm
from warpweave.kernels.attention import function as attention
from warpweave.kernels.runtime.dispatch import tl, triton


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, TWICE: tl.constexpr, BLOCK: tl.constexpr):
    """y = x; TWICE reads x once for its maximum and once more for the copy."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    peak = tl.zeros((), tl.float32)
    if TWICE:
        peak = tl.max(tl.load(x_ptr + i, i < n, 0.0), 0)
    x = tl.load(x_ptr + i, i < n, 0.0)
    tl.store(y_ptr + i, x + 0 * peak, i < n)


@triton.jit
def _odd_kernel(x_ptr, y_ptr, count_ptr, N: tl.constexpr, DOT: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * 0 + i[None, :])  # one row, broadcast
    if DOT:
        x = tl.dot(x, x)
    tl.store(y_ptr + i, tl.sum(x, 0), i < 3)
    tl.atomic_add(count_ptr, 1.0)


def _copy(n: int, twice: bool, block: int = 64) -> meter.Traffic:
    x, y = torch.randn(n), torch.empty(n)
    with traffic() as t:
        _copy_kernel[(triton.cdiv(n, block),)](x, y, n, twice, block)
    torch.testing.assert_close(x, y)
    return t


@pytest.mark.parametrize("op", meter.measures(), ids=lambda op: op.name)
def test_an_op_moves_and_multiplies_no_more_than_it_may(op) -> None:
    found = measure(op)
    assert not found.failures()
    assert found.moved >= 0.99 * found.least  # else the bound counts what nobody moves
    if op.products:
        assert found.flops == found.products > 0


def test_masked_lanes_and_repeated_addresses_do_not_count() -> None:
    n = 100
    t = _copy(n, twice=False)
    flow = t.launches[0].flows
    assert (flow["x_ptr"].read, flow["y_ptr"].written) == (4 * n, 4 * n)
    assert flow["x_ptr"].written == flow["y_ptr"].read == 0
    assert t.moved() == t.once == 8 * n
    assert (t.launches[0].programs, t.launches[0].constants["BLOCK"]) == (2, 64)

    x, y, count = torch.randn(16), torch.empty(16), torch.zeros(1)
    with traffic() as t:
        _odd_kernel[(5,)](x, y, count, 16, True)
    flow = t.launches[0].flows
    assert (flow["x_ptr"].read, flow["x_ptr"].read_once) == (5 * 64, 64)
    assert (flow["y_ptr"].written, flow["y_ptr"].written_once) == (5 * 12, 12)
    assert flow["count_ptr"].atomic == 5 * 4
    assert count.item() == 5
    assert t.flops == 5 * 2 * 16**3
    assert t.moved() == 5 * (64 + 12 + 8)
    assert t.moved({"x_ptr": "tiny"}) == 64 + 5 * (12 + 8)
    with pytest.raises(ValueError, match=r"resident names \['w_ptr'\]"):
        t.moved({"w_ptr": "gone"})


def test_what_torch_moves_around_a_kernel_counts_and_views_do_not() -> None:
    x, w = torch.randn(8, 64), torch.randn(64)
    with traffic() as t:
        x2 = x.view(2, 4, 64)[:, 1:].reshape(-1, 64)[::2]
        norm.norm_fwd(x2, w, layer=False, impl="triton")
    assert [(op.name, op.moved) for op in t.operators] == [("clone", 2 * 6 * 64 * 4)]
    with traffic() as t:
        norm.norm_fwd(x[:, None, :].transpose(0, 1), w, layer=False, impl="triton")
    assert t.operators == []


def test_a_views_memory_is_found_and_shared_memory_is_one() -> None:
    qkv = torch.randn(1, 32, 3, 16)  # one tensor, as a fused projection gives it
    q, k, v = qkv.unbind(2)
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    with traffic() as t:
        attention.attention_fwd(q, k, v, impl="triton")
    (flow,) = (f for name, f in t.launches[0].flows.items() if "q_ptr" in name)
    assert flow.read == 3 * 32 * 16 * 4


def test_the_meter_leaves_the_interpreter_as_it_was() -> None:
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    before = [GridExecutor.__call__, *vars(InterpreterBuilder).values()]
    with pytest.raises(RuntimeError, match="inside"), traffic():
        raise RuntimeError("inside")
    assert [GridExecutor.__call__, *vars(InterpreterBuilder).values()] == before


# ---------------------------------------------------------------- planted faults


def test_a_second_read_is_found() -> None:
    n = 1000
    once = Measure("copy", lambda: None, lambda t: 8 * n)
    for twice in (False, True):
        found = once.least(t := _copy(n, twice))
        assert (t.moved() > once.limit * found) == twice
        assert t.once == 8 * n


def test_a_hidden_copy_is_found() -> None:
    op = next(op for op in meter.measures() if op.name == "rms_norm fwd")
    x, w = torch.randn(64, 2048).bfloat16().t(), torch.randn(64).bfloat16()
    call = partial(norm.norm_fwd, x, w, layer=False, impl="triton")
    hidden = Measure("strided", call, op.least, op.limit)
    (line,) = measure(hidden).failures()
    assert "strided moves" in line


def test_a_tile_that_nobody_sees_is_found() -> None:
    """Full attention under causal attention's bounds: too much is read and multiplied."""
    op = next(op for op in meter.measures() if op.name.startswith("attention fwd"))
    q, k = torch.randn(1, 256, 2, 64).bfloat16(), torch.randn(1, 256, 1, 64).bfloat16()
    wrong = Measure(
        "full",
        lambda: attention.attention_fwd(q, k, k, causal=False, impl="triton"),
        op.least,
        op.limit,
        products=op.products,
    )
    moves, multiplies = measure(wrong).failures()
    assert "full moves" in moves
    assert "full multiplies" in multiplies
