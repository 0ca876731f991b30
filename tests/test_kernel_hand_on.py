"""Functions of products, MLPs and losses pass all their arguments on to what computes, as
`test_hand_on` tests for layers. No value is a default, so that a dropped one shows."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from told import check, told

from warpweave.kernels.cross_entropy import (
    backward,
    cross_entropy,
    cross_entropy_bwd,
    cross_entropy_fwd,
    forward,
    linear,
    linear_cross_entropy,
)
from warpweave.kernels.cross_entropy import function as loss
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import fused, fused_gemm, gemm, gemm_into, local
from warpweave.kernels.gemm.epilogue import Epilogue
from warpweave.kernels.gemm.local import LOCAL, Local
from warpweave.kernels.mlp import function, gelu_mlp, hidden, mlp, swiglu_mlp
from warpweave.kernels.overlap import function as overlap
from warpweave.kernels.overlap import gathering
from warpweave.kernels.overlap.gathering import Gathering
from warpweave.kernels.qkv import function as qkv

x, residual = torch.randn(6, 4), torch.randn(6, 4)
up, down, up_bias, down_bias = (torch.randn(s) for s in ((5, 2, 4), (4, 5), (5, 2), (4,)))
flat, flat_bias = up.flatten(0, 1), up_bias.flatten()
h, z = torch.randn(6, 5), torch.randn(6, 10)
DROP = Drop(0.5, 3, 1, torch.arange(6))
HOW = {"precision": "tf32x3", "impl": "triton"}
AFTER = {"drop": DROP, "residual": residual}
MEMORY = SimpleNamespace(world=2, rank=1)


# ---------------------------------------------------------------- MLPs


@pytest.mark.parametrize(
    ("call", "activation"),
    [
        (gelu_mlp, "gelu"), (partial(gelu_mlp, approximate="none"), "gelu_erf"),
        (swiglu_mlp, "swiglu"),
    ],
)  # fmt: skip
def test_an_mlp_by_the_name_of_its_activation(call, activation) -> None:
    given = AFTER | HOW | {"recompute": "up"}
    found = told(function, "mlp", lambda: call(x, up, down, up_bias, down_bias, **given))
    weights = {"up_weight": up, "down_weight": down, "up_bias": up_bias, "down_bias": down_bias}
    check(found, {"x": x, "activation": activation} | weights | given)


def _options(recompute: str, activation: str = "swiglu") -> function.MLPOptions:
    return function.MLPOptions(activation, DROP, recompute, **HOW, dtype=torch.float32)


def test_an_mlp() -> None:
    given = AFTER | HOW | {"activation": "swiglu", "recompute": "up"}
    leaf, ranks = x.clone().requires_grad_(), Local()
    for of in (leaf, x):
        found = told(
            function, "mlp_fwd",
            lambda of=of: mlp(of, up, down, up_bias, down_bias, **given, ranks=ranks),
            (torch.zeros(6, 4), None, None),
        )  # fmt: skip
        expected = {"x": x, "residual": residual, "options": _options("up"), "ranks": ranks}
        expected |= {"up_weight": flat, "up_bias": flat_bias, "down_weight": down}
        check(found, expected | {"down_bias": down_bias, "save": of is leaf})


@pytest.mark.parametrize("recompute", function.RECOMPUTE)
def test_the_products_of_an_mlp(recompute: str) -> None:
    options = _options(recompute)
    for save in (False, True):

        def run(save=save):
            given = x, flat, flat_bias, down, down_bias, residual, options
            return function.mlp_fwd(*given, save=save)

        found = told(function, "hidden_fwd", run, (h, z))
        first = {"x": x, "up_weight": flat, "up_bias": flat_bias, "activation": "swiglu"} | HOW
        check(found, first | {"save_z": save and recompute != "up"})
        with (
            mock.patch.object(function, "hidden_fwd", return_value=(h, z)),
            mock.patch.object(LOCAL, "row_product", create=True) as product,
        ):
            assert (run()[2] is h) == (save and recompute == "nothing")
        assert product.call_args == mock.call(h, down, down_bias, **AFTER, **HOW)
    call = partial(function.mlp_up_again, x, flat, flat_bias, options)
    check(told(function, "hidden_again", call), first)


@pytest.mark.parametrize("want_hidden", [False, True])
def test_the_gradients_of_an_mlp(want_hidden: bool) -> None:
    run = partial(function.mlp_bwd, x, down, z, _options("up"), want_hidden=want_hidden)
    launched = {"activation": "swiglu", "want_hidden": want_hidden} | HOW
    found = told(function, "hidden_bwd", partial(run, want_dz=True))
    check(found, {"dy": x, "down_weight": down, "z": z} | launched)
    if want_hidden:
        found = told(function, "activation_fwd", partial(run, want_dz=False))
        check(found, {"x": z, "activation": "swiglu", "impl": "triton"})
    else:
        assert run(want_dz=False) == (None, None)
    with mock.patch.object(hidden, "_launch_hidden_bwd", return_value=[z]) as launch:
        hidden.hidden_bwd(x, down, z, **launched)
    assert launch.call_args == mock.call(x, down, mock.ANY, *launched.values())


@pytest.mark.parametrize("of", [x, Gathering(x[:3], MEMORY)], ids=["rows", "gathered"])
def test_hidden_units(of) -> None:
    found = told(
        hidden, "multiply",
        lambda: hidden.hidden_fwd(of, flat, flat_bias, activation="swiglu", save_z=True, **HOW),
    )  # fmt: skip
    options = {"activation": "swiglu", "save_z": True, "precision": "tf32x3"}
    given = {"x": of, "b": flat.t(), "bias": flat_bias, "impl": "triton"}
    check(found, given | {"options": options})


def test_hidden_units_again() -> None:
    with mock.patch.object(hidden, "_again") as again:
        hidden.hidden_again(x, flat, flat_bias, activation="swiglu", **HOW)
    assert again.call_args == mock.call(x, flat, flat_bias, "swiglu", "tf32x3", "triton")
    call = partial(hidden._again.run, x, flat, flat_bias, "swiglu", *HOW.values())
    check(told(hidden, "gemm", call), {"a": x, "b": flat.t(), "bias": flat_bias} | HOW)


# ---------------------------------------------------------------- products

OVER = {"bias": down_bias, "drop": DROP, "residual": residual, "out_dtype": torch.float32}
OVER["precision"] = "tf32x3"


def test_a_row_product() -> None:
    for bias in (down_bias, down_bias.double()):  # rounded like a product's other operands
        call = partial(LOCAL.row_product, h, down, bias, **AFTER, **HOW)
        found = told(local, "fused_gemm", call, (residual, None))
        assert found["bias"].dtype == h.dtype
        check(found, {"a": h, "b": down.t(), "bias": down_bias} | AFTER | HOW)


def test_products() -> None:
    wide = {"out_dtype": torch.float32, "precision": "tf32x3"}
    half = x.half(), down.half()
    with mock.patch.object(fused, "_gemm") as product:
        gemm(*half, up_bias[:, 0], **wide, impl="triton")
    assert product.call_args == mock.call(*half, mock.ANY, torch.float32, "tf32x3")
    assert torch.equal(product.call_args.args[2], up_bias[:, 0])
    for add in (False, True):
        with mock.patch.object(fused, "_gemm_into") as product:
            gemm_into(x, down, h, add, **HOW)
        assert product.call_args == mock.call(x, down, h, add, "tf32x3", "triton", False)
    with mock.patch.object(fused, "_fused", return_value=[h]) as product:
        fused_gemm(x, down, activation="gelu", save_z=True, drop=DROP, **wide, impl="triton")
    after = Epilogue(None, "gelu", True, None, None, torch.float32, "tf32x3")
    assert product.call_args == mock.call(x, down, after, DROP, "triton")


@pytest.mark.parametrize("name", ["gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"])
def test_a_product_over_ranks(name: str) -> None:
    more = {"activation": "gelu", "save_z": True} if name == "all_gather_gemm" else {}
    with mock.patch.object(overlap, "run_steps") as run:
        call = partial(getattr(overlap, name), h, down.t(), memory=MEMORY, **OVER, **more)
        found = told(overlap, f"{name}_steps", call, "the steps")
    assert run.call_args == mock.call(name, "the steps", MEMORY)
    first = "x" if name == "all_gather_gemm" else "a"
    check(found, {first: h, "b": down.t(), "memory": MEMORY, "epilogue": Epilogue(**OVER, **more)})


def test_what_layers_ask_of_products_over_ranks() -> None:
    more = {"activation": "gelu", "save_z": True, "precision": "tf32x3"}
    deep = h.view(2, 3, 5)
    call = partial(gathering.multiply, deep, down.t(), down_bias, impl="triton", **more)
    found = told(gathering, "fused_gemm", call, (h, None))
    check(found, {"a": h, "b": down.t(), "bias": down_bias, "impl": "triton"} | more)
    rows = Gathering(deep, MEMORY)
    call = partial(gathering.multiply, rows, down.t(), down_bias, **more)
    found = told(gathering, "all_gather_gemm", call, (h, z, torch.cat((h, h))))
    check(found, {"x": h, "b": down.t(), "bias": down_bias, "memory": MEMORY} | more)
    assert rows.whole.shape == rows.shape == (4, 3, 5)
    for scatter, name in ((True, "gemm_reduce_scatter"), (False, "gemm_all_reduce")):
        call = partial(gathering.sum_of_products, deep, down.t(), MEMORY, scatter, **OVER)
        found = told(gathering, name, call, torch.zeros(3 if scatter else 6, 4))
        check(found, {"a": h, "b": down.t(), "memory": MEMORY} | OVER)


# ---------------------------------------------------------------- queries, keys and values


@pytest.mark.parametrize("form", ["samples", "tokens", "a run", "gathered"])
def test_a_projection_of_heads(form: str) -> None:
    """Tokens are whole samples, or a run of them, or gathered by the product's kernel."""
    heads = torch.randn(2, 4, 2, 4, requires_grad=True)
    bias, cos, sin = torch.randn(2, 4, 2), torch.randn(3, 1), torch.randn(3, 1)
    samples, first = x.view(2, 3, 4), 2
    q, k = torch.randn(2, 3, 4, 2), torch.randn(2, 3, 2, 2)
    ranks, more = LOCAL, {"shape": (2, 3)}
    expected = {"weight": heads, "bias": bias, "cos": cos, "sin": sin} | HOW
    if form == "samples":
        given, more = samples, {}
    else:
        given = x
    v = torch.randn_like(k)
    result, name = (q, k, v), "qkv_fwd"
    if form == "a run":  # tokens 2 to 5: position 2 of one sample, 0 and 1 of the other
        at = [2, 0, 1]
        result = q[:1], k[:1], v[:1]
        expected |= {"x": x[None, 2:5], "cos": cos[at], "sin": sin[at]}
        ranks = mock.Mock(**{"name.return_value": "it"})
        whole = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        ranks.column_product = lambda x, of: (of(x[first : first + 3], first), whole)[1]
    elif form == "gathered":
        rows = Gathering(x[:3], MEMORY)
        expected = expected | {"x": rows, "shape": (2, 3)}
        del expected["impl"]  # there is only one
        name, ranks = "gather_qkv_fwd", mock.Mock(**{"name.return_value": "it"})
        ranks.column_product = lambda x, of: of(rows, 0)
    else:
        expected["x"] = samples
    made, turn = [], partial(qkv.qkv_rope, given, heads, bias, cos, sin, **HOW, **more, ranks=ranks)
    call = lambda: made.extend(turn())  # noqa: E731
    found = told(qkv, name, call, result)
    assert all(torch.equal(found.pop(key), expected.pop(key)) for key in ("weight", "bias"))
    check(found, expected)
    if form in ("samples", "tokens"):
        dq, dk = torch.randn_like(q), torch.randn_like(k)
        back = told(
            qkv, "qkv_bwd",
            lambda: torch.autograd.grad(made, heads, (dq, dk, 2 * dk)), torch.randn(6, 16),
        )  # fmt: skip
        check(back, {"dq": dq, "dk": dk, "dv": 2 * dk, "cos": cos, "sin": sin, "impl": "triton"})


# ---------------------------------------------------------------- losses

labels, losses = torch.tensor([0, 3, 7, 2, 7, 1]), torch.randn(6)
weight = torch.randn(8, 4)
WORDS = {"ignore_index": 7, "label_smoothing": 0.1, "z_loss": 0.2}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(reduction: str) -> None:
    whole = Vocabulary(0, 5, **WORDS, impl="triton")
    given = WORDS | {"vocab_size": 5, "reduction": reduction, "impl": "triton"}
    with mock.patch.object(loss.CrossEntropy, "apply", return_value=losses) as computed:
        cross_entropy(h, labels, **given)
    assert computed.call_args == mock.call(h, labels, whole, LOCAL)
    for recompute in (True, False):
        call = partial(linear_cross_entropy, x, weight, labels, **given, recompute=recompute)
        found = told(linear, "head_loss", call, losses.sum())
        expected = {"x": x, "weight": weight, "labels": labels, "vocabulary": whole}
        expected |= {"dtype": torch.float32, "reduction": reduction, "recompute": recompute}
        check(found, expected)


def test_halves_of_a_loss() -> None:
    place = {"vocab_start": 2, "vocab_size": 9, "ignore_index": 7, "impl": "triton"}
    for want_sum in (False, True):
        op = mock.patch.object(forward, "cross_entropy_fwd_op", return_value=(losses,) * 3)
        with op as computed:
            found = cross_entropy_fwd(h, labels, want_sum=want_sum, **place)
        shard = Vocabulary(2, 9, 7, impl="triton")
        assert computed.call_args == mock.call(h, labels, shard, want_sum)
        assert (found[2] is None) == (not want_sum)
    shard = Vocabulary(2, 9, **WORDS, impl="triton")
    for in_place in (False, True):
        name = "cross_entropy_bwd_in_place_op" if in_place else "cross_entropy_bwd_op"
        with mock.patch.object(backward, name) as computed:
            cross_entropy_bwd(losses, h, labels, losses, in_place=in_place, **WORDS | place)
        assert computed.call_args == mock.call(losses, h, labels, losses, shard)


def test_hidden_units_again_and_gradients_of_gathered_rows() -> None:
    rows = Gathering(x[:3], MEMORY)
    first, given = {"activation": "swiglu"} | HOW, {"precision": "tf32x3"}
    call = partial(hidden.hidden_again, rows, flat, flat_bias, **first)
    again = told(hidden, "multiply", call, (z, None))
    check(again, {"x": rows, "b": flat.t(), "bias": flat_bias, "impl": "triton", "options": given})
    for want_hidden in (False, True):
        call = partial(hidden.hidden_bwd, rows, down, z, want_hidden=want_hidden, **first)
        with mock.patch.object(hidden, "activation_fwd", return_value=h) as kept:
            found = told(hidden, "multiply", call, (h, None))
        check(found, {"x": rows, "b": down, "options": given})
        assert kept.call_args_list == [mock.call(z, "swiglu", impl="triton")] * want_hidden
