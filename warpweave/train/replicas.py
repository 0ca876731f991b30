"""Bitwise comparison of replicated state between ranks, by checksums.

A parameter, its master weight, and its moments are equal on all ranks that hold the same slice of
it: over tp if it is not sharded (norms), over the data ranks if ZeRO does not shard it, over the
replicas of a shard, and at both ends of a pipeline if it is tied. `ReplicaCheck` gathers a 64-bit
sum of the bits of each in one small collective, and names the rank whose sum differs:

    four ranks, dp = tp = 2, ZeRO 1             rank 0   rank 1   rank 2   rank 3
    blocks.0.norm.weight                        a        a        a        a
    blocks.0.norm.weight (exp_avg), shard 0, 1  b        b        c        c
    blocks.0.mlp.up.weight, tp 0, 1             d        e        d        x       rank 3 differs

A flipped bit in data that only one rank holds (a shard's moments of tp-sharded matrices) cannot be
detected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from warpweave.model.engine import Engine
from warpweave.parallel.collectives import gather
from warpweave.parallel.data.unit import Unit
from warpweave.parallel.exchange import exchange
from warpweave.parallel.mesh import Mesh


def checksum(x: Tensor) -> Tensor:
    """Sum the bits of `x` as 64-bit integers, 0-dim; one flipped bit always changes the sum."""
    raw = x.detach().contiguous().view(-1).view(torch.uint8)
    if odd := -raw.numel() % 8:
        raw = F.pad(raw, (0, odd))
    return raw.view(torch.int64).sum()


def _bits_of(unit: Unit) -> Iterator[tuple[str, Tensor, slice, bool]]:
    """Yield (name, flat buffer, its place in the layout, True if ZeRO shards it) for a unit."""
    parameters, state, layout = unit.parameters, unit.state, unit.layout
    if parameters.shard is not None:
        yield "", parameters.shard, layout.own, True
    else:
        parameters.wait()
        yield "", parameters.flat, slice(0, layout.size), False
    sharded = unit.placement.optim
    if not state.is_master:
        yield " (master)", state.master, state.region, sharded
    for name, moment in state.moments.items():
        stop = state.region.stop
        yield f" ({name})", moment, slice(stop - len(moment), stop), sharded


def _held(engine: Engine) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (tensor's name, position of this rank's slice, the slice) of parameters and states."""
    mesh = engine.mesh
    for unit in engine.units:
        shard = mesh.index(unit.placement.shard_over)
        bounds = [*unit.layout.offsets.values(), unit.layout.size][1:]
        for kind, buffer, place, sharded in _bits_of(unit):
            for record, stop in zip(unit.layout.records, bounds, strict=True):
                first = max(unit.layout.offsets[record.name], place.start)
                last = min(stop, place.stop)
                if first >= last:
                    continue
                at = {axis: mesh.index(axis) for axis in (*record.cut_axes, "outer")}
                at |= {"shard": shard} if sharded else {}
                part = buffer[first - place.start : last - place.start]
                yield record.name + kind, str(at), part


class ReplicaCheck:
    """Compares an engine's state and the data of its step between the ranks of its mesh."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._keys: list[list[list[str]]] = []  # per rank, set by the first comparison
        self._leader: Any = None  # int64 [ranks, n]: index of the first value with the same key

    def compare(self, data: Mapping[str, Any], own: float) -> tuple[str | None, list[float]]:
        """Compare the ranks. Collective.

        `data` maps a name to a tensor that must be equal within a data replica, or a number that
        must be equal on all ranks. Returns a description of the ranks that differ (the same on all
        ranks) or None, and every rank's `own`, a number that is gathered along the way.
        """
        mesh = self._engine.mesh
        replica = str({axis: mesh.index(axis) for axis in ("outer", "dp")})
        every = [("the optimizer's step count", "", self._engine.optimizer.count)]
        for name, value in data.items():
            held = value if isinstance(value, Tensor) else torch.tensor(value)
            every.append((name, replica if isinstance(value, Tensor) else "", held))
        every += _held(self._engine)  # last, because a difference above also makes these differ
        if not self._keys:
            self._find_leaders([[name, at] for name, at, _ in every])
        device = self._engine.device
        sums = torch.stack([checksum(x).to(device, non_blocking=True) for *_, x in every])
        row = torch.zeros(1, 1 + self._leader.shape[1], dtype=torch.int64, device=device)
        row[0, 0], row[0, 1 : 1 + len(sums)] = round(own * 1e6), sums
        table = gather(row, mesh.group("world")).cpu().numpy()
        values = table[:, 1:]
        differs = values != values.reshape(-1)[self._leader]
        words = self._words(mesh.sizes, values, differs) if differs.any() else None
        return words, [microseconds / 1e6 for microseconds in table[:, 0].tolist()]

    def _find_leaders(self, mine: list[list[str]]) -> None:
        """Exchange the names of the values that each rank compares, once."""
        self._keys = exchange(mine, self._engine.mesh.group("world"))
        most = max(map(len, self._keys))
        first: dict[tuple[str, ...], int] = {}
        self._leader = np.arange(len(self._keys) * most).reshape(-1, most)
        for rank, keys in enumerate(self._keys):
            for i, key in enumerate(keys):
                self._leader[rank, i] = first.setdefault(tuple(key), rank * most + i)

    def _words(self, mesh: Mesh, values: np.ndarray, differs: np.ndarray) -> str:
        """ "rank 3 (tp=1) differs from ranks 0, 1, 2 in NAME", for the first differing tensor."""
        group = self._leader[differs][0]
        holders = [(int(rank), int(i)) for rank, i in np.argwhere(self._leader == group)]
        by_value: dict[int, list[int]] = defaultdict(list)
        for rank, i in holders:
            by_value[int(values[rank, i])].append(rank)
        most, *others = sorted(by_value.values(), key=len, reverse=True)
        rank, i = holders[0]
        name = self._keys[rank][i][0]
        more = len({self._keys[r][i][0] for r, i in np.argwhere(differs)} - {name})
        also = f" (and {more} other tensor{'s' * (more > 1)})" if more else ""
        if len(most) > 1 and all(len(ranks) < len(most) for ranks in others):
            odd = sorted(rank for ranks in others for rank in ranks)
            verb = "differs" if len(odd) == 1 else "differ"
            return f"{mesh.names(odd)} {verb} from {mesh.names(most)} in {name}{also}"
        return f"{' and '.join(map(mesh.names, by_value.values()))} differ in {name}{also}"
