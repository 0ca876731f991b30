"""Ring attention: exact on every layout and mask, counted messages, and faults that must show.

Most tests run all ranks of a ring in this process (`run_in_process`). The same schedules then run
on gloo ranks, where messages are counted and both executors and both overlap modes must agree.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from close import assert_close_f64, relative_error
from plants import instead, planted
from ranks import NotedWork, run_ranks

from warpweave.kernels.attention import attention_delta
from warpweave.kernels.attention.options import AttentionOptions, Upstream
from warpweave.parallel import messages
from warpweave.parallel.buffers import Buffers
from warpweave.parallel.context import context_attention, ring
from warpweave.parallel.layout import SequenceLayout

NAMES = ("o", "lse", "dq", "dk", "dv")
Tensors = tuple[torch.Tensor, ...]


def whole_attention(q, k, v, causal: bool, window: int | None = None) -> Tensors:
    """Compute (o, lse) on one device, written out: no kernel, no layout, no merge."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
    s = s / math.sqrt(q.shape[3])
    back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    if causal:
        s = s.masked_fill(back < 0, -math.inf)
    if window is not None:
        s = s.masked_fill(back.abs() >= window, -math.inf)
    p = s.softmax(-1)
    v = v.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), s.logsumexp(-1)


@dataclass(frozen=True)
class Case:
    """An attention problem with its cotangents, equal on every rank that draws it."""

    layout: SequenceLayout
    causal: bool = True
    heads: int = 4
    kv_heads: int = 1
    batch: int = 2
    dim: int = 8
    dtype: torch.dtype = torch.float64
    window: int | None = None

    def draw(self) -> tuple[Tensors, Tensors]:
        """Draw (q, k, v) and (do, dlse) of the whole sequence."""
        generator = torch.Generator().manual_seed(self.layout.seq_len)
        lead = (self.batch, self.layout.seq_len)
        shapes = [(*lead, self.heads, self.dim)] + [(*lead, self.kv_heads, self.dim)] * 2
        shapes += [(*lead, self.heads, self.dim), (self.batch, self.heads, self.layout.seq_len)]
        how = {"generator": generator, "dtype": torch.float64}
        q, k, v, do, dlse = (torch.randn(shape, **how).to(self.dtype) for shape in shapes)
        dlse = dlse.to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        return (q, k, v), (do, dlse)

    def truth(self, do_mask: torch.Tensor | None = None) -> Tensors:
        """Return o, lse, dq, dk, dv in float64 from autograd on one device."""
        inputs, (do, dlse) = self.draw()
        inputs = [x.double().requires_grad_() for x in inputs]
        if do_mask is not None:
            do, dlse = do * do_mask[None, :, None, None], dlse * do_mask
        o, lse = whole_attention(*inputs, self.causal, self.window)
        grads = torch.autograd.grad((o, lse), inputs, (do.double(), dlse.double()))
        return o.detach(), lse.detach(), *grads

    def shard(self, rank: int) -> tuple[Tensors, Tensors]:
        inputs, (do, dlse) = self.draw()
        shard = self.layout.shard
        return tuple(shard(x, rank, 1) for x in inputs), (shard(do, rank, 1), shard(dlse, rank, 2))

    def unshard(self, results: list[Tensors]) -> Tensors:
        """Return the whole o, lse, dq, dk, dv from those of every rank."""
        dims = (1, 2, 1, 1, 1)
        return tuple(self.layout.unshard(parts, d) for parts, d in zip(zip(*results), dims))


def emulate(case: Case, *, overlap: bool = True, do_mask=None, impl: str | None = None) -> Tensors:
    """Return the whole o, lse, dq, dk, dv of a ring whose ranks all run in this process."""
    ranks = range(case.layout.parts)
    shards = [case.shard(rank) for rank in ranks]
    mask = AttentionOptions(case.causal, case.window, impl=impl)
    options = {"layout": case.layout, "options": mask}
    forward = messages.run_in_process(
        [ring.ring_forward(rank, *shards[rank][0], **options) for rank in ranks], overlap=overlap
    )
    backward = []
    for rank, (o, lse, kv) in enumerate(forward):
        (q, _, _), (do, dlse) = shards[rank]
        if do_mask is not None:
            mine = case.layout.shard(do_mask, rank, 0)
            do, dlse = do * mine[None, :, None, None], dlse * mine
        delta = attention_delta(o, do, dlse)
        backward.append(ring.ring_backward(rank, Upstream(do, lse, delta), q, kv, **options))
    grads = messages.run_in_process(backward, overlap=overlap)
    return case.unshard([(o, lse, *g) for (o, lse, _), g in zip(forward, grads)])


def assert_equal_to_whole(case: Case, got: Tensors, rtol: float = 1e-11) -> None:
    errors = {n: relative_error(a, b) for n, a, b in zip(NAMES, got, case.truth())}
    assert max(errors.values()) <= rtol, f"{case}: {errors}"


# ------------------------------------------------------------------ 1. exactness


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize(("causal", "kv_heads"), [(True, 4), (True, 1), (False, 1)])
@pytest.mark.parametrize(("parts", "chunk"), [(1, 3), (2, 5), (3, 3), (4, 2), (8, 1)])
def test_ring_equals_whole_attention(kind, causal, kv_heads, parts, chunk) -> None:
    layout = SequenceLayout(2 * parts * chunk, parts, kind)
    case = Case(layout, causal=causal, kv_heads=kv_heads)
    assert_equal_to_whole(case, emulate(case))


@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_ring_of_triton_kernels_equals_whole_attention(kind: str) -> None:
    case = Case(SequenceLayout(20, 2, kind), heads=2, batch=1, dim=16)
    assert_equal_to_whole(case, emulate(case, impl="triton"))


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_delivery_at_the_start_or_at_the_wait_gives_equal_bits(kind: str, parts: int) -> None:
    """So no buffer is read or written while a message uses it."""
    case = Case(SequenceLayout(6 * parts, parts, kind), dtype=torch.float32)
    assert all(map(torch.equal, emulate(case), emulate(case, overlap=False)))


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
def test_dk_and_dv_of_a_loss_on_one_rank_reach_every_rank(kind: str) -> None:
    """Only rank 3's outputs have a gradient, so every other dk and dv is a remote signal only."""
    layout = SequenceLayout(24, 4, kind)
    case = Case(layout)
    mask = torch.zeros(24, dtype=torch.float64)
    mask[layout.positions(3)] = 1
    got = emulate(case, do_mask=mask)
    for name, actual, expected in zip(NAMES, got, case.truth(mask)):
        for rank in range(4):
            mine = layout.shard(actual, rank, 2 if name == "lse" else 1)
            assert_close_f64(mine, layout.shard(expected, rank, 2 if name == "lse" else 1))
            if name in ("dk", "dv"):
                assert mine.abs().max() > 1e-3


# ------------------------------------------------------------------ 2. error against rank count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_does_not_grow_with_ranks(dtype: torch.dtype) -> None:
    """Up to 32 ranks, in norm, with bounds that do not depend on the kernel or machine.

    In 16 bits there are three roundings, of p, of ds and of the result, which add like independent
    numbers: sqrt(3) times the rounding of the truth itself. In float32, as lse always is, one
    rounding for each of the S keys.
    """

    def rms(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    def errors(parts: int) -> tuple[dict[str, float], dict[str, float]]:
        case = Case(SequenceLayout(S, parts), heads=2, kv_heads=1, batch=1, dim=16, dtype=dtype)
        truth = dict(zip(NAMES, case.truth()))
        limits = dict.fromkeys(NAMES, S * torch.finfo(torch.float32).eps / 2)
        for name in NAMES if dtype != torch.float32 else ():
            if name != "lse":
                limits[name] = math.sqrt(3) * rms(truth[name].to(dtype), truth[name])
        return {n: rms(x, truth[n]) for n, x in zip(NAMES, emulate(case))}, limits

    S = 256
    for parts in (1, 2, 4, 32):
        found, limits = errors(parts)
        assert all(found[n] <= limits[n] for n in NAMES), f"{parts} ranks: {found}, {limits}"
    for faults, wrong in (
        ({"block_fwd": _carried_in_bf16}, {"o"}),  # the error that the test must detect
        ({"block_bwd": _dq_in_bf16}, {"dq"}),
        ({"_Message": lambda q, s, _, of: _Message(q, s, torch.bfloat16, of)}, {"dk", "dv"}),
    ):
        with mock.patch.multiple(ring, **faults):
            found, limits = errors(16)
        assert wrong <= {n for n in NAMES if found[n] > limits[n]}, faults


def _carried_in_bf16(*args, **options) -> Tensors:
    o, lse = _fwd(*args, **options)
    return o.bfloat16().float(), lse


def _dq_in_bf16(*args, **options) -> Tensors:
    dq, dk, dv = _bwd(*args, **options)
    return dq.bfloat16().float(), dk, dv


_Message = ring._Message


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("window", [None, 5])
def test_no_result_is_in_the_memory_of_messages_that_the_next_call_takes(kind, window) -> None:
    def give_back(self: Buffers, *given: torch.Tensor) -> None:
        for buffer in given:
            buffer.view(torch.uint8).fill_(255)  # NaN

    case = Case(SequenceLayout(24, 4, kind), window=window)
    with planted(instead(Buffers, "give_back", give_back)):
        assert_equal_to_whole(case, emulate(case))


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_block_goes_as_far_as_some_query_sees_some_key_of_it(kind: str, causal: bool) -> None:
    """No unneeded step is made: masks are written out, for every window."""
    for parts, chunk in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (5, 1)):
        layout = SequenceLayout(2 * parts * chunk, parts, kind)
        for window in (None, *range(1, layout.seq_len + 2)):
            seen = _seen(layout, causal, window)
            assert ring.reaches(layout, causal, window) == tuple(max(ds) for ds in seen)
            needed = tuple(sorted(set().union(*seen)))
            assert ring.distances(layout, causal, window) == needed, (layout, window)


# ------------------------------------------------------------------ 3. planted faults


_bwd, _fwd, _Hop = ring.block_bwd, ring.block_fwd, ring.Hop


def _other_way(send: torch.Tensor, recv: torch.Tensor, dest: int, source: int) -> messages.Hop:
    return _Hop(send, recv, source, dest)


def _stale_kv(parts: int) -> Callable:
    """Return a `block_bwd` that uses each rank's K and V of its first hop in every hop."""
    first: dict[int, Tensors] = {}  # by the address of the rank's q

    def bwd(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *a, **options):
        k, v = first.setdefault(q.data_ptr(), (k.clone(), v.clone()))
        return _bwd(do, q, k, v, *a, **options)

    return bwd


def _last_gradient_stays(parts: int) -> type:
    """Return a route whose receivers never see the backward's last message."""
    sent = []

    class Route(ring._Route):
        def hop(self, send: torch.Tensor, recv: torch.Tensor, step: int) -> messages.Hop:
            sent.extend([0] * (step == -1))  # the ranks take their hops in turn
            kept = recv is not None and len(sent) > parts * (parts - 1)
            return super().hop(send, recv.clone() if kept else recv, step)

    return Route


def _local_positions(kernel: Callable) -> Callable:
    def local(x):
        whole = isinstance(x, AttentionOptions)
        return x._replace(q_runs=None, k_runs=None) if whole else x

    return lambda *a, **more: kernel(*map(local, a), **more)


FAULTS = {
    "messages go the other way": lambda parts: {"Hop": _other_way},
    "backward uses the K and V of the first hop": lambda parts: {"block_bwd": _stale_kv(parts)},
    "the last dK‖dV is not sent home": lambda parts: {"_Route": _last_gradient_stays(parts)},
    "forward masks by local positions": lambda parts: {"block_fwd": _local_positions(_fwd)},
    "backward masks by local positions": lambda parts: {"block_bwd": _local_positions(_bwd)},
    "a visible hop is skipped": lambda parts: {"_sees_any": lambda q, k, options: q == k},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("parts", [3, 4])
def test_planted_fault_shows(fault: str, kind: str, parts: int) -> None:
    """`test_ring_equals_whole_attention` passes such a case without the fault."""
    case = Case(SequenceLayout(6 * parts, parts, kind), kv_heads=1)
    with (
        planted(*(instead(ring, *plant) for plant in FAULTS[fault](parts).items())),
        pytest.raises((AssertionError, RuntimeError), match=r"Case|deadlock"),
    ):
        assert_equal_to_whole(case, emulate(case), rtol=1e-2)


def test_a_rank_that_leaves_the_ring_early_is_an_error() -> None:
    layout = SequenceLayout(8, 2)
    q = torch.randn(1, 4, 1, 8)
    options = {"layout": layout, "options": AttentionOptions()}
    good = ring.ring_forward(0, q, q, q, **options)
    with pytest.raises(RuntimeError, match=r"deadlock: rank 0 waits for ranks \[1\]"):
        messages.run_in_process([good, (x for x in ())])


# ------------------------------------------------------------------ 4. on gloo ranks


class _Wire:
    """A counter of the messages and bytes that this rank sends."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def batch_isend_irecv(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        assert [op.op for op in ops] in ([dist.isend, dist.irecv], [dist.isend], [dist.irecv])
        sends = (op.tensor for op in ops if op.op is dist.isend)
        self.sent += [send.numel() * send.element_size() for send in sends]
        return _batch_isend_irecv(ops)


_batch_isend_irecv = dist.batch_isend_irecv


def _ring_attention(q, k, v, **options) -> Tensors:
    """Compute o and lse by the ring on a process group."""
    return context_attention(q, k, v, **options, strategy="ring", return_lse=True)


def _run(case: Case, rank: int, overlap: bool) -> tuple[Tensors, list[int], list[int]]:
    """Return this rank's o, lse, dq, dk, dv and the bytes of its forward and backward messages."""
    inputs, cotangents = case.shard(rank)
    inputs = [x.clone().requires_grad_() for x in inputs]
    options = {"layout": case.layout, "group": dist.group.WORLD}
    options |= {"causal": case.causal, "window": case.window}
    wire = _Wire()
    with mock.patch.object(dist, "batch_isend_irecv", wire.batch_isend_irecv):
        o, lse = _ring_attention(*inputs, **options, overlap=overlap)
        forward = len(wire.sent)
        grads = torch.autograd.grad((o, lse), inputs, cotangents)
    return (o.detach(), lse.detach(), *grads), wire.sent[:forward], wire.sent[forward:]


def _ring_on_ranks(rank: int, cases: list[Case]) -> None:
    for case in cases:
        parts = case.layout.parts
        results, forward, backward = _run(case, rank, overlap=True)
        blocking, *same = _run(case, rank, overlap=False)
        assert all(map(torch.equal, results, blocking))
        assert same == [forward, backward]
        emulated = [None if rank else emulate(case)]
        dist.broadcast_object_list(emulated)
        for name, got, whole, of_all in zip(NAMES, results, case.truth(), emulated[0]):
            dim = 2 if name == "lse" else 1
            mine = case.layout.shard(whole, rank, dim)
            assert_close_f64(got, mine, 1e-11 if case.dtype == torch.float64 else 1e-2)
            if parts > 1:
                assert torch.equal(got, case.layout.shard(of_all, rank, dim)), (case, name)
        # Forward: P-1 times K‖V. Backward: P messages that hold P-1 times K‖V and P-1 times dK‖dV.
        kv, dkv = _bytes(case)
        if case.layout.kind == "contiguous" and case.causal:  # except what would go around the end
            last = rank == parts - 1
            assert forward == [kv] * (0 if last else rank + 1)
            of_kv = rank - 1 + (not last) if rank else 0  # passed on or returned, and the own block
            assert sum(backward) == of_kv * kv + (rank == 1) * kv + rank * dkv
            continue
        assert forward == [kv] * (parts - 1)
        middle = [kv + dkv] * (parts - 2)
        assert backward == ([kv, *middle, dkv] if parts > 1 else [])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_ring_on_gloo_ranks(world: int) -> None:
    """Both executors and both overlap modes agree in every bit; messages match the formulas."""
    zigzag = Case(SequenceLayout(6 * world, world))
    cases = [zigzag]
    if world < 8:
        plain = replace(zigzag, layout=replace(zigzag.layout, kind="contiguous"), kv_heads=4)
        striped = replace(zigzag, layout=replace(zigzag.layout, kind="striped"))
        cases += [plain, replace(plain, causal=False), replace(zigzag, dtype=torch.bfloat16)]
        cases.append(striped)
    run_ranks(world, _ring_on_ranks, cases)


class _AtOnce(ThreadPoolExecutor):
    """An executor that runs its work in the caller's thread: events are in the order of calls."""

    def submit(self, fn: Callable, *args) -> Future:
        done = Future()
        done.set_result(fn(*args))
        return done


def _order_of_events(rank: int, layout: SequenceLayout, overlap: bool) -> tuple[str, str]:
    """Return events in forward and backward: (p)ost a message, compute a (t)ile, (w)ait."""
    events: list[str] = []

    def kernel(fn: Callable) -> Callable:
        return lambda *a, **options: (events.append("t"), fn(*a, **options))[1]

    def send(ops: list) -> list[NotedWork]:
        return [NotedWork(_batch_isend_irecv(ops), events)]

    with (
        mock.patch.object(dist, "batch_isend_irecv", send),
        mock.patch.object(messages, "ThreadPoolExecutor", _AtOnce),
        mock.patch.multiple(ring, block_fwd=kernel(_fwd), block_bwd=kernel(_bwd)),
    ):
        inputs = [x.clone().requires_grad_() for x in Case(layout).shard(rank)[0]]
        options = {"layout": layout, "group": dist.group.WORLD, "overlap": overlap}
        o, _ = _ring_attention(*inputs, **options)
        forward = len(events)
        o.sum().backward()
    return "".join(events[:forward]), "".join(events[forward:])


def test_messages_are_under_way_while_tiles_are_computed() -> None:
    """The blocking twin waits first. A block that the mask hides from all later ranks stays, and
    one that it hides only from this rank, such as on its way back to rank 2, is passed on."""
    zigzag, contiguous = SequenceLayout(18, 3), SequenceLayout(18, 3, "contiguous")
    assert run_ranks(3, _order_of_events, zigzag, True) == [("ptwptwt", "ptw" * 3)] * 3
    assert run_ranks(3, _order_of_events, zigzag, False) == [("pwtpwtt", "pwt" * 3)] * 3
    assert run_ranks(3, _order_of_events, contiguous, True) == [
        ("ptw", "pwptw"),
        ("ptwptw", "ppwwptwptw"),
        ("ptwptwt", "pptwwptwptw"),
    ]


def _starting_threads(rank: int, overlap: bool) -> set[bool]:
    """Return True if hops are started in the thread that computes; under inference mode as well."""
    case, main = Case(SequenceLayout(12, 2)), set()

    def send(ops: list) -> list[dist.Work]:
        main.add(threading.current_thread() is threading.main_thread())
        return _batch_isend_irecv(ops)

    options = {"layout": case.layout, "group": dist.group.WORLD, "overlap": overlap}
    with mock.patch.object(dist, "batch_isend_irecv", send), torch.inference_mode():
        o, _ = _ring_attention(*case.shard(rank)[0], **options)
    assert_close_f64(o, case.layout.shard(case.truth()[0], rank, 1), 1e-11)
    return main


def test_a_hop_on_a_cpu_is_started_beside_the_tile() -> None:
    """gloo may copy all of a message before isend returns; the blocking twin needs no thread."""
    assert run_ranks(2, _starting_threads, True) == [{False}] * 2
    assert run_ranks(2, _starting_threads, False) == [{True}] * 2


def _loss_through_one_output(rank: int, case: Case) -> None:
    """Use losses of o alone, of lse alone, and one in which only the last rank takes part."""
    (do, dlse), last = case.shard(rank)[1], rank == case.layout.parts - 1
    _, (all_do, all_dlse) = case.draw()
    keep = torch.zeros(case.layout.seq_len, dtype=torch.float64)
    keep[case.layout.positions(case.layout.parts - 1)] = 1
    for use in ("o", "lse", "remote o"):
        whole = [x.requires_grad_() for x in case.draw()[0]]
        o, lse = whole_attention(*whole, case.causal)
        inputs = [x.clone().requires_grad_() for x in case.shard(rank)[0]]
        options = {"layout": case.layout, "group": dist.group.WORLD, "causal": case.causal}
        my_o, my_lse = _ring_attention(*inputs, **options)
        if use == "lse":
            expected, loss = (lse * all_dlse).sum(), (my_lse * dlse).sum()
        elif use == "o":
            expected, loss = (o * all_do).sum(), (my_o * do).sum()
        else:
            expected = (o * all_do * keep[None, :, None, None]).sum()
            loss = (my_o * do * float(last)).sum()
        loss.backward()
        for mine, x in zip(inputs, torch.autograd.grad(expected, whole, allow_unused=True)):
            expected_mine = torch.zeros_like(mine) if x is None else case.layout.shard(x, rank, 1)
            assert_close_f64(mine.grad, expected_mine)


def test_gradients_through_o_or_lse_alone_and_from_one_rank() -> None:
    run_ranks(3, _loss_through_one_output, Case(SequenceLayout(18, 3), kv_heads=2))


# ------------------------------------------------------------------ 5. windows end the ring


def _seen(layout: SequenceLayout, causal: bool, window: int | None) -> list[set[int]]:
    """For each block, list the d for which rank b+d sees one of its keys, checking every pair."""
    found: list[set[int]] = []
    for block in range(layout.parts):
        found.append({0})
        for d in range(layout.parts):
            back = layout.positions((block + d) % layout.parts)[:, None] - layout.positions(block)
            seen = back.abs() < (window or layout.seq_len)
            if (seen & (back >= 0) if causal else seen).any():
                found[-1].add(d)
    return found


def _bytes(case: Case) -> tuple[int, int]:
    """Return the bytes of a block's K‖V and of its fp32 (or fp64) gradient."""
    elements = 2 * case.batch * case.layout.local_len * case.kv_heads * case.dim
    return elements * case.dtype.itemsize, elements * max(4, case.dtype.itemsize)


def _expected_messages(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """Return the bytes that every rank sends in each round of messages of forward and backward.

    A block goes from rank to rank, among those at a distance at which any block is seen, as far as
    it is seen itself. In the backward it goes back the same way, with K‖V and dK‖dV in one message
    if they go equally far. Blocks that go less far than others are sent to where they start, and do
    not return.
    """
    layout, (kv, dkv) = case.layout, _bytes(case)
    P, seen = layout.parts, _seen(layout, case.causal, case.window)
    visits, reach = sorted(set().union(*seen)), [max(s) for s in seen]

    def rounds(*parts: tuple[int, int, int, int]) -> list[int]:
        """Sum each rank's sends of (bytes, from distance, least and greatest reach of a block)."""
        row = [0] * P
        for size, origin, least, most in parts:
            for block in range(P):
                row[(block + origin) % P] += size * (least <= reach[block] <= most)
        return row

    far, forward, backward = visits[-1], [], []
    for a, b in pairwise(visits):
        forward.append(rounds((kv, a, b, far)))
    back = visits[::-1]
    for before, at, onward in zip((far, *back), back, (*back[1:], 0)):
        keys = (kv, at, at if onward else far, far)
        gradient = (dkv, before, before, far)
        if 0 < at - onward == before - at:
            backward.append(rounds(keys, gradient))
        else:
            backward += [rounds(keys)] * (at > onward) + [rounds(gradient)] * (before > at)
        if 0 < onward < at:
            backward.append(rounds((kv, 0, onward, onward)))
    return [row for row in forward if any(row)], [row for row in backward if any(row)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
def test_a_hop_that_the_window_hides_from_all_is_not_made(kind: str, causal: bool) -> None:
    """The values are those of one device, for windows from one key to all and P up to 7."""
    for parts, length in ((2, 4), (3, 6), (7, 2)):
        layout = SequenceLayout(parts * length, parts, kind)
        block = length // 2 if kind == "zigzag" else length
        for window in sorted({1, 2, block, block + 1, block + 2, 2 * block + 2, 99}):
            case = Case(layout, causal=causal, window=window, heads=2, batch=1, dim=3)
            sent: list[list[int]] = [[] for _ in range(parts)]

            def ends(rank: int, hop: messages.Hop, inner: int, sent=sent) -> messages._Ends:
                sent[rank].append(0 if hop.send is None else hop.send.nbytes)
                return _ends(rank, hop, inner)

            with mock.patch.object(messages, "_ends", ends):
                assert_equal_to_whole(case, emulate(case))
            forward, backward = _expected_messages(case)
            rows = map(list, zip(*sent, strict=True))
            assert [row for row in rows if any(row)] == forward + backward, case
            reach = -(-(window - 1) // block)  # blocks that a window reaches back
            if kind == "striped":
                count = (window - 1) if causal else 2 * (window - 1)
            else:
                count = reach if causal and kind == "contiguous" else 2 * reach
            assert len(forward) == min(count, parts - 1), case


_ends = messages._ends


def _windows_on_ranks(rank: int) -> None:
    for kind, window, causal in (
        ("contiguous", 5, True), ("contiguous", 6, True), ("contiguous", 5, False),
        ("striped", 2, True), ("striped", 2, False), ("contiguous", 1, False),
    ):  # fmt: skip
        layout = SequenceLayout(16, 4, kind)
        case = Case(layout, causal=causal, window=window)
        results, *sent = _run(case, rank, overlap=True)
        blocking, *same = _run(case, rank, overlap=False)
        assert all(map(torch.equal, results, blocking))
        expected = [[row[rank] for row in rows if row[rank]] for rows in _expected_messages(case)]
        assert same == sent == expected
        for name, got, whole in zip(NAMES, results, case.truth()):
            assert_close_f64(got, layout.shard(whole, rank, 2 if name == "lse" else 1), 1e-11)


def test_windows_on_gloo_ranks() -> None:
    run_ranks(4, _windows_on_ranks)
