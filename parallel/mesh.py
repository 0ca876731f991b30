"""The mesh: how many ranks each axis has, where a rank stands, and the groups it talks to.

Axes, outermost first: ``pp`` (pipeline stages), ``dp`` (data replicas), ``cp`` (sequence shards of
context parallelism), ``tp`` (tensor shards). Tensor ranks are neighbours, because they talk most.
The cp axis may itself be two, a ring of groups of neighbours that trade rows for heads
(`parallel.context`): ``ulysses`` neighbours.
Two derived axes: ``data`` = dp x cp, the ranks over which gradients are summed and ZeRO shards lie
(ranks of both hold the same parameters and different tokens), and ``world``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from warpweave.parallel.symmetric import Workspace

AXES = ("pp", "dp", "cp", "tp")
PRODUCTS = {"data": ("dp", "cp"), "world": AXES}  # the derived axes, as products of the four


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes, and the neighbours among the cp ranks; no process group.

    Raises:
        ValueError: one is not a positive integer, or `ulysses` does not divide `cp`.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ulysses: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "ulysses"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {axis} must be a positive integer, got {size!r}")
        if self.cp % self.ulysses:
            raise ValueError(f"ulysses = {self.ulysses} does not divide cp = {self.cp}")

    @property
    def world(self) -> int:
        """Number of ranks, dp * cp * tp * pp."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def data(self) -> int:
        """Number of ranks that hold the same parameters and different tokens, dp * cp."""
        return self.dp * self.cp

    def size(self, axis: str) -> int:
        """Ranks along `axis`, which may be one of the four or "data" or "world"."""
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> coordinate of `rank`; the inverse of `rank_at`."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the mesh of {self.world} ranks")
        coordinates = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return {axis: coordinates[axis] for axis in AXES}

    def rank_at(self, *, dp: int = 0, cp: int = 0, tp: int = 0, pp: int = 0) -> int:
        """The rank at the given coordinates; raises ValueError for one outside its axis."""
        for axis, at in (("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)):
            if not 0 <= at < getattr(self, axis):
                raise ValueError(f"{axis} = {at} is outside the mesh's {getattr(self, axis)}")
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def describe(self, rank: int) -> str:
        """ "rank 5 (pp=1, tp=1)": the rank and its coordinates on every axis longer than one."""
        at = self.coordinates(rank)
        inside = ", ".join(f"{axis}={at[axis]}" for axis in AXES if getattr(self, axis) > 1)
        return f"rank {rank} ({inside})" if inside else f"rank {rank}"

    def connect(
        self, device_type: str = "cpu", *, timeout: timedelta | None = None
    ) -> ConnectedMesh:
        """Join the mesh: make this rank's process groups.

        Collective over the default process group, which must exist when the mesh has several ranks.
        `timeout` bounds every collective of the groups made here, and on a CPU about every wait
        within a kernel; None is torch's default (half an hour on gloo, whatever the default group's
        is), and some minutes for those waits.

        Raises:
            ValueError: the mesh does not have as many ranks as the default process group.
        """
        import torch.distributed as dist  # sizes, and a command line, do without
        from torch.distributed.device_mesh import init_device_mesh

        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks != self.world:
            found = f"{ranks} {'is' if ranks == 1 else 'are'} running"
            if not dist.is_initialized():
                found = (
                    "torch.distributed is not initialised: start with torchrun and call "
                    "warpweave.launch.join(mesh) or dist.init_process_group() first"
                )
            raise ValueError(
                f"mesh dp={self.dp} x cp={self.cp} x tp={self.tp} x pp={self.pp} needs "
                f"{self.world} ranks, but {found}"
            )
        if self.world == 1:
            return ConnectedMesh(self, 0, dict.fromkeys((*AXES, "data", "world")), None)
        device_mesh = init_device_mesh(
            device_type, tuple(getattr(self, axis) for axis in AXES), mesh_dim_names=AXES
        )
        groups: dict[str, ProcessGroup | None] = {
            axis: device_mesh.get_group(axis) if self.size(axis) > 1 else None for axis in AXES
        }
        if self.dp > 1 and self.cp > 1:
            groups["data"] = device_mesh["dp", "cp"]._flatten("data").get_group()
        else:
            groups["data"] = groups["dp"] or groups["cp"]
        if timeout is not None:
            # Public from torch 2.14 on, where the private name warns.
            set_timeout = (
                getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            )
            for group in {id(g): g for g in groups.values() if g is not None}.values():
                set_timeout(timeout, group)
        if self.ulysses > 1:
            groups |= self._context_groups(timeout)
        groups["world"] = dist.group.WORLD
        return ConnectedMesh(self, dist.get_rank(), groups, device_mesh, timeout)

    def _context_groups(self, timeout: timedelta | None) -> dict[str, ProcessGroup | None]:
        """This rank's groups within the cp axis: {"ring", "ulysses"}. Collective over all ranks."""
        import torch.distributed as dist

        members: dict[str, list[list[int]]] = {"ring": [], "ulysses": []}
        for pp, dp, tp in product(range(self.pp), range(self.dp), range(self.tp)):
            line = [self.rank_at(pp=pp, dp=dp, cp=cp, tp=tp) for cp in range(self.cp)]
            members["ring"] += [line[u :: self.ulysses] for u in range(self.ulysses)]
            members["ulysses"] += [
                line[first : first + self.ulysses] for first in range(0, self.cp, self.ulysses)
            ]
        return {
            name: dist.new_subgroups_by_enumeration(ranks, timeout=timeout)[0]
            if len(ranks[0]) > 1
            else None
            for name, ranks in members.items()
        }


@dataclass(frozen=True)
class ConnectedMesh:
    """A mesh seen from one of its ranks, with this rank's process groups.

    Attributes:
        sizes: the mesh.
        rank: this rank in the default process group.
        groups: axis name -> process group, None where the axis has one rank.
        device_mesh: the torch DeviceMesh over (pp, dp, cp, tp), None for a single rank.
        timeout: what `Mesh.connect` was given.
    """

    sizes: Mesh
    rank: int
    groups: dict[str, ProcessGroup | None]
    device_mesh: DeviceMesh | None
    timeout: timedelta | None = None
    _workspaces: dict[str, Workspace] = field(default_factory=dict, repr=False, compare=False)

    def group(self, axis: str) -> ProcessGroup | None:
        """The group along `axis` ("pp" "dp" "cp" "tp" "data" "world"), None if it has one rank."""
        return self.groups[axis]

    @property
    def context(self) -> ProcessGroup | tuple[ProcessGroup | None, ProcessGroup | None] | None:
        """The `group` of `parallel.context`: the cp axis, or the pair that it is."""
        if self.sizes.ulysses > 1:
            return self.groups["ring"], self.groups["ulysses"]
        return self.groups["cp"]

    def workspace(self, axis: str) -> Workspace | None:
        """The symmetric memory along `axis`, one for all layers; None if it has one rank."""
        group = self.group(axis)
        if group is not None and axis not in self._workspaces:
            from warpweave.parallel.symmetric import Workspace  # kernels: sizes do without

            self._workspaces[axis] = Workspace(group, timeout=self.timeout)
        return self._workspaces.get(axis)

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return self.sizes.size(axis)

    def index(self, axis: str) -> int:
        """This rank's coordinate along `axis`."""
        at = self.sizes.coordinates(self.rank)
        if axis == "data":
            return at["dp"] * self.sizes.cp + at["cp"]
        return self.rank if axis == "world" else at[axis]

    def __deepcopy__(self, memo: dict) -> ConnectedMesh:
        """Itself: copies of a module talk to the same groups, which cannot be copied."""
        return self

    @property
    def coords(self) -> dict[str, int]:
        """Axis name -> this rank's coordinate, outermost axis first."""
        return self.sizes.coordinates(self.rank)

    def factors(self, axis: str) -> tuple[str, ...]:
        """The axes whose product `axis` is: ("dp", "cp") for "data", itself for one of the four."""
        return PRODUCTS.get(axis, (axis,))


def single() -> ConnectedMesh:
    """The mesh of one device; needs no process group."""
    return ConnectedMesh(Mesh(), 0, dict.fromkeys((*AXES, "data", "world")), None)


def connected(mesh: ConnectedMesh | None) -> ConnectedMesh:
    """What a layer's `mesh` argument means: None is one device.

    Raises:
        ValueError: the mesh is only sizes, not connected.
    """
    if isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be connected, {mesh} is sizes only: pass mesh.connect()")
    return single() if mesh is None else mesh
