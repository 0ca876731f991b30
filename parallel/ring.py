"""Ring attention: queries stay, K and V travel round the ranks (Liu et al. 2023, arXiv:2310.01889).

Rank r holds q_r, k_r, v_r[B, S/cp, H, D] of a `SequenceLayout`. With P ranks, hop i of

    forward    attends q_r to block r-i and sends that block to rank r+1. The partial results,
               each a softmax over one block, merge by their lse:
                   lse = logaddexp(lse_a, lse_b)
                   o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b
               P-1 messages of K‖V.
    backward   runs the other way, from the block r+1 that the forward left here: hop i attends
               q_r to block r+1+i and sends to rank r-1 that block and the gradient before it,
                   [K‖V of block r+1+i, dK‖dV of block r+i],
               so a gradient trails its block by one hop and comes home with the last message,
               which travels while the diagonal tile is computed. P messages that hold P-1 times
               K‖V and P-1 times dK‖dV (the schedule of TransformerEngine; others need P gradient
               hops and expose the last).

Each tile of the backward uses the final lse and delta = rowsum(o do) - dlse, so it is the true
global probability of its pairs: the gradients are exact, not an approximation. Sums over blocks
are re-associated. Partial outputs, dq and the travelling dK‖dV are fp32 (float64 for float64
inputs), because sums kept in bf16 lose a factor that grows with P. Blocks that the mask hides from
this rank are passed on but not computed.

The order of messages and tiles is a generator per rank (`ring_forward`, `ring_backward`) that knows
no transport: `run_on_group` executes it on a process group, `run_in_process` executes all ranks of
a ring in one process. A message starts before the tile of its hop and is waited for after it; two
buffers are enough, since a block is computed and sent from one while the next arrives in the other.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from warpweave.kernels.attention import (
    attention,
    attention_bwd,
    attention_delta,
    attention_dsinks,
    attention_fwd,
)
from warpweave.kernels.dispatch import once_differentiable
from warpweave.kernels.linear import grad_dtype
from warpweave.kernels.reference import Run, compute_dtype
from warpweave.parallel.layout import SequenceLayout

T = TypeVar("T")


class Hop(NamedTuple):
    """A message of every rank at once: `send` goes to rank + step, `recv` is from rank - step.

    Both are contiguous tensors of the same dtype and, over all ranks, of the same size.
    """

    send: torch.Tensor
    recv: torch.Tensor
    step: int


# What a rank of a ring does: yields a Hop to start a message and None to wait for it.
Schedule = Generator["Hop | None", None, T]


def run_on_group(schedule: Schedule[T], group: dist.ProcessGroup, *, overlap: bool = True) -> T:
    """Execute this rank's `schedule` with P2P messages on `group`; returns its result.

    ``overlap=False`` waits for every message before the tile that could hide it. The operations and
    their order are the same, so the results are bitwise equal.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    works: list[dist.Work] = []
    while True:
        try:
            hop = next(schedule)
        except StopIteration as stop:
            return stop.value
        if hop is not None:
            # One batch: NCCL deadlocks when neighbours order single sends and receives differently.
            there, back = (rank + hop.step) % size, (rank - hop.step) % size
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, hop.send, group=group, group_peer=there),
                    dist.P2POp(dist.irecv, hop.recv, group=group, group_peer=back),
                ]
            )
        if hop is None or not overlap:
            for work in works:
                work.wait()
            works = []


def run_in_process(schedules: Sequence[Schedule[T]], *, overlap: bool = True) -> list[T]:
    """Execute the schedules of all ranks of a ring in lockstep in this process, without any group.

    Messages are copies, delivered where they are waited for (``overlap=False``: where they start).
    """
    hops: list[Hop] = []
    while True:
        events, results = [], []
        for schedule in schedules:
            try:
                events.append(next(schedule))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            if events:
                raise RuntimeError(
                    f"{len(results)} of {len(schedules)} ranks of the ring left early"
                )
            return results
        if events[0] is not None:
            hops = events
        if events[0] is None or not overlap:
            for rank, hop in enumerate(hops):
                hops[(rank + hop.step) % len(hops)].recv.copy_(hop.send)
            hops = []


class Attend(NamedTuple):
    """Which keys count and how much: the arguments of `attention` that both directions share."""

    causal: bool = True
    window: int | None = None
    documents: torch.Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    dropout_seed: int = 0
    dropout_origin: tuple[int, int] = (0, 0)
    impl: str | None = None


def _visible(q_runs: Sequence[Run], k_runs: Sequence[Run], attend: Attend) -> bool:
    """Whether the mask's positions let any of these queries see any of these keys."""

    def sees(q: range, k: range) -> bool:
        if not q or not k or (attend.causal and k[0] > q[-1]):
            return False
        return attend.window is None or max(q[0] - k[-1], k[0] - q[-1]) < attend.window

    return any(sees(q.positions, k.positions) for q in q_runs for k in k_runs)


# ------------------------------------------------------------------ 1. the schedules


def ring_forward(
    rank: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    attend: Attend,
    sinks: torch.Tensor | None = None,
) -> Schedule[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Forward of one rank: q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D], sinks[Hq] or None.

    Returns o (like q), lse[B, Hq, S/cp] (fp32 or float64) and kv[2, B, S/cp, Hkv, D], the K‖V of
    rank ``(rank + 1) % cp`` that the last hop left here and from which the backward starts.
    """
    parts, q_runs = layout.parts, layout.runs(rank)
    here = torch.stack((k, v))
    spare = torch.empty_like(here)
    o = lse = None
    for hop in range(parts):
        if hop < parts - 1:
            yield Hop(here, spare, +1)
        k_runs = layout.runs((rank - hop) % parts)
        if o is None or _visible(q_runs, k_runs, attend):
            carried: dict[str, Any] = {"into": (o, lse)}
            if o is None:  # the own block, and what each row has once
                carried = {"out_dtype": compute_dtype(q), "sinks": sinks}
            o, lse = attention_fwd(
                q, here[0], here[1], q_runs=q_runs, k_runs=k_runs, **attend._asdict(), **carried
            )
        if hop < parts - 1:
            yield None
            here, spare = spare, here
    return o.to(q.dtype), lse, here


class _Message:
    """K‖V and dK‖dV in one flat buffer: one message a hop pays for launch and latency once.

    Bytes, because K‖V travels in its own dtype and the gradient in fp32 (or float64).
    """

    def __init__(self, kv: torch.Tensor, grad_dtype: torch.dtype) -> None:
        self._split = kv.numel() * kv.element_size()  # a multiple of the gradient's item size
        size = self._split + kv.numel() * grad_dtype.itemsize
        self._bytes = torch.empty(size, dtype=torch.uint8, device=kv.device)
        self.kv = self._bytes[: self._split].view(kv.dtype).view(kv.shape)
        self.dkv = self._bytes[self._split :].view(grad_dtype).view(kv.shape)

    def part(self, *, kv: bool, dkv: bool) -> torch.Tensor:
        """The bytes of what travels."""
        return self._bytes[0 if kv else self._split : None if dkv else self._split]


def ring_backward(
    rank: int,
    do: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    o: torch.Tensor | None = None,
    layout: SequenceLayout,
    attend: Attend,
) -> Schedule[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Backward of one rank from what `ring_forward` returned and delta[B, Hq, S/cp].

    `o` may be given if no gradient came through lse: it spares the CPU path a copy, no more.
    Returns dq, dk, dv of this rank's own rows, summed over all ranks, in the inputs' dtypes.
    """
    parts, q_runs, grad_dtype = layout.parts, layout.runs(rank), compute_dtype(q)
    here, spare = _Message(kv, grad_dtype), _Message(kv, grad_dtype)
    here.kv.copy_(kv)
    spare.dkv.zero_()  # the first message brings no gradient: nobody has computed one yet
    dq = None
    for hop in range(parts):
        travels = {"kv": hop < parts - 1, "dkv": hop > 0}
        yield Hop(here.part(**travels), spare.part(**travels), -1)
        k_runs = layout.runs((rank + 1 + hop) % parts)
        tile = None
        if _visible(q_runs, k_runs, attend):
            tile = attention_bwd(
                do, q, here.kv[0], here.kv[1], lse, delta, o=o, q_runs=q_runs, k_runs=k_runs,
                grad_dtype=grad_dtype, into=(dq, None, None), **attend._asdict(),
            )  # fmt: skip
            dq = tile[0]
        yield None  # the gradient that arrives is of the block just computed
        if tile is not None:
            spare.dkv[0].add_(tile[1])
            spare.dkv[1].add_(tile[2])
        here, spare = spare, here
    assert dq is not None  # the own block is always visible
    return dq.to(q.dtype), here.dkv[0].to(kv.dtype), here.dkv[1].to(kv.dtype)


# ------------------------------------------------------------------ 2. autograd


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, layout, group, attend, overlap):
        schedule = ring_forward(
            dist.get_rank(group), q, k, v, layout=layout, attend=attend, sinks=sinks
        )
        o, lse, kv = run_on_group(schedule, group, overlap=overlap)
        ctx.save_for_backward(q, kv, sinks, o, lse)
        ctx.group, ctx.overlap, ctx.layout, ctx.attend = group, overlap, layout, attend
        ctx.of_sinks = None if sinks is None else grad_dtype(sinks)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        q, kv, sinks, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do.contiguous()
        delta = attention_delta(o, do, dlse, impl=ctx.attend.impl)
        schedule = ring_backward(
            dist.get_rank(ctx.group), do, q, kv, lse, delta, o=o if dlse is None else None,
            layout=ctx.layout, attend=ctx.attend,
        )  # fmt: skip
        dq, dk, dv = run_on_group(schedule, ctx.group, overlap=ctx.overlap)
        return dq, dk, dv, sinks_gradient(sinks, lse, delta, ctx.of_sinks), *[None] * 4

    @staticmethod
    def spmd_typecheck(
        *, q: Any, k: Any, v: Any, sinks: Any, group: Any, attend: Attend
    ) -> tuple[Any, Any]:
        """Attention of the whole sequence, of which every rank keeps its own rows."""
        return attention_types(q, k, v, sinks, group, attend)


def sinks_gradient(
    sinks: torch.Tensor | None,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dtype: torch.dtype | None,
) -> torch.Tensor | None:
    """dsinks[Hq]{partial cp} in `dtype`: the share of this rank's rows."""
    return None if sinks is None else attention_dsinks(sinks, lse, delta).to(dtype)


def attention_types(
    q: Any, k: Any, v: Any, sinks: Any, group: Any, attend: Attend
) -> tuple[Any, Any]:
    """The typing rule of context-parallel attention, for every strategy: types of (o, lse).

    q, k, v{S(1) cp} in the layout's order are gathered, attended (heads, and their sinks, may be
    sharded on other axes, sequence and head_dim not; linear in v alone), and the result is sharded
    again. spmd_types is imported here only: it is a development extra.
    """
    from spmd_types import R, S, rules

    q, k, v = (rules.all_gather(x, group, src=S(1), dst=R) for x in (q, k, v))
    if attend.documents is not None:
        q = rules.einsum(
            f"b_h_,{'b_' if attend.documents.ndim == 2 else '_'}->b_h_", q, attend.documents
        )
    if sinks is not None:
        q = rules.einsum("b_h_,h->b_h_", q, sinks)
    o = rules.einsum("b_h_,b_h_,b_h_->b_h_", q, k, v, linear_in=(2,))
    lse = rules.einsum("b_h_,b_h_->bh_", q, k)
    return (
        rules.convert(o, group, src=R, dst=S(1)),
        rules.convert(lse, group, src=R, dst=S(2)),
    )


# ------------------------------------------------------------------ 3. the function


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    group: dist.ProcessGroup | None,
    attend: Attend = Attend(),  # noqa: B008 - it cannot be changed
    sinks: torch.Tensor | None = None,
    overlap: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q[B, S/cp, Hq, D] to the whole sequence of k, v[B, S/cp, Hkv, D].

    Returns o (like q) and lse[B, Hq, S/cp] in natural log, fp32 or float64, both differentiable.
    Every rank of `group` must call the forward and, if one does, run the backward: a rank that
    leaves its result out of the loss leaves its neighbours waiting. Arguments are taken as checked:
    ``warpweave.parallel.context.context_attention`` refuses bad ones before anything is sent.
    """
    if group is None or dist.get_world_size(group) == 1:
        o, lse = attention(q, k, v, sinks=sinks, return_lse=True, **attend._asdict())
        return o, lse
    return _RingAttention.apply(q, k, v, sinks, layout, group, attend, overlap)
