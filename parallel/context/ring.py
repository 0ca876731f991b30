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
inputs), because sums kept in bf16 lose a factor that grows with P. Blocks that the mask hides from
this rank are passed on but not computed.

The order of messages and tiles is a generator per rank (`ring_forward`, `ring_backward`) that knows
no transport (`messages`). A message starts before the tile of its hop and is waited for after it;
two buffers are enough: a block is computed and sent from one while the next arrives in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from warpweave.kernels.attention.backward import block_bwd
from warpweave.kernels.attention.forward import block_fwd
from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.reference import Run, compute_dtype
from warpweave.parallel.context.messages import Hop, Steps, run_on_group
from warpweave.parallel.context.strategy import ForwardBackward, Shards
from warpweave.parallel.layout import SequenceLayout


def _visible(q_runs: Sequence[Run], k_runs: Sequence[Run], options: AttentionOptions) -> bool:
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
        any(_visible(mine, runs[r - d], options) for r, mine in enumerate(runs))
        for d in range(1, layout.parts)
    )
    return 0, *(d for d, visible in enumerate(seen, 1) if visible)


# ------------------------------------------------------------------ 1. the steps of one rank


def ring_forward(
    rank: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Forward of one rank: q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D], sinks[Hq] or None.

    Returns o (like q), lse[B, Hq, S/cp] (fp32 or float64) and kv[2, B, S/cp, Hkv, D], the K‖V of
    the farthest block, which the last hop left here and from which the backward starts.
    """
    q_runs, visits = layout.runs(rank), distances(layout, options.causal, options.window)
    here = torch.stack((k, v))
    spare = torch.empty_like(here)
    o = lse = None
    for at, onward in zip(visits, (*visits[1:], None)):
        if onward is not None:
            yield Hop(here, spare, onward - at)
        k_runs = layout.runs((rank - at) % layout.parts)
        block = options._replace(q_runs=q_runs, k_runs=k_runs)
        if o is None:  # the own block, and what each row has once
            o, lse = block_fwd(q, here[0], here[1], block, sinks=sinks, out_dtype=compute_dtype(q))
        elif _visible(q_runs, k_runs, options):
            o, lse = block_fwd(q, here[0], here[1], block, into=(o, lse))
        if onward is not None:
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

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bytes of K‖V, of dK‖dV, and of both."""
        return self._bytes[: self._split], self._bytes[self._split :], self._bytes


def _backward_hops(here: _Message, spare: _Message, kv: int, dkv: int) -> list[Hop]:
    """K‖V goes `kv` ranks back and dK‖dV `dkv`, 0 if it stays: one message where they agree."""
    if kv == dkv:
        steps = (0, 0, kv)
    else:
        steps = (kv, dkv, 0)
    parts = zip(here.parts, spare.parts, steps)
    return [Hop(send, recv, -step) for send, recv, step in parts if step]


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
    options: AttentionOptions,
    kv_grad_dtype: torch.dtype | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Backward of one rank from what `ring_forward` returned and delta[B, Hq, S/cp].

    `o` may be given if no gradient came through lse: it spares the CPU path a copy, no more.
    Returns dq, dk, dv of this rank's own rows, summed over all ranks, in the inputs' dtypes; dk and
    dv in `kv_grad_dtype` where they are to be added to others.
    """
    q_runs, grad_dtype = layout.runs(rank), compute_dtype(q)
    visits = distances(layout, options.causal, options.window)[::-1]
    kv_grad_dtype = kv_grad_dtype or kv.dtype
    here, spare = _Message(kv, grad_dtype), _Message(kv, grad_dtype)
    here.kv.copy_(kv)
    spare.dkv.zero_()  # the first message brings no gradient: nobody has computed one yet
    dq = None
    for before, at, onward in zip((visits[0], *visits), visits, (*visits[1:], 0)):
        yield from _backward_hops(here, spare, at - onward, before - at)
        k_runs = layout.runs((rank - at) % layout.parts)
        tile = None
        if _visible(q_runs, k_runs, options):
            block = options._replace(q_runs=q_runs, k_runs=k_runs)
            tile = block_bwd(
                do, q, here.kv[0], here.kv[1], lse, delta, block,
                o=o, grad_dtype=grad_dtype, into=(dq, None, None),
            )  # fmt: skip
            dq = tile[0]
        yield None  # the gradient that arrives is of the block just computed
        if tile is not None:
            spare.dkv[0].add_(tile[1])
            spare.dkv[1].add_(tile[2])
        here, spare = spare, here
    assert dq is not None  # the own block is always visible
    return dq.to(q.dtype), here.dkv[0].to(kv_grad_dtype), here.dkv[1].to(kv_grad_dtype)


# ------------------------------------------------------------------ 2. on a process group


def _forward(
    shards: Shards, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    layout, options = shards.layout, shards.options
    steps = ring_forward(shards.rank, q, k, v, layout=layout, options=options, sinks=sinks)
    o, lse, kv = run_on_group(steps, shards.group, overlap=shards.overlap)
    return o, lse, (q, kv)


def _backward(
    shards: Shards,
    do: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    delta: torch.Tensor,
    o: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (q, kv), layout, options = saved, shards.layout, shards.options
    steps = ring_backward(shards.rank, do, q, kv, lse, delta, o=o, layout=layout, options=options)
    return run_on_group(steps, shards.group, overlap=shards.overlap)


RING = ForwardBackward(_forward, _backward)
