"""ZeRO stages 0 to 3 as one code path: flat units whose three states are replicated or sharded.

A unit is the parameters of one block, laid end to end in one flat buffer (`flat`). Its parameters
(`parameters`), gradients (`reduce`) and optimizer state (`optimizer`) each have a placement over
the ranks of its data axis, by default ``data`` = dp x cp, and the four stages of ZeRO (Rajbhandari
et al. 2020, arXiv:1910.02054) are four triples:

    stage   param       grad        optim
    0       replicate   replicate   replicate     all-reduce of gradients
    1       replicate   replicate   shard         one reduce-scatter a step, then an all-gather
    2       replicate   shard       shard         reduce-scatter after every micro-batch
    3       shard       shard       shard         and all-gather before every use

Every element is counted once in the global norm: along each axis over which the norm is summed, by
all ranks if they hold different values and by the first if they hold the same; by the owner if
pipeline stages share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpweave.kernels.adamw import sum_of_squares
from warpweave.parallel.collectives import all_gather_into
from warpweave.parallel.data.flat import FlatLayout
from warpweave.parallel.data.optimizer import LossScale, OptimizerState, Piece, Rule, master_dtype
from warpweave.parallel.data.parameters import FlatParameters
from warpweave.parallel.data.reduce import FlatGradients
from warpweave.parallel.mesh import ConnectedMesh, factors
from warpweave.parallel.shard import ParamRecord


@dataclass(frozen=True)
class Placement:
    """Which of the three states is sharded over the data ranks."""

    param: bool
    grad: bool
    optim: bool


PLACEMENTS = {
    0: Placement(param=False, grad=False, optim=False),
    1: Placement(param=False, grad=False, optim=True),
    2: Placement(param=False, grad=True, optim=True),
    3: Placement(param=True, grad=True, optim=True),
}


class Unit:
    """One block's parameters: their flat layout, storage, gradients and optimizer state.

    Args:
        name: for messages.
        params: (record, parameter) pairs of one dtype and one ``record.group``. Their ``.data`` and
            ``.grad`` become views into the unit's flat buffers; their values move with them (zeros
            from meta).
        mesh: this rank's place; shards lie over its ``record.group`` axis.
        zero: ZeRO stage, 0 to 3.
        device: where the buffers live.
        tied: another pipeline stage holds the same (tied) parameters.
        owner: False if another stage owns this (tied) parameter and counts it in the norm.

    Raises:
        ValueError: another stage than these, several dtypes or groups, or a shape that is not its
            record's.
    """

    def __init__(
        self,
        name: str,
        params: Iterable[tuple[ParamRecord, nn.Parameter]],
        mesh: ConnectedMesh,
        *,
        zero: int = 0,
        device: torch.device | str = "cpu",
        tied: bool = False,
        owner: bool = True,
    ) -> None:
        if zero not in PLACEMENTS:
            raise ValueError(f"zero must be one of 0, 1, 2, 3, got {zero}")
        self.name, self.mesh, self.tied, self.owner = name, mesh, tied, owner
        given = {record.name: (record, param) for record, param in params}
        dtypes = {param.dtype for _, param in given.values()}
        if len(dtypes) != 1:
            raise ValueError(f"unit {name} mixes parameter dtypes {sorted(map(str, dtypes))}")
        axes = {record.group for record, _ in given.values()}
        if len(axes) != 1:
            raise ValueError(f"unit {name} mixes gradients summed over {sorted(axes)}")
        (dtype,), (self.axis,) = dtypes, axes
        group = mesh.group(self.axis)
        self.placement = place = PLACEMENTS[zero if group is not None else 0]
        self.layout = layout = FlatLayout(
            (record for record, _ in given.values()), mesh.size(self.axis), mesh.index(self.axis)
        )
        self.params = [given[record.name] for record in layout.records]
        device = torch.device(device)
        self.parameters = FlatParameters(
            layout, self.params, group, sharded=place.param, device=device
        )
        self.gradients = FlatGradients(
            layout,
            self.params,
            group,
            sharded_result=place.optim,
            sharded_accumulation=place.grad,
            dtype=master_dtype(dtype),
            device=device,
        )
        region = layout.own if place.optim else slice(0, layout.size)
        self.state = OptimizerState(self.parameters, region)

    # ------------------------------------------------------------------ pieces of the gradients

    def partial_grads(self, axis: str) -> list[Tensor]:
        """Views of the reduced gradients that are still partial sums over `axis`."""
        ranges = self.layout.ranges_of(self.state.region)
        return [self.gradients.reduced[part] for r, part in ranges if axis in r.partial]

    def counted_grads(self, summed: Iterable[str]) -> list[Tensor]:
        """Views of the reduced gradients that this rank counts in a norm over the axes `summed`."""
        if not self.owner:
            return []
        own = {"pp"}  # axes along which all of the unit differs
        if self.placement.optim:
            own.update(factors(self.axis))
        first_on = {axis for axis in summed if self.mesh.index(axis) == 0}
        counted: list[slice] = []
        for r, part in self.layout.ranges_of(self.state.region):
            cut = {factor for axis in r.cut_axes for factor in factors(axis)}
            if not set(summed) <= first_on | own | cut:
                continue
            if counted and counted[-1].stop == part.start:
                part = slice(counted.pop().start, part.stop)
            counted.append(part)
        return [self.gradients.reduced[part] for part in counted]

    # ------------------------------------------------------------------ state in and out

    def buffer(self, kind: str) -> Tensor:
        """The flat buffer of "param" (the master), "grad" (reduced) or a moment."""
        own = {"param": self.state.master, "grad": self.gradients.reduced}
        return own[kind] if kind in own else self.state.moments[kind]

    @torch.no_grad()
    def write(self, kind: str, value: Callable[[ParamRecord], Tensor]) -> None:
        """Set a state from logical tensors: ``value(record)`` returns the whole, uncut tensor.

        "param" sets the master and the parameter that is computed with.
        """
        buffer = self.buffer(kind)
        whole = torch.zeros(self.layout.size, dtype=buffer.dtype, device=buffer.device)
        for record, _ in self.params:
            local = record.slice(value(record), self.mesh.coords)
            self.layout.view(whole, record).copy_(local)
        if kind == "param":
            self.parameters.set(whole)
        buffer.copy_(whole[self.state.region])

    @torch.no_grad()
    def read(self, kind: str) -> Iterator[tuple[ParamRecord, Tensor]]:
        """Yield (record, logical tensor) of a state. Collective over the data and cut axes."""
        flat = self.buffer(kind)
        if self.placement.optim:
            whole = torch.empty(self.layout.size, dtype=flat.dtype, device=flat.device)
            all_gather_into(whole, flat.contiguous(), group=self.mesh.group(self.axis))
            flat = whole
        for record, _ in self.params:
            yield record, record.assemble(self.layout.view(flat, record), self._gather)

    def _gather(self, x: Tensor, axis: str) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.mesh.size(axis))]
        dist.all_gather(parts, x.contiguous(), group=self.mesh.group(axis))
        return parts


class ZeroOptimizer:
    """An update rule over units, with one global norm clip.

    Args:
        units: this rank's units, in the same order on all ranks of a stage.
        mesh: this rank's place.
        rule: the optimizer's arithmetic, such as ``AdamW()``.
        clip: largest global gradient norm; None for no clipping.
        loss_scale: for fp16; the gradient that the backward pass starts with is to be its value.
        impl: "triton", "torch" or None, as for the kernels; of the norm.

    Building one is collective over the pipeline stages.
    """

    def __init__(
        self,
        units: list[Unit],
        mesh: ConnectedMesh,
        rule: Rule,
        *,
        clip: float | None = 1.0,
        loss_scale: LossScale | None = None,
        impl: str | None = None,
    ) -> None:
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be positive, or None for no clipping, got {clip}")
        self.units, self.mesh, self.rule, self.clip = units, mesh, rule, clip
        self.loss_scale, self.impl = loss_scale, impl
        for unit in units:
            unit.state.add_moments(rule.moments)
        device = units[0].state.master.device
        zero = torch.zeros((), dtype=torch.float64, device=device)  # fp32 counts to 2**24
        self.steps = [[zero.clone() for _ in u.layout.ranges] for u in units]
        self.count = zero  # updates made; equal on every rank
        self.finite = torch.ones((), device=device)  # this rank's own gradients were, last time
        self._norm_axes = self._find_norm_axes()
        self._in_one_message = self._agree(self._norm_axes == factors("world"))

    def _find_norm_axes(self) -> tuple[str, ...]:
        """The axes along which some rank counts what another does not hold, outermost first."""
        shared = set(factors("world"))
        for unit in self.units:
            same = () if unit.placement.optim else factors(unit.axis)
            shared &= set(same)
        return tuple(axis for axis in factors("world") if axis not in shared)

    def _agree(self, mine: bool) -> bool:
        """Whether it is so on every pipeline stage: their units may lie over other data axes."""
        every, group = torch.tensor(float(mine), device=self.count.device), self.mesh.group("pp")
        if group is not None:
            dist.all_reduce(every, dist.ReduceOp.MIN, group=group)
        return bool(every)

    def sum_partials(self) -> None:
        """Sum the gradients of parameters whose ranks see a part of the tokens each."""
        for axis in self.mesh.coords:
            group = self.mesh.group(axis)
            pieces = [piece for unit in self.units for piece in unit.partial_grads(axis)]
            if group is None or not pieces:
                continue
            joined = torch.cat(pieces)
            dist.all_reduce(joined, group=group)
            for piece, total in zip(pieces, joined.split([p.numel() for p in pieces]), strict=True):
                piece.copy_(total)

    def norm(self) -> Tensor:
        """The global norm of the reduced gradients, 0-dim and the same on every rank; collective.

        Summed over the whole mesh where shards lie over the data ranks of every stage. Gradients
        that all of them hold are counted by each alike, and summed over the other axes only, the
        stages last.
        """
        squares = [
            sum_of_squares(piece, impl=self.impl)
            for unit in self.units
            for piece in unit.counted_grads(self._norm_axes)
        ]
        reference = self.units[0].gradients.reduced
        total = torch.stack(squares).sum() if squares else reference.new_zeros(())
        self.finite = total.isfinite()
        for axis in ("world",) if self._in_one_message else reversed(self._norm_axes):
            if self.mesh.group(axis) is not None:
                dist.all_reduce(total, group=self.mesh.group(axis))
        norm = total.sqrt()
        return norm / self.loss_scale.value if self.loss_scale is not None else norm

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """One update of every parameter; returns the global gradient norm before clipping, 0-dim.

        A norm that is not finite leaves every parameter and all state untouched, on every rank.
        Nothing is read back to the host.
        """
        norm = self.norm()
        skip = (~norm.isfinite()).to(norm.dtype)
        scale = torch.ones_like(norm)
        if self.clip is not None:
            scale = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.loss_scale is not None:
            scale = scale / self.loss_scale.value
        for unit, steps in zip(self.units, self.steps, strict=True):
            for piece in self._pieces(unit, steps):
                self.rule.update(piece, lr, scale, skip)
            unit.gradients.clear()
            if unit.placement.optim and not unit.placement.param:
                unit.parameters.publish()
        self.count += 1 - skip.to(self.count.dtype)
        if self.loss_scale is not None:
            self.loss_scale.update(skip)
        return norm

    def _pieces(self, unit: Unit, steps: list[Tensor]) -> Iterator[Piece]:
        state = unit.state
        for r, part in unit.layout.ranges_of(state.region):
            yield Piece(
                state.master[part],
                unit.gradients.reduced[part],
                {name: moment[part] for name, moment in state.moments.items()},
                None if state.is_master else state.param[part],
                steps[unit.layout.ranges.index(r)],
                r.decay,
            )

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps beside the tensors, as JSON numbers."""
        state = {"count": float(self.count)}
        if self.loss_scale is not None:
            state["loss_scale"] = float(self.loss_scale.value)
            state["good_steps"] = float(self.loss_scale.good_steps)
        return state

    def load_state(self, state: dict[str, float]) -> None:
        """The inverse of `state`."""
        for tensor in (self.count, *(t for steps in self.steps for t in steps)):
            tensor.fill_(state["count"])
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.value.fill_(state["loss_scale"])
            self.loss_scale.good_steps.fill_(state["good_steps"])
