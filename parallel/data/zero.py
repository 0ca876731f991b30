"""The optimizer of ZeRO stages 0 to 3, one code path for all placements of units.

    a step, on every rank
    1. gradients are already reduced (all-reduce or reduce-scatter, `reduce`)
    2. global gradient norm: sum of squares of this rank's elements, all-reduced
    3. update of this rank's slice of master weights (ZeRO 0: of all); before that, Muon's matrices
       are orthogonalized as a whole, each by one rank (`muon`)
    4. ZeRO 1 and 2: start the all-gather of the updated parameters (3 gathers them before use)

Every element is counted once in the global norm. Along an axis over which the norm is summed, a
sharded parameter is counted by all ranks, a replicated one by the first rank. A parameter that
pipeline stages share (tied) is counted by its owner.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.kernels.adamw import sum_of_squares
from warpweave.parallel.algorithms.direct import ordered
from warpweave.parallel.data.muon import WholeMatrices
from warpweave.parallel.data.optimizer import LossScale, Muon, Piece, Rule, check_rule
from warpweave.parallel.data.ordered import OrderedGradients, exact_sum
from warpweave.parallel.data.unit import Unit
from warpweave.parallel.mesh import AXES, ConnectedMesh, factors
from warpweave.parallel.run_collective import run_collective


class ZeroOptimizer:
    """An update rule over units, with clipping by the global gradient norm.

    Args:
        units: this rank's units, in the same order on all ranks of a stage.
        mesh: the connected mesh.
        rule: the update rule, such as ``AdamW()``.
        clip: largest global gradient norm; None for no clipping.
        loss_scale: for fp16; the backward pass must start from its value as the loss's gradient.
        impl: "triton", "torch" or None, as for the kernels; used for the norm.
        divisor: divide gradients by it, for a mean over data ranks instead of a sum.
        apart: each pipeline stage makes separate steps (asynchronous schedules). The norm, which
            also decides if a step changes anything, is then that of the stage.

    Construction is collective over the pipeline stages.
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
        divisor: int = 1,
        apart: bool = False,
    ) -> None:
        check_rule(rule, clip)
        self.units, self.mesh, self.rule, self.clip = units, mesh, rule, clip
        self.ordered = any(isinstance(u.gradients, OrderedGradients) for u in units)
        self.loss_scale, self.impl, self.divisor = loss_scale, impl, divisor
        rest = {*rule.moments} - {*rule.matrix_moments}
        for unit in units:
            unit.state.add_moments(rule.moments, rest)
        self._whole: list[WholeMatrices] = []
        if isinstance(rule, Muon):
            kinds = dict.fromkeys((u.placement.shard_over, u.placement.optim) for u in units)
            for kind in kinds:
                alike = [u for u in units if (u.placement.shard_over, u.placement.optim) == kind]
                self._whole.append(WholeMatrices(alike, mesh))
        device = units[0].state.master.device
        zero = torch.zeros((), dtype=torch.float64, device=device)  # fp32 counts to 2**24
        self.count = zero  # updates made; equal on every rank
        self.finite = torch.ones((), device=device)  # this rank's gradients in the last step
        axes = tuple(axis for axis in factors("inner") if not (apart and axis == "pp"))
        self._norm_axes = self._find_norm_axes(axes)
        self._in_one_message = self._agree(self._norm_axes == factors("inner"))

    def _find_norm_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The subset of `axes` over which the norm is summed, because ranks count different
        elements; outermost first."""
        shared = set(axes)
        for unit in self.units:
            same = () if unit.placement.optim else factors(unit.placement.sum_over)
            shared &= set(same)
        return tuple(axis for axis in axes if axis not in shared)

    def _agree(self, mine: bool) -> bool:
        """Return True if `mine` is True on all pipeline stages; units there may have different data
        axes."""
        every, group = torch.tensor(float(mine), device=self.count.device), self.mesh.group("pp")
        if group is not None:
            dist.all_reduce(every, dist.ReduceOp.MIN, group=group)
        return bool(every)

    def sum_partials(self) -> None:
        """All-reduce the gradients of replicated parameters whose ranks see different tokens
        (`ParamRecord.partial`: sequence parallelism)."""
        for axis in AXES:
            group = self.mesh.group(axis)
            pieces = [piece for unit in self.units for piece in unit.partial_grads(axis)]
            if group is None or not pieces:
                continue
            joined = torch.cat(pieces)
            if self.ordered:
                run_collective(ordered, joined, group)
            else:
                dist.all_reduce(joined, group=group)
            for piece, total in zip(pieces, joined.split([p.numel() for p in pieces]), strict=True):
                piece.copy_(total)

    def norm(self) -> Tensor:
        """The global norm of the reduced gradients, 0-dim and the same on every rank; collective.

        If every stage has shards, it is summed over the outer replica in one message. Replicas of a
        shard then scale it by exactly the same number, although only the first counts it. Gradients
        that are replicated over all data ranks are counted by each of them, and summed over the
        other axes only, the stages last.
        """
        pieces = [p for unit in self.units for p in unit.counted_grads(self._norm_axes)]
        axes = ("inner",) if self._in_one_message else reversed(self._norm_axes)
        groups = [self.mesh.group(axis) for axis in axes]
        reference = self.units[0].gradients.reduced
        if self.ordered:
            largest, total, self.finite = exact_sum(pieces, groups, reference, squares=True)
            norm = (largest * total.sqrt()).to(reference.dtype)
        else:
            none = not pieces  # every parameter is counted by another rank
            total = reference.new_zeros(()) if none else sum_of_squares(pieces, impl=self.impl)
            self.finite = total.isfinite()
            for group in groups:
                if group is not None:
                    dist.all_reduce(total, group=group)
            norm = total.sqrt()
        norm = norm if self.divisor == 1 else norm / self.divisor
        return norm / self.loss_scale.value if self.loss_scale is not None else norm

    @torch.no_grad()
    def step(
        self, lr: float | Tensor, halted: Tensor | None = None, norm: Tensor | None = None
    ) -> Tensor:
        """Make one update of every parameter; return the global gradient norm before clipping.

        The norm is 0-dim. If it is not finite, no parameter or state changes, on any rank. If
        `halted` (0-dim, equal on all ranks) is non-zero, nothing changes, including the loss scale.
        No host sync. Pass the result of `norm` on these gradients as `norm` to avoid waiting for
        other ranks (except with Muon).
        """
        norm = self.norm() if norm is None else norm
        bad = ~norm.isfinite()
        skip = (bad if halted is None else bad | halted.bool()).to(norm.dtype)
        scale = torch.ones_like(norm)
        if self.clip is not None:
            scale = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.divisor != 1:
            scale = scale / self.divisor
        if self.loss_scale is not None:
            scale = scale / self.loss_scale.value
        directions = self._directions(scale, skip)
        self.count += 1 - skip.to(self.count.dtype)
        begun = self.rule.begin(lr, self.count)
        for unit in self.units:
            unit.parameters.next_version(unit.state.region)
            for piece in self._pieces(unit, directions.get(unit)):
                self.rule.update(piece, begun, scale, skip)
            unit.gradients.clear()
            if unit.placement.optim and not unit.placement.param:
                unit.parameters.publish()
        if self.loss_scale is not None:
            self.loss_scale.update(skip, halted)
        return norm

    def _directions(self, scale: Tensor, skip: Tensor) -> dict[Unit, Tensor]:
        """For Muon, the step directions of the matrices at the front of each unit's region."""
        rule, found = self.rule, dict[Unit, Tensor]()
        if not isinstance(rule, Muon):
            return found
        for whole in self._whole:
            for unit in whole.units:
                grad = unit.gradients.reduced[: unit.state.matrices]
                (name,) = rule.matrix_moments
                u = rule.nesterov(grad, unit.state.moments[name][: len(grad)], scale, skip)
                found[unit] = u if rule.dtype is None else u.to(rule.dtype)
            whole.apply([found[unit] for unit in whole.units], rule.orthogonalize)
        return found

    def _pieces(self, unit: Unit, direction: Tensor | None) -> Iterator[Piece]:
        state, master, param = unit.state, unit.state.master, unit.state.param
        for r, part in unit.layout.ranges_of(state.region):
            grad = unit.gradients.reduced if direction is None or not r.matrix else direction
            moments = {name: state.moment(name, part) for name in self.rule.moments}
            yield Piece(
                master[part],
                grad[part],
                {name: moment for name, moment in moments.items() if moment is not None},
                r.matrix,
                None if state.is_master else param[part],
                r.decay,
            )

    def state(self) -> dict[str, float]:
        """The state other than tensors, as JSON numbers, for a checkpoint."""
        state = {"count": float(self.count)}
        if self.loss_scale is not None:
            state["loss_scale"] = float(self.loss_scale.value)
            state["good_steps"] = float(self.loss_scale.good_steps)
        return state

    def load_state(self, state: dict[str, float]) -> None:
        """Restore the result of `state`."""
        self.count.fill_(state["count"])
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.value.fill_(state["loss_scale"])
            self.loss_scale.good_steps.fill_(state["good_steps"])
