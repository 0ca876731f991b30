"""A pipeline of modules of your own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpweave.layers.modes import in_mode
from warpweave.layers.records import collect_records
from warpweave.parallel import schedule as schedules
from warpweave.parallel.data.optimizer import AdamW, Rule, check_lr, check_rule, master_dtype
from warpweave.parallel.exchange import exchange
from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.parallel.pipeline import Distributed, Like, execute, relay
from warpweave.parallel.pipeline.losses import LOSS, Losses, Output, add_losses, split_losses
from warpweave.parallel.pipeline.stage import ChainStage, Segment
from warpweave.parallel.shard import ParamRecord
from warpweave.wrap.units import Sharded, device_of, make_units, share_buffers


class PipelineResult(NamedTuple):
    """The result of a step, the same on every rank.

    Attributes:
        loss: 0-dim, the mean over micro-batches and data ranks, auxiliary losses included.
        norm: 0-dim, the global gradient norm before clipping.

    Examples:
        >>> from warpweave import Mesh, Pipeline
        >>> pipeline = Pipeline([nn.Linear(16, 16)], Mesh().connect(), loss=nn.functional.mse_loss)
        >>> result = pipeline.step(torch.ones(4, 16), torch.zeros(4, 16), lr=1e-2)
        >>> result.norm.isfinite()
        tensor(True)
    """

    loss: Tensor
    norm: Tensor


class _Batch(NamedTuple):
    """The data of one micro-batch."""

    inputs: Tensor
    targets: Tensor


class _Stage(ChainStage):
    """A chain whose message is known from the first step on."""

    def __init__(self, segments: Sequence[Segment], arrive: Callable[[], None]) -> None:
        super().__init__(segments)
        self.message: Like | None = None
        self._arrive = arrive

    def input_like(self, mb: int) -> Like:
        """Return (shape, dtype, device) of the activation that the stage receives."""
        assert self.message is not None
        return self.message

    def tie(self) -> Tensor | None:
        """Return None: stages share no parameter."""
        return None

    def update(self) -> None:
        """Report that this stage's gradients are complete."""
        self._arrive()
        self.updated()


class Pipeline(Sharded):
    """Modules as pipeline stages, trained under any synchronous schedule and ZeRO stage.

    Stage i runs ``modules[i]``. The schedule places pp * c stages on pp ranks: ``interleaved`` puts
    stages r, r + pp, ... on rank r, ``zb-v`` and ``dualpipe-v`` fold the stages into a V. Each
    child of an `nn.Sequential` with something to train begins a block, which is gathered,
    recomputed, and reduced as a whole. Children that share parameters, and any other module, are
    one block.

    Args:
        modules: the stages, each x -> y, or x -> (y, losses) with auxiliary losses by name. Build
            all of them on every rank, on the rank's device; those of other ranks are not kept.
        mesh: the connected mesh, such as ``Mesh(pp=2, dp=2).connect()``. Tensor-parallel layers of
            `warpweave.layers` may be in the modules.
        loss: (output of the last stage, targets) -> 0-dim mean over a micro-batch.
        schedule: a name of ``warpweave train --schedule`` ("gpipe", "1f1b", "interleaved",
            "zb-h1", ...), or a file in torch's notation.
        microbatches: the number of micro-batches in a step.
        zero: the ZeRO stage, 0 to 3, over the data ranks.
        rule: the optimizer's arithmetic, by default ``AdamW()``.
        clip: the largest global gradient norm, or None.
        recompute: keep only the inputs of blocks, and compute the blocks again in backward.
        timeout: seconds that a message between stages may take.

    Parameters and buffers start with the values of the first data rank. Building a pipeline is
    collective over all ranks of the mesh.

    Raises:
        ValueError: the schedule is asynchronous or does not fit the stages and micro-batches, two
            stages share a parameter, or a rank has nothing to train.

    Examples:
        >>> from warpweave import Mesh
        >>> mesh, loss = Mesh().connect(), nn.functional.mse_loss
        >>> stages = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))]
        >>> pipeline = Pipeline(stages, mesh, loss=loss, microbatches=4)
        >>> x = torch.randn(32, 16)
        >>> result = pipeline.step(x, x.cumsum(1), lr=1e-2)
        >>> result.loss.shape
        torch.Size([])
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: ConnectedMesh,
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        schedule: str = "1f1b",
        microbatches: int = 1,
        zero: int = 0,
        rule: Rule | None = None,
        clip: float | None = None,
        recompute: bool = False,
        timeout: float = 300.0,
    ) -> None:
        mesh = connected(mesh)
        if mesh.size("outer") > 1:
            raise ValueError(f"Pipeline needs outer = 1, got {mesh.size('outer')}")
        if type(microbatches) is not int:
            raise ValueError(f"microbatches must be an integer, got {microbatches!r}")
        rule = AdamW() if rule is None else rule
        check_rule(rule, clip)  # before the modules change
        if isinstance(loss, type):
            raise ValueError(f"loss must be a function of (output, targets), got {loss}")
        self.microbatches, self._loss, self._is_broken = microbatches, loss, False
        self._lists = _lists_of(schedule, len(modules), mesh.size("pp"), microbatches)
        self._rank_of = schedules.placement(self._lists)
        _check_modules(modules)
        own = {s: modules[s] for s, rank in enumerate(self._rank_of) if rank == mesh.index("pp")}
        self.device = device_of(next(iter(own.values())))
        self.stages: dict[int, _Stage] = {}
        for stage, module in own.items():
            share_buffers(module, mesh)
            segments = self._segments(stage, module, len(modules), mesh, zero, recompute)
            self.stages[stage] = _Stage(segments, self._arrive)
        self.modules = nn.ModuleDict({str(stage): module for stage, module in own.items()})
        units = (unit for stage in self.stages.values() for unit in stage.units)
        super().__init__(units, mesh, rule, clip)
        self._guard(self.modules)
        group = mesh.group("pp")
        self._transport = Distributed(self._lists, group, device=self.device, timeout=timeout)
        self._shape: torch.Size | None = None  # of a micro-batch's inputs

    def _segments(
        self,
        stage: int,
        module: nn.Module,
        stages: int,
        mesh: ConnectedMesh,
        zero: int,
        recompute: bool,
    ) -> list[Segment]:
        """Return the chain of a stage: one segment for each block."""
        blocks, segments = _blocks_of(module), []
        for number, block in enumerate(blocks):
            named: dict[nn.Parameter, ParamRecord] = {}
            for name, child in block:
                path = ".".join(filter(None, (str(stage), name)))
                records = collect_records(child, prefix=path)
                for full, p in child.named_parameters(prefix=path):
                    named.setdefault(p, records[full])
            first, last = stage + number == 0, (stage, number) == (stages - 1, len(blocks) - 1)
            if first and not any(p.requires_grad for p in named):
                raise ValueError("stage 0 has no parameter that requires a gradient")
            path = ".".join(filter(None, (str(stage), block[0][0])))
            run = partial(self._run, path, [child for _, child in block], first, last, recompute)
            units = make_units(path, [(record, p) for p, record in named.items()], mesh, zero)
            segments.append(Segment(path, run, units))
        return segments

    def _run(
        self,
        path: str,
        children: Sequence[nn.Module],
        first: bool,
        last: bool,
        recompute: bool,
        x: Tensor | None,
        batch: _Batch,
    ) -> Output:
        """Run a block: the first of all reads the inputs, the last of all returns the loss."""
        call = partial(_chain, path, children)
        given = batch.inputs if first else x
        # torch's checkpoint restores the random state, so that dropout masks are the same again.
        y, losses = checkpoint(call, given, use_reentrant=False) if recompute else call(given)
        if not last:
            return y, losses
        total = {LOSS: self._loss(y, batch.targets).to(self._wide)}
        add_losses(total, losses)
        return None, total

    # ------------------------------------------------------------------ training

    def step(self, inputs: Tensor, targets: Tensor, *, lr: float) -> PipelineResult:
        """Train on one batch and update the parameters.

        Args:
            inputs: [batch, ...], this data rank's part of the batch, the same on all pipeline and
                tensor ranks; cut along dim 0 into micro-batches.
            targets: [batch, ...], likewise.
            lr: the learning rate.

        Raises:
            ValueError: the batch is not divisible into micro-batches of the shape of the first
                step, or the learning rate is negative or not finite.
        """
        check_lr(lr)
        batches = self._cut(inputs, targets)
        if self._is_broken:
            raise RuntimeError("an earlier step failed; create a new Pipeline")
        if self._shape is None:
            self._find_messages(batches[0])
        self._is_broken = True
        for unit in self.units:
            unit.gradients.clear()
        share = self.microbatches * self.mesh.size("data")
        seed = torch.full((), 1 / share, dtype=self._wide, device=self.device)
        for stage in self.stages.values():
            stage.begin(batches, seed)
        self._missing, self._lr = len(self.stages), lr
        execute(self._lists, self.stages, self._transport)
        self._is_broken = False
        found = (of for stage in self.stages.values() for of in stage.losses.values())
        losses = [loss for of in found for loss in of.values()]
        return PipelineResult(self._mean(losses), self._norm)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch without training, as `step` divides it; 0-dim."""
        batches = self._cut(inputs, targets)
        if self._shape is None:
            self._find_messages(batches[0])
        losses = []
        with in_mode(self.modules, training=False):
            for batch in batches:

                def forward(number: int, x: Tensor | None, batch: _Batch = batch) -> Tensor | None:
                    x, found = self.stages[number].evaluate(x, batch)
                    losses.extend(found.values())
                    return x

                group = self.mesh.group("pp")
                relay(forward, self.stages, self._rank_of, group, lambda n: self.stages[n].message)
        return self._mean(losses)

    def _arrive(self) -> None:
        """Update the parameters once the gradients of all stages of this rank are complete."""
        self._missing -= 1
        if not self._missing:
            self.optimizer.sum_partials()
            self._norm = self.optimizer.step(self._lr)

    @property
    def _wide(self) -> torch.dtype:
        return self.units[0].gradients.flat.dtype

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the mean over micro-batches and data ranks, summed over stages, on every rank."""
        total = torch.zeros((), dtype=self._wide, device=self.device)
        for loss in losses:
            total += loss
        total /= self.microbatches * self.mesh.size("data")
        for axis in ("data", "pp"):
            if (group := self.mesh.group(axis)) is not None:
                dist.all_reduce(total, group=group)
        return total

    def _cut(self, inputs: Tensor, targets: Tensor) -> list[_Batch]:
        m = self.microbatches
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            kinds = f"{type(inputs).__name__} and {type(targets).__name__}"
            raise ValueError(f"inputs and targets must be tensors, got {kinds}")
        if len(inputs) != len(targets) or not len(inputs) or len(inputs) % m:
            raise ValueError(
                f"inputs ({len(inputs)}) and targets ({len(targets)}) must have the same length "
                f"along dim 0, divisible by microbatches = {m}"
            )
        batches = [_Batch(*pair) for pair in zip(inputs.chunk(m), targets.chunk(m), strict=True)]
        found = batches[0].inputs.shape
        if self._shape is not None and self._shape != found:
            raise ValueError(
                f"expected micro-batches of shape {tuple(self._shape)}, as in the first step, got "
                f"{tuple(found)}"
            )
        return batches

    # ------------------------------------------------------------------ messages

    def _find_messages(self, batch: _Batch) -> None:
        """Find the shape of each stage's input: run the stages in order, on zeros, in evaluation
        mode. Collective over the pipeline ranks."""
        devices = [self.device.index] if self.device.type == "cuda" else []
        like: Like | None = None
        with in_mode(self.modules, training=False), torch.random.fork_rng(devices):
            for number, rank in enumerate(self._rank_of):
                made = None
                if (stage := self.stages.get(number)) is not None:
                    stage.message = like
                    shape, dtype, device = like or ((), torch.float32, self.device)
                    x = torch.zeros(shape, dtype=dtype, device=device) if number else None
                    try:
                        y, _ = stage.evaluate(x, batch)
                    except RuntimeError as error:
                        given = batch.inputs if x is None else x
                        what = f"an input {[*given.shape]} of {given.dtype}"
                        raise RuntimeError(f"stage {number} failed on {what}: {error}") from error
                    if y is not None:
                        made = [*y.shape], str(y.dtype).removeprefix("torch.")
                made = exchange(made, self.mesh.group("pp"))[rank]
                if made is not None:
                    like = tuple(made[0]), getattr(torch, made[1]), self.device
        self._shape = batch.inputs.shape


def _lists_of(name: str, stages: int, ranks: int, microbatches: int) -> schedules.Schedule:
    """Return the lists of a step, with reductions, messages, and updates. Raises ValueError if
    there is no such schedule, it is asynchronous, or it does not fit."""
    if not stages or stages % ranks:
        raise ValueError(
            f"the number of modules ({stages}) must be a positive multiple of pp = {ranks}"
        )
    known = [other for other, of in schedules.FAMILIES.items() if not of.asynchronous]
    if name in schedules.FAMILIES and name not in known:
        raise ValueError(
            f"schedule {name} updates weights within a step, which only Engine supports; choose "
            f"one of {', '.join(known)}"
        )
    family = schedules.find_family(name, known)
    if family.chunks is not None and stages != (needed := family.chunks * ranks):
        raise ValueError(f"schedule {name} needs {needed} modules if pp = {ranks}, got {stages}")
    lists = family.make(ranks, microbatches, stages // ranks)
    lists = schedules.with_update(schedules.with_reduce(schedules.with_comm(lists)))
    schedules.validate(lists, microbatches=microbatches)
    return lists


def _blocks_of(module: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Return the blocks of a stage, each a list of named modules that run one after the other.

    Every child of an nn.Sequential with something to train begins a block, unless children share
    parameters: then all are one block.
    """
    if type(module) is not nn.Sequential or not len(module):
        return [[("", module)]]
    children = list(module._modules.items())  # also a module that occurs twice
    users = Counter(p for _, child in children for p in {*child.parameters()})
    if any(count > 1 for count in users.values()):
        return [children]
    blocks: list[list[tuple[str, nn.Module]]] = [[]]
    for name, child in children:
        trains = any(p.requires_grad for p in child.parameters())
        if trains and any(p.requires_grad for _, m in blocks[-1] for p in m.parameters()):
            blocks.append([])
        blocks[-1].append((name, child))
    return blocks


def _chain(path: str, children: Sequence[nn.Module], x: Any) -> tuple[Tensor, Losses]:
    """Run modules one after the other; return the output and the sum of their losses.

    Raises ValueError unless the output is a floating-point tensor, or (y, losses by name).
    """
    total: dict[str, Tensor] = {}
    for child in children:
        output = child(x)
        pair = isinstance(output, tuple) and len(output) == 2
        x, losses = output if pair and isinstance(output[1], Mapping) else (output, {})
        if not isinstance(x, Tensor) or not x.is_floating_point():
            found = x.dtype if isinstance(x, Tensor) else type(output).__name__
            raise ValueError(
                f"{path}: {type(child).__name__} must return a floating-point tensor, or such a "
                f"tensor and a dict of losses, got {found}"
            )
        add_losses(total, split_losses((x, losses))[1])
    return x, total


def _check_modules(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if two stages share a parameter, or have different master dtypes."""
    owner: dict[nn.Parameter, int] = {}
    masters = {master_dtype(p.dtype) for m in modules for p in m.parameters() if p.requires_grad}
    if len(masters) > 1:
        raise ValueError("float64 parameters cannot be mixed with other dtypes in a Pipeline")
    for stage, module in enumerate(modules):
        for name, param in module.named_parameters():
            if owner.setdefault(param, stage) != stage:
                raise ValueError(
                    f"stage {stage} shares {name} with stage {owner[param]}: the stages of a "
                    "Pipeline cannot share parameters"
                )
