"""The rank at fault, found by heartbeats: ranks are threads here, each with its own heartbeat."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from warpweave.launch.heartbeat import Heartbeat, at_fault, last_beat, where
from warpweave.launch.session import Session
from warpweave.parallel.mesh import Mesh

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
LATE = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:79] Timed out waiting 8000ms for recv")


def _stuck(store: dist.Store, ended: threading.Event) -> None:
    while not ended.is_set():
        time.sleep(0.01)


def _waits(store: dist.Store, ended: threading.Event) -> None:
    store.wait(["the end"])  # as in a collective: in C++, without the interpreter's lock


@contextlib.contextmanager
def _ranks(*mains: Callable | None) -> Iterator[list[Session]]:
    """Run these functions in the main threads of sessions; None is a
    session without a heartbeat."""
    store, ended, mesh = dist.HashStore(), threading.Event(), Mesh(tp=len(mains))
    sessions = []
    for rank, main in enumerate(mains):
        session = Session(torch.device("cpu"), rank, len(mains), store, 9.0, mesh)
        session.beat(3, "training step")
        sessions.append(session)
        if main is None:
            continue
        thread = threading.Thread(target=main, args=(store, ended), daemon=True)
        thread.start()
        session.heartbeat._main = thread.ident
        session.heartbeat.start()
    yield sessions
    ended.set()
    store.set("the end", "")
    for session in sessions:
        session.heartbeat.stop()


@pytest.mark.parametrize("survivor", [0, 2, 3])
@pytest.mark.parametrize("error", [LOST, LATE], ids=["lost", "late"])
def test_a_rank_without_a_beat_is_named_alone_by_whoever_asks_first(error, survivor):
    """This holds next to a rank that is busy elsewhere and has not noticed yet."""
    with _ranks(_waits, None, _stuck, _waits) as sessions:
        began = time.monotonic()
        said = sessions[survivor].explain(error)
        assert time.monotonic() - began < 20
        assert re.fullmatch(
            r"no heartbeat from rank 1 \(tp=1\): it died or is hanging, last seen at step 3 "
            r"\(training step\), \d+\.\d s ago", said
        )  # fmt: skip
        assert [sessions[other].explain(LOST) for other in (0, 2, 3)] == [None] * 3


def test_after_a_timeout_the_rank_that_waits_for_nobody_is_named():
    with _ranks(_waits, _waits, _stuck, _waits) as sessions:
        sessions[0].store.set("failed/3", "lost")  # it has ended, without further beats
        sessions[3].heartbeat.stop()
        said = sessions[1].explain(LATE)
    assert re.fullmatch(
        r"rank 2 \(tp=2\) hangs in test_heartbeat\.py:\d+ \(_stuck\), last seen at step 3 "
        r"\(training step\), \d+\.\d s ago", said
    )  # fmt: skip


def test_nobody_is_named_where_nobody_is_known():
    with _ranks(_waits, _waits, _stuck) as sessions:
        assert sessions[0].explain(LOST) == f"rank 0 (tp=0): RuntimeError: {LOST}"
    with _ranks(_waits, _waits) as sessions:  # each in a different collective
        assert sessions[0].explain(LATE) == f"rank 0 (tp=0): RuntimeError: {LATE}"


def test_a_rank_that_says_why_is_not_blamed_by_those_that_wait_for_its_beat():
    with _ranks(_waits, None, None) as (first, second, _):  # the third one is gone for it
        threading.Timer(0.2, lambda: second.explain(TypeError("no"))).start()
        assert at_fault(first.store, 0, 3) == {}


def test_beats_tell_of_a_main_thread_that_does_not_and_end_with_their_store():
    store = dist.HashStore()
    heartbeat = Heartbeat(store, 5)
    assert last_beat(store, 5) is None
    heartbeat.note(7, "saving")
    first = last_beat(store, 5)
    assert first[:2] == (7, "saving")
    heartbeat.start()
    beat, deadline = first, time.monotonic() + 20
    while (beat.alive <= first.alive or ".py:" not in beat.place) and time.monotonic() < deadline:
        time.sleep(0.3)
        beat = last_beat(store, 5)
    assert beat.alive > first.alive
    assert (beat.when, beat.waits) == (first.when, False)
    heartbeat.stop()


@pytest.mark.parametrize("closed", [True, False])
def test_a_process_ends_after_the_beat_under_way(closed):
    """A beat that returned from the store's C++ during interpreter
    shutdown would abort the process."""
    program = """if True:
        import sys, threading, time
        from warpweave.launch.heartbeat import Heartbeat

        class Store:
            under_way = threading.Event()
            clone = lambda self: self

            def set(self, key, value):
                print("begun", flush=True)
                self.under_way.set()
                time.sleep(0.5)
                print("ended", flush=True)

        heartbeat = Heartbeat(Store(), 3)
        heartbeat.start()
        Store.under_way.wait()
        if sys.argv[1] == "True":
            heartbeat.stop()
            heartbeat.stop()
            print("closed", flush=True)"""
    words = [sys.executable, "-c", program, str(closed)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split()[-2:] == (["ended", "closed"] if closed else ["begun", "ended"])


def test_rank_that_reports_its_loss_and_then_ends_is_not_blamed():
    with _ranks(None, None, None) as (asks, *_):
        now = [100.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds
            asks.store.set("failed/1", str(LOST))

        clock = mock.Mock(monotonic=lambda: now[0], time=time.time, sleep=sleep)
        with mock.patch("warpweave.launch.heartbeat.time", clock):
            found = at_fault(asks.store, 0, 3)
    assert [*found] == [2]


def test_a_frame_between_two_lines_is_nowhere_in_particular():
    """Python gives it no line number, which once killed a heartbeat."""
    frame = mock.Mock(f_lineno=None)
    frame.f_code = _stuck.__code__
    assert where(frame) == (False, "test_heartbeat.py:0 (_stuck)")


def test_a_frame_within_torchs_collectives_waits_whatever_its_line_says():
    code = dist.get_world_size.__code__
    frame = mock.Mock(f_lineno=code.co_firstlineno, f_code=code)
    line = f"{code.co_firstlineno} (get_world_size)"
    assert where(frame) == (True, f"distributed_c10d.py:{line}")
    assert where(None) == (False, "no place")


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("RuntimeError: Timed out waiting 8000ms for recv", True),
        ("RuntimeError: wait timed out", True),
        ("DistBackendError: NCCL communicator was aborted: timeout", True),
        ("DistStoreError: Timeout after 9 s", True),
        (f"RuntimeError: {LOST}", False),
        ("", False),
    ],
)
def test_rank_beating_outside_collectives_is_blamed_only_after_a_timeout(text, late):
    """Every rank beats. The timeout may be that of a rank other than the one that asks."""
    store, now = dist.HashStore(), [100.0]
    store.set("failed/0", str(LOST))
    store.set("failed/4", text)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        for rank, waits in enumerate((True, False, True, False, False)):
            beat = [rank, "saving", 90.02, now[0], waits, f"x.py:{rank} (f)"]
            store.set(f"beat/{rank}", json.dumps(beat))

    sleep(0)
    clock = mock.Mock(monotonic=lambda: now[0], time=lambda: now[0], sleep=sleep)
    with mock.patch("warpweave.launch.heartbeat.time", clock):
        found = at_fault(store, 0, 5)
    seen = [(r, f"{{}} hangs in x.py:{r} (f), last seen at step {r} (saving), 10.0 s ago")
            for r in (1, 3)]  # fmt: skip
    assert found == (dict(seen) if late else {})


@pytest.mark.parametrize("key", ["causes", "speakers"])
def test_once_a_rank_has_said_who_is_at_fault_nobody_is_waited_for_or_named(key):
    store, clock = dist.HashStore(), mock.Mock(monotonic=lambda: 0.0)
    clock.sleep.side_effect = AssertionError
    store.add(key, 1)
    with mock.patch("warpweave.launch.heartbeat.time", clock):
        assert at_fault(store, 0, 3) == {}


@pytest.mark.parametrize(
    ("line", "waits"),
    [("event.wait(5)", True), ("    if not work.wait():", True), ("_wait(store)", False),
     ("await(store)", False), ("x.waits(1)", False), ("x.wait = 3", False), ("", False)],
)  # fmt: skip
def test_a_frame_waits_whose_line_calls_a_wait(monkeypatch, line, waits):
    monkeypatch.setattr("linecache.getline", lambda file, number: line)
    frame = mock.Mock(f_lineno=7, f_code=_stuck.__code__)
    assert where(frame) == (waits, "test_heartbeat.py:7 (_stuck)")
