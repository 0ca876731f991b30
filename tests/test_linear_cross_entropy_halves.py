"""The halves of linear layer and cross entropy in one, by themselves."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64

from warpweave.kernels.cross_entropy import (
    blocks,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary


@pytest.fixture(autouse=True)
def _small_blocks():
    with mock.patch.object(blocks, "CPU", blocks.BlockSizes(1100, 8, 5)):  # 8 x 128 and 5 x 128
        yield


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [7, 128])
def test_a_half_adds_to_its_gradient_or_overwrites_all_of_it(rows, wanted, add):
    """Of several blocks of columns, padding among them; of one block of rows and of several."""
    x, w = torch.randn(rows, 8).bfloat16(), torch.randn(330, 8).bfloat16() / 2
    labels = torch.arange(rows) * 37 % 290
    labels[::3] = -100
    vocabulary = Vocabulary(0, 290, -100, 0.0, 0.0, "torch")
    stats = linear_cross_entropy_fwd(x, w, labels, vocabulary)
    dw = torch.full((330, 8), 2.0 if add else float("nan"), dtype=wanted)
    dloss = torch.ones(rows)
    assert (
        linear_cross_entropy_bwd(dloss, x, w, labels, stats[0], vocabulary, dw=dw, add=add) is None
    )
    exact = w[:290].double().requires_grad_()
    losses = F.cross_entropy(x.double() @ exact.t(), labels, reduction="sum")
    (truth,) = torch.autograd.grad(losses, exact)
    assert torch.equal(dw[290:], torch.full_like(dw[290:], 2.0 if add else 0.0))
    assert_close_f64(dw[:290], truth + (2 if add else 0), 2e-2)
