"""The outer rule step by step, and the outer optimizer of a small unit: times of syncs and
comparisons, and which parameters follow which weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from refused import check, rows
from threads import on_mesh
from torch import nn

from warpweave.parallel.data.outer import GLOBAL, MOMENTUM, OuterOptimizer, OuterRule
from warpweave.parallel.data.unit import Unit, make_unit
from warpweave.parallel.mesh import ConnectedMesh, Mesh, single
from warpweave.parallel.shard import ParamRecord

NAN = float("nan")


def _unit(
    mesh: ConnectedMesh, *shapes: tuple[int, ...], zero: int = 0, dtype: torch.dtype = torch.float64
) -> Unit:
    """Make parameters p0, p1, ... of zeros."""
    params = [
        (ParamRecord(f"p{n}", shape), nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for n, shape in enumerate(shapes)
    ]
    return make_unit("u", params, mesh, zero=zero)


@rows(
    [
        (lambda: OuterRule(0), "interval must be at least 1 step, got 0"),
        (lambda: OuterRule(1), None),
        (lambda: OuterRule(4, fragments=0), "divide the outer interval of 4 steps, got 0"),
        (lambda: OuterRule(4, fragments=3), "divide the outer interval of 4 steps, got 3"),
        (lambda: OuterRule(4, fragments=4), None),
        (lambda: OuterRule(6, delay=-1), "outer delay must be .* less than the 6 steps .* got -1"),
        (lambda: OuterRule(6, delay=5), None),
        (lambda: OuterRule(6, delay=6), r"less than the 6 steps .*\(6 / 1\), got 6"),
        (lambda: OuterRule(6, fragments=2, delay=2), None),
        (lambda: OuterRule(6, fragments=2, delay=3), r"less than the 3 steps .*\(6 / 2\), got 3"),
        (lambda: OuterRule(2, lr=0.0), "got 0.0, 0.9 and 0.0"),
        (lambda: OuterRule(2, lr=NAN), "got nan, 0.9 and 0.0"),
        (lambda: OuterRule(2, lr=1e-9), None),
        (lambda: OuterRule(2, momentum=-1e-9), "got 0.7, -1e-09 and 0.0"),
        (lambda: OuterRule(2, momentum=0.0), None),
        (lambda: OuterRule(2, momentum=1.0), "got 0.7, 1.0 and 0.0"),
        (lambda: OuterRule(2, mix=-1e-9), "got 0.7, 0.9 and -1e-09"),
        (lambda: OuterRule(2, mix=1.0), None),
        (lambda: OuterRule(2, mix=1.001), "got 0.7, 0.9 and 1.001"),
        (lambda: OuterRule(2, warmup=-1), "outer warm-up must be at least 0 steps, got -1"),
        (lambda: OuterRule(4, fragments=4).check(3), r"fragments \(4\) must be .* layers \(3\)"),
        (lambda: OuterRule(4, fragments=4).check(4), None),
    ]
)
def test_an_outer_rule_out_of_range_is_refused(call, words) -> None:
    check(call, words)


OUTER = [
    OuterRule(1), OuterRule(5, delay=4), OuterRule(6, fragments=3, delay=1, warmup=4),
    OuterRule(12, fragments=3, delay=2, warmup=1), OuterRule(6, fragments=6),
]  # fmt: skip


@pytest.mark.parametrize("rule", OUTER, ids=str)
def test_sums_start_in_turn_and_end_after_the_delay(rule: OuterRule) -> None:
    apart = rule.every // rule.fragments
    starts = {
        rule.warmup + apart * (turn + 1): turn % rule.fragments for turn in range(5 * rule.every)
    }
    assert rule.apart == apart
    for step in range(1, 4 * rule.every + rule.warmup):
        assert rule.starts(step) == starts.get(step), step
        under_way = [f for at, f in starts.items() if at <= step < at + rule.delay]
        assert len(under_way) <= 1
        assert rule.in_flight(step) == (under_way[0] if under_way else None), step
        done = step in starts or step - rule.delay in starts
        assert rule.acts(step) == done, step
    for fragment in range(rule.fragments):  # each one every `every` steps
        mine = [at for at, of in starts.items() if of == fragment]
        assert {b - a for a, b in itertools.pairwise(mine)} == {rule.every}


def test_momentum_is_a_state_only_if_it_is_not_zero() -> None:
    assert OuterRule(2).states == (GLOBAL, MOMENTUM)
    assert OuterRule(2, momentum=0.0).states == (GLOBAL,)


def test_the_local_weights_come_back_after_the_global_ones_also_by_an_error() -> None:
    unit = _unit(single(), (3,))
    outer = OuterOptimizer(OuterRule(2), [unit], [0], single())
    unit.state.master.fill_(5.0)  # the global weights are still the zeros
    param = unit.params[0][1]
    for _ in range(2):
        with pytest.raises(KeyError, match=r"0\.0, 0\.0, 0\.0"), outer.global_weights():
            raise KeyError(param.tolist())
        assert param.tolist() == [5.0] * 3
        assert unit.state.moments[GLOBAL].unique().tolist() == [0.0]
    outer.reset()
    with outer.global_weights():
        assert param.tolist() == [5.0] * 3


def _begun(mesh: ConnectedMesh) -> None:
    """New weights are compared once, before the next update."""
    unit = _unit(mesh, (3,))
    outer, second = OuterOptimizer(OuterRule(2), [unit], [0], mesh), mesh.index("outer") == 1

    def begins(equal: bool) -> None:
        words = r"^replicas must begin with the same weights, .* rank 1 \(outer=1\)$"
        check(outer.before_update, None if equal else words)

    begins(True)
    unit.state.moments[GLOBAL].add_(second)
    begins(True)
    for new in (lambda: outer.resume(4), outer.reset):
        unit.state.master.zero_()[-1] = float(second)
        unit.state.moments[GLOBAL].zero_()[-1] = float(second)
        new()
        begins(False)
        begins(True)
        unit.state.master.fill_(1.0)
        unit.state.moments[GLOBAL].fill_(1.0)
        new()
        begins(True)
    assert outer.step == 4
    assert outer.acts_next == OuterRule(2).acts(5)


def test_replicas_are_compared_once_after_a_start_a_reset_and_a_resume() -> None:
    on_mesh(Mesh(outer=2), _begun)


def _step_of(outer: OuterOptimizer) -> None:
    outer.step = 1
    outer.after_update()


WRITES: dict[str, Callable[[Unit, OuterOptimizer], object]] = {
    "global weights": lambda unit, outer: outer.global_weights().__enter__(),
    "an outer step": lambda unit, outer: _step_of(outer),
    "a state": lambda unit, outer: unit.write("param", lambda r: torch.ones(r.shape)),
    "versions": lambda unit, outer: unit.parameters.fill_versions(),
    "the next version": lambda unit, outer: unit.parameters.next_version(slice(0, 32)),
}


@pytest.mark.parametrize("write", WRITES)
def test_weights_are_written_only_after_the_all_gather_in_flight(write: str) -> None:
    unit, seen = _unit(single(), (3,)), []
    outer = OuterOptimizer(OuterRule(2), [unit], [0], single())
    unit.parameters.keep_versions(2)
    unit.state.master.fill_(5.0)
    first = unit.parameters.flat
    unit.parameters._gather = SimpleNamespace(wait=lambda: seen.append(first.unique().tolist()))
    WRITES[write](unit, outer)
    assert seen == [[5.0]]
    unit.parameters.wait()
    assert seen == [[5.0]], "waited for twice"


def _low(mesh: ConnectedMesh, zero: int, dtype: torch.dtype) -> None:
    unit = _unit(mesh, (3,), (40,), zero=zero, dtype=dtype)
    outer = OuterOptimizer(OuterRule(2, 1.0, 0.0), [unit], [0], mesh)

    def seen() -> float:
        unit.parameters.unshard()
        unit.parameters.wait()
        (value,) = {float(x) for _, p in unit.params for x in p.detach().unique()}
        unit.parameters.reshard()
        return value

    unit.write("param", lambda r: torch.full(r.shape, 5.0 + 2 * mesh.index("outer")))
    with outer.global_weights():
        assert seen() == 0.0
    assert seen() == 5.0 + 2 * mesh.index("outer")
    _step_of(outer)
    assert (seen(), float(unit.state.master[0])) == (6.0, 6.0)


@pytest.mark.parametrize("zero", range(4))
def test_parameters_follow_the_global_weights_and_an_outer_step(zero: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        on_mesh(Mesh(outer=2, dp=2), _low, zero, dtype)
