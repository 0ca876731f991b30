"""Find the rank at fault after a launch failed, from how its ranks ended.

On gloo the ranks report it themselves (`launch.Session.explain`). On NCCL nothing raises: after the
timeout of a collective, NCCL's watchdog ends every rank that waits in one by SIGABRT, so the rank
at fault is most likely one that the watchdog has *not* ended. The evidence is:

    first to end          a rank that died in a different way is the cause, even if others abort
                          later
    rank without abort    it hung outside collectives until it was stopped
    flight recorder       the collectives that each rank issued on each communicator; torch writes
                          a file per rank when the watchdog ends a rank; a rank with fewer is behind

The watchdog's own messages are already on stderr, which the ranks share.
"""

from __future__ import annotations

import itertools
import json
import pickletools
import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from warpweave.launch.heartbeat import last_seen
from warpweave.parallel.mesh import Mesh


@dataclass(frozen=True)
class End:
    """The end of a rank: its exit code, negative for a signal, as in `multiprocessing`."""

    rank: int
    code: int

    @property
    def aborted(self) -> bool:
        """True if it ended by SIGABRT, also with a shell's exit code for it."""
        return self.code in (-signal.SIGABRT, 128 + signal.SIGABRT)

    @property
    def how(self) -> str:
        """The way in which it ended, in words."""
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"failed with {self.code}" if self.code else "left (exit 0)"


def rank_at_fault(
    ends: list[End], mesh: Mesh, store: dist.Store, dumps: dict[int, Path] | None = None
) -> str | None:
    """One line about the rank at fault; None if that rank reported its error itself.

    `ends` are the ranks that failed, in the order in which they ended. `store` has the heartbeats
    and perhaps a verdict. `dumps` are the ranks' flight recorder files, None on gloo.
    """
    first = ends[0]
    if first.aborted and dumps is not None:
        return _after_abort([e.rank for e in ends if e.aborted], mesh, store, dumps)
    if first.code <= 0:
        return f"{mesh.describe(first.rank)} {first.how}{last_seen(store, first.rank)}"
    return store.get("verdict").decode() if store.check(["verdict"]) else None


def _after_abort(aborted: list[int], mesh: Mesh, store: dist.Store, dumps: dict[int, Path]) -> str:
    """The evidence about each rank if the first one to end was aborted."""
    if len(aborted) == mesh.world:
        who = "all ranks were"
    elif len(aborted) == 1:
        who = f"{mesh.describe(aborted[0])} was"
    else:
        who = f"ranks {', '.join(map(str, sorted(aborted)))} were"
    said = [f"{who} killed by SIGABRT, probably from NCCL's watchdog (see its messages above)"]
    words = behind({rank: path.read_bytes() for rank, path in dumps.items()})
    said += [f"{mesh.describe(rank)} {what}" for rank, what in sorted(words.items())]
    if dumps:
        path = min(dumps.values())
        said[-1] += f" according to the flight recorder ({path} and others)" if words else ""
    others = [rank for rank in range(mesh.world) if rank not in aborted]
    said += [f"not aborted: {mesh.describe(rank)}{last_seen(store, rank)}" for rank in others]
    if len(said) == 1:
        first = f"{mesh.describe(aborted[0])}, the first to abort,"
        said.append(f"cause unknown; {first} ended{last_seen(store, aborted[0])}")
    return "; ".join(said)


# ---------------------------------------------------------------- the flight recorder


def recorded(prefix: str | None, world: int, since: float) -> dict[int, Path] | None:
    """Flight recorder files of the ranks written after `since`; None without a `prefix`."""
    if prefix is None:
        return None
    files = {rank: Path(f"{prefix}{rank}") for rank in range(world)}
    return {rank: p for rank, p in files.items() if p.exists() and p.stat().st_mtime >= since}


def behind(dumps: dict[int, bytes]) -> dict[int, str]:
    """Ranks that issued fewer collectives on a communicator than another member did, and the first
    collective that each did not join; from dumps of torch's flight recorder (version 2)."""
    issued: dict[str, dict[int, int]] = defaultdict(dict)  # communicator -> rank -> count
    names: dict[tuple[str, int], str] = {}
    read = {rank: values for rank, data in dumps.items() if (values := _constants(data))}
    for rank, values in read.items():
        field: dict[object, Any] = {}
        for key, value in itertools.pairwise(values):
            field[key] = value
            if key == "ranks":  # the members of the communicator "name", as JSON
                for member in read.keys() & json.loads(value):
                    issued[field["name"]].setdefault(member, 0)
            if key == "is_p2p" and value is False:  # the last field of an entry
                group, number = field["process_group"], field["collective_seq_id"]
                issued[group][rank] = max(number, issued[group].get(rank, 0))
                names[group, number] = field["profiling_name"]
    found: dict[int, str] = {}
    for group, counts in issued.items():
        for rank, count in counts.items():
            if count < max(counts.values()):
                name = names.get((group, count + 1), "a collective")
                found.setdefault(rank, f"did not join {name} (number {count + 1} of group {group})")
    return found


def _constants(data: bytes) -> list[Any]:
    """Strings, numbers, and booleans of a pickle in their order in the file. Opcodes are listed and
    never executed. Empty if the file is truncated, as when a rank is killed while writing."""
    memo: dict[Any, object] = {}
    last: object = None
    found: list[object] = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if "PUT" in opcode.name:
                memo[argument] = last
                continue
            last = {"NEWTRUE": True, "NEWFALSE": False}.get(opcode.name, argument)
            if "GET" in opcode.name:
                last = memo[argument]
            if last is not None:
                found.append(last)
    except ValueError:
        return []
    return found
