"""``warpweave train --elastic``: the keeper of the replicas.

It starts the ranks, announces generations, and restarts a replica that has lost a rank.

    this process       keeps the store, watches the others, announces generations
    replica 0 .. R-1   each of dp_shard x cp x tp x pp ranks; if one dies, all of them are
                       restarted, at most five times, and wait to be admitted by the others

torch's launcher cannot start them, because it ends every rank when one dies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

from warpweave.checkpoint import latest
from warpweave.cli.messages import say
from warpweave.launch.blame import End
from warpweave.launch.devices import BACKENDS, choose_backend
from warpweave.launch.heartbeat import last_seen
from warpweave.launch.interrupt import STOPS
from warpweave.launch.processes import Forked, Processes, end, environment, told_ranks
from warpweave.launch.supervise import REFUSED, keep_store, supervise
from warpweave.train.elastic.membership import Generation, announce
from warpweave.train.elastic.rank import train_member
from warpweave.train.elastic.seat import Seat, replica_width
from warpweave.train.options import CHECKPOINTS, TrainConfig

_AGAIN = 5  # restarts of a replica before the run continues without it
_GRACE = 5.0  # seconds in which the others must notice that a rank's connection failed
_DONE = (0, *(128 + number for number in STOPS))  # exit codes of ranks that finished


def run(config: TrainConfig, processes: Processes | None = None) -> None:
    """Start the ranks, and supervise them until the run ends (`supervise` says how it exits).
    Raises ValueError if the options do not allow an elastic run."""
    replica_width(config)
    backend = choose_backend(config.mesh.world, BACKENDS.get(config.device))
    with environment(**told_ranks(backend)):
        Keeper(config, Processes.of(train_member, backend, processes)).run()


class _Replica:
    """The processes of a replica, whose `ranks` are those in the whole run. It was started `start`
    times before; -1 before the first start."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks, self.start = ranks, -1
        self.processes: dict[int, BaseProcess | Forked] = {}

    def bad_end(self) -> End | None:
        """The end of a rank that has died, or None."""
        codes = {rank: process.exitcode for rank, process in self.processes.items()}
        return next((End(r, code) for r, code in codes.items() if code not in (None, *_DONE)), None)

    @property
    def ended(self) -> bool:
        """True if all of its ranks have ended."""
        return all(process.exitcode is not None for process in self.processes.values())


class Keeper:
    """The process that starts and watches the ranks."""

    def __init__(self, config: TrainConfig, processes: Processes) -> None:
        self.config, self.store, self.processes = config, keep_store(), processes
        width = replica_width(config)
        self.seats = [Seat(config.mesh, width, r) for r in range(config.mesh.world)]
        self.replicas = [
            _Replica([seat.rank for seat in self.seats if seat.replica == number])
            for number in range(config.mesh.dp // width)
        ]
        self.current = Generation(0, 0, {})
        self.stores = [self.store, self.store]  # of the last two generations
        self._begun = False  # a generation has trained
        self._ends_by = 0.0  # deadline for all ranks to finish, set when the first one has
        self._complained = 0.0  # when the generation's first connection failed

    def run(self) -> None:
        """Supervise the processes until the run ends."""
        supervise(self.processes, self.start, self.watch)

    def start(self) -> None:
        """Start the ranks of all replicas."""
        for number in range(len(self.replicas)):
            self._start(number)

    def _start(self, number: int) -> None:
        replica = self.replicas[number]
        replica.start += 1
        for rank in replica.ranks:
            given = self.config, self.seats[rank], replica.start, self.store.port
            replica.processes[rank] = self.processes.start(train_member, *given)

    def watch(self, stop: int | None) -> int | None:
        """Handle what has happened since the last call. Return the exit code if the run is over.

        After the signal `stop` no replica is restarted."""
        members = [self.replicas[number] for number in self.current.members]
        if any(p.exitcode in _DONE for r in members for p in r.processes.values()):
            return self._finish(members)  # a rank ends only after all of them have finished
        self._end_hung()
        lost = {n: died for n, r in enumerate(self.replicas) if (died := r.bad_end())}
        count = self.store.add(f"settled/{self.current.number}", 0)
        settled = count == sum(len(replica.ranks) for replica in members)
        self._begun |= settled and bool(members)
        if lost:
            return self._lose(lost, restart=stop is None)
        ready = {n: r.start for n, r in enumerate(self.replicas) if self._ready(r)}
        whole = len(ready) == len([r for r in self.replicas if r.processes])
        if ready.keys() > self.current.members.keys() and settled and (members or whole):
            new = ready.keys() - self.current.members.keys()
            join = f"{_listed(new)} {'joins' if len(new) == 1 else 'join'}"
            self._announce(ready, join if members else "")
        return None

    def _ready(self, replica: _Replica) -> bool:
        """True if all ranks of the replica wait to be admitted, or are members already."""
        keys = [f"ready/{replica.start}/{rank}" for rank in replica.processes]
        return bool(keys) and self.store.check(keys)

    def _finish(self, members: list[_Replica]) -> int | None:
        """Once all members have ended, print the result and return the exit code."""
        self._ends_by = self._ends_by or time.monotonic() + _GRACE
        if not all(replica.ended for replica in members) and time.monotonic() < self._ends_by:
            return None
        codes = [p.exitcode for r in members for p in r.processes.values()]
        code = 1 if self.current.stop else max(code or 0 for code in codes)
        if code in _DONE and self.store.check(["result"]):
            print(self.store.get("result").decode(), flush=True)
        return code

    def _end_hung(self) -> None:
        """If connections failed and no rank died, end the ranks that have not noticed."""
        of, members = self.current.number, self.current.replicas
        ranks = {rank: n for n in members for rank in self.replicas[n].ranks}
        silent = [rank for rank in ranks if not self.store.check([f"failed/{of}/{rank}"])]
        if len(silent) in (0, len(ranks)):  # if all have failed, they report why and end
            return
        self._complained = self._complained or time.monotonic()
        if time.monotonic() < self._complained + _GRACE:
            return
        self._complained = time.monotonic()
        for rank in silent:
            say(f"{self.config.mesh.describe(rank)} hangs{self._last_seen(rank)}; killing it")
            self.replicas[ranks[rank]].processes[rank].kill()

    def _lose(self, lost: dict[int, End], *, restart: bool) -> int | None:
        """Restart the replicas in `lost` (number -> end of a rank), if asked to; others continue.

        Returns the exit code if no replica can continue.
        """
        code = max(died.code for died in lost.values())
        if code == REFUSED or self.store.check(["over"]):
            return max(code, 1)
        causes = [f"replica {number} left: {self._why(died)}" for number, died in lost.items()]
        left = {n: s for n, s in self.current.members.items() if n not in lost}
        of_run = lost.keys() & self.current.members.keys()
        for number in lost:
            end(self.replicas[number].processes.values())
            self.replicas[number].processes = {}
        few = bool(of_run) and len(left) < self.config.elastic
        for number in lost if restart and not few else ():
            if self.replicas[number].start < _AGAIN:
                self._start(number)
            else:
                causes.append(f"replica {number} is not restarted")
        if not self.current.members:  # before the run has begun
            few = sum(bool(r.processes) for r in self.replicas) < self.config.elastic
        if few:
            causes.append(f"fewer replicas than --elastic {self.config.elastic} remain")
        if not of_run and not few:
            say("; ".join(causes))
        elif not left:
            step = latest(self.config.out / CHECKPOINTS)
            found = f"the last checkpoint is {step}" if step else "there is no checkpoint"
            say("; ".join([*causes, found]))
            return max(code, 1)
        else:
            verbs = ("saves and stops", "save and stop") if few else ("continues", "continue")
            verb = verbs[len(left) > 1]
            self._announce(left, "; ".join([*causes, f"{_listed(left)} {verb}"]), True, few)
        return None

    def _why(self, died: End) -> str:
        return f"{self.config.mesh.describe(died.rank)} {died.how}{self._last_seen(died.rank)}"

    def _last_seen(self, rank: int) -> str:
        seat = self.seats[rank]
        if seat.replica not in self.current.members:
            return " before it had joined"
        return last_seen(self.stores[-1], seat.among(self.current.replicas)[1])

    def _announce(
        self, members: dict[int, int], change: str, lost: bool = False, stop: bool = False
    ) -> None:
        """Start the next generation with a new store."""
        self.stores, self._complained = [self.stores[-1], keep_store()], 0.0
        number, port = self.current.number + 1, self.stores[-1].port
        self.current = Generation(number, port, members, change, lost, stop, self._begun)
        announce(self.store, self.current)


def _listed(replicas: Iterable[int]) -> str:
    """ "replicas 0, 2 and 3"."""
    *most, last = map(str, sorted(replicas))
    return f"replicas {', '.join(most)} and {last}" if most else f"replica {last}"
