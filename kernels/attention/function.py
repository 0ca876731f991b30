"""Attention under a mask that is a function of global token positions: right for any layout.

    s = scale q k^T, or softcap tanh(scale q k^T / softcap), where visible, else -inf
    lse = log(exp(sink) + sum_k exp(s))        p = exp(s - lse)       o = (keep p) v
    delta = sum_d(o do) - dlse                 ds = p (keep (do v^T) - delta), and with a softcap
                                                    times 1 - (s / softcap)^2
    dq = scale ds k       dk = scale ds^T q    dv = (keep p)^T do
    dsink = -sum over the head's rows of exp(sink - lse) delta

q, o: [B, Sq, Hq, D]; k, v: [B, Sk, Hkv, D], Hkv dividing Hq; lse, delta: [B, Hq, Sq], float32
(float64 for float64), natural logarithm. What is visible (causal, window, documents) is an interval
of positions per row, see `visible`: wholly masked tiles are skipped, wholly visible ones pay
for no mask. keep is 0 or 1 / (1 - dropout), drawn from global indices, see `device`.

Saved for backward: q, k, v, o and lse; p is recomputed. With the lse and delta of the whole row,
`p` of any block of keys is its share of the whole, so `attention_bwd` over blocks, summed, is
exact: that is ring attention. The gradient through lse only shifts delta. Three backward kernels
(delta; dk and dv; dq) rather than one with atomics: seven products instead of five, and every
result deterministic. `into` carries sums from block to block inside the kernels: the forward goes
on from (o, lse), the backward adds to dq, dk and dv, both in float32, in place.

A sink is one more logit per head, with no value. lse INCLUDES it, so it must enter a row once: give
`sinks` to one block's call and none to the others', or start `into` from o = 0, lse = sinks. The
backward needs no sinks but for their own gradient, which lse and delta give (`attention_dsinks`).

Rows that see neither key nor sink have o = 0, lse = -inf and zero gradients. Matrix products
accumulate in float32, half-precision p and ds are rounded before they are multiplied. The kernels
are in `device`, the torch path of the CPU in `torch_path`.

Sources: Dao 2023 (arXiv:2307.08691); Milakov and Gimelshein 2018 (arXiv:1805.02867) for the online
normaliser; Gemma 2 (arXiv:2408.00118) for the softcap; Xiao et al. 2023 (arXiv:2309.17453) and
gpt-oss (arXiv:2508.10925) for sinks. Limits: D <= 256; tensors are copied where the strides between
the elements of one head are not 1, or D is no multiple of 8 (but for float64); scale > 0; gradients
of gradients do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from warpweave.kernels.attention.device import (
    attention_delta_kernel,
    attention_dkdv_kernel,
    attention_dq_kernel,
    attention_fwd_kernel,
)
from warpweave.kernels.attention.options import (
    FARTHEST,
    Mask,
    Runs,
    Scores,
    as_runs,
    check_dtype,
    check_into,
    check_kinds,
    check_mask,
    check_rows,
    check_scores,
    check_sinks,
    check_tensors,
)
from warpweave.kernels.attention.tiles import (
    dkdv_tile,
    dq_tile,
    forward_tile,
    kept,
    launch_options,
    padded,
)
from warpweave.kernels.attention.torch_path import attention_bwd_cpu, attention_fwd_cpu
from warpweave.kernels.attention.visible import document_table
from warpweave.kernels.gemm.gradients import grad_dtype
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose, no_graph, refuse_tangents, triton

# ---------------------------------------------------------------- launches


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x with stride 1 in the last dim: torch's flash attention reads nonsense otherwise."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _widened(q: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a call on q with zeros up to a head dim that is a multiple of 8: heads of
    others would be loaded number by number, and spill. Zeros change no score and no gradient.
    float64 q are for proofs."""
    missing = -q.shape[3] % 8
    if not missing or q.element_size() == 8:
        return [*tensors]
    return [F.pad(x, (0, missing)) for x in tensors]


def _narrowed(wide: torch.Tensor, x: torch.Tensor) -> None:
    """Bring to x what a kernel wrote into it widened."""
    if wide is not x:
        x.copy_(wide[..., : x.shape[3]])


def _count(runs: tuple[int, ...], block: int) -> int:
    return triton.cdiv(runs[1], block) + triton.cdiv(runs[3], block)


def _table(mask: Mask, runs: tuple[int, ...], batch: int) -> tuple[torch.Tensor | None, int]:
    """The documents of the rows in `runs` for a kernel, and the step from sample to sample."""
    if mask.documents is None:
        return None, 0
    table = document_table(mask.documents, runs)
    return table, 0 if len(table) < batch else table.stride(0)


_Steps = tuple[int, ...]  # from sample to sample, row to row, head to head


def _steps(*tensors: torch.Tensor) -> tuple[int, list[_Steps]]:
    """A number, and the steps of the tensors in multiples of it, for kernels to load many elements
    at a time: 8 or less where some step is no multiple of 16, which Triton sees by itself."""
    found = [tuple(by if n > 1 else 0 for n, by in zip(x.shape, x.stride()[:3])) for x in tensors]
    shared = math.gcd(16, *(by for steps in found for by in steps))
    step = 1 if shared == 16 else shared
    return step, [tuple(by // step for by in steps) for steps in found]


def _one_set(k: _Steps, v: _Steps) -> tuple[_Steps, _Steps | None]:
    """v's steps are None where they are k's: kernels then hold one set of addresses."""
    return k, None if v == k else v


def _numbers(mask: Mask, scores: Scores) -> tuple[int, ...]:
    """The kernels' arguments window, seed, sample, head0."""
    return mask.window, scores.seed, scores.sample, scores.head


def _constants(mask: Mask, scores: Scores) -> tuple[float, float, int, float, bool, bool]:
    """The kernels' constants SCALE, CAP, DROP, KEEP, CAUSAL, WINDOW."""
    drop = min(round(scores.dropout * 2**32), 2**32 - 1)
    keep = 1 / (1 - scores.dropout)
    return scores.scale, scores.softcap, drop, keep, mask.causal, bool(mask.window)


@no_graph
def attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int = 0,
    dropout_origin: Sequence[int] = (0, 0),
    q_runs: Runs | None = None,
    k_runs: Runs | None = None,
    out_dtype: torch.dtype | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o[B, Sq, Hq, D] and its natural-log normaliser lse[B, Hq, Sq].

    Both are new and contiguous; `out_dtype` (default q.dtype) may be float32 for half-precision
    inputs: partial results that will be merged. Or `into` has the (o, lse) of other keys, both
    float32 (float64 for float64), lse contiguous: they are changed in place to those of all the
    keys, and returned. It may start from lse = -inf, whatever o holds there, or from o = 0 and
    lse = sinks; `sinks` themselves cannot be given with it. Arguments and errors otherwise as
    `attention`; not differentiable by itself.
    """
    check_kinds(q, k, v, causal, window, documents, scale, softcap, dropout, dropout_seed)
    impl = choose(impl, q, k, v, documents, sinks, *(() if into is None else into))
    check_tensors(q, k, v)
    check_dtype("out_dtype", out_dtype)
    scores = check_scores(q.shape[3], scale, softcap, dropout, dropout_seed, dropout_origin)
    keyed = scores.dropout > 0
    mask = check_mask(q, k, causal, window, documents, q_runs, k_runs, keyed=keyed)
    sinks = check_sinks(q, sinks)
    _check_carried(q, sinks, out_dtype, into)
    q, k, v = _unit(q), _unit(k), _unit(v)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if impl == "torch":
        return attention_fwd_cpu(q, k, v, mask, scores, sinks, out_dtype, into)
    if into is None:
        B, Sq, H, _ = q.shape
        o = torch.empty(q.shape, dtype=out_dtype, device=q.device)
        lse = torch.empty((B, H, Sq), dtype=compute_dtype(q), device=q.device)
    else:
        o, lse = into
    if o.numel():
        q, k, v, wide = _widened(q, q, k, v, o)
        with torch.cuda.device_of(q):
            _launch_fwd(q, k, v, wide, lse, sinks, mask, scores, into is not None)
        _narrowed(wide, o)
    return o, lse


def _launch_fwd(q, k, v, o, lse, sinks, mask: Mask, scores: Scores, into: bool) -> None:
    B, _, H, D = q.shape
    call = kept(mask, scores, into)
    tile = forward_tile(q, call)
    table, by_sample = _table(mask, mask.q_runs, B)
    step, (of_q, of_k, of_v, of_o) = _steps(q, k, v, o)
    attention_fwd_kernel[(_count(mask.q_runs, tile.q) * H * B,)](
        q, k, v, o, lse, table, sinks,
        of_q, *_one_set(of_k, of_v), of_o, by_sample,
        *mask.q_runs, *mask.k_runs, H, H // k.shape[2], *_numbers(mask, scores),
        *_constants(mask, scores), into, step, D, tile.q, tile.k, padded(D),
        **launch_options(tile, q, call))  # fmt: skip


def _check_carried(q, sinks, out_dtype, into) -> None:
    if into is None:
        return
    if isinstance(into, torch.Tensor) or len(into) != 2:
        raise ValueError(f"into must be (o, lse), got {type(into).__name__} of {len(into)}")
    if sinks is not None or out_dtype is not None:
        raise ValueError("with into, start lse from the sinks instead, and give no out_dtype")
    o, lse = into
    check_into("o", o, q)
    B, S, H, _ = q.shape
    if lse.shape != (B, H, S) or lse.dtype != compute_dtype(q) or not lse.is_contiguous():
        raise ValueError(
            f"lse to add to must be contiguous {compute_dtype(q)} of shape {(B, H, S)}, "
            f"got {lse.dtype} {tuple(lse.shape)} of strides {lse.stride()}"
        )


@no_graph
def attention_delta(
    o: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Return delta[B, H, S] = sum_d(o do) - dlse, float32 (float64 if o is).

    o and do [B, S, H, D] of any dtypes, dlse [B, H, S] or None. Raises ValueError on other shapes.
    """
    impl = choose(impl, o, do, dlse)
    if o.ndim != 4 or do.shape != o.shape:
        raise ValueError(
            f"o and do must have one shape [B, S, H, D], got {tuple(o.shape)} and {tuple(do.shape)}"
        )
    B, S, H, D = o.shape
    if dlse is not None and dlse.shape != (B, H, S):
        raise ValueError(f"dlse must have the shape {(B, H, S)}, got {tuple(dlse.shape)}")
    dtype = compute_dtype(o)
    if impl == "torch":
        delta = (o.to(dtype) * do.to(dtype)).sum(-1).transpose(1, 2)
        return delta.contiguous() if dlse is None else (delta - dlse).contiguous()
    delta = torch.empty((B, H, S), dtype=dtype, device=o.device)
    o, do = _unit(o), _unit(do)
    if delta.numel():
        step, steps = _steps(o, do)
        with torch.cuda.device_of(o):
            attention_delta_kernel[(triton.cdiv(S, 64) * H * B,)](
                o, do, dlse, delta, *steps, (0, 0, 0) if dlse is None else dlse.stride(),
                H, S, step, D, 64, padded(D))  # fmt: skip
    return delta


@no_graph
def attention_dsinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return dsinks[Hq] = -sum over samples and rows of exp(sinks - lse) delta.

    lse and delta[B, Hq, S] are the final ones of these rows; the result has their dtype. The rows
    of other ranks add up. One pass over two small tensors: torch does it.
    """
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # exp(-inf - -inf): a sink of -inf is none, and a row that saw nothing else.
    return -(share.nan_to_num(nan=0.0) * delta).sum((0, 2))


@no_graph
def attention_bwd(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor | None,
    *,
    o: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    dropout_seed: int = 0,
    dropout_origin: Sequence[int] = (0, 0),
    q_runs: Runs | None = None,
    k_runs: Runs | None = None,
    grad_dtype: torch.dtype | None = None,
    into: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this block's dq[B, Sq, Hq, D], dk and dv[B, Sk, Hkv, D].

    lse[B, Hq, Sq] is the final one of each row over all blocks of keys (and its sink),
    delta[B, Hq, Sq] is `attention_delta` of the final o. `o`, the final output, may be given too
    when there is no gradient through lse: the CPU path then copies nothing and reads no delta,
    which may be None. Gradients are new and contiguous, of `grad_dtype` (default q.dtype; float32
    for those that will be summed over blocks), but those given in `into` = (dq, dk, dv), float32
    (float64 for float64), are added to in place and returned; dk and dv are given together.
    Arguments and errors otherwise as `attention`.
    """
    check_kinds(q, k, v, causal, window, documents, scale, softcap, dropout, dropout_seed)
    impl = choose(impl, do, q, k, v, lse, delta, o, documents, *into)
    check_tensors(q, k, v)
    check_dtype("grad_dtype", grad_dtype)
    scores = check_scores(q.shape[3], scale, softcap, dropout, dropout_seed, dropout_origin)
    keyed = scores.dropout > 0
    mask = check_mask(q, k, causal, window, documents, q_runs, k_runs, keyed=keyed)
    check_rows(q, do, lse, delta, o)
    if (into[1] is None) != (into[2] is None):
        raise ValueError("into must have both dk and dv or neither")
    for name, x, like in zip(("dq", "dk", "dv"), into, (q, k, v)):
        if x is not None:
            check_into(name, x, like)
    q, k, v, do = _unit(q), _unit(k), _unit(v), _unit(do.to(q.dtype))
    lse = lse.contiguous()
    grad_dtype = q.dtype if grad_dtype is None else grad_dtype
    if impl == "torch":
        dq, dk, dv = attention_bwd_cpu(do, q, k, v, lse, delta, o, mask, scores, grad_dtype, into)
        return dq, dk, dv
    delta = attention_delta(o, do, impl=impl) if delta is None else delta.contiguous()
    dq, dk, dv = (
        torch.empty(x.shape, dtype=grad_dtype, device=x.device) if given is None else given
        for x, given in zip((q, k, v), into)
    )
    q, k, v, do, wide_dq, wide_dk, wide_dv = _widened(q, q, k, v, do, dq, dk, dv)
    with torch.cuda.device_of(q):
        if k.numel():
            _launch_dkdv(
                q, k, v, do, lse, delta, wide_dk, wide_dv, mask, scores, into[1] is not None
            )
        if q.numel():
            _launch_dq(q, k, v, do, lse, delta, wide_dq, mask, scores, into[0] is not None)
    for wide, given in ((wide_dq, dq), (wide_dk, dk), (wide_dv, dv)):
        _narrowed(wide, given)
    return dq, dk, dv


def _launch_dkdv(q, k, v, do, lse, delta, dk, dv, mask: Mask, scores: Scores, into: bool) -> None:
    (B, _, H, D), Hkv = q.shape, k.shape[2]
    call = kept(mask, scores, into)
    tile = dkdv_tile(q, call)
    table, by_sample = _table(mask, mask.k_runs, B)
    step, steps = _steps(q, k, v, do, dk, dv)
    attention_dkdv_kernel[(_count(mask.k_runs, tile.k) * Hkv * B,)](
        q, k, v, do, lse, delta, dk, dv, table, *steps, by_sample,
        *mask.q_runs, *mask.k_runs, Hkv, H // Hkv, *_numbers(mask, scores),
        *_constants(mask, scores), into, step, D, tile.q, tile.k, padded(D),
        **launch_options(tile, q, call))  # fmt: skip


def _launch_dq(q, k, v, do, lse, delta, dq, mask: Mask, scores: Scores, into: bool) -> None:
    (B, _, H, D), Hkv = q.shape, k.shape[2]
    call = kept(mask, scores, into)
    tile = dq_tile(q, call)
    table, by_sample = _table(mask, mask.q_runs, B)
    step, (of_q, of_k, of_v, *others) = _steps(q, k, v, do, dq)
    attention_dq_kernel[(_count(mask.q_runs, tile.q) * H * B,)](
        q, k, v, do, lse, delta, dq, table,
        of_q, *_one_set(of_k, of_v), *others, by_sample,
        *mask.q_runs, *mask.k_runs, H, H // Hkv, *_numbers(mask, scores),
        *_constants(mask, scores), into, step, D, tile.q, tile.k, padded(D),
        **launch_options(tile, q, call))  # fmt: skip


# ---------------------------------------------------------------- autograd


@torch.library.custom_op("warpweave::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    dropout_seed: int,
    dropout_origin: Sequence[int],
    q_runs: Sequence[int] | None,
    k_runs: Sequence[int] | None,
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_fwd(
        q, k, v, documents=documents, sinks=sinks, causal=causal, window=window, scale=scale,
        softcap=softcap, dropout=dropout, dropout_seed=dropout_seed, dropout_origin=dropout_origin,
        q_runs=_runs(q_runs), k_runs=_runs(k_runs), impl=impl,
    )  # fmt: skip


@_attention.register_fake
def _(q, k, v, *options):
    B, S, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, S), dtype=compute_dtype(q))


@torch.library.custom_op("warpweave::attention_backward", mutates_args=())
def _attention_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    sinks: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    dropout_seed: int,
    dropout_origin: Sequence[int],
    q_runs: Sequence[int] | None,
    k_runs: Sequence[int] | None,
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv and dsinks, which is empty without sinks."""
    delta, dsinks = None, lse.new_empty(0)
    if dlse is not None or sinks is not None:
        delta = attention_delta(o, do, dlse, impl=impl)
    if sinks is not None:
        dsinks = attention_dsinks(sinks, lse, delta)
    grads = attention_bwd(
        do, q, k, v, lse, delta, o=o if dlse is None else None,
        documents=documents, causal=causal, window=window, scale=scale, softcap=softcap,
        dropout=dropout, dropout_seed=dropout_seed, dropout_origin=dropout_origin,
        q_runs=_runs(q_runs), k_runs=_runs(k_runs), impl=impl,
    )  # fmt: skip
    return *grads, dsinks


@_attention_backward.register_fake
def _(do, dlse, q, k, v, documents, sinks, o, lse, *options):
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx, inputs, output):
    tensors, ctx.options = inputs[:5], inputs[5:]
    ctx.of_sinks = None if tensors[4] is None else grad_dtype(tensors[4])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, do, dlse):
    *inputs, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv, dsinks = _attention_backward(do, dlse, *inputs, o, lse, *ctx.options)
    dsinks = None if ctx.of_sinks is None else dsinks.to(ctx.of_sinks)
    return dq, dk, dv, None, dsinks, *([None] * 10)


_attention.register_autograd(_backward, setup_context=_save)


def _flat(name: str, runs: Runs | None) -> list[int] | None:
    """Runs as a custom op takes them, three numbers each."""
    return None if runs is None else [n for run in as_runs(name, runs) for n in run]


def _runs(flat: Sequence[int] | None) -> Runs | None:
    return None if flat is None else tuple(zip(flat[::3], flat[1::3], flat[2::3]))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int = 0,
    dropout_origin: Sequence[int] = (0, 0),
    q_runs: Runs | None = None,
    k_runs: Runs | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + mask) v, differentiable in q, k, v and sinks.

    Args:
        q: [B, Sq, Hq, D]; any strides; any size may be 0 but head_dim and Hkv.
        k, v: [B, Sk, Hkv, D] of q's dtype, each head serving Hq / Hkv neighbouring query heads.
        causal: a query sees the keys at positions up to its own.
        window: and less than `window` >= 1 away from its own, on both sides if not causal.
        documents: and of its own document only. int32 or int64 [n + 1], or [B, n + 1] where samples
            differ: cumulative boundaries in global positions (not the number of each token's
            document), the first 0, the last as a rule the total length: positions from it on are
            one more document. Documents may be empty. On a GPU nobody reads them but the kernels,
            so boundaries that do not ascend are an error on a CPU only.
        scale: of the scores, D**-0.5 by default.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [Hq], floating: one more logit per head, in the normaliser, with no value.
        dropout: the probability with which weights are zeroed, the others divided by 1 - dropout;
            lse is that of the row before. The mask depends on `dropout_seed` and the global
            numbers of sample, head, query and key alone: every layer and step needs its own seed.
        dropout_origin: the global numbers of q's first sample and first head.
        q_runs, k_runs: the global positions of the rows, by default ((0, S),): at most two runs
            (start, length), or (start, length, stripes) for start, start + stripes, ... The last Sq
            of Sk tokens, as in decoding, are ``q_runs=((Sk - Sq, Sq),)``.
        return_lse: also return lse.
        impl: "triton", "torch" or None.

    Returns o[B, Sq, Hq, D] in q's dtype, and with `return_lse` also lse[B, Hq, Sq], the natural
    logarithm of the softmax denominators, sinks included (float32; float64 for float64),
    differentiable too. A row that sees no key has o = 0, lse = its sink or -inf, and gradients 0.
    Under autocast q, k and v are cast, as for `F.scaled_dot_product_attention`.

    Raises ValueError if shapes, dtypes, devices, head counts, runs, documents or numbers do not
    fit, or `impl` cannot run here; RuntimeError on forward-mode derivatives, and on second ones
    where they are taken.
    """
    check_kinds(q, k, v, causal, window, documents, scale, softcap, dropout, dropout_seed)
    choose("torch", q, k, v, documents, sinks)  # one device; beside meta tensors nothing would run
    refuse_tangents("attention", q, k, v, sinks)
    device = q.device.type
    if q.dtype != torch.float64 and torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    check_tensors(q, k, v)
    check_scores(q.shape[3], scale, softcap, dropout, dropout_seed, dropout_origin)
    o, lse = _attention(
        q, k, v, documents, sinks, causal, None if window is None else min(window, FARTHEST),
        scale, softcap, dropout, dropout_seed,
        list(dropout_origin), _flat("q_runs", q_runs), _flat("k_runs", k_runs), impl,
    )  # fmt: skip
    return (o, lse) if return_lse else o
