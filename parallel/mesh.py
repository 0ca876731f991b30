"""The mesh: the sizes of the parallel axes, a rank's coordinates, and its process groups.

The axes, outermost first (`AXES`), are: ``outer``, replicas that synchronize every n steps (local
SGD, DiLoCo); ``pp``, pipeline parallel; ``dp``, data parallel; ``cp``, context parallel; and
``tp``, tensor parallel. tp varies fastest over ranks, because it communicates most. An axis may be
split in two (`SPLITS`): cp into a ``ring`` of ``ulysses`` groups (hybrid context parallelism), dp
into replicas of ``dp_shard`` groups (hybrid sharding). Several axes can be treated as one
(`PRODUCTS`). ``data`` = dp x cp is the ranks that hold the same parameters, see different tokens
and sum their gradients in every step. ``shard`` = dp_shard x cp is the subset of them over which
ZeRO shards. ``inner`` is the ranks of one outer replica, and ``world`` is all ranks. Eight ranks of
Mesh(dp=4, cp=2, dp_shard=2):

    rank        0  1  2  3  4  5  6  7
    dp          0  0  1  1  2  2  3  3
    replica     0  0  0  0  1  1  1  1
    dp_shard    0  0  1  1  0  0  1  1
    cp          0  1  0  1  0  1  0  1
    shard       0  1  2  3  0  1  2  3      two groups, of ranks 0 to 3 and 4 to 7
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from warpweave.kernels.devices import CTAS
from warpweave.parallel.buffers import Buffers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from warpweave.parallel.symmetric import Workspace

AXES = ("outer", "pp", "dp", "cp", "tp")
# Axis -> (axis over the groups, axis within a group). The size of a group is a field of `Mesh`.
SPLITS = {"dp": ("replica", "dp_shard"), "cp": ("ring", "ulysses")}
# Outermost first, as in `AXES`.
PRODUCTS = {"data": ("dp", "cp"), "shard": ("dp_shard", "cp"), "inner": AXES[1:], "world": AXES}


def divisors(n: int) -> list[int]:
    """The divisors of `n`, in order."""
    small = [m for m in range(1, int(n**0.5) + 1) if n % m == 0]
    return sorted({*small, *(n // m for m in small)})


def factors(axis: str) -> tuple[str, ...]:
    """The innermost axes that make up `axis`, outermost first: ("ring", "ulysses") for "cp"."""
    if axis not in SPLITS and axis not in PRODUCTS:
        return (axis,)
    found: tuple[str, ...] = ()
    for part in SPLITS[axis] if axis in SPLITS else PRODUCTS[axis]:
        found += factors(part)
    return found


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes, without process groups.

    Attributes:
        dp, cp, tp, pp: sizes of the axes within an outer replica.
        ulysses: the Ulysses degree, which is the size of the groups of cp ranks that use
            all-to-all. A ring runs over the cp / ulysses groups.
        dp_shard: for hybrid sharding, the size of the groups of dp ranks over which ZeRO shards. It
            replicates over the dp / dp_shard groups. None means all of dp.
        outer: number of replicas of all of the above, which synchronize their weights every n steps
            (`data.outer`).

    Raises:
        ValueError: a size is not a positive integer, `cp` is not divisible by `ulysses`, or `dp` is
            not divisible by `dp_shard`.

    Examples:
        >>> mesh = Mesh(dp=2, tp=4)
        >>> mesh.world, mesh.coordinates(5)
        (8, {'outer': 0, 'pp': 0, 'dp': 1, 'cp': 0, 'tp': 1})
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ulysses: int = 1
    dp_shard: int | None = None
    outer: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            _check_size(axis, getattr(self, axis))
        for axis, (_, inner) in SPLITS.items():
            size, length = getattr(self, axis), getattr(self, inner)
            if length is None and inner == "dp_shard":  # all of the axis
                continue
            _check_size(inner, length)
            if size % length:
                raise ValueError(f"{axis} ({size}) is not divisible by {inner} ({length})")

    @property
    def world(self) -> int:
        """Total number of ranks, outer * dp * cp * tp * pp."""
        return self.size("world")

    @property
    def data(self) -> int:
        """Number of ranks in an outer replica that hold the same parameters but see different
        tokens, dp * cp."""
        return self.size("data")

    def _lengths(self) -> dict[str, int]:
        """The sizes of all `factors` of the world, outermost first."""
        lengths: dict[str, int] = {}
        for axis in AXES:
            size = getattr(self, axis)
            if axis in SPLITS:
                outer, inner = SPLITS[axis]
                length = getattr(self, inner)
                length = size if length is None else length
                lengths |= {outer: size // length, inner: length}
            else:
                lengths[axis] = size
        return lengths

    def size(self, axis: str) -> int:
        """The size of `axis`, which is one of `AXES`, a part of one, or a product."""
        lengths, size = self._lengths(), 1
        for f in factors(axis):  # torch.compile reads loops
            size *= lengths[f]
        return size

    def index(self, axis: str, rank: int) -> int:
        """The coordinate of `rank` along `axis`. Raise ValueError if `rank` is outside the mesh."""
        inside, rest, index, stride = factors(axis), rank, 0, 1
        for f, length in reversed(self._lengths().items()):
            rest, at = divmod(rest, length)
            if f in inside:
                index += at * stride
                stride *= length
        if rest:
            raise ValueError(f"rank {rank} is outside the mesh of {self.world} ranks")
        return index

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> coordinate of `rank`, for each of `AXES`. The inverse of `rank_at`."""
        return {axis: self.index(axis, rank) for axis in AXES}

    def rank_at(self, **at: int) -> int:
        """The rank at the given coordinates on `AXES`, which default to 0.

        Raises ValueError if a coordinate is outside its axis.
        """
        rank = 0
        for axis in AXES:
            size, index = getattr(self, axis), at.pop(axis, 0)
            if not 0 <= index < size:
                raise ValueError(f"{axis} = {index} is outside the mesh, whose {axis} is {size}")
            rank = rank * size + index
        if at:
            raise ValueError(f"unknown axes {sorted(at)}; coordinates must be on the axes {AXES}")
        return rank

    def members(self, axis: str) -> list[list[int]]:
        """The ranks of every group along `axis`, each in order of their coordinates."""
        others = [f for f in factors("world") if f not in factors(axis)]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            groups.setdefault(tuple(self.index(f, rank) for f in others), []).append(rank)
        return list(groups.values())

    def describe(self, rank: int) -> str:
        """ "rank 5 (pp=1, tp=1)": the rank, and its coordinate on every axis longer than 1."""
        at = self.coordinates(rank)
        inside = ", ".join(f"{axis}={at[axis]}" for axis in AXES if getattr(self, axis) > 1)
        return f"rank {rank} ({inside})" if inside else f"rank {rank}"

    def names(self, ranks: Iterable[int]) -> str:
        """ "ranks 0, 1, 3" for several ranks, or `describe` for a single one."""
        first, *others = ranks
        if not others:
            return self.describe(first)
        return f"ranks {', '.join(map(str, (first, *others)))}"

    def seen_from(self, rank: int) -> ConnectedMesh:
        """The mesh as `rank` sees it, without process groups: every group is None."""
        return ConnectedMesh(self, rank, dict.fromkeys(_names()), None)

    def connect(
        self, device_type: str = "cpu", *, timeout: timedelta | None = None
    ) -> ConnectedMesh:
        """Create this rank's process groups.

        Collective over the default process group, which must exist if the mesh has several ranks.
        `timeout` bounds every collective of these groups, and approximately every wait within a
        kernel. None means torch's default for collectives (half an hour on gloo, regardless of the
        default group's timeout) and a few minutes for waits within kernels.

        Raises:
            ValueError: the mesh and the default process group have different numbers of ranks.
        """
        import torch.distributed as dist  # not at the top: sizes alone don't need torch
        from torch.distributed.device_mesh import init_device_mesh

        from warpweave.parallel.group_options import group_options

        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks != self.world:
            found = f"{ranks} {'is' if ranks == 1 else 'are'} running"
            if not dist.is_initialized():
                found = (
                    "torch.distributed is not initialized; start with torchrun and call "
                    "warpweave.launch.join(mesh) or dist.init_process_group() first"
                )
            replicas = f"outer={self.outer} x " if self.outer > 1 else ""
            raise ValueError(
                f"mesh {replicas}dp={self.dp} x cp={self.cp} x tp={self.tp} x pp={self.pp} needs "
                f"{self.world} ranks, but {found}"
            )
        if self.world == 1:
            return self.seen_from(0)
        sizes = {a: getattr(self, a) for a in AXES if a != "outer" or self.outer > 1}
        options = {axis: group_options(device_type, CTAS, timeout) for axis in sizes}
        device_mesh = init_device_mesh(
            device_type,
            tuple(sizes.values()),
            mesh_dim_names=tuple(sizes),
            backend_override={axis: o for axis, o in options.items() if o and sizes[axis] > 1},
        )
        groups = self._make_groups(device_mesh, timeout)
        if timeout is not None:
            # Public since torch 2.14, where the private name warns.
            set_timeout = (
                getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            )
            for group in {*groups.values()} - {None, dist.group.WORLD}:
                set_timeout(timeout, group)
        return ConnectedMesh(self, dist.get_rank(), groups, device_mesh, timeout)

    def _make_groups(
        self, device_mesh: DeviceMesh, timeout: timedelta | None
    ) -> dict[str, ProcessGroup | None]:
        """This rank's group along every axis; None for an axis of size 1.

        Collective over all ranks, which create the groups in the same order. Axes that have the
        same ranks share a group: "data" is "dp" if cp = 1.
        """
        import torch.distributed as dist

        from warpweave.parallel.group_options import group_options

        lengths = self._lengths()
        made: dict[tuple[str, ...], ProcessGroup | None] = {(): None}
        groups: dict[str, ProcessGroup | None] = {}
        for axis in _names():
            along = tuple(f for f in factors(axis) if lengths[f] > 1)
            if axis == "world" or (axis == "inner" and self.outer == 1):
                groups[axis] = dist.group.WORLD  # even if another axis has the same ranks
                continue
            if along not in made and axis in AXES:
                made[along] = device_mesh.get_group(axis)
            elif along not in made:
                given = {"pg_options": group_options(device_mesh.device_type, CTAS, timeout)}
                every = dist.new_subgroups_by_enumeration(self.members(axis), timeout, **given)
                made[along] = every[0]
            groups[axis] = made[along]
        return groups


def _names() -> tuple[str, ...]:
    """All axis names: `AXES`, their parts, and the products."""
    return (*AXES, *(part for parts in SPLITS.values() for part in parts), *PRODUCTS)


def _check_size(axis: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"mesh axis {axis} must be a positive integer, got {size!r}")


@dataclass(frozen=True)
class ConnectedMesh:
    """A mesh with the process groups of one of its ranks.

    Attributes:
        sizes: the mesh.
        rank: this rank in the default process group.
        groups: axis name -> process group; None if the axis has one rank.
        device_mesh: the torch DeviceMesh over (pp, dp, cp, tp), or over `AXES` if outer > 1; None
            for a single rank.
        timeout: the timeout given to `Mesh.connect`.
        buffers: message buffers of context parallelism, shared by all layers.

    Examples:
        >>> from warpweave import Mesh
        >>> mesh = Mesh().connect()  # under torchrun: Mesh(tp=2).connect()
        >>> mesh.size("tp"), mesh.index("tp"), mesh.group("tp")
        (1, 0, None)
    """

    sizes: Mesh
    rank: int
    groups: dict[str, ProcessGroup | None]
    device_mesh: DeviceMesh | None
    timeout: timedelta | None = None
    buffers: Buffers = field(default_factory=Buffers, repr=False, compare=False)
    _workspaces: dict[str, Workspace] = field(default_factory=dict, repr=False, compare=False)

    def group(self, axis: str) -> ProcessGroup | None:
        """The group along `axis` (see the module's docstring); None if it has one rank."""
        return self.groups[axis]

    @property
    def context(self) -> ProcessGroup | tuple[ProcessGroup | None, ProcessGroup | None] | None:
        """The `group` argument of `parallel.context`: the cp axis, or the pair (ring, Ulysses
        group) if ulysses > 1."""
        if self.sizes.ulysses > 1:
            return self.groups["ring"], self.groups["ulysses"]
        return self.groups["cp"]

    def workspace(self, axis: str) -> Workspace | None:
        """The symmetric memory along `axis`, shared by all layers; None if it has one rank."""
        group = self.group(axis)
        if group is not None and axis not in self._workspaces:
            from warpweave.parallel.symmetric import Workspace  # not at the top: imports kernels

            self._workspaces[axis] = Workspace(group, timeout=self.timeout)
        return self._workspaces.get(axis)

    def check_waits(self) -> None:
        """Raise for the first wait within a kernel that timed out (`SymmetricMemory.check`). Call
        it after a result has been read from the device."""
        for workspace in self._workspaces.values():
            workspace.check()

    def size(self, axis: str) -> int:
        """The size of `axis`."""
        return self.sizes.size(axis)

    def index(self, axis: str) -> int:
        """This rank's coordinate along `axis`."""
        return self.sizes.index(axis, self.rank)

    def __deepcopy__(self, memo: dict) -> ConnectedMesh:
        """Return self: copies of a module share its process groups, which cannot be copied."""
        return self

    @property
    def coords(self) -> dict[str, int]:
        """Axis name -> this rank's coordinate, outermost axis first."""
        return self.sizes.coordinates(self.rank)


def single() -> ConnectedMesh:
    """Return the mesh of one device, which needs no process group."""
    return Mesh().seen_from(0)


def connected(mesh: ConnectedMesh | None) -> ConnectedMesh:
    """Return the mesh for a layer's `mesh` argument, where None means one device. Raise ValueError
    if the mesh is not connected (`Mesh.connect`)."""
    if isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be connected, but {mesh} has only sizes; pass mesh.connect()")
    return single() if mesh is None else mesh
