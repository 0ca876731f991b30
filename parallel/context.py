"""Context-parallel attention: the sequence is sharded over the cp axis, every strategy in one call.

For q[B, S/cp, Hq, D] and k, v[B, S/cp, Hkv, D] in a `SequenceLayout`

    o, lse = attention(q, K, V)        K, V = the whole sequence's keys and values
    dq = local                         dk, dv = this rank's rows of sum over ranks of dK, dV

    "ring"     K‖V travel hop by hop, hidden behind the tiles; memory for two blocks (ring.py).
               Forward P-1 messages, backward P. Partial results merge.
    "gather"   all-gather of K‖V, one attention call, and a reduce-scatter of fp32 dK‖dV backward
               (Llama 3, arXiv:2407.21783). As many bytes, over all links at once, and no merge, so
               fewer launches; but exposed, and memory for the whole K‖V (and backward dK‖dV).
    "auto"     "gather" if cp <= 1 + Hq/Hkv, else "ring": up to there the whole K‖V is at most
               1 + Hkv/Hq times the size of this rank's q and o. Shapes decide, so ranks agree.

Every result equals attention on the whole sequence up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from warpweave.kernels.attention import attention, attention_bwd, attention_delta, attention_fwd
from warpweave.kernels.dispatch import once_differentiable
from warpweave.kernels.linear import grad_dtype
from warpweave.kernels.reference import compute_dtype
from warpweave.parallel.collectives import start_all_gather, start_reduce_scatter
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.ring import Attend, attention_types, ring_attention, sinks_gradient

Strategy = Literal["auto", "ring", "gather"]


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    group: dist.ProcessGroup | None,
    causal: bool = True,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int = 0,
    dropout_origin: tuple[int, int] = (0, 0),
    strategy: Strategy = "auto",
    return_lse: bool = False,
    overlap: bool = True,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the whole sequence.

    Args:
        q: [B, S/cp, Hq, D], this rank's rows of `layout`, in its order.
        k, v: [B, S/cp, Hkv, D] of the same dtype; Hkv divides Hq (grouped queries). Under autocast
            q, k and v are cast first, so messages are as small as the tensors that are attended.
        layout: who owns which position; masks compare global positions.
        group: the cp process group, ``layout.parts`` ranks; None for one part.
        causal, window, documents, scale, softcap: as `attention`, in global positions, the same on
            every rank.
        sinks: [Hq], replicated; its gradient is that of this rank's rows, a partial sum.
        dropout, dropout_seed, dropout_origin: as `attention`: the mask is that of one device.
        strategy: "ring", "gather" or "auto" (see the module).
        return_lse: also return lse[B, Hq, S/cp] (natural log; fp32, or float64 for float64).
        overlap: False waits for each ring message before computing; the results are bitwise equal.
            "gather" has nothing to overlap.
        impl: None, "triton" or "torch" for the kernels.

    Returns o[B, S/cp, Hq, D] in q's dtype, or (o, lse); both are differentiable. Every rank must
    run the backward if one does (keep ``0 * o`` in the loss of a rank without labels).

    Raises ``ValueError`` that names this rank, before anything is sent, if the shapes, dtypes or
    devices contradict each other, the layout or the group.
    """
    device = q.device.type
    if q.dtype != torch.float64 and torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    size = 1 if group is None else dist.get_world_size(group)
    check_strategy(strategy)
    problem = _problem(q, k, v, layout, size)
    if problem:
        rank = 0 if group is None else dist.get_rank(group)
        raise ValueError(f"context_attention, cp rank {rank} of {size}: {problem}")
    attend = Attend(
        causal, window, documents, scale, softcap, dropout, dropout_seed, dropout_origin, impl
    )
    if size == 1:
        return attention(q, k, v, sinks=sinks, return_lse=return_lse, **attend._asdict())
    if strategy == "auto":
        strategy = choose_strategy(layout.parts, q.shape[2], k.shape[2])
    if strategy == "gather":
        o, lse = _GatherAttention.apply(q, k, v, sinks, layout, group, attend)
    else:
        o, lse = ring_attention(
            q, k, v, layout=layout, group=group, attend=attend, sinks=sinks, overlap=overlap
        )
    return (o, lse) if return_lse else o


def check_strategy(strategy: Strategy) -> Strategy:
    """`strategy` itself; ValueError if it is no known name. Layers ask when they are made."""
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {get_args(Strategy)}, got {strategy!r}")
    return strategy


def choose_strategy(parts: int, heads: int, kv_heads: int) -> Strategy:
    """What "auto" means for `parts` ranks of `heads` query and `kv_heads` key heads each."""
    return "gather" if parts <= 1 + heads // kv_heads else "ring"


def _problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: SequenceLayout,
    size: int,
) -> str | None:
    """The first constraint that does not hold, or None."""
    shapes = f"q{[*q.shape]}, k{[*k.shape]}, v{[*v.shape]}"
    if size != layout.parts:
        return f"the layout has {layout.parts} parts but the group has {size} ranks"
    if q.ndim != 4 or k.ndim != 4:
        return f"q, k, v must have 4 dims [B, S/cp, H, D], got {shapes}"
    if k.shape != v.shape:
        return f"k and v must have one shape, got {shapes}"
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return f"q and k must agree in B, S/cp and D, got {shapes}"
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        return f"Hq must be a multiple of Hkv, got {shapes}"
    if q.shape[1] != layout.local_len:
        return f"{layout} puts {layout.local_len} tokens on each rank, got {shapes}"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
    if not q.device == k.device == v.device:
        return f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}"
    return None


# ------------------------------------------------------------------ all-gather of K and V


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, layout, group, attend):
        k_all, v_all = _start_gather(k, v, layout, group)()
        options = {"q_runs": layout.runs(dist.get_rank(group)), **attend._asdict()}
        o, lse = attention_fwd(q, k_all, v_all, sinks=sinks, **options)
        # not the whole K‖V: P times less, gathered again
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.layout, ctx.group, ctx.options = layout, group, options
        ctx.of_sinks = None if sinks is None else grad_dtype(sinks)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, sinks, o, lse = ctx.saved_tensors
        wait_for_kv = _start_gather(k, v, ctx.layout, ctx.group)
        do = torch.zeros_like(o) if do is None else do.contiguous()
        delta = attention_delta(o, do, dlse, impl=ctx.options["impl"])
        dq, dk, dv = attention_bwd(
            do, q, *wait_for_kv(), lse, delta, o=o if dlse is None else None,
            grad_dtype=compute_dtype(q), **ctx.options,
        )  # fmt: skip
        dk, dv = _reduce_scatter(dk, dv, ctx.layout, ctx.group)
        dsinks = sinks_gradient(sinks, lse, delta, ctx.of_sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, *[None] * 3

    @staticmethod
    def spmd_typecheck(
        *, q: Any, k: Any, v: Any, sinks: Any, group: Any, attend: Attend
    ) -> tuple[Any, Any]:
        """Attention of the whole sequence, of which every rank keeps its own rows."""
        return attention_types(q, k, v, sinks, group, attend)


def _start_gather(
    k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Send k, v[B, S/cp, H, D] in one all-gather; the result waits for k, v[B, S, H, D].

    Those are in order of position, one run, so the kernel sees no layout but that of its queries.
    """
    pending = start_all_gather(torch.stack((k, v)), group)

    def wait() -> tuple[torch.Tensor, torch.Tensor]:
        shards = pending.wait().unflatten(0, (layout.parts, 2)).unbind(0)
        k_all, v_all = layout.unshard(shards, 2)
        return k_all, v_all

    return wait


def _reduce_scatter(
    dk: torch.Tensor, dv: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk, dv[B, S, H, D]{partial cp} -> this rank's rows of their sums, [B, S/cp, H, D]."""
    whole = torch.stack((dk, dv))
    terms = torch.cat([layout.shard(whole, rank, 2) for rank in range(layout.parts)])
    dk, dv = start_reduce_scatter(terms, group).wait()
    return dk, dv
