"""A worker of parameter servers: pulls weights, computes a gradient, pushes it.

    worker = Worker(store, records, plan)
    worker.run(1000, gradient)          # gradient(clock, weights) -> Gradient

`module_gradient` makes `gradient` of any module and a loss function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpweave.parallel.data.flat import FlatLayout
from warpweave.parallel.data.optimizer import master_dtype
from warpweave.parallel.server.link import Mailbox, Pair
from warpweave.parallel.server.server import ServerPlan, generation
from warpweave.parallel.server.shard import digest, spread
from warpweave.parallel.shard import ParamRecord


@dataclass(frozen=True)
class Gradient:
    """What a worker computes at one clock.

    Attributes:
        tensors: parameter's name -> gradient of the sum of the losses of `count` samples (tokens).
        count: how many; the update divides by the sum of its workers' counts.
        loss: the mean loss, for the record.
    """

    tensors: Mapping[str, Tensor]
    count: int
    loss: float


Compute = Callable[[int, Mapping[str, Tensor]], Gradient]


def module_gradient(
    module: nn.Module, losses: Callable[[nn.Module, int], Iterable[tuple[Tensor, int]]]
) -> Compute:
    """The gradient of `module` at given weights, by autograd.

    ``losses(module, clock)`` has, for each micro-batch of that clock, the sum (0-dim) of the losses
    of its samples, and their number. Buffers of the module are the worker's own.
    """
    params = dict(module.named_parameters())

    def gradient(clock: int, weights: Mapping[str, Tensor]) -> Gradient:
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(weights[name])
                param.grad = None
        loss, count = 0.0, 0
        for total, n in losses(module, clock):
            total.backward()
            loss, count = loss + float(total.detach()), count + n
        tensors = {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()
        }
        return Gradient(tensors, count, loss / count)

    return gradient


class LostError(RuntimeError):
    """The servers went on without this worker, or are gone."""


class _RestartedError(Exception):
    """The servers were started anew."""


class _OverError(Exception):
    """The run has ended."""


class Worker:
    """A worker; building one connects it to the servers.

    Args:
        store: the ranks' store.
        records: of the whole model, as at the servers.
        plan: as at the servers.
        dtype: of the parameters.
        number: of this worker; None for a new one, given by the servers.

    Attributes:
        number: of this worker.
        clock: its gradients so far.

    Raises:
        ValueError: the servers have another model.
        LostError: they do not answer.
    """

    def __init__(
        self,
        store: dist.Store,
        records: Sequence[ParamRecord],
        plan: ServerPlan,
        *,
        dtype: torch.dtype = torch.float32,
        number: int | None = None,
    ) -> None:
        self.plan, self.number, self._top = plan, number, store
        self.layouts = [FlatLayout(part, 1, 0) for part in spread(records, plan.servers)]
        self._weights = [torch.zeros(x.size, dtype=dtype) for x in self.layouts]
        self._gradients = [w.new_zeros(w.shape, dtype=master_dtype(dtype)) for w in self._weights]
        self._digest = digest(records, dtype)
        self._connect()

    def run(self, steps: int, gradient: Compute) -> None:
        """Give gradients up to clock `steps`, and wait until the servers have saved the end.

        Servers that are started anew from a checkpoint say which clock this worker has there, and
        it goes on from that.

        Raises:
            LostError: the servers are gone, or have given this worker up.
        """
        while True:
            try:
                while self.clock < steps:
                    self.step(gradient)
                self._requests.put(op="done", visitor=self._visitor)
                self._answer("over", wait=float("inf"))
            except _OverError:
                return
            except _RestartedError:
                self._connect()

    def step(self, gradient: Compute) -> None:
        """Pull, compute, push: one clock."""
        self._requests.put(op="pull", visitor=self._visitor)
        self._answer("granted", wait=float("inf"))
        self._guarded(self._pull)
        found = gradient(self.clock, self._views(self._weights))
        for name, view in self._views(self._gradients).items():
            view.copy_(found.tensors[name])
        header = {"count": found.count, "loss": found.loss}
        self._requests.put(op="push", visitor=self._visitor, **header)
        self._guarded(self._push)
        self.clock += 1

    def leave(self) -> None:
        """Leave the run before its end; the others go on."""
        self._requests.put(op="leave", visitor=self._visitor)

    def _pull(self) -> None:
        for link, weights in zip(self._links, self._weights):
            link.receive(weights)

    def _push(self) -> None:
        for work in [x.send(g) for x, g in zip(self._links, self._gradients)]:
            work.wait()

    def _views(self, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            record.name: layout.view(buffer, record)
            for layout, buffer in zip(self.layouts, buffers)
            for record in layout.records
        }

    # ------------------------------------------------------------------ the servers

    def _connect(self) -> None:
        self._generation = self._top.add("server/generation", 0)
        root = self._root = generation(self._top)
        self._visitor = root.add("visitors", 1)
        self._requests = Mailbox(root, "server/0")
        self._inbox = Mailbox(root, f"visitor/{self._visitor}")
        self._requests.put(
            op="hello", visitor=self._visitor, worker=self.number, digest=self._digest
        )
        try:
            answer = self._answer("welcome", wait=3 * self.plan.timeout)
        except _RestartedError:
            return self._connect()
        self.number, self.clock = answer["worker"], answer["clock"]
        self._guarded(lambda: self._open(root))

    def _open(self, root: dist.Store) -> None:
        names = [f"visitor/{self._visitor}/server/{k}" for k in range(self.plan.servers)]
        self._links = [Pair(root, name, 1, self.plan.timeout) for name in names]

    def _answer(self, op: str, wait: float) -> dict[str, Any]:
        """The servers' next header, which is an `op`, while server 0 lives, within `wait` seconds.

        Server 0 may be busy with other workers' messages for some times the plan's timeout.
        """
        began = heard = time.monotonic()
        beat = -1
        while (answer := self._inbox.take(0.2)) is None:
            if self._top.add("server/generation", 0) != self._generation:
                raise _RestartedError
            now, before = time.monotonic(), beat
            beat = self._root.add("beat", 0)
            heard = now if beat != before else heard
            if now > began + wait or now > heard + 3 * self.plan.timeout:
                raise LostError(f"worker {self.number}: no word from the servers")
        if answer["op"] == "over":
            raise _OverError
        if answer["op"] == "refused":
            raise ValueError(answer["why"])
        if answer["op"] != op:
            raise LostError(
                f"the servers gave worker {self.number} up: {answer.get('why', answer)}"
            )
        return answer

    def _guarded(self, messages: Callable[[], object]) -> None:
        """Exchange tensors; if that fails, find out why from the servers."""
        try:
            messages()
        except RuntimeError:
            self._answer("nothing", wait=self.plan.timeout)
