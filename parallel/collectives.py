"""Collectives over one group: six differentiable ones in three dual pairs, and asynchronous ones
without gradients.

Along one mesh axis a tensor is Replicated (R: one value, its gradient a partial sum), Invariant (I:
one value, one gradient), Sharded (S(d): slices along dim d) or Partial (P: a partial sum, its
gradient replicated). A differentiable collective changes that type. Its gradient is the dual
collective, between the types of the gradients::

    function          type       forward             gradient            dual
    copy_to           I -> R     x                   all-reduce          reduce_from
    reduce_from       P -> I     all-reduce          dy                  copy_to
    scatter           I -> S(d)  own slice           all-gather          gather
    gather            S(d) -> I  all-gather          own slice           scatter
    all_gather        S(d) -> R  all-gather          reduce-scatter      reduce_scatter
    reduce_scatter    P -> S(d)  reduce-scatter      all-gather          all_gather

    four ranks, x of length 4
    rank   all_gather: x -> y                     reduce_scatter: x -> y (sums over ranks)
      0    [a]  ->  [a b c d]                     [a0 b0 c0 d0]  ->  [a0+a1+a2+a3]
      1    [b]  ->  [a b c d]                     [a1 b1 c1 d1]  ->  [b0+b1+b2+b3]
      2    [c]  ->  [a b c d]                     [a2 b2 c2 d2]  ->  [c0+c1+c2+c3]
      3    [d]  ->  [a b c d]                     [a3 b3 c3 d3]  ->  [d0+d1+d2+d3]

``gather`` and ``all_gather`` have the same forward; they differ in how the result is used. If every
rank uses it identically, it is I (``gather``: each rank already has the complete gradient). If
ranks compute different things with it, it is R (``all_gather``: their gradients are terms of a
sum).

Results of type R or I are bitwise equal on all ranks of the group. Gathers and slices are exact;
sums over ranks are re-associated. bf16 and fp16 terms are summed in fp32 and rounded once at the
end. Dim 0 is gathered and scattered without a local copy; any other dim costs one copy. Second
derivatives are not supported.

``group=None`` is an axis of size 1: the functions return `x` itself and need no process group.

The pairs are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism,
Korthikanti et al. 2022, arXiv:2205.05198). The types are those of spmd_types, whose checker reads
the ``spmd_typecheck`` rules below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from warpweave.kernels.runtime.dispatch import once_differentiable

# torch 2.13 renamed both. Earlier versions only have the old names, and later ones warn about them.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms of `dtype` are summed over ranks: fp32 for bf16 and fp16."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def group_size(group: dist.ProcessGroup | None) -> int:
    """The number of ranks of `group`; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def by_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return True if gloo carries messages of `device` within `group`: a posted receive is then
    just a buffer. On NCCL it is a kernel that runs until the message arrives."""
    return f"{device.type}:gloo" in dist.get_backend_config(group)


# ---------------------------------------------------------------- asynchronous, without gradients


class Pending:
    """A collective that has been started. ``wait()`` returns its result; on CUDA it waits in stream
    order, without a host sync."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], Any]) -> None:
        # `finish` holds the buffers, so none is freed while a transfer reads or writes it.
        self._work, self._finish = work, finish

    def wait(self) -> Any:
        """Return the result. The current stream (on a CPU, the caller) waits for the collective."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._finish()


def start_all_reduce_(x: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start summing `x` over the ranks of `group`, in place and in the dtype of `x`.

    Args:
        x: contiguous, with the same shape and dtype on every rank. Don't read or write it before
            ``wait()``.
        group: the ranks to sum over; None leaves `x` unchanged.

    Returns:
        A ``Pending`` whose result is `x`, which then holds the sum.

    Raises:
        ValueError: `x` is not contiguous.
    """
    if group is None:
        return Pending(None, lambda: x)
    if not x.is_contiguous():
        raise ValueError(
            f"an in-place all-reduce needs a contiguous tensor, got strides {x.stride()}; "
            "pass x.contiguous()"
        )
    return Pending(dist.all_reduce(x, group=group, async_op=True), lambda: x)


def start_all_gather(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> Pending:
    """Start an all-gather along `dim` of the slices `x` of all ranks of `group`, in rank order.

    Args:
        x: x[..., n/R, ...] at `dim`, with the same shape and dtype on every rank. Don't write to it
            before ``wait()``.
        group: the R ranks; None returns `x`.
        dim: 0 needs no local copy; any other dim needs one copy of the result.

    Returns:
        A ``Pending`` whose result is x[..., n, ...], contiguous.

    Raises:
        ValueError: `x` does not have this dim.
    """
    dim = _normal_dim(x, dim)
    if group is None:
        return Pending(None, lambda: x)
    ranks = dist.get_world_size(group)
    x = x.contiguous()
    out = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    work = all_gather_into(out, x, group=group, async_op=True)
    if dim == 0:
        return Pending(work, lambda: (x, out)[1])

    def finish() -> torch.Tensor:
        stacked = out.unflatten(0, (ranks, x.shape[0]))
        return stacked.movedim(0, dim).flatten(dim, dim + 1)

    return Pending(work, finish)


def start_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> Pending:
    """Start a reduce-scatter: sum `x` over the ranks of `group` and give each its slice of `dim`.

    The sum is in the dtype of `x`. Pass fp32 to add low-precision terms.

    Args:
        x: x[..., n, ...] at `dim`, with the same shape and dtype on every rank. Don't write to it
            before ``wait()``.
        group: the R ranks; None returns `x`.
        dim: 0 needs no local copy; any other dim needs one copy of `x`.

    Returns:
        A ``Pending`` whose result is x[..., n/R, ...], contiguous.

    Raises:
        ValueError: `x` does not have this dim, or its size is not divisible by R.
    """
    dim = _normal_dim(x, dim)
    if group is None:
        return Pending(None, lambda: x)
    ranks = dist.get_world_size(group)
    size = _slice_size(x, dim, group)
    if dim == 0:
        terms = x.contiguous()
        out = x.new_empty((size, *x.shape[1:]))
    else:
        terms = x.unflatten(dim, (ranks, size)).movedim(dim, 0).contiguous()
        out = x.new_empty(terms.shape[1:])
        terms = terms.flatten(0, 1)
    work = reduce_scatter_into(out, terms, group=group, async_op=True)
    return Pending(work, lambda: (terms, out)[1])


def start_exchange(
    send: torch.Tensor | None,
    recv: torch.Tensor | None,
    dest: int,
    source: int,
    group: dist.ProcessGroup,
) -> Pending:
    """Start sending `send` to rank `dest` of `group` and receiving `recv` from rank `source`.

    Both tensors must be contiguous and match the other end's tensor in dtype and size. Before
    ``wait()``, don't read or write `recv` and don't write `send`. Pass None for no message in that
    direction; the other rank must then also pass None.

    Returns:
        A ``Pending`` whose result is `recv`.
    """
    sends = [] if send is None else [(send, dest)]
    receives = [] if recv is None else [(recv, source)]
    batch = start_batch(sends, receives, group)
    return Pending(None, lambda: (batch.wait(), send, recv)[2])


def start_batch(
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    group: dist.ProcessGroup,
) -> Pending:
    """Start messages to and from ranks of `group` that begin and end together.

    Args:
        sends: contiguous tensors, each with its destination rank. Don't write to them before
            ``wait()``.
        receives: buffers, each with its source rank and the dtype and size of what is sent. Don't
            read or write them before ``wait()``. Messages from one rank to another arrive in the
            order in which both ranks list them.

    Returns:
        A ``Pending`` whose result is `receives`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # One batch: NCCL deadlocks if two ranks order individual sends and receives differently.
    ends = [(dist.isend, *send) for send in sends] + [(dist.irecv, *recv) for recv in receives]
    batch = [dist.P2POp(op, x, group=group, group_peer=at) for op, x, at in ends]
    works = dist.batch_isend_irecv(batch) if batch else []

    def finish() -> Any:
        try:
            while works:
                works.pop().wait()
        except RuntimeError as error:
            peers = sorted({at for _, _, at in ends})
            raise RuntimeError(
                f"rank {rank} of {size}: a message to or from ranks {peers} failed: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return (sends, receives)[1]

    return Pending(None, finish)


def start_all_to_all(
    send: torch.Tensor,
    recv: torch.Tensor,
    send_sizes: list[int],
    recv_sizes: list[int],
    group: dist.ProcessGroup | None,
) -> Pending:
    """Start an all-to-all: part r of `send` goes to rank r, and part r of `recv` comes from it.

    Both are flat and contiguous, of one dtype, with parts in rank order, including one for this
    rank itself. The size that rank a sends to b must be the size that b expects from a. Don't read
    or write either before ``wait()``.

    Returns:
        A ``Pending`` whose result is `recv`.
    """
    if group is None:
        return Pending(None, lambda: recv.copy_(send))
    work = dist.all_to_all_single(recv, send, recv_sizes, send_sizes, group=group, async_op=True)
    return Pending(work, lambda: (send, recv)[1])


def own_slice(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> torch.Tensor:
    """Return this rank's slice x[..., n/R, ...] of the replicated x[..., n, ...], as a view.

    Raises ``ValueError`` if `x` does not have `dim`, or its size is not divisible by the R ranks.
    """
    dim = _normal_dim(x, dim)
    if group is None:
        return x
    size = _slice_size(x, dim, group)
    return x.narrow(dim, dist.get_rank(group) * size, size)


def _normal_dim(x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} does not exist in a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def _slice_size(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> int:
    ranks = dist.get_world_size(group)
    if x.shape[dim] % ranks:
        raise ValueError(
            f"rank {dist.get_rank(group)} of {ranks}: dim {dim} of shape {tuple(x.shape)} is not "
            f"divisible by the {ranks} ranks of the group"
        )
    return x.shape[dim] // ranks


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `x` over the ranks, as a new tensor of the same dtype, summed in ``sum_dtype``."""
    terms = x.to(sum_dtype(x.dtype), memory_format=torch.contiguous_format, copy=True)
    return start_all_reduce_(terms, group).wait().to(x.dtype)


def _summed_slice(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    return start_reduce_scatter(x.to(sum_dtype(x.dtype)), group, dim).wait().to(x.dtype)


# ---------------------------------------------------------------- differentiable


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(dy, ctx.group), None

    @staticmethod
    def spmd_typecheck(*, x, group):
        from spmd_types import I, R, rules

        return rules.convert(x, group, src=I, dst=R)


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None

    @staticmethod
    def spmd_typecheck(*, x, group):
        from spmd_types import I, P, rules

        return rules.all_reduce(x, group, src=P, dst=I)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return own_slice(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return start_all_gather(dy, ctx.group, ctx.dim).wait(), None, None

    @staticmethod
    def spmd_typecheck(*, x, group, dim):
        from spmd_types import I, S, rules

        return rules.convert(x, group, src=I, dst=S(dim))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return start_all_gather(x, group, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_slice(dy, ctx.group, ctx.dim), None, None

    @staticmethod
    def spmd_typecheck(*, x, group, dim):
        from spmd_types import I, S, rules

        return rules.all_gather(x, group, src=S(dim), dst=I)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return start_all_gather(x, group, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _summed_slice(dy, ctx.group, ctx.dim), None, None

    @staticmethod
    def spmd_typecheck(*, x, group, dim):
        from spmd_types import R, S, rules

        return rules.all_gather(x, group, src=S(dim), dst=R)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _summed_slice(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return start_all_gather(dy, ctx.group, ctx.dim).wait(), None, None

    @staticmethod
    def spmd_typecheck(*, x, group, dim):
        from spmd_types import P, S, rules

        return rules.reduce_scatter(x, group, src=P, dst=S(dim))


def copy_to(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Megatron's f: the invariant `x`, which each rank of `group` then uses differently.

    Forward:  y{R} = x{I}, a view.
    Gradient: dx{I} = all-reduce(dy{P}), the sum over the ranks, re-associated.
    """
    return x if group is None else _CopyTo.apply(x, group)


def reduce_from(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Megatron's g: the sum of the partial results `x` of all ranks of `group`, on every rank.

    Forward:  y{I} = all-reduce(x{P}), re-associated; a new tensor.
    Gradient: dx{R} = dy{I}, exact.
    """
    return x if group is None else _ReduceFrom.apply(x, group)


def scatter(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> torch.Tensor:
    """This rank's slice of the invariant `x` along `dim`.

    Forward:  y[n/R]{S(dim)} = own slice of x[n]{I}, a view; no communication.
    Gradient: dx[n]{I} = all-gather(dy[n/R]{S(dim)}), exact.

    Raises ``ValueError`` if `x` does not have this dim, or its size is not divisible by R.
    """
    return x if group is None else _Scatter.apply(x, group, _normal_dim(x, dim))


def gather(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> torch.Tensor:
    """All-gather along `dim` of a tensor that every rank then uses identically.

    Forward:  y[n]{I} = all-gather(x[n/R]{S(dim)}), exact.
    Gradient: dx[n/R]{S(dim)} = own slice of dy[n]{I}, a view; no communication.

    Raises ``ValueError`` if `x` does not have this dim.
    """
    return x if group is None else _Gather.apply(x, group, _normal_dim(x, dim))


def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> torch.Tensor:
    """All-gather along `dim` of a tensor that each rank then uses differently.

    Forward:  y[n]{R} = all-gather(x[n/R]{S(dim)}), exact.
    Gradient: dx[n/R]{S(dim)} = reduce-scatter(dy[n]{P}), re-associated.

    Raises ``ValueError`` if `x` does not have this dim.
    """
    return x if group is None else _AllGather.apply(x, group, _normal_dim(x, dim))


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> torch.Tensor:
    """Reduce-scatter: sum the partial results over the ranks and give each its slice of `dim`.

    Forward:  y[n/R]{S(dim)} = reduce-scatter(x[n]{P}), re-associated.
    Gradient: dx[n]{R} = all-gather(dy[n/R]{S(dim)}), exact.

    Raises ``ValueError`` if `x` does not have this dim, or its size is not divisible by R.
    """
    return x if group is None else _ReduceScatter.apply(x, group, _normal_dim(x, dim))


def moved_by(node: Any) -> tuple[Callable | None, dist.ProcessGroup | None]:
    """The function that made a node of an autograd graph (`copy_to`, `scatter`, `gather` or
    `all_gather`) and its group; (None, None) for any other node."""
    move = _MOVES.get(type(node))
    return (None, None) if move is None else (move, node.group)


_MOVES: dict[type, Callable] = {
    _CopyTo._backward_cls: copy_to,
    _Scatter._backward_cls: scatter,
    _Gather._backward_cls: gather,
    _AllGather._backward_cls: all_gather,
}
