"""Who is at fault when a launch fails: what can be told from how its ranks ended, once they have.

On gloo the ranks say it themselves (`launch.Session.explain`). On NCCL nothing raises: after the
timeout of a collective NCCL's watchdog ends by SIGABRT every rank that has waited in one, so that
the rank at fault is most likely one that it has *not* ended. What is evidence then:

    who ended first       a rank that died otherwise is the cause, whoever aborted after it
    who did not abort     it hung outside collectives, until it was stopped
    flight recorder       what each rank has issued on each communicator: torch writes it to a file
                          per rank when the watchdog ends a rank; a rank with less is behind

The watchdog's own words are on stderr already, as the ranks share it.
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
    """How a rank ended: its exit code, negative for a signal, as `multiprocessing` has it."""

    rank: int
    code: int

    @property
    def aborted(self) -> bool:
        """By SIGABRT, or as a shell reports it."""
        return self.code in (-signal.SIGABRT, 128 + signal.SIGABRT)


def rank_at_fault(
    ends: list[End], mesh: Mesh, store: dist.Store, dumps: dict[int, Path] | None = None
) -> str | None:
    """One line about the rank at fault, None where it reported its error itself.

    Args:
        ends: ranks that ended badly, in the order in which they did.
        mesh: for the ranks' names.
        store: that of the ranks, with their beats and perhaps their verdict.
        dumps: what torch's flight recorder wrote on each rank; None on gloo, without a watchdog.
    """
    first = ends[0]
    if first.aborted and dumps is not None:
        return _after_abort([e.rank for e in ends if e.aborted], mesh, store, dumps)
    if first.code <= 0:
        how = f"was killed by {signal.Signals(-first.code).name}" if first.code else "left (exit 0)"
        return f"{mesh.describe(first.rank)} {how}{last_seen(store, first.rank)}"
    return store.get("verdict").decode() if store.check(["verdict"]) else None


def _after_abort(aborted: list[int], mesh: Mesh, store: dist.Store, dumps: dict[int, Path]) -> str:
    """What stands against each rank where the first that ended was aborted."""
    if len(aborted) == mesh.world:
        who = "all ranks were"
    elif len(aborted) == 1:
        who = f"{mesh.describe(aborted[0])} was"
    else:
        who = f"ranks {', '.join(map(str, sorted(aborted)))} were"
    said = [f"{who} ended by SIGABRT, as by NCCL's watchdog (its words are above)"]
    words = behind({rank: path.read_bytes() for rank, path in dumps.items()})
    said += [f"{mesh.describe(rank)} {what}" for rank, what in sorted(words.items())]
    if dumps:
        path = min(dumps.values())
        said[-1] += f", says the flight recorder ({path} and others)" if words else ""
    others = [rank for rank in range(mesh.world) if rank not in aborted]
    said += [f"not so {mesh.describe(rank)}{last_seen(store, rank)}" for rank in others]
    if len(said) == 1:
        said.append(f"nothing names the rank at fault{last_seen(store, aborted[0])}")
    return "; ".join(said)


# ---------------------------------------------------------------- the flight recorder


def recorded(prefix: str | None, world: int, since: float) -> dict[int, Path] | None:
    """The files of the ranks' flight recorders that were written after `since`; None without."""
    if prefix is None:
        return None
    files = {rank: Path(f"{prefix}{rank}") for rank in range(world)}
    return {rank: p for rank, p in files.items() if p.exists() and p.stat().st_mtime >= since}


def behind(dumps: dict[int, bytes]) -> dict[int, str]:
    """Of the ranks with a dump of torch's flight recorder (version 2) those that have issued fewer
    collectives on a communicator than another member, and the first one that each did not join."""
    issued: dict[str, dict[int, int]] = defaultdict(dict)  # communicator -> rank -> how many
    names: dict[tuple[str, int], str] = {}
    read = {rank: values for rank, data in dumps.items() if (values := _constants(data))}
    for rank, values in read.items():
        field: dict[object, Any] = {}
        for key, value in itertools.pairwise(values):
            field[key] = value
            if key == "ranks":  # of the communicator "name", as JSON
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
    """Strings, numbers and truth values of a pickle in the order in which they stand: its opcodes
    are listed, none is executed. Empty where it is cut short, as of a rank killed while writing."""
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
