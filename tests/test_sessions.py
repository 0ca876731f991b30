"""Sessions of ranks alone: their messages and entries in the store, its place, renewed groups."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_launch import LOST, _sessions

from warpweave.launch.session import Session, _store
from warpweave.parallel.mesh import Mesh


@pytest.mark.parametrize("launched", [False, True])
def test_silent_ranks_are_named_in_order_by_a_rank_or_by_its_launcher(monkeypatch, launched):
    monkeypatch.setattr("warpweave.launch.heartbeat.SILENCE", 0.0)
    sessions = _sessions(12)
    store = sessions[1].store
    sessions[1].launched = launched
    for rank in {*range(12)} - {2, 10, 11}:
        store.set(f"failed/{rank}", "lost")
    said = sessions[1].explain(RuntimeError(LOST))
    words = "; ".join(
        f"no heartbeat from rank {r} (tp={r}): it died or is hanging before its first step"
        for r in (2, 10, 11)
    )
    if launched:
        assert (said, store.get("verdict").decode()) == (None, words)
    else:
        assert (said, store.check(["verdict"])) == (words, False)


@pytest.mark.parametrize("error", [RuntimeError(LOST), TypeError("no")])
@pytest.mark.parametrize(
    ("launched", "keeper"), [(False, "the launcher"), (True, "the process that started the ranks")]
)
def test_a_rank_whose_store_is_gone_names_the_process_that_kept_it(error, launched, keeper):
    session = _sessions(4)[3]
    session.launched = launched
    session.store = mock.Mock(**dict.fromkeys(("add.side_effect", "set.side_effect"), RuntimeError))
    assert session.explain(error) == f"rank 3 (tp=3) is stopping because {keeper} is gone"


def test_only_one_rank_reports_the_failure_and_each_stores_its_own_error():
    class OddError(Exception):
        pass

    for errors, said, left in (
        ((ValueError("a b"), TypeError("c")), "rank 0 (tp=0) failed: a b", ("a b", "TypeError: c")),
        ((TypeError("c"), ValueError("a b")), "rank 0 (tp=0) failed: TypeError: c",
         ("TypeError: c", "a b")),
        ((OddError("one\n line"), OddError("x")), "one line", ("one line", "x")),
        ((KeyError(), KeyError()), "rank 0 (tp=0) failed: KeyError", ("KeyError", "KeyError")),
    ):  # fmt: skip
        first, second, third = _sessions(3)
        assert first.explain(errors[0], (OddError,)) == said
        assert second.explain(errors[1], (OddError,)) is None
        assert third.explain(RuntimeError(LOST)) is None
        found = [first.store.get(f"failed/{rank}").decode() for rank in range(3)]
        assert found == [*left, f"RuntimeError: {LOST}"]


def test_groups_are_made_anew_under_a_name_of_their_own_each_time(monkeypatch):
    made, ended = [], []
    monkeypatch.setattr("warpweave.launch.session.connect", lambda *given: made.append(given))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(len(made)))
    session = _sessions(4)[2]
    for world in (4, 3, 3):
        session.renew(Mesh(cp=world))
        assert (session.world, session.mesh) == (world, Mesh(cp=world))
        device, store, *rest = made[-1]
        assert (device, rest) == (session.device, [2, world, 9.0])
        assert not store.check(["here"])
        store.set("here", "")
    assert ended == [0, 1, 2]
    assert session.heartbeat._store is session.store
    alone = Session(torch.device("cpu"), 0, 1, None, 9.0, Mesh())
    alone.renew(Mesh())
    assert len(made) == 3


@pytest.mark.parametrize(
    ("rank", "local_world", "agent", "hosts"),
    [(0, 4, None, True), (0, 2, None, True), (1, 4, None, False), (0, 4, "True", False),
     (0, 2, "True", False), (3, 2, "True", False), (0, 4, "False", True)],
)  # fmt: skip
def test_rank_0_keeps_the_store_unless_launcher_does(monkeypatch, rank, local_world, agent, hosts):
    """It is on loopback if all ranks are on this machine."""
    made = mock.Mock(return_value=dist.HashStore())
    monkeypatch.setattr(dist, "TCPStore", made)
    listener = mock.Mock(detach=lambda: 77)
    monkeypatch.setattr("warpweave.launch.session.loopback_listener", lambda port: listener)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29")
    if agent is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    limit = timedelta(seconds=5)
    _store(rank, 4, local_world, limit)
    own = hosts and local_world == 4
    more = {"master_listen_fd": 77} if own else {}
    assert made.call_args == mock.call(
        "127.0.0.1" if own else "node7", 29, 4, is_master=hosts, timeout=limit, **more
    )
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
