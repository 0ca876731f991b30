"""A pipeline stage: a chain of segments, each with a separate autograd graph.

A segment is a callable with the units (flat parameter buffers) that it reads, usually one
transformer block. The graph ends at each boundary, so the stage itself schedules what happens
between two segments, without hooks. It all-gathers the next segment's parameters during this one,
frees them, keeps or recomputes activations, and starts a unit's gradient reduction during the
backward of earlier segments.

    ZeRO 3, three segments; one micro-batch, time from left to right
    compute             F0        F1        F2        B2        B1           B0
    network   gather 0  gather 1  gather 2  -         gather 1  gather 0,    reduce-
                                                                reduce-      scatter 1
                                                                scatter 2    and then 0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from warpweave.kernels.runtime.wgrad import WeightGradients, accumulate, collect
from warpweave.parallel.context.kept import Kept
from warpweave.parallel.data.batch_norm import recomputing
from warpweave.parallel.data.reduce import end_to_end
from warpweave.parallel.data.unit import Unit
from warpweave.parallel.pipeline.interface import check_version
from warpweave.parallel.pipeline.losses import Losses, Output, add_losses, split_losses

# (x, batch) -> y, or (y, losses). x is None for the first segment of the first stage. y is None for
# the last segment of the last stage, which returns only losses.
SegmentFn = Callable[[Tensor | None, Any], Output]


@dataclass(frozen=True)
class Segment:
    """One link of the chain.

    Attributes:
        name: used in error messages.
        fn: computes the activation, and losses if it has any (`losses`), from the input and the
            micro-batch's data.
        units: the units whose parameters `fn` reads.
        recompute: full activation checkpointing (Chen et al. 2016, arXiv:1604.06174). Keep only the
            input and the results of attention over context ranks (`parallel.context.kept`), and run
            `fn` again in the backward pass.
    """

    name: str
    fn: SegmentFn
    units: tuple[Unit, ...]
    recompute: bool = False


class _Chain:
    """Segments in forward order, and the units whose gradients each one's backward completes."""

    def __init__(self, segments: Sequence[Segment], shared: Collection[Unit] = ()) -> None:
        self.segments, self._shared = tuple(segments), shared
        self.units = list(dict.fromkeys(unit for s in self.segments for unit in s.units))
        # A unit's gradient is complete when the first segment that reads it has run backward.
        self.completes: list[list[Unit]] = [[] for _ in self.segments]
        for unit in self.units:
            if unit in shared:
                continue
            first = next(k for k, s in enumerate(self.segments) if unit in s.units)
            self.completes[first].append(unit)

    def fused(self) -> _Chain:
        """Return the chain as one segment with one autograd graph, and nothing between segments."""

        def run(x: Tensor | None, batch: Any) -> Output:
            total: dict[str, Tensor] = {}
            for segment in self.segments:
                x, losses = split_losses(segment.fn(x, batch))
                add_losses(total, losses)
            return x, total

        return _Chain([Segment("stage", run, tuple(self.units))], self._shared)


def _roots(y: Tensor | None, losses: Losses) -> tuple[Tensor, ...]:
    """The roots of a segment's backward pass: its activation, if there is one, and the losses that
    require a gradient."""
    ends = (loss for loss in losses.values() if loss.requires_grad)
    return (*(() if y is None else (y,)), *ends)


@dataclass
class _Saved:
    """The data of a micro-batch that its forward keeps for its backward; lists are by segment."""

    chain: _Chain
    weights: list[WeightGradients]
    version: int  # of the weights that it reads
    losses: Losses = field(default_factory=dict)
    inputs: list[Tensor | None] = field(default_factory=list)
    outputs: list[tuple[Tensor, ...] | Kept] = field(default_factory=list)  # roots of backward


class ChainStage:
    """Run one stage's forward and backward passes, one micro-batch at a time.

    Args:
        segments: the chain, in forward order.
        shared: units that another stage of this rank reduces (a tied embedding if the first and
            last stage are on one rank).
        bucket_bytes: the minimum size of a bucket for reducing gradients of ZeRO 0 and 1. The
            default is 25 MiB as in torch's DDP, because small messages cost more than their overlap
            saves.
        versions: the number of newest versions of the weights to keep (weight stashing). If it is
            more than one, a micro-batch may run backward after an UPDATE, with the weights that its
            forward read. Not supported for parameters that ZeRO 3 shards.

    Attributes:
        losses: micro-batch -> name -> detached loss, for micro-batches that ended in this step.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        shared: Collection[Unit] = (),
        bucket_bytes: int = 25 * 2**20,
        versions: int = 1,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self._cut = _Chain(segments, shared)
        self.segments, self.units = self._cut.segments, self._cut.units
        completed = [unit for units in reversed(self._cut.completes) for unit in units]
        end_to_end([unit.gradients for unit in completed])
        self._order = {unit: i for i, unit in enumerate(completed)}
        self._views = {p: view for unit in self.units for p, view in unit.gradients.views.items()}
        # A boundary has a small cost, so use none if nothing happens between segments.
        self._must_cut = any(s.recompute for s in self.segments) or any(
            unit.placement.param or unit.gradients.sharded_accumulation for unit in self.units
        )
        self._fused = self._cut.fused()
        # Gradients that do not fill a bucket before the last one is complete cannot overlap.
        later = [unit.gradients for unit in self.units[1:]]
        whole = sum(g.flat.nbytes for g in later if g.group is not None)
        self._overlaps = whole > 0 and whole >= bucket_bytes
        self._saved: dict[int, _Saved] = {}
        for unit in self.units if versions > 1 else ():
            unit.parameters.keep_versions(versions)
        self._newest = 0  # version of the weights, counted from the start of a run
        self._batches: dict[int, Any] = {}  # data of micro-batches that have not ended
        self._fed = 0
        self._each = self._backwards_left = 0  # micro-batches from one REDUCE to the next
        self._dloss: Tensor | None = None
        self._bucket: list[Unit] = []  # units with complete gradients that do not yet fill a bucket
        self._reducing: list[Unit] = []
        self.losses: dict[int, Losses] = {}

    def begin(
        self, batches: Sequence[Any], dloss: Tensor | None = None, *, each: int | None = None
    ) -> None:
        """Start a step: `batches[mb]` is passed to the segments as the data of micro-batch `mb`.

        `dloss` (0-dim) is the gradient from which every loss's backward starts: the loss scale, by
        default 1. `each` is the number of micro-batches from one REDUCE to the next, by default
        all.
        """
        self._batches, self._fed, self._dloss = dict(enumerate(batches)), len(batches), dloss
        self._each = self._backwards_left = len(batches) if each is None else each
        self._saved.clear()
        self.losses = {}

    def feed(self, batches: Sequence[Any]) -> None:
        """Add the data of the following micro-batches, for the next pass of a run that is left
        open, and forget the losses."""
        self._batches |= enumerate(batches, self._fed)
        self._fed += len(batches)
        self.losses = {}

    def start(self) -> None:
        """Begin a run of the lists: the current weights are version 0."""
        self._newest = 0

    def updated(self) -> None:
        """Note that UPDATE has made the next version."""
        self._newest += 1

    def _age(self, mb: int) -> int:
        """The number of updates by which the weights that `mb` reads are older than the newest."""
        newest, version = self._newest, self._saved[mb].version
        kept = min(unit.parameters.kept for unit in self.units) if newest != version else 1
        check_version(mb, version, range(newest - kept + 1, newest + 1))
        return newest - version

    # ------------------------------------------------------------------ forward

    def forward(self, mb: int, x: Tensor | None, version: int = 0) -> Tensor | None:
        """Run the chain on micro-batch `mb` and return the activation for the next stage.

        The last stage returns None. Raises ValueError if the stage does not hold `version`.
        """
        chain = self._chain(mb)
        segments = chain.segments
        saved = _Saved(chain, [WeightGradients(self._views) for _ in segments], version)
        self._saved[mb] = saved
        age = self._age(mb)
        total: dict[str, Tensor] = {}
        for k, segment in enumerate(segments):
            self._enter(segments, k, k + 1, age)
            entry = None if x is None else x.detach().requires_grad_()
            kept = Kept() if segment.recompute else None
            with torch.set_grad_enabled(kept is None), kept.first() if kept else nullcontext():
                y, losses = split_losses(segment.fn(entry, self._batches[mb]))
            saved.inputs.append(entry)
            saved.outputs.append(_roots(y, losses) if kept is None else kept)
            x = None if y is None else y.detach()
            add_losses(total, {name: loss.detach() for name, loss in losses.items()})
            if k + 1 < len(segments):  # the backward pass needs the last segment first
                self._leave(segments, k, k + 1)
        saved.losses = total
        return x

    def _chain(self, mb: int) -> _Chain:
        """Return the chain for `mb`. It is segmented if parameters are gathered or gradients are
        reduced between segments, otherwise fused.

        Gradients of ZeRO 0 and 1 are reduced once, during the backward of the last micro-batch.
        """
        if self._must_cut or (self._overlaps and mb % self._each == self._each - 1):
            return self._cut
        return self._fused

    @torch.no_grad()
    def evaluate(
        self, x: Tensor | None, batch: Any, final: SegmentFn | None = None
    ) -> tuple[Tensor | None, Losses]:
        """Return (y, losses) of the chain without keeping activations; `final` replaces the last
        segment."""
        total: dict[str, Tensor] = {}
        for k, segment in enumerate(self.segments):
            self._enter(self.segments, k, k + 1)
            last = k + 1 == len(self.segments)
            fn = final if last and final is not None else segment.fn
            x, losses = split_losses(fn(x, batch))
            add_losses(total, losses)
            self._leave(self.segments, k, k + 1)
        return x, total

    # ------------------------------------------------------------------ backward

    def backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """Compute all gradients of micro-batch `mb`; return the gradient of the stage's input.

        `dy` is the gradient of the stage's output; None on the last stage.
        """
        return self._backward(mb, dy, deferred=False)

    def backward_input(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """Like `backward`, but defer the weight gradients of linear layers."""
        return self._backward(mb, dy, deferred=True)

    def backward_weight(self, mb: int) -> None:
        """Compute the deferred weight gradients of `mb`."""
        age = self._age(mb)
        saved = self._saved.pop(mb)
        self._backwards_left -= 1
        for segment, weights, completed in reversed(
            list(zip(saved.chain.segments, saved.weights, saved.chain.completes, strict=True))
        ):
            for unit in segment.units:
                unit.parameters.show(age)
                unit.gradients.before_backward()
            weights.buffers = self._views
            weights.run()
            for unit in segment.units:
                unit.gradients.after_backward()
            self._reduce_completed(completed)
        self._end(mb, saved)

    def _backward(self, mb: int, dy: Tensor | None, *, deferred: bool) -> Tensor | None:
        age = self._age(mb)
        saved = self._saved[mb] if deferred else self._saved.pop(mb)
        if not deferred:
            self._backwards_left -= 1
        gradient = dy
        segments = saved.chain.segments
        for k, segment in reversed([*enumerate(segments)]):
            self._enter(segments, k, k - 1, age)
            entry, roots = saved.inputs.pop(), saved.outputs.pop()
            if isinstance(roots, Kept):
                with torch.enable_grad(), roots.second(), recomputing():
                    roots = _roots(*split_losses(segment.fn(entry, self._batches[mb])))
            # The first root is the activation, if there is one; all others are losses.
            of_y = () if gradient is None else (gradient,)
            seeds = of_y + (self._dloss,) * (len(roots) - len(of_y))
            weights = saved.weights[k]
            # Gradients that are reduced in every micro-batch have no buffer until W.
            apart = deferred and any(u.gradients.sharded_accumulation for u in segment.units)
            if apart:
                weights.buffers = {}
            for unit in segment.units:
                begins = unit.gradients.before_input if apart else unit.gradients.before_backward
                begins()
            with (collect if deferred else accumulate)(weights):
                torch.autograd.backward(roots, seeds)
            for unit in segment.units:
                if apart:
                    unit.gradients.after_input(weights)
                else:
                    unit.gradients.after_backward()
            gradient = None if entry is None else entry.grad
            del roots
            self._leave(segments, k, k - 1)
            if not deferred:
                self._reduce_completed(saved.chain.completes[k])
        if not deferred:
            self._end(mb, saved)
        return gradient

    def _end(self, mb: int, saved: _Saved) -> None:
        self.losses[mb] = saved.losses
        del self._batches[mb]

    # ------------------------------------------------------------------ parameters and gradients

    def _enter(self, segments: Sequence[Segment], k: int, following: int, age: int = 0) -> None:
        """Wait for segment k's parameters, `age` updates old, and start the all-gather of the next
        segment's."""
        for unit in segments[k].units:
            unit.parameters.unshard()
        for unit in segments[k].units:
            unit.parameters.wait()
            unit.parameters.show(age)
        if 0 <= following < len(segments):
            for unit in segments[following].units:
                unit.parameters.unshard()

    def _leave(self, segments: Sequence[Segment], k: int, following: int) -> None:
        """Free segment k's parameters, unless the next segment also reads them."""
        kept = segments[following].units if 0 <= following < len(segments) else ()
        for unit in segments[k].units:
            if unit not in kept:
                unit.parameters.reshard()

    def _reduce_completed(self, units: Sequence[Unit]) -> None:
        """Start reducing `units`, whose gradients a segment has just completed, if they are due.

        Sharded gradients (ZeRO 2 and 3, and all that are summed in order) are reduced after every
        micro-batch, at most two units at a time, to bound the memory of unreduced buffers. Other
        gradients are reduced in buckets after the last micro-batch.
        """
        for unit in units:
            if unit.gradients.sharded_accumulation:
                self._start_reducing(unit)
                if len(self._reducing) > 2:
                    self._reducing.pop(0).gradients.advance()
            elif self._backwards_left == 0:
                self._bucket.append(unit)
                if sum(u.gradients.flat.nbytes for u in self._bucket) >= self.bucket_bytes:
                    self._empty_bucket()

    def _start_reducing(self, unit: Unit, following: Sequence[Unit] = ()) -> None:
        last = self._backwards_left == 0
        unit.gradients.start([other.gradients for other in following], last=last)
        self._reducing += [unit, *following]

    def _empty_bucket(self) -> None:
        """Start reducing the bucket. Gradients that are adjacent in memory share a message."""
        runs: list[list[Unit]] = []
        for unit in sorted(self._bucket, key=lambda unit: self._order[unit]):
            if runs and runs[-1][-1].gradients.is_before(unit.gradients):
                runs[-1].append(unit)
            else:
                runs.append([unit])
        self._bucket.clear()
        for first, *following in runs:
            self._start_reducing(first, following)

    def reduce(self) -> None:
        """Start the remaining reductions, and wait for all of them."""
        self._empty_bucket()
        while self._reducing:
            self._reducing.pop(0).gradients.advance()
        for unit in self._order:
            unit.gradients.finish()
        self._backwards_left = self._each
