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
are in `forward` and `backward`, the torch path of the CPU in `torch_path`.

Sources: Dao 2023 (arXiv:2307.08691); Milakov and Gimelshein 2018 (arXiv:1805.02867) for the online
normaliser; Gemma 2 (arXiv:2408.00118) for the softcap; Xiao et al. 2023 (arXiv:2309.17453) and
gpt-oss (arXiv:2508.10925) for sinks. Limits: D <= 256; tensors are copied where the strides between
the elements of one head are not 1, or D is no multiple of 8 (but for float64); scale > 0; gradients
of gradients do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warpweave.kernels.attention.backward import attention_bwd, attention_delta, attention_dsinks
from warpweave.kernels.attention.forward import attention_fwd
from warpweave.kernels.attention.options import (
    FARTHEST,
    Runs,
    as_runs,
    check_kinds,
    check_scores,
    check_tensors,
)
from warpweave.kernels.gemm.gradients import grad_dtype
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose, refuse_tangents


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
