"""Do kernels that wait for each other always find room on a GPU's processors?

A device starts what stands at the heads of its streams in any order, where there is room, and stops
nothing that has started. So a product within which ranks wait for their peers (fused) and which has
taken every processor keeps a message from starting, for which a peer may be waiting. `stuck`
explores every order in which the devices of pipeline x tensor ranks may start the kernels of a
schedule:

* an action's product is on the rank's main stream, behind the messages that the action waits for.
  It holds its `grid` of processors, as many of them as messages leave, and ends when each tensor
  rank has come to it, if it is `fused`, and by itself if not;
* a message is on its link's stream at each end, behind the products begun before it. It holds
  `ctas` processors, starts when so many are free, and ends when its other end has started.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from warpweave.parallel.schedule.actions import (
    AFTER,
    MATCHING,
    RECEIVES,
    SENDS,
    Action,
    Link,
    Schedule,
    link,
    placement,
)
from warpweave.parallel.schedule.ordering import posted_at_need


class Device(NamedTuple):
    """processors: all it has; grid: those of a product; ctas: those of a message."""

    processors: int = 132
    grid: int = 132
    ctas: int = 4
    fused: bool = True


class _Kernel(NamedTuple):
    device: tuple[int, int]  # pipeline rank, tensor rank
    action: Action
    after: tuple[int, ...]  # numbers of kernels that must have ended before it can start


def _kernels(lists: Schedule, tensor_ranks: int) -> list[_Kernel]:
    """What every rank launches, of each the streams in order; a tensor rank's like any other's."""
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
                posted[receive] = launch(link(receive, rank_of), receive)
            if action.op in RECEIVES:
                behind[None] += (posted[action],)
            else:
                launch(link(action, rank_of) if action.op in SENDS else None, action)
    return kernels


def stuck(lists: Schedule, tensor_ranks: int, device: Device) -> str:
    """What is left, in words, in the first state found in which nothing can start; "" if none."""
    kernels, rank_of = _kernels(lists, tensor_ranks), placement(lists)
    at = {(k.device, k.action): n for n, k in enumerate(kernels)}
    message = [k.action.op in SENDS or k.action.op in RECEIVES for k in kernels]
    others: list[tuple[int, ...]] = [()] * len(kernels)  # that a kernel waits for while it runs
    for n, ((rank, t), action, _) in enumerate(kernels):
        if action.op in SENDS:
            end = Action(MATCHING[action.op], action.stage + AFTER[action.op], action.mb)
            other = at[(rank_of[end.stage], t), end]
            others[n], others[other] = (other,), (n,)
        elif not message[n]:
            others[n] = tuple(at[(rank, u), action] for u in range(tensor_ranks))

    def free(n: int, started: frozenset[int], ended: frozenset[int]) -> bool:
        """Whether there is room for a kernel."""
        running = [m for m in started - ended if kernels[m].device == kernels[n].device]
        held = device.ctas * sum(message[m] for m in running)
        if not message[n]:
            return held < device.processors
        held += device.grid * sum(not message[m] for m in running)
        return held + device.ctas <= device.processors

    def settle(started: frozenset[int], ended: frozenset[int]) -> frozenset[int]:
        """`ended` and all that ends by itself."""
        while True:
            reached = {n for n, k in enumerate(kernels) if ended.issuperset(k.after)}
            more = {
                n
                for n in started - ended
                if (not message[n] and not device.fused)
                or all(o in (started if message[n] else reached) for o in others[n])
            }
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
