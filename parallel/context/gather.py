"""Context parallelism by all-gather of K and V (Llama 3, arXiv:2407.21783).

    forward    K‖V = all-gather of k‖v      [B, S/cp, Hkv, D] -> [B, S, Hkv, D]
               o = attention(q, K, V)       of this rank's rows, one call
    backward   K‖V = the same all-gather    not kept, because it is cp times as large as k‖v
               dq, dK‖dV{partial cp} = backward of that call
               dk‖dv = reduce-scatter of dK‖dV, fp32 (float64 for float64), sums re-associated

It sends as many bytes as a ring that skips nothing, and needs no merge. However, its communication
is exposed, and it holds K‖V of the whole sequence (also dK‖dV in the backward).

"stream" does this for one KV head at a time, and starts the next head's all-gather before it
attends the current head. It sends as many bytes, in Hkv times as many messages, and needs memory
for K‖V of two heads.

    "stream", three KV heads; a rank's work over time
    network    gather h0 | gather h1 | gather h2 |
    compute              | attend h0 | attend h1 | attend h2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from warpweave.kernels.attention.backward import block_bwd
from warpweave.kernels.attention.forward import block_fwd
from warpweave.kernels.attention.options import AttentionOptions, Upstream
from warpweave.kernels.reference import compute_dtype
from warpweave.parallel.collectives import start_all_gather, start_reduce_scatter
from warpweave.parallel.context.strategy import ForwardBackward, Shards
from warpweave.parallel.layout import SequenceLayout

Tensors = tuple[torch.Tensor, ...]


def gather_forward(
    shards: Shards,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    each: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Run the forward of this rank's queries over all keys, gathered for `each` KV heads at a time
    (None: all at once). Tensors are as in `strategy.ForwardBackward`."""
    o, lse = [], []
    for heads, k_all, v_all, options in _gathered_heads(shards, k, v, each):
        of_heads = None if sinks is None else sinks[heads]
        calls = [
            block_fwd(q[:, rows, heads], k_all, v_all, of_rows, sinks=of_heads)
            for rows, of_rows in _kernel_calls(shards, options)
        ]
        o.append(_concatenated([o for o, _ in calls], 1))
        lse.append(_concatenated([lse for _, lse in calls], 2))
    return _concatenated(o, 2), _concatenated(lse, 1), (q, k, v)  # K‖V is gathered again


def gather_backward(
    shards: Shards, upstream: Upstream, saved: Tensors, each: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the backward of `gather_forward`, with the same `each`. Tensors are as in
    `strategy.ForwardBackward`."""
    q, k, v = saved
    grads = []
    for heads, k_all, v_all, options in _gathered_heads(shards, k, v, each):
        dqs, dk, dv = [], None, None
        for rows, of_rows in _kernel_calls(shards, options):
            dq, dk, dv = block_bwd(
                upstream.part(rows, heads), q[:, rows, heads], k_all, v_all, of_rows,
                grad_dtype=compute_dtype(q), into=(None, dk, dv),
            )  # fmt: skip
            dqs.append(dq.to(q.dtype))
        own = _reduce_scatter(dk, dv, shards.layout, shards.group)
        grads.append((_concatenated(dqs, 1), *(x.to(k.dtype) for x in own)))
    dq, dk, dv = (_concatenated(of_heads, 2) for of_heads in zip(*grads))
    return dq, dk, dv


def _concatenated(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _gathered_heads(
    shards: Shards, k: torch.Tensor, v: torch.Tensor, each: int | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, AttentionOptions]]:
    """For `each` KV heads at a time (None: all), yield the query heads that read them, K and V of
    the whole sequence, and their options. With `overlap`, the next all-gather has then started."""
    H, Hkv = shards.heads
    groups = [slice(at, at + (each or Hkv)) for at in range(0, Hkv, each or Hkv)]
    sample, first = shards.options.dropout_origin

    def start(kv: slice) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        return _start_gather(k[:, :, kv], v[:, :, kv], shards.layout, shards.group)

    pending = start(groups[0])
    for kv, following in zip(groups, (*groups[1:], None)):
        k_all, v_all = pending()
        if following is not None and shards.overlap:
            pending = start(following)
        heads = slice(kv.start * H // Hkv, kv.stop * H // Hkv)
        options = shards.options._replace(dropout_origin=(sample, first + heads.start))
        yield heads, k_all, v_all, options
        if following is not None and not shards.overlap:
            pending = start(following)


def _kernel_calls(
    shards: Shards, options: AttentionOptions
) -> list[tuple[slice, AttentionOptions]]:
    """The kernel calls for this rank's queries: the rows of q and the options for each.

    A kernel accepts at most two runs of positions (a zigzag layout has two); a balanced layout may
    need more calls.
    """
    runs, calls, row = shards.layout.runs(shards.rank), [], 0
    for i in range(0, len(runs), 2):
        pair = runs[i : i + 2]
        rows = slice(row, row + sum(run.length for run in pair))
        calls.append((rows, options._replace(q_runs=pair)))
        row = rows.stop
    return calls


GATHER = ForwardBackward(gather_forward, gather_backward)
STREAM = ForwardBackward(partial(gather_forward, each=1), partial(gather_backward, each=1))


def _start_gather(
    k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Start one all-gather of k, v[B, S/cp, H, D]; calling the result waits for K, V[B, S, H, D].

    K and V are in order of position, so only the queries have a layout for the kernel.
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
    """dK, dV[B, S, H, D]{partial cp} -> dk, dv[B, S/cp, H, D], this rank's rows of the sums."""
    whole = torch.stack((dk, dv))
    terms = torch.cat([layout.shard(whole, rank, 2) for rank in range(layout.parts)])
    dk, dv = start_reduce_scatter(terms, group).wait()
    return dk, dv
