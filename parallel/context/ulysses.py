"""Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all-to-alls from sequence shards to head shards.

An all-to-all turns a sequence shard of all heads into the whole sequence of some heads. This file
also has the hybrid with ring attention (Fang and Zhao 2024, arXiv:2405.07719).

With U ranks in the Ulysses group (U is the Ulysses degree; U = cp for pure Ulysses):

    q, k, v[B, S/cp, H, D]  --all-to-all-->  q, k, v[B, U S/cp, H/U, D]
                                             attention of the rank's own heads
    o[B, S/cp, H, D]        <--all-to-all--  o[B, U S/cp, H/U, D]

    cp = 4, U = 4: eight heads h0..h7,        cp = 4, U = 2: hybrid of two Ulysses groups and two
    sequence shards s0..s3                    rings; each step of a ring carries 1/U of the heads

    rank  before      attends                 rank  before      attends      rings
      0   s0, h0-h7   s0-s3, h0-h1              0   s0, h0-h7   s0-s1, h0-h3  ranks 0 and 2
      1   s1, h0-h7   s0-s3, h2-h3              1   s1, h0-h7   s0-s1, h4-h7  ranks 1 and 3
      2   s2, h0-h7   s0-s3, h4-h5              2   s2, h0-h7   s2-s3, h0-h3
      3   s3, h0-h7   s0-s3, h6-h7              3   s3, h0-h7   s2-s3, h4-h7

The backward does the same with do and delta in one direction, and dq, dk and dv in the other.

One all-to-all carries q, k and v; another carries o and lse back. Those of the backward carry do
and delta, and dq, dk and dv. Elements that leave a rank, if H and Hkv are divisible by U: in the
forward (2 H + 2 Hkv) D S/cp (U-1)/U, and H S/cp (U-1)/U of lse; the same number in the backward.
Everything is sent in the inputs' dtype except lse and delta, which are one fp32 number (float64 for
float64) per row and head.

Exceptions. H need not be divisible by U: rank u has the query heads from floor(H u / U) on. If the
query heads of several ranks read one KV head (GQA with Hkv < U), each of these ranks gets a copy of
it. The gradient of that head, a sum over these ranks, is sent in fp32. With U = cp, all results are
exact except dk and dv of KV heads that are copied, or read by unequal numbers of a rank's query
heads. Those are re-associated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warpweave.kernels.attention.backward import block_bwd
from warpweave.kernels.attention.forward import block_fwd
from warpweave.kernels.attention.options import AttentionOptions, Upstream
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose
from warpweave.parallel.buffers import Buffers
from warpweave.parallel.collectives import group_size
from warpweave.parallel.context.ring import Kept, ring_backward, ring_forward
from warpweave.parallel.context.strategy import ForwardBackward, Shards
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.messages import AllToAll, Steps, run_on_group

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class HeadSplit:
    """The heads and rows that each of the `ranks` of a Ulysses group attends.

    Attributes:
        layout: of the sequence over all cp ranks.
        ranks: U, the Ulysses degree. ``layout.parts`` is divisible by it; U consecutive cp ranks
            form a group.
        heads, kv_heads: of q, and of k and v, on one rank before the all-to-all.
    """

    layout: SequenceLayout
    ranks: int
    heads: int
    kv_heads: int

    @property
    def rows(self) -> SequenceLayout:
        """The layout of a group's rows over its U ranks."""
        if self.ranks == self.layout.parts:
            return self.layout.padded
        return SequenceLayout(self.layout.local_len * self.ranks, self.ranks, self.layout.kind)

    @property
    def ring(self) -> SequenceLayout:
        """The layout of the sequence over the ring, that is, over the cp / U Ulysses groups."""
        parts = self.layout.parts // self.ranks
        kind = "contiguous" if parts == 1 else self.layout.kind
        return SequenceLayout(self.layout.padded_len, parts, kind)

    def q(self, rank: int) -> range:
        """The query heads that rank `rank` of the group attends."""
        return range(self.heads * rank // self.ranks, self.heads * (rank + 1) // self.ranks)

    def kv(self, rank: int) -> range:
        """The KV heads that these query heads read."""
        group, q = self.heads // self.kv_heads, self.q(rank)
        return range(q.start // group, (q.stop - 1) // group + 1)

    def read(self, rank: int) -> list[int]:
        """For each query head of `rank`, the KV head that it reads, as an index into `kv(rank)`."""
        group, q = self.heads // self.kv_heads, self.q(rank)
        return [head // group - q.start // group for head in q]

    def even(self, rank: int) -> bool:
        """Return True if each KV head of `rank` is read by the same number of its query heads."""
        read = self.read(rank)
        return len({read.count(head) for head in read}) == 1

    @property
    def copied(self) -> bool:
        """Return True if several ranks read some KV head, so each of them gets a copy."""
        return sum(len(self.kv(r)) for r in range(self.ranks)) > self.kv_heads

    def of_heads(self, options: AttentionOptions, rank: int) -> AttentionOptions:
        """`rank`'s attention options: dropout is keyed by a head's index among all heads."""
        sample, head = options.dropout_origin
        return options._replace(dropout_origin=(sample, head + self.q(rank).start))


Shapes = Sequence[Sequence[Sequence[int]]]  # per rank of the group, the shapes of its tensors


def _start_exchange(
    me: int, parts: Sequence[Sequence[torch.Tensor]], dtypes: Sequence[torch.dtype], shapes: Shapes
) -> Steps[list[Tensors]]:
    """Start one all-to-all in which rank r of the group gets the tensors ``parts[r]``.

    `dtypes` are those of the tensors in the message, the widest first. For each tensor, return what
    every rank sent, in the given shapes; it is valid after the next wait. What this rank sends to
    itself is not copied into the message.
    """
    device = parts[0][0].device
    own = [x.to(dtype) for x, dtype in zip(parts[me], dtypes)]
    theirs = [[x.shape for x in part] if r != me else [] for r, part in enumerate(parts)]
    send, sizes, leaving = _message(theirs, dtypes, device)
    mine = [of if r != me else [] for r, of in enumerate(shapes)]
    recv, recv_sizes, arriving = _message(mine, dtypes, device)
    for slots, part in zip(leaving, parts):
        for slot, x in zip(slots, part):
            slot.copy_(x)
    yield AllToAll(send, recv, sizes, recv_sizes)
    return [*zip(*(part or own for part in arriving))]


def _message(
    shapes: Shapes, dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[torch.Tensor, list[int], list[list[torch.Tensor]]]:
    """A flat buffer, the size in bytes of each rank's part, and each part's tensors as views."""
    widths = [dtype.itemsize for dtype in dtypes]
    counts = [[math.prod(shape) * n for shape, n in zip(part, widths)] for part in shapes]
    sizes = [-(-sum(part) // widths[0]) * widths[0] for part in counts]  # the next one's alignment
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    tensors = []
    for part, numbers, data in zip(shapes, counts, flat.split_with_sizes(sizes)):
        cut = data.split_with_sizes([*numbers, len(data) - sum(numbers)])
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
    split: HeadSplit,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
    buffers: Buffers | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, Kept]]:
    """Forward of cp rank `rank`: q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D], sinks[Hq] or None.

    Returns o (like q), lse[B, Hq, S/cp] (fp32 or float64) and what `ulysses_backward` needs: q, lse
    and o of this rank's heads, and their k and v (in the hybrid the K‖V that `ring_forward` saved).
    o is kept on the CPU path only, where it saves a copy; elsewhere it is None.
    """
    hop, me = divmod(rank, split.ranks)
    everyone, rows = range(split.ranks), split.rows
    B, s, _, D = q.shape
    narrow = q.dtype
    of_q, of_kv = ([len(of(r)) for r in everyone] for of in (split.q, split.kv))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # rows of a head are contiguous in messages
    parts = [
        [_share_of_heads(q, split.q(r), 1), *(_share_of_heads(x, split.kv(r), 1) for x in (k, v))]
        for r in everyone
    ]
    shapes = [(B, n, s, D) for n in (of_q[me], of_kv[me], of_kv[me])]
    arrived = yield from _start_exchange(me, parts, [narrow] * 3, [shapes] * split.ranks)
    yield None
    q, k, v = (rows.unshard(x, 2).transpose(1, 2) for x in arrived)
    if not split.even(me):
        k, v = (x[:, :, split.read(me)] for x in (k, v))
    sinks = None if sinks is None else _share_of_heads(sinks, split.q(me), 0)
    options = split.of_heads(options, me)
    if split.ring.parts == 1:
        o, lse = block_fwd(q, k, v, options, sinks=sinks)
        kept: Kept = (k, v)
    else:
        o, lse, kept = yield from ring_forward(
            hop, q, k, v, layout=split.ring, options=options, sinks=sinks, buffers=buffers
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
    split: HeadSplit,
    options: AttentionOptions,
    through_lse: bool,
    buffers: Buffers | None = None,
) -> Steps[Tensors]:
    """Backward of cp rank `rank`: do[B, S/cp, Hq, D], what `ulysses_forward` saved, and
    delta[B, Hq, S/cp] = rowsum(o do) - dlse. `through_lse` is True if there is a dlse.

    Returns dq, dk, dv of this rank's rows, summed over all ranks, in the inputs' dtypes.
    """
    hop, me = divmod(rank, split.ranks)
    everyone, rows = range(split.ranks), split.rows
    (B, s, _, D), n_q, n_kv = do.shape, len(split.q(me)), len(split.kv(me))
    q, lse, o, *kept = saved
    if through_lse:
        o = None
    sent = delta, do.transpose(1, 2)
    of_delta, of_do = yield from _start_exchange(
        me,
        [[_share_of_heads(x, split.q(r), 1) for x in sent] for r in everyone],
        [delta.dtype, q.dtype],
        [[(B, n_q, s), (B, n_q, s, D)]] * split.ranks,
    )
    yield None
    do, delta = rows.unshard(of_do, 2).transpose(1, 2), rows.unshard(of_delta, 2)
    options, wide = split.of_heads(options, me), compute_dtype(q)
    upstream = Upstream(do, lse, delta, o)
    if split.ring.parts == 1:
        k, v = kept
        dq, dk, dv = block_bwd(upstream, q, k, v, options, grad_dtype=wide)
    else:
        dq, dk, dv = yield from ring_backward(
            hop, upstream, q, kept, layout=split.ring, options=options, kv_grad_dtype=wide,
            buffers=buffers,
        )  # fmt: skip
    if not split.even(me):
        read = torch.tensor(split.read(me), device=q.device)
        dk, dv = (x.new_zeros(*x.shape[:2], n_kv, D).index_add_(2, read, x) for x in (dk, dv))
    *of_dkv, of_dq = yield from _start_exchange(
        me,
        [[rows.shard(x, r, 1) for x in (dk, dv, dq)] for r in everyone],
        [wide if split.copied else q.dtype] * 2 + [q.dtype],
        [[(B, s, len(of(r)), D) for of in (split.kv, split.kv, split.q)] for r in everyone],
    )
    yield None
    dk, dv = (_sum_of_shares(x, split).to(q.dtype) for x in of_dkv)
    return torch.cat(of_dq, 2), dk, dv


def _sum_of_shares(parts: Tensors, split: HeadSplit) -> torch.Tensor:
    """dk or dv[B, S/cp, Hkv, D] from every rank's gradient of the KV heads that it reads. Gradients
    of one KV head from several ranks are added."""
    if not split.copied:
        return torch.cat(parts, 2)
    B, s, _, D = parts[0].shape
    total = parts[0].new_zeros(B, s, split.kv_heads, D)
    for rank, part in enumerate(parts):
        _share_of_heads(total, split.kv(rank)).add_(part)
    return total


# ------------------------------------------------------------------ 2. on process groups


def _keywords(shards: Shards) -> dict[str, Any]:
    """The keywords of both directions."""
    split = HeadSplit(shards.layout, group_size(shards.ulysses_group), *shards.heads)
    return {"split": split, "options": shards.options, "buffers": shards.buffers}


def _ulysses_forward(
    shards: Shards, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    steps = ulysses_forward(shards.rank, q, k, v, sinks=sinks, **_keywords(shards))
    return run_on_group(steps, shards.group, shards.ulysses_group, overlap=shards.overlap)


def _ulysses_backward(shards: Shards, upstream: Upstream, saved: Tensors) -> Tensors:
    do, _, delta, o = upstream  # saved lse and o are of this rank's heads
    of = _keywords(shards)
    steps = ulysses_backward(shards.rank, do, saved, delta, through_lse=o is None, **of)
    return run_on_group(steps, shards.group, shards.ulysses_group, overlap=shards.overlap)


ULYSSES = ForwardBackward(_ulysses_forward, _ulysses_backward)
