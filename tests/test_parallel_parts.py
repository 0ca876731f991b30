"""Small parts that every rank has: chunks of layouts, message buffers, the allocation of symmetric
memory, and messages of nested groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from threads import on_mesh, on_threads

from warpweave.parallel import symmetric
from warpweave.parallel.buffers import Buffers
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.parallel.messages import AllToAll, Batch, Hop, Steps, run_in_process, run_on_group
from warpweave.parallel.symmetric import Workspace, symmetric_memory
from warpweave.parallel.words import chunks_of, local_rows

CPU = torch.device("cpu")


# ---------------------------------------------------------------- sizes


def test_balanced_layout_chunks_have_at_least_128_rows_if_possible() -> None:
    """That is a tile of the attention kernels."""
    fewest = {1: 2, 511: 2, 512: 4, 1023: 4, 1024: 8, 2047: 8, 2048: 16, 10**6: 16}
    for parts in (2, 3):
        for rows, chunks in fewest.items():
            found = {chunks_of(rows * parts + more, parts, "balanced") for more in (0, parts - 1)}
            assert found == {chunks}, (rows, parts)
        others = [chunks_of(4096, parts, kind) for kind in ("contiguous", "striped", "zigzag")]
        assert others == [1, 1, 2]


def test_local_rows_are_the_fewest_that_hold_the_sequence_in_equal_chunks() -> None:
    for given in itertools.product((0, 1, 7, 24, 25, 100), (1, 2, 3), (1, 2, 4)):
        rows, (seq_len, parts, chunks) = local_rows(*given), given
        assert rows % chunks == 0
        assert rows * parts >= seq_len
        assert (rows - chunks) * parts < seq_len or rows == 0


# ---------------------------------------------------------------- buffers


def test_a_buffer_is_taken_again_only_for_its_shape_and_dtype() -> None:
    buffers = Buffers()
    first = buffers.take((2, 3), torch.float32, CPU)
    other = buffers.take([2, 3], torch.float32, CPU)
    assert (first.shape, first.dtype, first.device) == ((2, 3), torch.float32, CPU)
    assert first.data_ptr() != other.data_ptr(), "both are in use"
    buffers.give_back(first, other)
    for shape, dtype in (((3, 2), torch.float32), ((6,), torch.float32), ((2, 3), torch.int32)):
        there = buffers.take(shape, dtype, CPU).data_ptr()
        assert there not in (first.data_ptr(), other.data_ptr())
    again = [buffers.take(torch.Size((2, 3)), torch.float32, CPU) for _ in range(3)]
    assert {id(first), id(other)} == {id(x) for x in again[:2]}
    assert id(again[2]) not in {id(first), id(other)}
    assert buffers.take((), torch.float64, CPU).shape == ()


# ---------------------------------------------------------------- symmetric memory


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Create files here instead of in the folder that all processes of the machine share."""
    with mock.patch.object(symmetric, "FOLDER", tmp_path):
        yield tmp_path


def _allocated(group: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    memory = symmetric_memory(group, "cpu", slots=3, capacity=500, **given)
    memory.segments[(memory.rank + 1) % memory.world][memory.rank] = 10 + memory.rank
    dist.barrier(group)
    written = memory.segments[memory.rank][: memory.world].tolist()
    assert not memory.segments[memory.rank][memory.world :].any()
    return memory.rank, memory.world, memory.slots, memory.capacity, memory.polls, written


@pytest.mark.parametrize(
    ("given", "polls"),
    [
        ({}, 1_000_000),
        ({"timeout": timedelta(seconds=2.5)}, 25_000),
        ({"timeout": timedelta(microseconds=3)}, 1),
        ({"polls": 7, "timeout": timedelta(seconds=2.5)}, 7),
        ({"polls": 0}, 0),
    ],
)
def test_every_rank_sees_what_another_writes_and_polls_as_often_as_is_asked(
    given, polls, folder
) -> None:
    for rank, found in enumerate(on_threads(3, _allocated, given)):
        written = [0, 0, 0]
        written[(rank - 1) % 3] = 10 + (rank - 1) % 3
        assert found[:3] == (rank, 3, 3)
        assert found[3] >= 500
        assert found[4:] == (polls, written)
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("error", [OSError, RuntimeError])
@pytest.mark.parametrize(("step", "verb"), [("create_file", "create"), ("map_file", "map")])
def test_all_ranks_are_told_who_cannot_allocate_and_nothing_is_left(
    step, verb, error, folder
) -> None:
    right = getattr(symmetric, step)
    calls = []

    def broken(path: Any, size: int) -> Any:
        calls.append(path)
        if len(calls) > 1:  # the second and third callers
            raise error("no room\nfor it")
        return right(path, size)

    def allocate(group: Any) -> str:
        with pytest.raises(ValueError, match=r"^symmetric memory: ranks") as said:
            symmetric_memory(group, "cpu", slots=1, capacity=1)
        return str(said.value)

    with mock.patch.object(symmetric, step, broken):
        found = on_threads(3, allocate)
    assert not [*folder.iterdir()]
    files = f"their group's shared files in {folder} (all ranks must be on one machine)"
    whose = f"cannot {verb} {files}"
    failed = [rank for rank in range(3) if found[rank].endswith(": no room")]
    assert len(failed) == (2 if step == "create_file" else 3)
    for rank, words in enumerate(found):
        why = "no room" if rank in failed else "see the errors of those ranks"
        assert words == f"symmetric memory: ranks {failed} {whose}: {why}"


def test_a_group_within_the_world_has_a_memory_and_troubles_of_its_own(folder) -> None:
    def allocate(mesh: ConnectedMesh) -> tuple[Any, ...]:
        group, at = mesh.group("tp"), (mesh.index("dp"), mesh.index("tp"))
        rank, world, *_, written = _allocated(group, {})
        try:
            symmetric._agree("no room" if at == (1, 0) else "", group, "cannot")
        except ValueError as error:
            return at, rank, world, written, str(error)
        return at, rank, world, written, ""

    said = "symmetric memory: ranks [0] cannot: "
    words = {(1, 0): f"{said}no room", (1, 1): f"{said}see the errors of those ranks"}
    for at, rank, world, written, error in on_mesh(Mesh(dp=2, tp=2), allocate):
        assert (rank, world) == (at[1], 2)
        assert written == ([0, 11] if rank == 0 else [10, 0])
        assert error == words.get(at, "")
    assert not [*folder.iterdir()]


def test_workspace_passes_its_bounds_on_and_drops_its_memory_when_renewed() -> None:
    def made(group: Any, device: torch.device, **given: Any) -> Any:
        memory = mock.Mock(slots=given["slots"], capacity=given["capacity"], left=[], given=given)
        memory.epoch.device = device
        return memory

    def grown(group: Any) -> None:
        minute = timedelta(seconds=60)
        for options, bounds in (
            ({}, {"timeout": symmetric.TIMEOUT, "polls": None}),
            ({"timeout": minute}, {"timeout": minute, "polls": None}),
            ({"timeout": minute, "polls": 0}, {"timeout": minute, "polls": 0}),
        ):
            workspace = Workspace(group, **options)
            workspace.settle()  # there is no memory yet
            workspace.check()
            workspace.leave("op")
            sizes = []
            for slots, size in ((1, 1), (3, 1000), (5, 8), (4, 1024), (8, 1025)):
                workspace.fitting("op", CPU, slots, size)
                memory = workspace._memory
                assert {name: memory.given[name] for name in bounds} == bounds
                assert memory.fitting.call_args.args[:2] == ("op", CPU)
                sizes.append((memory.slots, memory.capacity))
            assert sizes == [(1, 1), (4, 1024), (8, 1024), (8, 1024), (8, 2048)]
            workspace.settle()
            workspace.check()
            workspace.leave("op")
            assert [memory.settle.call_count, memory.check.call_count] == [1, 1]
            assert memory.leave.call_args.args == ("op",)
            memory.left.append("op")
            workspace.fitting("op", CPU, 9, 1)  # raises, and allocates nothing
            assert workspace._memory is memory
            workspace.renew()
            workspace.fitting("op", CPU, 1, 1)
            assert (workspace._memory.slots, workspace._memory.capacity) == (1, 1)

    with mock.patch.object(symmetric, "symmetric_memory", made):
        on_threads(2, grown)


# ---------------------------------------------------------------- messages


def _nested(rank: int, inner: int, ranks: int) -> Steps[tuple[list[float], list[float]]]:
    """Run an all-to-all in groups of `inner`, of unequal parts, and meanwhile
    a ring over these groups."""
    place, count = rank % inner, ranks // inner
    sizes = [1 + (place + 2 * to) % 3 for to in range(inner)]
    taken = [1 + (of + 2 * place) % 3 for of in range(inner)]
    send = torch.cat([torch.full((n,), 100.0 * rank + to) for to, n in enumerate(sizes)])
    recv, x, into = torch.zeros(sum(taken)), torch.full((1,), float(rank)), torch.zeros(1)
    for _ in range(rank % 3):  # some arrive later than others
        yield None
    yield AllToAll(send, recv, sizes, taken)
    at = rank // inner
    if count > 1:
        yield Hop(x, into, (at + 1) % count, (at - 1) % count)
    yield None
    return recv.tolist(), into.tolist()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("ranks", "inner"), [(3, 1), (4, 2), (6, 3), (6, 2), (4, 4)])
def test_all_to_alls_are_within_groups_and_hops_between_them(ranks, inner, overlap) -> None:
    steps = [_nested(rank, inner, ranks) for rank in range(ranks)]
    for rank, (taken, hopped) in enumerate(run_in_process(steps, inner=inner, overlap=overlap)):
        place, first = rank % inner, rank - rank % inner
        sizes = {100.0 * (first + of) + place: 1 + (of + 2 * place) % 3 for of in range(inner)}
        assert taken == [x for x, size in sizes.items() for _ in range(size)]
        assert hopped == ([float((rank - inner) % ranks)] if ranks > inner else [0.0])


@pytest.mark.parametrize("overlap", [True, False])
def test_on_a_group_messages_are_waited_for_where_the_steps_say_so(overlap) -> None:
    """Without overlap, they are waited for at once. A rank's return value is its result."""

    def run(group: Any) -> tuple[list[float], list[float], str]:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)

        def steps() -> Steps[str]:
            x = torch.full((2,), float(rank))
            into, other, mixed = torch.zeros(2), torch.zeros(2), torch.zeros(ranks)
            right, left = (rank + 1) % ranks, (rank - 1) % ranks
            yield Hop(x, into, right, left)
            yield Batch([(x + 10, left)], [(other, right)])
            yield AllToAll(torch.full((ranks,), float(rank)), mixed, [1] * ranks, [1] * ranks)
            early = [*into.tolist(), *other.tolist()]
            yield None
            found.extend([early, [*into.tolist(), *other.tolist(), *mixed.tolist()]])
            return f"rank {rank}"

        found: list[Any] = []
        said = run_on_group(steps(), group, group, overlap=overlap)
        return (*found, said)

    for rank, (early, late, said) in enumerate(on_threads(3, run)):
        there = [float((rank - 1) % 3)] * 2 + [float((rank + 1) % 3 + 10)] * 2
        assert late == [*there, 0.0, 1.0, 2.0]
        assert said == f"rank {rank}"
        assert early == ([0.0] * 4 if overlap else there)


def test_without_groups_an_all_to_all_is_a_copy() -> None:
    x, into = torch.arange(3.0), torch.zeros(3)

    def steps() -> Steps[int]:
        yield AllToAll(x, into, [3], [3])
        yield None
        return 7

    assert run_on_group(steps(), None) == 7
    assert into.tolist() == [0.0, 1.0, 2.0]


def test_who_waits_for_whom_is_told_of_receives_too() -> None:
    def steps(batch: Batch) -> Steps[None]:
        yield batch
        yield None

    def x() -> torch.Tensor:
        return torch.zeros(1)

    batches = [Batch([(x(), 2)], [(x(), 1)]), Batch([], [(x(), 0)]), Batch([(x(), 1)], [])]
    waits = {0: r"\[1, 2\]", 1: r"\[0\]", 2: r"\[1\]"}
    words = "; ".join(f"rank {rank} waits for ranks {others}" for rank, others in waits.items())
    with pytest.raises(RuntimeError, match=f"^deadlock: {words}$"):
        run_in_process([steps(batch) for batch in batches])
