"""Replicas of a run and the places of ranks in them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from warpweave.parallel.mesh import Mesh
from warpweave.train.options import TrainConfig


def replica_width(config: TrainConfig) -> int:
    """Data ranks of a replica; 0 for a run that is not elastic.

    Raises:
        ValueError: what cannot be elastic.
    """
    least, mesh, zero = config.elastic, config.mesh, config.plan.zero
    if least == 0:
        return 0
    if zero and mesh.dp_shard is None:
        raise ValueError(
            f"elastic = {least} needs replicas that hold the whole state, ZeRO {zero} shards it "
            f"over all dp = {mesh.dp}: give --zero 0 or --dp-shard"
        )
    width = mesh.dp_shard or 1
    replicas = mesh.dp // width
    if replicas < 2 or not 0 < least <= replicas:
        raise ValueError(f"elastic must be 1 to the replicas, 2 or more: {least} of {replicas}")
    refused = (
        (f"outer_every = {config.outer_every}", config.outer_every is not None),
        (f"schedule = {config.plan.schedule}", config.plan.asynchronous),
        ("reduce = ordered", config.plan.reduce == "ordered"),
        ("optimizer = muon, whose update exchanges matrices,", config.optimizer == "muon"),
        ("overlap = fused", config.plan.overlap == "fused"),
        (f"max_restarts = {config.max_restarts}", config.max_restarts > 0),
        (f"timeline = {config.timeline}", config.timeline is not None),
    )
    for what, given in refused:
        if given:
            raise ValueError(f"{what} does not go with --elastic")
    return width


@dataclass(frozen=True)
class Seat:
    """A rank's place in the run with all of its replicas.

    Attributes:
        mesh: the mesh with all replicas.
        width: data ranks of a replica.
        rank: in `mesh`.
    """

    mesh: Mesh
    width: int
    rank: int

    @property
    def dp(self) -> int:
        """The data rank, whose samples are this one's in every generation."""
        return self.mesh.index("dp", self.rank)

    @property
    def replica(self) -> int:
        """The replica."""
        return self.dp // self.width

    def among(self, replicas: list[int]) -> tuple[Mesh, int]:
        """The mesh of these replicas, and the rank in it that sits here; four replicas without the
        second:

            rank of all      0  1  2  3
            rank of three    0     1  2
        """
        mesh = dataclasses.replace(self.mesh, dp=len(replicas) * self.width)
        at = self.mesh.coordinates(self.rank)
        at["dp"] = replicas.index(self.replica) * self.width + self.dp % self.width
        return mesh, mesh.rank_at(**at)
