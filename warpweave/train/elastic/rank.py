"""A rank of an elastic run, from its start through all of its generations."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from warpweave.checkpoint import CheckpointError
from warpweave.cli.messages import say
from warpweave.launch.devices import BACKENDS, connect, disagreement, share_cores, take_device
from warpweave.launch.interrupt import STOPS, Interrupt
from warpweave.launch.processes import leave
from warpweave.launch.session import Session, is_connection_error, reported
from warpweave.launch.supervise import kept_store
from warpweave.parallel.checked import CollectiveMismatch
from warpweave.train.elastic.connections import NCCL_SETTINGS, Connections
from warpweave.train.elastic.membership import Generation, Member, Regroup
from warpweave.train.elastic.seat import Seat
from warpweave.train.elastic.trainer import Carried, ElasticTrainer, StateLostError
from warpweave.train.options import TrainConfig
from warpweave.train.trainer import RAISED_BY_ALL

T = TypeVar("T")
_BY_ALL = (*RAISED_BY_ALL, StateLostError)
# Seconds beyond the timeout: for the keeper to find a hung rank after a connection failed, and for
# a rank that is late to join the next generation.
_GRACE = 15.0


def train_member(config: TrainConfig, seat: Seat, start: int, port: int) -> None:
    """Train as the rank of `seat`, connected through the keeper's store on `port`; end the process.

    Its replica was started `start` times before."""
    interrupt = Interrupt()
    interrupt.listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    world, rank = seat.mesh.world, seat.rank
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", **NCCL_SETTINGS}
    os.environ |= {"WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}"}
    _, device, own = take_device(BACKENDS.get(config.device), launched=True)
    if device.type == "cpu":
        share_cores(world)

    connections = Connections()
    client = partial(kept_store, port, config.timeout)
    member, carried = Member(client, seat, start, connections.close), Carried()
    rank_of = _Rank(config, interrupt, member, connections)
    while True:
        connections.open()
        generation = member.enter()
        # gloo may not notice that a connection was closed. A rank that waits for it arrives here
        # after its timeout, so the others wait longer.
        store = rank_of.survive(partial(kept_store, generation.port, config.timeout + _GRACE))
        if store is not None:
            carried = rank_of.train(generation, store, device, own, carried)
        connections.leave()


@dataclass
class _Rank:
    """The parts of a rank that last through all generations, except its state."""

    config: TrainConfig
    interrupt: Interrupt
    member: Member
    connections: Connections

    def train(
        self,
        generation: Generation,
        store: dist.Store,
        device: torch.device,
        own: dict,
        carried: Carried,
    ) -> Carried:
        """Train in a generation. Return the state, or end the process if the run is over."""
        mesh, rank = self.member.seat.among(generation.replicas)
        limit = self.config.timeout
        session = Session(device, rank, mesh.world, store, limit, mesh, own["name"], launched=True)

        def build() -> ElasticTrainer:
            if (line := disagreement(store, rank, mesh, own)) is not None:
                raise ValueError(line)
            if mesh.world > 1:
                connect(device, store, rank, mesh.world, limit)
            return ElasticTrainer(self.config, session, self.interrupt, self.member, carried)

        with reported(session, _BY_ALL, refused=(ValueError, CheckpointError)):
            trainer = self.survive(build)
        if trainer is None:
            return carried
        with reported(session, _BY_ALL):
            if self.survive(lambda: self._run(trainer)) is None:
                return trainer.carry()
        stopped = trainer.stopped and not generation.stop
        leave(128 + (self.interrupt.number or signal.SIGTERM) if stopped else 0)

    def _run(self, trainer: ElasticTrainer) -> bool:
        """Train to the end of the run. Raises `Regroup` if the generation ends first."""
        self.connections.complete()
        self.member.settle()
        if trainer.session.rank == 0:
            change = self.member.current.change
            say(f"step {trainer.step}: {change}" if change else trainer.describe())
        result = trainer.run()
        if trainer.session.rank == 0:
            self.member.finish(json.dumps(result))
        if self.member.vote("end", trainer.session.world) == "abort":
            raise Regroup
        return True

    def survive(self, do: Callable[[], T]) -> T | None:
        """Return ``do()``, or None if the generation ended meanwhile because a peer is gone or
        replicas wait to join. Any other error is this rank's own and is raised."""
        try:
            return do()
        except Regroup:
            return None
        except Exception as error:
            lost = self.member.lost
            if is_connection_error(error) or isinstance(error, CollectiveMismatch):
                self.connections.close()  # so that no peer keeps waiting for this rank
                self.member.complain()
                lost = self.member.wait_for_loss(_GRACE)
            elif isinstance(error, CheckpointError):  # perhaps a death interrupted a save
                lost = self.member.wait_for_loss(1.0)
            if lost:
                return None
            if isinstance(error, _BY_ALL):
                self.member.give_up()
            raise
