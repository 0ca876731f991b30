"""Counts of what kernels move and multiply in the interpreter, and tests of the meter itself."""

from functools import partial

import pytest
import torch
import traffic as meter
from traffic import Measure, measure, traffic

from warpweave.kernels import norm, reference
from warpweave.kernels.attention import function as attention
from warpweave.kernels.gemm.epilogue import Epilogue
from warpweave.kernels.overlap import function
from warpweave.kernels.overlap.symmetric import local_memory
from warpweave.kernels.runtime.dispatch import tl, triton


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, TWICE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy y = x; TWICE reads x once for its maximum and once more for the copy."""
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


@triton.jit
def _peer_kernel(addresses_ptr, data, rank, TIMES: tl.constexpr):
    """Copy 16 floats of the other of two ranks, and set a flag of each."""
    i = tl.arange(0, 16)
    there = (tl.load(addresses_ptr + 1 - rank) + data).to(tl.pointer_type(tl.float32)) + i
    own = (tl.load(addresses_ptr + rank) + data).to(tl.pointer_type(tl.float32)) + i
    x = tl.zeros((16,), tl.float32)
    for _ in range(TIMES):
        x += tl.load(there)
    tl.store(own, x)
    flags = tl.load(addresses_ptr + tl.arange(0, 2)).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(flags, tl.full((2,), 1, tl.int64))


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
    # otherwise the bound counts bytes that no kernel moves
    assert found.moved >= 0.99 * found.least
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
    qkv = torch.randn(1, 32, 3, 16)  # one tensor, as a fused projection returns it
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
    call = partial(attention.attention_fwd, q, k, k, causal=False, impl="triton")
    wrong = Measure("full", call, op.least, op.limit, products=op.products)
    moves, multiplies = measure(wrong).failures()
    assert "full moves" in moves
    assert "full multiplies" in multiplies


# ---------------------------------------------------------------- between ranks


def _remote(symmetric, steps) -> list[meter.Flow]:
    """Return each virtual rank's traffic with its peers' data."""
    with traffic(symmetric) as t:
        function.run_local(steps)
    flows = [meter.Flow() for _ in symmetric]
    for launch in t.launches:
        words = 2 + (symmetric[0].polls > 0)  # read and written, and signed if waits are bounded
        assert launch.flows["peer flags"].moved == words * launch.flows["peer flags"].atomic
        flow, found = launch.flows["peer data"], flows[launch.constants["rank"]]
        assert flow.moved == flow.once  # nothing twice
        found.read, found.written = found.read + flow.read, found.written + flow.written
        found.atomic += flow.atomic
    return flows


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("S", "N", "K"), [(1, 1, 1), (17, 33, 5), (5, 40, 19)])
def test_between_ranks_moves_what_the_algorithm_says_and_nothing_more(world, S, N, K):
    dtype = torch.float16
    symmetric = local_memory(world, slots=32, capacity=1 << 17, polls=3 * (N % 2))
    x, a = torch.randn(S, K).to(dtype), torch.randn(world * S, K).to(dtype)
    b = torch.randn(K, N).to(dtype)
    wire = torch.finfo(reference.compute_dtype(a)).bits // 8
    others = world - 1
    gathered, output = world * S * K * dtype.itemsize, world * S * N * wire
    for make, left, flow in (
        (function.all_gather_gemm_steps, x, meter.Flow(read=gathered * others // world)),
        (function.gemm_reduce_scatter_steps, a, meter.Flow(written=output * others // world)),
        (function.gemm_all_reduce_steps, a, meter.Flow(read=output * others)),
    ):
        assert (
            _remote(symmetric, [make(left, b, m, Epilogue()) for m in symmetric]) == [flow] * world
        )


def test_a_peer_that_is_read_twice_is_found() -> None:
    """Own and peers' segments are counted separately, and so are flags and data."""
    symmetric = local_memory(2, slots=4, capacity=256)
    with traffic(symmetric) as t:
        for rank, memory in enumerate(symmetric):
            _peer_kernel[(1,)](memory.addresses, memory.data_offset, rank, 1 + rank)
    assert symmetric[0].segments[0].any()
    flows = [launch.flows for launch in t.launches]
    for flow, times in zip(flows, (1, 2)):
        assert flow["peer data"].read == times * 4 * 16
        assert flow["peer data"].read_once == 4 * 16
        assert flow["own data"].written == 4 * 16
        assert flow["peer flags"].atomic == flow["own flags"].atomic == 8
        assert flow["own data"].read == flow["peer flags"].read == flow["peer data"].written == 0
