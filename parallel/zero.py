"""ZeRO stages 0 to 3 as one code path: flat units whose three states are replicated or sharded.

A unit is the parameters of one block, laid end to end in one flat buffer. Its parameters, gradients
and optimizer state each have a placement over the ``data`` group (dp x cp), and the four stages of
ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) are four triples:

    stage   param       grad        optim
    0       replicate   replicate   replicate     all-reduce of gradients
    1       replicate   replicate   shard         one reduce-scatter a step, then an all-gather
    2       replicate   shard       shard         reduce-scatter after every micro-batch
    3       shard       shard       shard         and all-gather before every use

Gradients accumulate in float32 (float64 for float64 parameters) whatever the parameters' dtype, and
every reduction is a SUM: the loss was divided by the global number of valid tokens beforehand.

Inside a unit the parameters are ordered so that each property the optimizer asks for (does it
decay, is it cut over the tensor axis, must its gradient still be summed over the tensor axis) is
true of few contiguous ranges. Every element is counted once in the global norm: by the data rank
whose slice it lies in (by every data rank for itself, if all hold it), by tensor rank 0 if tensor
ranks hold the same, by the owner if pipeline stages share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpweave.kernels.adamw import adamw_step, sum_of_squares
from warpweave.parallel.collectives import all_gather_into, reduce_scatter_into
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.parallel.shard import ParamRecord

_ALIGN = 32  # elements, so that every parameter starts on a 64-byte boundary


@dataclass(frozen=True)
class Placement:
    """Which of the three states is sharded over the data group."""

    param: bool
    grad: bool
    optim: bool


PLACEMENTS = {
    0: Placement(param=False, grad=False, optim=False),
    1: Placement(param=False, grad=False, optim=True),
    2: Placement(param=False, grad=True, optim=True),
    3: Placement(param=True, grad=True, optim=True),
}


@dataclass(frozen=True)
class Range:
    """Elements ``[start, stop)`` of a flat buffer whose parameters share their properties."""

    start: int
    stop: int
    decay: bool
    sharded: bool
    partial: bool


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of master weights, gradients and moments of a parameter: float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Unit:
    """One block's parameters in a flat buffer, with their gradients and optimizer state.

    Args:
        name: for messages.
        params: (record, parameter) pairs of one dtype. Their ``.data`` and ``.grad`` become views
            into the unit's flat buffers; their values move with them (zeros from meta).
        mesh: this rank's place; shards lie over its ``data`` group.
        zero: ZeRO stage, 0 to 3.
        device: where the buffers live.
        tied: another pipeline stage holds the same (tied) parameters.
        owner: False if another stage owns this (tied) parameter and counts it in the norm.
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
        self.group = mesh.group("data")
        self.placement = PLACEMENTS[zero if self.group is not None else 0]
        self.params = sorted(
            params, key=lambda p: (p[0].decay, p[0].sharded, p[0].partial), reverse=True
        )
        dtypes = {p.dtype for _, p in self.params}
        if len(dtypes) != 1:
            raise ValueError(f"unit {name} mixes parameter dtypes {sorted(map(str, dtypes))}")
        self.dtype = dtypes.pop()
        self.master_dtype = master_dtype(self.dtype)
        self._lay_out()
        values = {r.name: p.detach() for r, p in self.params if not p.is_meta}
        self._allocate(torch.device(device))
        if values:
            self._write_local("param", values)

    def _lay_out(self) -> None:
        """Give every parameter its offset, and find the ranges of equal properties."""
        self.offsets: dict[str, int] = {}
        ranges: list[Range] = []
        end = 0
        for record, _ in self.params:
            size = 1
            for length in record.local_shape:
                size *= length
            self.offsets[record.name] = end
            stop = end + -(-size // _ALIGN) * _ALIGN
            new = Range(end, stop, record.decay, record.sharded, record.partial)
            last = ranges[-1] if ranges else None
            same = last is not None and (last.decay, last.sharded, last.partial) == (
                new.decay,
                new.sharded,
                new.partial,
            )
            if same and last is not None:
                ranges[-1] = Range(last.start, stop, new.decay, new.sharded, new.partial)
            else:
                ranges.append(new)
            end = stop
        self.ranges = tuple(ranges)
        ranks = self.mesh.size("data")
        self.slice_size = -(-end // (ranks * _ALIGN)) * _ALIGN
        self.size = self.slice_size * ranks
        first = self.mesh.index("data") * self.slice_size
        self.own = slice(first, first + self.slice_size)

    def _allocate(self, device: torch.device) -> None:
        """Make the flat buffers and turn the parameters into views of them."""
        low, high, n = self.dtype, self.master_dtype, self.slice_size
        self.flat = torch.zeros(self.size, dtype=low, device=device)
        for record, param in self.params:
            offset = self.offsets[record.name]
            shape = record.local_shape
            size = torch.Size(shape).numel()
            if tuple(param.shape) != shape:
                raise ValueError(
                    f"parameter {record.name} has shape {tuple(param.shape)}, "
                    f"its record says {shape}"
                )
            if param.is_meta:  # a parameter cannot change its device by assignment
                torch.utils.swap_tensors(
                    param, nn.Parameter(torch.empty(0, dtype=low, device=device))
                )
            # Assigning ``.data`` keeps the parameter's own version counter: autograd does not mind
            # that the flat buffer is freed and gathered again between forward and backward.
            param.data = self.flat[offset : offset + size].view(shape)
            param.grad_dtype = high
        # The persistent slice of a sharded parameter; the flat buffer is freed between uses.
        self.shard = torch.zeros(n, dtype=low, device=device) if self.placement.param else None
        state_size = n if self.placement.optim else self.size
        if low == high:  # the parameter is its own master
            home = self.shard if self.shard is not None else self.flat
            self.master = home[self.own] if home is self.flat and self.placement.optim else home
        else:
            self.master = torch.zeros(state_size, dtype=high, device=device)
        self.exp_avg = torch.zeros(state_size, dtype=high, device=device)
        self.exp_avg_sq = torch.zeros(state_size, dtype=high, device=device)
        if self.placement.optim:
            self.reduced = torch.zeros(n, dtype=high, device=device)
        self._place_gradients(torch.zeros(self.size, dtype=high, device=device))
        self.joined = False  # `join_gradients` has decided where the gradients lie
        self._gather: dist.Work | None = None
        self._scatter: tuple[dist.Work, Tensor] | None = None
        self.materialised = True
        self._stale = (
            False  # the gradient buffer holds nothing yet: to be overwritten, not added to
        )
        self._reduced_stale = True  # likewise the reduced slice
        if self.placement.grad:
            self._free(self.grad)

    def _place_gradients(self, buffer: Tensor) -> None:
        """Accumulate gradients in `buffer`, zeros[size]: every ``.grad`` is a view of it."""
        self.grad = buffer
        self.homes: dict[Tensor, Tensor] = {}  # parameter -> its view of the gradient buffer
        for record, param in self.params:
            offset = self.offsets[record.name]
            param.grad = buffer[offset : offset + param.numel()].view(param.shape)
            self.homes[param] = param.grad
        if not self.placement.optim:  # what the optimizer reads: all of it, or the reduced slice
            self.reduced = buffer

    @staticmethod
    def _free(buffer: Tensor) -> None:
        buffer.untyped_storage().resize_(0)

    @staticmethod
    def _fill(buffer: Tensor) -> None:
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())

    # ------------------------------------------------------------------ parameters

    def unshard(self) -> None:
        """Start gathering the parameters, if they are not there; `wait` finishes it."""
        if self.materialised or self._gather is not None:
            return
        self._fill(self.flat)
        self._gather = all_gather_into(self.flat, self.shard, group=self.group, async_op=True)

    def wait(self) -> None:
        """Finish a gather that `unshard` or `publish` started: the parameters are now usable."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            self.materialised = True

    def reshard(self) -> None:
        """Free the gathered parameters of a stage-3 unit; their own slice stays."""
        if self.placement.param and self.materialised:
            self._free(self.flat)
            self.materialised = False

    def publish(self) -> None:
        """Start giving every data rank the slices the others have updated (stages 1 and 2)."""
        if self.placement.optim and not self.placement.param:
            self._gather = all_gather_into(
                self.flat, self.flat[self.own], group=self.group, async_op=True
            )

    # ------------------------------------------------------------------ gradients

    def open_grads(self) -> None:
        """Before a backward pass: every ``.grad`` is a view of a buffer that may be added to."""
        self._allocate_grads()
        if self._stale:
            self.grad.zero_()
            self._stale = False

    def lend_grads(self) -> None:
        """As `open_grads`, for a backward pass that `collect_grads` will follow.

        The first gradients of a step then need no zeros to be added to: ``.grad`` is None. What
        `kernels.wgrad` writes goes to its place in `homes` at once; autograd puts what it has made
        into ``.grad``, and `collect_grads` copies it.
        """
        self._allocate_grads()
        if self._stale:
            for _, param in self.params:
                param.grad = None

    def collect_grads(self) -> None:
        """After the backward pass: every ``.grad`` is a view of the flat buffer again."""
        if not self._stale:
            return
        end = 0
        for record, param in self.params:
            view, offset = self.homes[param], self.offsets[record.name]
            self.grad[end:offset].zero_()  # the gap after the parameter before
            end = offset + view.numel()
            if param.grad is view:  # written in place
                continue
            if param.grad is None:  # owed by a deferred weight gradient, or not reached
                view.zero_()
            else:
                view.copy_(param.grad)
            param.grad = view
        self.grad[end:].zero_()
        self._stale = False

    def _allocate_grads(self) -> None:
        """Have the gradient buffer, which a reduction may still be reading."""
        if self.placement.grad:
            self.finish_reduce()
            if self.grad.untyped_storage().size() == 0:
                self._fill(self.grad)
                self._stale = True

    def reduce(self, following: Sequence[Unit] = ()) -> None:
        """Start summing the accumulated gradients over the data group; `finish_reduce` ends it.

        Those of the units that `following` lie right behind (`is_before`) come in one message.
        """
        if self.group is None:
            return
        if not self.placement.optim:
            size = self.size + sum(unit.size for unit in following)
            joined = self.grad.as_strided((size,), (1,))
            work = dist.all_reduce(joined, group=self.group, async_op=True)
            for unit in (self, *following):
                unit._scatter = (work, unit.grad)
            return
        self.finish_reduce()  # at most one reduction in flight per unit
        out = self.reduced if self._reduced_stale else torch.empty_like(self.reduced)
        work = reduce_scatter_into(out, self.grad, group=self.group, async_op=True)
        self._scatter = (work, out)

    def is_before(self, other: Unit) -> bool:
        """Whether the whole gradients of `other` lie right behind this unit's: `join_gradients`."""
        mine, next_one = self.grad, other.grad
        return (
            not self.placement.optim
            and mine.untyped_storage().data_ptr() == next_one.untyped_storage().data_ptr()
            and mine.storage_offset() + self.size == next_one.storage_offset()
        )

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight, add it to the reduced slice, free what is not kept."""
        if self._scatter is None:
            return
        work, out = self._scatter
        self._scatter = None
        work.wait()
        if out is not self.grad and out is not self.reduced:
            self.reduced.add_(out)
        self._reduced_stale = False
        if self.placement.grad:
            self._free(self.grad)

    def zero_grad(self) -> None:
        """After the optimizer step: forget the gradients; the next ones overwrite them."""
        self._reduced_stale = True
        if not self.placement.grad:
            self._stale = True

    def own_ranges(self, region: slice) -> Iterator[tuple[Range, slice]]:
        """Each range that meets `region` of the flat buffer, and where in `region` it lies."""
        for r in self.ranges:
            start, stop = max(r.start, region.start), min(r.stop, region.stop)
            if start < stop:
                yield r, slice(start - region.start, stop - region.start)

    @property
    def region(self) -> slice:
        """The elements the optimizer state of this rank covers: its slice, or everything."""
        return self.own if self.placement.optim else slice(0, self.size)

    def partial_grads(self) -> list[Tensor]:
        """Views of the reduced gradients that are still partial sums over the tensor axis."""
        return [self.reduced[part] for r, part in self.own_ranges(self.region) if r.partial]

    def counted_grads(self) -> list[Tensor]:
        """Views of the reduced gradients that this rank counts in the global norm.

        Its slice where the data ranks hold different ones, everything where they hold the same.
        """
        if not self.owner:
            return []
        counts_replicas = self.mesh.index("tp") == 0
        counted: list[slice] = []
        for r, part in self.own_ranges(self.region):
            if not (r.sharded or counts_replicas):
                continue
            if counted and counted[-1].stop == part.start:
                part = slice(counted.pop().start, part.stop)
            counted.append(part)
        return [self.reduced[part] for part in counted]

    # ------------------------------------------------------------------ state in and out

    def state(self, kind: str) -> Tensor:
        """The flat buffer of "param" (the master), "exp_avg", "exp_avg_sq" or "grad" (reduced)."""
        buffers = {
            "param": self.master,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "grad": self.reduced,
        }
        return buffers[kind]

    @torch.no_grad()
    def write(self, kind: str, value: Callable[[ParamRecord], Tensor]) -> None:
        """Set a state from logical tensors: ``value(record)`` returns the unsharded tensor.

        "param" sets the master and the parameter that is computed with.
        """
        index = self.mesh.index("tp")
        self._write_local(kind, {r.name: r.slice(value(r), index) for r, _ in self.params})

    @torch.no_grad()
    def _write_local(self, kind: str, values: dict[str, Tensor]) -> None:
        """Set a state from this tensor rank's whole parameters, by name."""
        buffer = self.state(kind)
        whole = torch.zeros(self.size, dtype=self.master_dtype, device=buffer.device)
        for name, local in values.items():
            offset = self.offsets[name]
            whole[offset : offset + local.numel()] = local.reshape(-1).to(whole)
        buffer.copy_(whole[self.region])
        if kind == "param":
            self.wait()  # a gather in flight would put the old values back
            if self.shard is not None:
                self.shard.copy_(whole[self.own])
                self.materialised = True
                self.reshard()
            else:
                self.flat.copy_(whole)

    @torch.no_grad()
    def read(self, kind: str) -> Iterator[tuple[ParamRecord, Tensor]]:
        """Yield (record, logical tensor) of a state. Collective over the data and tensor groups."""
        flat = self.state(kind)
        if self.placement.optim:
            whole = torch.empty(self.size, dtype=flat.dtype, device=flat.device)
            all_gather_into(whole, flat.contiguous(), group=self.group)
            flat = whole
        for record, _ in self.params:
            offset = self.offsets[record.name]
            local = flat[offset : offset + torch.Size(record.local_shape).numel()]
            local = local.view(record.local_shape)
            if record.sharded:
                parts = [torch.empty_like(local) for _ in range(record.parts)]
                dist.all_gather(parts, local.contiguous(), group=self.mesh.group("tp"))
                yield record, record.assemble(parts)
            else:
                yield record, record.assemble([local])


def join_gradients(units: Sequence[Unit]) -> None:
    """Lay the whole gradients (ZeRO 0) of `units` end to end, in their order.

    Neighbours can then be reduced in one message. Before the first backward pass: gradients are
    zeros again. Units without a data group stay, and those that have been through here before:
    somebody may know where their gradients are.
    """
    whole = [
        unit
        for unit in units
        if unit.group is not None and not unit.placement.optim and not unit.joined
    ]
    for unit in whole:
        unit.joined = True
    for key in {(unit.master_dtype, unit.grad.device) for unit in whole}:
        alike = [unit for unit in whole if (unit.master_dtype, unit.grad.device) == key]
        for unit in alike:  # before the joined buffer is made: never twice the memory
            unit._free(unit.grad)
        joined = torch.zeros(sum(unit.size for unit in alike), dtype=key[0], device=key[1])
        for unit, part in zip(alike, joined.split([unit.size for unit in alike]), strict=True):
            unit._place_gradients(part)


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740), on the device.

    The scale halves on a step whose gradients overflow (every rank skips that step alike, as the
    global norm is the flag) and doubles after `interval` good steps.
    """

    def __init__(self, initial: float = 2.0**16, interval: int = 2000) -> None:
        self.value = torch.full((), initial)
        self.good_steps = torch.zeros(())
        self.interval = interval

    def update(self, overflow: Tensor) -> None:
        """Adapt after a step; `overflow` is a 0-dim tensor, non-zero if the step was skipped."""
        bad = overflow.bool()
        self.good_steps = torch.where(bad, 0.0, self.good_steps + 1)
        grow = self.good_steps >= self.interval
        factor = torch.where(bad, 0.5, torch.where(grow, 2.0, 1.0))
        self.value = (self.value * factor).clamp(1.0, 2.0**24)
        self.good_steps = torch.where(grow, 0.0, self.good_steps)

    def to(self, device: torch.device) -> LossScale:
        """Move the scale's tensors."""
        self.value, self.good_steps = self.value.to(device), self.good_steps.to(device)
        return self


class ZeroAdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over units, with one global norm clip.

    Args:
        units: this rank's units, in the same order on all ranks of a data x tensor group.
        mesh: this rank's place.
        betas, eps, weight_decay: AdamW's; decay applies where the record says so.
        clip: largest global gradient norm; None for no clipping.
        loss_scale: for fp16; the seed gradient of the loss must be multiplied by its value.
        impl: "triton", "torch" or None, as for the kernels.
    """

    def __init__(
        self,
        units: list[Unit],
        mesh: ConnectedMesh,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float | None = 1.0,
        loss_scale: LossScale | None = None,
        impl: str | None = None,
    ) -> None:
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be positive, or None for no clipping, got {clip}")
        self.units, self.mesh = units, mesh
        self.betas, self.eps, self.weight_decay, self.clip = betas, eps, weight_decay, clip
        self.loss_scale, self.impl = loss_scale, impl
        device = units[0].master.device
        self.steps = [[torch.zeros((), device=device) for _ in unit.ranges] for unit in units]
        self.count = torch.zeros((), device=device)  # updates made; equal on every rank
        self.finite = torch.ones((), device=device)  # this rank's own gradients were, last time

    def sum_partials(self) -> None:
        """Sum over the tensor axis the gradients of parameters that see a part of the tokens."""
        group = self.mesh.group("tp")
        if group is None:
            return
        pieces = [piece for unit in self.units for piece in unit.partial_grads()]
        if not pieces:
            return
        joined = torch.cat(pieces)
        dist.all_reduce(joined, group=group)
        for piece, total in zip(pieces, joined.split([p.numel() for p in pieces]), strict=True):
            piece.copy_(total)

    def norm(self) -> Tensor:
        """The global norm of the reduced gradients, 0-dim and the same on every rank; collective.

        Summed over the whole mesh, but for gradients that every data rank holds: those are counted
        by each of them alike, and summed over the tensor and pipeline ranks only.
        """
        squares = [
            sum_of_squares(piece, impl=self.impl)
            for unit in self.units
            for piece in unit.counted_grads()
        ]
        reference = self.units[0].reduced
        total = torch.stack(squares).sum() if squares else reference.new_zeros(())
        self.finite = total.isfinite()
        sharded = any(unit.placement.optim for unit in self.units)
        for axis in ("world",) if sharded else ("tp", "pp"):
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
            self._step_unit(unit, steps, lr, scale, skip)
            unit.zero_grad()
            unit.publish()
        self.count += 1 - skip.to(self.count.dtype)
        if self.loss_scale is not None:
            self.loss_scale.update(skip)
        return norm

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

    def _step_unit(
        self, unit: Unit, steps: list[Tensor], lr: float, scale: Tensor, skip: Tensor
    ) -> None:
        home = unit.shard if unit.shard is not None else unit.flat[unit.region]
        for r, part in unit.own_ranges(unit.region):
            adamw_step(
                unit.master[part],
                unit.reduced[part],
                unit.exp_avg[part],
                unit.exp_avg_sq[part],
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                eps=self.eps,
                weight_decay=self.weight_decay if r.decay else 0.0,
                step=steps[unit.ranges.index(r)],
                grad_scale=scale,
                skip=skip,
                param=None if unit.dtype == unit.master_dtype else home[part],
                impl=self.impl,
            )
