"""Every sum over ranks is rounded once, on eight ranks as on one, so in 16 bits ranks add no error.

Operands are whole numbers, so large that terms and sums do not fit in 16 bits and so small that
every order of adding them is exact in fp32. A result that is rounded once, after the last addition,
is then the float64 truth cast, bit for bit. Terms or partial sums in 16 bits, or a sum that is
rounded before its bias, differ. For results that are not sums of products, the bound per element is
one rounding of the truth and fp32's noise.

Ranks are threads (`threads.py`), which also check that all of them begin the same collectives.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from sharded import draw
from threads import Group, on_mesh, on_threads
from torch import Tensor, nn

from warpweave.parallel import collectives, tensor
from warpweave.parallel.collectives import group_rank, group_size
from warpweave.parallel.data.optimizer import SGD, AdamW
from warpweave.parallel.data.unit import make_unit
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import ConnectedMesh, Mesh, single
from warpweave.parallel.shard import Cut, ParamRecord

RANKS = (1, 2, 8)
DTYPES = {torch.bfloat16: 15, torch.float16: 60}  # and numbers whose products need more bits
WAYS = ("none", "bulk", "chunked")  # "fused" is in test_fused.py
T = 16


def whole(seed: int, *shape: int, most: int = 15) -> Tensor:
    """Draw whole numbers up to `most`, equal on every rank, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).double()


def share(t: Tensor, dim: int | None, group: Group | None) -> Tensor:
    """Return this rank's share of `t` along `dim`, or (None) all of it."""
    return t if dim is None else t.chunk(group_size(group), dim)[group_rank(group)]


def leaves(group: Group | None, dtype: torch.dtype, *given: tuple[Tensor, int | None]):
    """Return x and the parameters of `given`, each with its sharded dim; gradients are fp32."""
    mine = [share(t, dim, group).to(dtype, copy=True).requires_grad_() for t, dim in given]
    for parameter in mine[1:]:
        parameter.grad_dtype = torch.float32
    return mine


def assert_once(found: Tensor, truth: Tensor, what: object) -> None:
    """Assert bitwise equality with the truth, rounded to the requested dtype."""
    wrong = (found != truth.to(found.dtype)).sum()
    assert not wrong, f"{what}: {wrong} of {found.numel()} are rounded elsewhere than at the end"


def assert_rounded(found: Tensor, truth: Tensor, what: object, noise: float = 2**-20) -> None:
    """Assert at most one rounding of the truth in the requested dtype, and fp32's noise."""
    unit = torch.finfo(found.dtype).eps / 2
    off = (found.double() - truth).abs() - 1.01 * unit * truth.abs() - noise * truth.abs().max()
    assert off.max() <= 0, f"{what}: off by {off.max():.2e} more than one rounding"


def on_all(check, *args) -> None:
    """Call ``check(group, dtype, most, ...)`` on 1, 2 and 8 ranks, in both dtypes."""
    for dtype, most in DTYPES.items():
        check(None, dtype, most, *args)
        for ranks in RANKS[1:]:
            on_threads(ranks, check, dtype, most, *args)


# ---------------------------------------------------------------- products


def _column(group, dtype, most, way: str, cut: bool) -> None:
    K, N = 5, 64
    x, w, b = whole(1, T, K, most=most), whole(2, N, K, most=most), whole(3, N, most=most)
    dy = whole(4, T, N, most=most)
    mine = leaves(group, dtype, (x, 0 if cut else None), (w, 0), (b, 0))
    y = tensor.column_parallel_linear(*mine, group=group, sequence_parallel=cut, overlap=way)
    dx, dw, db = torch.autograd.grad(y, mine, share(dy, 1, group).to(dtype))
    assert_once(y, share(x @ w.t() + b, 1, group), "y")
    assert_once(dx, share(dy @ w, 0 if cut else None, group), "dx")
    assert_once(dw, share(dy.t() @ x, 0, group), "dw")
    assert_once(db, share(dy.sum(0), 0, group), "db")


def _row(group, dtype, most, way: str, cut: bool) -> None:
    K, N, tokens = 64, 5, 0 if cut else None
    x, w, b = whole(1, T, K, most=most), whole(2, N, K, most=most), whole(3, N, most=256)
    dy = whole(4, T, N, most=most)
    mine = leaves(group, dtype, (x, 1), (w, 1), (b, None))
    y = tensor.row_parallel_linear(*mine, group=group, sequence_parallel=cut, overlap=way)
    dx, dw, db = torch.autograd.grad(y, mine, share(dy, tokens, group).to(dtype))
    assert_once(y, share(x @ w.t() + b, tokens, group), "y")
    assert_once(dx, share(dy @ w, 1, group), "dx")
    assert_once(dw, share(dy.t() @ x, 1, group), "dw")
    assert_once(db, share(dy, tokens, group).sum(0), "db")


def _mlp(group, dtype, most, way: str, cut: bool) -> None:
    """Use relu2 with a first product whose squares fit in 16 bits; once terms of y do not fit, and
    once terms of dx."""
    E, F_, tokens = 4, 32, 0 if cut else None
    x, up, b1, b2 = (whole(i, *s, most=m) for i, (s, m) in enumerate(
        [((T, E), 1), ((F_, E), 3), ((F_,), 3), ((E,), 256)]
    ))  # fmt: skip
    for wide, dy in ((most, whole(8, T, E, most=0)), (1, whole(8, T, E, most=1))):
        down = whole(7, E, F_, most=wide)
        mine = leaves(group, dtype, (x, tokens), (up, 0), (down, 1), (b1, 0), (b2, None))
        how = {"activation": "relu2", "sequence_parallel": cut, "overlap": way}
        y = tensor.parallel_mlp(*mine, group=group, **how)
        dx, _, ddown, db1, db2 = torch.autograd.grad(y, mine, share(dy, tokens, group).to(dtype))
        z = (x @ up.t() + b1).relu()
        dz = 2 * z * (dy @ down)
        assert_once(y, share(z.square() @ down.t() + b2, tokens, group), "y")
        assert_once(dx, share(dz @ up, tokens, group), "dx")
        assert_once(ddown, share(dy.t() @ z.square(), 1, group), "down")
        assert_once(db1, share(dz.sum(0), 0, group), "db1")
        assert_once(db2, share(dy, tokens, group).sum(0), "db2")


def _qkv(group, dtype, most, way: str, cut: bool) -> None:
    E, heads, D, tokens = 5, 8, 2, 0 if cut else None
    x, w = whole(1, T, E, most=most), whole(2, heads, 3, D, E, most=most)
    b, dy = whole(3, heads, 3, D, most=most), whole(4, T, heads, 3, D, most=most)
    mine = leaves(group, dtype, (x, tokens), (w, 0), (b, 0))
    q, k, v = tensor.parallel_qkv_rope(
        *mine, None, None, shape=(2, T // 2), group=group, sequence_parallel=cut, overlap=way
    )
    z = torch.stack([t.flatten(0, 1) for t in (q, k, v)], 2)
    (dx,) = torch.autograd.grad(z, mine[:1], share(dy, 1, group).to(dtype))
    assert_once(z, share(torch.einsum("te,hjde->thjd", x, w) + b, 1, group), "q, k, v")
    assert_once(dx, share(torch.einsum("thjd,hjde->te", dy, w), tokens, group), "dx")


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("product", [_column, _row, _mlp, _qkv])
def test_products_are_summed_in_fp32_and_rounded_after_the_bias(product, way, cut) -> None:
    on_all(product, way, cut)


# ---------------------------------------------------------------- the vocabulary


def _embedding(group, dtype, most, cut: bool) -> None:
    """Give most tokens' gradients to one row."""
    ids = torch.tensor([3] * (T - 2) + [0, 15])
    table, dy = whole(1, 16, 5), whole(2, T, 5, most=200)
    tokens = 0 if cut else None
    _, mine = leaves(group, dtype, (ids.double(), None), (table, 0))
    how = {"vocab_size": 16, "sequence_parallel": cut}
    y = tensor.vocab_parallel_embedding(ids, mine, group=group, **how)
    (dw,) = torch.autograd.grad(y, [mine], share(dy, tokens, group).to(dtype))
    assert_once(y, share(table[ids], tokens, group), "y")
    assert_once(dw, share(torch.zeros(16, 5).double().index_add(0, ids, dy), 0, group), "dw")


@pytest.mark.parametrize("cut", [False, True])
def test_an_embeddings_gradients_are_added_in_fp32(cut) -> None:
    on_all(_embedding, cut)


V = 64
LABELS = torch.tensor([5, 63, 0, -100, 31, 32, 7, 8, 9, 40, 41, 3, 2, 1, 60, 50])


def _head(group, dtype, most, way: str, cut: bool, softcap: float | None) -> None:
    """x = 0 makes all probabilities 1/V, so that dz fits in 16 bits and dx is a sum of whole
    numbers over V: the mean row of the weight minus the label's."""
    tokens, weight = 0 if cut else None, whole(1, V, 5, most=250)
    wanted = (torch.ones(T, V).double() / V - F.one_hot(LABELS.clamp(0), V)) @ weight
    wanted[LABELS < 0] = 0
    options = {"group": group, "vocab_size": V, "sequence_parallel": cut, "overlap": way}
    for recompute in (True, False):
        x, mine = leaves(group, dtype, (torch.zeros(T, 5), tokens), (weight, 0))
        loss = tensor.vocab_parallel_linear_cross_entropy(
            x, mine, LABELS, recompute=recompute, softcap=softcap, **options
        )
        (dx,) = torch.autograd.grad(loss, [x])
        assert loss.dtype == torch.float32
        assert_rounded(loss, 15 * torch.tensor(V).double().log(), "loss")
        assert_rounded(dx, share(wanted, tokens, group), ("dx", recompute))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("way", "softcap"), [("none", None), ("chunked", None), ("none", 3.0)])
def test_the_heads_input_gradient_is_summed_in_fp32(way, cut, softcap) -> None:
    on_all(_head, way, cut, softcap)


def _losses(group, dtype, most, softcap: float | None) -> None:
    """Compare losses of logits that have been rounded once, with and without a cap."""
    x, weight = draw(1, T, 5).to(dtype).double(), draw(2, V, 5).mul(4).to(dtype).double()
    z = (x @ weight.t()).to(dtype).double()
    leaf = z if softcap is None else softcap * (z / softcap).tanh()
    leaf = leaf.detach().requires_grad_()
    truth = F.cross_entropy(leaf, LABELS, reduction="none", label_smoothing=0.1)
    options = {"group": group, "vocab_size": V, "label_smoothing": 0.1}
    if softcap is not None:
        found = tensor.vocab_parallel_linear_cross_entropy(
            x.to(dtype), share(weight, 0, group).to(dtype), LABELS, softcap=softcap,
            reduction="none", **options,
        )  # fmt: skip
        assert found.dtype == torch.float32
        return assert_rounded(found, truth.detach(), "losses")
    (dz,) = torch.autograd.grad(truth.sum(), [leaf])
    (mine,) = leaves(group, dtype, (z, 1))
    losses = tensor.vocab_parallel_cross_entropy(mine, LABELS, **options)
    assert losses.dtype == torch.float32
    assert_rounded(losses, truth.detach(), "losses")
    found = torch.autograd.grad(losses.sum(), [mine])[0]
    return assert_rounded(found, share(dz, 1, group), "dz", noise=2**-20 if most < 60 else 2**-15)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_losses_over_a_cut_vocabulary_are_fp32s(softcap) -> None:
    on_all(_losses, softcap)


# ---------------------------------------------------------------- collectives and the norm


def _pairs(group, dtype, most) -> None:
    terms = [whole(r, 8, 3, 16, most=255) for r in range(group_size(group))]
    mine, total = terms[group_rank(group)].to(dtype), sum(terms)
    for found, dim in (
        (collectives.reduce_from(mine, group), None),
        (collectives.reduce_scatter(mine, group, 0), 0),
        (collectives.reduce_scatter(mine, group, 2), 2),
    ):
        assert_once(found, share(total, dim, group), dim)
    for function, dim in ((collectives.copy_to, None), (collectives.all_gather, 2)):
        x = share(torch.zeros(8, 3, 16), dim, group).to(dtype).requires_grad_()
        y = function(x, group) if dim is None else function(x, group, dim)
        (dx,) = torch.autograd.grad(y, [x], mine)
        assert_once(dx, share(total, dim, group), function.__name__)


def test_collectives_of_16_bits_are_rounded_once() -> None:
    on_all(_pairs)


def _norm(group, dtype, most) -> None:
    """Use rows in which each rank's features have a different magnitude."""
    x, w, dy = (draw(i, T, 64).to(dtype).double() for i in range(3))
    x, w = (x * torch.linspace(0.1, 4, 64)).to(dtype).double(), w[0]
    truth = x.clone().requires_grad_()
    y = F.rms_norm(truth, (64,), w, 1e-5)
    (dx,) = torch.autograd.grad(y, [truth], dy)
    (mine,), of_dy = leaves(group, dtype, (x, 1)), share(dy, 1, group).to(dtype)
    given = mine, share(w, 0, group).to(dtype), 1e-5
    wide = tensor.cut_rms_norm(*given, group=group, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_rounded(wide, share(y.detach(), 1, group), "fp32 y")
    found = tensor.cut_rms_norm(*given, group=group)
    assert_rounded(found, share(y.detach(), 1, group), "y")
    assert_rounded(torch.autograd.grad(found, [mine], of_dy)[0], share(dx, 1, group), "dx")


def test_a_norm_over_cut_features_is_rounded_once() -> None:
    on_all(_norm)


# ---------------------------------------------------------------- gradients over data ranks

SPEC = {  # shape, the dim that tp shards, whether each tensor rank sees only a part of the tokens
    "cut": ((7, 5), 0, False),
    "norm": ((5,), None, True),
    "same": ((11, 3), None, False),
}
MESH = Mesh(dp=3, cp=2, tp=2, pp=2)  # no two of pp, dp, data, world have equal groups


def _gradient(name: str, micro: int, data: int, tp: int, pp: int) -> Tensor:
    """Return one micro-batch's gradient; tensor ranks differ if each sees a part of the tokens."""
    shape, _, partial = SPEC[name]
    seed = len(name) + 7 * micro + 31 * data + 211 * pp + (1009 * tp if partial else 0)
    return whole(seed, *shape, most=200)


def _zero(mesh: ConnectedMesh, stage: int) -> None:
    """Run three micro-batches and one update, with numbers whose sums are not rounded in fp32."""
    params, pp, tp = [], mesh.index("pp"), mesh.size("tp")
    for name, (shape, dim, partial) in SPEC.items():
        cuts = () if dim is None else (Cut("tp", dim, tp),)
        record = ParamRecord(name, shape, cuts, ("tp",) if partial and tp > 1 else ())
        start = record.slice(whole(len(name) + pp, *shape), mesh.coords)
        params.append((record, nn.Parameter(start.to(torch.bfloat16))))
    unit = make_unit("unit", params, mesh, zero=stage)
    optimizer = ZeroOptimizer([unit], mesh, SGD(momentum=0.0), clip=None)
    for micro in range(3):
        unit.parameters.unshard()
        unit.parameters.wait()
        unit.gradients.before_backward()
        for record, p in params:
            g = _gradient(record.name, micro, mesh.index("data"), mesh.index("tp"), pp)
            (p * record.slice(g, mesh.coords).to(p.dtype)).sum().backward()
        unit.gradients.after_backward()
        unit.parameters.reshard()
        if stage > 1 or micro == 2:
            unit.gradients.start()
    unit.gradients.finish()
    optimizer.sum_partials()
    norm = optimizer.step(2.0**-3)
    total, squares = {}, 0.0
    for name, (_, _, partial) in SPEC.items():
        for stage_ in range(mesh.size("pp")):
            ranks = range(mesh.size("data")), range(tp if partial else 1)
            terms = itertools.product(range(3), *ranks)
            every = [_gradient(name, *term, stage_) for term in terms]
            squares += float(sum(every).square().sum())
            if stage_ == pp:
                total[name] = sum(every)
    assert_rounded(norm, torch.tensor(squares).double().sqrt(), "norm")
    unit.parameters.unshard()
    unit.parameters.wait()
    for record, master in unit.read("param"):
        moved = whole(len(record.name) + pp, *record.shape) - total[record.name] / 8
        assert_once(master, moved, ("master", record.name))
        mine = unit.layout.view(unit.parameters.flat, record)
        assert_once(mine, record.slice(moved, mesh.coords), ("parameter", record.name))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=8), MESH])
def test_16_bit_gradients_are_summed_in_fp32_over_micro_batches_and_ranks(mesh, stage) -> None:
    on_mesh(mesh, _zero, stage)


@pytest.mark.parametrize("rule", [AdamW(), SGD()])
def test_an_update_after_two_to_the_24_is_counted_and_none_that_was_skipped(rule) -> None:
    """fp32 has no odd numbers there."""
    unit = make_unit("unit", [(ParamRecord("p", (3,)), nn.Parameter(torch.ones(3)))], single())
    optimizer = ZeroOptimizer([unit], single(), rule)
    optimizer.load_state({"count": 2.0**24})
    for gradient in (0.0, 1.0, math.inf, 2.0):
        unit.gradients.flat[:3] = gradient
        optimizer.step(0.1)
    assert optimizer.state()["count"] == 2**24 + 3
    assert unit.parameters.flat.isfinite().all()
