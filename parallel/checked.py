"""Collectives that are compared between ranks before they are issued: an error, not a hang.

A rank that calls another collective than its peers, or the same with another shape or dtype, hangs
all of them on NCCL until a time-out that names nobody; on gloo a process aborts. Here each rank
first writes into the ranks' store what it is about to call, waits for those who take part, and
compares (the idea is torch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which holds for a whole run, makes
a second group of gloo's for each, and leaves messages out)::

    rank 0    set 3/7/0 = all_reduce of float32[4]    wait for 3/7/*    differ: raise
    rank 1    set 3/7/1 = all_reduce of float32[5]    wait for 3/7/*    differ: raise

Messages between two ranks do not wait, as a pipeline posts receives ahead of what it still has to
send: whichever end comes second compares, and raises before it issues its own.

Every rank that waits raises the same words: whoever finds a disagreement writes them down first,
and all look there. What a reduction adds with (sum or maximum) is not seen at torch's dispatcher.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from warpweave.parallel.mesh import Mesh
from warpweave.parallel.observe import Observer, Operation

_LOOK = 0.2  # seconds of waiting after which a rank looks at where the others are
_VERDICT = "verdict"


class CollectiveMismatch(RuntimeError):
    """Ranks issue different collectives, or one does not come; raised on every rank that waits."""


class CheckedCollectives(Observer):
    """Compares every collective and message within ``with checked`` with those of the other ranks.

    Args:
        store: the ranks' key-value store. A connection of its own: its waits would hold up others.
        mesh: for the ranks' names.
        rank: this rank.
        timeout: seconds after which a rank that has not come is named.
        device: on CUDA the current stream is waited for first, so that `waited` is what the other
            ranks are late, and not what this one has still to compute.

    Attributes:
        waited: seconds of waiting for other ranks so far.
    """

    def __init__(
        self, store: Any, mesh: Mesh, rank: int, timeout: float, device: torch.device
    ) -> None:
        super().__init__()
        if isinstance(store, dist.Store):  # what an earlier one of this process left is not read
            number = store.add(f"checked/{rank}", 1)
            store = dist.PrefixStore(f"checked/{number}", store)
        self._store = store
        self._mesh, self._rank, self._timeout, self._device = mesh, rank, timeout, device
        self._last: dict[str, str] = {}  # of each group the key of the last collective
        self.waited = 0.0

    def before(self, operation: Operation) -> None:
        """Return once all ranks of a collective are about to issue the same one.

        Raises:
            CollectiveMismatch: one line with both calls and both ranks, or the rank that is missing
                after the time-out.
        """
        if operation.side:
            self._meet_one(operation)
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        began = time.perf_counter()
        rows = self._meet_all(operation)
        self.waited += time.perf_counter() - began
        if (words := self._difference(operation, rows)) is not None:
            self._raise(words)

    def _meet_one(self, operation: Operation) -> None:
        """Leave word of this end of a message, or compare with the other end's."""
        own = f"{operation.side} {operation.what.partition(' ')[2]}"
        found = self._store.compare_set(operation.key, "", own).decode()
        if found == own:
            return
        self._store.delete_key(operation.key)
        (side, _, theirs), (_, _, mine) = found.partition(" "), own.partition(" ")
        if theirs != mine:
            src, dst = map(self._mesh.describe, operation.ranks)
            sent, received = (theirs, mine) if side == "send" else (mine, theirs)
            self._raise(f"{src} sends {sent[3:]}, {dst} receives {received[3:]}")

    def _meet_all(self, operation: Operation) -> dict[int, Any]:
        """Rank -> [what it calls, sizes], of all ranks of a collective."""
        key, store = operation.key, self._store
        keys = {rank: f"{key}/{rank}" for rank in operation.ranks}
        group = key.rpartition("/")[0]
        store.set(keys[self._rank], json.dumps([operation.what, operation.sizes]))
        before, self._last[group] = self._last.get(group), key
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                store.wait([*keys.values()], timedelta(seconds=_LOOK))
                break
            except dist.DistStoreError:
                self._look(operation, keys, late=time.monotonic() > deadline)
        values = store.multi_get([*keys.values()])
        if before is not None:  # all ranks have read it, as they are here
            store.delete_key(f"{before}/{self._rank}")
        return dict(zip(keys, map(json.loads, values), strict=True))

    def _look(self, operation: Operation, keys: dict[int, str], *, late: bool) -> None:
        """While waiting: raise if another rank has found a disagreement, waits in vain for this
        one, or is `late`."""
        store = self._store
        here = [operation.key, operation.ranks, operation.what]
        store.set(f"at/{self._rank}", json.dumps(here))
        if store.check([_VERDICT]):
            raise CollectiveMismatch(store.get(_VERDICT).decode())
        where = f"{operation.what} {_among(operation.ranks)}"
        for rank, own in keys.items():
            there = store.get(f"at/{rank}") if store.check([f"at/{rank}"]) else None
            if store.check([own]):  # read last: it has not come since
                continue
            name, at = self._mesh.describe(rank), ""
            if there is not None:
                key, ranks, what = json.loads(there)
                at = f"{what} {_among(ranks)}"
                if self._rank in ranks and self._is_ahead(key):
                    self._raise(f"{self._mesh.describe(self._rank)} calls {where}, {name} {at}")
            if late:
                seen = f", and was last seen in {at}" if at else ""
                self._raise(f"{name} did not come to {where} within {self._timeout:g} s{seen}")

    def _is_ahead(self, key: str) -> bool:
        """Whether this rank has not come to the collective `key`, whose ranks thus wait for it."""
        group, _, number = key.rpartition("/")
        last = self._last.get(group, f"{group}/-1")
        return int(number) > int(last.rpartition("/")[2])

    def _difference(self, operation: Operation, rows: dict[int, Any]) -> str | None:
        """What is not the same on all ranks, in words."""
        whats: dict[str, list[int]] = {}
        for rank, (what, _) in rows.items():
            whats.setdefault(what, []).append(rank)
        if len(whats) > 1:
            calls = (f"{self._mesh.names(ranks)} {'call' + 's' * (len(ranks) == 1)} {what}"
                     for what, ranks in whats.items())  # fmt: skip
            return ", ".join(calls)
        if operation.sizes is None:
            return None
        sizes = [sizes for _, sizes in rows.values()]
        for a, (sends, _) in enumerate(sizes):
            for b, (_, receives) in enumerate(sizes):
                if sends and receives and sends[b] != receives[a]:
                    src, dst = (self._mesh.describe(operation.ranks[r]) for r in (a, b))
                    return (f"in an all_to_all {src} sends {dst} {sends[b]} elements, which "
                            f"expects {receives[a]}")  # fmt: skip
        return None

    def _raise(self, words: str) -> None:
        """Raise for what was found first, here or on another rank."""
        raise CollectiveMismatch(self._store.compare_set(_VERDICT, "", words).decode())


def _among(ranks: Any) -> str:
    return f"among ranks {', '.join(map(str, ranks))}"
