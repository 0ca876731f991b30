"""Attention on the CPU: torch's flash attention if possible, row blocks in plain torch otherwise.

Causal or full attention, also over documents, is a list of blocks of rows and keys between which
everything, or the lower triangle, is visible. Each block is one call of torch's own kernel. That
kernel supports no window, softcap or dropout. With these, up to `ROWS` queries at a time
meet the keys that any of them sees, and nothing is ever as large as Sq x Sk. Other devices, which
that kernel does not support, always use row blocks (impl="torch" is right everywhere, but not
fast).

In both cases, a part's (o, lse) is merged into what its rows already have (nothing, a sink, or the
result of an earlier call), and the parts of the gradients are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from warpweave.kernels.attention.options import AttentionOptions, Upstream
from warpweave.kernels.merge import merge_
from warpweave.kernels.reference import Run, compute_dtype, philox

ROWS = 128  # queries at a time if torch's flash attention cannot be used

_ALL, _BEYOND = slice(None), 2**62  # every sample; past every position
_Gradients = tuple[torch.Tensor, ...]  # dq, dk, dv


def attention_fwd_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    out_dtype: torch.dtype,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o[B, Sq, H, D] and lse[B, H, Sq] for resolved options; `into` is changed and returned."""
    blocks = _all_blocks(q, k, options) if _flash_can(q, options) else None
    if blocks is not None and into is None and sinks is None and _is_one_block(blocks, q):
        dtype = _torch_dtype(q, out_dtype == q.dtype)
        o, lse = _flash(q.to(dtype), k.to(dtype), v.to(dtype), blocks[0], options.scale)
        return o.contiguous().to(out_dtype), lse.contiguous()
    q, k, v = (x.to(compute_dtype(q)) for x in (q, k, v))
    o, lse = _initial_sums(q, sinks) if into is None else into
    if into is not None:  # ignore what o holds in rows that saw nothing
        o.masked_fill_(lse.isneginf().transpose(1, 2).unsqueeze(-1), 0.0)
    if blocks is not None:
        for b in blocks:
            part = _flash(q, k, v, b, options.scale)
            merge_(o[b.batch, b.q], lse[b.batch, :, b.q], *part)
    else:
        with torch.autocast(q.device.type, enabled=False):
            for rows in _row_blocks(q, k, options):
                part = _attend_rows(rows, q, k, v, options)
                merge_(o[rows.batch, rows.q], lse[rows.batch, :, rows.q], *part)
    return (o if into is not None else o.to(out_dtype)), lse


def attention_bwd_cpu(
    upstream: Upstream,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    grad_dtype: torch.dtype,
    into: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> _Gradients:
    """dq, dk, dv for resolved options; those in `into` are added to and returned.

    New ones may have any strides, usually those of q, k and v.
    """
    do, lse, delta, o = upstream
    if not _flash_can(q, options):
        grads = _start_gradients(q, k, v, into)
        wide = compute_dtype(q)
        do, q, k, v = (x.to(wide) for x in (do, q, k, v))
        if delta is None and o is not None:
            delta = (o.to(wide) * do).sum(-1).transpose(1, 2)
        upstream = Upstream(do, lse, delta)
        with torch.autocast(q.device.type, enabled=False):
            for rows in _row_blocks(q, k, options):
                _attend_backward(rows, upstream, q, k, v, options, grads)
        return _finish(grads, grad_dtype, into)
    blocks, D = _all_blocks(q, k, options), q.shape[3]
    if not blocks:
        return _finish(_start_gradients(q, k, v, into), grad_dtype, into)
    whole = _is_one_block(blocks, q) and blocks[0].k == slice(0, k.shape[1]) and into == (None,) * 3
    grads, shapes = into, [x.shape for x in (q, k, v)]
    dtype = _torch_dtype(q, whole and grad_dtype == q.dtype and o is not None)
    do, q, k, v = (x.to(dtype) for x in (do, q, k, v))
    group = 1 if dtype == compute_dtype(q) else q.shape[2] // k.shape[2]
    if group > 1:  # torch would add the heads of a group in bfloat16; add them in float32
        k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    if o is None:
        # torch computes delta itself, from o and do. One more column replaces it with ours:
        # (do, -delta) . (v, 1) - sum(0 do) = do . v - delta, and a column of 0 in q and k changes
        # no score.
        do = torch.cat([do, -delta.transpose(1, 2).unsqueeze(-1).to(dtype)], -1)
        q, k, v = _widen(q, 0.0), _widen(k, 0.0), _widen(v, 1.0)
        o = torch.zeros_like(do)
    o = o.to(dtype)
    o = o if o.stride(-1) == 1 else o.contiguous()
    for b in blocks:
        parts = _flash_backward(do, q, k, v, o, lse, b, options.scale)
        parts = tuple(x[..., :D] for x in parts)
        if group > 1:
            heads = (x.unflatten(2, (-1, group)) for x in parts[1:])
            parts = parts[0], *(x.sum(3, dtype=compute_dtype(q)) for x in heads)
        at = ((b.batch, rows) for rows in (b.q, b.k, b.k))
        grads = tuple(map(_added, grads, shapes, at, parts))
    return _finish(grads, grad_dtype, into)


# ---------------------------------------------------------------- 1. what is added to


def _initial_sums(q: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of rows that have seen nothing, or only their sink."""
    B, S, H, _ = q.shape
    o = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((B, H, S), -float("inf"), dtype=q.dtype, device=q.device)
    return o, lse if sinks is None else lse.copy_(sinks[:, None])


def _start_gradients(q, k, v, into) -> _Gradients:
    dtype = compute_dtype(q)
    return tuple(
        torch.zeros(x.shape, dtype=dtype, device=x.device) if grad is None else grad
        for x, grad in zip((q, k, v), into)
    )


def _added(
    grad: torch.Tensor | None, shape: torch.Size, at: tuple[slice, slice], part: torch.Tensor
) -> torch.Tensor:
    """Add `part` to some rows of `grad`, which has this shape; None is zero."""
    if grad is None and part.shape == shape:
        return part
    grad = part.new_zeros(shape) if grad is None else grad
    grad[at] += part
    return grad


def _finish(grads, grad_dtype, into) -> _Gradients:
    return tuple(
        grad.to(grad_dtype) if given is None else given for grad, given in zip(grads, into)
    )


# ---------------------------------------------------------------- 2. torch's flash attention


class _Block(NamedTuple):
    """Rows of q and of k between which everything is visible, or (causal) the lower triangle."""

    q: slice
    k: slice
    causal: bool
    batch: slice = _ALL


def _flash_can(q: torch.Tensor, options: AttentionOptions) -> bool:
    if options.window or options.softcap or options.dropout or q.device.type != "cpu":
        return False
    return all(run.stripes == 1 for run in (*options.q_runs, *options.k_runs))


def _is_one_block(blocks: list[_Block], q: torch.Tensor) -> bool:
    """Return True if one block has all queries of all samples."""
    return len(blocks) == 1 and blocks[0].q == slice(0, q.shape[1]) and blocks[0].batch == _ALL


def _all_blocks(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> list[_Block]:
    """The visible parts of every document of every sample, cut into blocks."""
    found: list[_Block] = []
    if not q.numel() or not k.numel():
        return found
    for batch, of_q, of_k in _document_groups(options.documents):
        q_parts, k_parts = _within(options.q_runs, *of_q), _within(options.k_runs, *of_k)
        for block in _visible_blocks(q_parts, k_parts, options.causal):
            found.append(block._replace(batch=batch))
    return found


_Ends = tuple[int, int]


def _document_groups(documents: torch.Tensor | None) -> Iterator[tuple[slice, _Ends, _Ends]]:
    """Samples with the same documents, and where each begins and ends among queries and keys.

    On devices other than a CPU, reading them waits for the device.
    """
    if documents is None:
        yield _ALL, (0, _BEYOND), (0, _BEYOND)
        return
    pairs = documents if documents.ndim == 3 else documents[:, None].expand(-1, 2, -1)
    for sample, sides in enumerate(pairs.tolist()):
        batch = _ALL if len(pairs) == 1 else slice(sample, sample + 1)
        for ends in zip(*(pairwise([0, *side, _BEYOND]) for side in sides)):
            yield batch, *ends


_Part = tuple[int, Run]  # a run and its first row


def _within(runs: Sequence[Run], start: int, stop: int) -> list[_Part]:
    """The parts of the runs at positions [start, stop)."""
    parts, row = [], 0
    for position, length, stripes in runs:
        first, end = (min(max(-((position - p) // stripes), 0), length) for p in (start, stop))
        if first < end:
            part = Run(position + first * stripes, end - first, stripes)
            parts.append((row + first, part))
        row += length
    return parts


def _visible_blocks(q_parts: list[_Part], k_parts: list[_Part], causal: bool) -> list[_Block]:
    """The visible parts, cut into blocks; blocks of consecutive rows are joined."""
    blocks: list[_Block] = []
    apart = all(a.positions[-1] < b.start for (_, a), (_, b) in pairwise(q_parts))
    if causal and q_parts and q_parts == k_parts and apart:  # ascending positions compare like rows
        (first, _), (last, (_, length, _)) = q_parts[0], q_parts[-1]
        rows = slice(first, last + length)  # consecutive, because a document cuts only its ends
        return [_Block(rows, rows, True)]
    for q_row, (q_start, q_len, _) in q_parts:
        for k_row, (k_start, k_len, _) in k_parts:
            # Queries before `first` see nothing; all other queries see the keys before `diagonal`.
            first = max(q_start, k_start) if causal else q_start
            diagonal = min(first - k_start, k_len) if causal else k_len
            reach = min(q_start + q_len - k_start, k_len) if causal else k_len
            if reach <= diagonal + 1:  # the triangle would be one key that all see, or none
                diagonal = max(reach, 0)
            rows = slice(q_row + first - q_start, q_row + q_len)
            for start, stop, triangle in ((0, diagonal, False), (diagonal, reach, True)):
                if start < stop and rows.start < rows.stop:
                    _append_block(
                        blocks, _Block(rows, slice(k_row + start, k_row + stop), triangle)
                    )
    return blocks


def _append_block(blocks: list[_Block], new: _Block) -> None:
    """Append `new`, or extend a fully visible block that it continues in rows of q or of k."""
    for n, old in enumerate(blocks):
        if old.causal or new.causal:
            continue
        if old.q == new.q and old.k.stop == new.k.start:
            blocks[n] = old._replace(k=slice(old.k.start, new.k.stop))
            return
        if old.k == new.k and old.q.stop == new.q.start:
            blocks[n] = old._replace(q=slice(old.q.start, new.q.stop))
            return
    blocks.append(new)


def _flash(q, k, v, b: _Block, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of one block of the whole q, k, v[B, S, H, D]."""
    q, k, v = q[b.batch, b.q], k[b.batch, b.k], v[b.batch, b.k]
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, b.causal, scale=scale
    )
    return o.transpose(1, 2), lse


def _flash_backward(do, q, k, v, o, lse, b: _Block, scale: float) -> _Gradients:
    """(dq, dk, dv) of a block of whole tensors."""
    do, q, o = (x[b.batch, b.q].transpose(1, 2) for x in (do, q, o))
    k, v = (x[b.batch, b.k].transpose(1, 2) for x in (k, v))
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse[b.batch, :, b.q], 0.0, b.causal, scale=scale
    )
    return tuple(x.transpose(1, 2) for x in parts)


def _torch_dtype(q: torch.Tensor, alone: bool) -> torch.dtype:
    """The dtype in which torch's flash attention computes.

    It is bfloat16 if q is, if nothing will be added to the result, and if torch computes with
    AVX-512. (If AVX-512 is disabled on a CPU that has AMX, torch's kernel raises.) It is never
    float16: torch accumulates its gradients in float16, at a tenth of float32's speed.
    """
    kept = alone and q.dtype == torch.bfloat16
    if kept and torch.backends.cpu.get_cpu_capability() == "AVX512":
        return q.dtype
    return compute_dtype(q)


def _widen(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 1), value=value)


# ---------------------------------------------------------------- 3. blocks of rows


class _Rows(NamedTuple):
    """Consecutive rows of q, and all rows of k that any of them may see."""

    batch: slice
    q: slice
    q_pos: torch.Tensor
    k: torch.Tensor  # rows
    k_pos: torch.Tensor
    q_runs: Sequence[Run]  # the positions, without their tensors
    k_runs: Sequence[Run]


def _row_blocks(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> Iterator[_Rows]:
    """Up to ROWS rows of one document at a time; rows that see no key are left out."""
    if not q.numel() or not k.numel():
        return
    back, where = options.window - 1 if options.window else _BEYOND, {"device": q.device}
    ahead = 0 if options.causal else back
    for batch, of_q, (start, stop) in _document_groups(options.documents):
        for row, (position, length, by) in _within(options.q_runs, *of_q):
            for at in range(0, length, ROWS):
                first, n = position + at * by, min(ROWS, length - at)
                last = first + (n - 1) * by
                seen = max(start, first - back), min(stop, last + 1 + ahead)
                keys = _within(options.k_runs, *seen)
                if keys:
                    yield _Rows(
                        batch,
                        slice(row + at, row + at + n),
                        torch.arange(first, last + 1, by, **where),
                        torch.cat([torch.arange(r, r + m, **where) for r, (_, m, _) in keys]),
                        torch.cat([torch.arange(m, **where) * s + p for _, (p, m, s) in keys]),
                        [Run(first, n, by)],
                        [run for _, run in keys],
                    )


def _attend_rows(
    rows: _Rows, q, k, v, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of some rows, for float32 or float64 q, k, v."""
    s, _ = _scores(rows, q, k, options)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp_()
    if options.dropout:
        p *= _dropout_factors(rows, q, options).view(p.shape)
    return _rows_of(p.flatten(2, 3) @ v[rows.batch, rows.k].transpose(1, 2), p), lse.flatten(1, 2)


def _attend_backward(
    rows: _Rows, upstream: Upstream, q, k, v, options: AttentionOptions, grads: _Gradients
) -> None:
    """Add the gradients of some rows to `grads`."""
    do, lse, delta, _ = upstream
    s, slope = _scores(rows, q, k, options)
    lse, delta = (x[rows.batch, :, rows.q].reshape(*s.shape[:4], 1) for x in (lse, delta))
    p = (s - lse.masked_fill(lse.isneginf(), 0.0)).exp_()  # masked: exp(-inf) = 0
    q_rows, do_rows = (_heads_of(x[rows.batch, rows.q], k) for x in (q, do))
    k_rows, v_rows = (x[rows.batch, rows.k].transpose(1, 2) for x in (k, v))
    dp, weight = (do_rows.flatten(2, 3) @ v_rows.mT).view(p.shape), p
    if options.dropout:
        keep = _dropout_factors(rows, q, options).view(p.shape)
        dp, weight = dp * keep, p * keep
    ds = (dp - delta) * p * options.scale
    if slope is not None:
        ds *= slope
    ds, weight = ds.flatten(2, 3), weight.flatten(2, 3)
    dq, dk, dv = grads
    dq[rows.batch, rows.q] += _rows_of(ds @ k_rows, p)
    dk[rows.batch].index_add_(1, rows.k, (ds.mT @ q_rows.flatten(2, 3)).transpose(1, 2))
    dv[rows.batch].index_add_(1, rows.k, (weight.mT @ do_rows.flatten(2, 3)).transpose(1, 2))


def _heads_of(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """x[B, rows, Hq, D] as [B, Hkv, Hq / Hkv, rows, D]."""
    return x.transpose(1, 2).unflatten(1, (k.shape[2], -1))


def _rows_of(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """x[B, Hkv, Hq / Hkv * rows, D] as [B, rows, Hq, D]; p[B, Hkv, Hq / Hkv, rows, keys]."""
    return x.unflatten(2, p.shape[2:4]).flatten(1, 2).transpose(1, 2)


def _scores(rows: _Rows, q, k, options: AttentionOptions):
    """Scores[B, Hkv, Hq / Hkv, rows, keys], -inf where masked, and the softcap's slope or None."""
    q_rows, k_rows = _heads_of(q[rows.batch, rows.q], k), k[rows.batch, rows.k].transpose(1, 2)
    s = (q_rows.flatten(2, 3) @ k_rows.mT).unflatten(2, q_rows.shape[2:4]).mul_(options.scale)
    slope = None
    if options.softcap:
        t = (s / options.softcap).tanh_()
        s, slope = t * options.softcap, 1 - t * t
    distance = rows.q_pos[:, None] - rows.k_pos
    hidden = distance < 0 if options.causal else torch.zeros_like(distance, dtype=torch.bool)
    if options.window:
        hidden |= distance.abs() >= options.window
    return s.masked_fill_(hidden, -float("inf")), slope


def _dropout_factors(rows: _Rows, q: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """0 or 1 / (1 - p) for every [B, Hq, row, key] of `rows`; the kernels draw the same words."""
    B, _, H, _ = q.shape
    low, bit, seed = 0xFFFFFFFF, 8, options.dropout_seed
    first_sample, first_head = options.dropout_origin
    sample = torch.arange(B, device=q.device)[rows.batch] + first_sample
    head = torch.arange(H, device=q.device) + first_head
    (q_pos, of_q), (k_pos, of_k) = (_draws(runs, q.device) for runs in (rows.q_runs, rows.k_runs))
    counter = torch.broadcast_tensors(
        q_pos[:, None], k_pos, head[:, None, None], sample[:, None, None, None]
    )
    words = philox([x & low for x in counter], (seed & low, seed >> 32), rounds=7)
    kept = torch.stack(words, -1) >= round(options.dropout * 2**32)
    number = 2 * (rows.q_pos & bit != 0)[:, None] + (rows.k_pos & bit != 0)
    kept = kept[:, :, of_q[:, None], of_k, number]
    return kept.to(q.dtype).mul_(1 / (1 - options.dropout))


def _draws(runs: Sequence[Run], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions without bit 3 of all draws that the rows of `runs` need, and the index of each
    row's draw among them. Every second group of eight consecutive positions shares the draws of the
    group before."""
    positions, numbers, count = [], [], 0
    for start, length, step in runs:
        at = torch.arange(length, device=device)
        if step == 1:
            first = start // 16 * 16
            eights = torch.arange(first, start + length, 16, device=device)[:, None]
            positions.append((eights + torch.arange(8, device=device)).flatten())
            at += start - first
            at = (at >> 4) * 8 + (at & 7)
        else:
            positions.append(start + at * step & ~8)
        numbers.append(at + count)
        count += len(positions[-1])
    return torch.cat(positions), torch.cat(numbers)
