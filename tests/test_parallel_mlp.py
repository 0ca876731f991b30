"""The fused MLP over tensor ranks: saved tensors, autocast, rejected arguments, its typing rule.

`test_sharded_ops.py` tests that it equals the plain one.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from refused import check
from rules import over_group, rulecheck
from saved import saved_elements
from sharded import Tensors, draw, world
from sharded_ops import MLP, NARROW, UNITS, T
from spmd_types import I, R, S
from spmd_types.types import SpmdTypeError
from threads import run_threads

from warpweave.kernels.mlp import RECOMPUTE
from warpweave.kernels.mlp.function import _MLP, MLPOptions
from warpweave.parallel.tensor.mlp import parallel_mlp

E, HIDDEN = NARROW, UNITS


def mine(activation: str) -> Tensors:
    """Return this rank's tensors."""
    return MLP.mine(MLP.whole({"activation": activation}), False)


def _kept(rank: int) -> None:
    """Count what is saved for the backward, in elements per token of a gated MLP over two ranks."""
    kept = {}
    tensors = {name: t.requires_grad_() for name, t in mine("swiglu").items()}
    run = partial(parallel_mlp, **tensors, activation="swiglu", group=world()[0])
    weights = [tensors[n] for n in ("up_weight", "down_weight", "up_bias")]
    for recompute in RECOMPUTE:
        kept[recompute] = saved_elements(partial(run, recompute=recompute), weights) / T
    kept["inference"] = saved_elements(torch.no_grad()(run), weights)
    half = HIDDEN // 2
    expected = {"nothing": E + 3 * half, "activation": E + 2 * half, "up": E, "inference": 0}
    assert kept == expected


def test_only_what_is_promised_is_kept() -> None:
    run_threads(2, _kept)


def _autocast(rank: int) -> None:
    tensors = {name: t.float().requires_grad_() for name, t in mine("gelu").items()}
    residual = tensors.pop("residual")
    with torch.autocast("cpu", torch.bfloat16):
        y = parallel_mlp(**tensors, activation="gelu", group=world()[0])
        stream = parallel_mlp(**tensors, residual=residual, activation="gelu", group=world()[0])
    assert y.dtype == torch.bfloat16
    assert stream.dtype == torch.float32
    assert torch.equal(stream, residual + y)
    stream.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors.values())


def test_autocast_computes_in_its_dtype_and_keeps_wide_streams_and_weights() -> None:
    run_threads(2, _autocast)


def _refused(rank: int) -> None:
    """Test that errors come before any collective: otherwise the ranks
    would wait for each other."""
    t = mine("gelu")
    options = {"activation": "gelu", "group": world()[0]}
    for change, words in (
        ({"activation": "silu"}, "activation must be one of"),
        ({"recompute": "all"}, "recompute must be one of nothing, activation, up, got 'all'"),
        ({"up_weight": t["up_weight"].float()}, f"parallel_mlp on rank {rank}: dtypes differ"),
        ({"residual": t["x"][:3]}, r"residual must have the shape .* of x"),
        ({"down_weight": MLP.whole({})["down_weight"]}, r"gelu needs x\[..., E\]"),
        ({"down_bias": t["down_bias"][:2]}, f"parallel_mlp on rank {rank}: down_bias must be"),
        ({"x": t["x"][0], "residual": None}, r"need x\[..., E\] with at least two dims"),
    ):
        check(partial(parallel_mlp, **t | options | change), words)


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    run_threads(2, _refused)


# ---------------------------------------------------------------- the typing rule


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_typing_rule_holds_numerically(activation: str, sequence: bool) -> None:
    rows = 8 if activation == "swiglu" else 4
    options = MLPOptions(activation, impl="torch", dtype=torch.float64)
    more = (None, options, False, "tp", sequence)
    tensors = draw(1, 6, 5), draw(2, rows, 5), draw(3, rows), draw(4, 5, 4), draw(5, 5)
    places = {"x": S(0) if sequence else I, "up_weight": S(0), "up_bias": S(0),
              "down_weight": S(1), "down_bias": R if sequence else I}  # fmt: skip
    places = {name: {"tp": place} for name, place in places.items()}
    function = over_group(_MLP)
    rulecheck(function, (*tensors, *more), places, mesh={"tp": 2})
    refused = places | {"down_bias": {"tp": I if sequence else R}}
    with pytest.raises(SpmdTypeError):
        rulecheck(function, (*tensors, *more), refused, mesh={"tp": 2})
