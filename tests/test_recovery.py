"""The state carried over a change of replicas: which keep their own and which receive another's, in
every ZeRO stage, with parameters of 16 bits."""

from __future__ import annotations

import pytest
import torch
from threads import on_mesh
from torch import nn

from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.data.recovery import State, held_state, recover
from warpweave.parallel.data.unit import Unit, make_unit
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.parallel.shard import ParamRecord

SHAPES = {"one": (5, 3), "other": (40,), "last": (2,)}
KINDS = ("param", "exp_avg", "exp_avg_sq")


def _value(name: str, kind: str, owner: int) -> torch.Tensor:
    """Return a state of `owner` that does not fit in 16 bits."""
    start = 1000 * owner + 100 * KINDS.index(kind) + 7 * [*SHAPES].index(name)
    size = torch.Size(SHAPES[name]).numel()
    return start + torch.arange(size).view(SHAPES[name]) / 64 + 1 / 4096


def _optimizer(mesh: ConnectedMesh, zero: int) -> ZeroOptimizer:
    """Make two units of zeros."""
    units: list[Unit] = []
    for names in (("one", "other"), ("last",)):
        params = [
            (ParamRecord(n, SHAPES[n]), nn.Parameter(torch.zeros(SHAPES[n]).bfloat16()))
            for n in names
        ]
        units.append(make_unit(names[0], params, mesh, zero=zero))
    return ZeroOptimizer(units, mesh, AdamW())


def _holds(optimizer: ZeroOptimizer, owner: int) -> None:
    for unit in optimizer.units:
        found = {kind: {r.name: x.clone() for r, x in unit.read(kind)} for kind in KINDS}
        for kind in KINDS:
            for name, x in found[kind].items():
                assert torch.equal(x, _value(name, kind, owner)), (name, kind, owner)
        unit.parameters.unshard()
        unit.parameters.wait()
        for record, param in unit.params:
            assert torch.equal(param.detach(), _value(record.name, "param", owner).bfloat16())


def _recovered(mesh, zero: int, old: Mesh, source: int, empty: int | None, alike: bool) -> None:
    """Give replicas separate states, from a mesh of another size; replica `empty` has none."""
    axis = "replica" if zero else "dp"
    me, group = mesh.index(axis), mesh.group(axis)
    before = _optimizer(mesh, zero)
    for unit in before.units:
        for kind in KINDS:
            unit.write(kind, lambda r, kind=kind: _value(r.name, kind, me))
    state: State | None = held_state(before)
    assert {kind for _, kind in state} == set(KINDS)
    assert {unit for unit, _ in state} == {"one", "last"}
    if old.dp != mesh.sizes.dp:  # with more or fewer ranks a buffer has a different padding
        sizes = {key: len(x) + 32 * (old.dp - mesh.sizes.dp) for key, x in state.items()}
        state = {k: torch.cat([x, x.new_full((64,), 5.0)])[: sizes[k]] for k, x in state.items()}
    if me == empty:
        state = None
    after = _optimizer(mesh, zero)
    recover(after, state, group, source, alike=alike)
    _holds(after, me if alike else source)


CASES = [
    (Mesh(dp=3), 0, Mesh(dp=3)), (Mesh(dp=3), 0, Mesh(dp=4)), (Mesh(dp=2), 0, Mesh(dp=1)),
    (Mesh(dp=4, dp_shard=2), 1, Mesh(dp=4)), (Mesh(dp=4, dp_shard=2), 2, Mesh(dp=4)),
    (Mesh(dp=6, dp_shard=2), 3, Mesh(dp=6)), (Mesh(dp=2, tp=2), 0, Mesh(dp=2)),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "zero", "old"), CASES, ids=str)
def test_the_source_replica_gives_its_state_to_all(mesh, zero, old) -> None:
    replicas = mesh.dp // (mesh.dp_shard or 1) if zero else mesh.dp
    for source in range(replicas):
        empty = (source + 1) % replicas
        on_mesh(mesh, _recovered, zero, old, source, empty, False)


@pytest.mark.parametrize(("mesh", "zero", "old"), CASES, ids=str)
def test_nothing_is_sent_where_every_replica_has_the_state(mesh, zero, old) -> None:
    """The states differ here, so it shows that each replica keeps its own."""
    on_mesh(mesh, _recovered, zero, old, 0, None, True)


def test_a_single_replica_restores_its_own_state() -> None:
    on_mesh(Mesh(), _recovered, 0, Mesh(), 0, None, False)


def test_held_state_shares_memory_with_the_optimizer() -> None:
    def held(mesh: ConnectedMesh) -> None:
        optimizer = _optimizer(mesh, 1)
        unit = optimizer.units[0]
        state = held_state(optimizer)
        assert state["one", "param"].data_ptr() == unit.state.master.data_ptr()
        assert len(state["one", "exp_avg"]) == unit.layout.slice_size

    on_mesh(Mesh(dp=2), held)
