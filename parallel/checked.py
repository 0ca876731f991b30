"""Collectives that ranks compare before they issue them, to raise an error instead of hanging.

If a rank calls a different collective than its peers, or the same one with a different shape or
dtype, NCCL hangs on all ranks until a time-out that names no rank, and gloo aborts a process. Here,
each rank first writes what it is about to call into the ranks' store, waits for the other
participants, and compares. The idea is that of torch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which
applies to a whole run, creates a second gloo group for each group, and does not cover messages::

    rank 0    set 3/7/0 = all_reduce of float32[4]    wait for 3/7/*    differ: raise
    rank 1    set 3/7/1 = all_reduce of float32[5]    wait for 3/7/*    differ: raise

Messages between two ranks do not wait, because a pipeline posts receives ahead of what it still has
to send. The end that comes second compares, and raises before it issues its own operation.

Every rank that waits raises the same message: the first rank to find a disagreement writes it down,
and all ranks look there. The operator of a reduction (sum or maximum) is not visible at torch's
dispatcher, so it is not compared.
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

_LOOK = 0.2  # seconds of waiting after which a rank checks where the others are
_VERDICT = "verdict"


class CollectiveMismatch(RuntimeError):
    """Ranks issue different collectives, or a rank is missing; raised on every rank that waits."""


class CheckedCollectives(Observer):
    """Compare every collective and message within ``with checked`` with those of the other ranks.

    Args:
        store: the ranks' key-value store. Use a separate connection, because its waits would block
            other users of the same one.
        mesh: for the ranks' names.
        rank: this rank.
        timeout: seconds after which a missing rank is reported.
        device: on CUDA, the current stream is synchronized first. `waited` then measures how late
            the other ranks are, and not what this rank still has to compute.

    Attributes:
        waited: total seconds spent waiting for other ranks.
    """

    def __init__(
        self, store: Any, mesh: Mesh, rank: int, timeout: float, device: torch.device
    ) -> None:
        super().__init__()
        if isinstance(store, dist.Store):  # ignore what a predecessor in this process left behind
            number = store.add(f"checked/{rank}", 1)
            store = dist.PrefixStore(f"checked/{number}", store)
        self._store = store
        self._mesh, self._rank, self._timeout, self._device = mesh, rank, timeout, device
        self._last: dict[str, str] = {}  # group -> key of its last collective
        self.waited = 0.0

    def before(self, operation: Operation) -> None:
        """Return when all ranks of a collective are about to issue the same one.

        Raises:
            CollectiveMismatch: one line with both calls and both ranks, or with the rank that is
                still missing after the time-out.
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
        """Write down this end of a message, or compare it with the other end's."""
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
        """Rank -> [its call, sizes], for all ranks of a collective."""
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
        if before is not None:  # all ranks have read it, because they have reached this one
            store.delete_key(f"{before}/{self._rank}")
        return dict(zip(keys, map(json.loads, values), strict=True))

    def _look(self, operation: Operation, keys: dict[int, str], *, late: bool) -> None:
        """Check the other ranks while waiting. Raise if one has found a disagreement, waits in vain
        for this rank, or is `late`."""
        store = self._store
        here = [operation.key, operation.ranks, operation.what]
        store.set(f"at/{self._rank}", json.dumps(here))
        if store.check([_VERDICT]):
            raise CollectiveMismatch(store.get(_VERDICT).decode())
        where = f"{operation.what} {_among(operation.ranks)}"
        for rank, own in keys.items():
            there = store.get(f"at/{rank}") if store.check([f"at/{rank}"]) else None
            if store.check([own]):  # read last: the rank may have arrived in the meantime
                continue
            name, at = self._mesh.describe(rank), ""
            if there is not None:
                key, ranks, what = json.loads(there)
                at = f"{what} {_among(ranks)}"
                if self._rank in ranks and self._is_ahead(key):
                    self._raise(f"{self._mesh.describe(self._rank)} calls {where}, {name} {at}")
            if late:
                seen = f"; it was last seen in {at}" if at else ""
                self._raise(f"{name} did not reach {where} within {self._timeout:g} s{seen}")

    def _is_ahead(self, key: str) -> bool:
        """Return True if `key` is a collective that this rank has not reached yet, so its ranks
        wait for this one."""
        group, _, number = key.rpartition("/")
        last = self._last.get(group, f"{group}/-1")
        return int(number) > int(last.rpartition("/")[2])

    def _difference(self, operation: Operation, rows: dict[int, Any]) -> str | None:
        """Describe what differs between the ranks; None if nothing does."""
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
                    return (f"all_to_all: {src} sends {sends[b]} elements to {dst}, which expects "
                            f"{receives[a]}")  # fmt: skip
        return None

    def _raise(self, words: str) -> None:
        """Raise the disagreement that was found first, on this rank or on another."""
        raise CollectiveMismatch(self._store.compare_set(_VERDICT, "", words).decode())


def _among(ranks: Any) -> str:
    return f"among ranks {', '.join(map(str, ranks))}"
