"""The loss layers: sums of token losses over a known normalizer, with a
whole or sharded vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64
from refused import check
from sharded import MESHES, RTOL, draw
from threads import Group, on_threads, run_threads

from warpweave.layers.loss import VocabParallelCrossEntropy, VocabParallelLinearCrossEntropy
from warpweave.parallel import tensor
from warpweave.parallel.collectives import group_rank, group_size, start_all_reduce_
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.parallel.shard import Cut, ParamRecord


def _problem(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = draw(1, 11, vocab) * 3
    labels = torch.arange(11) % vocab
    labels[::4] = -100
    return logits, labels


def _expected(
    vocab: int, smoothing: float, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's loss, divided by 17, and its gradient."""
    logits, labels = _problem(vocab)
    logits.requires_grad_()
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    loss = (loss + z_loss * (logits.logsumexp(1) ** 2)[labels != -100].sum()) / 17
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("normaliser", [17, torch.tensor(17)])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_it_is_the_summed_cross_entropy_over_the_normaliser(smoothing, z_loss, normaliser, impl):
    logits, labels = _problem(13)
    layer = VocabParallelCrossEntropy(13, label_smoothing=smoothing, z_loss=z_loss, impl=impl)
    loss = layer(logits.requires_grad_(), labels, normaliser)
    loss.backward()
    truth, gradient = _expected(13, smoothing, z_loss)
    assert loss.shape == ()
    assert_close_f64(loss, truth, RTOL)
    assert_close_f64(logits.grad, gradient, RTOL)


def test_micro_batches_that_share_a_normaliser_add_up_to_the_whole():
    logits, labels = _problem(13)
    layer, valid = VocabParallelCrossEntropy(13), (labels != -100).sum()
    parts = sum(layer(logits[i : i + 3], labels[i : i + 3], valid) for i in range(0, 11, 3))
    assert_close_f64(parts, F.cross_entropy(logits, labels), RTOL)


def test_no_valid_token_and_no_token_have_loss_zero():
    layer, logits = VocabParallelCrossEntropy(13), draw(1, 3, 13).requires_grad_()
    layer(logits, torch.full((3,), -100), 1).backward()
    assert not logits.grad.any()
    assert layer(logits[:0], torch.zeros(0, dtype=torch.int64), 1) == 0


def test_logits_of_bf16_are_summed_in_float32():
    logits, labels = _problem(13)
    low = logits.bfloat16()
    loss = VocabParallelCrossEntropy(13)(low, labels, 1)
    assert loss.dtype == torch.float32
    assert_close_f64(loss, F.cross_entropy(low.double(), labels, reduction="sum"), 1e-6)


def test_it_owns_no_parameters():
    assert not list(VocabParallelCrossEntropy(13).parameters())


def test_gathered_or_short_logits_and_wrong_smoothing_are_refused():
    labels = torch.zeros(2, dtype=torch.int64)
    layer, wrong = (VocabParallelCrossEntropy(13, label_smoothing=s) for s in (0.0, 1.5))
    words = "12 logits columns on each of 1 tensor-parallel ranks must add up"
    check(lambda: layer(torch.zeros(2, 12), labels, 1), words)
    words = r"label_smoothing must be in \[0, 1\), got 1.5"
    check(lambda: wrong(torch.zeros(2, 13), labels, 1), words)


def _check(mesh: ConnectedMesh, vocab: int, smoothing: float, padding: float) -> None:
    logits, labels = _problem(vocab)
    tp, index = mesh.size("tp"), mesh.index("tp")
    cut = ParamRecord("", tuple(logits.shape), (Cut("tp", 1, tp),))
    mine = cut.slice(logits, mesh.coords).clone()
    columns = mine.shape[1] * index + torch.arange(mine.shape[1])
    mine[:, columns >= vocab] = padding
    layer = VocabParallelCrossEntropy(vocab, label_smoothing=smoothing, mesh=mesh)
    loss = layer(mine.requires_grad_(), labels, 17)
    loss.backward()
    truth, gradient = _expected(vocab, smoothing)
    assert_close_f64(loss, truth, RTOL)
    assert_close_f64(mine.grad, cut.slice(gradient, mesh.coords), RTOL)


def _on_ranks(rank: int, sizes: Mesh) -> None:
    mesh = sizes.connect()
    # with 5 on 4 ranks one holds only padding
    for given in itertools.product((5, 13, 12), (0.0, 0.2), (0.0, 1e4)):
        _check(mesh, *given)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_prime_vocabularies_equal_one_device_whatever_lies_in_the_padding(sizes):
    run_threads(sizes.world, _on_ranks, sizes)


# ------------------------------------------------------------------- head and loss in one


def _check_head(mesh: ConnectedMesh, vocab: int, sequence_parallel: bool, recompute) -> None:
    """Compare loss and both gradients with torch, for x and weight whose product is the logits."""
    x, weight, (_, labels) = draw(2, 12, 7), draw(3, vocab, 7) * 3, _problem(vocab)
    labels = torch.cat((labels, labels[:1]))  # 12 tokens: divisible by 2, 3 and 4 ranks
    x.requires_grad_(), weight.requires_grad_()
    options = {"reduction": "sum", "label_smoothing": 0.2}
    truth = F.cross_entropy(x @ weight.t(), labels, **options) / 17
    truth.backward()
    tp, here = mesh.size("tp"), mesh.coords
    cut = (Cut("tp", 0, tp),)
    rows = ParamRecord("", (vocab, 7), cut)
    tokens = ParamRecord("", (12, 7), cut if sequence_parallel else ())
    mine = tokens.slice(x.detach(), here).clone().requires_grad_()
    own = rows.slice(weight.detach(), here).clone().requires_grad_()
    how = {"mesh": mesh, "sequence_parallel": sequence_parallel, "recompute": recompute}
    layer = VocabParallelLinearCrossEntropy(vocab, label_smoothing=0.2, **how)
    late = start_all_reduce_(torch.tensor(17.0 / tp, dtype=torch.float64), mesh.group("tp"))
    loss = layer(mine, own, labels, late)
    loss.backward()
    assert_close_f64(loss, truth, RTOL)
    assert_close_f64(mine.grad, tokens.slice(x.grad, here), RTOL)
    assert_close_f64(own.grad, rows.slice(weight.grad, here), RTOL)


@pytest.mark.parametrize("recompute", [None, True, False])
def test_head_and_loss_in_one_equal_torch(recompute):
    _check_head(Mesh().connect(), 13, False, recompute)


def _heads_on_ranks(rank: int, sizes: Mesh) -> None:
    mesh = sizes.connect()
    for given in itertools.product((5, 13), (False, True), (False, True)):
        _check_head(mesh, *given)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_head_and_loss_in_one_equal_one_device(sizes):
    run_threads(sizes.world, _heads_on_ranks, sizes)


def test_head_and_loss_own_no_parameters_and_take_the_z_loss():
    layer = VocabParallelLinearCrossEntropy(5, z_loss=0.1)
    assert not list(layer.parameters())
    x, weight, labels = draw(2, 4, 7), draw(3, 5, 7), torch.tensor([0, 4, -100, 2])
    lse = (x @ weight.t()).logsumexp(1)[labels >= 0]
    truth = F.cross_entropy(x @ weight.t(), labels, reduction="sum") + 0.1 * lse.square().sum()
    assert_close_f64(layer(x, weight, labels, 3), truth / 3, RTOL)


# ------------------------------------------------------------------- every option at once

VOCAB, PADDED, IGNORED = 11, 18, 4  # one of three ranks holds only padding
LABELS = torch.tensor([0, 4, 10, 3, 4, 7])


def _formula(z: torch.Tensor) -> torch.Tensor:
    """Compute losses of the logits z, which cover only the vocabulary."""
    lse = z.logsumexp(1)
    losses = lse - 0.9 * z.gather(1, LABELS[:, None])[:, 0] - 0.1 * z.mean(1) + 0.2 * lse**2
    return losses.masked_fill(LABELS == IGNORED, 0)


def _every_option(group: Group | None) -> None:
    rank, ranks = group_rank(group), group_size(group)
    options = {
        "group": group, "vocab_size": VOCAB, "padded_vocab_size": PADDED, "ignore_index": IGNORED,
        "label_smoothing": 0.1, "z_loss": 0.2, "impl": "torch",
    }  # fmt: skip
    x, weight, dloss = draw(1, 6, 5).requires_grad_(), draw(2, PADDED, 5), draw(3, 6)
    weight.requires_grad_()
    z = x @ weight.t()
    (dz,) = torch.autograd.grad(_formula(z[:, :VOCAB]), z, dloss, retain_graph=True)
    mine = z.detach().chunk(ranks, 1)[rank].requires_grad_()
    losses = tensor.vocab_parallel_cross_entropy(mine, LABELS, **options)
    assert_close_f64(losses, _formula(z[:, :VOCAB]), RTOL)
    assert_close_f64(torch.autograd.grad(losses, mine, dloss)[0], dz.chunk(ranks, 1)[rank], RTOL)
    ways = (("none", True), ("sum", True), ("sum", False))
    for cap, (reduction, recompute), cut in itertools.product((None, 2.0), ways, (True, False)):
        truth = _formula(z[:, :VOCAB] if cap is None else cap * (z[:, :VOCAB] / cap).tanh())
        truth, dy = (truth, dloss) if reduction == "none" else (truth.sum(), dloss[0])
        expected = torch.autograd.grad(truth, (x, weight), dy, retain_graph=True)
        own = x.detach().chunk(ranks if cut else 1)[rank if cut else 0].requires_grad_()
        shard = weight.detach().chunk(ranks)[rank].requires_grad_()
        found = tensor.vocab_parallel_linear_cross_entropy(
            own, shard, LABELS, reduction=reduction, recompute=recompute, softcap=cap,
            sequence_parallel=cut, **options,
        )  # fmt: skip
        dx, dw = torch.autograd.grad(found, (own, shard), dy)
        assert_close_f64(found, truth, RTOL)
        assert_close_f64(dx, expected[0].chunk(ranks)[rank] if cut else expected[0], RTOL)
        assert_close_f64(dw, expected[1].chunk(ranks)[rank], RTOL)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_option_of_the_loss_is_in_the_formula_with_all_others(ranks):
    """For logits, and for the head's input with and without a softcap."""
    _every_option(None) if ranks == 1 else on_threads(ranks, _every_option)
