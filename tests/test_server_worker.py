"""A worker of parameter servers, with a script in place of the servers: its requests and waits, the
effect of each answer, and how it finds restarted servers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from warpweave.parallel.server import worker
from warpweave.parallel.server.server import ServerPlan, generation, start_generation
from warpweave.parallel.server.shard import digest
from warpweave.parallel.server.worker import Gradient, LostError, Worker
from warpweave.parallel.shard import ParamRecord

RECORDS = [ParamRecord("big", (4,)), ParamRecord("small", (3,))]
LONG = 10.0  # timeout in seconds
PLAN = ServerPlan(2, None, joint=False, timeout=LONG)
GRANTED, OVER = {"op": "granted", "version": 0}, {"op": "over"}


def welcome(worker: int, clock: int = 0) -> dict[str, Any]:
    return {"op": "welcome", "worker": worker, "clock": clock}


class _Servers:
    """Servers that follow a script. A step is a header that they send, a number of seconds without
    one, "beat" (no header, but a sign of life), or "restart" (they have been restarted).

    `asked` are the worker's headers in order, `links` its links, and `sent` the tensors sent over
    them; `broken` links fail at the first tensor.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: Sequence[Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.links: list[tuple[str, int, float]] = []
        self.sent: list[torch.Tensor] = []
        self.store, self.broken, self.now = dist.HashStore(), False, 500.0
        servers, self.steps = self, iter(script)

        class Box:
            def __init__(self, store: Any, name: str) -> None:
                self.name = name

            def put(self, **header: Any) -> None:
                assert self.name == "server/0"
                servers.asked.append(header)

            def take(self, wait: float) -> dict[str, Any] | None:
                assert self.name == f"visitor/{servers.asked[-1]['visitor']}"
                return servers.step()

        class Link:
            def __init__(self, store: Any, name: str, side: int, timeout: float) -> None:
                servers.links.append((name, side, timeout))

            def receive(self, x: torch.Tensor) -> None:
                if servers.broken:
                    raise RuntimeError("Connection reset by peer")
                x.fill_(len(servers.sent))

            def send(self, x: torch.Tensor) -> Any:
                servers.sent.append(x.clone())
                return SimpleNamespace(wait=lambda: None)

        monkeypatch.setattr(worker, "Mailbox", Box)
        monkeypatch.setattr(worker, "Pair", Link)
        monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: self.now))

    def step(self) -> dict[str, Any] | None:
        step = next(self.steps)
        if isinstance(step, dict):
            return step
        if step == "restart":
            start_generation(self.store)
        elif step == "beat":
            generation(self.store).add("beat", 1)
        else:
            self.now += step
        return None

    def worker(self, number: int | None = None, dtype: torch.dtype = torch.float32) -> Worker:
        return Worker(self.store, RECORDS, PLAN, dtype=dtype, number=number)


def _compute(clock: int, weights: Any) -> Gradient:
    """Return the weights plus 10 for each clock, for clock + 2 samples."""
    return Gradient({n: w + 10.0 * clock for n, w in weights.items()}, clock + 2, clock / 4)


def test_a_worker_pulls_and_pushes_from_the_servers_clock_to_its_last_step(monkeypatch):
    """Each server gets the gradients of its own parameters."""
    found = _Servers(monkeypatch, [0.2, welcome(3, 5), GRANTED, 0.2, GRANTED, 0.2, OVER])
    one = found.worker(1)
    assert (one.number, one.clock) == (3, 5)
    one.run(7, _compute)
    assert one.clock == 7
    every = {"visitor": 1}
    assert found.asked == [
        {"op": "hello", "worker": 1, "digest": digest(RECORDS, torch.float32)} | every,
        {"op": "pull"} | every, {"op": "push", "count": 7, "loss": 1.25} | every,
        {"op": "pull"} | every, {"op": "push", "count": 8, "loss": 1.5} | every,
        {"op": "done"} | every,
    ]  # fmt: skip
    assert found.links == [(f"visitor/1/server/{k}", 1, LONG) for k in (0, 1)]
    assert [x.unique().tolist() for x in found.sent] == [[0, 50], [0, 50], [0, 62], [0, 62]]
    assert [int((x > 0).sum()) for x in found.sent] == [4, 3, 4, 3]


def test_16_bit_weights_have_32_bit_gradients(monkeypatch):
    found = _Servers(monkeypatch, [welcome(0), GRANTED, GRANTED])
    one, seen = found.worker(dtype=torch.bfloat16), []
    one.step(lambda clock, w: seen.append(w["big"].dtype) or _compute(clock, w))
    one.step(_compute)
    assert seen == [torch.bfloat16]
    assert {x.dtype for x in found.sent} == {torch.float32}
    assert found.asked[0]["worker"] is None
    assert found.asked[0]["digest"] == digest(RECORDS, torch.bfloat16)
    one.leave()
    assert found.asked[-1] == {"op": "leave", "visitor": 1}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_worker_that_is_given_up_raises_the_servers_reason(at, monkeypatch):
    """This happens before its first step, within one, and at the end."""
    script = [welcome(4), GRANTED, GRANTED, OVER]
    found = _Servers(monkeypatch, [*script[:at], {"op": "gone", "why": "it hangs"}])
    one = found.worker()
    with pytest.raises(LostError, match=r"^the servers dropped worker 4: it hangs$"):
        one.run(2, _compute)
    found = _Servers(monkeypatch, [*script[:at], {"op": "welcome", "worker": 4}])
    with pytest.raises(LostError, match=r"^the servers dropped worker 4: {'op': 'welcome'"):
        found.worker().run(2, _compute)
    found = _Servers(monkeypatch, [{"op": "refused", "why": "another model"}])
    with pytest.raises(ValueError, match=r"^another model$"):
        found.worker()


def _silent(worker: int):
    return pytest.raises(LostError, match=rf"^worker {worker}: no message from the servers$")


def test_worker_waits_three_timeouts_after_the_last_sign_of_life(monkeypatch):
    long, over = 3 * LONG, 0.25
    for at in (1, 3):  # before the first grant, and the end
        start: list[Any] = [welcome(4), GRANTED, GRANTED][:at]
        found = _Servers(monkeypatch, [*start, *["beat", long] * 9, OVER])
        found.worker().run(2, _compute)
        for silence, lost in ((long, False), (long + over, True)):
            found = _Servers(monkeypatch, [*start, "beat", silence, OVER])
            one = found.worker()
            with _silent(4) if lost else nullcontext():
                one.run(2, _compute)
    for waits, lost in (([LONG, "beat", 2 * LONG], False), ([LONG, "beat", 2 * LONG, over], True)):
        found = _Servers(monkeypatch, [*waits, welcome(4)])
        with _silent(9) if lost else nullcontext():
            assert found.worker(9).number == 4


def test_worker_continues_with_restarted_servers_and_keeps_its_number(monkeypatch):
    script = [
        "restart", welcome(2, 4),  # before it was admitted
        GRANTED, "restart", welcome(2, 4),  # while it waits for the next weights
        GRANTED, GRANTED, "restart", welcome(2, 5),  # at the end
        GRANTED, OVER,
    ]  # fmt: skip
    found, clocks = _Servers(monkeypatch, script), []
    found.worker(2).run(6, lambda clock, w: clocks.append(clock) or _compute(clock, w))
    assert clocks == [4, 4, 5, 5]
    hellos = [header for header in found.asked if header["op"] == "hello"]
    assert [h["worker"] for h in hellos] == [2] * 4
    assert [h["visitor"] for h in hellos] == [1] * 4  # from a new store


def test_after_a_broken_link_the_servers_tell_why(monkeypatch):
    """They gave the worker up, are gone, have ended the run, or were restarted."""

    def broken(*script: Any) -> _Servers:
        found = _Servers(monkeypatch, [welcome(4), GRANTED, *script])
        one = found.worker()
        found.broken = True
        one.run(1, _compute)
        return found

    with pytest.raises(LostError, match="dropped worker 4: it is late"):
        broken(0.2, {"op": "gone", "why": "it is late"})
    with _silent(4):
        broken("beat", LONG, "beat", 0.25)
    broken("beat", LONG, OVER)  # the run was stopped
    found = broken("restart", welcome(4, 1), OVER)
    assert [header["op"] for header in found.asked] == ["hello", "pull", "hello", "done"]
