"""A worker of parameter servers: it pulls weights, computes a gradient and pushes it.

    worker = Worker(store, records, plan)
    worker.run(1000, gradient)          # gradient(clock, weights) -> Gradient

`module_gradient` makes such a `gradient` from any module and a loss function.
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
    """The result of a worker at one clock.

    Attributes:
        tensors: parameter name -> gradient of the summed losses of `count` samples (or tokens).
        count: number of samples or tokens; the update divides by the sum over its workers.
        loss: the mean loss, for the log.
    """

    tensors: Mapping[str, Tensor]
    count: int
    loss: float


Compute = Callable[[int, Mapping[str, Tensor]], Gradient]


def module_gradient(
    module: nn.Module, losses: Callable[[nn.Module, int], Iterable[tuple[Tensor, int]]]
) -> Compute:
    """Return a function that computes the gradient of `module` at given weights, by autograd.

    ``losses(module, clock)`` yields, for each micro-batch of that clock, the summed loss (0-dim) of
    its samples, and their number. Each worker has separate buffers of the module.

    Examples:
        >>> def losses(module, clock):
        ...     yield module(torch.ones(8, 4)).square().sum(), 8
        >>> module = nn.Linear(4, 2)
        >>> compute = module_gradient(module, losses)
        >>> compute(0, dict(module.named_parameters())).count
        8
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
    """The servers continued without this worker, or are gone."""


class _RestartedError(Exception):
    """The servers were restarted."""


class _OverError(Exception):
    """The run has ended."""


class Worker:
    """A worker. Constructing it connects it to the servers.

    Args:
        store: the ranks' store.
        records: the records of the whole model, the same as on the servers.
        plan: the same as on the servers.
        dtype: of the parameters.
        number: of this worker; None lets the servers assign a new one.

    Attributes:
        number: of this worker.
        clock: number of gradients pushed so far.

    Raises:
        ValueError: the servers have a different model.
        LostError: the servers do not answer.

    Examples:
        >>> worker = Worker(store, records, plan)  # doctest: +SKIP
        >>> worker.run(100, compute)  # `Server` has a whole program  # doctest: +SKIP
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
        """Push gradients up to clock `steps`, and wait until the servers have saved the end.

        Servers that were restarted from a checkpoint report this worker's clock at the checkpoint,
        and the worker continues from there. Raises LostError if the servers are gone, or have
        dropped this worker.
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
        """Advance by one clock: pull, compute and push."""
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
        """Leave the run before its end; the other workers continue."""
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
        self._root = generation(self._top)
        self._visitor = self._root.add("visitors", 1)
        self._requests = Mailbox(self._root, "server/0")
        self._inbox = Mailbox(self._root, f"visitor/{self._visitor}")
        hello = {"worker": self.number, "digest": self._digest}
        self._requests.put(op="hello", visitor=self._visitor, **hello)
        try:
            answer = self._answer("welcome", wait=3 * self.plan.timeout)
        except _RestartedError:
            return self._connect()
        self.number, self.clock = answer["worker"], answer["clock"]
        self._guarded(self._open)

    def _open(self) -> None:
        names = [f"visitor/{self._visitor}/server/{k}" for k in range(self.plan.servers)]
        self._links = [Pair(self._root, name, 1, self.plan.timeout) for name in names]

    def _answer(self, op: str, wait: float) -> dict[str, Any]:
        """Return the servers' next header, which must be an `op`, within `wait` seconds.

        Raises LostError if server 0 dies. Server 0 may be busy with messages of other workers for
        several times the plan's timeout.
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
                raise LostError(f"worker {self.number}: no message from the servers")
        if answer["op"] == "over":
            raise _OverError
        if answer["op"] == "refused":
            raise ValueError(answer["why"])
        if answer["op"] != op:
            raise LostError(
                f"the servers dropped worker {self.number}: {answer.get('why', answer)}"
            )
        return answer

    def _guarded(self, messages: Callable[[], object]) -> None:
        """Exchange tensors. If that fails, ask the servers for the reason."""
        try:
            messages()
        except RuntimeError:
            self._answer("nothing", wait=self.plan.timeout)
