"""Column- and row-parallel linear layers: nn.Linear on one device, its shards on tensor ranks."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext

import pytest
import torch
from close import assert_same_bits
from refused import check
from sharded import MESHES, check_layer, draw, everything
from threads import run_threads
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from warpweave.kernels.runtime.wgrad import WeightGradients, collect
from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from warpweave.parallel.mesh import ConnectedMesh, Mesh

BOTH = pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])


def _mesh(tp: int) -> ConnectedMesh:
    """Make rank 0 of an unconnected tensor axis: enough to construct."""
    return Mesh(tp=tp).seen_from(0)


@BOTH
def test_positional_arguments_are_those_of_nn_linear(layer):
    ours, theirs = (list(inspect.signature(c).parameters.values()) for c in (layer, nn.Linear))
    assert [(p.name, p.default) for p in ours[:5]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[5:])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_one_seed_draws_the_numbers_of_nn_linear_in_every_dtype(layer, dtype, bias):
    torch.manual_seed(3)
    theirs = nn.Linear(7, 5, bias, None, dtype)
    torch.manual_seed(3)
    ours = layer(7, 5, bias, None, dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_same_bits(ours.state_dict().values(), theirs.state_dict().values())


@BOTH
def test_it_loads_the_state_of_nn_linear_and_computes_the_same(layer):
    theirs = nn.Linear(7, 5, dtype=torch.float64)
    ours = layer(7, 5, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    wide = draw(1, 3, 4, 14)
    # 1-D, 2-D, 3-D with gaps, empty
    for x in (wide[0, 0, :7], wide[0, :, :7], wide[..., ::2], wide[:0, :, :7]):
        found, truth = everything(ours, x), everything(theirs, x)
        torch.testing.assert_close(found, truth, rtol=1e-13, atol=1e-13)


@BOTH
def test_meta_then_to_empty_then_reset_is_a_fresh_layer(layer):
    torch.manual_seed(3)
    expected = layer(7, 5)
    later = layer(7, 5, device="meta").to_empty(device="cpu")
    torch.manual_seed(3)
    later.reset_parameters()
    assert torch.equal(later.weight, expected.weight)
    assert torch.equal(later.bias, expected.bias)


@BOTH
def test_a_weight_that_is_computed_from_others_gets_its_gradient(layer):
    grads = []
    for cls in (nn.Linear, layer):
        torch.manual_seed(3)
        linear = parametrizations.weight_norm(cls(7, 5, dtype=torch.float64))
        linear(draw(1, 4, 7)).square().sum().backward()
        grads.append([p.grad for p in linear.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)


@BOTH
@pytest.mark.parametrize("deferred", [False, True])
def test_under_checkpointing_gradients_still_belong_to_the_parameters(layer, deferred):
    linear, x = layer(7, 5, dtype=torch.bfloat16), draw(1, 4, 7, dtype=torch.bfloat16)
    for p in linear.parameters():
        p.grad_dtype = torch.float32
    linear(x.requires_grad_()).sum().backward()
    expected = [p.grad for p in linear.parameters()]
    linear.zero_grad()
    y = checkpoint(linear, x, use_reentrant=False)  # passes copies of the weights to the Function
    owed = WeightGradients()
    with collect(owed) if deferred else nullcontext():
        y.sum().backward()
    assert len(owed) == (2 if deferred else 0)
    owed.run()
    for p, grad in zip(linear.parameters(), expected, strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, grad)


@BOTH
def test_its_description_names_sizes_and_cut(layer):
    linear = layer(6, 4, bias=False, mesh=_mesh(2), sequence_parallel=True)
    assert linear.extra_repr() == (
        "in_features=6, out_features=4, bias=False, tp=2, sequence_parallel=True, overlap='bulk'"
    )
    assert layer(7, 5, overlap="chunked").extra_repr() == (
        "in_features=7, out_features=5, bias=True, tp=1, sequence_parallel=False, overlap='chunked'"
    )


@BOTH
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_without_input_features_the_bias_begins_at_zero_and_is_the_output(layer):
    linear = layer(0, 4, dtype=torch.float64)
    assert torch.equal(linear.bias, torch.zeros_like(linear.bias))
    with torch.no_grad():
        linear.bias.copy_(draw(1, 4))
    assert torch.equal(linear(torch.zeros(3, 0, dtype=torch.float64)), draw(1, 4).expand(3, 4))


def test_features_that_the_tensor_axis_does_not_divide_are_refused():
    words = r"^{}_features \(7\) is not divisible by .* tp \(2\)$".format
    check(lambda: ColumnParallelLinear(6, 7, mesh=_mesh(2)), words("out"))
    check(lambda: RowParallelLinear(7, 6, mesh=_mesh(2)), words("in"))
    ColumnParallelLinear(7, 6, mesh=_mesh(2))
    RowParallelLinear(6, 7, mesh=_mesh(2))


def test_an_input_of_another_width_or_dtype_is_refused():
    layer = ColumnParallelLinear(6, 4)
    words = r"weight must be \[N, K\], got x\[3, 5\] and weight\[4, 6\]"
    check(lambda: layer(torch.zeros(3, 5)), words)
    words = "dtypes differ: x torch.float64, weight torch.float32"
    check(lambda: layer(torch.zeros(3, 6, dtype=torch.float64)), words)


def _column(bias: bool = True, **options):
    return lambda mesh: ColumnParallelLinear(5, 24, bias, dtype=torch.float64, mesh=mesh, **options)


def _row(bias: bool = True, **options):
    return lambda mesh: RowParallelLinear(24, 5, bias, dtype=torch.float64, mesh=mesh, **options)


def _on_ranks(rank: int, sizes: Mesh) -> None:
    mesh = sizes.connect()
    flat, batch, tall = draw(1, 12, 5), draw(2, 2, 3, 5), draw(3, 12, 24)
    sequence = {"sequence_parallel": True}
    for bias in (True, False):
        check_layer(_column(bias), flat, mesh, cut_out=-1)
        check_layer(_column(bias, **sequence), flat, mesh, cut_in=0, cut_out=-1)
        check_layer(_row(bias), tall, mesh, cut_in=-1)
        check_layer(_row(bias, **sequence), tall, mesh, cut_in=-1, cut_out=0)
    check_layer(_column(), batch, mesh, cut_out=-1)
    check_layer(_column(), batch[:0], mesh, cut_out=-1)
    check_layer(_column(gather_output=True), batch, mesh)
    check_layer(_column(gather_output=True, **sequence), flat, mesh, cut_in=0)
    check_layer(_row(), draw(4, 2, 3, 24), mesh, cut_in=-1)
    check_layer(_row(input_is_parallel=False), draw(4, 2, 3, 24), mesh)
    check_layer(_row(input_is_parallel=False, **sequence), tall, mesh, cut_out=0)
    check_layer(_row(), draw(5, 24, 12).t(), mesh, cut_in=-1)
    twin = copy.deepcopy(_column()(mesh))  # as in weight averaging
    assert twin.mesh.group("tp") is mesh.group("tp")


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_form_equals_one_device_on_tensor_ranks(sizes):
    run_threads(sizes.world, _on_ranks, sizes)


def _faulty(rank: int) -> list[str]:
    """Return the planted faults that the comparison detects."""
    mesh, seen = Mesh(tp=2).connect(), []

    def bias_twice(module, x):
        return module(x) + (module.bias.detach() if module.mesh.size("tp") > 1 else 0)

    faults = {
        "bias": lambda: check_layer(_row(), draw(3, 12, 24), mesh, cut_in=-1, run=bias_twice),
        "cut": lambda: check_layer(_row(), draw(3, 12, 24).flip(-1), mesh, cut_in=-1, cut_out=0),
    }
    for name, compare in faults.items():
        try:
            compare()
        except AssertionError:
            seen.append(name)
    return seen


def test_the_comparison_notices_planted_faults():
    assert run_threads(2, _faulty) == [["bias", "cut"]] * 2
