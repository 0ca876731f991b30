"""Ring attention: queries stay, K and V travel round the ranks (Liu et al. 2023, arXiv:2310.01889).

Rank r holds q_r, k_r, v_r[B, S/cp, H, D] of a `SequenceLayout`. With P ranks, hop i of a ring in
which every rank sees something of every other's block

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
inputs), because sums kept in bf16 lose a factor that grows with P.

What the mask hides is not sent: hops that all ranks would make for nothing are left out
(`distances`), and a block travels as far as the last rank that sees something of it (`reaches`),
passed on by the ranks in between. With contiguous blocks under a causal mask that is rank P-1 (or
where the window ends): block b makes P-1-b hops forward, P(P-1)/2 for all blocks instead of P(P-1).
In the backward a block that got as far as any starts where the forward left it; one that did not,
as there rank P-1 has seen later ones since, is sent from home to the last rank that sees it, and
its own rank keeps it: again P-1-b hops of K‖V, and as many of dK‖dV.

The order of messages and tiles is a generator per rank (`ring_forward`, `ring_backward`) that knows
no transport (`messages`). A message starts before the tile of its hop and is waited for after it;
two buffers are enough: a block is computed and sent from one while the next arrives in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle

import torch

from warpweave.kernels.attention.backward import block_bwd
from warpweave.kernels.attention.forward import block_fwd
from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.reference import Run, compute_dtype
from warpweave.kernels.runtime.dispatch import choose
from warpweave.parallel.context.messages import Hop, Steps, run_on_group
from warpweave.parallel.context.strategy import ForwardBackward, Shards
from warpweave.parallel.layout import SequenceLayout


def _sees_any(q_runs: Sequence[Run], k_runs: Sequence[Run], options: AttentionOptions) -> bool:
    """Whether the mask's positions let any of these queries see any of these keys."""

    def sees(q: range, k: range) -> bool:
        if not q or not k:
            return False
        apart = range(q[0] - k[-1], q[-1] - k[0] + 1, q.step)  # of any query and key
        ahead = 1 - options.window if options.window else apart[0]
        least = max(0 if options.causal else ahead, apart[0])
        most = options.window - 1 if options.window else apart[-1]
        nearest = least + (apart[0] - least) % q.step
        return nearest <= min(most, apart[-1])

    return any(sees(q.positions, k.positions) for q in q_runs for k in k_runs)


@lru_cache(maxsize=64)
def distances(layout: SequenceLayout, causal: bool, window: int | None) -> tuple[int, ...]:
    """The d of which some rank r sees something of block r-d, ascending from the own block's 0.

    With blocks of s tokens and a window of W, w = ceil((W-1) / s): a contiguous causal ring visits
    0 to w; without the causal mask, and on zigzag halves with s/2 for s, also the last w of P.
    """
    runs, options = [layout.runs(r) for r in range(layout.parts)], AttentionOptions(causal, window)
    seen = (
        any(_sees_any(mine, runs[r - d], options) for r, mine in enumerate(runs))
        for d in range(1, layout.parts)
    )
    return 0, *(d for d, visible in enumerate(seen, 1) if visible)


@lru_cache(maxsize=64)
def reaches(layout: SequenceLayout, causal: bool, window: int | None) -> tuple[int, ...]:
    """For each block b the largest d of which rank b+d sees something of it, 0 for none."""
    runs, options = [layout.runs(r) for r in range(layout.parts)], AttentionOptions(causal, window)
    back = distances(layout, causal, window)[::-1]
    return tuple(
        next(d for d in back if not d or _sees_any(runs[(b + d) % layout.parts], block, options))
        for b, block in enumerate(runs)
    )


class _Route:
    """Which messages a rank has part in: every block visits what `distances` and `reaches` say."""

    def __init__(self, rank: int, layout: SequenceLayout, options: AttentionOptions) -> None:
        self._rank, self._parts = rank, layout.parts
        self._runs = [layout.runs(r) for r in range(layout.parts)]
        self._options = options._replace(q_runs=self._runs[rank])
        self.visits = distances(layout, options.causal, options.window)
        self._reach = reaches(layout, options.causal, options.window)
        self.starts = {d for d in self._reach if 0 < d < self.visits[-1]}  # from home, backward

    def reach(self, at: int) -> int:
        """How far block rank - `at` travels, which is here if that is at least `at`."""
        return self._reach[(self._rank - at) % self._parts]

    @property
    def stays(self) -> bool:
        """Whether the own block ends nearer than others, so that the backward sends it anew."""
        return self.reach(0) < self.visits[-1]

    def comes_back(self, at: int, origin: int, target: int) -> bool:
        """Whether K‖V of block rank - `at` goes from distance `origin` to `target` in the backward:
        home only where it is not kept."""
        return self.reach(at) >= origin and (target > 0 or self.reach(at) == self.visits[-1])

    def block(self, at: int) -> AttentionOptions | None:
        """The options of the tile with block rank - `at`; None if the mask hides all of it."""
        k_runs = self._runs[(self._rank - at) % self._parts]
        if at and not _sees_any(self._runs[self._rank], k_runs, self._options):
            return None
        return self._options._replace(k_runs=k_runs)


# ------------------------------------------------------------------ 1. the steps of one rank

# What the backward starts from: K‖V[2, B, Hkv, S/cp, D] of the farthest block, which the last hop
# left here, and k and v of the own one; None where it is not needed.
Kept = Sequence[torch.Tensor | None]


def _heads_first(
    k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """k and v as one message [2, B, H, S/cp, D], in which a head's rows lie together."""
    B, s, H, D = k.shape  # `stack` may lay them out otherwise, by the inputs' strides
    kv = k.new_empty(2, B, H, s, D) if out is None else out
    for part, x in zip(kv, (k, v)):
        part.copy_(x.transpose(1, 2))
    return kv


def ring_forward(
    rank: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, Kept]]:
    """Forward of one rank: q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D], sinks[Hq] or None.

    Returns o (like q), lse[B, Hq, S/cp] (fp32 or float64) and what the backward starts from.
    """
    route = _Route(rank, layout, options)
    if choose(options.impl, q) == "torch":  # the copy takes less than torch's kernel gains by it
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    here = _heads_first(k, v)
    spare = torch.empty_like(here)
    o = lse = None
    for at, onward in zip(route.visits, (*route.visits[1:], None)):
        if onward is not None:
            goes, comes = route.reach(at) >= onward, route.reach(onward) >= onward
            yield Hop(here if goes else None, spare if comes else None, onward - at)
        block, kv = route.block(at), here.transpose(2, 3)
        if o is None:  # the own block, and what each row has once
            o, lse = block_fwd(q, kv[0], kv[1], block, sinks=sinks, out_dtype=compute_dtype(q))
        elif block is not None:
            o, lse = block_fwd(q, kv[0], kv[1], block, into=(o, lse))
        if onward is not None:
            yield None
            here, spare = spare, here
    last = route.visits[-1]
    far = here if route.reach(last) == last else None
    own = (k, v) if route.stays or far is None else (None, None)
    return o.to(q.dtype), lse, (far, *own)


class _Message:
    """K‖V and dK‖dV in one flat buffer: one message a hop pays for launch and latency once.

    Bytes, because K‖V travels in its own dtype and the gradient in fp32 (or float64).
    """

    def __init__(self, like: torch.Tensor, shape: Sequence[int], grad_dtype: torch.dtype) -> None:
        number = torch.Size(shape).numel()
        self._split = number * like.element_size()  # a multiple of the gradient's item size
        size = self._split + number * grad_dtype.itemsize
        self._bytes = torch.empty(size, dtype=torch.uint8, device=like.device)
        self.kv = self._bytes[: self._split].view(like.dtype).view(shape)
        self.dkv = self._bytes[self._split :].view(grad_dtype).view(shape)

    def part(self, kv: bool, dkv: bool) -> torch.Tensor | None:
        """The bytes of K‖V, of dK‖dV or of both; None for neither."""
        start, stop = 0 if kv else self._split, len(self._bytes) if dkv else self._split
        return self._bytes[start:stop] if kv or dkv else None


class _Kept:
    """The K‖V that the forward left here, if any, of which there is no gradient to send yet."""

    def __init__(self, kv: torch.Tensor | None) -> None:
        self.kv = kv

    def part(self, kv: bool, dkv: bool) -> torch.Tensor | None:
        """Its bytes, or None."""
        return self.kv.view(-1).view(torch.uint8) if kv else None


def _backward_hops(
    route: _Route,
    here: _Message | _Kept,
    spare: _Message,
    own: Kept,
    at: tuple[int, int, int],
) -> list[Hop]:
    """Where `at` is the distance of the block before, of this one and of the next: this one's K‖V
    goes on to the next distance, and dK‖dV of the one before to this one, in one message where they
    go equally far. A block that starts at the next distance is sent there from home."""
    before, now, onward = at
    kv, dkv = now - onward, before - now
    goes = bool(kv) and route.comes_back(now, now, onward)
    comes = bool(kv) and route.comes_back(onward, now, onward)
    grad_goes = bool(dkv) and route.reach(before) >= before
    grad_comes = bool(dkv) and route.reach(now) >= before
    hops = []
    if kv == dkv:
        hops.append(Hop(here.part(goes, grad_goes), spare.part(comes, grad_comes), -kv))
    else:
        hops += [Hop(here.part(goes, False), spare.part(comes, False), -kv)] * bool(kv)
        hops += [Hop(here.part(False, grad_goes), spare.part(False, grad_comes), -dkv)] * bool(dkv)
    if onward < now and onward in route.starts:
        starts, arrives = route.reach(0) == onward, route.reach(onward) == onward
        hops.append(
            Hop(_heads_first(*own) if starts else None, spare.kv if arrives else None, onward)
        )
    return hops


def ring_backward(
    rank: int,
    do: torch.Tensor,
    q: torch.Tensor,
    kept: Kept,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    o: torch.Tensor | None = None,
    layout: SequenceLayout,
    options: AttentionOptions,
    kv_grad_dtype: torch.dtype | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Backward of one rank from what `ring_forward` returned and delta[B, Hq, S/cp].

    `o` may be given if no gradient came through lse: it spares the CPU path a copy, no more.
    Returns dq, dk, dv of this rank's own rows, summed over all ranks, in the inputs' dtypes; dk and
    dv in `kv_grad_dtype` where they are to be added to others.
    """
    route, grad_dtype = _Route(rank, layout, options), compute_dtype(q)
    visits, (far, *own) = route.visits[::-1], kept
    B, s, _, D = q.shape
    shape = (2, B, own[0].shape[2], s, D) if far is None else far.shape
    buffers = cycle([_Message(q, shape, grad_dtype) for _ in range(2)])
    here: _Message | _Kept = _Kept(far)
    spare = next(buffers)
    kv_grad_dtype = kv_grad_dtype or q.dtype
    dq = None
    for before, at, onward in zip((visits[0], *visits), visits, (*visits[1:], 0)):
        yield from _backward_hops(route, here, spare, own, (before, at, onward))
        block, first = route.block(at), route.reach(at) == at
        into: Sequence[torch.Tensor | None] = (None, None)
        if first:  # no gradient arrives beside this tile: it is made where it is sent from
            into = [*spare.dkv.zero_().transpose(2, 3)]
        if block is not None:
            k, v = here.kv.transpose(2, 3)
            dq, *tile = block_bwd(
                do, q, k, v, lse, delta, block,
                o=o, grad_dtype=grad_dtype, into=(dq, *into),
            )  # fmt: skip
        yield None  # the gradient that arrives is of the block just computed
        if block is not None and not first:
            for whole, part in zip(spare.dkv.transpose(2, 3), tile):
                whole.add_(part)
        if onward == 0 < at and route.stays:
            _heads_first(*own, out=spare.kv)
        here, spare = spare, next(buffers)
    assert dq is not None  # the own block is always visible
    assert not isinstance(here, _Kept)
    dk, dv = here.dkv.transpose(2, 3).to(kv_grad_dtype)
    return dq.to(q.dtype), dk, dv


# ------------------------------------------------------------------ 2. on a process group


def _ring_forward(
    shards: Shards, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    layout, options = shards.layout, shards.options
    steps = ring_forward(shards.rank, q, k, v, layout=layout, options=options, sinks=sinks)
    o, lse, kept = run_on_group(steps, shards.group, overlap=shards.overlap)
    return o, lse, (q, *kept)


def _ring_backward(
    shards: Shards,
    do: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    delta: torch.Tensor,
    o: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (q, *kept), layout, options = saved, shards.layout, shards.options
    steps = ring_backward(shards.rank, do, q, kept, lse, delta, o=o, layout=layout, options=options)
    return run_on_group(steps, shards.group, overlap=shards.overlap)


RING = ForwardBackward(_ring_forward, _ring_backward)
