"""The loss of a linear head whose backward recomputes the logits: see `linear`.

Forward computes blocks of z and keeps lse[T]; backward recomputes each block, turns it into dz in
place, and multiplies.
"""

from __future__ import annotations

import torch

from warpweave.kernels.cross_entropy import blocks
from warpweave.kernels.cross_entropy.backward import bwd
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.gemm.fused import gemm_into
from warpweave.kernels.overlap.gathering import Gathering
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import no_graph
from warpweave.kernels.runtime.dtypes import no_autocast
from warpweave.kernels.runtime.op import operator

# ---------------------------------------------------------------- forward


def _recompute_fwd_fake(x, weight, labels, vocabulary):
    # x.shape[0], not len(x), which would be a constant to a compiler.
    kinds = 2 + (vocabulary.label_smoothing != 0.0)
    return x.new_empty(kinds, x.shape[0], dtype=compute_dtype(x))


@operator("linear_cross_entropy_fwd", _recompute_fwd_fake, records=(Vocabulary,))
def _fwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: Vocabulary,
) -> torch.Tensor:
    vocabulary.check_labels(labels)
    kinds = 2 + (vocabulary.label_smoothing != 0.0)
    out = torch.empty(kinds, len(x), dtype=compute_dtype(x), device=x.device)
    with no_autocast(x):
        for rows, slices in blocks.block_grid(x, vocabulary.columns(len(weight))):
            parts = []
            for cols in slices:
                z = blocks.aligned_product(x[rows], weight[cols].to(x.dtype))
                block = blocks.from_column(vocabulary, cols.start)
                parts.append(blocks.block_stats(z, labels[rows], block))
                del z  # freed before the next block is allocated
            out[:, rows] = blocks.merged(parts, labels[rows], vocabulary.ignore_index)
    return out


@no_graph
def linear_cross_entropy_fwd(
    x: torch.Tensor | Gathering, weight: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary
) -> torch.Tensor:
    """stats[2 or 3, T]: lse, target and (with smoothing) logit_sum of x[T, E] weight[V/tp, E]^T.

    They equal those of `cross_entropy_fwd`, but are computed block by block, and no logits are
    kept. Products are in the dtype of x if the weight's differs. A `Gathering` is gathered within
    the product with the first block of columns.
    """
    if isinstance(x, torch.Tensor):
        return _fwd_op(x, weight, labels, vocabulary)
    z = blocks.gathering_product(x, weight)
    cut = z.shape[1]
    first = blocks.block_stats(z, labels, vocabulary)
    del z  # freed before the next block is allocated
    if cut == len(weight):
        return first
    others = blocks.from_column(vocabulary, cut)
    rest = _fwd_op(x.whole, weight[cut:], labels, others)
    return blocks.merged([first, rest], labels, vocabulary.ignore_index)


# ---------------------------------------------------------------- backward


def _recompute_bwd_fake(dloss, x, weight, labels, lse, dw, add, dx_dtype, vocabulary):
    return x.new_empty(0 if dx_dtype is None else x.shape, dtype=dx_dtype)


@operator("linear_cross_entropy_bwd", _recompute_bwd_fake, records=(Vocabulary,), writes=("dw",))
def _bwd_op(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    dw: torch.Tensor,
    add: bool,
    dx_dtype: torch.dtype | None,
    vocabulary: Vocabulary,
) -> torch.Tensor:
    own, wide = vocabulary.columns(len(weight)), compute_dtype(x)
    want_dx, want_dw = dx_dtype is not None, dw.numel() > 0
    dx = x.new_empty(x.shape if want_dx else 0, dtype=dx_dtype)
    total, product = dw, blocks.product_impl(vocabulary.impl)
    if dw.dtype != wide and len(x) > blocks.row_step(x, own):
        total = torch.empty_like(dw, dtype=wide)  # several products must not be added in 16 bits
    with no_autocast(x):
        for rows, slices in blocks.block_grid(x, own):
            sums = x.new_empty(x[rows].shape if want_dx else 0, dtype=wide)
            for cols in slices:
                w = weight[cols].to(x.dtype)
                z = blocks.aligned_product(x[rows], w)
                block = blocks.from_column(vocabulary, cols.start)
                bwd(dloss[rows], z, labels[rows], lse[rows], block, out=z)
                if want_dx:
                    gemm_into(z, w, sums, cols.start > 0, impl=product)
                if want_dw:
                    more = rows.start > 0 or (add and total is dw)
                    gemm_into(z.t(), x[rows], total[cols], more, impl=product)
                del z
            if want_dx:
                dx[rows] = sums
        if not add:
            dw[own if len(x) else 0 :] = 0
        if total is not dw:
            total = total[:own]
            dw[:own] = dw[:own] + total if add else total
    return dx


@no_graph
def linear_cross_entropy_bwd(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    dw: torch.Tensor | None = None,
    add: bool = False,
    dx_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """dx[T, E] in `dx_dtype` (not computed if None); dW is added to `dw`, or overwrites it.

    dloss[T] are the losses' gradients, and lse[T] is the log-sum-exp over all shards. dw[V/tp, E]
    has the weight's dtype, float32 or float64; padding rows get 0. With 16-bit `dw` and more tokens
    than a block has rows, dW is summed in an additional float32 buffer.
    """
    into = x.new_empty(0) if dw is None else dw
    dx = _bwd_op(dloss, x, weight, labels, lse, into, add, dx_dtype, vocabulary)
    return None if dx_dtype is None else dx
