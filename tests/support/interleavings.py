"""A check that a protocol between programs is correct in every possible order.

`Recorder` notes the loads, stores, barriers and flags of kernel programs while Triton's interpreter
runs them one after another. From that record of one order,

  * `races` finds conflicting accesses that nothing orders, by vector clocks: what a release
    publishes is ordered before what follows the acquire that must have seen it, the launches of one
    stream are ordered, and within a program only a barrier orders the thread that makes an atomic
    and those that load and store;
  * `explore` runs the record in every possible order: it finds reachable states in which two
    conflicting accesses could happen at once, and states in which no program can continue.

Elements are float64 and int64, eight bytes each. Sources: Lamport 1978; Flanagan and Freund 2009
(FastTrack) for the clocks; Holzmann 1997 (SPIN) and Godefroid 1996 (persistent sets) for the
search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.runtime.interpreter import interpreter_builder

Stream = tuple[int, int]  # a rank, and one of its streams


class Event(NamedTuple):
    """An event of kind load, store, bulk (an asynchronous store), barrier, publish or await."""

    kind: str
    cells: frozenset[int] = frozenset()
    flag: int = 0
    value: int = 0
    ordered: bool = True
    wide: bool = True  # scope sys


class Program(NamedTuple):
    """The events of one program of a launch."""

    stream: Stream
    launch: int
    events: list[Event]


class Recorder:
    """A recorder of the programs that are launched while it is ``recording``.

    Accesses to the tensors in `apart`, which hold error reports only, do not count.
    """

    def __init__(self, apart: Sequence[torch.Tensor] = ()) -> None:
        self._apart = {t.data_ptr() // 8 + i for t in apart for i in range(t.numel())}
        self.programs: list[Program] = []
        self._stream: Stream = (0, 0)
        self._epoch = 0
        self._launches: dict[Stream, int] = defaultdict(int)

    def launch(self, rank: int, stream: int, epoch: int) -> None:
        """Begin the next launch on a rank's stream. Its waits are for `epoch`."""
        self._stream, self._epoch = (rank, stream), epoch
        self._launches[self._stream] += 1

    def _note(self, event: Event) -> None:
        events = self.programs[-1].events
        if event.kind == "await" and events and events[-1][:3] == event[:3]:
            events.pop()  # it polled again
        events.append(event)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch the interpreter."""
        builder, saved = interpreter_builder, {}

        def watch(name: str, note: Any) -> None:
            saved[name] = getattr(builder, name)

            def watched(*args: Any) -> Any:
                result = saved[name](*args)
                note(result, *args)
                return result

            setattr(builder, name, watched)

        def begin(_, *grid):
            self.programs.append(Program(self._stream, self._launches[self._stream], []))

        def accessed(kind):
            def note(result, ptrs, *rest):
                mask = rest[0] if kind == "load" else rest[1]
                where = np.broadcast_to(ptrs.data, mask.data.shape)[mask.data]
                self._note(Event(kind, frozenset((where // 8).tolist()) - self._apart))

            return note

        def atomic(result, op, ptr, val, mask, sem, scope):
            names = (str(sem).upper(), str(scope).upper())
            strong, wide = "RELEASE" in names[0] or "ACQUIRE" in names[0], "SYS" in names[1]
            for flag, value in zip(ptr.data[mask.data].tolist(), val.data[mask.data].tolist()):
                if "XCHG" in str(op).upper():
                    self._note(Event("publish", frozenset(), flag, value, strong, wide))
                else:
                    self._note(Event("await", frozenset(), flag, self._epoch, strong, wide))

        def bulk(_, desc, value, indices):
            pointers, mask = desc.materialize_pointers(indices)
            where = np.broadcast_to(pointers.data, mask.data.shape)[mask.data]
            self.programs[-1].events.pop()  # the interpreter made an ordinary store of it
            self._note(Event("bulk", frozenset((where // 8).tolist())))

        watch("set_grid_idx", begin)
        watch("create_masked_load", accessed("load"))
        watch("create_masked_store", accessed("store"))
        watch("create_atomic_rmw", atomic)
        watch("create_barrier", lambda *_: self._note(Event("barrier")))
        watch("create_descriptor_store", bulk)
        try:
            yield
        finally:
            for name in saved:
                delattr(builder, name)


# ---------------------------------------------------------------- happens before

Clock = dict[int, int]


def _join(*clocks: Clock) -> Clock:
    joined: Clock = {}
    for clock in clocks:
        for thread, time in clock.items():
            joined[thread] = max(time, joined.get(thread, 0))
    return joined


class _Granted(NamedTuple):
    value: int
    clock: Clock
    rank: int
    wide: bool


def races(programs: Sequence[Program]) -> list[str]:
    """Return one line per unordered conflict; empty if the protocol is correct."""
    before: dict[Stream, Clock] = defaultdict(dict)  # all launches of a stream except the last
    during: dict[Stream, tuple[int, Clock]] = {}
    written: dict[int, tuple[int, int, int]] = {}  # cell -> thread, time, program
    read: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    flags: dict[int, list[_Granted]] = defaultdict(list)
    found: list[str] = []

    def conflict(what: str, number: int, other: int) -> None:
        mine, theirs = programs[number], programs[other]
        second = f"{theirs.launch} of {theirs.stream}"
        found.append(f"{what}: launch {mine.launch} of {mine.stream} and {second}")

    for number, program in enumerate(programs):
        stream, rank = program.stream, program.stream[0]
        last, clock = during.get(stream, (0, {}))
        if program.launch != last:
            before[stream] = _join(before[stream], clock)
            clock = {}
        main, data, bulk = (3 * number + i for i in range(3))
        clocks = {t: {**before[stream], t: 1} for t in (main, data, bulk)}
        for event in program.events:
            if event.kind == "barrier":
                both = _join(clocks[main], clocks[data])
                for thread in (main, data):
                    clocks[thread] = {**both, thread: both[thread] + 1}
                clocks[bulk] = _join(clocks[bulk], both)
            elif event.kind == "publish":
                granted = dict(clocks[main]) if event.ordered else {}
                flags[event.flag].append(_Granted(event.value, granted, rank, event.wide))
                clocks[main][main] += 1
            elif event.kind == "await":
                # no publisher guarantees more than the first value that the wait could have seen
                first = next((g for g in flags[event.flag] if g.value >= event.value), None)
                if first is None or not event.ordered:
                    continue
                if first.rank == rank or (first.wide and event.wide):
                    clocks[main] = _join(clocks[main], first.clock)
            else:
                thread = bulk if event.kind == "bulk" else data
                known = clocks[thread]
                for cell in event.cells:
                    if cell in written:
                        other, time, by = written[cell]
                        if time > known.get(other, 0):
                            conflict(f"{event.kind} after store", number, by)
                    if event.kind == "load":
                        read[cell][thread] = (known[thread], number)
                        continue
                    for other, (time, by) in read.pop(cell, {}).items():
                        if time > known.get(other, 0):
                            conflict(f"{event.kind} after load", number, by)
                    written[cell] = (thread, known[thread], number)
        during[stream] = (program.launch, _join(clock, *clocks.values()))
    return sorted(set(found))


# ---------------------------------------------------------------- every order


class _Threads(NamedTuple):
    """A program as threads that only barriers join: one makes atomics, others load and store."""

    main: tuple[Event, ...]
    data: tuple[Event, ...]
    # each bulk store, with the number of events of `data` before it
    bulk: tuple[tuple[int, Event], ...]


def _threads(program: Program, shared: frozenset[int], remote: frozenset[int]) -> _Threads:
    main: list[Event] = []
    data: list[Event] = []
    bulk: list[tuple[int, Event]] = []
    for event in program.events:
        if event.kind == "barrier":
            main.append(event)
            data.append(event)
        elif event.kind in ("publish", "await"):
            strong = event.ordered and (event.wide or event.flag not in remote)
            if strong:
                main.append(event)
            elif event.kind == "publish":  # visible to others before what precedes it
                at = len(main)
                while at and main[at - 1].kind == "barrier":
                    at -= 1
                main.insert(at, event)
            # an await that orders nothing could equally come after everything else
        elif cells := event.cells & shared:
            if event.kind == "bulk":
                bulk.append((len(data), event._replace(cells=cells)))
            elif data and data[-1].kind == event.kind and not (bulk and bulk[-1][0] == len(data)):
                # nothing comes between the two, so a program that meets one could meet the other
                data[-1] = event._replace(cells=data[-1].cells | cells)
            else:
                data.append(event._replace(cells=cells))
    return _Threads(tuple(main), tuple(data), tuple(bulk))


def _shared(programs: Sequence[Program]) -> frozenset[int]:
    """Return the cells on which programs can conflict."""
    users: dict[int, set[int]] = defaultdict(set)
    stored: set[int] = set()
    for number, program in enumerate(programs):
        for event in program.events:
            for cell in event.cells:
                users[cell].add(number)
            if event.kind in ("store", "bulk"):
                stored |= event.cells
    return frozenset(cell for cell in stored if len(users[cell]) > 1)


def _between_ranks(programs: Sequence[Program]) -> frozenset[int]:
    """Return the flags that programs of more than one rank use."""
    users: dict[int, set[int]] = defaultdict(set)
    for program in programs:
        for event in program.events:
            if event.flag:
                users[event.flag].add(program.stream[0])
    return frozenset(flag for flag, ranks in users.items() if len(ranks) > 1)


class Explored(NamedTuple):
    """The number of states, and the errors found in some of them."""

    states: int
    problems: list[str]


def explore(programs: Sequence[Program], *, residents: int, limit: int = 3_000_000) -> Explored:
    """Run the record in every order, up to the first problem or `limit` states.

    At most `residents` programs of a launch run at a time, and they start in the order of their
    numbers. Barriers, publications and awaits that can proceed are executed at once, in one order
    only. They only enable other events, because flags only grow. So any state that can be reached
    before one can also be reached after it, including two accesses that are both pending (Godefroid
    1996).
    """
    shared, remote = _shared(programs), _between_ranks(programs)
    launches: dict[Stream, list[list[_Threads]]] = defaultdict(list)
    last: dict[Stream, int] = {}
    for program in programs:
        if last.get(program.stream) != program.launch:
            launches[program.stream].append([])
            last[program.stream] = program.launch
        launches[program.stream][-1].append(_threads(program, shared, remote))
    streams = [tuple(map(tuple, launches[stream])) for stream in sorted(launches)]

    # A state holds, per stream, (launch, next program to start, running (program, main, data,
    # bulks)), and the values of the flags.
    def started(stream: int, launch: int, begun: int, running: tuple) -> tuple:
        """Start as many programs as may run, and the next launch once one is over."""
        while launch < len(streams[stream]):
            whole = streams[stream][launch]
            running = tuple(r for r in running if not _over(whole[r[0]], r))
            while begun < len(whole) and len(running) < residents:
                fresh = (begun, 0, 0, 0)
                begun += 1
                if not _over(whole[fresh[0]], fresh):
                    running += (fresh,)
            if running or begun < len(whole):
                return launch, begun, running
            launch, begun = launch + 1, 0
        return launch, 0, ()

    first = (tuple(started(s, 0, 0, ()) for s in range(len(streams))), ())
    seen, todo, problems = {first}, [first], set()
    while todo:
        if len(seen) > limit:
            raise ValueError(f"more than {limit} states")
        state = todo.pop()
        positions, flags = state
        values, accesses, moves = dict(flags), [], []
        for s, (launch, begun, running) in enumerate(positions):
            for i, where in enumerate(running):
                threads = streams[s][launch][where[0]]
                for event, after in _steps(threads, where, values):
                    if event is not None and event.cells:
                        accesses.append((s, where[0], event))
                    moves.append((s, launch, begun, running, i, event, after))
        for n, (s, p, event) in enumerate(accesses):
            for t, q, other in accesses[:n]:
                kinds = {event.kind, other.kind}
                apart = (s, p) != (t, q) or "bulk" in kinds
                if apart and kinds != {"load"} and event.cells & other.cells:
                    problems.add(f"race: {other.kind} and {event.kind}, streams {t} and {s}")
        if problems:
            break
        moves = next(([move] for move in moves if move[5] is None or not move[5].cells), moves)
        if not moves and any(p[0] < len(streams[s]) for s, p in enumerate(positions)):
            problems.add("deadlock")
        for s, launch, begun, running, i, event, after in moves:
            held = values
            if event is not None and event.kind == "publish":
                held = {**values, event.flag: max(event.value, values.get(event.flag, 0))}
            now = started(s, launch, begun, (*running[:i], after, *running[i + 1 :]))
            new = ((*positions[:s], now, *positions[s + 1 :]), tuple(sorted(held.items())))
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return Explored(len(seen), sorted(problems))


def _over(threads: _Threads, where: tuple[int, int, int, int]) -> bool:
    _, main, data, bulks = where
    whole = (len(threads.main), len(threads.data), (1 << len(threads.bulk)) - 1)
    return (main, data, bulks) == whole


def _steps(
    threads: _Threads, where: tuple[int, int, int, int], flags: dict[int, int]
) -> Iterator[tuple[Event | None, tuple[int, int, int, int]]]:
    """Return the possible next steps of a running program, with its state after each."""
    p, main, data, bulks = where
    at_main = threads.main[main] if main < len(threads.main) else None
    at_data = threads.data[data] if data < len(threads.data) else None
    for i, (position, event) in enumerate(threads.bulk):
        if data >= position and not bulks >> i & 1:
            yield event, (p, main, data, bulks | 1 << i)
    if at_main is not None and at_main.kind == "barrier":
        if at_data is not None and at_data.kind == "barrier":
            yield None, (p, main + 1, data + 1, bulks)
    elif at_main is not None and (
        at_main.kind == "publish" or flags.get(at_main.flag, 0) >= at_main.value
    ):
        yield at_main, (p, main + 1, data, bulks)
    if at_data is not None and at_data.kind != "barrier":
        yield at_data, (p, main, data + 1, bulks)
