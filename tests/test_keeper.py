"""The keeper of an elastic run when ranks end: which replicas continue, its messages, its exit
code.

No process is started.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from warpweave.launch import heartbeat
from warpweave.model.config import ParallelPlan
from warpweave.train.elastic import run as module
from warpweave.train.elastic.membership import Generation
from warpweave.train.elastic.run import Keeper
from warpweave.train.options import TrainConfig

GRACE = 5.0  # seconds in which ranks must notice that a connection has failed, or end


class _Process(SimpleNamespace):
    """A process that runs until it is killed or a test sets its exit code."""

    def __init__(self) -> None:
        super().__init__(exitcode=None)

    def kill(self) -> None:
        self.exitcode = -9


class _Store(dist.HashStore):
    port = 5


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Replace the keeper's clock, which stays at `now`."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


@pytest.fixture
def keeper(monkeypatch, clock):
    """Return a function that makes a keeper of `replicas` of `width`
    ranks, all admitted if `there`."""

    def end(processes: Any) -> None:
        for process in processes:
            process.exitcode = -9 if process.exitcode is None else process.exitcode

    monkeypatch.setattr(module, "end", end)
    monkeypatch.setattr(module, "latest", lambda _: None)
    monkeypatch.setattr(module, "keep_store", _Store)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(time=lambda: 50.0))

    def make(replicas: int, least: int = 1, width: int = 1, there: bool = True) -> Keeper:
        options = {"dp": replicas * width, "elastic": least}
        if width > 1:
            options |= {"dp_shard": width}
        config = TrainConfig(plan=ParallelPlan(zero=1 if width > 1 else 0), **options)
        started = mock.MagicMock()
        started.start = lambda *given: _Process()
        found = Keeper(config, started)
        for number in range(replicas):
            found._start(number)
        if there:
            _ready(found, *range(replicas))
            assert found.watch(None) is None
            assert found.current.replicas == [*range(replicas)]
            _settled(found)
        return found

    return make


def _ready(keeper: Keeper, *numbers: int) -> None:
    """Make all ranks of these replicas wait for admission."""
    for number in numbers:
        replica = keeper.replicas[number]
        for rank in replica.ranks:
            keeper.store.set(f"ready/{replica.start}/{rank}", "")


def _settled(keeper: Keeper) -> None:
    """Give all ranks of the generation the state."""
    ranks = sum(len(keeper.replicas[n].ranks) for n in keeper.current.members)
    keeper.store.add(f"settled/{keeper.current.number}", ranks)


def _ends(keeper: Keeper, stop: int | None = None, **codes: int) -> int | None:
    """End these ranks (r0, r1, ...) with these codes, perhaps after a signal. Return the keeper's
    exit code or None."""
    for name, code in codes.items():
        rank = int(name[1:])
        keeper.replicas[keeper.seats[rank].replica].processes[rank].exitcode = code
    return keeper.watch(stop)


def _beat(keeper: Keeper, rank: int, step: int, phase: str) -> None:
    keeper.stores[-1].set(f"beat/{rank}", json.dumps([step, phase, 42.0]))


@pytest.mark.parametrize(
    ("dead", "words"),
    [
        ({"r1": -9}, "replica 1 left: rank 1 (dp=1) was killed by SIGKILL, last seen at step 7 "
         "(saving), 8.0 s ago; replicas 0 and 2 continue"),
        ({"r1": 3}, "replica 1 left: rank 1 (dp=1) failed with 3, last seen at step 7 (saving), "
         "8.0 s ago; replicas 0 and 2 continue"),
        ({"r2": -11}, "replica 2 left: rank 2 (dp=2) was killed by SIGSEGV before its first step; "
         "replicas 0 and 1 continue"),
        ({"r0": -9, "r2": 1}, "replica 0 left: rank 0 (dp=0) was killed by SIGKILL before its "
         "first step; replica 2 left: rank 2 (dp=2) failed with 1 before its first step; "
         "replica 1 continues"),
    ],
)  # fmt: skip
def test_the_others_go_on_and_dead_replicas_are_restarted_and_join_again(keeper, dead, words):
    found = keeper(3)
    _beat(found, 1, 7, "saving")
    gone = {int(name[1:]) for name in dead}
    assert _ends(found, **dead) is None
    now = found.current
    assert (now.number, now.lost, now.stop, now.begun) == (2, True, False, True)
    assert now.members == {n: 0 for n in range(3) if n not in gone}
    assert now.change == words
    assert [replica.start for replica in found.replicas] == [int(n in gone) for n in range(3)]
    _ready(found, *gone)
    assert found.watch(None) is None
    assert found.current is now  # the remaining ones have not settled yet
    _settled(found)
    assert found.watch(None) is None
    joined = found.current
    assert joined.members == {n: int(n in gone) for n in range(3)}
    assert (joined.number, joined.lost, joined.stop) == (3, False, False)
    back = " and ".join(map(str, sorted(gone)))
    assert joined.change == (f"replica {back} joins" if len(gone) == 1 else f"replicas {back} join")
    told = json.loads(found.store.get("generation/3"))
    assert Generation(**told | {"members": joined.members}) == joined


def test_replicas_are_listed_by_number(keeper):
    found = keeper(12)
    assert _ends(found, r1=-9) is None
    assert found.current.change.endswith("; replicas 0, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 11 continue")


def test_all_ranks_of_a_replica_end_with_one_and_come_back_together(keeper):
    found = keeper(3, width=2)
    _beat(found, 3, 5, "training step")
    assert _ends(found, r3=-9) is None
    assert found.current.members == {0: 0, 2: 0}
    assert found.current.change.startswith("replica 1 left: rank 3 (dp=3) was killed by SIGKILL, ")
    _settled(found)
    replica = found.replicas[1]
    found.store.set(f"ready/1/{replica.ranks[0]}", "")
    assert found.watch(None) is None
    assert found.current.number == 2  # half of it is present
    found.store.set(f"ready/1/{replica.ranks[1]}", "")
    assert found.watch(None) is None
    assert found.current.members == {0: 0, 1: 1, 2: 0}
    _beat(found, 5, 9, "evaluation")
    assert _ends(found, r5=-9) is None
    words = "rank 5 (dp=5) was killed by SIGKILL, last seen at step 9 (evaluation)"
    assert words in found.current.change


def test_heartbeat_is_read_under_the_rank_number_in_its_generation(keeper):
    found = keeper(3)
    _ends(found, r0=-9)
    _settled(found)
    _beat(found, 1, 8, "saving")  # the second of the remaining ones, rank 2 of all
    _ends(found, r2=-9)
    assert found.current.change == (
        "replica 2 left: rank 2 (dp=2) was killed by SIGKILL, last seen at step 8 (saving), 8.0 s "
        "ago; replica 1 continues"
    )


@pytest.mark.parametrize(("least", "stops"), [(1, False), (2, False), (3, True)])
def test_too_few_replicas_save_and_stop_and_the_run_has_failed(keeper, least, stops):
    found = keeper(3, least)
    assert _ends(found, r1=-9) is None
    assert found.current.stop == stops
    more = f"fewer replicas than --elastic {least} remain; replicas 0 and 2 save and stop"
    assert found.current.change.endswith(f"; {more if stops else 'replicas 0 and 2 continue'}")
    assert [replica.start for replica in found.replicas] == [0, 0 if stops else 1, 0]
    if not stops:
        return
    assert _ends(found, r0=0) is None  # the other one has not ended
    assert _ends(found, r2=0) == 1


@pytest.mark.parametrize("there", [None, "runs/step_00000004"])
def test_the_last_checkpoint_is_named_when_no_replica_is_left(keeper, monkeypatch, capsys, there):
    monkeypatch.setattr(module, "latest", lambda _: there)
    found = keeper(2)
    assert _ends(found, r0=-9, r1=7) == 7
    last = f"the last checkpoint is {there}" if there else "there is no checkpoint"
    assert capsys.readouterr().err.strip().endswith(f"; {last}")
    assert _ends(keeper(2), r0=-9, r1=-9) == 1


def test_a_refusal_or_a_run_that_is_given_up_ends_without_a_restart(keeper):
    found = keeper(3)
    assert _ends(found, r1=2) == 2  # the exit code of invalid arguments
    for codes, code in (({"r1": -9}, 1), ({"r1": 5, "r2": 1}, 5)):
        found = keeper(3)
        found.store.set("over", "")
        assert _ends(found, **codes) == code
        assert found.current.number == 1
        assert [replica.start for replica in found.replicas] == [0, 0, 0]


def test_a_replica_that_dies_before_it_joins_is_restarted_at_most_five_times(keeper, capsys):
    found = keeper(2)
    assert _ends(found, r1=-9) is None
    for start in range(2, 6):
        assert _ends(found, r1=-9) is None
        assert found.replicas[1].start == start
        said = "replica 1 left: rank 1 (dp=1) was killed by SIGKILL before it had joined"
        assert capsys.readouterr().err.strip() == f"warpweave: {said}"
    assert _ends(found, r1=-9) is None
    assert capsys.readouterr().err.strip().endswith("; replica 1 is not restarted")
    assert (found.current.number, found.replicas[1].processes) == (2, {})
    _settled(found)
    assert found.watch(None) is None
    assert _ends(found, r0=0) == 0


@pytest.mark.parametrize("there", [True, False])
def test_a_replica_that_dies_after_a_stop_is_not_started_again(keeper, there):
    """The others save and end. The exit code is that of the signal."""
    found = keeper(3, there=there)
    for name in ("r1", "r2"):
        assert _ends(found, 15, **{name: -9}) is None
    assert [replica.start for replica in found.replicas] == [0, 0, 0]
    assert [len(replica.processes) for replica in found.replicas] == [1, 0, 0]
    if there:
        assert found.current.replicas == [0]
        assert _ends(found, 15, r0=143) == 143


@pytest.mark.parametrize("least", [1, 2])
def test_a_run_begins_with_fewer_replicas_if_no_fewer_than_asked_for(keeper, capsys, least):
    found = keeper(2, least, there=False)
    for _ in range(6):
        code = _ends(found, r0=-9)
    said = capsys.readouterr().err
    assert "replica 0 is not restarted" in said
    assert ("fewer replicas than --elastic 2 remain" in said) == (least == 2)
    assert code == (1 if least == 2 else None)
    if least == 1:
        _ready(found, 1)
        assert found.watch(None) is None
        assert (found.current.members, found.current.change) == ({1: 0}, "")


def test_first_generation_waits_for_all_members_and_begins_once_settled(keeper):
    found = keeper(3, there=False)
    _ready(found, 0, 2)
    assert found.watch(None) is None
    assert found.current.number == 0
    _ready(found, 1)
    assert found.watch(None) is None
    assert (found.current.number, found.current.begun) == (1, False)
    found.store.add("settled/1", 2)
    assert _ends(found, r2=-9) is None
    assert not found.current.begun
    found.store.add("settled/2", 2)
    _ready(found, 2)
    assert found.watch(None) is None
    assert (found.current.number, found.current.begun) == (3, True)


@pytest.mark.parametrize(
    ("codes", "code"),
    [({"r0": 0, "r1": 0}, 0), ({"r0": 0, "r1": 1}, 1), ({"r0": 130, "r1": 0}, 130)],
)
def test_the_exit_code_is_the_largest_of_the_members(keeper, codes, code):
    assert _ends(keeper(2), **codes) == code


def test_member_that_does_not_end_is_waited_for_only_the_grace_time(keeper, clock):
    found = keeper(2)
    assert _ends(found, r0=0) is None
    clock.now += GRACE - 0.1
    assert found.watch(None) is None
    clock.now += 0.1
    assert found.watch(None) == 0


@pytest.mark.parametrize(
    ("failed", "hung"),
    # all failed: they report why, and end
    [([0], [1, 2]), ([0, 2], [1]), ([], []), ([0, 1, 2], [])],
)
def test_ranks_that_do_not_notice_failed_connections_in_time_are_ended(
    keeper, clock, capsys, failed, hung
):
    found = keeper(3)
    for rank in failed:
        found.store.set(f"failed/1/{rank}", "")
    assert found.watch(None) is None
    clock.now += GRACE - 0.1
    assert found.watch(None) is None
    assert capsys.readouterr().err == ""
    clock.now += 0.1
    found.watch(None)
    said = capsys.readouterr().err
    for rank in hung:
        assert f"rank {rank} (dp={rank}) hangs before its first step; killing it" in said
    assert said.count("hangs") == len(hung)
    assert found.current.replicas == [rank for rank in range(3) if rank not in hung]


def test_the_grace_time_begins_anew_with_a_generation(keeper, clock):
    found = keeper(3)
    found.store.set("failed/1/0", "")
    assert found.watch(None) is None
    clock.now += 3.0
    assert _ends(found, r2=-9) is None
    found.store.set("failed/2/0", "")
    assert found.watch(None) is None
    clock.now += GRACE - 0.1
    assert found.watch(None) is None
    assert found.current.replicas == [0, 1]
    clock.now += 0.1
    found.watch(None)
    assert found.current.replicas == [0]


@pytest.mark.parametrize(
    ("signal", "ends", "code", "printed"),
    [(None, 0, 0, True), (15, 143, 143, True), (2, 130, 130, True), (2, 0, 130, True),
     (15, 1, 1, False), (None, 3, 3, False)],
)  # fmt: skip
def test_result_is_printed_and_the_exit_code_reflects_the_forwarded_signal(
    keeper, capsys, signal, ends, code, printed
):
    found = keeper(2)
    processes = [p for replica in found.replicas for p in replica.processes.values()]
    found.store.set("result", '{"steps": 3}')
    watch = found.watch

    def watched(stop: int | None) -> int | None:
        if stop == signal:
            for process in processes:
                process.exitcode = ends
        else:
            os.kill(os.getpid(), signal)
        return watch(stop)

    found.start, found.watch = lambda: None, watched
    with pytest.raises(SystemExit, match=rf"^{code}$") if code else nullcontext():
        found.run()
    assert capsys.readouterr().out == '{"steps": 3}\n' * printed
