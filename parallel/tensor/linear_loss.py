"""The head of a language model in one function: a linear layer whose output features, the
vocabulary, are cut over the tensor ranks, and the cross entropy of what it makes.

Neither forward nor backward holds logits: each rank goes over blocks of its own vocabulary shard
(`kernels.linear_cross_entropy` describes the two orders of work and what they cost), and the ranks
tell each other three numbers per token. Types and conventions are those of ``tensor``: T tokens, E
features, V the vocabulary padded to a multiple of the R ranks; sums over ranks are re-associated,
everything else is exact; weight gradients go through ``wgrad``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from warpweave.kernels.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    linear_cross_entropy_fwd_bwd,
)
from warpweave.kernels.cross_entropy.halves import check_options
from warpweave.kernels.cross_entropy.linear import (
    Merge,
    Vocabulary,
    check_linear_cross_entropy,
    in_forward,
    recomputed_wgrad,
    scaled_wgrad,
)
from warpweave.kernels.gemm.gradients import grad_dtype
from warpweave.kernels.runtime.dispatch import choose, once_differentiable
from warpweave.kernels.runtime.dtypes import no_autocast
from warpweave.parallel.collectives import (
    Pending,
    group_rank,
    group_size,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    sum_dtype,
)
from warpweave.parallel.tensor.embedding import check_vocabulary
from warpweave.parallel.tensor.ranks import TensorRanks


def _start_sum(dx: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Pending:
    """The ranks' terms of dx[T, E], each from its own part of the vocabulary, on their way."""
    return (start_reduce_scatter if sequence_parallel else start_all_reduce_)(dx, group)


def _own(vocabulary: Vocabulary, weight: torch.Tensor, group: dist.ProcessGroup) -> Vocabulary:
    """What this rank's weight[V/R, E] stands for."""
    return vocabulary._replace(start=group_rank(group) * len(weight))


def _over_ranks(group: dist.ProcessGroup) -> Merge:
    """Combine the ranks' stats[k, N]: one all-gather, merged on every rank in the same order."""

    def merge(stats: torch.Tensor) -> torch.Tensor:
        every = start_all_gather(stats.unsqueeze(0), group).wait()
        return torch.cat((every[:, 0].logsumexp(0)[None], every[:, 1:].sum(0)))

    return merge


class _Recomputed(torch.autograd.Function):
    """losses[T]; backward makes the logits again."""

    @staticmethod
    def forward(ctx, x, weight, labels, group, sequence_parallel, vocabulary, dtype):
        ctx.how, ctx.vocabulary = (group, sequence_parallel), _own(vocabulary, weight, group)
        ctx.x_dtype, ctx.parameter = x.dtype, weight
        with no_autocast(x):
            x = x.to(dtype)
            whole = TensorRanks(group, sequence_parallel).gather(x)
            stats = linear_cross_entropy_fwd(whole, weight, labels, ctx.vocabulary)
            stats = _over_ranks(group)(stats)
            losses = vocabulary.losses(stats, labels)
            ctx.save_for_backward(x, weight, labels, stats[0], losses)
            return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        x, weight, labels, lse, _ = ctx.saved_tensors
        leaf, (want_dx, want_dw, *_) = ctx.parameter, ctx.needs_input_grad
        todo, flying = [sum_dtype(x.dtype)] * want_dx, []

        def run(buffer, add):  # dW, with dx in the same pass
            dx = linear_cross_entropy_bwd(
                dloss,
                TensorRanks(*ctx.how).gather(x),
                weight,
                labels,
                lse,
                ctx.vocabulary,
                dw=buffer,
                add=add,
                dx_dtype=todo.pop() if todo else None,
            )
            flying.extend([] if dx is None else [_start_sum(dx, *ctx.how)])

        with no_autocast(dloss):
            dw = recomputed_wgrad(leaf, grad_dtype(leaf), run) if want_dw else None
            if todo:
                run(None, False)
            dx = flying.pop().wait().to(ctx.x_dtype) if flying else None
        return dx, dw, None, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, x, weight, labels, group, sequence_parallel):
        return _rule("t_,v_,t->t", x, weight, labels, group, sequence_parallel)


class _InForward(torch.autograd.Function):
    """The losses' sum, 0-dim; forward makes the gradients, backward scales them."""

    @staticmethod
    def forward(ctx, x, weight, labels, group, sequence_parallel, vocabulary, dtype):
        want_dx, want_dw, *_ = ctx.needs_input_grad
        ctx.x_dtype, ctx.parameter = x.dtype, weight
        with no_autocast(x):
            losses, dx, dw = linear_cross_entropy_fwd_bwd(
                TensorRanks(group, sequence_parallel).gather(x.to(dtype)),
                weight,
                labels,
                _own(vocabulary, weight, group),
                merge=_over_ranks(group),
                dx_dtype=sum_dtype(dtype) if want_dx else None,
                want_dw=want_dw,
            )
            if dx is not None:
                dx = _start_sum(dx, group, sequence_parallel).wait().to(dtype)
            loss = losses.sum()
            ctx.save_for_backward(dx, dw, loss)
            return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (dx, dw, _), leaf = ctx.saved_tensors, ctx.parameter
        with no_autocast(g):
            dx = dx if dx is None else (dx.to(g.dtype) * g).to(ctx.x_dtype)
            dw = dw if dw is None else scaled_wgrad(leaf, grad_dtype(leaf), dw, g)
        return dx, dw, None, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, x, weight, labels, group, sequence_parallel):
        return _rule("t_,v_,t->", x, weight, labels, group, sequence_parallel)


def _rule(equation, x, weight, labels, group, sequence_parallel):
    from spmd_types import I, P, rules

    x = TensorRanks(group, sequence_parallel).column_input_type(x)
    # exp-sum, target logit and sum of logits are each a sum over v
    return rules.all_reduce(rules.einsum(equation, x, weight, labels), group, src=P, dst=I)


def vocab_parallel_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    sequence_parallel: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "sum",
    recompute: bool | None = None,
    padded_vocab_size: int | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Cross entropy of the logits x weight^T, whose columns are cut over the group.

    With z[T, V/R] = x[T, E] W[V/R, E]^T and dz = dloss (softmax(z) (1 + 2 c lse) - (1 - e)
    onehot(label) - e/vocab_size), made and forgotten block by block,

    Forward:         loss[T]{I} = lse - (1 - e) z[label] - e/vocab_size sum_v z[v] + c lse^2 by one
                     all-gather of log-sum-exp, label's logit and (for e > 0) sum of each rank's
                     columns: 2 or 3 numbers per token and rank. "sum" adds them up.
    Input gradient:  dx[T, E]{I} = all-reduce(dz[T, V/R] W), its terms in fp32
    Weight gradient: dW[V/R, E]{S(0)} = dz^T x, no collective; exact

    With sequence_parallel the input is x[T/R, E]{S(0)}: x is gathered in the forward (and, where
    the logits are recomputed, in the backward) and

    Input gradient:  dx[T/R, E]{S(0)} = reduce-scatter(dz W)

    With recompute=False the gradients are made in the forward, collectives too; one all-gather of
    statistics per slice of rows is called there, and the backward calls none. A deferred weight
    gradient is then merely added later; with recompute=True it comes with dx and is not deferred.

    Args:
        x: x[..., E] replicated, or x[T/R, ..., E] with sequence_parallel.
        weight: weight[V/R, E], rows [r V/R, (r+1) V/R) of the whole on rank r; the leaf parameter.
        labels: int64[...] or int64[T, ...], the same on every rank of the group.
        group: the R tensor ranks; None for one.
        vocab_size: size of the vocabulary without padding; padding rows get gradient 0.
        sequence_parallel: tokens of x are cut over the group along dim 0.
        ignore_index: tokens with this label have loss zero and no gradient.
        label_smoothing, z_loss: e in [0, 1] and c >= 0.
        reduction: "sum", 0-dim, or "none", losses like `labels`.
        recompute: as for `linear_cross_entropy`; None is False on CPU tensors and "sum".
        padded_vocab_size: V; None is `vocab_size` rounded up to a multiple of R.
        impl: as for `linear_cross_entropy`.

    Returns:
        The loss in fp32 (fp64 for fp64), bit-equal on every rank of the group. The sum is to be
        divided by the global number of valid tokens.

    Raises:
        ValueError: the weight does not have V/R rows, other shapes, dtypes or options do not fit,
            or, for CPU tensors, a label is neither in the vocabulary nor `ignore_index` (on a GPU
            such a token's loss is NaN).
    """
    name = f"vocab_parallel_linear_cross_entropy on rank {group_rank(group)}"
    check_options(reduction, label_smoothing, z_loss)
    if reduction == "mean":
        raise ValueError(f'{name}: reduction must be "sum" or "none": no rank knows all tokens')
    check_vocabulary(name, "weight rows", len(weight), group, vocab_size, padded_vocab_size)
    if group is None:
        return linear_cross_entropy(
            x,
            weight,
            labels,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            recompute=recompute,
            impl=impl,
        )
    parts = group_size(group) if sequence_parallel else 1
    dtype = check_linear_cross_entropy(name, x, weight, labels, parts=parts)
    impl = choose(impl, x, weight, labels)
    vocabulary = Vocabulary(0, vocab_size, ignore_index, label_smoothing, z_loss, impl)
    tokens, how = (x.flatten(0, -2), weight, labels.flatten()), (group, sequence_parallel)
    if in_forward(reduction, recompute, x, weight):
        return _InForward.apply(*tokens, *how, vocabulary, dtype)
    losses = _Recomputed.apply(*tokens, *how, vocabulary, dtype)
    return losses.view(labels.shape) if reduction == "none" else losses.sum()
