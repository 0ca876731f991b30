"""Forward and backward of the fused linear layer and cross entropy, and
the sizes of their blocks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from close import assert_all_close, assert_close_f64
from guarded import guarded
from sharded_ops import small_blocks

from warpweave.kernels.cross_entropy import (
    blocks,
    cross_entropy,
    in_forward,
    linear_cross_entropy,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary


@pytest.fixture
def several_blocks():
    with small_blocks(blocks.BlockSizes(1100, 8, 5)):  # 8 x 128 and 5 x 128
        yield


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 7, 128])
def test_the_backward_adds_to_the_weights_gradient_or_overwrites_all_of_it(rows, wanted, add):
    """Covers several blocks of columns with padding among them, and no
    rows, one block and several."""
    x, w = torch.randn(rows, 8).bfloat16(), torch.randn(330, 8).bfloat16() / 2
    labels = torch.arange(rows) * 37 % 290
    labels[::3] = -100
    vocabulary = Vocabulary(0, 290, -100, 0.0, 0.0, "torch")
    stats = linear_cross_entropy_fwd(x, w, labels, vocabulary)
    dw = torch.full((330, 8), 2.0 if add else float("nan"), dtype=wanted)
    dloss = torch.ones(rows)
    arguments = dloss, x, w, labels, stats[0], vocabulary
    with guarded():  # nothing is accumulated onto unwritten elements
        assert linear_cross_entropy_bwd(*arguments, dw=dw, add=add) is None
    exact = w[:290].double().requires_grad_()
    losses = F.cross_entropy(x.double() @ exact.t(), labels, reduction="sum")
    (truth,) = torch.autograd.grad(losses, exact)
    assert torch.equal(dw[290:], torch.full_like(dw[290:], 2.0 if add else 0.0))
    assert_close_f64(dw[:290], truth + (2 if add else 0), 2e-2)  # logits and dz are bfloat16


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("sizes", [(1100, 8, 5), (2**11, 1, 1), (2**20, 2**10, 2**10)], ids=str)
def test_blocks_cover_the_logits_once_and_are_as_large_as_allowed(sizes):
    held = blocks.BlockSizes(*sizes)
    with small_blocks(held):
        for rows, columns in ((1, 1), (8, 137), (9, 128), (23, 301), (40, 4097), (3, 0), (2100, 5)):
            seen = torch.zeros(rows, columns, dtype=torch.int64)
            x, many = torch.empty(rows, 3), set()
            for at, slices in blocks.block_grid(x, columns):
                many.add(high := at.stop - at.start)
                for cols in slices:
                    seen[at, cols] += 1
                    wide = cols.stop - cols.start
                    assert high * wide <= max(held.elements, high * 128)
                    last = cols is slices[-1]
                    assert last or (wide % 128 == 0 and high * (wide + 128) > held.elements)
                assert len(slices) > 1 or slices[0] == slice(0, columns)
            assert seen.eq(1).all()
            most = max(held.most_rows, held.elements // max(1, columns))
            assert max(many) == min(rows, most)


@pytest.mark.parametrize("spare", [0, 1])
def test_more_logits_than_may_be_held_at_once_are_made_in_two_halves(spare):
    x, w = torch.randn(11, 4, requires_grad=True), torch.randn(30, 4, requires_grad=True)
    labels = torch.arange(11)
    rows, made = [], in_forward._rows_fwd_op

    def noted(x: torch.Tensor, *rest: object) -> list[torch.Tensor]:
        rows.append(len(x))
        return made(x, *rest)

    held = blocks.BlockSizes(2**20, 2**10, 2**10, 11 * 30 - 1 + spare)
    with small_blocks(held), mock.patch.object(in_forward, "_rows_fwd_op", noted):
        loss = linear_cross_entropy(x, w, labels)
    assert rows == ([11] if spare else [6, 5])
    assert_close_f64(loss, F.cross_entropy(x.double() @ w.double().t(), labels), 1e-6)


def test_block_sizes_are_those_that_the_docstrings_promise():
    assert (blocks.CPU.elements, blocks.GPU.elements) == (2**20, 2**26)
    assert (blocks.CPU.fewest_rows, blocks.GPU.fewest_rows) == (1024, 4096)
    assert (blocks.CPU.most_rows, blocks.GPU.most_rows) == (1024, 16384)
    assert blocks.sizes(torch.empty(1)) is blocks.CPU
    assert blocks.sizes(torch.empty(1, device="meta")) is blocks.GPU


# ---------------------------------------------------------------- all options together


def _formula(z: torch.Tensor, labels: torch.Tensor, ignored: int, s: float, c: float):
    """Compute losses of logits z[N, V], which cover the whole vocabulary."""
    lse, label = z.logsumexp(1), labels.clamp(0, z.shape[1] - 1)[:, None]
    losses = lse - (1 - s) * z.gather(1, label)[:, 0] - s * z.mean(1) + c * lse**2
    return torch.where(labels == ignored, 0.0, losses)


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize(
    ("impl", "ignored"), [("torch", 7), ("torch", -1), ("torch", 500), ("triton", 7)]
)
def test_options_together_equal_the_formula_in_float64(ignored, impl):
    """Covers several blocks of rows and of columns, padding that begins
    within one, tokens of two dims."""
    x, w = torch.randn(2, 9, 5, dtype=torch.float64), torch.randn(290, 5, dtype=torch.float64)
    labels = torch.arange(18) * 17 % 270
    labels[2::5], labels[1] = ignored, 269
    terms = (
        ((0.0, 0.0), (0.3, 0.0), (0.0, 0.02), (1.0, 0.02)) if impl == "torch" else ((0.3, 0.02),)
    )
    ways = ("none", True), ("sum", True), ("sum", False), ("mean", False)
    for smoothing, z_loss in terms:
        exact = x.clone().requires_grad_(), w.clone().requires_grad_()
        z = (exact[0] @ exact[1].t()).flatten(0, 1)
        logits = z.detach().clone().requires_grad_()
        truth = _formula(z[:, :270], labels, ignored, smoothing, z_loss)
        options = {"vocab_size": 270, "ignore_index": ignored, "label_smoothing": smoothing}
        options |= {"z_loss": z_loss, "impl": impl}
        for reduction, recompute in ways:
            if reduction == "none":
                right, dy = truth, torch.linspace(-1, 2, 18, dtype=torch.float64)
            else:
                many = (labels != ignored).sum() if reduction == "mean" else 1
                right, dy = truth.sum() / many, torch.tensor(3.0, dtype=torch.float64)
            expected = torch.autograd.grad(right, (*exact, z), dy, retain_graph=True)
            given = x.clone().requires_grad_(), w.clone().requires_grad_()
            how = options | {"reduction": reduction}
            found = linear_cross_entropy(*given, labels.view(2, 9), recompute=recompute, **how)
            grads = torch.autograd.grad(found.flatten(), given, dy.flatten())
            plain = cross_entropy(logits, labels, **how)
            for ours in (found.flatten(), plain.flatten()):
                assert_close_f64(ours, right.flatten(), 1e-12)
            dlogits = torch.autograd.grad(plain, logits, dy)
            assert_all_close((*grads, *dlogits), expected, 1e-12)
            assert not grads[1][270:].any()
            assert not dlogits[0][:, 270:].any()
