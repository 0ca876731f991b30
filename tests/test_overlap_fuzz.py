"""Overlapped products between real processes with random delays at every possible place.

A rank sleeps at random before its operations, before every atomic, and before its stores become
visible. A store becomes visible as late as allowed: at the release of its program that follows a
barrier, or at the end of the launch. So these processes, on a CPU that does not reorder stores,
also detect a release that is relaxed or has no barrier before it.

With random delays, the effect of a fault depends on luck. The planted faults do not need luck: one
rank continues only when the other has to wait for it.
"""

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from close import relative_error
from ranks import run_ranks
from test_overlap_protocol import FAULTS, TILES, planted
from triton.runtime.interpreter import GridExecutor, interpreter_builder

from warpweave.kernels.overlap import (
    all_gather_gemm,
    function,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from warpweave.kernels.overlap.symmetric import create_file, map_file
from warpweave.kernels.runtime.tiles import pinned
from warpweave.parallel.symmetric import symmetric_memory

OPS = {"gather": all_gather_gemm, "scatter": gemm_reduce_scatter, "reduce": gemm_all_reduce}
ROUNDS = {2: 20, 3: 8}  # of each operation, by number of ranks
SHAPES = ((1, 1, 1), (3, 5, 2), (7, 32, 3), (16, 3, 5), (2, 38, 1), (20, 6, 3))  # S, N, K


class Luck:
    """Random delays of a rank, occasional and never long."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def publish(self, chance: float = 0.1) -> None:
        """Delay a launch, its end, and the setting of a flag."""
        if self._draw.random() < chance:
            time.sleep(self._draw.random() * 0.003)

    def look(self) -> None:
        """Delay the first poll of a flag."""
        self.publish(0.02)

    def look_again(self) -> None:
        """Sleep after a poll without success: others need the processor."""
        time.sleep(0.001)


class Last(Luck):
    """Delays that make one of two ranks always last: it publishes and launches while the other
    waits.

    `looks` is memory of both: the number of polls by the other rank without success; -1: it is
    done.
    """

    def __init__(self, looks: torch.Tensor, last: bool) -> None:
        self._looks, self._last = looks, last

    def publish(self, chance: float = 1.0) -> None:
        if self._last:
            enough = self._looks.item() + 2  # one of them began after the data published so far
            end = time.monotonic() + 60
            while 0 <= self._looks.item() < enough:
                assert time.monotonic() < end, "the other rank neither waits nor ends"
                time.sleep(0.001)

    def look(self) -> None:
        pass

    def look_again(self) -> None:
        if not self._last:
            self._looks += 1
        time.sleep(0.001)

    def end(self) -> None:
        """Stop waiting for the other rank from now on."""
        if not self._last:
            self._looks.fill_(-1)


def delay(luck: Luck) -> None:
    """Delay this process from now on, and make its programs' stores visible late."""
    builder, launch = interpreter_builder, GridExecutor.__call__
    begin, store, bulk = (
        builder.set_grid_idx,
        builder.create_masked_store,
        builder.create_descriptor_store,
    )
    atomic = builder.create_atomic_rmw
    last: list[int] = []  # the flag that was polled
    held: list[tuple] = []  # stores of the running program
    ready: list[tuple] = []  # those collected by a barrier: the next release makes them visible
    unseen: list[tuple] = []  # those without a release, until the launch ends

    def show(stores):
        for args in stores:
            store(*args)
        stores.clear()

    def begin_program(*grid):
        last.clear()
        unseen.extend(ready + held)
        ready.clear(), held.clear()
        begin(*grid)

    def store_later(*args):
        held.append(args)

    def store_bulk(*args):  # not ordered by any release
        before = len(held)
        bulk(*args)
        unseen.extend(held[before:])
        del held[before:]

    def collect():
        ready.extend(held)
        held.clear()

    def atomic_late(op, ptr, value, mask, sem, scope):
        if "XCHG" in str(op).upper():
            luck.publish()
            if "RELEASE" in str(sem).upper():
                show(ready)
        elif last == [flag := int(ptr.data.flat[0])]:
            luck.look_again()
        else:
            last[:] = [flag]
            luck.look()
        return atomic(op, ptr, value, mask, sem, scope)

    def launch_late(*args, **options):
        luck.publish()
        launch(*args, **options)
        begin_program(0, 0, 0)
        luck.publish()
        show(unseen)

    builder.set_grid_idx = begin_program
    builder.create_masked_store, builder.create_descriptor_store = store_later, store_bulk
    builder.create_barrier, builder.create_atomic_rmw = collect, atomic_late
    GridExecutor.__call__ = launch_late


def operands(op: str, case: int, world: int, rank: int):
    """Return a rank's inputs, and the expected results."""
    S, N, K = SHAPES[case]
    draw = torch.Generator().manual_seed(case)
    rows = world * S if op == "scatter" else S
    a = torch.randn(world, rows, K, dtype=torch.float64, generator=draw)
    b = torch.randn(world, K, N, dtype=torch.float64, generator=draw)
    if op == "gather":
        return (a[rank], b[rank]), a.flatten(0, 1) @ b[rank]
    total = torch.einsum("rmk,rkn->mn", a, b)
    return (a[rank], b[rank]), total[rank * S : (rank + 1) * S] if op == "scatter" else total


def run(rank: int, world: int, cases: list[tuple[str, int]]) -> dict:
    """Run operations of such cases on one memory, one after the other, and return the last results
    of each.

    Raises AssertionError at the first result that is wrong or differs in bits from an earlier one.
    """
    memory = symmetric_memory(dist.group.WORLD, "cpu", slots=8, capacity=1 << 14)
    known = {case: operands(*case, world, rank) for case in cases}
    seen: dict[tuple[str, int], torch.Tensor] = {}
    dist.barrier()
    with pinned(TILES):
        for i, case in enumerate(cases):
            given, expected = known[case]
            result = OPS[case[0]](*given, memory=memory)
            y = result[0] if case[0] == "gather" else result
            first = seen.setdefault(case, y)
            right = relative_error(y, expected) < 1e-14 and torch.equal(y, first)
            assert right, f"{case} is wrong in round {i}"
    return seen


def _at_random(rank: int, world: int) -> dict:
    delay(Luck(rank))
    draw = random.Random(0)
    ops = [op for op in OPS for _ in range(ROUNDS[world])]
    draw.shuffle(ops)
    shapes = draw.choices(range(len(SHAPES)), weights=(9, 9, 6, 6, 1, 1), k=len(ops))
    return run(rank, world, [*zip(ops, shapes)])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", ROUNDS)
def test_many_operations_at_random_moments(world):
    results = run_ranks(world, _at_random, world, timeout=3000)  # allows for a busy machine
    assert {op for op, _ in results[0]} == OPS.keys()
    for case, y in results[0].items():
        assert case[0] != "reduce" or all(torch.equal(y, other[case]) for other in results)


# ---------------------------------------------------------------- planted faults


def _one_is_last(rank: int, ops: list[str], folder: Path, edits: list, last: int) -> None:
    luck = Last(map_file(folder / "looks", 8).view(torch.int64), rank == last)
    delay(luck)
    if edits:
        (folder / str(rank)).mkdir()
        modules = planted(folder / str(rank), *edits)
        function.gather_steps = modules["gather"].gather_steps
        function.scatter_steps = modules["scatter"].scatter_steps
    two_tiles = SHAPES.index((2, 38, 1)), SHAPES.index((20, 6, 3))
    run(rank, 2, [(op, shape) for op in ops for shape in two_tiles] * 2)
    luck.end()


PARITY = FAULTS["no parity"][1:]
BY_TIME = {
    name: (FAULTS[name][0], [FAULTS[name][1:]])
    for name in ("a wait removed", "no barrier before a release", "a relaxed release",
                 "one flag for all tiles")
} | {
    **{f"no parity in a {op}": (op, [PARITY]) for op in OPS},
    "an asynchronous store published": ("scatter", [FAULTS["an asynchronous store published"][1:]]),
    "a replay that repeats its epoch": ("scatter", [("scatter", "    memory.advance()\n", "")]),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_TIME)
def test_a_planted_fault_is_a_wrong_result_when_one_rank_is_last(name, tmp_path):
    op, edits = BY_TIME[name]
    create_file(tmp_path / "looks", 8)
    # If data was read too early, its adjacent signature may have been as well.
    with pytest.raises(AssertionError, match=r"is wrong in round|: rank 1 runs "):
        run_ranks(2, _one_is_last, [op], tmp_path, edits, 1)


@pytest.mark.parametrize("last", [0, 1])
def test_without_a_fault_the_last_rank_is_waited_for(last, tmp_path):
    create_file(tmp_path / "looks", 8)
    run_ranks(2, _one_is_last, [*OPS], tmp_path, [], last)
