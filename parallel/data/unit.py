"""ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) for one unit, such as a transformer block.

Its parameters, gradients and optimizer state are each replicated or sharded over the data ranks. A
unit is constructed from its parts: parameters (`parameters`), gradients (`reduce`) and optimizer
state (`optimizer`), with a placement over the ranks that see different tokens, by default
``data`` = dp x cp. A ZeRO stage determines which of the three are sharded:

    stage   param       grad        optim         collectives
    0       replicate   replicate   replicate     all-reduce of gradients, once a step
    1       replicate   replicate   shard         reduce-scatter of gradients and all-gather of
                                                  updated parameters, once a step
    2       replicate   shard       shard         reduce-scatter after every micro-batch, all-gather
                                                  of updated parameters once a step
    3       shard       shard       shard         reduce-scatter after every micro-batch, all-gather
                                                  of parameters before every forward and backward

    state of four ranks between steps, for 4 slices a b c d of each
            parameters                   master weights and moments
    rank    0 to 2        3              0        1 to 3
    0       a b c d       a              a b c d  a
    1       a b c d       b              a b c d  b
    2       a b c d       c              a b c d  c
    3       a b c d       d              a b c d  d

Hybrid sharding (MiCS, Zhang et al. 2022, arXiv:2205.00119; FSDP, Zhao et al. 2023,
arXiv:2304.11277) shards over groups of adjacent data ranks, and replicates over the groups.
All-gathers and reduce-scatters are then within a group. Once per step, an all-reduce over the
replicas sums each slice's gradient. Four data ranks with dp_shard = 2 and gradients g0 to g3 of
slices a, b:

    rank                           0             1             2             3
    reduce-scatter in the group    g0a + g1a     g0b + g1b     g2a + g3a     g2b + g3b
    all-reduce over replicas       ga            gb            ga            gb
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpweave.parallel.collectives import all_gather_into
from warpweave.parallel.data.flat import FlatLayout
from warpweave.parallel.data.optimizer import OptimizerState, master_dtype
from warpweave.parallel.data.ordered import OrderedGradients
from warpweave.parallel.data.parameters import FlatParameters
from warpweave.parallel.data.reduce import FlatGradients
from warpweave.parallel.mesh import ConnectedMesh, factors
from warpweave.parallel.shard import ParamRecord


@dataclass(frozen=True)
class Placement:
    """The axes over which gradients are summed, and the axes over which each state is sharded.

    Attributes:
        sum_over: the axis whose ranks see different tokens; gradients are summed over it.
        shard_over: the part of `sum_over` over which states are sharded.
        replicate_over: the rest of `sum_over`, whose ranks hold equal shards; None if there is no
            rest.
        param, grad, optim: True if this state is sharded; otherwise it is replicated.
    """

    sum_over: str
    shard_over: str
    replicate_over: str | None
    param: bool = False
    grad: bool = False
    optim: bool = False


# ZeRO stage -> the states that it shards.
STAGES = {
    0: {},
    1: {"optim": True},
    2: {"optim": True, "grad": True},
    3: {"optim": True, "grad": True, "param": True},
}
VERSION = "version"
# Axis over which gradients are summed -> (axis of the shards, axis of their replicas).
SHARDS = {"data": ("shard", "replica"), "dp": ("dp_shard", "replica")}


def zero_placement(zero: int, sum_over: str, mesh: ConnectedMesh) -> Placement:
    """Return the placement of ZeRO stage `zero`, or of stage 0 if there is one rank to shard over.

    Raises:
        ValueError: the stage is not 0 to 3.
    """
    if zero not in STAGES:
        raise ValueError(f"the ZeRO stage must be one of 0, 1, 2, 3, got {zero!r}")
    shard_over, replicate_over = SHARDS.get(sum_over, (sum_over, None))
    states = STAGES[zero if mesh.group(shard_over) is not None else 0]
    return Placement(sum_over, shard_over, replicate_over, **states)


def version_age(kind: str) -> int:
    """Return 3 for the state "version3"; 0 for a state that is not an older parameter version."""
    return int(kind.removeprefix(VERSION)) if kind.startswith(VERSION) else 0


@dataclass(eq=False)
class Unit:
    """One block's parameters, gradients and optimizer state; `make_unit` constructs it.

    Attributes:
        name: used in error messages.
        mesh: the connected mesh.
        placement: the mesh axes over which gradients are summed and states are sharded.
        parameters, gradients, state: the parts, all with the same layout.
        tied: True if another pipeline stage holds the same (tied) parameters.
        owner: False if another stage counts this (tied) parameter in the gradient norm.
    """

    name: str
    mesh: ConnectedMesh
    placement: Placement
    parameters: FlatParameters
    gradients: FlatGradients
    state: OptimizerState
    tied: bool = False
    owner: bool = True

    def __post_init__(self) -> None:
        """Find the axes on which this rank comes first; once, not in every step."""
        self._first_on = {f for f in factors("world") if self.mesh.index(f) == 0}

    @property
    def layout(self) -> FlatLayout:
        """The layout of the flat buffers."""
        return self.parameters.layout

    @property
    def params(self) -> list[tuple[ParamRecord, nn.Parameter]]:
        """(record, parameter) pairs in the order of the flat buffers."""
        return self.parameters.params

    # ------------------------------------------------------------------ parts of the gradients

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
            own.update(factors(self.placement.shard_over))
        counted: list[slice] = []
        for r, part in self.layout.ranges_of(self.state.region):
            cut = {factor for axis in r.cut_axes for factor in factors(axis)}
            if not set(summed) <= self._first_on | own | cut:
                continue
            if counted and counted[-1].stop == part.start:
                part = slice(counted.pop().start, part.stop)
            counted.append(part)
        return [self.gradients.reduced[part] for part in counted]

    # ------------------------------------------------------------------ state in and out

    def buffer(self, kind: str) -> Tensor:
        """The flat buffer of "param" (the master), "grad" (reduced), a moment, or an older version
        of the parameters: "version1" is one update old, and so on."""
        own = {"param": self.state.master, "grad": self.gradients.reduced}
        if age := version_age(kind):
            return self.parameters.older(age)[self.state.region]
        return own[kind] if kind in own else self.state.moments[kind]

    @torch.no_grad()
    def write(self, kind: str, value: Callable[[ParamRecord], Tensor]) -> None:
        """Set a state. ``value(record)`` returns the tensor that this rank's mesh coordinates hold
        (`ParamRecord.slice`); it is the same on all ranks over which ZeRO shards it.

        "param" sets the master weights and the parameters, in all versions. For a moment, only the
        elements that this rank keeps are read, so the rest of a tensor in a mapped file is not
        loaded.

        Raises ValueError if a tensor does not have the record's `local_shape`.
        """
        buffer, size, region = self.buffer(kind), self.layout.size, self.state.region
        whole = torch.zeros(size, dtype=buffer.dtype, device=buffer.device)
        kept = slice(region.stop - len(buffer), region.stop)
        age = version_age(kind)
        own = slice(0, size) if kind == "param" or age else kept
        for record in self._records(kind):
            local = value(record)
            if tuple(local.shape) != record.local_shape:
                held, given = record.local_shape, tuple(local.shape)
                raise ValueError(
                    f"{record.name}: expected {kind} of shape {held} on this rank, got {given}"
                )
            at = self.layout.offsets[record.name]
            start, stop = max(own.start - at, 0), min(own.stop - at, local.numel())
            if start < stop:
                whole[at + start : at + stop].copy_(local.reshape(-1)[start:stop])
        if kind == "param" or age:
            self.parameters.set(whole, age)
        buffer.copy_(whole[kept])

    @torch.no_grad()
    def read(self, kind: str) -> Iterator[tuple[ParamRecord, Tensor]]:
        """Yield (record, logical tensor) of a state. Collective over all axes that shard it."""
        flat = self.buffer(kind)
        if missing := len(self.state.master) - len(flat):
            flat = torch.cat([flat.new_zeros(missing), flat])
        if self.placement.optim:
            whole = torch.empty(self.layout.size, dtype=flat.dtype, device=flat.device)
            all_gather_into(whole, flat.contiguous(), group=self.parameters.group)
            flat = whole
        for record in self._records(kind):
            yield record, record.assemble(self.layout.view(flat, record), self._gather)

    def _records(self, kind: str) -> list[ParamRecord]:
        """The parameters that have this state."""
        every = [record for record, _ in self.params]
        return [r for r in every if not r.matrices] if kind in self.state.of_rest else every

    def _gather(self, x: Tensor, axis: str) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.mesh.size(axis))]
        dist.all_gather(parts, x.contiguous(), group=self.mesh.group(axis))
        return parts


def guard_state_dict(module: nn.Module, units: Sequence[Unit], whole: str) -> None:
    """Make ``state_dict`` wait for a pending all-gather, and reject freed parameters (ZeRO 3);
    `whole` is the call that gives whole tensors."""

    def check(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        for unit in units:
            unit.parameters.wait()
            if not unit.parameters.materialised:
                raise RuntimeError(
                    f"ZeRO 3 keeps only a shard of {unit.name} on this rank; instead of "
                    f"state_dict, use {whole}, which gives whole tensors"
                )

    module.register_state_dict_pre_hook(check)


def read_units(
    units: Iterable[Unit], kind: str, mesh: ConnectedMesh
) -> Iterator[tuple[ParamRecord, Tensor, bool]]:
    """Yield (record, logical tensor, mine) of a state of the units of this rank's stages.

    For each tensor `mine` is True on exactly one data and tensor rank, which writes it into a
    checkpoint. Collective over these ranks.
    """
    ranks = mesh.size("data") * mesh.size("tp")
    me, number = mesh.index("data") * mesh.size("tp") + mesh.index("tp"), 0
    for unit in units:
        for record, tensor in unit.read(kind):
            yield record, tensor, unit.owner and number % ranks == me
            number += 1


def make_unit(
    name: str,
    params: Iterable[tuple[ParamRecord, nn.Parameter]],
    mesh: ConnectedMesh,
    *,
    zero: int = 0,
    device: torch.device | str = "cpu",
    ordered: bool = False,
    tied: bool = False,
    owner: bool = True,
) -> Unit:
    """Construct a unit of the given ZeRO stage.

    Args:
        name: used in error messages.
        params: (record, parameter) pairs of one dtype and one ``record.sum_over``. Their ``.data``
            and ``.grad`` become views into the unit's flat buffers. Their values are copied there
            (zeros for parameters on the meta device).
        mesh: the connected mesh.
        zero: ZeRO stage, 0 to 3.
        device: of the buffers.
        ordered: sum gradients in the order of the global micro-batches (`data.ordered`).
        tied, owner: as for `Unit`.

    Raises:
        ValueError: the stage is unknown, there are several dtypes or axes to sum over, a shape
            differs from its record's, or gradients are to be summed in order over replicas of
            shards.
    """
    given = {record.name: (record, param) for record, param in params}
    dtypes = {param.dtype for _, param in given.values()}
    if len(dtypes) != 1:
        raise ValueError(
            f"unit {name} needs parameters of one dtype, got {sorted(map(str, dtypes))}"
        )
    axes = {record.sum_over for record, _ in given.values()}
    if len(axes) != 1:
        raise ValueError(
            f"all gradients of unit {name} must be summed over the same mesh axis, got "
            f"{sorted(axes)}"
        )
    (dtype,), (sum_over,), device = dtypes, axes, torch.device(device)
    place = zero_placement(zero, sum_over, mesh)
    shards, index = mesh.size(place.shard_over), mesh.index(place.shard_over)
    layout = FlatLayout((record for record, _ in given.values()), shards, index)
    pairs = [given[record.name] for record in layout.records]
    group = mesh.group(place.shard_over)
    parameters = FlatParameters(layout, pairs, group, sharded=place.param, device=device)
    replicated = place.optim and place.replicate_over is not None
    replicas = mesh.group(place.replicate_over) if replicated else None
    over = group if place.optim else mesh.group(sum_over)
    wide = master_dtype(dtype)
    gradients: FlatGradients
    if ordered and replicas is None:
        gradients = OrderedGradients(
            layout, pairs, over, sharded_result=place.optim, dtype=wide, device=device
        )
    elif ordered:
        raise ValueError(
            f"unit {name}: the ordered reduction of gradients does not support hybrid sharding "
            "(replicas of shards)"
        )
    else:
        gradients = FlatGradients(
            layout,
            pairs,
            over,
            replicas=replicas,
            sharded_result=place.optim,
            sharded_accumulation=place.grad,
            dtype=wide,
            device=device,
        )
    state = OptimizerState(parameters, layout.own if place.optim else slice(0, layout.size))
    return Unit(name, mesh, place, parameters, gradients, state, tied=tied, owner=owner)
