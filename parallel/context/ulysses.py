"""Ulysses: ranks trade rows for heads (Jacobs et al. 2023, arXiv:2309.14509), and its hybrid with a
ring (Fang and Zhao 2024, arXiv:2405.07719).

Of the cp ranks, U neighbours trade: each sends the others its rows of q, k, v for the heads that
they attend, and has afterwards the U ranks' rows of its own heads:

    q, k, v[B, S/cp, H, D]  --all-to-all-->  [B, U S/cp, H/U, D]  --attention-->  o  --all-to-all-->

With U = cp those are all rows, and attention is that of one device on fewer heads. With U < cp the
ring goes over what is left, ``cp / U`` ranks that hold the same heads: the hybrid, in which every
hop carries 1/U of the heads and there are U times fewer hops.

Query heads are cut as evenly as they come, rank u has those from ``H u / U`` on, and the KV heads
that they read. Where several ranks read one KV head each gets a copy, and its gradient, a sum over
those ranks, travels in fp32; otherwise all is in the inputs' dtype but lse and delta, a number per
row and head. One message there, q, k and v, and one back, lse and o; the backward's are delta and
do, and dk, dv and dq. In elements that leave a rank if U divides H and Hkv:
forward (2 H + 2 Hkv) D S/cp (U-1)/U and H S/cp (U-1)/U of lse, the backward as many again.

With U = cp nothing is re-associated but dk and dv of KV heads that are copied, or that a rank's
query heads read unevenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from warpweave.kernels.attention.backward import block_bwd
from warpweave.kernels.attention.forward import block_fwd
from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose
from warpweave.parallel.collectives import group_rank, group_size
from warpweave.parallel.context.messages import AllToAll, Steps, run_on_group
from warpweave.parallel.context.ring import Kept, ring_backward, ring_forward
from warpweave.parallel.context.strategy import ForwardBackward, Shards
from warpweave.parallel.layout import SequenceLayout

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Trade:
    """Who attends what among `ranks` neighbours that trade rows of `heads` and `kv_heads`.

    Attributes:
        layout: of the sequence over all cp ranks.
        ranks: U, which divides ``layout.parts``; neighbours in rank order.
        heads, kv_heads: of q, and of k and v.
    """

    layout: SequenceLayout
    ranks: int
    heads: int
    kv_heads: int

    @property
    def rows(self) -> SequenceLayout:
        """How the rows of the U neighbours lie among one another."""
        if self.ranks == self.layout.parts:
            return self.layout.padded
        return SequenceLayout(self.layout.local_len * self.ranks, self.ranks, self.layout.kind)

    @property
    def ring(self) -> SequenceLayout:
        """How the sequence lies on groups of U neighbours."""
        parts = self.layout.parts // self.ranks
        kind = "contiguous" if parts == 1 else self.layout.kind
        return SequenceLayout(self.layout.padded_len, parts, kind)

    def q(self, rank: int) -> range:
        """The query heads that neighbour `rank` attends."""
        return range(self.heads * rank // self.ranks, self.heads * (rank + 1) // self.ranks)

    def kv(self, rank: int) -> range:
        """The KV heads that those read."""
        group, q = self.heads // self.kv_heads, self.q(rank)
        return range(q.start // group, (q.stop - 1) // group + 1)

    def read(self, rank: int) -> list[int]:
        """For each of `rank`'s query heads its KV head, counted from the first that it has."""
        group, q = self.heads // self.kv_heads, self.q(rank)
        return [head // group - q.start // group for head in q]

    def even(self, rank: int) -> bool:
        """Whether every KV head of `rank` is read by as many of its query heads."""
        read = self.read(rank)
        return len({read.count(head) for head in read}) == 1

    @property
    def copied(self) -> bool:
        """Whether some KV head is read on several ranks."""
        return sum(len(self.kv(r)) for r in range(self.ranks)) > self.kv_heads

    def of_heads(self, options: AttentionOptions, rank: int) -> AttentionOptions:
        """The options of `rank`'s heads: dropout is keyed by the heads' numbers in the whole."""
        sample, head = options.dropout_origin
        return options._replace(dropout_origin=(sample, head + self.q(rank).start))


Shapes = Sequence[Sequence[Sequence[int]]]  # for each neighbour those of its tensors


def _start_exchange(
    me: int,
    pieces: Sequence[Sequence[torch.Tensor]],
    dtypes: Sequence[torch.dtype],
    shapes: Shapes,
) -> Steps[list[Tensors]]:
    """Send the tensors of piece r to neighbour r in these dtypes, the widest first, in one message.

    Returns for each tensor what every neighbour sent, of the given shapes, there at the next wait;
    of the own piece, which is not copied into the message, the tensor itself.
    """
    device = pieces[0][0].device
    own = [x.to(dtype) for x, dtype in zip(pieces[me], dtypes)]
    theirs = [[x.shape for x in p] if r != me else [] for r, p in enumerate(pieces)]
    send, sizes, leaving = _message(theirs, dtypes, device)
    mine = [of if r != me else [] for r, of in enumerate(shapes)]
    recv, recv_sizes, arriving = _message(mine, dtypes, device)
    for there, piece in zip(leaving, pieces):
        for part, x in zip(there, piece):
            part.copy_(x)
    yield AllToAll(send, recv, sizes, recv_sizes)
    return [*zip(*(part or own for part in arriving))]


def _message(
    shapes: Shapes, dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[torch.Tensor, list[int], list[list[torch.Tensor]]]:
    """A flat buffer, the bytes of each neighbour's part, and the tensors in it."""
    widths = [dtype.itemsize for dtype in dtypes]
    counts = [[math.prod(shape) * n for shape, n in zip(part, widths)] for part in shapes]
    sizes = [-(-sum(part) // widths[0]) * widths[0] for part in counts]  # the next one's alignment
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    tensors = []
    for part, numbers, piece in zip(shapes, counts, flat.split_with_sizes(sizes)):
        cut = piece.split_with_sizes([*numbers, len(piece) - sum(numbers)])
        tensors.append([x.view(t).view(shape) for x, t, shape in zip(cut, dtypes, part)])
    return flat, sizes, tensors


def _share_of_heads(x: torch.Tensor, heads: range, dim: int = 2) -> torch.Tensor:
    return x.narrow(dim, heads.start, len(heads))


# ------------------------------------------------------------------ 1. the steps of one rank


def ulysses_forward(
    rank: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    trade: Trade,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, Kept]]:
    """Forward of cp rank `rank`: q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D], sinks[Hq] or None.

    Returns o (like q), lse[B, Hq, S/cp] (fp32 or float64) and what `ulysses_backward` wants: of
    this rank's heads q, lse, o (on the CPU path, which it spares a copy; else None) and k, v (or
    the K‖V that a ring kept here).
    """
    hop, me = divmod(rank, trade.ranks)
    everyone, rows = range(trade.ranks), trade.rows
    B, s, _, D = q.shape
    narrow = q.dtype
    of_q, of_kv = ([len(of(r)) for r in everyone] for of in (trade.q, trade.kv))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # a head's rows lie together
    pieces = [
        [_share_of_heads(q, trade.q(r), 1), *(_share_of_heads(x, trade.kv(r), 1) for x in (k, v))]
        for r in everyone
    ]
    shapes = [(B, n, s, D) for n in (of_q[me], of_kv[me], of_kv[me])]
    arrived = yield from _start_exchange(me, pieces, [narrow] * 3, [shapes] * trade.ranks)
    yield None
    q, k, v = (rows.unshard(x, 2).transpose(1, 2) for x in arrived)
    if not trade.even(me):
        k, v = (x[:, :, trade.read(me)] for x in (k, v))
    sinks = None if sinks is None else _share_of_heads(sinks, trade.q(me), 0)
    options = trade.of_heads(options, me)
    if trade.ring.parts == 1:
        o, lse = block_fwd(q, k, v, options, sinks=sinks)
        kept: Kept = (k, v)
    else:
        o, lse, kept = yield from ring_forward(
            hop, q, k, v, layout=trade.ring, options=options, sinks=sinks
        )
    of_lse, of_o = yield from _start_exchange(
        me,
        [(rows.shard(lse, r, 2), rows.shard(o, r, 1)) for r in everyone],
        [lse.dtype, narrow],
        [((B, n, s), (B, s, n, D)) for n in of_q],
    )
    yield None
    kept_o = o if choose(options.impl, o) == "torch" else None
    return torch.cat(of_o, 2), torch.cat(of_lse, 1), (q, lse, kept_o, *kept)


def ulysses_backward(
    rank: int,
    do: torch.Tensor,
    saved: Kept,
    delta: torch.Tensor,
    *,
    trade: Trade,
    options: AttentionOptions,
    through_lse: bool,
) -> Steps[Tensors]:
    """Backward of one rank from what `ulysses_forward` saved and delta[B, Hq, S/cp]; whether a
    gradient came through lse, too, so that delta is not that of o alone.

    Returns dq, dk, dv of this rank's own rows, summed over all ranks, in the inputs' dtypes.
    """
    hop, me = divmod(rank, trade.ranks)
    everyone, rows = range(trade.ranks), trade.rows
    (B, s, _, D), n_q, n_kv = do.shape, len(trade.q(me)), len(trade.kv(me))
    q, lse, o, *kept = saved
    if through_lse:
        o = None
    of_delta, of_do = yield from _start_exchange(
        me,
        [
            [_share_of_heads(x, trade.q(r), 1) for x in (delta, do.transpose(1, 2))]
            for r in everyone
        ],
        [delta.dtype, q.dtype],
        [[(B, n_q, s), (B, n_q, s, D)]] * trade.ranks,
    )
    yield None
    do, delta = rows.unshard(of_do, 2).transpose(1, 2), rows.unshard(of_delta, 2)
    options, wide = trade.of_heads(options, me), compute_dtype(q)
    if trade.ring.parts == 1:
        k, v = kept
        dq, dk, dv = block_bwd(do, q, k, v, lse, delta, options, o=o, grad_dtype=wide)
    else:
        dq, dk, dv = yield from ring_backward(
            hop, do, q, kept, lse, delta, o=o,
            layout=trade.ring, options=options, kv_grad_dtype=wide,
        )  # fmt: skip
    if not trade.even(me):
        read = torch.tensor(trade.read(me), device=q.device)
        dk, dv = (x.new_zeros(*x.shape[:2], n_kv, D).index_add_(2, read, x) for x in (dk, dv))
    *of_dkv, of_dq = yield from _start_exchange(
        me,
        [[rows.shard(x, r, 1) for x in (dk, dv, dq)] for r in everyone],
        [wide if trade.copied else q.dtype] * 2 + [q.dtype],
        [[(B, s, len(of(r)), D) for of in (trade.kv, trade.kv, trade.q)] for r in everyone],
    )
    yield None
    dk, dv = (_sum_of_shares(x, trade).to(q.dtype) for x in of_dkv)
    return torch.cat(of_dq, 2), dk, dv


def _sum_of_shares(pieces: Tensors, trade: Trade) -> torch.Tensor:
    """x[B, S/cp, Hkv, D] of each neighbour's share of the KV heads that it has."""
    if not trade.copied:
        return torch.cat(pieces, 2)
    B, s, _, D = pieces[0].shape
    total = pieces[0].new_zeros(B, s, trade.kv_heads, D)
    for rank, piece in enumerate(pieces):
        _share_of_heads(total, trade.kv(rank)).add_(piece)
    return total


# ------------------------------------------------------------------ 2. on process groups


def _trade(shards: Shards) -> tuple[int, Trade]:
    """This rank of the cp axis, and the trade."""
    ranks = group_size(shards.neighbours)
    rank = group_rank(shards.group) * ranks + group_rank(shards.neighbours)
    return rank, Trade(shards.layout, ranks, *shards.heads)


def _ulysses_forward(
    shards: Shards, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    rank, trade = _trade(shards)
    steps = ulysses_forward(rank, q, k, v, trade=trade, options=shards.options, sinks=sinks)
    return run_on_group(steps, shards.group, shards.neighbours, overlap=shards.overlap)


def _ulysses_backward(
    shards: Shards,
    do: torch.Tensor,
    saved: Tensors,
    lse: torch.Tensor,
    delta: torch.Tensor,
    o: torch.Tensor | None,
) -> Tensors:
    rank, trade = _trade(shards)  # its own lse and o are of other heads and rows
    steps = ulysses_backward(
        rank, do, saved, delta, trade=trade, options=shards.options, through_lse=o is None
    )
    return run_on_group(steps, shards.group, shards.neighbours, overlap=shards.overlap)


ULYSSES = ForwardBackward(_ulysses_forward, _ulysses_backward)
