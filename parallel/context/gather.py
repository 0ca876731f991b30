"""Context parallelism by gathering K and V of the whole sequence (Llama 3, arXiv:2407.21783).

An all-gather of K‖V, one attention call, and in the backward the same all-gather again and a
reduce-scatter of fp32 dK‖dV. As many bytes as the ring, over all links at once, and no merge; but
exposed, and with memory for the whole K‖V (and backward dK‖dV).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from warpweave.kernels.attention.backward import block_bwd
from warpweave.kernels.attention.forward import block_fwd
from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.reference import compute_dtype
from warpweave.parallel.collectives import start_all_gather, start_reduce_scatter
from warpweave.parallel.context.strategy import ForwardBackward, Shards
from warpweave.parallel.layout import SequenceLayout

Tensors = tuple[torch.Tensor, ...]


def gather_forward(
    shards: Shards, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Forward of this rank's queries over all keys; see `strategy.ForwardBackward`."""
    k_all, v_all = _start_gather(k, v, shards.layout, shards.group)()
    of_runs = [
        block_fwd(q[:, rows], k_all, v_all, options, sinks=sinks)
        for rows, options in _calls(shards)
    ]
    o, lse = of_runs[0] if len(of_runs) == 1 else map(torch.cat, zip(*of_runs), (1, 2))
    return o, lse, (q, k, v)  # not the whole K‖V: P times less, gathered again


def gather_backward(
    shards: Shards,
    do: torch.Tensor,
    saved: Tensors,
    lse: torch.Tensor,
    delta: torch.Tensor,
    o: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of this rank's queries over all keys; see `strategy.ForwardBackward`."""
    q, k, v = saved
    k_all, v_all = _start_gather(k, v, shards.layout, shards.group)()
    dqs, dk, dv = [], None, None
    for rows, options in _calls(shards):
        dq, dk, dv = block_bwd(
            do[:, rows], q[:, rows], k_all, v_all, lse[..., rows], delta[..., rows], options,
            o=None if o is None else o[:, rows], grad_dtype=compute_dtype(q), into=(None, dk, dv),
        )  # fmt: skip
        dqs.append(dq)
    dq = dqs[0] if len(dqs) == 1 else torch.cat(dqs, 1)
    dk, dv = _reduce_scatter(dk, dv, shards.layout, shards.group)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _calls(shards: Shards) -> list[tuple[slice, AttentionOptions]]:
    """The rows of q of each call of the kernel, which takes two runs, and its options."""
    runs, calls, row = shards.layout.runs(shards.rank), [], 0
    for i in range(0, len(runs), 2):
        pair = runs[i : i + 2]
        rows = slice(row, row + sum(run.length for run in pair))
        calls.append((rows, shards.options._replace(q_runs=pair)))
        row = rows.stop
    return calls


GATHER = ForwardBackward(gather_forward, gather_backward)


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
