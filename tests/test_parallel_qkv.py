"""The fused projection to heads over tensor ranks: no tokens, rejected arguments, its typing rule.

`test_sharded_ops.py` tests that it equals the plain one, including the rotation.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from refused import check
from rules import over_group, rulecheck
from sharded import draw, world
from sharded_ops import LENGTH, NARROW, QKV, B, table
from spmd_types import I, R, S
from threads import run_threads

from warpweave.kernels.qkv import function as qkv
from warpweave.kernels.rope import rope_table
from warpweave.parallel.tensor.qkv import parallel_qkv_rope

E = NARROW


def _empty(rank: int) -> None:
    group, *_ = world()
    for shape, impl in itertools.product(((0, 5), (3, 0), (0, 0)), ("torch", "triton")):
        x, weight = draw(1, 0, E).requires_grad_(), draw(2, 1, 3, 4, E).requires_grad_()
        turn = rope_table(torch.arange(shape[1]), 4, dtype=torch.float64)
        for angles in ((None, None), turn):
            x.grad = weight.grad = None
            how = {"shape": shape, "group": group, "impl": impl}
            q, k, v = parallel_qkv_rope(x, weight, None, *angles, **how)
            assert q.shape == k.shape == v.shape == (*shape, 1, 4)
            (q.sum() + k.sum() + v.sum()).backward()
            assert x.grad.shape == x.shape
            assert not weight.grad.any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_samples_and_no_positions_have_no_heads_and_gradient_zero(ranks: int) -> None:
    run_threads(ranks, _empty)


def _refused(rank: int) -> None:
    """Test that errors come before any collective: otherwise the ranks
    would wait for each other."""
    x, weight, bias = QKV.mine(QKV.whole({}), False).values()
    options = {"shape": (B, LENGTH), "group": world()[0]}
    name = f"parallel_qkv_rope on rank {rank}: "
    for arguments, change, words in (
        ((x, weight, bias), {"shape": (B, 5)}, name + r"expected x.* R = 1 \(the number of ranks"),
        ((x, weight, bias), {"sequence_parallel": True},
         name + r"expected x.* R = 2 \(the number of ranks"),
        ((x[:, :6], weight, bias), {}, r"need x\[B, S, E\]"),
        ((x, weight.flatten(0, 2), bias), {}, "need x"),
        ((x, weight, bias[1:]), {}, "bias must be"),
        ((x.float(), weight, bias), {}, name + "dtypes differ"),
    ):  # fmt: skip
        check(partial(parallel_qkv_rope, *arguments, *table(4), **options | change), words)
    odd = partial(parallel_qkv_rope, x, weight[:, :, :1], None, *table(4), **options)
    check(odd, "a rotary embedding needs an even head_dim, got 1")


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    run_threads(2, _refused)


# ---------------------------------------------------------------- the typing rule


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_typing_rule_holds_numerically(sequence: bool, batch: int) -> None:
    tensors = draw(1, 6, 5), draw(2, 2, 3, 4, 5), draw(3, 2, 3, 4), *table(4)
    tensors = tuple(t[: 6 // batch] if i > 2 else t for i, t in enumerate(tensors))
    shape = batch, 6 // batch
    more = (qkv.QKVOptions(shape, (3, 4), torch.float64, impl="torch"), "tp", sequence)
    places = {"x": S(0) if sequence else I, "weight": S(0), "bias": S(0), "cos": R, "sin": R}
    places = {name: {"tp": place} for name, place in places.items()}
    rulecheck(over_group(qkv._QKV), (*tensors, *more), places, mesh={"tp": 2})
