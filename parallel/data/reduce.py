"""A unit's gradients: accumulated over micro-batches in a flat buffer, summed over the data ranks.

Gradients accumulate in float32 (float64 for float64 parameters) for any dtype of parameters. Every
reduction is a SUM, because the loss is already divided by the global number of valid tokens.

    ZeRO stage   gradients                reduction
    0            replicated               one all-reduce per step
    1            sharded result           one reduce-scatter per step
    2, 3         sharded accumulation     one reduce-scatter per micro-batch; the flat buffer is
                                          freed in between
    hybrid       replicas of shards       then, once per step, one all-reduce of the slice over the
                                          replicas
    any          in order (`ordered`)     one all-to-all per micro-batch; with ZeRO 0 then, once per
                                          step, one all-gather

    ZeRO 2, two micro-batches, four data ranks; g[m, r] of micro-batch m on rank r, slices a to d
    rank r, after micro-batch 0    slice r of  sum over r' of g[0, r']
    rank r, after micro-batch 1    slice r of  sum over r' of g[0, r'] + g[1, r']
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpweave.kernels.runtime.wgrad import WeightGradients
from warpweave.parallel.collectives import Pending, reduce_scatter_into
from warpweave.parallel.data.flat import FlatLayout, allocate, free, is_free
from warpweave.parallel.shard import ParamRecord


class FlatGradients:
    """The gradient buffer of a unit and its reduction over the data ranks.

    Args:
        layout: the offsets and slices.
        params: the (record, parameter) pairs whose ``.grad`` become views.
        group: the ranks over which it is reduced; a shard group if the result is sharded. None for
            a single rank.
        replicas: the ranks that hold the same slice of a sharded result, which is then all-reduced
            over them (hybrid sharding). None for a single rank.
        sharded_result: True to reduce-scatter, so each rank gets its slice of the sum; False to
            all-reduce.
        sharded_accumulation: reduce-scatter after every micro-batch and keep only the slice.
            Requires `sharded_result`, except for `ordered`.
        dtype: the dtype in which gradients are accumulated and summed.
        device: of the buffers.

    Attributes:
        flat: [layout.size], the buffer to which backward passes add.
        reduced: the sum over the data ranks: [layout.slice_size] if sharded, otherwise `flat`.
        views: parameter -> its part of `flat`.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[tuple[ParamRecord, nn.Parameter]],
        group: dist.ProcessGroup | None,
        *,
        replicas: dist.ProcessGroup | None = None,
        sharded_result: bool,
        sharded_accumulation: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout, self.group, self.replicas = layout, group, replicas
        self.sharded_result, self.sharded_accumulation = sharded_result, sharded_accumulation
        self._params = tuple(params)
        for _, param in self._params:
            param.grad_dtype = dtype
        if sharded_result:
            self.reduced = torch.zeros(layout.slice_size, dtype=dtype, device=device)
        self.place(torch.zeros(layout.size, dtype=dtype, device=device))
        self.joined = False  # True once `end_to_end` has allocated the buffer
        self._in_flight: tuple[dist.Work | Pending, Tensor] | None = None  # over `group`
        self._is_last = False  # the last micro-batch of the step
        self._last: dist.Work | None = None  # after the last micro-batch
        # If a gradient has no value yet, it is overwritten and not added to.
        self._flat_is_stale = False
        self._reduced_is_stale = True
        if sharded_accumulation:
            free(self.flat)

    def place(self, buffer: Tensor) -> None:
        """Use `buffer`, zeros [layout.size], as `flat`: every ``.grad`` becomes a view of it."""
        self.flat = buffer
        self.views: dict[Tensor, Tensor] = {}
        for record, param in self._params:
            param.grad = self.views[param] = self.layout.view(buffer, record)
        if not self.sharded_result:
            self.reduced = buffer

    # ------------------------------------------------------------------ accumulation

    def before_backward(self) -> None:
        """Prepare for a backward pass; `after_backward` must follow it.

        The first gradients of a step overwrite instead of adding to zeros: ``.grad`` is None.
        `runtime.wgrad` writes its gradients directly to their view in `views`. `after_backward`
        copies there the gradients that autograd puts into ``.grad``.
        """
        self.receive()
        if self._flat_is_stale:
            self.release()

    def receive(self) -> None:
        """Prepare for a backward pass that may have put gradients into ``.grad`` already."""
        if self.sharded_accumulation:
            self.finish()  # it may still be reading the buffer
            if is_free(self.flat):
                allocate(self.flat)
                self._flat_is_stale = True

    def release(self) -> None:
        """Set every ``.grad`` to None, so that autograd makes new ones. Only while the buffer holds
        no gradient that is still needed."""
        for _, param in self._params:
            param.grad = None

    @torch.no_grad()
    def adopt(self) -> None:
        """Add gradients that autograd put into a new ``.grad`` to those of earlier micro-batches,
        as after ``zero_grad()`` between them."""
        if self._flat_is_stale:
            return
        for _, param in self._params:
            view = self.views[param]
            if param.grad is not None and param.grad is not view:
                view.add_(param.grad)
            param.grad = view

    def after_backward(self) -> None:
        """Make every ``.grad`` a view of the flat buffer again, with its gradient in it."""
        if not self._flat_is_stale:
            return
        end, views, gradients = 0, list[Tensor](), list[Tensor]()
        for record, param in self._params:
            view, offset = self.views[param], self.layout.offsets[record.name]
            self._clear_padding(end, offset)
            end = offset + view.numel()
            if param.grad is view:  # written in place
                continue
            if param.grad is None:  # owed by a deferred weight gradient, or not reached
                view.zero_()
            else:
                views.append(view)
                gradients.append(param.grad)
            param.grad = view
        if views:
            torch._foreach_copy_(views, gradients)  # one launch on a GPU
        self._clear_padding(end, self.flat.numel())
        self._flat_is_stale = False

    def _clear_padding(self, start: int, end: int) -> None:
        if start < end:  # a launch for nothing would cost as much as one for something
            self.flat[start:end].zero_()

    def before_input(self) -> None:
        """Prepare for a backward pass whose weight gradients come later; `after_input` follows."""
        for _, param in self._params:
            param.grad = None

    def after_input(self, store: WeightGradients) -> None:
        """Also defer to `store` what the backward pass left in ``.grad``. With sharded accumulation
        a micro-batch's gradients are reduced together, and the buffer is free until then."""
        for _, param in self._params:
            if (gradient := param.grad) is not None:
                store.append(param, partial(_given, gradient))
            param.grad = self.views[param]

    def clear(self) -> None:
        """Mark the gradients as used after the optimizer step, so the next ones overwrite them."""
        self._reduced_is_stale = True
        if not self.sharded_accumulation:
            self._flat_is_stale = True

    # ------------------------------------------------------------------ reduction

    def start(self, following: Sequence[FlatGradients] = (), *, last: bool = True) -> None:
        """Start the reduction of the accumulated gradients over `group`; `finish` ends it.

        The gradients of `following`, which are adjacent in memory (`is_before`), are sent in the
        same message. `last` is False for sharded accumulation before the step's last micro-batch,
        after which the all-reduce over replicas follows.
        """
        if self.group is None:
            return
        if not self.sharded_result:
            size = self.layout.size + sum(other.layout.size for other in following)
            joined = self.flat.as_strided((size,), (1,))
            work = dist.all_reduce(joined, group=self.group, async_op=True)
            for gradients in (self, *following):
                gradients._in_flight = (work, gradients.flat)
            return
        self.finish()  # so at most one reduction is pending
        out = self.reduced if self._reduced_is_stale else torch.empty_like(self.reduced)
        work = reduce_scatter_into(out, self.flat, group=self.group, async_op=True)
        self._in_flight, self._is_last = (work, out), last

    def advance(self) -> None:
        """Wait for the reduction over `group`, add it to the reduced slice, free the flat buffer.

        After the step's last micro-batch this starts the all-reduce over replicas; `finish` ends
        it.
        """
        if self._in_flight is None:
            return
        work, out = self._in_flight
        self._in_flight = None
        work.wait()
        self._add(out)
        self._reduced_is_stale = False
        if self.sharded_accumulation:
            free(self.flat)
        if self._is_last:
            self._last = self._start_last()

    def _add(self, out: Tensor) -> None:
        """Add the result of a reduction to the reduced slice."""
        if out is not self.flat and out is not self.reduced:
            self.reduced.add_(out)

    def _start_last(self) -> dist.Work | None:
        """Start the all-reduce over replicas, after the last micro-batch of a step."""
        if self.replicas is None:
            return None
        return dist.all_reduce(self.reduced, group=self.replicas, async_op=True)

    def finish(self) -> None:
        """Wait for all reductions: `reduced` is then the sum over the data ranks."""
        self.advance()
        if self._last is not None:
            self._last.wait()
            self._last = None

    def is_before(self, other: FlatGradients) -> bool:
        """Return True if the replicated gradients `other` directly follow these in memory
        (`end_to_end`)."""
        mine, following = self.flat, other.flat
        return (
            not self.sharded_result
            and mine.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
            and mine.storage_offset() + mine.numel() == following.storage_offset()
        )


def _given(gradient: Tensor) -> Tensor:
    return gradient


def end_to_end(every: Sequence[FlatGradients]) -> None:
    """Allocate the replicated gradients (ZeRO 0) of several units in one buffer, in the given
    order.

    Adjacent gradients can then be reduced in one message. Call this before the first backward pass,
    because gradients are reset to zero. Gradients without a data group keep their buffers. So do
    those that were joined before, because others may hold views of them. Only gradients of the same
    data group share a buffer.
    """
    whole = [
        g
        for g in every
        if g.group is not None and not (g.sharded_result or g.sharded_accumulation or g.joined)
    ]
    kinds = dict.fromkeys((g.group, g.flat.dtype, g.flat.device) for g in whole)
    for kind in kinds:
        alike = [g for g in whole if (g.group, g.flat.dtype, g.flat.device) == kind]
        for gradients in alike:  # freed before the joined buffer is allocated
            gradients.joined = True
            free(gradients.flat)
        sizes = [g.layout.size for g in alike]
        joined = torch.zeros(sum(sizes), dtype=kind[1], device=kind[2])
        for gradients, part in zip(alike, joined.split(sizes), strict=True):
            gradients.place(part)
