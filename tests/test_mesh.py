"""The mesh against brute force: every coordinate and every group of every small mesh."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from refused import check
from threads import run_threads

from warpweave.layers.linear import ColumnParallelLinear
from warpweave.parallel.mesh import AXES, ConnectedMesh, Mesh, divisors, single
from warpweave.parallel.symmetric import TIMEOUT

VARIES = {axis: (axis,) for axis in AXES}
VARIES |= {"data": ("dp", "cp"), "inner": ("pp", "dp", "cp", "tp"), "world": AXES}
PARTS = ("replica", "dp_shard", "ring", "ulysses", "shard")


def _meshes(world: int) -> list[Mesh]:
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    every = itertools.product(sizes, repeat=4)
    return [Mesh(*four) for four in every if torch.Size(four).numel() == world]


def _members(mesh: Mesh, rank: int, axis: str) -> list[int]:
    """Return the ranks that differ from `rank` only along `axis`, by checking all of them."""
    if axis in PARTS:
        group, _ = _position(mesh, rank, axis)
        there = [(*_position(mesh, r, axis), r) for r in range(mesh.world)]
        return [r for other, _, r in sorted(there) if other == group]
    here = mesh.coordinates(rank)
    fixed = [a for a in AXES if a not in VARIES[axis]]
    return [r for r in range(mesh.world) if all(mesh.coordinates(r)[a] == here[a] for a in fixed)]


@pytest.mark.parametrize("world", range(1, 25))
def test_coordinates_and_rank_at_are_inverse_on_every_mesh(world):
    for mesh in _meshes(world):
        assert mesh.world == world
        seen = set()
        for rank in range(world):
            at = mesh.coordinates(rank)
            assert all(0 <= at[axis] < getattr(mesh, axis) for axis in AXES)
            assert mesh.rank_at(**at) == rank
            seen.add(tuple(at.values()))
        assert len(seen) == world


def test_tensor_ranks_are_neighbours_and_replicas_outermost_before_stages():
    mesh = Mesh(dp=3, cp=2, tp=4, pp=2, outer=2)
    order = itertools.product(range(2), range(2), range(3), range(2), range(4))
    for rank, (outer, pp, dp, cp, tp) in enumerate(order):
        at = {"outer": outer, "pp": pp, "dp": dp, "cp": cp, "tp": tp}
        assert mesh.coordinates(rank) == at
    assert mesh.data == 6
    sizes = [mesh.size(axis) for axis in (*AXES, "data", "inner", "world")]
    assert sizes == [2, 2, 3, 2, 4, 6, 48, 96]


def _check_groups(rank: int, meshes: list[Mesh], axes: Iterable[str] = tuple(VARIES)) -> None:
    for sizes in meshes:
        mesh = sizes.connect()
        assert (mesh.rank, mesh.coords) == (rank, sizes.coordinates(rank))
        for axis in axes:
            members, group = _members(sizes, rank, axis), mesh.group(axis)
            assert mesh.size(axis) == len(members), (sizes, axis)
            assert mesh.index(axis) == members.index(rank), (sizes, axis)
            assert members in sizes.members(axis), (sizes, axis)
            if len(members) == 1:
                assert group is None, (sizes, axis)
                continue
            assert dist.get_process_group_ranks(group) == members, (sizes, axis)
            total = torch.tensor(2.0**rank)
            dist.all_reduce(total, group=group)
            assert total == sum(2.0**r for r in members), (sizes, axis)


def test_groups_hold_exactly_the_right_ranks_on_every_mesh_of_four():
    run_ranks(4, _check_groups, _meshes(4))


def test_groups_hold_exactly_the_right_ranks_on_meshes_of_eight():
    three = [Mesh(2, 2, 2, 1), Mesh(2, 2, 1, 2), Mesh(2, 1, 2, 2), Mesh(1, 2, 2, 2)]
    outer = [Mesh(dp=2, tp=2, outer=2), Mesh(cp=4, outer=2), Mesh(pp=2, outer=4), Mesh(outer=8)]
    more = [Mesh(4, 2), Mesh(2, 4), Mesh(tp=4, pp=2), Mesh(dp=8)]
    run_ranks(8, _check_groups, [*three, *more, *outer])


def _position(sizes: Mesh, rank: int, axis: str) -> tuple[int, int]:
    """Return (which group, place in it) of `rank` along an axis that is a part of dp or cp."""
    at, parts = sizes.coordinates(rank), sizes.dp if sizes.dp_shard is None else sizes.dp_shard
    replica, shard = divmod(at["dp"], parts)
    ring, neighbour = divmod(at["cp"], sizes.ulysses)
    rest = (at["pp"], at["tp"])
    return {
        "replica": ((*rest, shard, at["cp"]), replica),
        "dp_shard": ((*rest, replica, at["cp"]), shard),
        "ring": ((*rest, at["dp"], neighbour), ring),
        "ulysses": ((*rest, at["dp"], ring), neighbour),
        "shard": ((*rest, replica), shard * sizes.cp + at["cp"]),
    }[axis]


def test_parts_of_an_axis_are_neighbours_and_groups_of_them():
    hybrid = [Mesh(dp=4, cp=2, dp_shard=2), Mesh(dp=4, tp=2, dp_shard=2), Mesh(dp=8, dp_shard=4),
              Mesh(dp=4, pp=2, dp_shard=1), Mesh(dp=2, cp=4, ulysses=2, dp_shard=1)]  # fmt: skip
    run_ranks(8, _check_groups, [*hybrid, Mesh(dp=4, cp=2)], PARTS)


def _shared_groups(rank: int) -> None:
    one = Mesh(dp=4).connect()
    assert len({id(one.group(axis)) for axis in ("dp", "dp_shard", "data", "shard")}) == 1
    two = Mesh(dp=4, dp_shard=2).connect()
    assert two.group("shard") is two.group("dp_shard") is not two.group("data") is two.group("dp")
    outer = Mesh(dp=2, outer=2).connect()
    assert outer.group("inner") is outer.group("dp") is not outer.group("world")
    assert one.group("inner") is one.group("world")
    dist.barrier()  # no rank leaves while others still connect to it


def test_axes_of_the_same_ranks_share_a_group():
    """Each group costs threads and sockets, or a communicator's buffers."""
    run_ranks(4, _shared_groups)


def test_replicas_are_as_many_as_groups_that_divide_them():
    assert [Mesh(dp=6, cp=2, dp_shard=n).size("replica") for n in (None, 6, 3, 1)] == [1, 1, 2, 6]
    assert [Mesh(dp=6, cp=2, dp_shard=n).size("shard") for n in (None, 6, 3, 1)] == [12, 12, 6, 2]
    check(lambda: Mesh(dp=6, dp_shard=4), r"^dp \(6\) is not divisible by dp_shard \(4\)$")
    check(lambda: Mesh(dp=6, dp_shard=0), "axis dp_shard must be a positive integer, got 0")


def _check_pairs(rank: int) -> None:
    for sizes in (Mesh(cp=6, ulysses=2), Mesh(cp=6, ulysses=3), Mesh(cp=3, tp=2, ulysses=3)):
        mesh = sizes.connect(timeout=timedelta(seconds=7))
        ring, neighbours = mesh.context
        at, tp = divmod(rank, sizes.tp)
        line = [cp * sizes.tp + tp for cp in range(sizes.cp)]  # ranks of one cp axis
        first = at - at % sizes.ulysses
        expected = line[first : first + sizes.ulysses]
        assert dist.get_process_group_ranks(neighbours) == expected
        expected = line[at % sizes.ulysses :: sizes.ulysses]
        assert (ring and dist.get_process_group_ranks(ring)) == (expected if ring else None)
        assert (ring is None) == (len(expected) == 1)
        backend = neighbours._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=7)
    assert Mesh(cp=6).connect().context is not None


def test_the_context_axis_may_be_a_ring_of_neighbours():
    run_ranks(6, _check_pairs)
    assert Mesh(cp=1).connect().context is None
    check(lambda: Mesh(cp=6, ulysses=4), r"^cp \(6\) is not divisible by ulysses \(4\)$")


def _timeouts(rank: int) -> None:
    every = dist.group.WORLD._get_backend(torch.device("cpu")).options
    before = every._timeout
    hybrid = (Mesh(dp=4, dp_shard=2), Mesh(dp=2, outer=2))
    for sizes in (Mesh(tp=2, pp=2), Mesh(dp=2, cp=2), *hybrid):
        mesh = sizes.connect(timeout=timedelta(seconds=7))
        assert mesh.timeout == timedelta(seconds=7)
        for axis in (*AXES, *PARTS, "data", "inner"):
            group = mesh.group(axis)
            if group is not None and group is not dist.group.WORLD:
                backend = group._get_backend(torch.device("cpu"))
                assert backend.options._timeout == timedelta(seconds=7), (sizes, axis)
        assert every._timeout == before != timedelta(seconds=7)  # the default group keeps its own
        for axis in ("tp", "cp", "pp"):
            if (workspace := mesh.workspace(axis)) is not None:
                assert workspace._timeout == timedelta(seconds=7)
                assert workspace is mesh.workspace(axis)
                assert workspace.world == dist.get_world_size(mesh.group(axis)) == 2
            assert (workspace is None) == (sizes.size(axis) == 1)
    alone = Mesh(tp=4).connect()
    assert alone.timeout is None
    assert alone.workspace("tp")._timeout == TIMEOUT == timedelta(seconds=100)


def test_a_timeout_bounds_every_group_of_the_mesh():
    run_ranks(4, _timeouts)


def test_one_device_needs_no_process_group_and_has_none():
    for mesh in (single(), Mesh().connect()):
        assert mesh.sizes == Mesh()
        assert mesh.device_mesh is None
        assert all(mesh.group(axis) is None and mesh.index(axis) == 0 for axis in VARIES)


_SIZES = [*itertools.product((*AXES, "ulysses", "dp_shard"), (0, -2, 1.5, "2", True, None))]


@pytest.mark.parametrize(("axis", "size"), [s for s in _SIZES if s != ("dp_shard", None)])
def test_an_axis_that_is_no_positive_integer_is_refused_by_name(axis, size):
    check(lambda: Mesh(**{axis: size}), f"axis {axis} must be a positive integer, got ")


def test_ranks_and_coordinates_outside_the_mesh_are_refused():
    mesh = Mesh(dp=2, tp=3)
    for rank in (-1, 6):
        check(partial(mesh.coordinates, rank), f"rank {rank} is outside the mesh of 6 ranks")
    for axis, at in (("tp", 3), ("dp", -1), ("cp", 1)):
        check(partial(mesh.rank_at, **{axis: at}), f"{axis} = {at} is outside")
    words = r"^unknown axes \['data'\]; coordinates must be on .*'tp'"
    check(lambda: mesh.rank_at(dp=1, data=1), words)


def test_a_mesh_of_another_size_than_the_ranks_running_is_refused(monkeypatch):
    check(Mesh(dp=2, tp=3).connect, "tp=3 x pp=1 needs 6 ranks, but torch.distr")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for running, said in ((1, "1 is running"), (5, "5 are running"), (7, "7 are running")):
        monkeypatch.setattr(dist, "get_world_size", lambda running=running: running)
        check(Mesh(dp=2, tp=3).connect, f"tp=3 x pp=1 needs 6 ranks, but {said}")


def test_a_rank_is_described_by_the_axes_that_exist_and_several_are_named():
    assert Mesh().describe(0) == "rank 0"
    assert Mesh(dp=2, tp=2, pp=2).describe(5) == "rank 5 (pp=1, dp=0, tp=1)"
    mesh = Mesh(dp=2, tp=3, outer=2)
    assert mesh.names(iter([11])) == mesh.describe(11) == "rank 11 (outer=1, dp=1, tp=2)"
    assert mesh.names(r for r in (7, 0, 10)) == "ranks 7, 0, 10"


def test_meshes_are_values():
    assert Mesh(dp=2) == Mesh(dp=2)
    assert len({Mesh(dp=2), Mesh(dp=2), Mesh(cp=2)}) == 2
    with pytest.raises(AttributeError):
        Mesh().dp = 2
    assert ConnectedMesh(Mesh(cp=2, dp=3), 5, {}, None).index("data") == 5


def test_sizes_alone_are_refused_where_a_connected_mesh_is_needed():
    for sizes in (Mesh(), Mesh(tp=2)):
        words = "mesh must be connected, .* pass mesh.connect"
        check(partial(ColumnParallelLinear, 4, 4, mesh=sizes), words)


def _too_few(rank: int, world: int) -> None:
    found = "1 is running" if world == 1 else f"{world} are running"
    for sizes, words in (
        (Mesh(dp=3, cp=2, outer=2), "outer=2 x dp=3 x cp=2 x tp=1 x pp=1 needs 12 ranks"),
        (Mesh(tp=7, pp=5), "dp=1 x cp=1 x tp=7 x pp=5 needs 35 ranks"),
    ):
        check(sizes.connect, f"^mesh {words}, but {found}$")


@pytest.mark.parametrize("world", [1, 2])
def test_a_mesh_says_how_many_ranks_it_needs_and_how_many_there_are(world: int):
    run_threads(world, _too_few, world)


def test_divisors_are_those_without_remainder():
    for n in range(1, 200):
        assert divisors(n) == [m for m in range(1, n + 1) if n % m == 0]


def test_every_workspace_is_asked_whether_a_wait_was_in_vain():
    asked, mesh = mock.Mock(), Mesh(tp=2, pp=2).seen_from(0)
    mesh.check_waits()
    mesh._workspaces.update({name: getattr(asked, name) for name in ("tp", "pp", "dp")})
    mesh.check_waits()
    assert asked.mock_calls == [mock.call.tp.check(), mock.call.pp.check(), mock.call.dp.check()]
