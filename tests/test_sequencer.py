"""Server 0 with a script in place of its workers and a scripted clock: its answers, its messages to
the other server, which workers it drops and when, and what it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from warpweave.parallel.data.optimizer import SGD
from warpweave.parallel.server import server
from warpweave.parallel.server.server import Notes, Server, ServerPlan
from warpweave.parallel.server.shard import Shard, digest, spread
from warpweave.parallel.shard import ParamRecord

RECORDS = [ParamRecord("big", (4,)), ParamRecord("small", (3,))]
DIGEST = digest(RECORDS, torch.float32)
LONG = 10.0  # timeout in seconds
ASYNC: dict[str, Any] = {"staleness": None, "joint": False}


def hello(visitor: int, worker: int | None = None, digest: str = DIGEST) -> dict[str, Any]:
    return {"op": "hello", "visitor": visitor, "worker": worker, "digest": digest}


def pull(visitor: int) -> dict[str, Any]:
    return {"op": "pull", "visitor": visitor}


def push(visitor: int, count: int = 2, loss: float = 0.5) -> dict[str, Any]:
    return {"op": "push", "visitor": visitor, "count": count, "loss": loss}


def done(visitor: int) -> dict[str, Any]:
    return {"op": "done", "visitor": visitor}


def _stand_in(monkeypatch, letters: list, take: Callable, link: type) -> None:
    """Make mailboxes that record in `letters` what is put in, and return what ``take(name, wait)``
    returns; `link` replaces links."""

    class Box:
        def __init__(self, store: Any, name: str) -> None:
            self.name = name

        def put(self, **header: Any) -> None:
            letters.append((self.name, header))

        def take(self, wait: float) -> dict[str, Any] | None:
            return take(self.name, wait)

    monkeypatch.setattr(server, "Mailbox", Box)
    monkeypatch.setattr(server, "Pair", link)


class _Run(Notes):
    """A run of server 0. A step of the script is a header that arrives, or seconds without one;
    after the script the run is stopped. `letters` are (mailbox, header) of the server's messages.

    `broken` selects the failure: ("join", 3) is the join of visitor 3. All gradients are `value`.
    """

    def __init__(self, monkeypatch, plan, script, workers=(), state=None, broken=(), value=1.0):
        self.letters: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[str] = []
        self.links: list[str] = []
        self.saved: list[tuple[float, dict[str, Any]]] = []
        self.updates: list[tuple[int, list[tuple[int, int]]]] = []
        self.now, run, steps = 1000.0, self, iter(script)

        def take(name: str, wait: float) -> dict[str, Any] | None:
            step = next(steps, {"op": "stop"})
            if isinstance(step, dict):
                return step
            self.now += step
            return None

        class Link:
            def __init__(self, store: Any, name: str, side: int, timeout: float) -> None:
                assert (side, timeout) == (0, plan.timeout)
                run.links.append(name)
                self.visitor = int(name.split("/")[1]) if "visitor" in name else 0
                self.fail("join")

            def fail(self, kind: str) -> None:
                if (kind, self.visitor) in broken:
                    raise RuntimeError(kind)

            def send(self, x: torch.Tensor) -> Any:
                self.fail("pull")
                return SimpleNamespace(wait=lambda: None)

            def receive(self, x: torch.Tensor) -> None:
                self.fail("push")
                x.fill_(value if self.visitor else 0.0)

        _stand_in(monkeypatch, self.letters, take, Link)
        monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: run.now))
        records = [*RECORDS, ParamRecord("tiny", (2,))][: max(2, plan.servers)]
        shard = Shard(spread(records, plan.servers)[0], lambda r: torch.zeros(r.shape), SGD(0.0))
        how = {"records": records, "lr": lambda clock: 1.0, "notes": self}
        self.server = Server(dist.HashStore(), 0, plan, shard, **how)
        self.stopped = self.server.serve(workers, state)

    def update(self, version, lr, norm, terms):
        self.updates.append((version, [(t.worker, t.clock) for t in terms]))

    def save(self, state: dict[str, Any], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.names = [name for name, _ in tensors]
        self.saved.append((self.now, state))

    def say(self, line: str) -> None:
        self.lines.append(line)

    def answers(self, op: str, *fields: str) -> list[tuple[Any, ...]]:
        """Return (visitor, fields of the header) of the letters to workers with operation `op`."""
        return [
            (int(box.split("/")[1]), *(header[name] for name in fields))
            for box, header in self.letters
            if box.startswith("visitor/") and header["op"] == op
        ]

    @property
    def events(self) -> list[tuple[Any, ...]]:
        """Return (op, worker or workers) of the messages to server 1."""
        told = [header for box, header in self.letters if box == "server/1"]
        return [(h["op"], h.get("worker", h.get("workers"))) for h in told]


def _lost(run: _Run) -> list[tuple[Any, ...]]:
    """Return (worker, clock, reason) from the lines about lost workers."""
    found = []
    for line in run.lines:
        head, _, why = line.partition(": ")
        if " was lost at clock " in head:
            worker, clock = head.removeprefix("worker ").split(" was lost at clock ")
            found.append((int(worker), int(clock), why))
    return found


# ---------------------------------------------------------------- joining


def test_no_two_workers_ever_have_the_same_number(monkeypatch):
    script = [
        hello(1, 1),  # as expected
        hello(2, 1),  # it has joined already
        hello(3),
        hello(4, 7),  # this number was never given
        hello(5),
        {"op": "lost", "worker": 1},
        hello(6, 1),
        hello(7, 0),  # expected, and in time
    ]
    run = _Run(monkeypatch, ServerPlan(timeout=LONG, **ASYNC), script, workers=[0, 1])
    given = [(1, 1), (2, 2), (3, 3), (4, 7), (5, 8), (6, 9), (7, 0)]
    assert run.answers("welcome", "worker") == given
    assert [line for line in run.lines if "joined" in line] == [
        f"worker {worker} joined at clock 0" for _, worker in given
    ]
    assert run.answers("gone", "why") == [(1, "its process ended")]


def test_a_worker_resumes_at_its_saved_clock_and_a_new_one_at_the_lowest(monkeypatch):
    state = {"clocks": {"0": 5, "1": 3, "4": 6}, "version": 14, "following": 6, "floor": 3}
    script = [hello(1, 4), hello(2, 0), hello(3), hello(4, 5), hello(5, 1)]
    run = _Run(monkeypatch, ServerPlan(timeout=LONG, **ASYNC), script, [0, 1, 4], state)
    found = run.answers("welcome", "worker", "clock")
    assert found == [(1, 4, 6), (2, 0, 5), (3, 6, 3), (4, 7, 3), (5, 1, 3)]
    assert run.lines == [f"worker {worker} joined at clock {clock}" for _, worker, clock in found]
    assert not run.saved, "nothing is new since the checkpoint"


def test_a_worker_of_another_model_is_refused_with_both_digests(monkeypatch):
    other = digest(RECORDS, torch.float64)
    script = [hello(3, 0, other), hello(4, 0)]  # the next one is welcome
    run = _Run(monkeypatch, ServerPlan(timeout=LONG), script, workers=[0])
    ((visitor, why),) = run.answers("refused", "why")
    assert visitor == 3
    assert why.startswith("this worker has a different model: the digest of its parameter names, ")
    assert why.endswith(f"is {other[:12]}, but that of the servers' model is {DIGEST[:12]}")
    assert run.answers("welcome", "worker") == [(4, 0)]


# ---------------------------------------------------------------- leaving


def test_the_timeout_runs_only_while_it_is_a_workers_turn(monkeypatch):
    """Worker 1 hangs while worker 0 waits for it, then worker 0 hangs; worker 2 never arrives."""
    script = [
        hello(1, 0), hello(2, 1), pull(1), pull(2), push(1), pull(1),
        LONG, 0.25, LONG - 0.25, 0.5,
    ]  # fmt: skip
    run = _Run(monkeypatch, ServerPlan(timeout=LONG), script, workers=[0, 1, 2])
    why = "no message for 10 s; the worker has died or is hanging"
    assert _lost(run) == [(2, 0, why), (1, 0, why), (0, 1, why)]
    assert run.answers("gone", "why") == [(2, why), (1, why)]
    assert run.updates == [(1, [(0, 0)])]
    for seconds, lost in ((LONG, 0), (LONG + 0.25, 2)):  # exactly at the timeout it is not late yet
        run = _Run(monkeypatch, ServerPlan(timeout=LONG), [*script[:6], seconds], [0, 1, 2])
        assert len(_lost(run)) == lost
    for pause in (script[:2], script[:4], [*script[:4], push(1), push(2)]):
        for seconds, lost in ((LONG, 0), (LONG + 0.25, 2)):
            run = _Run(monkeypatch, ServerPlan(timeout=LONG), [*pause, seconds], [0, 1])
            assert len(_lost(run)) == lost, pause


@pytest.mark.parametrize("workers", [[], [0]])
def test_a_worker_that_joins_has_the_whole_timeout_for_its_first_request(workers, monkeypatch):
    """The timeout counts from the time it joins, expected or not."""
    came = [5.0, hello(1, 0), LONG]
    for more, lost in (([], []), ([0.25], [0])):
        plan = ServerPlan(timeout=LONG, **ASYNC)
        run = _Run(monkeypatch, plan, [*came, *more], workers=workers)
        assert [worker for worker, *_ in _lost(run)] == lost


REASONS = {
    "join": "it did not connect",
    "pull": "its connection failed",
    "push": "its gradient did not arrive",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_broken_link_drops_only_its_own_worker(kind, monkeypatch):
    script = [hello(1), hello(2), pull(1), pull(2), push(1), push(2), pull(2)]
    plan = ServerPlan(timeout=LONG, **ASYNC)
    run = _Run(monkeypatch, plan, script, broken=[(kind, 1)])
    assert _lost(run) == [(0, 0, REASONS[kind])]
    assert run.answers("gone", "why")[0] == (1, REASONS[kind])
    assert run.updates == [(1, [(1, 0)])]
    assert run.answers("granted", "version")[-2:] == [(2, 0), (2, 1)]


def test_why_workers_are_dropped_and_what_a_dropped_one_is_told(monkeypatch):
    start = [hello(1), hello(2), pull(1)]
    plan = ServerPlan(2, timeout=LONG, **ASYNC)
    run = _Run(monkeypatch, plan, [*start, {"op": "failed", "visitor": 1}])
    assert _lost(run) == [(0, 0, "its connection to a server failed")]
    run = _Run(monkeypatch, plan, [*start, pull(1)])
    assert _lost(run) == [(0, 0, "it pulled again without pushing a gradient first")]
    words = "this worker was already dropped"
    late = [pull(1), push(1), done(1), *({"op": op, "visitor": 1} for op in ("leave", "failed"))]
    run = _Run(monkeypatch, plan, [*start, {"op": "lost", "worker": 0}, *late])
    assert run.answers("gone", "why") == [(1, "its process ended"), *[(1, words)] * 3]
    run = _Run(monkeypatch, plan, [*start, *[{"op": "lost", "worker": w} for w in (2, 0, 0)]])
    assert _lost(run) == [(0, 0, "its process ended")], "nobody else was there"


def test_requests_of_a_worker_wait_until_every_server_has_its_gradient(monkeypatch):
    """This includes server 1. The gradient of a worker that is lost earlier is discarded."""
    plan = ServerPlan(2, timeout=LONG, **ASYNC)
    taken = {"op": "taken", "visitor": 1, "server": 1}
    script = [hello(1), hello(2), pull(1), push(1), pull(1), pull(2), taken, push(1), taken]
    run = _Run(monkeypatch, plan, script)
    assert run.events == [
        ("join", 0), ("join", 1), ("pull", 0), ("take", 0), ("pull", 1), ("update", [0]),
        ("pull", 0), ("take", 0), ("update", [0]), ("save", None), ("stop", None),
    ]  # fmt: skip
    assert run.updates == [(1, [(0, 0)]), (2, [(0, 1)])]
    assert run.answers("granted", "version") == [(1, 0), (2, 0), (1, 1)]
    for gone in ({"op": "lost", "worker": 0}, {"op": "failed", "visitor": 1}):
        for more, discard in ([], True), ([taken], False):
            run = _Run(monkeypatch, plan, [*script[:4], *more, gone])
            (left,) = (h for box, h in run.letters if box == "server/1" and h["op"] == "leave")
            assert left["discard"] == discard
            assert len(run.updates) == len(more)
            assert len(_lost(run)) == 1
    # Several requests, in their order: it asks for weights, and then leaves.
    run = _Run(monkeypatch, plan, [*script[:5], done(1), taken, pull(2)])
    assert run.events[3:] == [
        ("take", 0), ("update", [0]), ("leave", 0), ("pull", 1), ("save", None), ("stop", None),
    ]  # fmt: skip
    assert run.answers("over") == [(1,), (2,)]


def test_gradient_counts_once_every_server_has_it_and_all_get_equal_messages(monkeypatch):
    """Three servers, in any order; one that reports twice counts once."""
    records = [*RECORDS, ParamRecord("tiny", (2,))]
    first, second = ({"op": "taken", "visitor": 1, "server": server} for server in (1, 2))
    for told, updates in (([first, second], 1), ([second, first], 1), ([first, first], 0)):
        given = hello(1, digest=digest(records, torch.float32))
        script = [given, pull(1), push(1), *told]
        run = _Run(monkeypatch, ServerPlan(3, timeout=LONG, **ASYNC), script)
        assert len(run.updates) == updates
        assert run.links == ["between/1", "between/2", "visitor/1/server/0"]
        letters = [[h for box, h in run.letters if box == f"server/{k}"] for k in (1, 2)]
        assert letters[0] == letters[1]
        ops = ["join", "pull", "take", *["update"] * updates, "save", "stop"]
        assert [h["op"] for h in letters[0]] == ops
        kinds = ("", "momentum/")
        assert run.names == [kind + r.name for r in records for kind in kinds]


def test_weights_are_granted_in_the_order_of_the_requests(monkeypatch):
    """This includes weights of the next version, for which all wait."""
    script = [hello(1), hello(2), hello(3), pull(1), pull(2), pull(3)]
    script += [push(3), pull(3), push(1), pull(1), push(2), pull(2)]
    run = _Run(monkeypatch, ServerPlan(timeout=LONG), script)
    every = [(1, 0), (2, 0), (3, 0), (3, 1), (1, 1), (2, 1)]
    assert run.answers("granted", "version") == every
    assert run.updates == [(1, [(0, 0), (1, 0), (2, 0)])]


# ---------------------------------------------------------------- the end


def test_a_run_ends_when_its_last_worker_leaves_but_not_when_it_is_lost(monkeypatch):
    plan = ServerPlan(timeout=LONG)
    for last in (done(2), {"op": "leave", "visitor": 2}):
        run = _Run(monkeypatch, plan, [hello(1), hello(2), {"op": "lost", "worker": 0}, last])
        assert not run.stopped
        assert run.answers("over") == ([(2,)] if last["op"] == "done" else [])
        assert [state["version"] for _, state in run.saved] == [0], "a run without an update, too"
    lost = [hello(1), hello(2), done(1), {"op": "lost", "worker": 1}]
    run = _Run(monkeypatch, plan, [*lost, LONG, hello(3)])
    assert run.stopped, "somebody came in time"
    assert run.answers("over") == [(1,), (3,)]
    words = rf"^no worker is left after update 0, and none joined within {LONG:g} s$"
    with pytest.raises(TimeoutError, match=words):
        _Run(monkeypatch, plan, [*lost, LONG, 0.25, hello(3)])


def test_every_worker_of_a_gradient_that_is_not_finite_is_named(monkeypatch):
    script = [hello(1), hello(2), pull(1), pull(2), push(2), push(1)]
    words = "^worker 0 at clock 0, worker 1 at clock 0: the gradient norm is inf$"
    with pytest.raises(FloatingPointError, match=words):
        _Run(monkeypatch, ServerPlan(timeout=LONG), script, value=float("inf"))


def _steps(*pauses: float) -> list[Any]:
    """Make one worker's updates, each after this many seconds."""
    return [hello(1), *(step for seconds in pauses for step in (pull(1), seconds, push(1)))]


def test_checkpoints_are_saved_every_so_many_updates_or_minutes(monkeypatch):
    def versions(script: list[Any], **changes: Any) -> list[tuple[float, int]]:
        run = _Run(monkeypatch, ServerPlan(timeout=1e4, **changes), script)
        return [(when - 1000.0, state["version"]) for when, state in run.saved]

    even = _steps(*[1.0] * 7)
    assert versions(even) == [(7, 7)], "at the end"
    assert versions(even, save_every=3) == [(3, 3), (6, 6), (7, 7)]
    assert versions(even, save_every=7) == [(7, 7)], "not twice"
    late = _steps(119.75, 0.25, 100, 20.0, 5.0, 115.5)
    assert versions(late, save_minutes=2.0) == [(120, 2), (240, 4), (360.5, 6)]
    both = versions(late, save_minutes=2.0, save_every=3)
    assert both == [(120, 2), (220, 3), (360.5, 6)]


def test_default_notes_read_all_tensors_of_a_checkpoint():
    """Other servers send them in any case, and would otherwise wait forever."""
    tensors = iter([("a", torch.zeros(1)), ("b", torch.zeros(2))])
    notes = Notes()
    notes.save({}, tensors)
    assert list(tensors) == []
    assert notes.update(1, 0.1, 1.0, []) is None
    assert notes.say("a line") is None


# ---------------------------------------------------------------- another server


class _Second:
    """Server 1 of two, to which server 0 sends `events` and then nothing.

    `sent` has (visitor, values) of the messages over its links; visitor 0 is server 0. Gradients
    that arrive are ones, and squared norms fours.
    """

    def __init__(self, monkeypatch, events: Sequence[dict[str, Any]], broken: int = 0) -> None:
        self.letters: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[tuple[int, list[float]]] = []
        self.waits: list[float] = []
        run, steps = self, iter(events)

        def take(name: str, wait: float) -> dict[str, Any] | None:
            assert name == "server/1"
            self.waits.append(wait)
            return next(steps, None)

        class Link:
            def __init__(self, store: Any, name: str, side: int, timeout: float) -> None:
                first, number, *rest = name.split("/")
                assert rest == ([] if first == "between" else ["server", "1"])
                assert (side, timeout) == (int(first == "between"), LONG)
                self.visitor = 0 if first == "between" else int(number)

            def send(self, x: torch.Tensor) -> Any:
                run.sent.append((self.visitor, x.flatten().tolist()))
                return SimpleNamespace(wait=lambda: None)

            def receive(self, x: torch.Tensor) -> None:
                if self.visitor and self.visitor == broken:
                    raise RuntimeError("Connection reset by peer")
                x.fill_(1.0 if self.visitor else 4.0)

        _stand_in(monkeypatch, self.letters, take, Link)
        self.shard = Shard(spread(RECORDS, 2)[1], lambda r: torch.zeros(r.shape), SGD(0.5))
        plan = ServerPlan(2, timeout=LONG, **ASYNC)
        how = {"records": RECORDS, "lr": lambda clock: 9.0}
        self.server = Server(dist.HashStore(), 1, plan, self.shard, **how)


def _event(op: str, worker: int, **more: Any) -> dict[str, Any]:
    return {"op": op, "worker": worker, "visitor": worker + 1} | more


UPDATE = {"op": "update", "workers": [1, 0], "counts": [1, 3], "lr": 0.5}
STOP = {"op": "stop"}


def test_the_second_server_does_as_it_is_told(monkeypatch):
    events = [
        _event("join", 0), _event("join", 1), _event("pull", 0), _event("pull", 1),
        _event("take", 1), _event("take", 0), UPDATE, _event("pull", 0), {"op": "save"}, STOP,
    ]  # fmt: skip
    run = _Second(monkeypatch, events)
    assert run.server.serve() is False
    assert run.waits == [3 * LONG] * len(events)
    taken = [{"op": "taken", "visitor": v, "server": 1} for v in (2, 1)]
    assert run.letters == [("server/0", header) for header in taken]
    size = run.shard.layout.size
    # The sum of two gradients of ones is over four samples; the squares are of both servers.
    weight = -0.5 * 2 / 4
    assert [(visitor, values[:3]) for visitor, values in run.sent] == [
        (1, [0.0] * 3), (2, [0.0] * 3), (0, [pytest.approx(4.0 * size, rel=1e-6)]),
        (1, [weight] * 3), (0, [weight] * 3), (0, [0.5] * 3),
    ]  # fmt: skip


def test_the_second_server_reports_broken_links_and_goes_on(monkeypatch):
    """The link is that of a worker that is present, or of one that never was. A gradient of one
    that leaves is discarded if server 0 says so."""
    joined = [_event("join", 0), _event("join", 1), _event("take", 0)]
    run = _Second(monkeypatch, [*joined, _event("take", 1), _event("pull", 5), STOP], broken=2)
    assert run.server.serve() is False
    words = [("taken", 1), ("failed", 2), ("failed", 6)]
    assert [(header["op"], header["visitor"]) for _, header in run.letters] == words
    alone = UPDATE | {"workers": [0], "counts": [1]}
    leave = {discard: _event("leave", 0, discard=discard) for discard in (True, False)}
    run = _Second(monkeypatch, [*joined, leave[False], _event("pull", 0), alone, STOP])
    assert run.server.serve() is False
    assert run.letters[-1] == ("server/0", {"op": "failed", "visitor": 1})
    assert run.shard.weights[0] == -0.5
    with pytest.raises(KeyError, match=r"^0$"):
        _Second(monkeypatch, [*joined, leave[True], alone]).server.serve()


def test_a_silent_server_0_and_parameters_of_another_server_are_errors(monkeypatch):
    run = _Second(monkeypatch, [_event("join", 0)])
    with pytest.raises(TimeoutError, match=r"^server 1: no message from server 0"):
        run.server.serve()
    records = [*RECORDS, ParamRecord("tiny", (2,))]
    for index, held, words in (
        (0, 1, "server 0 of 2 needs the 1 parameters .* got a different set of 2 parameters"),
        (1, 0, "server 1 of 2 needs the 2 parameters .* got a different set of 1 parameters"),
    ):
        shard = Shard(spread(records, 2)[held], lambda r: torch.zeros(r.shape), SGD())
        with pytest.raises(ValueError, match=f"^{words}$"):
            Server(dist.HashStore(), index, ServerPlan(2), shard, records=records, lr=lambda c: 1.0)
    swapped = [ParamRecord("big", (3,)), ParamRecord("small", (4,))]
    shard = Shard(spread(swapped, 2)[0], lambda r: torch.zeros(r.shape), SGD())
    words = r"needs the 1 parameters .* got a different set of 1 parameters"
    with pytest.raises(ValueError, match=words):
        Server(dist.HashStore(), 0, ServerPlan(2), shard, records=RECORDS, lr=lambda c: 1.0)
