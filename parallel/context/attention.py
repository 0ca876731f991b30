"""Context-parallel attention: one call for every strategy, on a sequence sharded over the cp axis.

Rank r holds q[B, S/cp, Hq, D] and k, v[B, S/cp, Hkv, D], its rows in a `SequenceLayout`:

    o, lse = attention(q, K, V)        K, V = keys and values of the whole sequence
    dq                                 of this rank's rows
    dk, dv                             this rank's rows of dK, dV summed over all ranks

    strategy    communication                                     memory beyond q, k, v, o
    "ring"      K‖V rotate: P-1 messages forward, P backward,     two blocks of K‖V
                hidden behind the tiles; partial results merge
                by their lse (ring.py)
    "ulysses"   all-to-all from sequence shards to head shards    q, k, v of the whole sequence
                and back; exposed, but bytes fall with cp, and    for 1/cp of the heads
                nothing merges (ulysses.py)
    "hybrid"    Ulysses within groups, a ring over the groups     both, for 1/U of the heads
    "gather"    all-gather of K‖V and one attention call;         K‖V of the whole sequence (in
                backward a reduce-scatter of fp32 dK‖dV;          the backward also dK‖dV)
                exposed (gather.py)
    "stream"    "gather" head by head: the next KV head's         K‖V of two KV heads
                all-gather hidden behind this one's attention
    "auto"      one of the above, by bytes sent. With measured `Links` instead of a name, the one
                with the least exposed time that fits the memory. `explain` lists bytes, memory and
                seconds of each. Only shapes, mask and speeds decide, so ranks agree.

Every result equals attention over the whole sequence up to the order of sums.
"""

from __future__ import annotations

from typing import Unpack, get_args

import torch
import torch.distributed as dist

from warpweave.kernels.attention import attention_delta, attention_dsinks
from warpweave.kernels.attention.function import attend
from warpweave.kernels.attention.keywords import AttentionKeywords, check_keywords
from warpweave.kernels.attention.options import (
    AttentionOptions,
    Upstream,
    check_boundaries,
    prepared,
)
from warpweave.kernels.runtime.dispatch import once_differentiable
from warpweave.kernels.runtime.wgrad import grad_dtype
from warpweave.parallel.buffers import Buffers
from warpweave.parallel.collectives import group_rank, group_size
from warpweave.parallel.context.explain import by_bytes, explain
from warpweave.parallel.context.gather import GATHER, STREAM
from warpweave.parallel.context.kept import attend_once
from warpweave.parallel.context.links import Links
from warpweave.parallel.context.ring import RING
from warpweave.parallel.context.strategy import Shards
from warpweave.parallel.context.ulysses import ULYSSES
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.words import Strategy

ContextGroup = dist.ProcessGroup | None | tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
_STRATEGIES = {
    "ring": RING, "ulysses": ULYSSES, "hybrid": ULYSSES, "gather": GATHER, "stream": STREAM,
}  # fmt: skip


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    group: ContextGroup,
    sinks: torch.Tensor | None = None,
    strategy: Strategy | Links = "auto",
    return_lse: bool = False,
    overlap: bool = True,
    buffers: Buffers | None = None,
    **keywords: Unpack[AttentionKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to keys and values of the whole sequence.

    Args:
        q: [B, S/cp, Hq, D], this rank's rows in the order of `layout`.
        k, v: [B, S/cp, Hkv, D] and [B, S/cp, Hkv, Dv] of the same dtype. Hq must be divisible by
            Hkv (grouped queries). Under autocast q, k and v are cast before they are sent. If Dv
            differs from D, the narrower tensor is padded with zeros, which are also sent.
        layout: the positions that each rank holds; masks compare global positions.
        group: the cp process group of ``layout.parts`` ranks; None for one rank. For "hybrid", a
            pair of groups: the ring and the Ulysses group. Rank i of the ring and u of the Ulysses
            group, of U ranks, is cp rank i U + u of the layout, which must not be striped.
        sinks: [Hq], replicated. Its gradient is {partial cp}: the sum over this rank's rows.
        strategy: "ring", "gather", "stream", "ulysses", "hybrid" or "auto" (see the module), or
            `Links`: the speeds by which to choose, the same on every rank (`measure_links`).
        return_lse: also return lse[B, Hq, S/cp] (natural log; fp32, or float64 for float64).
        overlap: False waits for each ring message before its tile; the results are bitwise equal.
            "stream" then starts each all-gather only after the attention of the previous head;
            "gather" and "ulysses" have nothing to overlap.
        buffers: memory for the ring's messages, shared by consecutive calls (layers,
            micro-batches); None allocates it for this call only.
        keywords: causal, window, documents, scale, softcap, dropout, dropout_seed, dropout_origin,
            deterministic and impl as in `attention`, the same on every rank. Masks, also that of
            dropout, are those of one device: they are functions of global positions.

    Returns o[B, S/cp, Hq, Dv] in q's dtype, or (o, lse); both are differentiable. If one rank runs
    the backward, every rank must (keep ``0 * o`` in the loss of a rank without labels).

    Raises ``ValueError`` that names this rank, before anything is sent, if the shapes, dtypes or
    devices contradict each other, the layout or the group.

    Examples:
        >>> from warpweave import Mesh
        >>> from warpweave.parallel.layout import SequenceLayout
        >>> mesh = Mesh().connect()  # under torchrun: Mesh(cp=2).connect(), and 2 parts below
        >>> q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))  # 16 is S / cp
        >>> context_attention(q, k, v, layout=SequenceLayout(16, 1), group=mesh.context).shape
        torch.Size([2, 16, 4, 8])
    """
    check_strategy(strategy)
    ring, ulysses_group = group if isinstance(group, tuple) else (group, None)
    rank = group_rank(ring) * group_size(ulysses_group) + group_rank(ulysses_group)
    size = group_size(ring) * group_size(ulysses_group)
    check_keywords("context_attention", keywords, block=False)  # the layout has the runs
    options = AttentionOptions(**keywords)
    try:
        q, k, padded_v, options = prepared(q, k, v, sinks, options)
        _check_layout(layout, size, q, k)
        if size > 1:  # on one device the operator checks documents itself
            check_boundaries(options, layout.seq_len, layout.seq_len)
            heads = q.shape[2], k.shape[2]
            ulysses = group_size(ulysses_group) if isinstance(group, tuple) else None
            if isinstance(strategy, Links):
                strategy = _least_exposed(layout, q, k, options, ulysses, strategy)
            mask = {"causal": options.causal, "window": options.window}
            taken = resolve_strategy(strategy, layout, heads, ulysses, **mask)
            options = _without_padding(options, layout, q.device)
            if taken == "ulysses":
                ring, ulysses_group = None, ring
    except ValueError as error:
        raise ValueError(f"context_attention, cp rank {rank} of {size}: {error}") from None
    if size == 1:
        o, lse = attend(q, k, padded_v, sinks, options)
    else:
        where = layout, ring, ulysses_group
        o, lse = _ContextAttention.apply(
            q, k, padded_v, sinks, _STRATEGIES[taken], *where, options, overlap, buffers
        )
    o = o if o.shape[3] == v.shape[3] else o[..., : v.shape[3]]
    return (o, lse) if return_lse else o


def check_strategy(strategy: Strategy | Links) -> Strategy | Links:
    """Return `strategy`; ValueError if its name is unknown. Layers call this in their __init__."""
    if not isinstance(strategy, Links) and strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be Links or one of {get_args(Strategy)}, got {strategy!r}")
    return strategy


def _least_exposed(
    layout: SequenceLayout,
    q: torch.Tensor,
    k: torch.Tensor,
    options: AttentionOptions,
    ulysses: int | None,
    links: Links,
) -> Strategy:
    """Return the strategy that `explain` marks as "auto" at these speeds. Raise ValueError if none
    fits into ``links.memory``."""
    B, _, heads, head_dim = q.shape
    costs = explain(
        layout, heads=heads, kv_heads=k.shape[2], head_dim=head_dim, batch=B, itemsize=q.itemsize,
        causal=options.causal, window=options.window, ulysses=ulysses, links=links,
    )  # fmt: skip
    if not costs:
        return "hybrid"  # does not fit; `resolve_strategy` raises the reason
    taken = next((cost for cost in costs if cost.auto), None)
    if taken is None:
        least = min(costs, key=lambda cost: cost.memory)
        raise ValueError(
            f"no strategy fits into Links.memory = {links.memory} bytes; {least.strategy!r} needs "
            f"the least, {least.memory} bytes"
        )
    return taken.strategy


def _check_layout(layout: SequenceLayout, size: int, q: torch.Tensor, k: torch.Tensor) -> None:
    if size != layout.parts:
        raise ValueError(f"the layout has {layout.parts} parts but the group has {size} ranks")
    if q.shape[1] != layout.local_len or k.shape[1] != layout.local_len:
        raise ValueError(
            f"{layout} puts {layout.local_len} tokens on each rank, but got q{[*q.shape]}, "
            f"k{[*k.shape]}"
        )


def _without_padding(
    options: AttentionOptions, layout: SequenceLayout, device: torch.device
) -> AttentionOptions:
    """The options with a mask that hides the layout's padding by making it a separate document. A
    causal mask hides it anyway, because padding has the last positions."""
    if options.causal or layout.padded_len == layout.seq_len:
        return options
    end = torch.full((1,), layout.seq_len, device=device)
    documents = torch.zeros_like(end) if options.documents is None else options.documents
    end = end.to(documents.dtype).expand(*documents.shape[:-1], 1)
    bounds = torch.cat((documents.clamp(max=layout.seq_len), end), -1)
    return options._replace(documents=bounds, table=None)


def resolve_strategy(
    strategy: Strategy,
    layout: SequenceLayout,
    heads: tuple[int, int],
    ulysses: int | None,
    *,
    causal: bool = True,
    window: int | None = None,
) -> Strategy:
    """Return the strategy, with "auto" resolved by bytes sent.

    `layout` is that of the sequence over all cp ranks, `heads` are the numbers of query heads and
    KV heads of a rank. `ulysses` is the Ulysses degree of a pair of groups (ring, Ulysses group);
    None means one group. Raises ValueError if the strategy does not fit these.
    """
    pair = ulysses is not None
    if strategy == "auto":
        strategy = by_bytes(layout, *heads, causal, window, ulysses)
    if pair != (strategy == "hybrid"):
        raise ValueError(
            f"strategy {strategy!r} needs "
            f"{'one process group' if pair else 'a pair of process groups (ring, Ulysses)'}, got "
            f"{'a pair' if pair else 'one'}"
        )
    if layout.kind == "balanced" and strategy in ("ring", "hybrid"):
        raise ValueError(
            f"a balanced layout supports 'gather', 'stream' and 'ulysses', not {strategy!r}"
        )
    if strategy not in ("ulysses", "hybrid"):
        return strategy
    degree = layout.parts if ulysses is None else ulysses
    if heads[0] < degree:
        raise ValueError(
            f"Ulysses over {degree} ranks needs at least {degree} query heads, got {heads[0]}"
        )
    if layout.kind == "striped" and 1 < degree < layout.parts:
        raise ValueError("strategy 'hybrid' needs a zigzag or contiguous layout, got striped")
    return strategy


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, strategy, layout, group, ulysses_group, options, overlap,
                buffers=None):  # fmt: skip
        heads = q.shape[2], k.shape[2]
        shards = Shards(layout, group, options, heads, ulysses_group, overlap, buffers)
        o, lse, saved = attend_once(lambda: strategy.forward(shards, q, k, v, sinks), (q, k, v))
        ctx.save_for_backward(sinks, o, lse, *saved)
        ctx.strategy, ctx.shards = strategy, shards
        ctx.of_sinks = None if sinks is None else grad_dtype(sinks)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        sinks, o, lse, *saved = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do.contiguous()
        delta = attention_delta(o, do, dlse, impl=ctx.shards.options.impl)
        upstream = Upstream(do, lse, delta, o if dlse is None else None)
        grads = ctx.strategy.backward(ctx.shards, upstream, saved)
        dsinks = None  # {partial cp}: the sum over this rank's rows
        if sinks is not None:
            dsinks = attention_dsinks(sinks, lse, delta).to(ctx.of_sinks)
        return *grads, dsinks, *[None] * 7

    @staticmethod
    def spmd_typecheck(*, q, k, v, sinks, group, ulysses_group, options):
        """Type it as attention of the whole sequence, of which every rank keeps its own rows.

        q, k, v{S(1) cp} are gathered and attended, then o and lse are sharded again. Attention is
        linear only in v. Heads and their sinks may be sharded on other axes; sequence and head_dim
        may not. spmd_types is imported only here, because it is a development extra.
        """
        from spmd_types import R, S, rules

        documents = options.documents
        axes = [axis for axis in (ulysses_group, group) if axis is not None]
        for axis in axes:
            q, k, v = (rules.all_gather(x, axis, src=S(1), dst=R) for x in (q, k, v))
        if documents is not None:
            of = ("_", "b_", "b__")[documents.ndim - 1]
            q = rules.einsum(f"b_h_,{of}->b_h_", q, documents)
        if sinks is not None:
            q = rules.einsum("b_h_,h->b_h_", q, sinks)
        o = rules.einsum("b_h_,b_h_,b_h_->b_h_", q, k, v, linear_in=(2,))
        lse = rules.einsum("b_h_,b_h_->bh_", q, k)
        for axis in reversed(axes):
            o = rules.convert(o, axis, src=R, dst=S(1))
            lse = rules.convert(lse, axis, src=R, dst=S(2))
        return o, lse
