"""Context parallelism by gathering K and V of the whole sequence (Llama 3, arXiv:2407.21783).

An all-gather of K‖V, one attention call, and in the backward the same all-gather again and a
reduce-scatter of fp32 dK‖dV. As many bytes as the ring, over all links at once, and no merge; but
exposed, and with memory for the whole K‖V (and backward dK‖dV).

"stream" does so for one KV head after the other: the next head's K‖V travels while this one is
attended, and the memory is that of two heads' K‖V (and backward one's dK‖dV). As many bytes in
Hkv times as many messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

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
    shards: Shards,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    each: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Forward of this rank's queries over all keys, of `each` KV heads (None: all) at a time; see
    `strategy.ForwardBackward`."""
    o, lse = [], []
    for heads, k_all, v_all, options in _gathered_heads(shards, k, v, each):
        of_heads = None if sinks is None else sinks[heads]
        calls = [
            block_fwd(q[:, rows, heads], k_all, v_all, of_rows, sinks=of_heads)
            for rows, of_rows in _kernel_calls(shards, options)
        ]
        o.append(_concatenated([o for o, _ in calls], 1))
        lse.append(_concatenated([lse for _, lse in calls], 2))
    return (
        _concatenated(o, 2),
        _concatenated(lse, 1),
        (q, k, v),
    )  # not the whole K‖V: P times less, gathered again


def gather_backward(
    shards: Shards,
    do: torch.Tensor,
    saved: Tensors,
    lse: torch.Tensor,
    delta: torch.Tensor,
    o: torch.Tensor | None,
    each: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of this rank's queries over all keys; see `strategy.ForwardBackward`."""
    q, k, v = saved
    grads = []
    for heads, k_all, v_all, options in _gathered_heads(shards, k, v, each):
        dqs, dk, dv = [], None, None
        for rows, of_rows in _kernel_calls(shards, options):
            dq, dk, dv = block_bwd(
                do[:, rows, heads], q[:, rows, heads], k_all, v_all,
                lse[:, heads, rows], delta[:, heads, rows], of_rows,
                o=None if o is None else o[:, rows, heads],
                grad_dtype=compute_dtype(q), into=(None, dk, dv),
            )  # fmt: skip
            dqs.append(dq.to(q.dtype))
        own = _reduce_scatter(dk, dv, shards.layout, shards.group)
        grads.append((_concatenated(dqs, 1), *(x.to(k.dtype) for x in own)))
    dq, dk, dv = (_concatenated(of_heads, 2) for of_heads in zip(*grads))
    return dq, dk, dv


def _concatenated(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _gathered_heads(
    shards: Shards, k: torch.Tensor, v: torch.Tensor, each: int | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, AttentionOptions]]:
    """For `each` KV heads at a time (None: all): the query heads that read them, their gathered
    K and V, and their options. The next ones are under way meanwhile, with `overlap`."""
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
    """The rows of q of each call of the kernel, which takes two runs, and its options."""
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
