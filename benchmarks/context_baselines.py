"""Hand-written baselines of `context.py`: what others do with a sequence sharded over ranks.

Each is a differentiable function of this rank's q, k, v[B, H, S/P, D] (as many KV heads as query
heads) on the default group that returns its rows of causal attention:

    usual_ring     zig-zag shards, SDPA's flash kernel on every block, partial results merged by
                   ``o - sigmoid(lse_b - lse) (o - o_b)``, every hop waited for before its block;
                   gradients of K and V travel P hops (as in zhuzilin/ring-flash-attention and
                   torch's context_parallel, except for the waiting)
    exact_ring     the same, with outputs and gradients merged and summed in float64: its only error
                   is the kernel's own on every block. Nobody uses it, and it is not timed
    plain_ulysses  contiguous shards, one all-to-all for each of q, k, v and o and each of their
                   gradients, SDPA between (arXiv:2309.14509)
    rsa            ring self-attention, arXiv:2105.13120: contiguous shards, K goes around and fills
                   the scores of this rank's queries to all keys, one softmax over whole rows, then
                   V goes around. Backward: V and K go around again; gradients of all keys and
                   values are summed by all-reduce, and a rank keeps its rows, as in Colossal-AI
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _next(*tensors: Tensor) -> list[Tensor]:
    """Send each tensor to the next rank; wait for and return what the previous rank sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived = [torch.empty_like(x) for x in tensors]
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % size) for x in tensors]
    ops += [dist.P2POp(dist.irecv, x, (rank - 1) % size) for x in arrived]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return arrived


# ---------------------------------------------------------------- the usual ring


def _tile(step: int, rows: int) -> tuple[slice, slice, bool]:
    """Return the rows and keys used with the block from `step` ranks back, and if it is masked."""
    half, whole = rows // 2, slice(0, rows)
    if step == 0:
        return whole, whole, True
    if step <= dist.get_rank():  # all rows attend to its first half
        return whole, slice(0, half), False
    return slice(half, rows), whole, False


class _UsualRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, wide):
        o, lse, block, ctx.wide = q, q, (k, v), wide
        for step in range(dist.get_world_size()):
            if step:
                block = _next(*block)
            rows, keys, causal = _tile(step, q.shape[2])
            o_b, lse_b = _flash(q[:, :, rows], *(x[:, :, keys] for x in block), 0.0, causal)
            if step == 0:
                o, lse = o_b.to(wide), lse_b.to(wide)
                continue
            weight = torch.sigmoid(lse_b - lse[:, :, rows])[..., None]
            o[:, :, rows] -= weight * (o[:, :, rows] - o_b)
            lse[:, :, rows] -= F.logsigmoid(lse[:, :, rows] - lse_b)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse.float())
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        block, dq = (k, v), torch.zeros_like(q, dtype=ctx.wide)
        of_block = [torch.zeros_like(x, dtype=ctx.wide) for x in block]
        for step in range(dist.get_world_size()):
            if step:
                block, of_block = _next(*block), _next(*of_block)
            rows, keys, causal = _tile(step, q.shape[2])
            of_rows = [x[:, :, rows] for x in (do, q, o, lse)]
            parts = _flash_backward(
                *of_rows[:2], *(x[:, :, keys] for x in block), *of_rows[2:], 0.0, causal
            )
            dq[:, :, rows] += parts[0]
            for whole, part in zip(of_block, parts[1:]):
                whole[:, :, keys] += part
        return *(x.to(q.dtype) for x in (dq, *_next(*of_block))), None


def usual_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See the module's docstring."""
    return _UsualRing.apply(q, k, v, torch.float32)


def exact_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See the module's docstring."""
    return _UsualRing.apply(q, k, v, torch.float64)


# ---------------------------------------------------------------- Ulysses


class _AllToAll(torch.autograd.Function):
    """Split x along `cut`, join it along `join`, in one all-to-all; backward is the reverse."""

    @staticmethod
    def forward(ctx, x, cut, join):
        ctx.dims = join, cut
        pieces = [piece.contiguous() for piece in x.chunk(dist.get_world_size(), cut)]
        send = torch.stack(pieces)
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send)
        return torch.cat(recv.unbind(0), join)

    @staticmethod
    def backward(ctx, dx):
        return _AllToAll.apply(dx, *ctx.dims), None, None


def plain_ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See the module's docstring."""
    q, k, v = (_AllToAll.apply(x, 1, 2) for x in (q, k, v))
    return _AllToAll.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)


# ---------------------------------------------------------------- ring self-attention


def _round(x: Tensor, use: Callable[[Tensor, int], None]) -> None:
    """Call `use` with every rank's block of x and the rank that owns it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(size):
        if step:
            (x,) = _next(x)
        use(x, (rank - step) % size)


class _RSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        rows, size, scale = q.shape[2], dist.get_world_size(), 1 / math.sqrt(q.shape[3])
        scores, o = q.new_empty(*q.shape[:3], rows * size), torch.zeros_like(q)

        def score(block: Tensor, owner: int) -> None:
            scores[..., owner * rows : (owner + 1) * rows] = q @ block.mT * scale

        def add(block: Tensor, owner: int) -> None:
            o.add_(p[..., owner * rows : (owner + 1) * rows] @ block)

        _round(k, score)
        at = dist.get_rank() * rows + torch.arange(rows)
        p = scores.masked_fill_(torch.arange(rows * size) > at[:, None], -math.inf).softmax(-1)
        _round(v, add)
        ctx.save_for_backward(q, k, v, p)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        rows, scale = q.shape[2], 1 / math.sqrt(q.shape[3])
        ds, dq = torch.empty_like(p), torch.zeros_like(q)

        def through(block: Tensor, owner: int) -> None:
            ds[..., owner * rows : (owner + 1) * rows] = do @ block.mT

        def add(block: Tensor, owner: int) -> None:
            dq.add_(ds[..., owner * rows : (owner + 1) * rows] @ block)

        _round(v, through)
        ds = p * (ds - (ds * p).sum(-1, keepdim=True)) * scale
        _round(k, add)
        dk, dv = ds.mT @ q, p.mT @ do
        for whole in (dk, dv):
            dist.all_reduce(whole)
        mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
        return dq, dk[:, :, mine].contiguous(), dv[:, :, mine].contiguous()


rsa: Callable[[Tensor, Tensor, Tensor], Tensor] = _RSA.apply
