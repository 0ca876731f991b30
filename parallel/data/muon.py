"""Whole matrices for Muon from the ranks' slices: one rank orthogonalizes each and distributes it.

ZeRO slices ignore the boundaries of matrices, and a tensor rank has some rows or columns of each. A
piece of a matrix cannot be orthogonalized alone. So every rank of data x tensor is assigned whole
matrices, the most expensive first, each to the rank with the least work, and

    1. the pieces of each go to the data ranks of its owner        one all-to-all over data ranks
    2. ... and from there to the owner                             one all-to-all over tensor ranks
    3. the owner orthogonalizes it: queries, keys and values separately, gate and up separately
    4. and 5. the pieces go back the same way

    matrices A and B on two data ranks; rank 0 owns A, rank 1 owns B
    ZeRO 1 to 3   rank 0  [ A A A A ]      -> A A A A A' -> O(A) -> [ O(A)      ]
                  rank 1  [ A' B B  ]      -> B B        -> O(B) -> [ O(A)' O(B)]
    ZeRO 0        both    [ A A A A A' B B ]: nothing goes in, O(A) and O(B) go to both

An element moves over each of the two axes at most once in each direction. A matrix that is
replicated over tensor ranks is treated like those of ZeRO 0. With hybrid sharding, each replica
does the work once. The result depends on the layout only by rounding: it is O of the same matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.parallel.collectives import start_all_to_all
from warpweave.parallel.data.unit import Unit
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.parallel.shard import ParamRecord


@dataclass(frozen=True)
class _Matrix:
    """A parameter of one unit, and the rank that orthogonalizes it.

    Attributes:
        unit: index of its unit.
        record: its record.
        offset: position of its first element on this tensor rank, in the unit's buffer.
        owner: the owner's index on the data axis and on the tensor axis.
    """

    unit: int
    record: ParamRecord
    offset: int
    owner: tuple[int, int]


class _Axis:
    """All-to-all among the ranks of an axis, each of which has a piece of every matrix."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: int, index: int) -> None:
        self.group, self.ranks, self.index = group, ranks, index

    def exchange(self, to: list[list[Tensor]], sizes: list[list[int]], like: Tensor) -> list[list]:
        """Send ``to[r]`` to rank r; return what each rank sent, flat, in pieces of `sizes`."""
        if self.group is None:
            return [[x.reshape(-1) for x in to[0]]]
        send = torch.cat([like.new_empty(0), *(x.reshape(-1) for xs in to for x in xs)])
        recv = like.new_empty(sum(map(sum, sizes)))
        given = [sum(x.numel() for x in xs) for xs in to]
        start_all_to_all(send, recv, given, [*map(sum, sizes)], self.group).wait()
        parts = iter(recv.split([size for of in sizes for size in of]))
        return [[next(parts) for _ in of] for of in sizes]

    def collect(
        self,
        pieces: Mapping[int, Tensor],
        owners: Mapping[int, int],
        sizes: Mapping[int, list[int]],
    ) -> dict[int, list[Tensor]]:
        """Return matrix -> its pieces in rank order, for the matrices that this rank owns.

        ``sizes[k]`` holds the number of elements of matrix k on each rank.
        """
        mine = [k for k in pieces if owners[k] == self.index]
        to = [[x for k, x in pieces.items() if owners[k] == r] for r in range(self.ranks)]
        of = [[sizes[k][r] for k in mine] for r in range(self.ranks)]
        found = self.exchange(to, of, next(iter(pieces.values())))
        return {k: [found[r][at] for r in range(self.ranks)] for at, k in enumerate(mine)}

    def spread(
        self,
        pieces: Mapping[int, list[Tensor]],
        owners: Mapping[int, int],
        sizes: Mapping[int, list[int]],
        like: Tensor,
    ) -> dict[int, Tensor]:
        """Return matrix -> this rank's piece. ``pieces[k][r]`` is rank r's piece of a matrix that
        this rank owns."""
        to = [[pieces[k][r] for k in owners if k in pieces] for r in range(self.ranks)]
        of = [[k for k in owners if owners[k] == r] for r in range(self.ranks)]
        counts = [[sizes[k][self.index] for k in ks] for ks in of]
        found = self.exchange(to, counts, like)
        return {k: x for ks, xs in zip(of, found, strict=True) for k, x in zip(ks, xs, strict=True)}


class WholeMatrices:
    """The matrices of units that are sharded over one axis.

    Args:
        units: this rank's units, in the same order on all ranks of a stage.
        mesh: the connected mesh.

    Raises:
        ValueError: a record says that its parameter is a matrix, but it does not have two dims or
            the right number of rows, or it is sharded over an axis other than tp.
    """

    def __init__(self, units: Sequence[Unit], mesh: ConnectedMesh) -> None:
        self.units, axis = units, units[0].placement.shard_over
        self._sharded = units[0].placement.optim
        self._data = _Axis(mesh.group(axis), mesh.size(axis), mesh.index(axis))
        self._tensor = _Axis(mesh.group("tp"), mesh.size("tp"), mesh.index("tp"))
        self._coords = [dict(mesh.coords, tp=t) for t in range(self._tensor.ranks)]
        self._matrices = self._assign()

    def _assign(self) -> list[_Matrix]:
        """Assign every matrix, in order of cost, to the rank with the least work so far."""
        every = [
            (at, record, unit.layout.offsets[record.name])
            for at, unit in enumerate(self.units)
            for record in unit.layout.records
            if record.matrices
        ]
        for _, record, _ in every:
            _check_matrices(record)
        found: dict[int, _Matrix] = {}
        load = [[0] * self._tensor.ranks for _ in range(self._data.ranks)]
        for k in sorted(range(len(every)), key=lambda k: -_cost(every[k][1])):
            least = min(
                ((d, t) for d in range(self._data.ranks) for t in range(self._tensor.ranks)),
                key=lambda at: load[at[0]][at[1]],
            )
            load[least[0]][least[1]] += _cost(every[k][1])
            found[k] = _Matrix(*every[k], least)
        return [found[k] for k in range(len(every))]

    def apply(self, flats: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Replace each whole matrix by ``function`` of it, in place; collective.

        Args:
            flats: for each unit, the elements of its matrices in this rank's region, of one dtype.
            function: [rows, columns] -> the same shape.
        """
        if not self._matrices:
            return
        owners = {k: m.owner[0] for k, m in enumerate(self._matrices)}
        spans = {k: self._spans(m) for k, m in enumerate(self._matrices)}
        sizes = {k: [stop - start for start, stop in of] for k, of in spans.items()}
        pieces = {k: self._piece(flats, k, spans[k]) for k in owners}
        if self._sharded:
            local = self._data.collect(pieces, owners, sizes)
        else:
            local = {k: [pieces[k]] for k in owners if owners[k] == self._data.index}
        done = self._over_tensor({k: torch.cat(xs) for k, xs in local.items()}, flats[0], function)
        results = {}
        for k, x in done.items():
            first = self._matrices[k].offset
            results[k] = [x[start - first : stop - first] for start, stop in spans[k]]
        for k, x in self._data.spread(results, owners, sizes, flats[0]).items():
            pieces[k].copy_(x)

    def _spans(self, matrix: _Matrix) -> list[tuple[int, int]]:
        """The elements of the unit's buffer that each data rank has of a matrix."""
        layout = self.units[matrix.unit].layout
        start = matrix.offset
        stop = start + torch.Size(matrix.record.local_shape).numel()
        if not self._sharded:
            return [(start, stop)] * self._data.ranks
        size = layout.slice_size
        ends = [min(max(r * size, start), stop) for r in range(self._data.ranks + 1)]
        return [*pairwise(ends)]

    def _piece(self, flats: Sequence[Tensor], k: int, spans: list[tuple[int, int]]) -> Tensor:
        unit = self._matrices[k].unit
        first = self.units[unit].state.region.start
        start, stop = spans[self._data.index]
        return flats[unit][start - first : stop - first] if start < stop else flats[unit][:0]

    def _over_tensor(
        self, local: dict[int, Tensor], like: Tensor, function: Callable[[Tensor], Tensor]
    ) -> dict[int, Tensor]:
        """Apply the function to whole matrices made of local ones; return this tensor rank's part
        of each, flat."""
        every = {k: self._matrices[k] for k in local}
        owners = {k: m.owner[1] for k, m in every.items()}
        ranks = self._tensor.ranks
        sizes = {k: [x.numel()] * ranks for k, x in local.items()}
        cut = {k: x for k, x in local.items() if every[k].record.cut_axes}
        parts = {k: [x] for k, x in local.items() if k not in cut}
        if cut:
            parts |= self._tensor.collect(cut, owners, sizes)
        results: dict[int, list[Tensor]] = {}
        for k in (k for k in every if owners[k] == self._tensor.index):
            record = every[k].record
            shards = [x.view(record.local_shape) for x in parts[k]]
            whole = _assembled(record, shards)
            whole = record.join([function(x) for x in record.split(whole)])
            results[k] = [record.slice(whole, at) for at in self._coords]
        if not every:
            return {}
        return self._tensor.spread(results, owners, sizes, like)


def _assembled(record: ParamRecord, shards: list[Tensor]) -> Tensor:
    """Return the logical tensor made of the shards of all tensor ranks."""
    return record.assemble(shards[0], lambda _, axis: shards)


def _check_matrices(record: ParamRecord) -> None:
    rows = sum(record.matrices)
    if len(record.shape) != 2 or record.shape[0] % rows:
        raise ValueError(
            f"Muon needs 2-dim weights whose number of rows is divisible by {rows}, but "
            f"{record.name} has shape {record.shape}"
        )
    if others := {*record.cut_axes} - {"tp"}:
        raise ValueError(
            f"Muon gathers {record.name} over tp only, but it is sharded over {others}"
        )


def _cost(record: ParamRecord) -> int:
    """Multiply-adds of one Newton-Schulz step on all matrices of a parameter."""
    total = 0
    for rows in record.matrices:
        m, n = sorted((record.shape[0] // sum(record.matrices) * rows, record.shape[1]))
        total += 3 * m * m * n + m * m * m
    return total
