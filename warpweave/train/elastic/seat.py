"""Replicas of a run and the places of ranks in them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from warpweave.parallel.mesh import Mesh
from warpweave.train.options import TrainConfig


def replica_width(config: TrainConfig) -> int:
    """Number of data ranks in a replica; 0 for a run that is not elastic. Raises ValueError if the
    options do not allow an elastic run."""
    least, mesh, zero = config.elastic, config.mesh, config.plan.zero
    if least == 0:
        return 0
    if zero and mesh.dp_shard is None:
        raise ValueError(
            f"elastic = {least} needs replicas that hold the whole state, but ZeRO {zero} shards "
            f"it over all data ranks (dp = {mesh.dp}); pass --zero 0 or --dp-shard"
        )
    width = mesh.dp_shard or 1
    replicas = mesh.dp // width
    if replicas < 2 or not 0 < least <= replicas:
        raise ValueError(
            "--elastic must be between 1 and the number of replicas, which must be at least 2, got "
            f"elastic = {least} and {replicas} replica{'s' * (replicas != 1)}"
        )
    refused = (
        (f"outer_every = {config.outer_every}", config.outer_every is not None),
        (f"schedule = {config.plan.schedule}", config.plan.asynchronous),
        ("reduce = ordered", config.plan.reduce == "ordered"),
        ("optimizer = muon (its update exchanges matrices)", config.optimizer == "muon"),
        ("overlap = fused", config.plan.overlap == "fused"),
        (f"max_restarts = {config.max_restarts}", config.max_restarts > 0),
        (f"timeline = {config.timeline}", config.timeline is not None),
    )
    for what, given in refused:
        if given:
            raise ValueError(f"--elastic does not support {what}")
    return width


@dataclass(frozen=True)
class Seat:
    """A rank's place in the run: the `mesh` with all replicas, the `width` of a replica in data
    ranks, and the `rank` in the mesh."""

    mesh: Mesh
    width: int
    rank: int

    @property
    def dp(self) -> int:
        """The data rank; it determines this rank's samples in every generation."""
        return self.mesh.index("dp", self.rank)

    @property
    def replica(self) -> int:
        """The replica's number."""
        return self.dp // self.width

    def among(self, replicas: list[int]) -> tuple[Mesh, int]:
        """The mesh of these replicas and this seat's rank in it. Four replicas without the second:

        rank of all      0  1  2  3
        rank of three    0     1  2
        """
        mesh = dataclasses.replace(self.mesh, dp=len(replicas) * self.width)
        at = self.mesh.coordinates(self.rank)
        at["dp"] = replicas.index(self.replica) * self.width + self.dp % self.width
        return mesh, mesh.rank_at(**at)
