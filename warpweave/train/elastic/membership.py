"""Generations of replicas and votes on steps, over a store.

    keeper      generation 1: 0 1 2      | 1 dies: generation 2: 0 2  | 1 is there: generation 3
    replica 0   step 5, vote, update | step 6 --x  | step 6, vote, update | step 7, vote, update |
    replica 1   step 5, vote, update | step 6 - dies    (starts, waits) ...                      |
    replica 2   step 5, vote, update | step 6 --x  | step 6, vote, update | step 7, vote, update |
                        "go"           "abort"               "go"                  "regroup"

The keeper, the process that started the ranks, announces each generation under a key of its store.
A thread of each rank waits for the next generation. If it follows a death, the thread closes the
rank's connections, so that all pending waits end. Weights are updated only after every rank of the
generation has voted. A rank votes when it holds its reduced gradients and their norm, so that the
update needs no other rank (torchft's ``should_commit``): all ranks make it or none does. The first
to write the decision wins, by the store's compare-and-set:

    go         by the last to vote
    regroup    by the last to vote, if replicas wait to join: all leave after the update
    abort      by any rank that learns that the generation has lost a replica
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from warpweave.train.elastic.seat import Seat

_FOREVER = timedelta(days=365)


class Regroup(Exception):
    """This generation has ended, and its ranks meet in the next."""


@dataclass(frozen=True)
class Generation:
    """The replicas that train together until the next generation.

    Attributes:
        number, port: counted from 1, and the port of the store that its ranks connect through.
        members: replica -> how often it was started before.
        change: the replicas that left or joined and the reason, in words.
        lost: a replica has left, so nothing in the previous generation can be waited for.
        stop: the ranks save and stop at once, because too few replicas are left.
        begun: an earlier generation has trained, so a member holds its state.
    """

    number: int
    port: int
    members: dict[int, int]
    change: str = ""
    lost: bool = False
    stop: bool = False
    begun: bool = False

    @property
    def replicas(self) -> list[int]:
        """The replicas' numbers in the whole run, in the order of their ranks."""
        return sorted(self.members)


def announce(store: dist.Store, generation: Generation) -> None:
    """Announce the next generation to all ranks."""
    store.set(f"generation/{generation.number}", json.dumps(dataclasses.asdict(generation)))


class Member:
    """A rank's part in the generations of a run.

    Args:
        connect: makes a new client of the keeper's store.
        seat: the rank's place.
        start: how often its replica was started before.
        close: closes the connections of this rank's generation; called from a thread, but not
            while `updating` is held, which it is while the weights change.

    `current` is the generation that this rank is in.
    """

    def __init__(
        self, connect: Callable[[], dist.Store], seat: Seat, start: int, close: Callable[[], object]
    ) -> None:
        self.seat, self._start, self._close = seat, start, close
        self.current = self.latest = Generation(0, 0, {})
        self.updating, self._news = threading.Lock(), threading.Condition()
        self._lost = 0  # the last generation that followed a loss
        self._decision = "decision"  # the key of the last decision
        self._store = connect()
        threading.Thread(target=self._listen, args=(connect(),), daemon=True).start()
        self._store.set(f"ready/{start}/{seat.rank}", "")

    def _listen(self, store: dist.Store) -> None:
        """Wait for one generation after another."""
        while True:
            key = f"generation/{self.latest.number + 1}"
            try:
                store.wait([key], _FOREVER)
                told = json.loads(store.get(key))
            except dist.DistError:  # the keeper is gone, and this process ends soon
                return
            members = {int(replica): start for replica, start in told.pop("members").items()}
            new = Generation(members=members, **told)
            if new.lost and self.current.number:  # before this rank sees it and connects again
                with self.updating:
                    self._close()
            with self._news:
                self.latest, open_vote = new, self._decision
                self._lost = new.number if new.lost else self._lost
                self._news.notify_all()
            if new.lost:
                with suppress(dist.DistError):  # as above: the next wait ends this thread
                    store.compare_set(open_vote, "", "abort")

    @property
    def lost(self) -> bool:
        """True if this rank's generation has lost a replica."""
        return self._lost > self.current.number

    def enter(self) -> Generation:
        """Wait for a newer generation that includes this rank, and return it."""
        replica, number = self.seat.replica, self.current.number

        def there() -> bool:
            new = self.latest
            return new.number > number and new.members.get(replica) == self._start

        with self._news:
            self._news.wait_for(there)
            self.current = self.latest
        return self.current

    def wait_for_loss(self, seconds: float) -> bool:
        """Return True if a loss is announced within this many seconds."""
        with self._news:
            return self._news.wait_for(lambda: self.lost, seconds)

    def complain(self) -> None:
        """Tell the keeper that a connection of this rank has failed."""
        self._store.set(f"failed/{self.current.number}/{self.seat.rank}", "")

    def settle(self) -> None:
        """Tell the keeper that this rank is connected and has the state."""
        self._store.add(f"settled/{self.current.number}", 1)

    def finish(self, result: str) -> None:
        """Give the keeper the run's last line."""
        self._store.set("result", result)

    def give_up(self) -> None:
        """Tell the keeper that all ranks end, and none should be started again."""
        self._store.set("over", "")

    def vote(self, step: str, world: int) -> str:
        """Agree with all `world` ranks whether `step` counts: "go", "regroup", or "abort"."""
        of = self.current.number
        votes, decision = f"votes/{of}/{step}", f"decision/{of}/{step}"
        with self._news:
            last, self._decision = self._decision, decision
        if self._store.add(votes, 1) == world:
            self._store.compare_set(decision, "", "regroup" if self.latest.number > of else "go")
            for key in (votes, last):  # all ranks have read the last decision
                self._store.delete_key(key)
        if self.lost:
            self._store.compare_set(decision, "", "abort")
        return self._store.get(decision).decode()  # a loss from now on is noticed by `_listen`
