"""Loss of a linear head, cross_entropy(x W^T, labels), without ever holding all logits.

    z[T, V] = x[T, E] W[V, E]^T                loss, dz: as in `cross_entropy`, from z's rows
    dx[T, E] = dz W                            dW[V, E] = dz^T x

The vocabulary is processed in blocks, each like a vocabulary shard in `parallel.tensor.loss`. A
block yields the log-sum-exp, target logit and logit sum of its columns, and these are merged. With
the merged log-sum-exp, the block's columns of dz are computed in place of its logits. The kernels
are those of `cross_entropy`, the products the vendor's. There are two orders of work:

recompute       Forward computes the blocks of z and keeps lse[T]; backward recomputes each block.
                8 T V E FLOPs in all instead of 6. Holds one block of z (2^26 elements on a GPU,
                2^20 on a CPU, for any T and V) and float32 sums of dx for the block's rows. Accepts
                any gradient per token. A block's rows of dW are one product over (up to 16384)
                tokens, written once, in float32, to the gradient buffer if there is one.
                (Wijmans et al. 2024, arXiv:2411.09009, fused into one kernel.)
in forward      For a sum or a mean, all tokens have the same loss gradient g. So forward computes
                dx and dW for g = 1 from each block, and backward multiplies them by g on the
                device. 6 T V E FLOPs. Holds z of some rows (2^26 or 2^20 elements, but at least
                4096 or 1024 rows) and, from forward to backward, dx and a float32 dW[V, E], which
                is read and written once per block. (Liger, Hsu et al. 2024, arXiv:2410.10989.)

To compare the speed: adding to dW moves 8 to 20 V E bytes per block, and recomputing the block's C
rows takes 2 C V E FLOPs. A CPU does about ten FLOPs in the time of a byte, so "in forward" is
faster from a few hundred rows on. An H100 does 200, so the two are equal at one or two thousand
rows. There, z[C, V] and dW take gigabytes (1 GB and 2.1 GB for Llama 3's 128256 x 4096) to save
at most a quarter of the head. So recompute=None recomputes on a GPU but not on a CPU.

A forward kernel that keeps tiles of z in registers would save writing and reading each block, but
lose as much or more against the vendor's products, so there is none (docs/performance.md).

z is rounded to the dtype of x, like the output of a linear layer. Everything after it is float32
(float64 for float64), as in `cross_entropy`. Sums over blocks are float32. Results are
deterministic.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from warpweave.kernels.cross_entropy.in_forward import fwd_bwd_op, linear_cross_entropy_fwd_bwd
from warpweave.kernels.cross_entropy.recompute import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary, check_options
from warpweave.kernels.gemm.local import LOCAL, Local
from warpweave.kernels.overlap.gathering import Gathering
from warpweave.kernels.runtime.beside import beside_dtensors, is_dtensor
from warpweave.kernels.runtime.dispatch import choose, once_differentiable, wants_gradient
from warpweave.kernels.runtime.dtypes import operand_dtype
from warpweave.kernels.runtime.wgrad import grad_dtype, wgrad, wgrad_buffer


class _Recomputed(torch.autograd.Function):
    """losses[T], with a backward that recomputes the logits."""

    @staticmethod
    def forward(ctx, x, weight, labels, vocabulary, dtype, ranks):
        ctx.ranks, ctx.x_dtype, ctx.leaf = ranks, x.dtype, weight
        ctx.vocabulary = vocabulary._replace(start=ranks.first_column(len(weight)))
        x = x.to(dtype)

        def stats_of(part: torch.Tensor | Gathering, first: int) -> torch.Tensor:
            mine = labels[first : first + part.shape[0]]
            return linear_cross_entropy_fwd(part, weight, mine, ctx.vocabulary).t()

        stats = ranks.merge(ranks.column_product(x, stats_of).t())
        losses = vocabulary.losses(stats, labels)
        # The losses are saved because of once_differentiable.
        ctx.save_for_backward(x, weight, labels, stats[0], losses)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        (x, weight, labels, lse, _), ranks, leaf = ctx.saved_tensors, ctx.ranks, ctx.leaf
        want_dx, want_dw, *_ = ctx.needs_input_grad
        # dW is computed with dx from one recomputation of the logits, so it is not deferred.
        buffer, add, dw = wgrad_buffer(leaf, grad_dtype(leaf)) if want_dw else (None, False, None)
        dx = linear_cross_entropy_bwd(
            dloss,
            ranks.gather(x),
            weight,
            labels,
            lse,
            ctx.vocabulary,
            dw=buffer,
            add=add,
            dx_dtype=ranks.term_dtype(ctx.x_dtype) if want_dx else None,
        )
        if want_dx:
            dx = ranks.sum(dx).to(ctx.x_dtype)
        return dx, dw, *[None] * 4

    @staticmethod
    def spmd_typecheck(*, x, weight, labels, ranks):
        return ranks.loss_type("t_,v_,t->t", ranks.column_input_type(x), weight, labels)


class _InForward(torch.autograd.Function):
    """The 0-dim sum of the losses: forward computes the gradients, backward scales them."""

    @staticmethod
    def forward(ctx, x, weight, labels, vocabulary, dtype, ranks):
        ctx.dtypes, (want_dx, want_dw, *_) = (x.dtype, grad_dtype(weight)), ctx.needs_input_grad
        ctx.leaf = weight
        losses, dx, dw = _fwd_bwd(
            ranks,
            x.to(dtype),
            weight,
            labels,
            vocabulary._replace(start=ranks.first_column(len(weight))),
            dx_dtype=ranks.term_dtype(dtype) if want_dx else None,
            want_dw=want_dw,
        )
        if want_dx:
            dx = dx.to(dtype)
        loss = losses.sum()
        ctx.save_for_backward(dx, dw, loss)  # an output stands for all inputs
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (dx, dw, _), (x_dtype, dw_dtype) = ctx.saved_tensors, ctx.dtypes
        want_dx, want_dw, *_ = ctx.needs_input_grad
        dx = (dx.to(g.dtype) * g).to(x_dtype) if want_dx else None
        dw = _scaled(ctx.leaf, dw, g, dw_dtype) if want_dw else None
        return dx, dw, *[None] * 4

    @staticmethod
    def spmd_typecheck(*, x, weight, labels, ranks):
        return ranks.loss_type("t_,v_,t->", ranks.column_input_type(x), weight, labels)


def _fwd_bwd(
    ranks: Local,
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    dx_dtype: torch.dtype | None,
    want_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`linear_cross_entropy_fwd_bwd` for this rank's tokens; dx is summed over the ranks."""
    if ranks is LOCAL:  # one operator, which a compiler does not look into
        return fwd_bwd_op(x, weight, labels, dx_dtype is not None, want_dw, vocabulary)
    wanted = {"merge": ranks.merge, "dx_dtype": dx_dtype, "want_dw": want_dw}
    tokens = weight, labels, vocabulary
    if ranks.chunks is not None:
        return linear_cross_entropy_fwd_bwd(x, *tokens, chunks=ranks.chunks, **wanted)
    losses, dx, dw = linear_cross_entropy_fwd_bwd(ranks.gather(x), *tokens, **wanted)
    return losses, dx if dx_dtype is None else ranks.sum(dx), dw


def _scaled(
    weight: torch.Tensor, dw: torch.Tensor, g: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return dw[V, E] times the 0-dim g, or pass it to `wgrad`; `dw` itself is not changed."""

    def into(buffer: torch.Tensor, add: bool) -> None:
        if add:
            buffer.addcmul_(dw.to(buffer.dtype), g.to(buffer.dtype))
        else:
            torch.mul(dw, g, out=buffer)

    return wgrad(weight, lambda: (dw * g).to(dtype), into)


@beside_dtensors("x")
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
        x: hidden states x[..., E]; differentiable, and its gradient has its dtype. A DTensor's
            tokens may be sharded; its features, the weight and uneven shards are gathered.
        weight: the weight of the head or the tied embedding, a leaf parameter if its gradient is to
            go through `wgrad`. Under autocast x and weight are cast to its dtype; otherwise their
            dtypes must be equal.
        labels: int64[...], one per token of x, in [0, vocab_size) or `ignore_index`.
        vocab_size: rows of the weight from there on are padding: outside softmax and smoothing,
            gradient 0. By default there is no padding.
        ignore_index, label_smoothing, z_loss, reduction: as for `cross_entropy`.
        recompute: True recomputes the logits in the backward pass. False computes the gradients in
            the forward pass, only for "mean" and "sum", and keeps dx and a float32 dW until the
            backward (the module's docstring compares them). None is False on a CPU if possible.
        impl: "triton", "torch" or None, for the kernels of the loss. Products are torch's, but
            `gemm_into` may choose Triton unless this is "torch".
    Returns:
        The loss, 0-dim, or losses[...]; float32, float64 for float64.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit; on a CPU, a label is not a column
            (on a GPU its loss and the gradients that it affects are NaN).

    Examples:
        >>> x, weight = torch.randn(2, 16, 64), torch.randn(256, 64)
        >>> linear_cross_entropy(x, weight, torch.arange(32).view(2, 16)).shape
        torch.Size([])
    """
    check_options(reduction, label_smoothing, z_loss)
    if is_dtensor(x):
        options: dict[str, Any] = {
            "vocab_size": vocab_size, "ignore_index": ignore_index, "z_loss": z_loss,
            "label_smoothing": label_smoothing, "recompute": recompute, "impl": impl,
        }  # fmt: skip
        check_linear_cross_entropy("linear_cross_entropy", x, weight, labels)
        return _of_own_tokens(x, weight, labels, reduction, options)
    impl = choose(impl, x, weight, labels)
    dtype = check_linear_cross_entropy("linear_cross_entropy", x, weight, labels)
    size = len(weight) if vocab_size is None else vocab_size
    if not 1 <= size <= len(weight):
        raise ValueError(f"vocab_size must be in [1, {len(weight)}], got {size}")
    vocabulary = Vocabulary(0, size, ignore_index, label_smoothing, z_loss, impl)
    loss = head_loss(x, weight, labels, vocabulary, dtype, reduction, recompute)
    return loss / (labels != ignore_index).sum().clamp(min=1) if reduction == "mean" else loss


def _of_own_tokens(
    x: Any, weight: Any, labels: Any, reduction: str, options: dict[str, Any]
) -> torch.Tensor:
    """The loss of DTensors, which each rank computes from its own tokens.

    The loss and the gradient of the weight are partial sums over the ranks that have different
    tokens.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate  # already imported: x is one

    mesh, placed = x.device_mesh, x.placements
    cut = [p for p in placed if p.is_shard() and p.dim < x.ndim - 1]
    even = all(
        x.size(p.dim) % prod(n for n, q in zip(mesh.shape, placed, strict=True) if q == p) == 0
        for p in cut
    )
    rows = [p if even and p in cut else Replicate() for p in placed]
    sums = [Partial() if p.is_shard() else p for p in rows]
    own_x = x.redistribute(placements=rows).contiguous().to_local(grad_placements=rows)
    own_labels = labels.redistribute(placements=rows).to_local()
    whole = weight.redistribute(placements=[Replicate()] * mesh.ndim)
    own_weight = whole.contiguous().to_local(grad_placements=sums)
    each = reduction == "none"
    how = "none" if each else "sum"
    loss = linear_cross_entropy(own_x, own_weight, own_labels, reduction=how, **options)
    found = DTensor.from_local(loss, mesh, rows if each else sums, run_check=False)
    if reduction != "mean":
        return found
    return found / (labels != options["ignore_index"]).sum().clamp(min=1)


def head_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: Vocabulary,
    dtype: torch.dtype,
    reduction: str,
    recompute: bool | None,
    ranks: Local = LOCAL,
) -> torch.Tensor:
    """losses[...] for checked arguments, or their sum unless `reduction` is "none".

    Raises ValueError if recompute=False is not possible.
    """
    if recompute is False and reduction == "none":
        raise ValueError(
            "recompute=False needs the same incoming gradient for every token; pass "
            'reduction="mean" or reduction="sum"'
        )
    if recompute is None:
        recompute = x.device.type != "cpu" or reduction == "none"
    tokens = x.flatten(0, -2), weight, labels.flatten(), vocabulary, dtype, ranks
    if wants_gradient(x, weight) and not recompute:
        return _InForward.apply(*tokens)
    losses = _Recomputed.apply(*tokens)
    return losses.view(labels.shape) if reduction == "none" else losses.sum()


def check_linear_cross_entropy(
    name: str, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, parts: int = 1
) -> torch.dtype:
    """Return the compute dtype, or raise ValueError if shapes or dtypes do not fit.

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
        raise ValueError(f"{name} needs float dtypes, got x {x.dtype}, weight {weight.dtype}")
    return operand_dtype(name, x, {"weight": weight})
