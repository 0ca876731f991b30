"""Rules for functions that DTensor computes wrongly, or not at all, in a declared model.

`tests/test_declare_rules.py` compares torch's losses, reductions, norms and in-place operators with
one device. It found the following kinds of silent errors in DTensor, in addition to those that
`memory` corrects. Each rule here corrects one:

* **The mean of a loss.** If DTensor has no rule for a function, it derives the layout from the
  function's decomposition, but runs the function itself on each rank's part. If the result depends
  on the number of elements, for example in the backward of a mean, each rank divides by its local
  number. `_elementwise_loss` computes the losses of single elements and then their mean.
* **All dims, as an empty list.** The backward of ``x.amax()`` and of a norm of order inf sums over
  ``dim=()``, which DTensor treats as no dims. The rules name all dims.
* **Negative dims.** A cumulative sum over ``dim=-1`` stays within each rank, and the gradient of
  ``x.select(-1, 0)`` has the wrong layout. The rules count dims from the front.
* **Norms, products and quantiles of partial sums or sharded dims** fail in the backward, far from
  the line that caused the failure. The rules pass them whole tensors.

`_whole` computes rare functions: every rank gathers the arguments and computes the whole result, as
one device would. It costs an all-gather and the memory of the whole tensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.nn import _reduction
from torch.utils._pytree import tree_map

from warpweave.kernels.runtime.beside import as_dtensor
from warpweave.layers.sharding.layouts import gather_strided, gather_where, is_cut, sum_partial

Function = Callable[..., Any]


# ---------------------------------------------------------------- layouts


def _even(x: Any) -> Any:
    """Gather the dims of x that their ranks do not share evenly: a rank might have no elements."""
    if not isinstance(x, DTensor):
        return x
    ranks: dict[int, int] = {}
    for p, size in zip(x.placements, x.device_mesh.shape, strict=True):
        if isinstance(p, Shard):
            ranks[p.dim] = ranks.get(p.dim, 1) * size
    uneven = tuple(d for d, n in ranks.items() if x.size(d) % n)
    return _unshard(x, uneven) if uneven else x


def _evenly(func: Function, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(_even(gather_strided(x)), *args, **kwargs)


def _unshard(x: Any, dims: tuple[int, ...]) -> Any:
    """Reduce partial sums of x and gather these dims on every rank."""
    x = sum_partial(x)
    dims = tuple(d % x.ndim for d in dims)
    return gather_where(x, [is_cut(p) and p.dim in dims for p in x.placements])


def own_part(x: DTensor, cuts: list, grads: list) -> Tensor:
    """This rank's part of x in the placements `cuts`; its gradient has the placements `grads`."""
    # DTensor assumes that a gradient has the strides of x, so make both contiguous.
    cut: Any = x.redistribute(placements=cuts).contiguous()
    own = cut.to_local(grad_placements=grads)
    if own.requires_grad:
        own.register_hook(lambda grad: None if grad is None else grad.contiguous())
    return own


def _whole(func: Function, *args: Any, **kwargs: Any) -> Any:
    """Compute func of whole tensors on every rank."""
    mesh: Any = None

    def gather(x: Any) -> Any:
        nonlocal mesh
        if not isinstance(x, DTensor):
            return x
        mesh = x.device_mesh
        whole = [Replicate()] * mesh.ndim
        return own_part(x, whole, whole)

    args, kwargs = tree_map(gather, (args, kwargs))
    return tree_map(lambda x: as_dtensor(x, mesh), func(*args, **kwargs))


def _of_whole_sums(func: Function, *args: Any, **kwargs: Any) -> Any:
    """Reduce partial sums in func's tensors and results' gradients: its backward has no rule."""
    args, kwargs = tree_map(lambda x: _even(sum_partial(x)), (args, kwargs))

    def watch(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(sum_partial)
        return x

    return tree_map(watch, func(*args, **kwargs))


def _then_sum(func: Function, *args: Any, **kwargs: Any) -> Any:
    """Compute func and reduce its partial sums immediately; DTensor fails if it does so later."""
    return sum_partial(func(*args, **kwargs))


def join_tensors(func: Function, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Call func on a list of tensors; if partial sums and maxima are mixed, reduce them first."""
    partial = {p for x in tensors if isinstance(x, DTensor) for p in x.placements if p.is_partial()}
    if len(partial) > 1:
        tensors = [sum_partial(x) for x in tensors]
    return func(tensors, *args, **kwargs)


# ---------------------------------------------------------------- losses


def _class_loss(loss: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Compute `F.cross_entropy` or `F.nll_loss` with the mean over all ranks' targets. The mean is
    the sum over all ranks, divided by the number (or weight) of all targets. DTensor takes the mean
    of the ranks' means, which differs if ranks ignore different numbers of targets."""
    bound = inspect.signature(loss).bind(*args, **kwargs)
    given, reduction = bound.arguments, _take_reduction(bound.arguments)
    target, weight = given["target"], given.get("weight")
    given["reduction"] = reduction
    if reduction != "mean" or target.is_floating_point():
        return loss(*bound.args, **bound.kwargs)
    given["reduction"] = "sum"
    total = loss(*bound.args, **bound.kwargs)
    wide = torch.promote_types(total.dtype, torch.float32)
    counted = (target != given.get("ignore_index", -100)).to(wide)
    if weight is not None:
        counted = counted * weight[target.clamp(0, len(weight) - 1)]
    return (total.to(wide) / counted.sum()).to(total.dtype)


def _take_reduction(given: dict[str, Any]) -> str:
    """The reduction that a loss's arguments request; removes the deprecated arguments for it."""
    legacy = given.pop("size_average", None), given.pop("reduce", None)
    if legacy != (None, None):
        return _reduction.legacy_get_string(*legacy)
    return given.get("reduction", "mean")


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda each: each,
    "mean": torch.mean,
    "sum": torch.sum,
    "batchmean": lambda each: each.sum() / each.size(0),  # of F.kl_div alone
}


# The weighted mean of these is a product and two sums, which DTensor computes correctly.
_WEIGHTED = (F.mse_loss, F.l1_loss, F.huber_loss)


def _elementwise_loss(loss: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the losses of single elements, then reduce them; DTensor has a rule for that."""
    args, kwargs = tree_map(sum_partial, (args, kwargs))
    bound = inspect.signature(loss).bind(*args, **kwargs)
    given = bound.arguments
    reduction = _take_reduction(given)
    if (reduction == "batchmean" and loss is not F.kl_div) or reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction!r} is not a reduction of {loss.__name__}")
    given["reduction"] = "none"
    if loss is F.l1_loss and given.get("weight") is None:
        given["weight"] = _dropped_weight(given["input"])
    if loss in _WEIGHTED and given.get("weight") is not None:
        given["reduction"] = reduction
        return loss(*bound.args, **bound.kwargs)
    return _REDUCTIONS[reduction](loss(*bound.args, **bound.kwargs))


def _dropped_weight(x: DTensor) -> Any:
    """The weight argument of the current call of `F.l1_loss`. torch 2.13 does not pass it to a mode
    such as ours, so read it from the caller's frame."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    weight = None if frame is None else frame.f_locals.get("weight")
    return as_dtensor(weight, x.device_mesh)


# ---------------------------------------------------------------- reductions


def _every(x: Tensor) -> tuple[int, ...]:
    return tuple(range(x.ndim))


def _named_dims(func: Function, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a reduction whose second argument is ``dim``, with all dims listed explicitly."""
    dim = kwargs.pop("dim") if "dim" in kwargs else args[0] if args else None
    if (isinstance(dim, (tuple, list)) and not dim) or (dim is None and func in _ALL_BY_DEFAULT):
        dim = _every(x)
    return func(_even(x), *(() if dim is None else (dim,)), *args[1:], **kwargs)


def _logsumexp(func: Function, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Restore reduced dims afterwards: DTensor shifts sharded dims as if none were kept."""
    y = _named_dims(func, x, dim)
    if not keepdim:
        return y
    dims = (dim,) if isinstance(dim, int) else tuple(dim) or _every(x)
    for d in sorted(d % x.ndim for d in dims):
        y = y.unsqueeze(d)
    return y


def _deviation(func: Function, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _named_dims(partial(_of_whole_sums, func), x, *args, **kwargs)


def _from_front(func: Function, x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
    """Call a function along a dim with the dim counted from the front."""
    return func(x, dim + x.ndim if -x.ndim <= dim < 0 else dim, *args, **kwargs)


def _norm(func: Function, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a vector norm with explicit dims, after reducing partial sums."""
    names = ("p" if func in _P_NORMS else "ord", "dim")
    given = dict(zip(names, args, strict=False)) | kwargs
    default = None if func is torch.linalg.norm else 2
    order, dim = given.pop(names[0], default), given.pop("dim", None)
    if order == 0:  # a count, whose gradient of zeros would have no layout
        return _whole(func, x.detach(), order, dim, *args[2:], **given)
    vector = isinstance(order, (int, float)) and (func is not torch.linalg.norm or x.ndim == 1)
    if vector and dim in (None, (), []):
        dim = _every(x)
    return _of_whole_sums(func, x, order, dim, *args[2:], **given)


def _dist(func: Function, x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return _norm(torch.linalg.vector_norm, sum_partial(x) - sum_partial(other), p)


# ---------------------------------------------------------------- normalizations


def _rms_norm(
    func: Function, x: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any
) -> Tensor:
    x = _unshard(x, tuple(range(-len(normalized_shape), 0)))
    return func(x, normalized_shape, *args, **kwargs)


def _group_norm(
    func: Function, x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """Normalize each rank's samples locally, with gathered channels and positions."""
    ranks = prod(n for n, p in zip(x.device_mesh.shape, x.placements, strict=True) if p == Shard(0))
    cuts = [p if p == Shard(0) and not x.size(0) % ranks else Replicate() for p in x.placements]
    whole, sums = [Replicate()] * len(cuts), [Partial() if p.is_shard() else p for p in cuts]
    weight, bias = (None if t is None else own_part(t, whole, sums) for t in (weight, bias))
    y = func(own_part(x, cuts, cuts), num_groups, weight, bias, eps)
    return DTensor.from_local(y, x.device_mesh, cuts, run_check=False)


def _attention_rule(
    attend: Callable[..., Tensor],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> DTensor:
    """torch's attention of query[B, H, S, D], computed separately on each rank's part.

    Shards of the batch and the heads stay. If the sequence is sharded, each rank keeps its queries
    and gathers keys and values (context parallelism by all-gather; their gradients are
    reduce-scattered). Anything else that is sharded or partial is replicated first.

    Raises ValueError unless the tensors have four dims.
    """
    mesh, dims = query.device_mesh, (query.ndim, key.ndim, value.ndim)
    if dims != (4, 4, 4):
        raise ValueError(
            "attention in a model sharded by `shard` expects query, key and value [B, H, S, D], "
            f"got tensors with {dims} dims"
        )
    if enable_gqa:
        group = query.size(1) // key.size(1)
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    where = [
        p if p in (Shard(0), Shard(1), Shard(2)) and not query.size(p.dim) % ranks else Replicate()
        for p, ranks in zip(query.placements, mesh.shape, strict=True)
    ]
    if Shard(2) in where and is_causal:
        shape = query.size(2), key.size(2)
        attn_mask = as_dtensor(
            torch.ones(shape, dtype=torch.bool, device=query.device).tril(), mesh
        )
        is_causal = False
    mask = None if attn_mask is None else _own_mask(attn_mask, where)
    q = _own_input(query, where, where)
    k, v = (_own_input(x, _keys_beside(x, query, where), where) for x in (key, value))
    y = attend(q, k, v, mask, dropout_p, is_causal, scale=scale)
    return DTensor.from_local(y, mesh, where, run_check=False)


def _keys_beside(x: DTensor, query: DTensor, where: list) -> list:
    """The placements of keys or values for queries that are sharded as `where` says. Sequences are
    whole. So are heads or samples if a single one is broadcast to all queries."""
    return [
        p if p.is_shard() and p.dim < 2 and x.size(p.dim) == query.size(p.dim) else Replicate()
        for p in where
    ]


def _own_input(x: DTensor, cuts: list, where: list) -> Tensor:
    """This rank's part of x by the placements `cuts`, for an operator that is sharded as `where`.
    On mesh axes that shard the operator but not x, the gradient of x is a partial sum."""
    grads = [
        Partial() if p.is_shard() and not cut.is_shard() else cut
        for p, cut in zip(where, cuts, strict=True)
    ]
    return own_part(x, cuts, grads)


def _own_mask(mask: DTensor, where: list) -> Tensor:
    """This rank's part of a mask, which may broadcast, for queries sharded as `where` says."""
    ahead = 4 - mask.ndim
    cuts = [
        Shard(p.dim - ahead) if p.is_shard() and p.dim >= ahead and mask.size(p.dim - ahead) > 1
        else Replicate()
        for p in where
    ]  # fmt: skip
    return _own_input(mask, cuts, where)


def _cat_rule(
    func: Callable[..., Tensor], tensors: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Concatenate tensors; those of shape (0,) contribute only their dtype, as in torch. DTensor
    has no rule for them, and the caches of transformers start with one."""
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    joined = join_tensors(func, [x for x in tensors if x.shape != (0,)] or tensors, *args, **kwargs)
    return joined.to(dtype)


# ---------------------------------------------------------------- the table


def _named(*names: str) -> list[Function]:
    """Functions of torch and methods of tensors with these names."""
    return [getattr(of, n) for n in names for of in (torch, Tensor) if hasattr(of, n)]


_P_NORMS = _named("norm")
_ALL_BY_DEFAULT = _named("amax", "amin")

_TABLE: tuple[tuple[Function, list[Function]], ...] = (
    (_class_loss, [F.cross_entropy, F.nll_loss]),
    (_elementwise_loss, [
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.kl_div,
        F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss,
        F.gaussian_nll_loss, F.hinge_embedding_loss, F.margin_ranking_loss, F.triplet_margin_loss,
    ]),
    (_whole, [
        F.cosine_embedding_loss, F.multi_margin_loss, F.multilabel_margin_loss, F.ctc_loss,
        F.multilabel_soft_margin_loss, F.triplet_margin_with_distance_loss, F.pdist, F.bilinear,
        F.embedding_bag, F.local_response_norm,
        *_named("quantile", "nanquantile", "prod", "cumprod", "cummax", "cummin", "renorm"),
        *_named("cdist", "trace", "trapezoid", "trapz", "cov", "corrcoef", "scatter_reduce", "put"),
        *_named("masked_scatter", "index_put", "slice_scatter", "select_scatter"),
        *_named("diagonal_scatter"),
    ]),
    (_of_whole_sums, [
        F.normalize, F.cosine_similarity, F.pairwise_distance, torch.linalg.matrix_norm,
        *_named("lerp"),
    ]),
    (_deviation, _named("std", "var", "std_mean", "var_mean")),
    (_norm, [*_P_NORMS, torch.linalg.vector_norm, torch.linalg.norm]),
    (_dist, _named("dist")),
    (_named_dims, _named("sum", "mean", "nansum", "nanmean", "amax", "amin")),
    (_logsumexp, _named("logsumexp")),
    (_evenly, _named("max", "min", "aminmax", "argmax", "argmin", "all", "any")),
    (_from_front, _named("cumsum", "logcumsumexp", "select")),
    (_then_sum, _named("gather", "take_along_dim")),
    (join_tensors, _named("stack")),
    (_rms_norm, [F.rms_norm, torch.rms_norm]),
    (_group_norm, [F.group_norm]),
    (_attention_rule, [F.scaled_dot_product_attention]),
    (_cat_rule, [torch.cat, torch.concat, torch.concatenate]),
)  # fmt: skip
_RULES: dict[Function, Function] = {func: rule for rule, funcs in _TABLE for func in funcs}
_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def computed(func: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute func of DTensors, with its rule if it has one."""
    rule = _RULES.get(func)
    if rule is None:
        return func(*args, **kwargs)
    kwargs = {_NAMES.get(name, name): value for name, value in kwargs.items()}
    first = (kwargs.pop("input"),) if not args and "input" in kwargs else ()
    return rule(func, *first, *args, **kwargs)


# ---------------------------------------------------------------- outside a declared forward


@cache
def register_reductions() -> None:
    """Correct DTensor's layouts of losses, so that they are also right outside a declared forward.

    Operators that have a `reduction` argument but no rule in torch get one: they require whole
    tensors if they reduce, and accept any shards of equal shapes if they do not. A constant is
    never written to a partial sum. One call per process is enough.
    """
    aten = torch.ops.aten
    losses = "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy"
    for name in losses.split():
        for packet in (name, f"{name}_backward"):
            register_sharding(getattr(aten, packet).default)(_elementwise_shardings)
    for name in ("multi_margin_loss", "multi_margin_loss_backward"):
        register_sharding(getattr(aten, name).default)(partial(_whole_shardings, 1))
    for name, results in (("forward", 2), ("backward", 1)):
        op = getattr(aten, f"multilabel_margin_loss_{name}").default
        register_sharding(op)(partial(_whole_shardings, results))
    register_sharding(aten.fill_.Scalar)(_fill_shardings)


def _whole_shardings(results: int, *args: Any) -> list[tuple[list, list]]:
    """The only valid (placements of outputs, of arguments) for tensors that must be whole."""
    given = [Replicate() if hasattr(x, "placements") else None for x in args]
    return [([Replicate()] * results, given)]


def _elementwise_shardings(*args: Any) -> list[tuple[list, list]]:
    """Choices for a loss or its backward, whose first int is the reduction (0: no reduction)."""
    tensors = [x for x in args if hasattr(x, "placements")]
    reduces = next((x for x in args if type(x) is int), 1) != 0  # the default, a mean, is omitted
    choices = _whole_shardings(1, *args)
    if reduces or len({tuple(x.shape) for x in tensors}) > 1:
        return choices
    return choices + [
        ([Shard(d)], [Shard(d) if hasattr(x, "placements") else None for x in args])
        for d in range(len(tensors[0].shape))
    ]


def _fill_shardings(x: Any, value: Any) -> list[tuple[list, list]]:
    return [([p], [p, None]) for p in (Replicate(), *map(Shard, range(len(x.shape))))]
