"""Replicas that synchronize weights every n steps: local SGD, DiLoCo and streaming DiLoCo.

Each replica of the mesh's outer axis consists of tp, cp, pp and dp ranks with any ZeRO stage. It
trains on separate data with a separate inner optimizer, whose state is not shared. Every n steps,
for weights w,
    delta    = w_global - mean over replicas of w_local
    momentum = mu momentum + delta
    w_global = w_global - lr (delta + mu momentum)        outer SGD, Nesterov
    w_local  = lerp(w_global, w_local, mix)

    local SGD       arXiv:1805.09767 (Stich 2019)            lr 1, mu 0: w_global is the mean
    post-local SGD  arXiv:1808.07217 (Lin et al. 2020)       the same, after a synchronous warm-up
    DiLoCo          arXiv:2311.08105 (Douillard et al. 2023) lr 0.7, mu 0.9
    streaming       arXiv:2501.18512 (Douillard et al. 2025) fragments of layers, delay, mix

    n = 4, fragments a and b of the layers, delay 1
    after step                 1  2  3  4  5  6  7  8  9
    all-reduce of w_local         a     b     a     b        the sum starts
    outer step                       a     b     a     b     the sum is waited for

Each rank sums its own shard of the master weights (ZeRO 1 to 3: its slice) over the outer axis.
Nothing else of the optimizer crosses that axis, and a fragment is one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.parallel.collectives import Pending, gather, start_all_reduce_
from warpweave.parallel.data.unit import Unit
from warpweave.parallel.mesh import ConnectedMesh

# Tensors of `Unit.state`: global weights, outer momentum, and the sum of a fragment in flight.
GLOBAL, MOMENTUM, SUM = "outer_param", "outer_momentum", "outer_sum"


@dataclass(frozen=True)
class OuterRule:
    """The times of outer steps, and the parameters of outer SGD; the defaults are DiLoCo's.

    Attributes:
        every: n, the number of steps between two outer steps of a weight.
        lr: outer learning rate.
        momentum: Nesterov momentum of outer SGD.
        fragments: parts of the layers that synchronize in turn, n / fragments steps apart.
        delay: tau, steps from the start of a sum to the outer step that uses it.
        mix: alpha, the share of the local weights that an outer step keeps.
        warmup: steps of data parallelism before the first of the n: gradients are averaged over
            the replicas.

    Raises:
        ValueError: n is less than 1 or not divisible by `fragments`, the delay is n / fragments or
            more, or a number is out of range.

    Examples:
        >>> from warpweave import Engine, GPTConfig, Mesh
        >>> config = GPTConfig(vocab_size=256, seq_len=16, layers=2, width=64, heads=8)
        >>> rule = OuterRule(every=50)  # DiLoCo; pass it to an Engine on Mesh(outer=2).connect()
    """

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"the outer interval must be at least 1 step, got {self.every}")
        if self.fragments < 1 or self.every % self.fragments:
            raise ValueError(
                f"fragments must be at least 1 and divide the outer interval of {self.every} "
                f"steps, got {self.fragments}"
            )
        if not 0 <= self.delay < self.apart:
            raise ValueError(
                f"outer delay must be at least 0 and less than the {self.apart} steps between "
                f"fragments ({self.every} / {self.fragments}), got {self.delay}"
            )
        if not self.lr > 0 or not 0 <= self.momentum < 1 or not 0 <= self.mix <= 1:
            raise ValueError(
                "outer learning rate must be positive, momentum in [0, 1) and mix in [0, 1], got "
                f"{self.lr}, {self.momentum} and {self.mix}"
            )
        if self.warmup < 0:
            raise ValueError(f"outer warm-up must be at least 0 steps, got {self.warmup}")

    def check(self, layers: int) -> None:
        """Raise ``ValueError`` if there are more fragments than layers."""
        if self.fragments > layers:
            raise ValueError(
                f"fragments ({self.fragments}) must be at most the number of layers ({layers})"
            )

    @property
    def apart(self) -> int:
        """Steps between the starts of two sums."""
        return self.every // self.fragments

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the tensors per parameter that persist."""
        return (GLOBAL, MOMENTUM) if self.momentum else (GLOBAL,)

    def starts(self, step: int) -> int | None:
        """Return the fragment whose sum starts after `step` (counted from 1), or None."""
        turn, rest = divmod(step - self.warmup, self.apart)
        return (turn - 1) % self.fragments if turn > 0 and not rest else None

    def in_flight(self, step: int) -> int | None:
        """Return the fragment whose sum is in flight at the end of `step`, or None."""
        begun = (self.starts(s) for s in range(step - self.delay + 1, step + 1))
        return next((f for f in begun if f is not None), None)

    def acts(self, step: int) -> bool:
        """Return True if a sum starts or an outer step is made after `step`."""
        return self.starts(step) is not None or self.starts(step - self.delay) is not None


class OuterOptimizer:
    """The outer step of replicas' master weights.

    Args:
        rule: the times and parameters of outer steps.
        units: this rank's units; the same as those of other replicas' ranks at the same place.
        fragments: the fragment of each unit, less than ``rule.fragments``.
        mesh: the connected mesh.

    Attributes:
        step: number of updates of the inner optimizer so far.
        in_flight: the units whose sum is in flight.
    """

    def __init__(
        self, rule: OuterRule, units: Sequence[Unit], fragments: Sequence[int], mesh: ConnectedMesh
    ) -> None:
        self.rule, self.mesh, self.units = rule, mesh, list(units)
        self.group, self.replicas = mesh.group("outer"), mesh.size("outer")
        self.step, self._checked = 0, False
        self.in_flight: list[Unit] = []
        self._sum: Pending | None = None
        self._fragments: list[list[Unit]] = [[] for _ in range(rule.fragments)]
        for unit, fragment in zip(units, fragments, strict=True):
            self._fragments[fragment].append(unit)
            unit.state.add_moments(rule.states)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Set the global weights to this rank's own new weights. They must be equal on all
        replicas, which the next step checks."""
        for unit in self.units:
            unit.state.moments[GLOBAL].copy_(unit.state.master)
        self._checked = False

    def resume(self, step: int) -> None:
        """Continue after `step` updates. The caller sets the tensors of the state, including `SUM`
        of the units in flight."""
        self.step, self._checked = step, False
        fragment = self.rule.in_flight(step)
        if fragment is not None:
            self._join_masters(fragment)

    @property
    def acts_next(self) -> bool:
        """True if a sum starts or an outer step is made after the next update."""
        return self.rule.acts(self.step + 1)

    # ------------------------------------------------------------------ in a step

    @torch.no_grad()
    def before_update(self) -> None:
        """Check new weights before an update. During warm-up, also average the reduced gradients
        over the replicas."""
        if not self._checked:
            self._check_equal()
        if self.step >= self.rule.warmup:
            return
        every = [unit.gradients.reduced for unit in self.units]
        for pending in [start_all_reduce_(grad, self.group) for grad in every]:
            pending.wait().div_(self.replicas)

    @torch.no_grad()
    def after_update(self) -> None:
        """Start a fragment's sum or make an outer step after an update, if it is time."""
        self.step += 1
        if self.step <= self.rule.warmup:
            for unit in self.units:
                unit.state.moments[GLOBAL].copy_(unit.state.master)
            return
        fragment = self.rule.starts(self.step)
        if fragment is not None:
            total = self._join_masters(fragment)
            if self.in_flight:
                self._sum = start_all_reduce_(total, self.group)
        if self.rule.starts(self.step - self.rule.delay) is not None:
            self._outer_step()

    def _join_masters(self, fragment: int) -> Tensor:
        """Join the fragment's masters in one buffer, whose parts are the `SUM` of its units."""
        self.in_flight = self._fragments[fragment]
        masters = [unit.state.master for unit in self.in_flight]
        # A pipeline stage may have no layer of a fragment.
        total = torch.cat(masters) if masters else self.units[0].state.master.new_zeros(0)
        parts = total.split([master.numel() for master in masters])
        for unit, part in zip(self.in_flight, parts, strict=True):
            unit.state.moments[SUM] = part
        return total

    def wait(self) -> None:
        """Wait for the sum in flight, so its tensors can be read. It stays in flight."""
        if self._sum is not None:
            self._sum.wait()

    def _outer_step(self) -> None:
        """Make the outer step of the fragment in flight."""
        self.wait()
        rule = self.rule
        for unit in self.in_flight:
            state = unit.state
            mean = state.moments.pop(SUM).div_(self.replicas)
            weights, local = state.moments[GLOBAL], state.master
            new = torch.lerp(weights, mean, rule.lr)  # the mean itself if lr is 1
            if rule.momentum:
                momentum = state.moments[MOMENTUM].mul_(rule.momentum).add_(weights - mean)
                new.sub_(momentum, alpha=rule.lr * rule.momentum)
            weights.copy_(new)
            unit.parameters.wait()  # for the update's all-gather, which may still read the masters
            local.copy_(torch.lerp(weights, local, rule.mix))
            _publish(unit)
        self.in_flight, self._sum = [], None

    def _check_equal(self) -> None:
        """Raise on every rank if global weights differ between replicas."""
        self._checked = True
        if self.group is None:
            return
        own = torch.cat([unit.state.moments[GLOBAL] for unit in self.units])
        first = own.clone()
        dist.broadcast(first, group=self.group, group_src=0)
        differ = (first != own).any().to(torch.int32)
        table = gather(differ[None], self.mesh.group("world")).tolist()
        if ranks := [self.mesh.sizes.describe(r) for r, bad in enumerate(table) if bad]:
            raise ValueError(
                "replicas must begin with the same weights, but these ranks differ from replica 0: "
                f"{', '.join(ranks)}"
            )

    # ------------------------------------------------------------------ between steps

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Return a context in which the parameters are the global weights instead of the local."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for unit in self.units:
            unit.parameters.wait()
            master, weights = unit.state.master, unit.state.moments[GLOBAL]
            local = master.clone()
            master.copy_(weights)
            weights.copy_(local)
            _publish(unit)


def _publish(unit: Unit) -> None:
    """Update the parameters of all ranks of a replica from the masters, which have changed."""
    state, place = unit.state, unit.placement
    if not state.is_master:
        state.param.copy_(state.master)
    unit.parameters.reshard()
    if place.optim and not place.param:
        unit.parameters.publish()
