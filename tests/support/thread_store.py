"""torch's key-value store for one thread, and for ranks that are threads (`threads`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from threads import _here, _StoppedError


class Alone:
    """A store of one thread: waiting for a missing key times out at once."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.delete_key = self.values.pop

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if key not in self.values and expected == "":
            self.set(key, desired)
        return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise dist.DistStoreError("timed out")


class Store(Alone):
    """A store shared by all ranks, made outside of `run_threads`. A rank that
    waits lets the others run."""

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        _here.world.turns.turn.notify_all()

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        turns, numbers = _here.world.turns, torch.get_rng_state()
        ready = turns.turn.wait_for(lambda: turns.over or self.check(keys), timeout.total_seconds())
        torch.set_rng_state(numbers)
        if turns.over:
            raise _StoppedError
        if not ready:
            raise dist.DistStoreError("timed out")
