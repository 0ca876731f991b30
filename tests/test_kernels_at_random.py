"""Every op of `kernels` equals the reference on random arguments, in any combination.

Each draw selects some of the options, any sizes, tensors of any strides, and any of the inputs as
leaves. Results and gradients are compared in float64. Empty tensors are filled with NaN, and writes
out of bounds are detected (`guarded`). Draw each new option of an op here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from close import assert_close_f64
from guarded import guarded

from warpweave.kernels import reference
from warpweave.kernels.activation import ACTIVATIONS, activate
from warpweave.kernels.attention import attention, torch_path
from warpweave.kernels.cross_entropy import blocks, cross_entropy, forward, linear_cross_entropy
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm import fused_gemm, gemm, gemm_into
from warpweave.kernels.mlp import mlp
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.qkv import qkv_rope
from warpweave.kernels.rope import apply_rope, apply_rope_qk, rope_table
from warpweave.kernels.runtime.tile_table import KINDS, AttentionTile, GemmTile
from warpweave.kernels.runtime.tiles import pinned

F64 = torch.float64


class Call(NamedTuple):
    """`ours` (which also accepts an impl) and `truth` of leaves of
    these shapes; None is no leaf."""

    ours: Callable[..., Any]
    truth: Callable[..., Any]
    shapes: list[tuple[int, ...] | None]
    differentiable: bool = True


class Draw(random.Random):
    """A random generator. With `few`, because each program is interpreted, there is one sample and
    one head of keys."""

    few = False

    def maybe(self, x: Any, p: float = 0.5) -> Any:
        return x if self.random() < p else None

    def some(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if self.random() < 0.4}

    def dims(self, most: int = 3) -> tuple[int, ...]:
        return tuple(self.choice((1, 2, 3, 5, 7)) for _ in range(self.randint(0, most)))

    def drop(self, shape: tuple[int, ...]) -> Drop:
        rows = torch.Size(shape).numel()
        tokens = torch.arange(2 * rows)[::2].view(shape) * 7919 + self.choice((0, 2**31, 2**33 + 5))
        return Drop(self.choice((0.0, 0.3, 0.9)), self.randrange(2**63), self.randrange(2**32),
                    tokens)  # fmt: skip


def kept(drop: Drop | None, E: int) -> dict[str, Any]:
    """Return the reference's arguments for a drop."""
    if drop is None:
        return {}
    p, seed, site, tokens = drop
    ones = torch.ones(tokens.numel(), E, dtype=F64)
    keep = reference.dropout(ones, p, seed=seed, site=site, tokens=tokens.flatten()) > 0
    return {"keep": keep.view(*tokens.shape, E), "dropout": p}


# ---------------------------------------------------------------- the ops


def _norm(rng: Draw) -> Call:
    shape, layer = rng.dims(), rng.random() < 0.5
    E = rng.choice((1, 2, 3, 8, 33, 70))
    drop, eps = rng.maybe(rng.drop(shape)), rng.choice((1e-6, 1e-3, 1.0))
    given = [(*shape, E), (E,), rng.maybe((E,)) if layer else None, rng.maybe((*shape, E)),
             rng.maybe((E,))]  # fmt: skip

    def call(op, x, w, b, residual, x_bias, **more):
        bias = {"bias": b} if layer else {}
        return op(x, w, eps=eps, residual=residual, x_bias=x_bias, **bias, **more)

    names = (layer_norm, reference.layer_norm) if layer else (rms_norm, reference.rms_norm)
    ours, truth = (partial(call, op) for op in names)
    return Call(partial(ours, drop=drop), partial(truth, **kept(drop, E)), given)


def _activate(rng: Draw) -> Call:
    name, width = rng.choice([*ACTIVATIONS]), rng.choice((1, 3, 40))
    shape = (*rng.dims(), width * (1 + ACTIVATIONS[name].gated))
    ours, truth = (partial(op, activation=name) for op in (activate, reference.activate))
    return Call(ours, truth, [shape])


def _mlp(rng: Draw) -> Call:
    name, shape = rng.choice([*ACTIVATIONS]), rng.dims()
    E, F, drop = rng.choice((1, 5, 33)), rng.choice((1, 7, 20)), rng.maybe(rng.drop(shape))
    units = (F, 2) if ACTIVATIONS[name].gated else (F,)
    recompute = rng.choice((None, "nothing", "activation", "up"))

    def call(op, x, up, down, b, c, residual, **more):
        return op(x, up, down, b, c, residual=residual, activation=name, drop=drop, **more)

    shapes = [(*shape, E), (*units, E), (E, F), rng.maybe(units), rng.maybe((E,)),
              rng.maybe((*shape, E))]  # fmt: skip
    return Call(partial(call, mlp, recompute=recompute), partial(call, _whole_mlp), shapes)


def _whole_mlp(*tensors, drop, **options):
    flat = None if drop is None else drop._replace(tokens=drop.tokens.flatten())
    return reference.mlp(*tensors, drop=flat, **options)


def _qkv(rng: Draw) -> Call:
    B, S, E, kv, G = (rng.choice(n) for n in ((1, 2), (1, 5, 9), (3, 8), (1, 2), (1, 3)))
    D = rng.choice((1, 2, 3, 6, 10))
    turns = D % 2 == 0 and rng.random() < 0.7
    table = rope_table(torch.arange(S) * 7 + 3, D, dtype=F64) if turns else (None, None)
    if turns and rng.random() < 0.5:
        table = [t.repeat_interleave(2, 1)[:, ::2] for t in table]  # with gaps
    still = torch.ones(S, D, dtype=F64)[:, : D // 2]

    def truth(x, w, b):
        return reference.qkv_rope(x, w, b, *(table if turns else (still, 0 * still)))

    return Call(
        lambda x, w, b, impl: qkv_rope(x, w, b, *table, impl=impl), truth,
        [(B, S, E), (kv, G + 2, D, E), rng.maybe((kv, G + 2, D))],
    )  # fmt: skip


def _rope(rng: Draw) -> Call:
    B, S, H, D = (rng.choice(n) for n in ((1, 2), (1, 5), (1, 3), (4, 7, 10)))
    table = rope_table(torch.arange(S) * 5, rng.choice((2, 4)), dtype=F64)
    how = rng.some({"interleaved": True})
    both = [(B, S, H, D), rng.maybe((B, S, 1, D))]

    def ours(q, k, impl):
        if k is None:
            return apply_rope(q, *table, impl=impl, **how)
        return apply_rope_qk(q, k, *table, impl=impl, **how)

    def truth(q, k):
        found = [reference.apply_rope(x, *table, **how) for x in (q, k) if x is not None]
        return found[0] if k is None else tuple(found)

    return Call(ours, truth, both)


def _dropout(rng: Draw) -> Call:
    shape, E = rng.dims(), rng.choice((1, 5, 70))
    drop = rng.drop(shape)
    p, seed, site, tokens = drop

    def truth(x):
        flat = x.reshape(-1, E)
        key = {"seed": seed, "site": site, "tokens": tokens.flatten()}
        return reference.dropout(flat, p, **key).view(x.shape)

    return Call(partial(dropout, drop=drop), truth, [(*shape, E)])


def _product(rng: Draw) -> Call:
    name = rng.choice((None, *ACTIVATIONS))
    gated = name is not None and ACTIVATIONS[name].gated
    M, N, K = rng.choice((1, 9, 40)), 2 * rng.choice((1, 9, 35)), rng.choice((1, 7, 70))
    out, drop = N // 2 if gated else N, rng.maybe(rng.drop((M,)))
    save = name is not None and rng.random() < 0.5

    def ours(a, b, bias, residual, impl):
        y, z = fused_gemm(a, b, bias, activation=name, save_z=save, drop=drop, residual=residual,
                          impl=impl)  # fmt: skip
        rows, columns = torch.ones(M, 2 * N, dtype=F64)[:, ::2], torch.ones(N, M).t().double()
        into = rows if rng.random() < 0.5 else columns
        before = into.clone()
        gemm_into(a, b, into, add := rng.random() < 0.5, impl=impl)
        return y, z, gemm(a, b, bias, impl=impl), into - before if add else into

    def truth(a, b, bias, residual):
        z = reference.fused_gemm(a, b, bias)
        y = reference.fused_gemm(a, b, bias, activation=name, drop=drop, residual=residual)
        return y, z if save else None, z, a @ b

    shapes = [(M, K), (K, N), rng.maybe((N,)), rng.maybe((M, out))]
    return Call(ours, truth, shapes, differentiable=False)


def _loss_options(rng: Draw, N: int, V: int) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    """Draw labels, the reference's options, and the reduction."""
    ignored = rng.choice((-100, -1, 0, V + 3))
    options = rng.some({"label_smoothing": rng.choice((0.1, 1.0)), "z_loss": 0.1,
                        "vocab_size": rng.randint(1, V)})  # fmt: skip
    used = options.get("vocab_size", V)
    labels = [rng.choice((rng.randrange(used), used - 1, ignored)) for _ in range(N)]
    options["ignore_index"] = ignored
    return torch.tensor(labels, dtype=torch.int64), options, rng.choice(("mean", "sum", "none"))


def _reduced(losses, labels, options, reduction):
    if reduction == "none":
        return losses
    count = (labels != options["ignore_index"]).sum().clamp(min=1)
    return losses.sum() / (count if reduction == "mean" else 1)


def _cross_entropy(rng: Draw) -> Call:
    N, V = rng.choice((0, 1, 9)), rng.choice((1, 7, 40))
    labels, options, reduction = _loss_options(rng, N, V)

    def truth(z):
        losses = reference.cross_entropy(z, labels, **options)
        return _reduced(losses, labels, options, reduction)

    ours = partial(cross_entropy, labels=labels, reduction=reduction, **options)
    return Call(ours, truth, [(N, V)])


def _head(rng: Draw) -> Call:
    T, V, E = rng.choice((0, 1, 9, 20)), rng.choice((1, 7, 300)), rng.choice((1, 5))
    labels, options, reduction = _loss_options(rng, T, V)
    recompute = rng.choice((None, True)) if reduction == "none" else rng.choice((True, False))

    def truth(x, w):
        losses = reference.linear_cross_entropy(x, w, labels, **options)
        return _reduced(losses, labels, options, reduction)

    how = {"labels": labels, "reduction": reduction, "recompute": recompute}
    return Call(partial(linear_cross_entropy, **how, **options), truth, [(T, E), (V, E)])


def _runs(rng: Draw, length: int) -> tuple[tuple[int, ...], ...] | None:
    """Draw positions of `length` rows below 200."""
    by, first = rng.choice((1, 1, 2, 4)), rng.randint(0, length)
    if rng.random() < 0.4:
        return None
    if rng.random() < 0.5:
        return ((rng.randrange(40), length, by),)
    ends = rng.randrange(30), 140 if by < 4 else 41
    runs = [(ends[0], first, by), (ends[0] + first * by + ends[1] % 40, length - first, by)]
    return tuple(runs if rng.random() < 0.7 else runs[::-1])


def _boundaries(rng: Draw, B: int, end: int) -> torch.Tensor:
    cuts = [[0, *sorted(rng.choices(range(end + 1), k=2)), end] for _ in range(B)]
    documents = torch.tensor(cuts)
    kind = rng.randrange(3)
    if kind == 0:
        return documents[0]
    if kind == 1:
        return documents
    first = torch.tensor([[rng.randint(0, end)] for _ in range(B)])
    stop = torch.tensor([[rng.choice((n, end))] for (n,) in first.tolist()])  # n: no key is seen
    cuts = rng.choice((documents, documents[:, [0, -1]]))
    return torch.stack((cuts, cuts.clamp(first, stop)), 1)


def _attention(rng: Draw) -> Call:
    B, kv = (1 if rng.few else rng.choice((1, 2)) for _ in range(2))
    Sq, Sk, D = (rng.choice(n) for n in ((1, 5, 21), (1, 6, 21), (1, 8, 19)))
    H = kv * rng.choice((1, 2))
    runs = {"q_runs": _runs(rng, Sq), "k_runs": _runs(rng, Sk)}
    last = [max((s + (n - 1) * (by[0] if by else 1) for s, n, *by in r if n), default=0) + 1
            for r in (runs["q_runs"] or ((0, Sq),), runs["k_runs"] or ((0, Sk),))]  # fmt: skip
    end = max(last)
    options = rng.some({
        "causal": False, "window": rng.choice((1, 4, max(1, end - 1), end, end + 1)),
        "documents": _boundaries(rng, B, end), "scale": rng.choice((0.05, 3.0)),
        "softcap": rng.choice((0.3, 20.0)), "dropout": rng.choice((0.1, 0.9)),
    }) | {name: r for name, r in runs.items() if r is not None}  # fmt: skip
    documents = options.get("documents")
    if documents is not None and documents.ndim == 3 and last[0] != last[1]:
        options["q_runs"] = options.get("q_runs", ((0, Sq),))  # they continue behind these rows
    if "dropout" in options:
        options |= {"dropout_seed": rng.randrange(2**63), "dropout_origin": (3, 2**31)}

    def of(op, q, k, v, sinks, **more):
        return op(q, k, v, sinks=sinks, **options, **more)

    shapes = [(B, Sq, H, D), (B, Sk, kv, D), (B, Sk, kv, D), rng.maybe((H,))]
    return Call(partial(of, attention, return_lse=True), partial(of, reference.attention), shapes)


OPS = {
    name.strip("_"): function
    for name, function in [*globals().items()]
    if function in (_norm, _activate, _mlp, _qkv, _rope, _dropout, _product, _cross_entropy, _head,
                    _attention)
}  # fmt: skip

# ---------------------------------------------------------------- the comparison


def _tiles(rng: Draw) -> dict[tuple[str, int, int | str], AttentionTile | GemmTile]:
    """Pin small tiles, so that there are several, as a user's table may have them."""
    sides = rng.choice(((16, 16), (16, 32), (32, 16)))
    found = {(f"attention_{k}", 8, 256): AttentionTile(*sides, 1, 1) for k in ("fwd", "dkdv", "dq")}
    sizes = (rng.choice(of) for of in ((16, 32), (1, 2, 3), (1, 2)))
    product = GemmTile(16, 32, *sizes, 1, 1)
    return found | {("gemm", 8, kind): product for kind in KINDS}


def _somewhere(rng: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw numbers with any strides."""
    x = torch.randn(shape, dtype=F64)
    if x.ndim > 1 and rng.random() < 0.5:
        order = torch.tensor(rng.sample(range(x.ndim), x.ndim))
        x = x.permute(*order.tolist()).contiguous().permute(*order.argsort().tolist())
    if x.ndim and rng.random() < 0.5:
        x = torch.stack((x, x), -1)[..., 0]
    return x


def _tensors(found: Any) -> list[torch.Tensor]:
    found = found if isinstance(found, tuple) else (found,)
    return [x for x in found if x is not None]


def _compare(rng: Draw, call: Call, impl: str) -> None:
    inputs = [None if shape is None else _somewhere(rng, shape) for shape in call.shapes]
    given = [x for x in inputs if x is not None]
    for x in given:
        x.requires_grad_(call.differentiable and rng.random() < 0.7)
    leaves = [x for x in given if x.requires_grad]
    expected = _tensors(call.truth(*inputs))
    with guarded():
        found = _tensors(call.ours(*inputs, impl=impl))
        assert [x.shape for x in found] == [x.shape for x in expected]
        if leaves:
            wanted = [rng.random() < 0.7 for _ in found]
            wanted[rng.randrange(len(wanted))] = True
            cotangents = [_somewhere(rng, x.shape) for x in expected]
            for results in (found, expected):
                terms = [(x.masked_fill(x.isinf(), 0.0) * dx).sum()
                         for x, dx, want in zip(results, cotangents, wanted) if want]  # fmt: skip
                results += torch.autograd.grad(sum(terms), leaves, materialize_grads=True)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == F64
        assert_close_f64(a, b, 1e-10)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch) -> None:
    """Make the CPU path use several small parts, with a short last one."""
    monkeypatch.setattr(blocks, "CPU", blocks.BlockSizes(1100, 8, 5))
    monkeypatch.setattr(forward, "_CHUNK", 30)
    monkeypatch.setattr(torch_path, "ROWS", 8)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_an_op_of_any_arguments_is_the_references(op, impl) -> None:
    slow = op in ("attention", "mlp", "product")
    draws = {"torch": 40 if op == "attention" else 20, "triton": 5 if slow else 12}
    for seed in range(draws[impl]):
        rng = Draw(f"{op} {impl} {seed}")
        rng.few = impl == "triton"
        torch.manual_seed(seed)
        call = OPS[op](rng)
        with pinned(_tiles(rng)):
            _compare(rng, call, impl)
