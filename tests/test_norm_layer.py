"""RMSNorm and LayerNorm: torch's on one device, replicated on every tensor rank."""

from __future__ import annotations

import inspect
import re
from functools import partial

import pytest
import torch
from close import assert_all_close, assert_close_f64, assert_error_budget
from refused import check
from sharded import MESHES, check_layer, draw, everything
from threads import run_threads
from torch import nn

from warpweave.layers.norm import ColumnParallelRMSNorm, LayerNorm, RMSNorm, make_norm
from warpweave.layers.place import Place
from warpweave.layers.style import NormStyle
from warpweave.parallel.mesh import Mesh, single

E = 13
PAIRS = {
    "rms": (partial(nn.RMSNorm, E, 1e-6), partial(RMSNorm, E)),
    "layer": (partial(nn.LayerNorm, E), partial(LayerNorm, E)),
    "no bias": (partial(nn.LayerNorm, E, bias=False), partial(LayerNorm, E, bias=False)),
    "rms, eps": (partial(nn.RMSNorm, E, 0.3), partial(RMSNorm, E, 0.3)),
    "layer, eps": (partial(nn.LayerNorm, E, 0.3), partial(LayerNorm, E, 0.3)),
}
EACH = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())


def _loaded(pair, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return torch's norm with weights other than 1 and 0, and ours with the same state."""
    theirs, ours = (make(dtype=dtype) for make in pair)
    with torch.no_grad():
        for i, p in enumerate(theirs.parameters()):
            p.copy_(draw(20 + i, E))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@EACH
def test_it_has_the_parameters_of_its_torch_namesake_at_birth(pair):
    theirs, ours = (make().state_dict() for make in pair)
    assert list(ours) == list(theirs)
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


@EACH
def test_it_computes_and_differentiates_as_its_torch_namesake(pair):
    theirs, ours = _loaded(pair, torch.float64)
    wide = draw(1, 3, 4, 2 * E)
    for x in (wide[0, 0, :E], wide[0, :, :E], wide[..., ::2], wide[:0, :, :E]):
        assert_all_close(everything(ours, x), everything(theirs, x), 1e-12)


@EACH
def test_it_is_as_exact_as_its_torch_namesake_in_bf16(pair):
    theirs, ours = _loaded(pair, torch.bfloat16)
    x = draw(1, 64, E, dtype=torch.bfloat16)
    truth = theirs.double()(x.double())
    assert_error_budget(ours(x), theirs.bfloat16()(x), truth)


@EACH
def test_the_residual_is_added_before_and_handed_on(pair):
    theirs, ours = _loaded(pair, torch.float64)
    results = []
    for fused in (False, True):
        x, residual = draw(1, 5, E).requires_grad_(), draw(2, 5, E).requires_grad_()
        y, s = ours(x, residual) if fused else (theirs(x + residual), x + residual)
        torch.autograd.backward([y, s], [draw(3, 5, E), draw(4, 5, E)])
        results.append((y, s, x.grad, residual.grad))
    assert_all_close(*results[::-1], 1e-12)


def test_the_shape_may_be_a_number_or_a_sequence_of_one():
    for shape in (E, (E,), [E], torch.Size([E])):
        assert LayerNorm(shape).normalized_shape == nn.LayerNorm(shape).normalized_shape
        assert RMSNorm(shape).weight.shape == (E,)
    for norm, shape in ((LayerNorm, (3, E)), (RMSNorm, ()), (RMSNorm, (2, E))):
        words = f"^normalized_shape must have exactly one dim, got {re.escape(str(shape))}$"
        check(partial(norm, shape), words)


@pytest.mark.parametrize("names", [(nn.LayerNorm, LayerNorm), (nn.RMSNorm, RMSNorm)])
def test_positional_arguments_are_the_first_of_its_torch_namesake(names):
    theirs, ours = (list(inspect.signature(c).parameters.values()) for c in names)
    taken = [p.name for p in ours if p.kind is not p.KEYWORD_ONLY]
    assert taken == [p.name for p in theirs][: len(taken)] == ["normalized_shape", "eps"]
    with pytest.raises(TypeError, match="positional"):
        names[1](E, 1e-5, False)  # elementwise_affine, not a device


def test_an_input_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"12.*13|13.*12"):
        LayerNorm(E)(torch.zeros(3, 12))


def test_meta_then_to_empty_then_reset_is_a_fresh_layer():
    for layer in (RMSNorm(E, device="meta"), LayerNorm(E, device="meta")):
        layer.to_empty(device="cpu")
        with torch.no_grad():
            for p in layer.parameters():
                p.fill_(7)
        layer.reset_parameters()
        values = [(name, set(p.tolist())) for name, p in layer.named_parameters()]
        assert values == [("weight", {1.0}), ("bias", {0.0})][: len(values)]


def test_descriptions_name_width_epsilon_and_bias():
    assert repr(LayerNorm(E, bias=False)) == "LayerNorm((13,), eps=1e-05, bias=False)"
    assert repr(LayerNorm(E, 0.5)) == "LayerNorm((13,), eps=0.5, bias=True)"
    assert RMSNorm([E], 1e-3).extra_repr() == "(13,), eps=0.001, bias=False"
    assert RMSNorm((E,), offset=True).extra_repr() == "(13,), eps=1e-06, bias=False, offset=True"


def test_an_offset_is_added_to_the_weight_which_begins_at_zero():
    plain, offset = RMSNorm(E, dtype=torch.float64), RMSNorm(E, dtype=torch.float64, offset=True)
    x = draw(1, 4, E)
    assert offset.weight.eq(0).all()
    assert offset.records["weight"].init == "zeros"
    assert torch.equal(offset(x), plain(x))
    with torch.no_grad():
        offset.weight.copy_(draw(2, E))
        plain.weight.copy_(draw(2, E) + 1)
    offset(x).sum().backward()
    plain(x).sum().backward()
    assert_close_f64(offset(x), plain(x), 1e-14)
    assert_close_f64(offset.weight.grad, plain.weight.grad, 1e-14)
    offset.reset_parameters()
    assert offset.weight.eq(0).all()
    assert "offset=True" in repr(offset)


def test_an_offset_is_added_in_float32_to_weights_in_bf16():
    norm = RMSNorm(E, dtype=torch.bfloat16, offset=True)
    torch.nn.init.constant_(norm.weight, 0.001)
    y = norm(draw(1, 4, E).float())  # bf16 has no 1.001
    assert (y / RMSNorm(E)(draw(1, 4, E).float()) - 1.001).abs().max() < 1e-5


def test_the_name_of_a_norm_is_its_class():
    kinds = {
        kind: make_norm(NormStyle(norm=kind, norm_eps=0.3, bias=False), E, Place())
        for kind in ("layer", "rms", "rms1p")
    }
    assert isinstance(kinds["layer"], LayerNorm)
    assert kinds["layer"].bias is None
    assert [kinds[kind].offset for kind in ("rms", "rms1p")] == [False, True]
    assert all(norm.eps == 0.3 for norm in kinds.values())
    for both, alone in ((True, None), (True, False), (False, True), (False, None)):
        layer = make_norm(NormStyle(bias=both, norm_bias=alone), E, Place())
        assert (layer.bias is not None) == (both if alone is None else alone)
    with pytest.raises(ValueError, match=r"^norm must be 'layer', 'rms' or 'rms1p', got 'rsm'$"):
        make_norm(NormStyle(norm="rsm"), E, Place())


def _over_cut_features(rank: int, sizes: Mesh) -> None:
    mesh, x, width = sizes.connect(), draw(1, 5, 3, 12), {"dtype": torch.float64}
    for offset in (False, True):

        def make(m, offset=offset):
            norm = ColumnParallelRMSNorm(12, 0.3, offset=offset, mesh=m, **width)
            whole = draw(8, 12)
            with torch.no_grad():
                norm.weight.copy_(norm.records["weight"].slice(whole, (m or single()).coords))
            return norm

        check_layer(make, x, mesh, cut_in=2, cut_out=2)
        theirs = nn.RMSNorm(12, 0.3, **width)
        theirs.load_state_dict({"weight": draw(8, 12) + offset})
        assert_close_f64(make(None)(x), theirs(x), 1e-14)


@pytest.mark.parametrize("sizes", [Mesh(tp=2), Mesh(dp=2, tp=2)], ids=str)
def test_features_that_are_cut_have_the_norm_of_all(sizes):
    run_threads(sizes.world, _over_cut_features, sizes)


def _on_ranks(rank: int, sizes: Mesh) -> None:
    mesh = sizes.connect()
    x, options = draw(1, 12, E), {"dtype": torch.float64}

    def fused(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(norm(x, x.sin()), dim=-1)

    for make in (ours for _, ours in PAIRS.values()):
        for run in (lambda norm, x: norm(x), fused):
            check_layer(lambda m, make=make: make(mesh=m, **options), x, mesh, run=run)
            check_layer(
                lambda m, make=make: make(mesh=m, sequence_parallel=True, **options),
                x, mesh, cut_in=0, cut_out=0, run=run,
            )  # fmt: skip
    with pytest.raises(AssertionError, match="relative error"):  # gradients are still partial
        check_layer(lambda m: RMSNorm(E, mesh=m, **options), x, mesh, cut_in=0, cut_out=0)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_tensor_ranks_that_hold_different_tokens_sum_the_gradients(sizes):
    run_threads(sizes.world, _on_ranks, sizes)
