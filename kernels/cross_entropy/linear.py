"""The loss of a linear head, cross_entropy(x W^T, labels), without ever holding the logits.

    z[T, V] = x[T, E] W[V, E]^T                loss, dz: as in `cross_entropy`, from z's rows
    dx[T, E] = dz W                            dW[V, E] = dz^T x

A block of the vocabulary is to a device what a vocabulary shard is to a group: it gives the
log-sum-exp, target logit and sum of logits of its own columns, which merge, and with the merged
log-sum-exp it makes its own columns of dz. So the kernels here are those of `cross_entropy`, and
the products are the vendor's, on one block of z at a time that dz then overwrites. There are two
orders of work:

recompute       Forward goes over blocks of z and keeps lse[T]; backward makes each block again.
                8 T V E FLOPs in all instead of 6. Holds one block of z (2^26 elements on a GPU,
                2^20 on a CPU, however large T and V are) and float32 sums of dx for the block's
                rows. Takes any gradient per token. All of dW's rows for a block come from one
                product over (up to 16384) tokens and are written once, in float32 and where they
                are kept. (Wijmans et al. 2024, arXiv:2411.09009, fused into one kernel.)
in forward      For a sum or a mean every token's loss has one gradient g, unknown but common: so
                forward makes dx and dW for g = 1 while a block is there, and backward multiplies by
                g, which nobody reads on the host. 6 T V E FLOPs. Holds z of some rows (2^26 or 2^20
                elements, but 4096 or 1024 rows at least) and, from forward to backward, dx and a
                float32 dW[V, E], which is read and written once per block.
                (Hsu et al. 2024, arXiv:2410.10989.)

Which is better: adding dW once per block moves 8 to 20 V E bytes where recomputing the block's C
rows takes 2 C V E FLOPs. A CPU does about ten FLOPs in the time of a byte, so with C of some
hundreds the second order wins, and there FLOPs are what the head costs. A GPU does 200 (H100): the
two meet at one or two thousand rows, where z[C, V] and dW are gigabytes: with Llama 3's 128256 x
4096, 1 GB and 2.1 GB, to save a quarter of the head at most, which is 1 % of a step of the 8B
model. So recompute=None recomputes on a GPU and on a CPU does not.

A forward kernel that keeps tiles of z in registers would save writing and reading the block, 4
bytes per element against 2 E FLOPs (10 % on an H100 at E = 4096), and lose as much or more against
the vendor's products; so there is none.

z is rounded to the dtype of x, as the output of a linear layer is; everything after it is float32
(float64 for float64), as in `cross_entropy`. Sums over blocks are float32. Deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from warpweave.kernels.cross_entropy.halves import (
    _bwd_torch,
    _fwd_torch,
    check_options,
    cross_entropy_bwd,
    cross_entropy_fwd,
    outside_vocabulary,
    token_losses,
)
from warpweave.kernels.gemm.fused import gemm, gemm_into
from warpweave.kernels.gemm.gradients import grad_dtype
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose, no_graph, once_differentiable, wants_gradient
from warpweave.kernels.runtime.dtypes import no_autocast
from warpweave.kernels.runtime.wgrad import wgrad

Merge = Callable[[torch.Tensor], torch.Tensor]
"""Combines a shard's stats[k, N] (lse, target and, with smoothing, logit_sum) with the others'."""


# ---------------------------------------------------------------- blocks


class _Sizes(NamedTuple):
    """How many elements of z are held, the most rows of a block, the fewest of a whole-row one."""

    elements: int
    most_rows: int
    fewest_rows: int


# A CPU's block is 4 MiB of float32: malloc keeps it and caches hold it. A GPU's is 128 MiB of
# bfloat16: 4096 columns of 16384 rows, products of which are bound by arithmetic.
_CPU, _GPU = _Sizes(2**20, 2**10, 2**10), _Sizes(2**26, 2**14, 2**12)


def _sizes(x: torch.Tensor) -> _Sizes:
    return _CPU if x.device.type == "cpu" else _GPU


def _slices(length: int, step: int) -> list[slice]:
    return [slice(a, min(a + step, length)) for a in range(0, length, step)]


def _column_slices(columns: int, rows: int, elements: int) -> list[slice]:
    """Column slices of a block of `rows` rows; one empty one for a shard that is all padding."""
    if columns == 0:
        return [slice(0, 0)]
    wide = elements // max(1, rows)
    return _slices(columns, columns if wide >= columns else max(128, wide // 128 * 128))


def _row_step(x: torch.Tensor, columns: int) -> int:
    sizes = _sizes(x)
    return max(sizes.most_rows, sizes.elements // max(1, columns))


def _blocks(x: torch.Tensor, columns: int) -> Iterator[tuple[slice, list[slice]]]:
    """Row slices of z[T, columns], and the column slices of each: one block at a time is held."""
    for rows in _slices(len(x), _row_step(x, columns)):
        yield rows, _column_slices(columns, rows.stop - rows.start, _sizes(x).elements)


def _product_impl(impl: str) -> str | None:
    """Products are torch's where all is to be torch, else as `gemm_into` thinks best."""
    return "torch" if impl == "torch" else None


class Vocabulary(NamedTuple):
    """Which columns a weight[V/tp, E] stands for, and the loss over all of them.

    Attributes:
        start: the weight's first row in the whole vocabulary.
        size: of the whole vocabulary; rows of the weight from there on are padding.
        ignore_index, label_smoothing, z_loss, impl: as for `cross_entropy`.
    """

    start: int
    size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    impl: str

    def columns(self, weight: torch.Tensor) -> int:
        """How many rows of `weight` are no padding."""
        return max(0, min(len(weight), self.size - self.start))

    def stats(
        self, z: torch.Tensor, labels: torch.Tensor, first: int, keep_softmax: bool = False
    ) -> torch.Tensor:
        """stats[k, N] of the block z[N, columns] whose first column is the weight's `first`.

        With `keep_softmax` the block is overwritten by its softmax.
        """
        where, want_sum = (self.start + first, self.size), self.label_smoothing != 0.0
        if keep_softmax:
            parts = _fwd_torch(z, labels, *where, self.ignore_index, want_sum, True)
        else:
            parts = cross_entropy_fwd(
                z,
                labels,
                vocab_start=where[0],
                vocab_size=where[1],
                ignore_index=self.ignore_index,
                want_sum=want_sum,
                impl=self.impl,
            )
        return torch.stack(parts[: 2 + want_sum])

    def losses(self, stats: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """losses[N] from the stats[k, N] of the whole vocabulary."""
        return token_losses(
            stats[0],
            stats[1],
            stats[2] if self.label_smoothing != 0.0 else None,
            labels,
            vocab_size=self.size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )

    def dz_(self, dloss, z, labels, lse, first: int, own_lse=None) -> torch.Tensor:
        """Overwrite the block z, or its softmax and `own_lse`, with the gradient of z."""
        if own_lse is not None:
            where = self.start + first, self.size, self.ignore_index
            more = self.label_smoothing, self.z_loss, z, own_lse
            return _bwd_torch(dloss, z, labels, lse, *where, *more)
        return cross_entropy_bwd(
            dloss,
            z,
            labels,
            lse,
            vocab_start=self.start + first,
            vocab_size=self.size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            in_place=True,
            impl=self.impl,
        )


# ---------------------------------------------------------------- forward


def _merged(parts: list[torch.Tensor], labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """stats[k, N] of adjacent blocks as those of one; 0 in ignored rows."""
    if len(parts) == 1:
        return parts[0]
    part = torch.stack(parts)
    merged = torch.cat((part[:, 0].logsumexp(0)[None], part[:, 1:].sum(0)))
    return merged.masked_fill_(labels == ignore_index, 0.0)


@torch.library.custom_op("warpweave::linear_cross_entropy_fwd", mutates_args=())
def _fwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    start: int,
    size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    impl: str,
) -> torch.Tensor:
    vocabulary = Vocabulary(start, size, ignore_index, label_smoothing, z_loss, impl)
    outside_vocabulary(labels, size, ignore_index)
    columns, kinds = vocabulary.columns(weight), 2 + (label_smoothing != 0.0)
    out = torch.empty(kinds, len(x), dtype=compute_dtype(x), device=x.device)
    with no_autocast(x):
        for rows, blocks in _blocks(x, columns):
            parts = []
            for cols in blocks:
                z = gemm(x[rows], weight[cols].to(x.dtype).t())
                parts.append(vocabulary.stats(z, labels[rows], cols.start))
                del z  # before the next block is made
            out[:, rows] = _merged(parts, labels[rows], ignore_index)
    return out


@_fwd_op.register_fake
def _(x, weight, labels, start, size, ignore_index, label_smoothing, z_loss, impl):
    # x.shape[0], not len(x): to a compiler that would be a constant.
    return x.new_empty(2 + (label_smoothing != 0.0), x.shape[0], dtype=compute_dtype(x))


@no_graph
def linear_cross_entropy_fwd(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary
) -> torch.Tensor:
    """stats[2 or 3, T]: lse, target and (with smoothing) logit_sum of x[T, E] weight[V/tp, E]^T.

    They are those of `cross_entropy_fwd`, made block by block: nothing of the logits is kept. The
    weight may have another dtype than x, which is then the one to compute in.
    """
    return _fwd_op(x, weight, labels, *vocabulary)


# ---------------------------------------------------------------- backward


@torch.library.custom_op("warpweave::linear_cross_entropy_bwd", mutates_args=("dw",))
def _bwd_op(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    dw: torch.Tensor,
    add: bool,
    want_dx: bool,
    dx_dtype: torch.dtype,
    start: int,
    size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    impl: str,
) -> torch.Tensor:
    vocabulary = Vocabulary(start, size, ignore_index, label_smoothing, z_loss, impl)
    columns, wide, want_dw = vocabulary.columns(weight), compute_dtype(x), dw.numel() > 0
    dx = x.new_empty(x.shape if want_dx else 0, dtype=dx_dtype)
    total, product = dw, _product_impl(impl)
    if dw.dtype != wide and len(x) > _row_step(x, columns):
        total = torch.empty_like(dw, dtype=wide)  # several products are added: not in 16 bits
    with no_autocast(x):
        for rows, blocks in _blocks(x, columns):
            sums = x.new_empty(x[rows].shape if want_dx else 0, dtype=wide)
            for cols in blocks:
                w = weight[cols].to(x.dtype)
                z = gemm(x[rows], w.t())
                vocabulary.dz_(dloss[rows], z, labels[rows], lse[rows], cols.start)
                if want_dx:
                    gemm_into(z, w, sums, cols.start > 0, impl=product)
                if want_dw:
                    more = rows.start > 0 or (add and total is dw)
                    gemm_into(z.t(), x[rows], total[cols], more, impl=product)
                del z
            if want_dx:
                dx[rows] = sums
        if not add:
            dw[columns if len(x) else 0 :] = 0
        if total is not dw:
            total = total[:columns]
            dw[:columns] = dw[:columns] + total if add else total
    return dx


@_bwd_op.register_fake
def _(dloss, x, weight, labels, lse, dw, add, want_dx, dx_dtype, *vocabulary):
    return x.new_empty(x.shape if want_dx else 0, dtype=dx_dtype)


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
    """dx[T, E] in `dx_dtype` (None: not made), with dW added to `dw` or written over it.

    dloss[T] are the losses' gradients and lse[T] the log-sum-exp over all shards. dw[V/tp, E] has
    the weight's dtype, float32 or float64; its padding rows get nothing. With 16-bit `dw` and more
    tokens than a block has rows, a float32 sum stands beside it.
    """
    want_dx = dx_dtype is not None
    into = x.new_empty(0) if dw is None else dw
    dtype = dx_dtype or x.dtype
    dx = _bwd_op(dloss, x, weight, labels, lse, into, add, want_dx, dtype, *vocabulary)
    return dx if want_dx else None


# ---------------------------------------------------------------- both at once


@torch.library.custom_op("warpweave::linear_cross_entropy_rows_fwd", mutates_args=())
def _rows_fwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    start: int,
    size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    impl: str,
) -> list[torch.Tensor]:
    """[stats[k, N], the blocks' own lse[blocks, N], the blocks of z[N, V/tp] or their softmax]."""
    vocabulary = Vocabulary(start, size, ignore_index, label_smoothing, z_loss, impl)
    outside_vocabulary(labels, size, ignore_index)
    blocks, parts = [], []
    with no_autocast(x):
        for cols in _narrow(x, vocabulary.columns(weight)):
            blocks.append(gemm(x, weight[cols].t()))
            parts.append(vocabulary.stats(blocks[-1], labels, cols.start, _keeps_softmax(x, impl)))
    own_lse = torch.stack([part[0] for part in parts])
    return [_merged(parts, labels, ignore_index), own_lse, *blocks]


@_rows_fwd_op.register_fake
def _(x, weight, labels, start, size, ignore_index, label_smoothing, z_loss, impl):
    columns = Vocabulary(start, size, ignore_index, label_smoothing, z_loss, impl).columns(weight)
    stats = x.new_empty(2 + (label_smoothing != 0.0), len(x), dtype=compute_dtype(x))
    blocks = [x.new_empty(len(x), c.stop - c.start) for c in _narrow(x, columns)]
    return [stats, stats.new_empty(len(blocks), len(x)), *blocks]


@torch.library.custom_op(
    "warpweave::linear_cross_entropy_rows_bwd", mutates_args=("blocks", "dx", "dw")
)
def _rows_bwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    own_lse: torch.Tensor,
    blocks: list[torch.Tensor],
    dx: torch.Tensor,
    dw: torch.Tensor,
    add: bool,
    start: int,
    size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    impl: str,
) -> None:
    vocabulary = Vocabulary(start, size, ignore_index, label_smoothing, z_loss, impl)
    ones, wide, product = torch.ones_like(lse), lse.dtype, _product_impl(impl)
    sums = dx if dx.dtype == wide else torch.empty_like(dx, dtype=wide)
    with no_autocast(x):
        slices = _narrow(x, vocabulary.columns(weight))
        for cols, z, own in zip(slices, blocks, own_lse, strict=True):
            own = own if _keeps_softmax(x, impl) else None
            vocabulary.dz_(ones, z, labels, lse, cols.start, own)
            if dx.numel():
                gemm_into(z, weight[cols], sums, cols.start > 0, impl=product)
            if dw.numel():
                gemm_into(z.t(), x, dw[cols], add, impl=product)
        if not add:
            dw[vocabulary.columns(weight) :] = 0
    if sums is not dx:
        dx.copy_(sums)


@_rows_bwd_op.register_fake
def _(*arguments):
    return None


def _keeps_softmax(x: torch.Tensor, impl: str) -> bool:
    """Between forward and backward a block is its softmax: one exponential less per element.

    Not in 16 bits, where it would be rounded, and Triton's kernels gain nothing: they wait for
    memory.
    """
    return impl == "torch" and x.dtype == compute_dtype(x)


def _narrow(x: torch.Tensor, columns: int) -> list[slice]:
    """Column slices whose blocks [N, ...] and rows of dW [..., E] are both small enough."""
    return _column_slices(columns, max(x.shape), _sizes(x).elements)


@no_graph
def linear_cross_entropy_fwd_bwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    merge: Merge | None = None,
    dx_dtype: torch.dtype | None = None,
    want_dw: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(losses[T], dx[T, E], dW[V/tp, E]), the gradients being those of the losses' plain sum.

    dx has `dx_dtype` (None: not made); dW is float32 (float64 for float64). `merge` combines the
    stats[k, N] of N rows of this shard with the others'; it is called once per slice of rows,
    equally often for every shard.
    """
    wide, sizes = compute_dtype(x), _sizes(x)
    losses = x.new_empty(len(x), dtype=wide)
    dx = x.new_empty(x.shape if dx_dtype is not None else 0, dtype=dx_dtype)
    dw = x.new_empty(weight.shape if want_dw else 0, dtype=wide)
    w = weight.to(x.dtype)
    for rows in _slices(len(x), max(sizes.fewest_rows, sizes.elements // max(1, len(weight)))):
        here, mine = x[rows], labels[rows]
        stats, own_lse, *blocks = _rows_fwd_op(here, w, mine, *vocabulary)
        stats = stats if merge is None else merge(stats)
        losses[rows] = vocabulary.losses(stats, mine)
        own = dx[rows] if dx_dtype is not None else dx
        lses = stats[0], own_lse
        _rows_bwd_op(here, w, mine, *lses, blocks, own, dw, rows.start > 0, *vocabulary)
        del blocks  # before the next ones are made
    if len(x) == 0:
        dw.zero_()
    return losses, dx if dx_dtype is not None else None, dw if want_dw else None


@torch.library.custom_op("warpweave::linear_cross_entropy_fwd_bwd", mutates_args=())
def _fwd_bwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    want_dx: bool,
    want_dw: bool,
    start: int,
    size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    losses, dx, dw = linear_cross_entropy_fwd_bwd(
        x,
        weight,
        labels,
        Vocabulary(start, size, ignore_index, label_smoothing, z_loss, impl),
        dx_dtype=x.dtype if want_dx else None,
        want_dw=want_dw,
    )
    dx = x.new_empty(0) if dx is None else dx
    return losses, dx, x.new_empty(0, dtype=losses.dtype) if dw is None else dw


@_fwd_bwd_op.register_fake
def _(x, weight, labels, want_dx, want_dw, *vocabulary):
    wide = compute_dtype(x)
    dx = x.new_empty(x.shape if want_dx else 0)
    return (
        x.new_empty(x.shape[0], dtype=wide),
        dx,
        x.new_empty(weight.shape if want_dw else 0, dtype=wide),
    )


# ---------------------------------------------------------------- weight gradients


def recomputed_wgrad(
    weight: torch.Tensor, dtype: torch.dtype, run: Callable[[torch.Tensor, bool], None]
) -> torch.Tensor | None:
    """dW by ``run(buffer, add)``, in a buffer of its own or where `wgrad` says, but never later: it
    comes with dx from logits that would have to be made once more."""

    def make() -> torch.Tensor:
        buffer = torch.empty_like(weight, dtype=dtype)
        run(buffer, False)
        return buffer

    return wgrad(weight, make, run, now=True)


def scaled_wgrad(
    weight: torch.Tensor, dtype: torch.dtype, dw: torch.Tensor, g: torch.Tensor
) -> torch.Tensor | None:
    """dw[V, E] times the 0-dim g, as a tensor or where `wgrad` says; `dw` stays as it is."""

    def into(buffer: torch.Tensor, add: bool) -> None:
        if add:
            buffer.addcmul_(dw.to(buffer.dtype), g.to(buffer.dtype))
        else:
            torch.mul(dw, g, out=buffer)

    return wgrad(weight, lambda: (dw * g).to(dtype), into)


# ---------------------------------------------------------------- autograd and the public function


class _Recomputed(torch.autograd.Function):
    """losses[T]; backward makes the logits again."""

    @staticmethod
    def forward(ctx, x, weight, labels, vocabulary, dtype):
        ctx.vocabulary, ctx.x_dtype = vocabulary, x.dtype
        if not torch.compiler.is_compiling():
            ctx.leaf = weight
        x = x.to(dtype)
        stats = linear_cross_entropy_fwd(x, weight, labels, vocabulary)
        losses = vocabulary.losses(stats, labels)
        ctx.save_for_backward(
            x, weight, labels, stats[0], losses
        )  # losses: see once_differentiable
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        (*saved, _), (want_dx, want_dw, *_) = ctx.saved_tensors, ctx.needs_input_grad
        if torch.compiler.is_compiling():  # nothing is deferred, and dynamo reads no closures
            dw = torch.empty_like(saved[1]) if want_dw else None
            dx_dtype = ctx.x_dtype if want_dx else None
            dx = linear_cross_entropy_bwd(dloss, *saved, ctx.vocabulary, dw=dw, dx_dtype=dx_dtype)
            return dx, dw, None, None, None
        todo, made = [ctx.x_dtype] * want_dx, []

        def run(buffer, add):  # dW, with dx in the same pass
            dx_dtype = todo.pop() if todo else None
            dx = linear_cross_entropy_bwd(
                dloss, *saved, ctx.vocabulary, dw=buffer, add=add, dx_dtype=dx_dtype
            )
            made.extend([] if dx is None else [dx])

        dw = recomputed_wgrad(ctx.leaf, grad_dtype(ctx.leaf), run) if want_dw else None
        if todo:
            run(None, False)
        return made.pop() if made else None, dw, None, None, None

    @staticmethod
    def spmd_typecheck(*, x, weight, labels):
        from spmd_types import rules

        return rules.einsum("t_,__,t->t", x, weight, labels)  # vocabulary and width whole


class _InForward(torch.autograd.Function):
    """The losses' sum, 0-dim; forward makes the gradients, backward scales them."""

    @staticmethod
    def forward(ctx, x, weight, labels, vocabulary, dtype):
        ctx.dtypes, (want_dx, want_dw, *_) = (x.dtype, grad_dtype(weight)), ctx.needs_input_grad
        if not torch.compiler.is_compiling():
            ctx.leaf = weight
        losses, dx, dw = _fwd_bwd_op(x.to(dtype), weight, labels, want_dx, want_dw, *vocabulary)
        loss = losses.sum()
        ctx.save_for_backward(dx, dw, loss)  # an output: all inputs
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (dx, dw, _), (x_dtype, dw_dtype) = ctx.saved_tensors, ctx.dtypes
        want_dx, want_dw, *_ = ctx.needs_input_grad
        dx = (dx.to(g.dtype) * g).to(x_dtype) if want_dx else None
        if torch.compiler.is_compiling():
            dw = (dw * g).to(dw_dtype) if want_dw else None
        else:
            dw = scaled_wgrad(ctx.leaf, dw_dtype, dw, g) if want_dw else None
        return dx, dw, None, None, None

    @staticmethod
    def spmd_typecheck(*, x, weight, labels):
        from spmd_types import rules

        return rules.einsum("t_,__,t->", x, weight, labels)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    recompute: bool | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """`cross_entropy` of the logits x[..., E] weight[V, E]^T, which are never held whole.

    Args:
        x: hidden states x[..., E]; differentiable, its gradient has its dtype.
        weight: the head's (or the tied embedding's) weight, a leaf parameter if its gradient is to
            go through `wgrad`. Under autocast both are cast to its dtype; otherwise they have one.
        labels: int64[...], one per token of x, in [0, vocab_size) or `ignore_index`.
        vocab_size: rows of the weight from there on are padding: outside softmax and smoothing,
            gradient 0. By default there is none.
        ignore_index, label_smoothing, z_loss, reduction: as for `cross_entropy`.
        recompute: True makes the logits a second time in the backward pass, False makes the
            gradients in the forward pass, for "mean" and "sum" only, and keeps dx and a float32 dW
            until then (the module's docstring compares them). None: False on a CPU where it can.
        impl: "triton", "torch" or None, for what is no product. Products are torch's, but
            `gemm_into` may take Triton unless this is "torch".

    Returns:
        The loss, 0-dim, or losses[...]; float32, float64 for float64.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit; on a CPU, a label that names no
            column (on a GPU its loss and the gradients that it touches are NaN).
    """
    check_options(reduction, label_smoothing, z_loss)
    dtype = check_linear_cross_entropy("linear_cross_entropy", x, weight, labels)
    impl = choose(impl, x, weight, labels)
    size = len(weight) if vocab_size is None else vocab_size
    if not 1 <= size <= len(weight):
        raise ValueError(f"vocab_size must be in [1, {len(weight)}], got {size}")
    vocabulary = Vocabulary(0, size, ignore_index, label_smoothing, z_loss, impl)
    tokens = (x.flatten(0, -2), weight, labels.flatten(), vocabulary, dtype)
    if in_forward(reduction, recompute, x, weight):
        loss = _InForward.apply(*tokens)
    else:
        losses = _Recomputed.apply(*tokens)
        loss = losses.view(labels.shape) if reduction == "none" else losses.sum()
    return loss / (labels != ignore_index).sum().clamp(min=1) if reduction == "mean" else loss


def in_forward(
    reduction: str, recompute: bool | None, x: torch.Tensor, weight: torch.Tensor
) -> bool:
    """Whether the gradients are made in the forward pass; ValueError where they cannot be."""
    if recompute is False and reduction == "none":
        raise ValueError(
            'recompute=False needs one gradient for all tokens, so reduction "mean" or "sum"'
        )
    if recompute is None:
        recompute = x.device.type != "cpu" or reduction == "none"
    return wants_gradient(x, weight) and not recompute


def check_linear_cross_entropy(
    name: str, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, parts: int = 1
) -> torch.dtype:
    """The dtype to compute in; ValueError where shapes or dtypes do not fit.

    x[T/parts, ..., E] may be one of several slices of the tokens that labels[T, ...] belong to.
    """
    if x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name} needs x[..., E] and weight[V, E], got {[*x.shape]} and {[*weight.shape]}"
        )
    tokens = (x.shape[0] * parts, *x.shape[1:-1])
    if labels.shape != tokens or labels.dtype != torch.int64:
        raise ValueError(
            f"{name} needs labels int64{[*tokens]}, got {labels.dtype} {[*labels.shape]}"
        )
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"{name} needs floating point, got x {x.dtype}, weight {weight.dtype}")
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    if x.dtype != weight.dtype:
        raise ValueError(f"{name}: dtypes differ: x {x.dtype}, weight {weight.dtype}")
    return x.dtype
