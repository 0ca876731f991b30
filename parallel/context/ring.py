"""Ring attention (Liu et al. 2023, arXiv:2310.01889): ranks keep their queries; K‖V blocks rotate.

Rank r of P holds q_r, k_r, v_r[B, S/cp, H, D], block r of a `SequenceLayout`. Forward, step i:
attend q_r to block r-i and send that block to rank r+1. Each step yields a softmax over one block,
and the partial results are merged by their log-sum-exp:

    lse = logaddexp(lse_a, lse_b)
    o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

Backward: the ring turns the other way and starts with the block that the forward received last, so
that block is not sent again. Step i: attend q_r to block r+1+i, and send to rank r-1 the K‖V of
that block together with dK‖dV of the previous step's block. A gradient follows its block one step
behind. The last message, which returns dK‖dV to the block's owner, is hidden behind the diagonal
tile. (This is the schedule of TransformerEngine; others need P gradient messages and expose the
last.)

    four ranks, every block seen by every rank (zigzag layout, or no causal mask)

             attended by rank                          attended by rank     sent to rank r-1
    forward   0   1   2   3    sent to r+1   backward   0   1   2   3       K‖V of    dK‖dV of
    step 0   b0  b1  b2  b3    K‖V           step 0    b1  b2  b3  b0       b(r+1)
    step 1   b3  b0  b1  b2    K‖V           step 1    b2  b3  b0  b1       b(r+2)    b(r+1)
    step 2   b2  b3  b0  b1    K‖V           step 2    b3  b0  b1  b2       b(r+3)    b(r+2)
    step 3   b1  b2  b3  b0                  step 3    b0  b1  b2  b3                 b(r+3)
             P-1 messages                              P messages, P-1 times K‖V and dK‖dV

Every tile of the backward uses the final lse and delta = rowsum(o do) - dlse, so its probabilities
are those of the whole softmax, and the gradients are exact. Sums over blocks are re-associated.
Partial outputs, dq and the dK‖dV in transit are fp32 (float64 for float64 inputs), because sums
kept in bf16 lose a factor that grows with P.

Exception: K‖V that the mask hides is not sent. Steps that no rank needs are skipped (`distances`),
and a block travels only to the last rank that sees any of it (`reaches`), forwarded by the ranks in
between. With contiguous blocks under a causal mask that is rank P-1, and block b is sent P-1-b
times:

    four ranks, contiguous layout, causal mask; * sent by the block's owner

    forward   0   1   2   3                  backward   0   1   2   3
    step 0   b0  b1  b2  b3                  step 0     -   -   -   b0
    step 1    -  b0  b1  b2                  step 1     -   -  b0   b1*
    step 2    -   -  b0  b1                  step 2     -  b0  b1   b2*
    step 3    -   -   -  b0                  step 3    b0  b1  b2   b3

In the backward, the blocks that traveled farthest start on the rank where the forward left them (b0
on rank 3). The buffer of any other block was overwritten by later blocks. Its owner therefore keeps
it and sends it once more to the last rank that sees it. That is again P-1-b messages of K‖V, and as
many of dK‖dV.

The order of messages and tiles is a generator per rank (`messages`). A message starts before the
tile of its step and is waited for after it. Two buffers are enough: a block is attended and sent
from one while the next block is received into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from warpweave.kernels.attention.backward import block_bwd
from warpweave.kernels.attention.forward import block_fwd
from warpweave.kernels.attention.options import AttentionOptions, Upstream
from warpweave.kernels.reference import Run, compute_dtype
from warpweave.kernels.runtime.dispatch import choose
from warpweave.parallel.buffers import Buffers
from warpweave.parallel.context.strategy import ForwardBackward, Shards
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.messages import Hop, Steps, run_on_group


def _sees_any(q_runs: Sequence[Run], k_runs: Sequence[Run], options: AttentionOptions) -> bool:
    """Return True if the positions let any of these queries see any of these keys."""

    def sees(q: range, k: range) -> bool:
        if not q or not k:
            return False
        offsets = range(q[0] - k[-1], q[-1] - k[0] + 1, q.step)  # query minus key position
        ahead = 1 - options.window if options.window else offsets[0]
        least = max(0 if options.causal else ahead, offsets[0])
        most = options.window - 1 if options.window else offsets[-1]
        nearest = least + (offsets[0] - least) % q.step
        return nearest <= min(most, offsets[-1])

    return any(sees(q.positions, k.positions) for q in q_runs for k in k_runs)


@lru_cache(maxsize=64)
def distances(layout: SequenceLayout, causal: bool, window: int | None) -> tuple[int, ...]:
    """The steps d of the forward that are not skipped: those in which some rank r sees any of block
    r-d. Ascending. 0, a rank's own block, is always included.

    With blocks of s tokens, a window of W and w = ceil((W-1) / s), a contiguous causal ring has
    steps 0 to w. Without the causal mask, and on a zigzag layout with s/2 instead of s, it also has
    the last w of the P steps.
    """
    runs, options = [layout.runs(r) for r in range(layout.parts)], AttentionOptions(causal, window)
    seen = (
        any(_sees_any(mine, runs[r - d], options) for r, mine in enumerate(runs))
        for d in range(1, layout.parts)
    )
    return 0, *(d for d, visible in enumerate(seen, 1) if visible)


@lru_cache(maxsize=64)
def reaches(layout: SequenceLayout, causal: bool, window: int | None) -> tuple[int, ...]:
    """For each block b, the largest d for which rank b+d sees any of it; 0 if only its owner
    does."""
    runs, options = [layout.runs(r) for r in range(layout.parts)], AttentionOptions(causal, window)
    back = distances(layout, causal, window)[::-1]
    return tuple(
        next(d for d in back if not d or _sees_any(runs[(b + d) % layout.parts], block, options))
        for b, block in enumerate(runs)
    )


class _Route:
    """The blocks that one rank attends, receives and forwards, from `distances` and `reaches`.

    The block at distance d is that of rank - d; distance 0 is the rank's own block.
    """

    def __init__(self, rank: int, layout: SequenceLayout, options: AttentionOptions) -> None:
        self._rank, self._parts = rank, layout.parts
        self._runs = [layout.runs(r) for r in range(layout.parts)]
        self._options = options._replace(q_runs=self._runs[rank])
        self.visits = distances(layout, options.causal, options.window)
        self._reach = reaches(layout, options.causal, options.window)
        # At these distances the backward begins with a block that its owner sends again.
        self.starts = {d for d in self._reach if 0 < d < self.visits[-1]}

    def reach(self, at: int) -> int:
        """The distance that block rank - `at` travels; at least `at` if this rank receives it."""
        return self._reach[(self._rank - at) % self._parts]

    @property
    def stays(self) -> bool:
        """Return True if this rank's own block travels less far than others. It then stays on its
        owner, which sends it again in the backward."""
        return self.reach(0) < self.visits[-1]

    def comes_back(self, at: int, origin: int, target: int) -> bool:
        """Return True if K‖V of block rank - `at` is sent from distance `origin` to `target` in the
        backward. It goes to its owner (`target` 0) only if the owner has not kept it."""
        return self.reach(at) >= origin and (target > 0 or self.reach(at) == self.visits[-1])

    def hop(self, send: torch.Tensor | None, recv: torch.Tensor | None, step: int) -> Hop:
        """Send `send` `step` ranks ahead, and receive `recv` from `step` ranks back."""
        return Hop(send, recv, (self._rank + step) % self._parts, (self._rank - step) % self._parts)

    def block(self, at: int) -> AttentionOptions | None:
        """The attention options for block rank - `at`; None if the mask hides all of it."""
        k_runs = self._runs[(self._rank - at) % self._parts]
        if at and not _sees_any(self._runs[self._rank], k_runs, self._options):
            return None
        return self._options._replace(k_runs=k_runs)


# ------------------------------------------------------------------ 1. the steps of one rank

# Saved for the backward: K‖V[2, B, Hkv, S/cp, D] of the block received last, and this rank's own k
# and v; None for what the backward does not need.
Kept = Sequence[torch.Tensor | None]


def _heads_first(k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Copy k and v[B, S/cp, H, D] into `out`, one contiguous message [2, B, H, S/cp, D]."""
    for part, x in zip(out, (k, v)):
        part.copy_(x.transpose(1, 2))
    return out


def ring_forward(
    rank: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
    buffers: Buffers | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, Kept]]:
    """Forward of one rank: q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D], sinks[Hq] or None.

    Messages use `buffers`; the results do not. Returns o (like q), lse[B, Hq, S/cp] (fp32 or
    float64) and the K‖V saved for the backward.
    """
    route = _Route(rank, layout, options)
    if choose(options.impl, q) == "torch":  # the copy costs less than torch's kernel gains
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    buffers = Buffers() if buffers is None else buffers
    shape = 2, k.shape[0], k.shape[2], k.shape[1], k.shape[3]
    here, spare = (buffers.take(shape, k.dtype, k.device) for _ in range(2))
    _heads_first(k, v, out=here)
    o = lse = None
    for at, onward in zip(route.visits, (*route.visits[1:], None)):
        if onward is not None:
            goes, comes = route.reach(at) >= onward, route.reach(onward) >= onward
            yield route.hop(here if goes else None, spare if comes else None, onward - at)
        block, kv = route.block(at), here.transpose(2, 3)
        if o is None:  # the diagonal tile; sinks must count only once per row
            o, lse = block_fwd(q, kv[0], kv[1], block, sinks=sinks, out_dtype=compute_dtype(q))
        elif block is not None:
            o, lse = block_fwd(q, kv[0], kv[1], block, into=(o, lse))
        if onward is not None:
            yield None
            here, spare = spare, here
    last = route.visits[-1]
    far = here.clone() if route.reach(last) == last else None
    buffers.give_back(here, spare)
    own = (k, v) if route.stays or far is None else (None, None)
    return o.to(q.dtype), lse, (far, *own)


class _Message:
    """K‖V and dK‖dV in one flat buffer, so a step of the backward sends one message.

    It is a buffer of bytes, because K‖V has the inputs' dtype and dK‖dV is fp32 (or float64).
    """

    def __init__(
        self, like: torch.Tensor, shape: Sequence[int], grad_dtype: torch.dtype, buffers: Buffers
    ) -> None:
        number = torch.Size(shape).numel()
        self._split = number * like.element_size()  # a multiple of the gradient's item size
        size = self._split + number * grad_dtype.itemsize
        self.bytes = buffers.take((size,), torch.uint8, like.device)
        self.kv = self.bytes[: self._split].view(like.dtype).view(shape)
        self.dkv = self.bytes[self._split :].view(grad_dtype).view(shape)

    def part(self, kv: bool, dkv: bool) -> torch.Tensor | None:
        """The bytes of K‖V, of dK‖dV or of both; None for neither."""
        start, stop = 0 if kv else self._split, len(self.bytes) if dkv else self._split
        return self.bytes[start:stop] if kv or dkv else None


def _backward_hops(
    route: _Route,
    here: _Message,
    spare: _Message,
    fresh: Callable[[], torch.Tensor],
    at: tuple[int, int, int],
) -> list[Hop]:
    """The messages of one step of the backward.

    `at` holds the distances (before, now, onward) of the blocks of the previous, this and the next
    step; without a mask they are d+1, d, d-1. The messages are

        K‖V of this step's block               now - onward ranks back, to be attended next
        dK‖dV of the previous step's block     before - now ranks back, to be added to there
        K‖V of this rank's own block, `fresh`   onward ranks ahead, if it stayed on its owner and
                                               that is the last rank which sees it

    The first two are one message if they go equally far, which is always the case without a mask.
    """
    before, now, onward = at
    kv, dkv = now - onward, before - now
    goes = bool(kv) and route.comes_back(now, now, onward)
    comes = bool(kv) and route.comes_back(onward, now, onward)
    grad_goes = bool(dkv) and route.reach(before) >= before
    grad_comes = bool(dkv) and route.reach(now) >= before
    hops = []
    if kv == dkv:
        hops.append(route.hop(here.part(goes, grad_goes), spare.part(comes, grad_comes), -kv))
    else:
        if kv:
            hops.append(route.hop(here.part(goes, False), spare.part(comes, False), -kv))
        if dkv:
            ends = here.part(False, grad_goes), spare.part(False, grad_comes)
            hops.append(route.hop(*ends, -dkv))
    if onward < now and onward in route.starts:
        starts, arrives = route.reach(0) == onward, route.reach(onward) == onward
        ends = fresh() if starts else None, spare.kv if arrives else None
        hops.append(route.hop(*ends, onward))
    return hops


def ring_backward(
    rank: int,
    upstream: Upstream,
    q: torch.Tensor,
    kept: Kept,
    *,
    layout: SequenceLayout,
    options: AttentionOptions,
    kv_grad_dtype: torch.dtype | None = None,
    buffers: Buffers | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Backward of one rank: q[B, S/cp, Hq, D], `kept` from `ring_forward`, and the `Upstream` of
    this rank's rows. Messages use `buffers`; the results do not.

    Returns dq, dk, dv of this rank's rows, summed over all ranks, in q's dtype. If `kv_grad_dtype`
    is given, dk and dv have that dtype (the hybrid adds them to those of other ranks).
    """
    route, grad_dtype = _Route(rank, layout, options), compute_dtype(q)
    visits, (far, *own) = route.visits[::-1], kept
    B, s, _, D = q.shape
    shape = (2, B, own[0].shape[2], s, D) if far is None else far.shape
    buffers = Buffers() if buffers is None else buffers
    here, spare = (_Message(q, shape, grad_dtype, buffers) for _ in range(2))
    if far is not None:
        here.kv.copy_(far)
    taken = []

    def fresh() -> torch.Tensor:
        taken.append(buffers.take(shape, q.dtype, q.device))
        return _heads_first(*own, out=taken[-1])

    kv_grad_dtype = kv_grad_dtype or q.dtype
    dq = None
    for before, at, onward in zip((visits[0], *visits), visits, (*visits[1:], 0)):
        yield from _backward_hops(route, here, spare, fresh, (before, at, onward))
        block, first = route.block(at), route.reach(at) == at
        into: Sequence[torch.Tensor | None] = (None, None)
        if first:  # no dK‖dV is received for this block: its sum starts on this rank
            into = [*spare.dkv.zero_().transpose(2, 3)]
        if block is not None:
            k, v = here.kv.transpose(2, 3)
            dq, *tile = block_bwd(upstream, q, k, v, block, grad_dtype=grad_dtype, into=(dq, *into))
        yield None  # the received dK‖dV is that of the block just attended
        if block is not None and not first:
            for whole, part in zip(spare.dkv.transpose(2, 3), tile):
                whole.add_(part)
        if onward == 0 < at and route.stays:
            _heads_first(*own, out=spare.kv)
        here, spare = spare, here
    assert dq is not None  # a rank's own block is always visible
    dk, dv = here.dkv.transpose(2, 3).to(kv_grad_dtype, copy=True)
    buffers.give_back(here.bytes, spare.bytes, *taken)
    return dq.to(q.dtype), dk, dv


# ------------------------------------------------------------------ 2. on a process group


def _ring_forward(
    shards: Shards, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    layout, options = shards.layout, shards.options
    steps = ring_forward(
        shards.rank, q, k, v, layout=layout, options=options, sinks=sinks, buffers=shards.buffers
    )
    o, lse, kept = run_on_group(steps, shards.group, overlap=shards.overlap)
    return o, lse, (q, *kept)


def _ring_backward(
    shards: Shards, upstream: Upstream, saved: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (q, *kept), layout, options = saved, shards.layout, shards.options
    steps = ring_backward(
        shards.rank, upstream, q, kept, layout=layout, options=options, buffers=shards.buffers
    )
    return run_on_group(steps, shards.group, overlap=shards.overlap)


RING = ForwardBackward(_ring_forward, _ring_backward)
