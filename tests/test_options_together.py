"""Several options at once over ranks that are threads: results equal one device's in any
combination.

The tests of each function cover its options alone. Here every pair occurs: frozen and deferred
parameters, biases, sharded tokens and overlap modes; a head's cap, smoothing, ignored label,
padding and order of work; the gradient of one output without the other's.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64, relative_error
from sharded import draw
from threads import Group, on_threads
from torch import Tensor

from warpweave.kernels import reference
from warpweave.kernels.runtime.wgrad import WeightGradients, collect
from warpweave.parallel import tensor
from warpweave.parallel.collectives import group_rank, group_size, reduce_from
from warpweave.parallel.context import context_attention
from warpweave.parallel.layout import SequenceLayout

T = 12


def share(t: Tensor, dim: int | None, group: Group | None) -> Tensor:
    return t if dim is None else t.chunk(group_size(group), dim)[group_rank(group)]


def grads(y: Tensor, dy: Tensor, leaves: list[Tensor], deferred: bool) -> list[Tensor | None]:
    store = WeightGradients()
    if deferred:
        with collect(store):
            y.backward(dy)
    else:
        y.backward(dy)
    store.run()
    return [leaf.grad for leaf in leaves]


# ---------------------------------------------------------------- frozen and deferred parameters

LAYERS = {  # shapes of weight and bias; dims that are cut: of x uncut, weight, bias, y uncut
    "column": (((6, 5), (6,)), (None, 0, 0, 1)),
    "row": (((5, 6), (5,)), (1, 1, None, None)),
}


def _layer(group: Group, name: str, way: str, cut: bool) -> None:
    function = getattr(tensor, f"{name}_parallel_linear")
    shapes, (of_x, of_w, of_b, of_y) = LAYERS[name]
    if cut:
        of_x, of_y = (0, of_y) if name == "column" else (of_x, 0)
    x, w, b = draw(1, T, shapes[0][1]), draw(2, *shapes[0]), draw(3, *shapes[1])
    dy = draw(4, T, shapes[0][0])
    whole = [t.clone().requires_grad_() for t in (x, w, b)]
    right = F.linear(*whole)
    expected = torch.autograd.grad(right, whole, dy)
    for wanted in itertools.product((False, True), repeat=3):
        for bias, deferred in itertools.product((False, True), repeat=2):
            if not any(wanted[: 2 + bias]):
                continue
            given = (x, of_x), (w, of_w), (b, of_b)
            leaves = [share(t, dim, group).clone() for t, dim in given[: 2 + bias]]
            leaves = [t.requires_grad_(want) for t, want in zip(leaves, wanted)]
            y = function(*leaves, group=group, sequence_parallel=cut, overlap=way)
            found = grads(y, share(dy, of_y, group), leaves, deferred)
            y_right = right if bias else right - b
            assert_close_f64(y, share(y_right, of_y, group), 1e-13)
            for got, truth, dim, want in zip(found, expected, (of_x, of_w, of_b), wanted):
                assert (got is not None) == want
                if not want:
                    continue
                if dim is None and got.dim() == 1 and cut:  # each rank's own tokens, as documented
                    got = reduce_from(got, group)
                assert_close_f64(got, share(truth, dim, group), 1e-12)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("way", ["none", "bulk", "chunked"])
@pytest.mark.parametrize("name", LAYERS)
def test_any_of_x_weight_and_bias_may_be_frozen_and_weights_deferred(name, way, cut) -> None:
    on_threads(3, _layer, name, way, cut)


def _row(group: Group) -> None:
    x, w, b = (t.bfloat16() for t in (draw(1, T, 6), draw(2, 5, 6), 8 * draw(3, 5)))
    y = tensor.row_parallel_linear(share(x, 1, group), share(w, 1, group), b, group=group)
    truth = x.double() @ w.double().t() + b.double()
    assert y.dtype == torch.bfloat16
    assert ((y - truth).abs() <= 1.01 * 2**-8 * truth.abs() + 1e-5).all()


def test_sum_and_bias_of_a_row_in_bfloat16_are_rounded_once() -> None:
    on_threads(2, _row)


# ---------------------------------------------------------------- the head

V, PADDED, IGNORED = 13, 18, 4
LABELS = torch.tensor([0, 12, 4, 3, 4, 11, 6, 7, 8, 9, 10, 1])


def _head(group: Group, way: str, cut: bool) -> None:
    tokens, E = 0 if cut else None, 5
    x, w, dloss = draw(1, T, E), 2 * draw(2, PADDED, E), draw(3, T)
    for smoothing, z_loss, softcap, padded, (recompute, reduction) in itertools.product(
        (0.0, 0.3), (0.0, 0.2), (None, 2.0), (15, PADDED),
        ((True, "sum"), (False, "sum"), (True, "none")),
    ):  # fmt: skip
        leaf, table = x.clone().requires_grad_(), w[:padded].clone().requires_grad_()
        z = leaf @ table[:V].t()
        z = z if softcap is None else softcap * (z / softcap).tanh()
        options = {"ignore_index": IGNORED, "label_smoothing": smoothing}
        each = F.cross_entropy(z, LABELS, reduction="none", **options)
        each = each + z_loss * z.logsumexp(1).square() * (LABELS != IGNORED)
        right, dy = (each, dloss) if reduction == "none" else (each.sum(), dloss[0])
        expected = torch.autograd.grad(right, (leaf, table), dy)
        mine = [
            share(t, dim, group).clone().requires_grad_() for t, dim in ((x, tokens), (table, 0))
        ]
        loss = tensor.vocab_parallel_linear_cross_entropy(
            *mine, LABELS, group=group, vocab_size=V, sequence_parallel=cut, z_loss=z_loss,
            reduction=reduction, recompute=recompute, softcap=softcap, overlap=way,
            padded_vocab_size=padded if padded > 15 else None, **options,
        )  # fmt: skip
        found = torch.autograd.grad(loss, mine, dy)
        assert_close_f64(loss, right, 1e-12)
        for got, truth, dim in zip(found, expected, (tokens, 0)):
            assert_close_f64(got, share(truth, dim, group), 1e-12)
        if softcap is None and not cut:
            logits = (x @ w[:padded].t()).chunk(3, 1)[group.rank]
            losses = tensor.vocab_parallel_cross_entropy(
                logits, LABELS, group=group, vocab_size=V, z_loss=z_loss,
                padded_vocab_size=padded if padded > 15 else None, **options,
            )  # fmt: skip
            assert_close_f64(losses, each, 1e-12)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("way", ["none", "chunked"])
def test_a_heads_options_together_are_those_of_one_device(way, cut) -> None:
    on_threads(3, _head, way, cut)


# ---------------------------------------------------------------- attention

STRATEGIES = ("ring", "gather", "stream", "ulysses")


def _one_output(group: Group) -> None:
    """Return the gradient of o alone, and that of lse alone."""
    layout, generator = SequenceLayout(12, 3), torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 2, 12, 4, 6, generator=generator, dtype=torch.float64)
    dlse = torch.randn(2, 4, 12, generator=generator, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in (q, k[:, :, :2], v[:, :, :2])]
    right = reference.attention(*whole)
    for at, cotangent in enumerate((do, dlse)):
        expected = torch.autograd.grad(
            right[at], whole, cotangent, retain_graph=True, materialize_grads=True
        )
        for strategy in STRATEGIES:
            mine = [layout.shard(x.detach(), group.rank, 1).clone().requires_grad_() for x in whole]
            out = context_attention(
                *mine, layout=layout, group=group, strategy=strategy, return_lse=True
            )
            of = layout.shard(cotangent, group.rank, 1 + at)
            for got, truth in zip(torch.autograd.grad(out[at], mine, of), expected):
                assert_close_f64(got, layout.shard(truth, group.rank, 1), 1e-12)


def test_either_output_of_attention_may_be_differentiated_alone() -> None:
    on_threads(3, _one_output)


def _sinks(group: Group) -> None:
    """Test sinks in fp32, if the parameter says so, in bf16 attention:
    then shares may be summed."""
    layout, generator = SequenceLayout(12, 3), torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 2, 12, 4, 8, generator=generator).bfloat16()
    given = torch.randn(4, generator=generator).bfloat16()
    exact = given.double().requires_grad_()
    o, _ = reference.attention(*(x.double() for x in (q, k, v)), sinks=exact)
    (truth,) = torch.autograd.grad(o, [exact], do.double())
    for strategy, dtype in itertools.product(STRATEGIES, (torch.bfloat16, torch.float32)):
        sinks = given.clone().requires_grad_()
        sinks.grad_dtype = dtype
        mine = [layout.shard(x, group.rank, 1) for x in (q, k, v)]
        o = context_attention(*mine, layout=layout, group=group, strategy=strategy, sinks=sinks)
        o.backward(layout.shard(do, group.rank, 1))
        assert sinks.grad.dtype == dtype
        rounded = torch.equal(sinks.grad, sinks.grad.bfloat16().to(dtype))
        assert rounded == (dtype == torch.bfloat16)
        assert relative_error(reduce_from(sinks.grad.float(), group), truth) < 2e-2


def test_gradients_of_sinks_come_in_the_dtype_that_the_parameter_says() -> None:
    on_threads(3, _sinks)
