"""FlashAttention with a mask that is a function of global token positions, so right for any layout.

    o = softmax(scale q k^T + mask) v         lse, the log of the softmax's denominator

`forward` and `backward` have the formulas. The causal mask, window and documents leave an interval
of positions per row (`visible`): tiles that are masked entirely are skipped, and tiles that are
visible entirely need no mask. Dropout is keyed by global indices (`device`).

q, k, v, o and lse are saved for backward; p is recomputed. `into` accumulates over blocks of keys
within the kernels: the forward continues from (o, lse), and the backward adds to dq, dk and dv, in
float32 and in place.

A sink is one more logit per head, without a value. lse INCLUDES it, so it must be counted once per
row: pass `sinks` for one block of keys only, or start `into` from o = 0, lse = sinks. The backward
needs no sinks; their own gradient follows from lse and delta (`attention_dsinks`).

Rows that see neither key nor sink have o = 0, lse = -inf and zero gradients. Matrix products
accumulate in float32; half-precision p and ds are rounded before they are multiplied. `torch_path`
is the CPU path.

Sources: Dao 2023 (arXiv:2307.08691); Milakov and Gimelshein 2018 (arXiv:1805.02867) for the online
normalizer; Gemma 2 (arXiv:2408.00118) for the softcap; Xiao et al. 2023 (arXiv:2309.17453) and
gpt-oss (arXiv:2508.10925) for sinks. Limits: D <= 256; tensors are copied if the elements of a head
are not contiguous or D is not a multiple of 8 (except in float64); scale > 0; no second
derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from warpweave.kernels.attention.backward import attention_delta, attention_dsinks, block_bwd
from warpweave.kernels.attention.forward import block_fwd
from warpweave.kernels.attention.keywords import BlockKeywords, check_keywords
from warpweave.kernels.attention.options import (
    AttentionOptions,
    Runs,
    Upstream,
    check_boundaries,
    check_carried,
    check_carried_gradients,
    check_dtype,
    check_upstream,
    checked,
    prepared,
)
from warpweave.kernels.attention.visible import Packed
from warpweave.kernels.reference import Run, compute_dtype
from warpweave.kernels.runtime.beside import beside_dtensors
from warpweave.kernels.runtime.dispatch import no_graph, refuse_tangents
from warpweave.kernels.runtime.op import operator
from warpweave.kernels.runtime.wgrad import grad_dtype

# ---------------------------------------------------------------- 1. the operator


def _attention_fake(q, k, v, sinks, options):
    B, S, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, S), dtype=compute_dtype(q))


def _attention_sharding(q, k, v, sinks, options) -> str:
    """Samples and heads may be sharded without dropout, which uses their global indices."""
    if options.dropout:
        return "____, ____, ____, _, __, , ___ -> ____, ___"
    of_documents = {None: "", 1: "_", 2: "b_", 3: "b__"}
    bounds = None if options.documents is None else len(options.documents.shape)
    of_table = "b__" if bounds == 2 else "___"
    return f"b_h_, b_h_, b_h_, h, {of_documents[bounds]}, , {of_table} -> b_h_, bh_"


def _attention_bwd_fake(do, dlse, o, lse, q, k, v, sinks, options):
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _attention_bwd_sharding(do, dlse, o, lse, q, k, v, sinks, options) -> str:
    inputs, outputs = _attention_sharding(q, k, v, sinks, options).split(" -> ")
    *of_qkv, of_sinks, _, _, _ = inputs.split(", ")
    dsinks = "whole" if sinks is None else of_sinks
    return f"{outputs}, {outputs}, {inputs} -> {', '.join(of_qkv)}, {dsinks}"


def _split_options(
    options: AttentionOptions,
) -> tuple[AttentionOptions, tuple[torch.Tensor | None, ...]]:
    """Checked options without tensors, and the tensors, for autograd to save; see
    `_join_options`."""
    seed, documents = options.dropout_seed, options.documents
    assert not isinstance(documents, Packed)  # `checked` has split it
    plain = options._replace(documents=None, table=None)
    if not isinstance(seed, torch.Tensor):
        return plain, (documents, None, options.table)
    return plain._replace(dropout_seed=0), (documents, seed, options.table)


def _join_options(
    options: AttentionOptions,
    documents: torch.Tensor | None,
    seed: torch.Tensor | None,
    table: torch.Tensor | None,
) -> AttentionOptions:
    """The inverse of `_split_options`."""
    options = options._replace(documents=documents, table=table)
    return options if seed is None else options._replace(dropout_seed=seed)


def _save_attention(ctx, inputs, output):
    q, k, v, sinks, options = inputs
    ctx.options, of_options = _split_options(options)
    ctx.of_sinks = None if sinks is None else grad_dtype(sinks)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, sinks, *of_options)


def _attention_backward(ctx, do, dlse):
    o, lse, q, k, v, sinks, *of_options = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    options = _join_options(ctx.options, *of_options)
    dq, dk, dv, dsinks = attention_bwd_op(do, dlse, o, lse, q, k, v, sinks, options)
    return dq, dk, dv, None if ctx.of_sinks is None else dsinks.to(ctx.of_sinks)


@operator(
    "attention", _attention_fake, records=(AttentionOptions, Run),
    gradient=(_save_attention, _attention_backward), sharding=_attention_sharding,
)  # fmt: skip
def attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) under checked options."""
    check_boundaries(options, q.shape[1], k.shape[1])
    return block_fwd(q, k, v, options, sinks=sinks)


@operator(
    "attention_backward",
    _attention_bwd_fake,
    records=(AttentionOptions, Run),
    sharding=_attention_bwd_sharding,
)
def attention_bwd_op(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv and dsinks, which is empty without sinks."""
    delta, dsinks = None, lse.new_empty(0)
    if dlse is not None or sinks is not None:
        delta = attention_delta(o, do, dlse, impl=options.impl)
    if sinks is not None:
        dsinks = attention_dsinks(sinks, lse, delta)
    upstream = Upstream(do, lse, delta, o if dlse is None else None)
    grads = block_bwd(upstream, q, k, v, options)
    dq, dk, dv = (x.contiguous() for x in grads)
    return dq, dk, dv, dsinks


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` of checked arguments: (o, lse), differentiable."""
    refuse_tangents("attention", q, k, v, sinks)
    return attention_op(q, k, v, sinks, options)


# ---------------------------------------------------------------- 2. public


@beside_dtensors("q", "k", "v")
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: torch.Tensor | Packed | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int | torch.Tensor = 0,
    dropout_origin: Sequence[int] = (0, 0),
    deterministic: bool = False,
    q_runs: Runs | None = None,
    k_runs: Runs | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + mask) v, differentiable in q, k, v and sinks.

    The sequence is dim 1 and the heads are dim 2. `F.scaled_dot_product_attention` expects the
    reverse, [B, H, S, D]. Such tensors pass the checks here if their sizes happen to fit, and the
    result is attention over heads. Pass ``q.transpose(1, 2)`` instead, which copies nothing.

    Args:
        q: [B, Sq, Hq, D]; any strides; any size may be 0 except head_dim and Hkv.
        k, v: [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv] of q's dtype, each head serving Hq / Hkv
            consecutive query heads. If Dv is not D, the narrower are copied and padded with zeros.
        causal: a query sees the keys at positions up to its own.
        window: the distance is also less than `window` >= 1, on both sides if not causal.
        documents: a query sees keys of its own document only. int32 or int64 [n + 1], or [B, n + 1]
            if samples differ: cumulative boundaries in global positions (not the number of each
            token's document). They ascend from 0 to the end of the sequence, which is the longer of
            Sq and Sk, or with runs at least the last position. Documents may be empty, and padding
            after the last one is also a document. [B, 2, n + 1] are separate boundaries of queries,
            up to Sq, and of keys, anywhere up to Sk: a query of document j sees keys of document j.
            So ``stack((ends, ends.clamp(first, stop)), 1)`` hides all keys except those at
            positions first to stop - 1. Values are checked only on a CPU, because a GPU would need
            a host sync. On a GPU, a document begins at 0, and one at the last boundary, for any
            values.
        scale: of the scores, D**-0.5 by default.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [Hq], floating: one more logit per head, counted in the normalizer, without a value.
        dropout: the probability with which attention weights are zeroed; the others are divided by
            1 - dropout. lse is computed before dropout. The mask is a function of `dropout_seed`
            and the global indices of sample, head, query and key, so every layer and step needs a
            different seed. It is fastest if each run begins at a multiple of 16 and has no stripes,
            because four probabilities then share a draw.
        dropout_seed: an integer, or for a CUDA graph, whose replays repeat the integers of the
            capture, a 0-dim int64 tensor on q's device. The tensor's value is not checked.
        dropout_origin: the global indices of q's first sample and first head.
        deterministic: the gradient of q has the same bits in every run. It always has, unless the
            tile table of this GPU (``warpweave tune``) says that a kernel that adds its parts in
            any order is faster. ``torch.use_deterministic_algorithms(True)`` also excludes it.
        q_runs, k_runs: the global positions of the rows, by default ((0, S),): at most two runs
            (start, length), or (start, length, stripes) for start, start + stripes, ... The last Sq
            of Sk tokens, as in decoding, are ``q_runs=((Sk - Sq, Sq),)``.
        return_lse: also return lse.
        impl: "triton", "torch" or None.

    Returns o[B, Sq, Hq, Dv] in q's dtype, and with `return_lse` also lse[B, Hq, Sq], the natural
    logarithm of the softmax denominators including sinks (float32; float64 for float64). lse is
    also differentiable. A row that sees no key has o = 0, lse = its sink or -inf, and gradients 0.
    Under autocast q, k and v are cast, as for `F.scaled_dot_product_attention`.

    Raises ValueError if shapes, dtypes, devices, head counts, runs, documents or numbers do not
    fit, or if `impl` cannot run here. Raises RuntimeError for forward-mode derivatives, and for
    second derivatives when they are computed.

    Examples:
        >>> q, k, v = (torch.randn(2, 16, heads, 8) for heads in (4, 2, 2))  # [B, S, H, D]
        >>> attention(q, k, v).shape  # causal
        torch.Size([2, 16, 4, 8])
        >>> documents = torch.tensor([0, 10, 16])  # two packed documents
        >>> attention(q, k, v, window=8, documents=documents).shape
        torch.Size([2, 16, 4, 8])
    """
    options = AttentionOptions(
        causal, window, documents, scale, softcap, dropout, dropout_seed, dropout_origin,
        q_runs, k_runs, impl, deterministic=deterministic,
    )  # fmt: skip
    q, k, padded_v, options = prepared(q, k, v, sinks, options)
    o, lse = attend(q, k, padded_v, sinks, options)
    o = o if o.shape[3] == v.shape[3] else o[..., : v.shape[3]]
    return (o, lse) if return_lse else o


@no_graph
def attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    **keywords: Unpack[BlockKeywords],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o[B, Sq, Hq, D] and its natural-log normalizer lse[B, Hq, Sq].

    Both are new and contiguous. `out_dtype` (default q.dtype) may be float32 for half-precision
    inputs, for partial results that will be merged. Alternatively, `into` holds the (o, lse) of
    other keys, both float32 (float64 for float64), lse contiguous. They are changed in place to
    those of all the keys, and returned. They may start from lse = -inf, for any o, or from o = 0
    and lse = sinks; `sinks` cannot be combined with `into`. The other keywords, and errors, are
    those of `attention`. Not differentiable.

    Examples:
        >>> q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))
        >>> o, lse = attention_fwd(q, k, v)
        >>> o.shape, lse.shape
        (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 16]))
    """
    check_keywords("attention_fwd", keywords, block=True)
    options = checked(AttentionOptions(**keywords), q, k, v, sinks)
    check_boundaries(options, q.shape[1], k.shape[1])
    check_dtype("out_dtype", out_dtype)
    check_carried(q, sinks, out_dtype, into)
    return block_fwd(q, k, v, options, sinks=sinks, out_dtype=out_dtype, into=into)


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
    grad_dtype: torch.dtype | None = None,
    into: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    **keywords: Unpack[BlockKeywords],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this block's dq[B, Sq, Hq, D], dk and dv[B, Sk, Hkv, D].

    lse[B, Hq, Sq] is the final one of each row over all blocks of keys (and its sink), and
    delta[B, Hq, Sq] is `attention_delta` of the final o. If no gradient flows through lse, you can
    also pass `o`, the final output: the CPU path then copies nothing and does not read delta, which
    may be None. Gradients are new (contiguous on a GPU), of `grad_dtype` (default q.dtype; float32
    if they will be summed over blocks). Those passed in `into` = (dq, dk, dv), float32 (float64 for
    float64), are instead added to in place and returned; pass both dk and dv or neither. The
    other keywords, and errors, are those of `attention`.

    Examples:
        >>> from warpweave.kernels.attention import attention_fwd
        >>> q, k, v, do = (torch.randn(2, 16, 4, 8) for _ in range(4))
        >>> o, lse = attention_fwd(q, k, v)
        >>> delta = (o * do).sum(-1).transpose(1, 2)
        >>> dq, dk, dv = attention_bwd(do, q, k, v, lse, delta)
    """
    check_keywords("attention_bwd", keywords, block=True)
    options = checked(AttentionOptions(**keywords), q, k, v)
    check_boundaries(options, q.shape[1], k.shape[1])
    check_dtype("grad_dtype", grad_dtype)
    upstream = Upstream(do, lse, delta, o)
    check_upstream(q, upstream)
    check_carried_gradients(into, q, k, v)
    return block_bwd(upstream, q, k, v, options, grad_dtype=grad_dtype, into=into)
