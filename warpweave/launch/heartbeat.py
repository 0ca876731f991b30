"""Heartbeats: each rank reports its progress through the store, which reveals the rank at fault.

    beat/R     [step, phase, its time, liveness, waits, place]: twice a second, by a thread
    failed/R   the error raised in the rank's main thread

The thread beats whatever the main thread does, and records where the main thread is. After an
error:

    no new beat                      the process is dead, stopped, or stuck in C holding the
                                     interpreter lock: it is at fault, and no other rank is
    beats, outside of a collective   stuck or late, while the others timed out: at fault
    beats, waits in a collective     a victim like the rank that asks; so is one with an error

Heartbeats do not show which rank is in the wrong collective if all ranks wait in one, or whether a
silent rank is dead (its launcher knows). On NCCL they do not show whether a rank is a victim,
because its main thread waits for its stream and not in a collective (`blame`).
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

INTERVAL = 0.5  # seconds between two beats
SILENCE = 3 * INTERVAL  # without a beat in this time a rank is silent
_TORCH = os.path.dirname(dist.__file__)


class Beat(NamedTuple):
    """A rank's heartbeat: its progress and the Unix time of that, a number that grows while it
    lives, whether its main thread waits for other ranks, and that thread's place."""

    step: int
    phase: str
    when: float
    alive: float = 0.0
    waits: bool = False
    place: str = "no place"


class Heartbeat:
    """This rank's heartbeats, written to `store`; create it in the main thread."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._key = store, f"beat/{rank}"
        self._progress = (0, "start", time.time())
        self._main, self._ended = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def note(self, step: int, phase: str) -> None:
        """Record the progress of the main thread."""
        self._progress = (step, phase, time.time())
        self._publish(self._store)

    def start(self) -> None:
        """Beat until `stop`, the interpreter's exit, or the end of the store."""
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop, and wait for any beat in progress. The process aborts if a thread returns from the
        store's C++ code while the interpreter is shutting down."""
        atexit.unregister(self.stop)
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(SILENCE)

    def _run(self) -> None:
        with suppress(RuntimeError):  # includes dist.DistError: the store's process has ended
            # A separate connection, because the main thread's is blocked while it waits for a key.
            store = self._store.clone()  # type: ignore[attr-defined]
            self._publish(store)
            while not self._ended.wait(INTERVAL):
                self._publish(store)

    def _publish(self, store: dist.Store) -> None:
        waits, place = where(sys._current_frames().get(self._main))
        beat = Beat(*self._progress, time.monotonic(), waits, place)
        store.set(self._key, json.dumps(beat))


def where(frame: FrameType | None) -> tuple[bool, str]:
    """(True if a thread waits for other ranks, its place), from its innermost frame.

    A thread waits if it is in a function of torch.distributed or in a call of any ``wait()``."""
    if frame is None:
        return False, "no place"
    code, line = frame.f_code, frame.f_lineno or 0  # None between two lines
    waits = code.co_filename.startswith(_TORCH)
    waits |= ".wait(" in linecache.getline(code.co_filename, line)
    return waits, f"{Path(code.co_filename).name}:{line} ({code.co_name})"


def last_beat(store: dist.Store, rank: int) -> Beat | None:
    """The last beat of a rank; None before the first."""
    key = f"beat/{rank}"
    return Beat(*json.loads(store.get(key))) if store.check([key]) else None


def last_seen(store: dist.Store, rank: int) -> str:
    """ ", last seen at step 3 (saving), 0.4 s ago", from the rank's last beat."""
    if (beat := last_beat(store, rank)) is None:
        return " before its first step"
    return f", last seen at step {beat.step} ({beat.phase}), {time.time() - beat.when:.1f} s ago"


def _known(store: dist.Store) -> bool:
    """True if a rank has reported why it failed, or the rank at fault."""
    return any(store.add(key, 0) > 0 for key in ("causes", "speakers"))


def at_fault(store: dist.Store, rank: int, world: int) -> dict[int, str]:
    """The ranks at fault for the lost connection of `rank`, with reasons.

    Empty if a rank has reported it, or if none can be named. Waits for beats, up to `SILENCE`."""

    def excused(other: int) -> bool:
        return other == rank or store.check([f"failed/{other}"])

    before = {other: last_beat(store, other) for other in range(world)}
    silent = {other for other in range(world) if not excused(other)}
    deadline = time.monotonic() + SILENCE
    while silent and not _known(store) and time.monotonic() < deadline:
        time.sleep(0.05)
        silent = {o for o in silent if not excused(o) and last_beat(store, o) == before[o]}
    if _known(store):
        return {}
    if silent:
        said = "no heartbeat from {}: it died or is hanging"
        return {o: said + last_seen(store, o) for o in silent}
    texts = [store.get(f"failed/{o}") for o in range(world) if store.check([f"failed/{o}"])]
    if not any(b"imed out" in text or b"imeout" in text for text in texts):
        return {}
    beats = {o: last_beat(store, o) for o in range(world) if not excused(o)}
    return {
        other: f"{{}} hangs in {beat.place}{last_seen(store, other)}"
        for other, beat in beats.items()
        if beat is not None and not beat.waits
    }
