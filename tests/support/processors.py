"""A check that kernels which wait for each other always find room on a GPU's processors.

A device starts the kernels at the heads of its streams in any order, if there is room, and never
stops a kernel that has started. A fused product waits for its peers while it runs. If it occupies
every processor, it keeps a message from starting for which a peer may be waiting. `stuck` explores
every order in which the devices of pipeline x tensor ranks may start the kernels of a schedule:

* an action's product is on the rank's main stream, behind the messages that the action waits for.
It holds its `grid` of processors, minus those that messages use. If it is `fused`, it ends when
each tensor rank has reached it; otherwise it ends by itself;
* a message is on its link's stream at each end, behind the products begun before it. It holds
`ctas` processors, starts when that many are free, and ends when its other end has started.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from warpweave.parallel.schedule import actions
from warpweave.parallel.schedule.actions import RECEIVES, SENDS, Action, Link, Schedule, placement
from warpweave.parallel.schedule.ordering import posted_at_need


class Device(NamedTuple):
    """A GPU: `processors` in total, `grid` for a product, `ctas` for a message."""

    processors: int = 132
    grid: int = 132
    ctas: int = 4
    fused: bool = True


class _Kernel(NamedTuple):
    device: tuple[int, int]  # pipeline rank, tensor rank
    action: Action
    after: tuple[int, ...]  # numbers of kernels that must have ended before it can start


def _kernels(lists: Schedule, tensor_ranks: int) -> list[_Kernel]:
    """Return the kernels that every rank launches, in the order of each stream. All tensor ranks
    are equal."""
    rank_of, posts = placement(lists), posted_at_need(lists)
    kernels: list[_Kernel] = []
    for device in ((rank, t) for rank in range(len(lists)) for t in range(tensor_ranks)):
        behind: dict[Link | None, tuple[int, ...]] = defaultdict(tuple)  # by stream; None: main
        posted: dict[Action, int] = {}

        def launch(stream: Link | None, action: Action, device=device, behind=behind) -> int:
            kernels.append(_Kernel(device, action, behind[stream] + behind[None]))
            behind[stream] = (len(kernels) - 1,)
            return len(kernels) - 1

        for index, action in enumerate(lists[device[0]]):
            for receive in posts.get((device[0], index), ()):
                posted[receive] = launch(actions.link(receive, rank_of), receive)
            if action.op in RECEIVES:
                behind[None] += (posted[action],)
            else:
                on = actions.link(action, rank_of) if action.op in SENDS else None
                launch(on, action)
    return kernels


def stuck(lists: Schedule, tensor_ranks: int, device: Device) -> str:
    """Return the remaining kernels, in words, of the first state found in which nothing can start;
    "" if there is none."""
    kernels, rank_of = _kernels(lists, tensor_ranks), placement(lists)
    at = {(k.device, k.action): n for n, k in enumerate(kernels)}
    message = [k.action.op in SENDS or k.action.op in RECEIVES for k in kernels]
    others: list[tuple[int, ...]] = [()] * len(kernels)  # kernels for which it waits while it runs
    for n, ((rank, t), action, _) in enumerate(kernels):
        if action.op in SENDS:
            stage = action.stage + actions.AFTER[action.op]
            end = Action(actions.MATCHING[action.op], stage, action.mb)
            other = at[(rank_of[end.stage], t), end]
            others[n], others[other] = (other,), (n,)
        elif not message[n]:
            others[n] = tuple(at[(rank, u), action] for u in range(tensor_ranks))

    def free(n: int, started: frozenset[int], ended: frozenset[int]) -> bool:
        """Return True if there is room for a kernel."""
        running = [m for m in started - ended if kernels[m].device == kernels[n].device]
        held = device.ctas * sum(message[m] for m in running)
        if not message[n]:
            return held < device.processors
        held += device.grid * sum(not message[m] for m in running)
        return held + device.ctas <= device.processors

    def settle(started: frozenset[int], ended: frozenset[int]) -> frozenset[int]:
        """Return `ended` plus everything that ends by itself."""
        while True:
            reached = {n for n, k in enumerate(kernels) if ended.issuperset(k.after)}
            more = {
                n for n in started - ended if (not message[n] and not device.fused)
                or all(o in (started if message[n] else reached) for o in others[n])
            }  # fmt: skip
            if not more:
                return ended
            ended |= more

    seen, todo = set(), [(frozenset[int](), frozenset[int]())]
    while todo:
        started, ended = todo.pop()
        if (started, ended) in seen:
            continue
        seen.add((started, ended))
        ready = [n for n, k in enumerate(kernels) if n not in started and ended >= {*k.after}]
        can = [n for n in ready if free(n, started, ended)]
        if not can and len(ended) < len(kernels):
            left = sorted({*ready} | (started - ended))
            words = (f"{kernels[n].device} {kernels[n].action}" for n in left)
            return ", ".join(f"{w}{' runs' * (n in started)}" for n, w in zip(left, words))
        for n in can:
            todo.append((begun := started | {n}, settle(begun, ended)))
    return ""
