"""A sweep of torch's losses, reductions, norms and in-place operators in a declared model.

Each row of the table is a function of tensors. On ranks, the first tensor is sharded over a dim,
possibly one that is not divisible by the ranks, or is a partial sum. The results and all gradients
must equal those of one device in float64.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from warpweave.layers.sharding.declare import shard

Row = tuple[str, Callable[..., Any], tuple[Tensor, ...]]
INF = float("inf")
SHAPE = (4, 5, 6)  # the dim of 5 is ragged on two ranks


def _draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _ids(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(7))


X, Y, Z = (_draw(seed, *SHAPE) for seed in range(3))
X[-1] *= 5  # the largest and smallest elements are on the last rank
X[:, -1] *= 5
X[..., -1] *= 5
P, Q = X.sigmoid() * 0.8 + 0.1, Y.sigmoid() * 0.8 + 0.1  # probabilities
SIGNS = torch.where(Y > 0, 1.0, -1.0).double()
ROWS, CLASSES = _draw(3, 6, 5), torch.tensor([3, -100, -100, 1, 0, 4])  # the first rank ignores two
SHARE = _draw(4, 5).sigmoid()  # a weight per class


# ---------------------------------------------------------------- the table


def _losses(how: str) -> Iterator[Row]:
    """List every loss of torch.nn.functional with this reduction."""
    elements = {
        "mse": (F.mse_loss, X, Y),
        "l1": (F.l1_loss, X, Y),
        "smooth_l1": (partial(F.smooth_l1_loss, beta=0.7), X, Y),
        "huber": (partial(F.huber_loss, delta=0.7), X, Y),
        "bce": (F.binary_cross_entropy, P, Q),
        "bce logits": (F.binary_cross_entropy_with_logits, X, Q),
        "soft_margin": (F.soft_margin_loss, X, SIGNS),
        "kl": (lambda x, t, **k: F.kl_div(x.log_softmax(-1), t, **k), X, Q),
        "kl log": (partial(F.kl_div, log_target=True), X, Y),
        "poisson": (partial(F.poisson_nll_loss, full=True), P, 3 * Q),
        "gaussian": (partial(F.gaussian_nll_loss, full=True), X, Y, Q),
        "hinge_embedding": (F.hinge_embedding_loss, X, SIGNS),
        "margin_ranking": (partial(F.margin_ranking_loss, margin=0.3), X, Y, SIGNS),
        "triplet": (partial(F.triplet_margin_loss, swap=True), X, Y, Z),
        "triplet distance": (F.triplet_margin_with_distance_loss, X, Y, Z),
        "cosine_embedding": (F.cosine_embedding_loss, X[:, 0], Y[:, 0], SIGNS[:, 0, 0]),
        "multi_margin": (F.multi_margin_loss, ROWS, _ids(5, 6)),
        "multilabel_margin": (F.multilabel_margin_loss, X[:, 0], _ids(6, 4, 6)),
        "multilabel_soft_margin": (F.multilabel_soft_margin_loss, X[:, 0], P[:, 0]),
        "cross_entropy": (F.cross_entropy, ROWS, CLASSES),
        "cross_entropy of probabilities": (F.cross_entropy, ROWS, ROWS.softmax(-1)),
        "nll": (lambda x, t, **k: F.nll_loss(x.log_softmax(1), t, **k), ROWS, CLASSES),
        "ctc": (_ctc, X, _ids(5, 5, 2) + 1),
    }
    for name, (loss, *given) in elements.items():
        yield f"{name} {how}", partial(loss, reduction=how), tuple(given)
    for name, loss in {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}.items():
        weighted = lambda x, t, w, loss=loss: loss(x, t, weight=w, reduction=how)  # noqa: E731
        yield f"{name} weighted {how}", weighted, (X, Y, Q)
    smooth = partial(F.cross_entropy, ignore_index=3, label_smoothing=0.2, reduction=how)
    yield f"cross_entropy smooth {how}", smooth, (ROWS, _ids(5, 6))
    per_class = lambda x, t: F.cross_entropy(x, t, SHARE, reduction=how)  # noqa: E731
    yield f"cross_entropy weighted {how}", per_class, (ROWS, CLASSES)
    positive = lambda x, t: F.binary_cross_entropy_with_logits(  # noqa: E731
        x, t, Z[0].abs(), pos_weight=Z[0, 0].abs(), reduction=how
    )
    yield f"bce logits weighted {how}", positive, (X, Q)
    weighted = lambda x, t: F.binary_cross_entropy(x, t, Z[0, 0].abs(), reduction=how)  # noqa: E731
    yield f"bce weighted {how}", weighted, (P, Q)


def _old_names() -> Iterator[Row]:
    """List arguments of losses that predate `reduction`, and positional ones."""
    for name, options in {"mean": {"reduce": True}, "sum": {"size_average": False}}.items():
        yield f"cross_entropy old {name}", partial(F.cross_entropy, **options), (ROWS, CLASSES)
        nll = lambda x, t, o=options: F.nll_loss(x.log_softmax(1), t, **o)  # noqa: E731
        yield f"nll old {name}", nll, (ROWS, CLASSES)
    placed = lambda x, t: F.cross_entropy(x, t, SHARE, None, 3, None, "mean", 0.2)  # noqa: E731
    yield "cross_entropy by position", placed, (ROWS, _ids(5, 6))


def _ctc(x: Tensor, targets: Tensor, **options: Any) -> Tensor:
    lengths = torch.full((5,), 4), torch.tensor([2, 1, 2, 2, 1])
    return F.ctc_loss(x.log_softmax(-1), targets, *lengths, **options)


def _modules() -> Iterator[Row]:
    for module, *given in (
        (nn.MSELoss(), X, Y), (nn.L1Loss(), X, Y), (nn.SmoothL1Loss(), X, Y),
        (nn.HuberLoss(), X, Y), (nn.BCELoss(), P, Q), (nn.BCEWithLogitsLoss(), X, Q),
        (nn.SoftMarginLoss(), X, SIGNS), (nn.KLDivLoss(reduction="batchmean"), X, Q),
        (nn.PoissonNLLLoss(), P, Q), (nn.GaussianNLLLoss(), X, Y, Q),
        (nn.HingeEmbeddingLoss(), X, SIGNS), (nn.MarginRankingLoss(), X, Y, SIGNS),
        (nn.TripletMarginLoss(), X, Y, Z), (nn.CrossEntropyLoss(), ROWS, CLASSES),
    ):  # fmt: skip
        yield type(module).__name__, module, tuple(given)


def _reductions() -> Iterator[Row]:
    # Over all dims, over one from the front or the back, and over two.
    for dim in (None, (), 0, 1, -1, (0, -1)):
        for name in ("sum", "mean", "nansum", "amax", "amin", "logsumexp"):
            if name != "logsumexp" or dim:
                yield f"{name} {dim}", _call(name, **_dim(dim)), (X,)
        for name in ("var", "std") if dim != () else ():
            yield f"{name} {dim}", _call(name, **_dim(dim)), (X,)
        for p in (0, 2, 3, INF, -INF):
            yield f"norm {p} {dim}", partial(torch.norm, p=p, dim=dim), (X,)
        for p in (2, INF):
            yield f"vector_norm {p} {dim}", partial(torch.linalg.vector_norm, ord=p, dim=dim), (X,)
        yield f"any {dim}", _truths("any", dim), (X,)
        if isinstance(dim, tuple):
            continue
        for name in ("max", "min", "prod", "median", "argmax", "aminmax", "all"):
            whole = _truths(name, dim) if name in ("all", "argmax") else _call(name, **_dim(dim))
            yield f"{name} {dim}", whole, (X,)
        yield f"quantile {dim}", _call("quantile", q=0.3, **_dim(dim)), (X,)
        if dim is None:
            continue
        for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "sort", "softmax"):
            yield f"{name} {dim}", _call(name, dim=dim), (X,)
        yield f"topk {dim}", _call("topk", k=2, dim=dim), (X,)
        yield f"renorm {dim}", _call("renorm", p=2, dim=dim, maxnorm=1.0), (X,)
    yield "the largest of all", lambda x: torch.max(x) * x.min() + x.amin(), (X,)
    yield "norms", lambda x: x / x.norm() + x / x.norm(INF, -1, True) + x * x.std(), (X,)
    for name in ("max", "amax", "norm", "mean", "any"):  # the last rank has no element
        yield f"{name} of one row", _truths(name, None) if name == "any" else _call(name), (X[:1],)
    yield "norm inf of one row", _call("norm", p=INF), (X[:1],)
    yield "normalize one row", partial(F.normalize, p=INF, dim=0), (X[:1],)
    named = lambda x: torch.sum(input=x, axis=-1, keepdims=True) + torch.amax(x, axis=())  # noqa: E731
    yield "names of NumPy", named, (X,)
    yield "dist", lambda x, y: torch.dist(x, y, INF) + torch.dist(x, y), (X, Y)
    yield "cdist", torch.cdist, (X, Y)
    yield "standardized", lambda x: (x - x.mean()) / x.std(), (X,)
    yield "one less", lambda x: 1 - x, (X,)


def _views() -> Iterator[Row]:
    """List functions that use some parts of a tensor, or all parts twice, and that join parts."""
    for dim in (0, 1, -1):
        cuts = {"split": (2,), "chunk": (2,), "tensor_split": ([1, 3],), "unbind": ()}
        for name, more in cuts.items():
            last = lambda x, n=name, more=more, d=dim: getattr(x, n)(*more, d)[-1]  # noqa: E731
            yield f"last of {name} {dim}", last, (X,)
        yield f"select {dim}", _call("select", dim=dim, index=-2), (X,)
        yield f"logsumexp kept {dim}", lambda x, d=dim: x - x.logsumexp(d, True), (X,)
        yield f"gather {dim}", lambda x, i, d=dim: x.gather(d, i).square() + x, (X, _ids(4, *SHAPE))
        largest = lambda x, d=dim: torch.take_along_dim(x, x.argmax(d, True), d)  # noqa: E731
        yield f"take_along_dim {dim}", largest, (X,)
        part = lambda x, y, d=dim: x.slice_scatter(y.narrow(d, 0, 2), d, 1, 3)  # noqa: E731
        yield f"slice_scatter {dim}", part, (X, Y)
        part = lambda x, y, d=dim: x.select_scatter(y.select(d, 0), d, 1)  # noqa: E731
        yield f"select_scatter {dim}", part, (X, Y)
    rows = lambda x: torch.cat([x.sum(0), x.amax(0), x.mean(0)])  # noqa: E731
    named = lambda x: torch.chunk(input=x, chunks=2, dim=-1)[0]  # noqa: E731
    yield "first of chunk by names", named, (X,)
    yield "cat of sums and maxima", rows, (X,)
    yield "stack of sums and maxima", lambda x: torch.stack([x.sum(), x.amin(), x[0, 0, 0]]), (X,)


def _merged() -> Iterator[Row]:
    """List tensors of which ranks hold several pieces, because two dims were merged."""
    x, at = _draw(10, 4, 8, 4), torch.tensor([0, 5])
    for name, merge in {"01": (0, 1), "12": (1, 2)}.items():
        first = merge[0]

        def after(then: Callable[[Tensor], Tensor], merge=merge) -> Callable[[Tensor], Tensor]:
            return lambda x: then(1.5 * x.flatten(*merge))

        for sizes in ((2, -1), (4, -1)):
            again = lambda y, d=first, sizes=sizes: y.unflatten(d, sizes) * 2  # noqa: E731
            yield f"merged {name} split {sizes}", after(again), (x,)
        yield f"merged {name} flat", after(lambda y: y.flatten()[3:]), (x,)
        yield f"merged {name} like", after(lambda y: y.view_as(y.new_zeros(16, 8))), (x,)
        turned = lambda y: y.transpose(0, 1).flatten(0, 1)  # noqa: E731
        yield f"merged {name} turned", after(turned), (x,)
        yield f"merged {name} argmax", after(lambda y, d=first: y.argmax(d) * y.sum()), (x,)
        added = lambda y, d=first: y.index_add_(d, at, y.narrow(d, 2, 2).clone())  # noqa: E731
        yield f"merged {name} written", after(added), (x,)
        yield f"merged {name} filled", after(lambda y, d=first: y.index_fill_(d, at, 2.0)), (x,)
        yield f"merged {name} rms", after(lambda y: F.rms_norm(y, y.shape[1:])), (x,)


def _normalizations() -> Iterator[Row]:
    w, b = _draw(8, 6), _draw(9, 6)
    for dim in (0, 1, -1):
        for p in (1, 2, INF):
            yield f"normalize {p} {dim}", partial(F.normalize, p=p, dim=dim), (X,)
        yield f"cosine_similarity {dim}", partial(F.cosine_similarity, dim=dim), (X, Y)
    for p in (1, 2, INF):
        yield f"pairwise_distance {p}", partial(F.pairwise_distance, p=p), (X, Y)
    yield "layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), (X, w, b)
    yield "rms_norm", lambda x, w: F.rms_norm(x, (6,), w), (X, w)
    yield "rms_norm of two dims", lambda x: F.rms_norm(x, (5, 6)), (X,)
    channels = X.transpose(1, 2).contiguous()
    yield "group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (channels, w, b)
    yield "instance_norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), (channels, w, b)
    batch = partial(F.batch_norm, running_mean=None, running_var=None, training=True)
    yield "batch_norm", lambda x, w, b: batch(x, weight=w, bias=b), (channels, w, b)


def _writes() -> Iterator[Row]:
    """List in-place operators on a tensor that was computed from x."""

    def after(write: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(x: Tensor, *others: Tensor) -> Tensor:
            y = 1.5 * x
            write(y, *others)
            return y

        return run

    yield "add_", after(Tensor.add_), (X, Y)
    yield "sub_", after(Tensor.sub_), (X, Y)
    yield "+=", after(lambda y, t: y.__iadd__(t)), (X, Y)
    yield "*=", after(lambda y, t: y.__imul__(t)), (X, Y)
    yield "/=", after(lambda y, t: y.__itruediv__(t)), (X, Q)
    yield "mul_ by a row", after(lambda y, t: y.mul_(t[0, 0])), (X, Y)
    yield "mul_ by a sum", after(lambda y: y.mul_(y.sum())), (X,)
    yield "add_ of a mean", after(lambda y: y.add_(y.mean(0))), (X,)
    yield "copy_", after(Tensor.copy_), (X, Y)
    yield "zero_", after(Tensor.zero_), (X,)
    yield "fill_", after(lambda y: y.fill_(2.0)), (X,)
    yield "masked_fill_", after(lambda y, t: y.masked_fill_(t > 0, 2.0)), (X, Y)
    yield "clamp_", after(lambda y: y.clamp_(-0.5, 0.5)), (X,)
    yield "exp_", after(Tensor.exp_), (P,)
    yield "pow_", after(lambda y: y.pow_(2)), (X,)
    yield "addcmul_", after(Tensor.addcmul_), (X, Y, Z)
    yield "lerp_", after(lambda y, t: y.lerp_(t, 0.3)), (X, Y)
    index, rows = torch.tensor([0, 2]), Y[:, :2].contiguous()
    yield "index_add_", after(lambda y, i, t: y.index_add_(1, i, t)), (X, index, rows)
    yield "index_copy_", after(lambda y, i, t: y.index_copy_(1, i, t)), (X, index, rows)
    yield "index_fill_", after(lambda y, i: y.index_fill_(1, i, 0.5)), (X, index)
    at = _ids(5, 4, 2, 6)
    yield "scatter_", after(lambda y, i, t: y.scatter_(1, i[:, :1], t[:, :1])), (X, at, rows)
    yield "scatter_add_", after(lambda y, i, t: y.scatter_add_(1, i, t)), (X, at, rows)
    yield "cumsum_", after(lambda y: y.cumsum_(1)), (X,)
    yield "renorm_", after(lambda y: y.renorm_(2, 0, 1.0)), (X,)
    yield "masked_scatter_", after(lambda y, t: y.masked_scatter_(t > 0, t)), (X, Y)
    yield "index_add", lambda y, i, t: y.index_add(1, i, t), (X, index, rows)
    yield "scatter_reduce", lambda y, i, t: y.scatter_reduce(1, i, t, "amax"), (X, at, rows)


def _dim(dim: Any) -> dict[str, Any]:
    return {} if dim is None else {"dim": dim}


def _call(name: str, **options: Any) -> Callable[[Tensor], Any]:
    return lambda x: getattr(x, name)(**options)


def _truths(name: str, dim: Any) -> Callable[[Tensor], Any]:
    """Return a result without gradient, multiplied by one with a gradient."""
    if name == "argmax":
        return lambda x: x.argmax(**_dim(dim)) * x.sum()
    if dim == ():
        return lambda x: (x > 1).any() * x.sum()
    return lambda x: getattr(x > 1, name)(**_dim(dim)) * x.sum()


def _table() -> list[Row]:
    losses = [row for how in ("mean", "sum", "none") for row in _losses(how)]
    functions = (_old_names, _modules, _reductions, _views, _merged, _normalizations, _writes)
    return [*losses, *(row for rows in functions for row in rows())]


# ---------------------------------------------------------------- on ranks


class _Calls(nn.Module):
    """A module that returns a function's results, and a number that depends on
    each element differently."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> tuple[Tensor, list[Tensor]]:
        found = self.function(*given)
        results = list(found) if isinstance(found, tuple) else [found]
        total = given[0].sum() * 0
        for y in results:
            if y.is_floating_point():
                scale = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
                total = total + (torch.atan(y) * scale).sum()
        return total, results


def _placed(x: Tensor, mesh: Any, where: tuple) -> Tensor:
    """Place x: sharded over one dim, or a partial sum of unequal parts, per axis of the mesh."""
    shards = [Replicate() if d == "partial" else Shard(d % x.ndim) for d in where]
    cut = distribute_tensor(x, mesh, shards)
    if "partial" in where:
        part = 0.25 if mesh.get_local_rank() == 0 else 0.75
        cut = DTensor.from_local(part * cut.to_local(), mesh, [Partial()], run_check=False)
    return cut.detach()


def _wrong(row: Row, mesh: Any, where: tuple, both: bool) -> list[str]:
    """Return differences from one device, for x placed this way. With `both`, tensors of x's shape
    are placed as well."""
    name, function, given = row
    plain, ours = [x.clone() for x in given], [x.clone() for x in given]
    for i, x in enumerate(given):
        if i == 0 or (both and x.shape == given[0].shape and x.is_floating_point()):
            ours[i] = _placed(x, mesh, where)
    alone = re.search("(?i)margin|bce", name)  # its targets have no gradient
    for x in (plain[0], ours[0]) if alone else (*plain, *ours):
        x.requires_grad_(x.is_floating_point())
    total, results = _Calls(function)(*plain)
    total.backward()
    found_total, found = shard(_Calls(function), {}, mesh)(*ours)
    found_total.backward()
    pairs = [(f"result {i}", *pair) for i, pair in enumerate(zip(found, results, strict=True))]
    grads = ((x.grad, y.grad) for x, y in zip(ours, plain, strict=True))
    pairs += [(f"gradient {i}", *pair) for i, pair in enumerate(grads) if pair[1] is not None]
    return [f"{name} {where} {both}: {what}" for what, x, y in pairs if not _equal(x, y)]


def _equal(found: Any, wanted: Tensor) -> bool:
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    if whole is None or whole.shape != wanted.shape:
        return False
    scale = wanted.abs().max().clamp(min=1.0).item() if wanted.numel() else 1.0
    return torch.allclose(whole.double(), wanted.double(), 0, 1e-10 * scale, equal_nan=True)


def _sweep(rank: int, sizes: tuple[int, ...], wheres: list[tuple], rows: str) -> list[str]:
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    warnings.filterwarnings("ignore", "reduction: 'mean' divides")  # from F.kl_div
    warnings.filterwarnings("ignore", "size_average and reduce args will be deprecated")
    wrong = []
    for number, row in enumerate(_table()):
        if not re.search(rows, row[0]):
            continue
        first = row[2][0]
        places = [p for p in wheres if p[0] == "partial" or max(p) < first.ndim]
        if len(places) > 2 and not re.search("mean|amax|Loss|merged", row[0]):
            places = [places[number % len(places)], places[(number + 1) % len(places)]]
        for i, where in enumerate(places):
            try:
                wrong += _wrong(row, mesh, where, both=(number + i) % 2 == 0)
            except Exception as error:
                raise AssertionError(f"{row[0]} {where}") from error
    return wrong


OUTSIDE: tuple[tuple[Callable[..., Tensor], Tensor, Tensor], ...] = (
    (F.mse_loss, X, Y), (F.smooth_l1_loss, X, Y), (F.huber_loss, X, Y), (F.l1_loss, X, Y),
    (F.binary_cross_entropy, P, Q), (F.soft_margin_loss, X, SIGNS),
    (F.multi_margin_loss, ROWS, _ids(5, 6)), (F.multilabel_margin_loss, X[:, 0], _ids(6, 4, 6)),
)  # fmt: skip


def _outside(rank: int) -> None:
    """Compute losses of a model's result and of a DTensor, outside of its forward."""
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    model = shard(nn.Identity(), {}, mesh)
    for loss, x, target in OUTSIDE:
        for how in ("mean", "sum", "none"):
            plain, ours = x.clone().requires_grad_(), _placed(x, mesh, (0,)).requires_grad_()
            expected = loss(plain, target, reduction=how)
            expected.square().sum().backward()
            found = loss(model(ours), _placed(target, mesh, (0,)), reduction=how)
            found.square().sum().backward()
            assert _equal(found, expected.detach()), (loss.__name__, how)
            assert _equal(ours.grad, plain.grad), (loss.__name__, how)


def test_losses_outside_of_a_declared_forward_equal_one_device() -> None:
    run_ranks(2, _outside)


def test_functions_on_shards_and_partial_sums_equal_one_device() -> None:
    """Covers losses, reductions, norms, normalization and in-place operators, or rejection."""
    wheres = [(0,), (1,), (-1,), ("partial",)]
    assert run_ranks(2, _sweep, (2,), wheres, "") == [[], []]


def test_functions_sharded_over_two_axes_equal_one_device() -> None:
    rows = "^(mse|huber|bce|nll) mean|^(amax|any|cumsum|norm inf|std) (None|-1)$|^group_norm"
    assert run_ranks(4, _sweep, (2, 2), [(0, -1), (0, 0)], rows) == [[]] * 4
