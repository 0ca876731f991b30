"""A parameter server (Li et al. 2014): holds part of the weights and applies workers' gradients.

Server 0 is the sequencer. It takes every request, keeps the clocks, and sends the same sequence of
events to all servers. A pull therefore sees one version on all of them, and a gradient is applied
on all servers or on none.

    worker 1          server 0                    server 1
    pull ------------> allowed? (`clocks`)
         <- version -- event "pull 1" ----------> event "pull 1"
         <= weights ==                 weights == (both of that version)
    push ------------> event "take 1" ---------->
         == gradient =>            gradient =====>
                       all received? <---- taken
                       event "update (1, ..)" ---> event "update (1, ..)"
                       norm  <--- squares, sum --> both scale by the same norm

A worker that dies breaks its links; a worker that hangs is late. In both cases it is removed, and
the others continue. If a server dies, all servers are restarted from the checkpoint that server 0
wrote. They use a new generation of the store's keys, and the workers connect again.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.parallel.server.clocks import Clocks, Term
from warpweave.parallel.server.link import Mailbox, Pair
from warpweave.parallel.server.shard import Shard, digest, norm_and_scale, spread
from warpweave.parallel.shard import ParamRecord

_LOOK = 0.05  # seconds between checks for late workers


def generation(store: dist.Store) -> dist.Store:
    """The part of the ranks' store that servers and workers use until servers are restarted."""
    return dist.PrefixStore(f"server/{store.add('server/generation', 0)}", store)


def start_generation(store: dist.Store) -> None:
    """Direct workers to new servers; call it before servers are started again."""
    store.add("server/generation", 1)


def tell(store: dist.Store, op: str, **header: int) -> None:
    """Send a command to the servers from the process that watches theirs. `op` is "stop" (save and
    end the run) or "lost" (`worker` has died)."""
    Mailbox(generation(store), "server/0").put(op=op, **header)


@dataclass(frozen=True)
class ServerPlan:
    """The options that all servers and workers of a run share.

    Attributes:
        servers: number of servers over which the weights are spread.
        staleness, joint: as in `Clocks`.
        compensation: lambda of the delay compensation; 0 for none.
        clip: largest global norm of an update's mean gradient; None for no clipping.
        timeout: seconds after which a silent worker is lost; also bounds every wait.
        save_every, save_minutes: updates and minutes between checkpoints; 0 means only at the end.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> ServerPlan(servers=2, staleness=4, joint=False, compensation=0.04).timeout
        60.0
    """

    servers: int = 1
    staleness: int | None = 0
    joint: bool = True
    compensation: float = 0.0
    clip: float | None = None
    timeout: float = 60.0
    save_every: int = 0
    save_minutes: float = 0.0

    def __post_init__(self) -> None:
        Clocks(self.staleness, self.joint)
        if self.servers < 1:
            raise ValueError(f"servers must be at least 1, got {self.servers}")
        if self.compensation < 0 or (self.compensation and self.joint):
            raise ValueError(
                "compensation must be at least 0, and exactly 0 with joint=True (which delays "
                f"no gradients), got {self.compensation}"
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, or None for no clipping, got {self.clip}")
        if not self.timeout > 0 or self.save_every < 0 or not self.save_minutes >= 0:
            raise ValueError(
                f"expected timeout > 0, save_every >= 0 and save_minutes >= 0, got {self.timeout}, "
                f"{self.save_every} and {self.save_minutes}"
            )


@dataclass
class _Push:
    """A gradient in transit: its number of samples, the servers that have it, and the requests that
    its worker sent in the meantime."""

    count: int
    loss: float
    servers: set[int] = dataclasses.field(default_factory=set)
    later: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Notes:
    """Callbacks of the sequencer; each method does nothing unless it is overridden.

    Examples:
        >>> class Printed(Notes):
        ...     def say(self, line):
        ...         print(line)
    """

    def update(self, version: int, lr: float, norm: float, terms: Sequence[Term]) -> None:
        """Update number `version` (from 1) was applied, with these terms in this order."""

    def save(self, state: dict[str, Any], tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Write a checkpoint. The iterator must be exhausted in any case."""
        for _ in tensors:
            pass

    def say(self, line: str) -> None:
        """A worker joined, left, or was lost."""


class Server:
    """One of a run's servers; `serve` returns when every worker is done.

    Args:
        store: the ranks' store.
        index: the number of this server, from 0.
        plan: the same on all servers.
        shard: the weights of ``spread(records, plan.servers)[index]``.
        records: the records of the whole model.
        lr: learning rate by clock; only server 0's is used.
        notes: server 0's callbacks; None for none.

    Examples:
        >>> import threading
        >>> from warpweave.parallel.server.server import ServerPlan
        >>> from warpweave.parallel.data.optimizer import SGD
        >>> from warpweave.parallel.server.shard import Shard, records_of
        >>> from warpweave.parallel.server.worker import Worker, module_gradient
        >>> module, plan, store = nn.Linear(4, 2), ServerPlan(), torch.distributed.HashStore()
        >>> records, weights = records_of(module), dict(module.named_parameters())
        >>> shard = Shard(records, lambda r: weights[r.name].detach(), SGD(), torch.float32)
        >>> server = Server(store, 0, plan, shard, records=records, lr=lambda clock: 0.01)
        >>> thread = threading.Thread(target=server.serve, args=([0],))
        >>> thread.start()
        >>> def losses(module, clock):
        ...     yield module(torch.ones(8, 4)).square().sum(), 8
        >>> Worker(store, records, plan, number=0).run(3, module_gradient(module, losses))
        >>> thread.join()
    """

    def __init__(
        self,
        store: dist.Store,
        index: int,
        plan: ServerPlan,
        shard: Shard,
        *,
        records: Sequence[ParamRecord],
        lr: Callable[[int], float],
        notes: Notes | None = None,
    ) -> None:
        own, held = spread(records, plan.servers)[index], shard.layout.records
        if {r.name for r in own} != {r.name for r in held}:
            raise ValueError(
                f"server {index} of {plan.servers} needs the {len(own)} parameters that `spread` "
                f"assigns to it, got a different set of {len(held)} parameters"
            )
        self.index, self.plan, self.shard, self.lr = index, plan, shard, lr
        self.notes = notes if notes is not None else Notes()
        self.clocks = Clocks(plan.staleness, plan.joint)
        self.store = generation(store)
        self._parts = spread(records, plan.servers)
        self._digest = digest(records, shard.dtype)
        self._inbox = Mailbox(self.store, f"server/{index}")
        self._first = Mailbox(self.store, "server/0")
        others = range(1, plan.servers) if index == 0 else ()
        self._others = [Mailbox(self.store, f"server/{k}") for k in others]
        self._between: list[Pair] = []  # links to the other servers; if not server 0, to it only
        self._links: dict[int, Pair] = {}  # by worker, as are the next two
        self._sent: dict[int, tuple[Tensor, dist.Work]] = {}  # the weights that it pulled last
        self._staged: dict[int, Tensor] = {}  # gradients that arrived but are not applied yet
        # For the sequencer only.
        self._visitors: dict[int, int] = {}  # number of a connection -> worker
        self._due: dict[int, float] = {}  # worker -> deadline for its next message
        self._taken: dict[int, _Push] = {}  # gradients that not every server has
        self._done: list[int] = []  # connections of workers that wait for the end
        self._saved, self._saved_when = -1, 0.0  # update and time of the last checkpoint
        self._empty = 0.0  # time at which the last worker left
        self._stopped, self._quit = False, False  # by the caller; the last worker left by itself

    # ------------------------------------------------------------------ on every server

    def serve(self, workers: Iterable[int] = (), state: dict[str, Any] | None = None) -> bool:
        """Serve until every worker is done. Return True if the run was stopped earlier.

        Args:
            workers: for server 0, the workers that will come; others may join.
            state: `Clocks.state` of a checkpoint to continue from; None starts from scratch.

        Raises:
            TimeoutError: no worker is left, or server 0 is silent.
            FloatingPointError: a gradient is not finite.
            RuntimeError: another server was lost.
        """
        wait = self.plan.timeout
        if self.index:
            self._between = [Pair(self.store, f"between/{self.index}", 1, wait)]
            while True:
                event = self._inbox.take(3 * wait)
                if event is None:
                    raise TimeoutError(
                        f"server {self.index}: no message from server 0 for {3 * wait:g} s"
                    )
                if event["op"] == "stop":
                    return False
                if not self._apply(event):
                    self._first.put(op="failed", visitor=event["visitor"])
        self._between = [
            Pair(self.store, f"between/{k}", 0, wait) for k in range(1, self.plan.servers)
        ]
        self.clocks.load(state or self.clocks.state(), workers)
        self._saved = self.clocks.version if state else -1
        now = time.monotonic()
        self._due = dict.fromkeys(self.clocks.clocks, now + wait)
        self._empty = self._saved_when = now
        while not self._over():
            request = self._inbox.take(_LOOK)
            if request is not None:
                self._handle(request)
            self._drop_late()
            self._advance()
        return self._finish()

    def _apply(self, event: dict[str, Any]) -> bool:
        """Execute an event of the sequencer. Return False if the link to its worker failed."""
        worker = event.get("worker")
        try:
            if event["op"] == "join":
                name = f"visitor/{event['visitor']}/server/{self.index}"
                self._links[worker] = Pair(self.store, name, 0, self.plan.timeout)
            elif event["op"] == "pull":
                weights = self.shard.weights
                self._sent[worker] = (weights, self._links[worker].send(weights))
            elif event["op"] == "take":
                self._staged[worker] = torch.empty_like(self.shard.master)
                self._links[worker].receive(self._staged[worker])
                if self.index:
                    self._first.put(op="taken", visitor=event["visitor"], server=self.index)
        except (RuntimeError, KeyError):
            return False
        if event["op"] == "leave":
            self._links.pop(worker, None)
            self._sent.pop(worker, None)
            if event["discard"]:
                self._staged.pop(worker, None)
        elif event["op"] == "update":
            self._update(event)
        elif event["op"] == "save" and self.index:
            for _, tensor in self.shard.read():
                self._between[0].send(tensor.contiguous()).wait()
        return True

    @torch.no_grad()
    def _update(self, event: dict[str, Any]) -> float:
        """Apply the terms' gradients as one step and return the global norm of their mean."""
        workers, counts = event["workers"], event["counts"]
        staged = [self._staged.pop(w) for w in workers]
        if self.plan.compensation:
            for w, g, n in zip(workers, staged, counts):
                self.shard.compensate(g, n, self._sent[w][0], self.plan.compensation)
        total = self.shard.sum(staged)
        mine = self.shard.squares(total)
        squares = [mine]
        if self.index:
            squares = [torch.empty_like(mine) for _ in range(self.plan.servers)]
            self._between[0].send(mine).wait()
            for x in squares:
                self._between[0].receive(x)
        else:
            squares += [torch.empty_like(mine) for _ in self._between]
            for link, x in zip(self._between, squares[1:]):
                link.receive(x)
            for link, x in itertools.product(self._between, squares):
                link.send(x).wait()
        norm, scale = norm_and_scale(squares, sum(counts), self.plan.clip)
        self.shard.update(total, event["lr"], scale)
        return norm

    # ------------------------------------------------------------------ on server 0

    def _order(self, op: str, **event: Any) -> bool:
        """Execute an event on every server, in the same order. Return False if it failed here."""
        for other in self._others:
            other.put(op=op, **event)
        return self._apply({"op": op, **event})

    def _handle(self, request: dict[str, Any]) -> None:
        op, visitor = request["op"], request.get("visitor")
        if op == "stop":
            self._stopped = True
        elif op == "lost":
            if request["worker"] in self.clocks.clocks:
                self._drop(request["worker"], "its process ended")
        elif op == "hello":
            self._welcome(visitor, request)
        elif visitor not in self._visitors:
            if op in ("pull", "push", "done"):
                self._mail(visitor, op="gone", why="this worker was already dropped")
        else:
            self._request(op, visitor, self._visitors[visitor], request)

    def _request(self, op: str, visitor: int, worker: int, request: dict[str, Any]) -> None:
        """Handle a request of a participating worker, or a server's message about one."""
        if worker in self._taken and op not in ("taken", "failed"):
            self._taken[worker].later.append(request)  # until all servers have its gradient
            return
        self._due.pop(worker, None)  # it has answered; the next step is the servers'
        if op == "pull" and self.clocks.owes(worker):
            self._drop(worker, "it pulled again without pushing a gradient first")
        elif op == "pull":
            self.clocks.ask(worker)
        elif op == "push":
            self._taken[worker] = _Push(request["count"], request["loss"])
            if not self._order("take", worker=worker, visitor=visitor):
                self._drop(worker, "its gradient did not arrive")
            else:
                self._take(worker, 0)
        elif op == "taken":
            self._take(worker, request["server"])
        elif op == "failed":
            self._drop(worker, "its connection to a server failed")
        else:  # "leave", or "done", which waits for the end of the run
            self._leave(worker)
            self._quit = True
            if op == "done":
                self._done.append(visitor)

    def _welcome(self, visitor: int, request: dict[str, Any]) -> None:
        """Let a worker join if it has the same model."""
        if request["digest"] != self._digest:
            why = (
                "this worker has a different model: the digest of its parameter names, shapes and "
                f"dtype is {request['digest'][:12]}, but that of the servers' model is "
                f"{self._digest[:12]}"
            )
            return self._mail(visitor, op="refused", why=why)
        worker, here = request["worker"], set(self._visitors.values())
        if worker is None or worker in here or (
            worker not in self.clocks.clocks and worker < self.clocks.following
        ):  # fmt: skip
            worker = None  # give it a new number; no two workers share one
        if worker not in self.clocks.clocks:
            worker = self.clocks.join(worker)
        clock = self.clocks.clocks[worker]
        self._visitors[visitor] = worker
        self._mail(visitor, op="welcome", worker=worker, clock=clock)
        if not self._order("join", worker=worker, visitor=visitor):
            return self._drop(worker, "it did not connect")
        self._due[worker] = time.monotonic() + self.plan.timeout
        self.notes.say(f"worker {worker} joined at clock {clock}")

    def _take(self, worker: int, server: int) -> None:
        """Note that a server has a worker's gradient, and accept it when all servers have it."""
        push = self._taken[worker]
        push.servers.add(server)
        if len(push.servers) == self.plan.servers:
            del self._taken[worker]
            self.clocks.give(worker, push.count, push.loss)
            self._due[worker] = time.monotonic() + self.plan.timeout
            self._advance()
            for request in push.later:
                self._handle(request)

    def _advance(self) -> None:
        """Apply the updates that are due, save if it is time, and let workers pull if they may."""
        before = self.clocks.version
        for terms in self.clocks.updates():
            before += 1
            lr = self.lr(terms[0].clock)
            event = {"workers": [t.worker for t in terms], "counts": [t.count for t in terms],
                     "lr": lr}  # fmt: skip
            for other in self._others:
                other.put(op="update", **event)
            try:
                norm = self._update(event)
            except FloatingPointError as error:
                names = ", ".join(f"worker {t.worker} at clock {t.clock}" for t in terms)
                raise FloatingPointError(f"{names}: {error}") from None
            self.notes.update(before, lr, norm, terms)
            timely = 0 < 60 * self.plan.save_minutes <= time.monotonic() - self._saved_when
            if timely or (self.plan.save_every and before % self.plan.save_every == 0):
                self._save(before)
        for worker in self.clocks.grant():
            visitor = self._visitor(worker)
            self._mail(visitor, op="granted", version=self.clocks.version)
            if self._order("pull", worker=worker, visitor=visitor):
                self._due[worker] = time.monotonic() + self.plan.timeout
            else:
                self._drop(worker, "its connection failed")

    def _save(self, version: int) -> None:
        """Write a checkpoint of the state of every server after update `version`."""
        self._order("save")
        self._saved, self._saved_when = version, time.monotonic()
        self.notes.save(self.clocks.state(), self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The masters and moments of all servers, one tensor at a time."""
        yield from ((name, x.contiguous().clone()) for name, x in self.shard.read())
        for link, part in zip(self._between, self._parts[1:], strict=True):
            for name, shape in self.shard.shapes(part):
                tensor = self.shard.master.new_empty(shape)
                link.receive(tensor)
                yield name, tensor

    # ------------------------------------------------------------------ workers that leave

    def _drop_late(self) -> None:
        now, wait = time.monotonic(), f"{self.plan.timeout:g} s"
        for worker in [worker for worker, due in self._due.items() if now > due]:
            self._drop(worker, f"no message for {wait}; the worker has died or is hanging")

    def _drop(self, worker: int, why: str) -> None:
        """Continue without a worker that is lost."""
        self.notes.say(f"worker {worker} was lost at clock {self.clocks.clocks[worker]}: {why}")
        visitor = self._visitor(worker)
        self._leave(worker)
        self._quit = False
        if visitor is not None:
            self._mail(visitor, op="gone", why=why)

    def _leave(self, worker: int) -> None:
        self.clocks.leave(worker)
        self._due.pop(worker, None)
        discard = self._taken.pop(worker, None) is not None
        self._visitors = {v: w for v, w in self._visitors.items() if w != worker}
        self._order("leave", worker=worker, discard=discard)
        self._empty = time.monotonic()

    def _over(self) -> bool:
        """Return True if the run ends here. Raise if no worker is left and none came in time."""
        self.store.add("beat", 1)  # shows waiting workers that this server is alive
        if self._stopped or (self._quit and not self.clocks.clocks):
            return True
        if not self.clocks.clocks and time.monotonic() > self._empty + self.plan.timeout:
            raise TimeoutError(
                f"no worker is left after update {self.clocks.version}, and none joined within "
                f"{self.plan.timeout:g} s"
            )
        return False

    def _finish(self) -> bool:
        if self._saved != self.clocks.version:
            self._save(self.clocks.version)
        self._order("stop")
        for visitor in (*self._done, *self._visitors):
            self._mail(visitor, op="over")
        return self._stopped

    def _visitor(self, worker: int) -> int | None:
        return next((v for v, w in self._visitors.items() if w == worker), None)

    def _mail(self, visitor: int, **header: Any) -> None:
        Mailbox(self.store, f"visitor/{visitor}").put(**header)
