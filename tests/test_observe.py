"""The calls that an observer gets for every operation of torch.distributed, and the comparisons of
a checked one with a store that this process fills for the other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_store import Alone, Store
from threads import run_threads
from torch.testing._internal.distributed.fake_pg import FakeStore

from warpweave.parallel import checked
from warpweave.parallel.checked import CheckedCollectives, CollectiveMismatch
from warpweave.parallel.collectives import (
    all_gather_into,
    reduce_scatter_into,
    start_all_to_all,
    start_exchange,
)
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.observe import Observer, Operation, carried, described, observers

X = torch.ones(3)
MESH = Mesh(dp=2, tp=2)
NAMES = [MESH.describe(rank) for rank in range(4)]


class _Seen(Observer):
    """An observer that keeps each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Operation] = []

    def before(self, operation: Operation) -> None:
        self.seen.append(operation)


def _three(n: int = 1) -> list[torch.Tensor]:
    return [torch.ones(n) for _ in range(3)]


# The call, and its description: name with arguments, the shapes, the sizes.
CALLS: list[tuple[Callable[[Any], object], str, list[tuple[int, ...]], Any]] = [
    (lambda g: dist.all_reduce(torch.ones(2, 5), group=g), "all_reduce of float32[2, 5]",
     [(2, 5)], None),
    (lambda g: all_gather_into(torch.empty(9), X, group=g), "all_gather of float32[3]",
     [(3,)], None),
    (lambda g: dist.all_gather(_three(3), X, group=g), "all_gather of float32[3]", [(3,)], None),
    (lambda g: reduce_scatter_into(torch.empty(2), torch.ones(6), group=g),
     "reduce_scatter of float32[6]", [(6,)], None),
    (lambda g: dist.reduce_scatter(torch.empty(1), _three(), group=g),
     "reduce_scatter of float32[1], float32[1], float32[1]", [(1,)] * 3, None),
    (lambda g: start_all_to_all(torch.ones(4), torch.empty(5), [0, 1, 3], [2, 2, 1], g).wait(),
     "all_to_all of torch.float32", [(4,)], ([0, 1, 3], [2, 2, 1])),
    (lambda g: dist.reduce(torch.ones(4).half(), group=g, group_dst=1), "reduce of float16[4]",
     [(4,)], None),
    (lambda g: dist.all_reduce_coalesced([torch.ones(3), torch.ones(2, 2)], group=g),
     "allreduce_coalesced of float32[3], float32[2, 2]", [(3,), (2, 2)], None),
    (lambda g: dist.broadcast(torch.ones(2), group=g, group_src=0),
     "broadcast of float32[2] from rank 1", [], None),
    (lambda g: dist.broadcast(torch.ones(()), group=g, group_src=2),
     "broadcast of float32[] from rank 5", [()], None),
]  # fmt: skip


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Return ranks 1, 3 and 5 of six, seen from rank 5, which is its rank 2."""
    dist.init_process_group("fake", rank=5, world_size=6, store=FakeStore())
    try:
        yield dist.new_group([1, 3, 5])
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*coalesced")
def test_every_collective_is_observed_with_what_this_rank_gives(group) -> None:
    """Ranks are those of the default group. An observer that is entered
    again continues its count."""
    observer = _Seen()
    for call, *_ in CALLS:
        with observer:
            call(group)
    CALLS[0][0](group)  # nothing is observed outside
    for number, (op, (_, what, shapes, sizes)) in enumerate(zip(observer.seen, CALLS, strict=True)):
        assert (op.what, [tuple(x.shape) for x in op.given], op.sizes) == (what, shapes, sizes)
        assert op.key.rpartition("/")[2] == str(number)
        assert (op.ranks, op.side) == ((1, 3, 5), "")
    assert described((X, torch.ones((), dtype=torch.int64))) == "float32[3], int64[]"


def test_a_message_is_observed_as_one_end_of_its_link(group) -> None:
    """The key has the group's own ranks, and messages are counted in each direction."""
    observer = _Seen()
    with observer:
        dist.send(X, group=group, group_dst=0)
        dist.recv(X.clone(), group=group, group_src=1)
        start_exchange(X, X.clone(), 1, 0, group).wait()
        dist.send(X, group=group, group_dst=0)
    assert [(op.key.partition("/")[2], op.ranks, op.side, op.what) for op in observer.seen] == [
        ("2>0/0", (5, 1), "send", "send of float32[3]"),
        ("1>2/0", (3, 5), "recv", "recv of float32[3]"),
        ("2>1/0", (5, 3), "send", "send of float32[3]"),
        ("0>2/0", (1, 5), "recv", "recv of float32[3]"),
        ("2>0/1", (5, 1), "send", "send of float32[3]"),
    ]


def test_what_observes_a_thread_observes_the_work_that_it_hands_to_another() -> None:
    def count(*given: int) -> tuple[int, tuple[int, ...]]:
        return len(observers()), given

    assert carried(count) is count, "nothing observes"
    first, second = _Seen(), _Seen()
    found: list[Any] = []
    with first, second:
        run = carried(count)
        assert observers() == [first, second]
        thread = threading.Thread(target=lambda: found.append((run(4, 5), count())))
        thread.start()
        thread.join()
    assert found == [((2, (4, 5)), (0, ()))]
    assert observers() == []


# ---------------------------------------------------------------- checked


def _checked(store: Any, rank: int, timeout: float = 60.0) -> CheckedCollectives:
    return CheckedCollectives(store, MESH, rank, timeout, torch.device("cpu"))


def _end(side: str, what: str, key: str = "7/3>2/0") -> Operation:
    return Operation(key, (3, 2), f"{side} of {what}", (), side)


@pytest.mark.parametrize("sides", [("send", "recv"), ("recv", "send")])
def test_whichever_end_of_a_message_is_second_compares(sides) -> None:
    """Rank 3 sends to rank 2. If the ends agree, their entries are removed from the store."""
    at = {"send": 3, "recv": 2}
    store = Alone()
    for _ in range(2):
        for side in sides:
            _checked(store, at[side]).before(_end(side, "float32[3]"))
        assert not store.values
    first, second = sides
    what = {"send": "float32[4]", "recv": "float16[4]"}
    _checked(store, at[first]).before(_end(first, what[first]))
    words = f"{NAMES[3]} sends float32[4], {NAMES[2]} receives float16[4]"
    with pytest.raises(CollectiveMismatch) as said:
        _checked(store, at[second]).before(_end(second, what[second]))
    assert str(said.value) == words
    assert store.values == {"verdict": words.encode()}
    _checked(store, 3).before(_end("send", "float32[3]", "9"))
    with pytest.raises(CollectiveMismatch) as said:
        _checked(store, 2).before(_end("recv", "float32[5]", "9"))
    assert str(said.value) == words, "all say what was found first"


def test_the_waiting_of_all_operations_is_summed(monkeypatch) -> None:
    times = iter([0.0, 1.0, 10.0, 13.0, 20.0, 20.5])
    clock = SimpleNamespace(perf_counter=lambda: next(times), monotonic=lambda: 0.0)
    monkeypatch.setattr(checked, "time", clock)
    store = Alone()
    found = _checked(store, 2)
    for number in range(3):
        found.before(Operation(f"5/{number}", (2,), "barrier", ()))
    assert found.waited == 4.5
    assert [*store.values] == ["5/2/2"], "the last word alone is left"


def test_nth_check_of_a_rank_reads_only_the_nth_check_of_other_ranks() -> None:
    store = dist.HashStore()
    every = {(rank, n): _checked(store, rank)._store for n in range(2) for rank in (3, 2)}
    for (rank, n), mine in every.items():
        mine.set(f"word/{rank}", str(n))
    for rank, n in every:
        assert every[rank, n].get(f"word/{5 - rank}").decode() == str(n)


def _all_to_all(store: Any, ranks: tuple[int, ...], sizes: dict[int, Any]) -> str:
    """Return the finding of the last of these ranks; each passes its (sends, receives)."""
    for rank in ranks[:-1]:
        store.set(f"5/0/{rank}", f'["all_to_all of torch.float32", {[*sizes[rank]]}]')
    last = ranks[-1]
    operation = Operation("5/0", ranks, "all_to_all of torch.float32", (), sizes=sizes[last])
    try:
        _checked(store, last).before(operation)
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_parts_of_an_all_to_all_are_compared_by_who_sends_and_who_receives() -> None:
    """Three ranks of four, none of which is the group's first. Equal parts are not reported."""
    ranks, table = (1, 2, 3), [[4, 1, 0], [2, 5, 7], [3, 6, 8]]

    def sizes() -> dict[int, tuple[list[int], list[int]]]:
        return {
            rank: (list(table[at]), [row[at] for row in table]) for at, rank in enumerate(ranks)
        }

    assert _all_to_all(Alone(), ranks, sizes()) == ""
    for a, b in ((0, 0), (0, 2), (2, 0), (1, 2), (2, 1)):
        for end in (0, 1):
            given = sizes()
            given[ranks[(a, b)[end]]][end][(b, a)[end]] += 10
            sent, expected = (table[a][b] + 10 * (end == at) for at in (0, 1))
            assert _all_to_all(Alone(), ranks, given) == (
                f"all_to_all: {NAMES[ranks[a]]} sends {sent} elements to {NAMES[ranks[b]]}, "
                f"which expects {expected}"
            )
    equal = dict.fromkeys(ranks, ([], []))
    assert _all_to_all(Alone(), ranks, equal) == ""


def _all_but_rank_2(rank: int, store: Any, met: bool) -> str:
    """Bring all others to a collective of all ranks. If they `met`, ranks 2 and 3 had one before
    it, in which rank 2 was seen waiting."""
    mesh = MESH.connect(timeout=timedelta(seconds=60))
    try:
        with CheckedCollectives(store, MESH, rank, 0.5, torch.device("cpu")):
            if met and rank == 3:
                store.wait(["at/2"], timedelta(seconds=60))
            if met and rank > 1:
                dist.all_reduce(torch.ones(4), group=mesh.group("tp"))
            if rank != 2:
                dist.all_reduce(X.clone(), group=mesh.group("world"))
    except CollectiveMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("met", [True, False])
def test_a_rank_that_does_not_come_is_named_with_where_it_was_seen_last(monkeypatch, met) -> None:
    store = Store()

    def now() -> float:
        """Let the timeout be over once all others are there."""
        there = [key for key in [*store.values] if key.endswith(("/0/0", "/0/1", "/0/3"))]
        return 1e9 if len(there) == 3 + met else 0.0  # rank 3's entry in the pair stays

    monkeypatch.setattr(checked, "_LOOK", 1e-3)
    monkeypatch.setattr(checked, "time", SimpleNamespace(monotonic=now, perf_counter=lambda: 0.0))
    words = (
        f"{NAMES[2]} did not reach all_reduce of float32[3] among ranks 0, 1, 2, 3 within 0.5 s"
        + "; it was last seen in all_reduce of float32[4] among ranks 2, 3" * met
    )
    assert run_threads(4, _all_but_rank_2, store, met) == [words, words, "", words]
