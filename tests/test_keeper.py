"""What the keeper of an elastic run makes of ranks that end: who goes on, in which words, and with
which exit code. No process is started."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from warpweave import heartbeat
from warpweave.config import ParallelPlan
from warpweave.elastic import run as module
from warpweave.elastic.membership import Generation
from warpweave.elastic.run import Keeper, _listed
from warpweave.train_config import TrainConfig


class _Process(SimpleNamespace):
    """One that runs until it is killed, or told how it ends."""

    def __init__(self) -> None:
        super().__init__(exitcode=None, terminated=0)

    def kill(self) -> None:
        self.exitcode = -9

    def terminate(self) -> None:
        self.terminated += 1


class _Store(dist.HashStore):
    port = 5


@pytest.fixture
def keeper(monkeypatch):
    """Makes a keeper of `replicas` of `width` ranks, which have all been let in."""

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
            assert found._watch() is None
            assert found.current.replicas == [*range(replicas)]
            _settled(found)
        return found

    return make


def _ready(keeper: Keeper, *numbers: int) -> None:
    """All ranks of these replicas wait to be let in."""
    for number in numbers:
        replica = keeper.replicas[number]
        for rank in replica.ranks:
            keeper.store.set(f"ready/{replica.start}/{rank}", "")


def _settled(keeper: Keeper) -> None:
    """All ranks of the generation have the state."""
    ranks = sum(len(keeper.replicas[n].ranks) for n in keeper.current.members)
    keeper.store.add(f"settled/{keeper.current.number}", ranks)


def _ends(keeper: Keeper, **codes: int) -> int | None:
    """These ranks (r0, r1, ...) have ended with these codes; what the keeper makes of it."""
    for name, code in codes.items():
        rank = int(name[1:])
        keeper.replicas[keeper.seats[rank].replica].processes[rank].exitcode = code
    return keeper._watch()


def _beat(keeper: Keeper, rank: int, step: int, phase: str) -> None:
    keeper.stores[-1].set(f"beat/{rank}", json.dumps([step, phase, 42.0]))


@pytest.mark.parametrize(
    ("replicas", "words"),
    [([3], "replica 3"), ([2, 0], "replicas 0 and 2"), ([11, 2, 0, 10], "replicas 0, 2, 10 and 11")]
)  # fmt: skip
def test_replicas_are_listed_in_their_order(replicas, words):
    assert _listed(replicas) == words


@pytest.mark.parametrize(
    ("dead", "words"),
    [
        ({"r1": -9}, "replica 1 left: rank 1 (dp=1) was killed by SIGKILL, last seen at step 7 "
         "(saving), 8.0 s ago; replicas 0 and 2 go on"),
        ({"r1": 3}, "replica 1 left: rank 1 (dp=1) failed with 3, last seen at step 7 (saving), "
         "8.0 s ago; replicas 0 and 2 go on"),
        ({"r2": -11}, "replica 2 left: rank 2 (dp=2) was killed by SIGSEGV before its first step; "
         "replicas 0 and 1 go on"),
        ({"r0": -9, "r2": 1}, "replica 0 left: rank 0 (dp=0) was killed by SIGKILL before its "
         "first step; replica 2 left: rank 2 (dp=2) failed with 1 before its first step; "
         "replica 1 goes on"),
    ],
)  # fmt: skip
def test_the_others_go_on_and_those_that_died_are_started_again_and_let_in(keeper, dead, words):
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
    assert found._watch() is None
    assert found.current is now  # those that go on have not settled yet
    _settled(found)
    assert found._watch() is None
    joined = found.current
    assert joined.members == {n: int(n in gone) for n in range(3)}
    assert (joined.number, joined.lost, joined.stop) == (3, False, False)
    assert joined.change == f"{_listed(gone)} {'joins' if len(gone) == 1 else 'join'}"
    told = json.loads(found.store.get("generation/3"))
    assert Generation(**told | {"members": joined.members}) == joined


def test_all_ranks_of_a_replica_of_several_end_with_one_and_come_back_together(keeper):
    found = keeper(3, width=2)
    _beat(found, 3, 5, "training step")
    assert _ends(found, r3=-9) is None
    assert found.current.members == {0: 0, 2: 0}
    assert found.current.change.startswith("replica 1 left: rank 3 (dp=3) was killed by SIGKILL, ")
    _settled(found)
    replica = found.replicas[1]
    found.store.set(f"ready/1/{replica.ranks[0]}", "")
    assert found._watch() is None
    assert found.current.number == 2  # half of it is there
    found.store.set(f"ready/1/{replica.ranks[1]}", "")
    assert found._watch() is None
    assert found.current.members == {0: 0, 1: 1, 2: 0}
    _beat(found, 5, 9, "evaluation")
    assert _ends(found, r5=-9) is None
    assert "rank 5 (dp=5) was killed by SIGKILL, last seen at step 9 (evaluation)" in (
        found.current.change
    )


def test_a_rank_is_last_seen_under_the_number_that_it_has_in_its_generation(keeper):
    found = keeper(3)
    _ends(found, r0=-9)
    _settled(found)
    _beat(found, 1, 8, "saving")  # rank 2 of all
    _ends(found, r2=-9)
    assert found.current.change == (
        "replica 2 left: rank 2 (dp=2) was killed by SIGKILL, last seen at step 8 (saving), 8.0 s "
        "ago; replica 1 goes on"
    )


@pytest.mark.parametrize(("least", "stops"), [(1, False), (2, False), (3, True)])
def test_too_few_save_and_stop_and_the_run_has_failed(keeper, least, stops):
    found = keeper(3, least)
    assert _ends(found, r1=-9) is None
    assert found.current.stop == stops
    more = f"fewer than the {least} of --elastic are left; replicas 0 and 2 save and stop"
    assert found.current.change.endswith(f"; {more if stops else 'replicas 0 and 2 go on'}")
    assert [replica.start for replica in found.replicas] == [0, 0 if stops else 1, 0]
    if not stops:
        return
    assert _ends(found, r0=0) is None  # until both have
    assert _ends(found, r2=0) == 1


@pytest.mark.parametrize("there", [None, "runs/step_00000004"])
def test_nobody_is_left_and_what_remains_is_said(keeper, monkeypatch, capsys, there):
    monkeypatch.setattr(module, "latest", lambda _: there)
    found = keeper(2)
    assert _ends(found, r0=-9, r1=7) == 7
    last = f"the last checkpoint is {there}" if there else "there is no checkpoint"
    assert capsys.readouterr().err.strip().endswith(f"; {last}")
    assert _ends(keeper(2), r0=-9, r1=-9) == 1


def test_a_refusal_and_a_run_that_is_given_up_end_it_and_nobody_is_started_again(keeper):
    found = keeper(3)
    assert _ends(found, r1=2) == 2
    found = keeper(3)
    found.store.set("over", "")
    assert _ends(found, r1=-9) == 1
    assert found.current.number == 1
    found = keeper(3)
    found.store.set("over", "")
    assert _ends(found, r1=5, r2=1) == 5


def test_a_replica_that_dies_as_it_joins_is_started_again_five_times(keeper, capsys):
    found = keeper(2)
    assert _ends(found, r1=-9) is None
    for start in range(2, 6):
        assert _ends(found, r1=-9) is None
        assert found.replicas[1].start == start
        said = capsys.readouterr().err.strip()
        assert said == (
            "warpweave: replica 1 left: rank 1 (dp=1) was killed by SIGKILL before it had joined"
        )
    assert _ends(found, r1=-9) is None
    assert capsys.readouterr().err.strip().endswith("; replica 1 is not started again")
    assert (found.current.number, found.replicas[1].processes) == (2, {})
    _settled(found)
    assert found._watch() is None
    assert _ends(found, r0=0) == 0


@pytest.mark.parametrize("least", [1, 2])
def test_before_a_run_has_begun_as_many_as_asked_for_must_come(keeper, capsys, least):
    found = keeper(2, least, there=False)
    for _ in range(6):
        code = _ends(found, r0=-9)
    said = capsys.readouterr().err
    assert "replica 0 is not started again" in said
    assert ("fewer than the 2 of --elastic are left" in said) == (least == 2)
    assert code == (1 if least == 2 else None)
    if least == 1:
        _ready(found, 1)
        assert found._watch() is None
        assert (found.current.members, found.current.change) == ({1: 0}, "")


def test_a_generation_begins_when_all_are_there_and_has_begun_once_it_has_settled(keeper):
    found = keeper(3, there=False)
    _ready(found, 0, 2)
    assert found._watch() is None
    assert found.current.number == 0
    _ready(found, 1)
    assert found._watch() is None
    assert (found.current.number, found.current.begun) == (1, False)
    found.store.add("settled/1", 2)
    assert _ends(found, r2=-9) is None
    assert not found.current.begun
    found.store.add("settled/2", 2)
    _ready(found, 2)
    assert found._watch() is None
    assert (found.current.number, found.current.begun) == (3, True)


@pytest.mark.parametrize(
    ("codes", "code"),
    [({"r0": 0, "r1": 0}, 0), ({"r0": 143, "r1": 143}, 143), ({"r0": 0, "r1": 1}, 1),
     ({"r0": 130, "r1": 0}, 130)],
)  # fmt: skip
def test_the_exit_code_is_the_worst_of_the_members(keeper, codes, code):
    assert _ends(keeper(2), **codes) == code


def test_those_that_do_not_come_to_the_end_are_not_waited_for(keeper, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    found = keeper(2)
    assert _ends(found, r0=0) is None
    clock[0] = 100.0 + module._GRACE - 0.1
    assert found._watch() is None
    clock[0] = 100.0 + module._GRACE
    assert found._watch() == 0


@pytest.mark.parametrize("failed", [[0], [0, 2], [], [0, 1, 2]])
def test_ranks_that_do_not_notice_that_connections_have_failed_are_ended(
    keeper, monkeypatch, capsys, failed
):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    found = keeper(3)
    for rank in failed:
        found.store.set(f"failed/1/{rank}", "")
    assert found._watch() is None
    clock[0] = 100.0 + module._GRACE - 0.1
    assert found._watch() is None
    assert capsys.readouterr().err == ""
    clock[0] = 100.0 + module._GRACE
    hung = {1: "rank 1 (dp=1)", 2: "rank 2 (dp=2)"}
    silent = [rank for rank in range(3) if rank not in failed] if 0 < len(failed) < 3 else []
    found._watch()
    said = capsys.readouterr().err
    for rank in silent:
        assert f"{hung[rank]} hangs before its first step: it is ended" in said
    assert said.count("hangs") == len(silent)
    assert found.current.replicas == [rank for rank in range(3) if rank not in silent]
    if silent:  # those of the next generation have as long
        found.store.set(f"failed/2/{failed[0]}", "")
        assert found._watch() is None
        assert capsys.readouterr().err == ""


def test_ranks_of_a_new_generation_have_as_long_to_notice_as_those_before(keeper, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    found = keeper(3)
    found.store.set("failed/1/0", "")
    assert found._watch() is None
    clock[0] = 103.0
    assert _ends(found, r2=-9) is None
    found.store.set("failed/2/0", "")
    assert found._watch() is None
    clock[0] = 103.0 + module._GRACE - 0.1
    assert found._watch() is None
    assert found.current.replicas == [0, 1]
    clock[0] = 103.0 + module._GRACE
    found._watch()
    assert found.current.replicas == [0]


@pytest.mark.parametrize(
    ("signal", "ends", "code", "printed"),
    [(None, 0, 0, True), (15, 143, 143, True), (2, 130, 130, True), (2, 0, 130, True),
     (15, 1, 1, False), (None, 3, 3, False)],
)  # fmt: skip
def test_a_run_prints_its_last_line_and_ends_by_the_signal_that_it_passed_on(
    keeper, capsys, signal, ends, code, printed
):
    found = keeper(2)
    processes = [p for replica in found.replicas for p in replica.processes.values()]
    found.interrupt.number = signal
    found.store.set("result", '{"steps": 3}')
    watch, seen = found._watch, []

    def watched() -> int | None:
        seen.append(1)
        if len(seen) == 3:
            for process in processes:
                process.exitcode = ends
        return watch()

    found._watch = watched
    found._start = lambda number: None
    assert found.run() == code
    assert capsys.readouterr().out == '{"steps": 3}\n' * printed
    assert {process.terminated for process in processes} == {int(signal is not None)}
