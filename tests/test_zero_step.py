"""The optimizer's step on small units, with every rule: skipping, counting and scaling, finite
gradients, partial sums, and units over different axes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from threads import on_mesh
from torch import nn
from traffic import traffic

from warpweave.model.plain import _newton_schulz
from warpweave.parallel.data import zero as zero_module
from warpweave.parallel.data.optimizer import SGD, AdamW, LossScale, Muon, NAdamW, Rule
from warpweave.parallel.data.unit import Unit, make_unit
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import ConnectedMesh, Mesh, single
from warpweave.parallel.shard import ParamRecord

RULES: dict[str, Rule] = {
    "adamw": AdamW(eps=1e-3),
    "nadamw": NAdamW(eps=1e-3),
    "sgd": SGD(weight_decay=0.1),
    "muon": Muon(rest=AdamW(eps=1e-3)),
}


def _draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _unit(mesh, zero=0, dtype=torch.float64, sum_over="data", ordered=False) -> Unit:
    """Make a matrix, a vector without decay, and one of which tensor ranks have partial sums."""
    partial = ("tp",) if mesh.size("tp") > 1 else ()
    records = [
        ParamRecord("w", (5, 3), matrices=(1,), sum_over=sum_over),
        ParamRecord("b", (7,), decay=False, sum_over=sum_over),
        ParamRecord("p", (4,), (), partial, decay=False, sum_over=sum_over),
    ]
    params = [(r, nn.Parameter(_draw(r.shape, n).to(dtype))) for n, r in enumerate(records)]
    return make_unit("u", params, mesh, zero=zero, ordered=ordered)


def _gradients(unit: Unit, seed: int, scale: float = 1.0, bad: float | None = None) -> None:
    unit.write("grad", lambda r: _draw(r.shape, 10 * seed + len(r.shape)) * scale)
    if bad is not None:
        unit.gradients.reduced[0] = bad


def _state(unit: Unit, optimizer: ZeroOptimizer) -> list[torch.Tensor]:
    """Return everything that a step may change."""
    state, scale = unit.state, optimizer.loss_scale
    of_scale = () if scale is None else (scale.value, scale.good_steps)
    held = state.master, state.param, *state.moments.values(), optimizer.count, *of_scale
    return [x.clone() for x in held]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", RULES)
def test_a_halted_step_or_one_not_finite_changes_nothing_and_is_not_counted(name, dtype) -> None:
    """Covers every combination of both; only a gradient not finite halves the loss scale."""
    unit, scaled = _unit(single(), dtype=dtype), dtype == torch.float16
    scale = LossScale(64.0, interval=2) if scaled else None
    optimizer = ZeroOptimizer([unit], single(), RULES[name], clip=0.5, loss_scale=scale)
    good = row = 0
    for step in range(20):
        bad = (None, None, None, float("inf"), float("nan"))[step % 5]
        halted = (None, torch.tensor(0.0), torch.tensor(2.0), torch.tensor(1.0))[step % 4]
        stands = halted is not None and bool(halted)
        size = 1.0 if scale is None else float(scale.value)
        _gradients(unit, step, size, bad)
        finite = unit.gradients.reduced.clone()
        before = _state(unit, optimizer)
        norm = optimizer.step(0.1, halted)
        after = _state(unit, optimizer)
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert bool(optimizer.finite) == bool(norm.isfinite()) == (bad is None)
        if bad is None:
            truth = float(finite.double().square().sum().sqrt()) / size
            assert float(norm) == pytest.approx(truth, rel=1e-6)
        if stands:
            assert all(same), step
            continue
        row = row + 1 if bad is None else 0
        if bad is None:
            good += 1
            assert not any(same[:3])
        else:
            assert all(same[: len(same) - 2 * scaled]), step
        assert float(optimizer.count) == good
        if scale is not None:
            grown = row == 2
            row = 0 if grown else row
            assert float(scale.value) == size * (0.5 if bad is not None else 2.0 if grown else 1.0)
            assert float(scale.good_steps) == row
    assert good == 6


def test_a_given_norm_clips_and_is_not_computed_again() -> None:
    for clip, norm, factor in ((2.0, 8.0, 0.25), (2.0, 1.0, 1.0), (None, 8.0, 1.0)):
        unit = _unit(single())
        optimizer = ZeroOptimizer([unit], single(), SGD(0.0), clip=clip)
        start = unit.state.master.clone()
        _gradients(unit, 1)
        grad = unit.gradients.reduced.clone()
        with mock.patch.object(ZeroOptimizer, "norm", side_effect=AssertionError):
            found = optimizer.step(0.5, norm=torch.tensor(norm, dtype=torch.float64))
        assert float(found) == norm
        expected = start - 0.5 * factor * grad
        assert (unit.state.master - expected).abs().max() < 1e-6  # clip / (norm + 1e-6)


def test_a_state_loads_where_only_one_of_both_has_a_loss_scale() -> None:
    plain, scaled = (
        ZeroOptimizer([_unit(single())], single(), SGD(), loss_scale=scale)
        for scale in (None, LossScale(8.0))
    )
    scaled.loss_scale.good_steps.fill_(3)
    scaled.count.fill_(5)
    plain.load_state(scaled.state())
    assert plain.state() == {"count": 5.0}
    plain.count.fill_(6)
    scaled.load_state(plain.state())
    assert scaled.state() == {"count": 6.0, "loss_scale": 8.0, "good_steps": 3.0}


def test_a_loss_scale_changes_in_place_as_a_cuda_graph_needs() -> None:
    scale = LossScale(4.0, interval=1)
    value, good = scale.value, scale.good_steps
    for overflow, expected in ((1.0, 2.0), (0.0, 4.0)):
        scale.update(torch.tensor(overflow))
        assert float(value) == expected
        assert (scale.value is value, scale.good_steps is good) == (True, True)


def test_a_loss_scale_moves_to_a_device() -> None:
    moved = LossScale(4.0).to(torch.device("meta"))
    assert (moved.value.device.type, moved.good_steps.device.type) == ("meta", "meta")


@pytest.mark.parametrize("norm", ["torch", "triton"])
@pytest.mark.parametrize("rest", ["torch", "triton"])
@pytest.mark.parametrize("muon", ["torch", "triton"])
def test_norm_adamw_and_muon_run_by_the_impl_of_each(norm, rest, muon) -> None:
    rule = Muon(impl=muon, rest=AdamW(impl=rest))
    unit = _unit(single())
    optimizer = ZeroOptimizer([unit], single(), rule, impl=norm)
    _gradients(unit, 1)
    with traffic() as seen:
        optimizer.step(0.1)
    kernels = {
        "_sum_of_squares_kernel": norm, "_adamw_scalars_kernel": rest, "_adamw_kernel": rest,
        "_symmetric_kernel": muon,
    }  # fmt: skip
    triton = {kernel for kernel, impl in kernels.items() if impl == "triton"}
    assert {launch.kernel for launch in seen.launches} == triton


# ---------------------------------------------------------------- several ranks


def _finite(mesh: ConnectedMesh, zero: int, bad: int) -> tuple[bool, bool]:
    unit = _unit(mesh, zero)
    optimizer = ZeroOptimizer([unit], mesh, SGD())
    _gradients(unit, 1, bad=float("nan") if mesh.rank == bad else None)
    norm = optimizer.step(0.1)
    return bool(norm.isfinite()), bool(optimizer.finite)


@pytest.mark.parametrize("zero", [1, 3])
def test_each_rank_knows_whether_its_own_gradients_are_finite(zero: int) -> None:
    for bad in (0, 2):
        found = on_mesh(Mesh(dp=3), _finite, zero, bad)
        assert found == [(False, rank != bad) for rank in range(3)]
    assert on_mesh(Mesh(dp=3), _finite, zero, -1) == [(True, True)] * 3


def _partials(mesh: ConnectedMesh, ordered: bool) -> list[float]:
    unit = _unit(mesh, ordered=ordered)
    optimizer = ZeroOptimizer([unit], mesh, SGD())
    unit.write("grad", lambda r: torch.full(r.shape, 1.0 + mesh.index("tp")))
    optimizer.sum_partials()
    return sorted(float(x) for record, x in unit.read("grad") for x in x.unique())


@pytest.mark.parametrize("ordered", [True, False])
def test_partial_sums_alone_are_summed_and_in_rank_order_if_gradients_are(ordered: bool) -> None:
    right = zero_module.run_collective
    with mock.patch.object(zero_module, "run_collective", side_effect=right) as in_order:
        found = on_mesh(Mesh(tp=3), _partials, ordered)
    assert found == [sorted([1.0 + rank, 1.0 + rank, 6.0]) for rank in range(3)]
    assert in_order.call_count == 3 * ordered


class _Own(Muon):
    """A user-defined rule that is also a Muon."""


def _two_axes(mesh: ConnectedMesh, zero: int) -> None:
    units = [_unit(mesh, zero, sum_over=axis) for axis in ("data", "dp")]
    start = {(n, r.name): x.clone() for n, u in enumerate(units) for r, x in u.read("param")}
    rule = (Muon, _Own)[zero % 2](momentum=0.0, weight_decay=0.0, scale="jordan")
    optimizer = ZeroOptimizer(units, mesh, rule, clip=None)
    for n, unit in enumerate(units):
        _gradients(unit, 3 + n)
    optimizer.step(0.5)
    for n, unit in enumerate(units):
        (moved,) = (x for r, x in unit.read("param") if r.name == "w")
        direction = _newton_schulz(_draw((5, 3), 10 * (3 + n) + 2)) * (5 / 3) ** 0.5
        assert (moved - (start[n, "w"] - 0.5 * direction)).abs().max() < 1e-12, n


@pytest.mark.parametrize("zero", range(4))
def test_matrices_of_units_over_different_axes_are_each_orthogonalised(zero: int) -> None:
    on_mesh(Mesh(dp=2, cp=2), _two_axes, zero)


def _stages_norm(mesh: ConnectedMesh, apart: bool) -> float:
    stage = mesh.index("pp")
    unit = _unit(mesh, 1, sum_over=("dp", "data")[stage])
    optimizer = ZeroOptimizer([unit], mesh, SGD(), apart=apart)
    _gradients(unit, 1 + stage)
    return float(optimizer.norm())


@pytest.mark.parametrize("sizes", [Mesh(pp=2), Mesh(pp=2, dp=2, cp=2, dp_shard=1)], ids=str)
@pytest.mark.parametrize("apart", [False, True])
def test_the_norm_is_over_all_stages_or_over_each_apart(sizes: Mesh, apart: bool) -> None:
    """With dp_shard = 1 the stage that is summed over dp is not sharded, and the one over cp is."""
    shapes = (5, 3), (7,), (4,)
    squares = [sum(float(_draw(s, 10 * k + len(s)).square().sum()) for s in shapes) for k in (1, 2)]
    norms = on_mesh(sizes, _stages_norm, apart)
    for rank, norm in enumerate(norms):
        wanted = squares[sizes.index("pp", rank)] if apart else sum(squares)
        assert norm == pytest.approx(wanted**0.5, rel=1e-12)
