"""The MLP: plain torch on one device, hidden units sharded over tensor ranks."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from close import assert_all_close, assert_close_f64
from refused import check
from saved import saved_elements
from sharded import MESHES, check_layer, draw, everything
from threads import run_threads

from warpweave.kernels.dropout import Drop
from warpweave.layers.mlp import MLP
from warpweave.parallel.mesh import ConnectedMesh, Mesh

STYLES = [("gelu", True), ("gelu", False), ("swiglu", True), ("swiglu", False), ("relu2", True)]
EACH = pytest.mark.parametrize(("activation", "bias"), STYLES)


def _truth(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, mlp.up.weight, mlp.up.bias)
    if mlp.activation == "relu2":
        h = F.relu(h).square()
    elif mlp.activation == "swiglu":
        h = F.silu(h[..., 0::2]) * h[..., 1::2]
    else:
        h = F.gelu(h, approximate="tanh")
    return F.linear(h, mlp.down.weight, mlp.down.bias)


@EACH
def test_it_is_down_of_activation_of_up(activation, bias):
    mlp = MLP(7, 11, activation, bias, dtype=torch.float64)
    wide = draw(1, 3, 4, 14)
    for x in (wide[0, :, :7], wide[..., ::2], wide[:0, :, :7]):  # 2-D, 3-D with gaps, empty
        truth = everything(mlp, x, partial(_truth, mlp))
        assert_all_close(everything(mlp, x), truth, 1e-12)


def test_a_hooked_one_adds_and_drops_as_a_fused_one():
    mlp, x, residual = MLP(7, 11, dtype=torch.float64), draw(1, 6, 7), draw(2, 6, 7)
    drop = Drop(0.5, 3, 1, torch.arange(6))
    options = list(itertools.product((None, residual), (None, drop)))
    fused = [mlp(x, *given) for given in options]
    mlp.up.register_forward_hook(lambda *_: None)
    for given, y in zip(options, fused, strict=True):
        assert_close_f64(mlp(x, *given), y, 1e-12)


def test_a_hooked_one_recomputes_what_a_fused_one_does():
    kept = {}
    for recompute in ("nothing", "activation", "up"):
        mlp = MLP(7, 11, recompute=recompute)
        mlp.up.register_forward_hook(lambda *_: None)
        kept[recompute] = saved_elements(partial(mlp, draw(1, 6, 7).float().requires_grad_()))
    assert kept["up"] <= kept["activation"] <= kept["nothing"] - 6 * 11


@EACH
def test_its_weights_have_one_row_for_every_gate_and_unit(activation, bias):
    rows = 22 if activation == "swiglu" else 11
    expected = {"up.weight": (rows, 7), "down.weight": (7, 11)}
    if bias:
        expected |= {"up.bias": (rows,), "down.bias": (7,)}
    shapes = {name: tuple(p.shape) for name, p in MLP(7, 11, activation, bias).named_parameters()}
    assert shapes == expected


def test_an_unknown_activation_is_refused():
    check(lambda: MLP(4, 8, "relu"), r"^activation must be one of .*swiglu, geglu, got 'relu'$")


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_hidden_units_that_the_tensor_axis_does_not_divide_are_refused(activation):
    # 2 * 9 rows of swiglu are divisible by 6, but a rank would hold half a pair.
    mesh = ConnectedMesh(Mesh(tp=6), 0, {"tp": None}, None)
    words = r"^hidden_dim \(9\) is not divisible by .* tp \(6\)$"
    check(lambda: MLP(4, 9, activation, mesh=mesh), words)


def _on_ranks(rank: int, sizes: Mesh) -> None:
    mesh = sizes.connect()
    flat, batch = draw(1, 12, 5), draw(2, 2, 3, 5)
    for activation, bias in STYLES:

        def make(mesh, sp=False, activation=activation, bias=bias):
            options = {"dtype": torch.float64, "mesh": mesh, "sequence_parallel": sp}
            return MLP(5, 12, activation, bias, **options)

        check_layer(make, batch, mesh)
        check_layer(make, batch[:0], mesh)
        check_layer(make, batch.transpose(0, 1), mesh)
        check_layer(lambda mesh, make=make: make(mesh, True), flat, mesh, cut_in=0, cut_out=0)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_both_activations_equal_one_device_on_tensor_ranks(sizes):
    run_threads(sizes.world, _on_ranks, sizes)
