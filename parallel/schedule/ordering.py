"""The order in which the lists of all ranks can run, or a deadlock.

Also: the sends that a received message acknowledges, and when to post receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from warpweave.parallel.schedule.actions import (
    RECEIVES,
    SENDS,
    TIE,
    Action,
    Link,
    Schedule,
    cell_at,
    deps,
    gives,
    link,
    lowered,
    other_end,
    placement,
    tied_stages,
)

Position = tuple[int, int]  # (rank, index in its list)


def begun_before(lists: Schedule) -> set[Action]:
    """The events that a pass needs but does not make, because an earlier pass did (`open_passes`).

    Receives need none of them, because their sends are in the same pass. A whole schedule has none.
    """
    rank_of = placement(lists)
    places = rank_of if lowered(lists) else None
    every = [a for actions in lists for a in actions]
    made = {event for a in every for event in gives(a)}
    needed = {event for a in every for event in deps(a, len(rank_of), places)}
    return {event for event in needed - made if event.op not in SENDS}


def order(lists: Schedule, before: Iterable[Action] = ()) -> list[Position]:
    """Return a topological order of all actions, as positions (rank, index), after `before`.

    A receive waits for its send, two TIEs wait for each other, and a cell waits for what both of
    its actions wait for. Raise ValueError if there is no such order (a deadlock); the error names
    what each rank waits for.
    """
    return [(rank, index) for rank, index, _ in in_order(lists, before)]


def in_order(
    lists: Schedule, before: Iterable[Action] = ()
) -> Iterator[tuple[int, int, Sequence[Action]]]:
    """The positions of `order`, one by one, each with the events that it waits for."""
    rank_of = placement(lists)
    places = rank_of if lowered(lists) else None
    at, done, stages = [0] * len(lists), set(before), len(rank_of)
    several = len(tied_stages(rank_of)) == 2

    def needs(rank: int) -> Sequence[Action]:
        action = lists[rank][at[rank]]
        if not action.joined:
            return deps(action, stages, places)
        return [d for a in cell_at(lists[rank], at[rank]) for d in deps(a, stages, places)]

    def head(rank: int) -> Action | None:
        return lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None

    def meets(action: Action) -> Action | None:
        if action.op == TIE and several:
            return action._replace(stage=len(rank_of) - 1 - action.stage)
        return None

    moved = True
    while moved:
        moved = False
        for rank in range(len(lists)):
            while (action := head(rank)) and done.issuperset(events := needs(rank)):
                peer = meets(action)
                if peer is not None and head(rank_of[peer.stage]) != peer:
                    break
                for own in (action, peer) if peer else (action,):
                    place = rank_of[own.stage]
                    yield place, at[place], events
                    at[place] += 1
                    done.update(gives(own))
                moved = True
    stuck = [
        f"rank {rank} at {action} waits for "
        + (" and ".join(str(d) for d in needs(rank) if d not in done) or str(meets(action)))
        for rank in range(len(lists))
        if (action := head(rank))
    ]
    if stuck:
        raise ValueError(f"deadlock: {'; '.join(stuck)}")


def acknowledged(lists: Schedule) -> dict[Action, list[Action]]:
    """For each receive of a lowered schedule, the earlier sends of its rank that it acknowledges.

    A message implies that its sender completed all of its earlier receives. The buffers of the
    corresponding sends can therefore be freed without asking the network. This matters because
    gloo's ``is_completed`` stays false until someone waits. The algorithm is vector clocks over
    `order`: clock[r][q] counts the actions of rank q that rank r knows to have finished. Sends that
    no later message acknowledges are not in the result; they complete at the end of the step.
    """
    rank_of = placement(lists)
    position = {a: i for actions in lists for i, a in enumerate(actions) if a.op in RECEIVES}
    clock = [[0] * len(lists) for _ in lists]
    at_send: dict[Action, list[int]] = {}
    pending: list[list[tuple[Action, int, int]]] = [[] for _ in lists]
    result: dict[Action, list[Action]] = {}
    for rank, index in order(lists, begun_before(lists)):
        action = lists[rank][index]
        if action.op in SENDS:
            at_send[action] = list(clock[rank])
            receive = other_end(action)
            pending[rank].append((action, rank_of[receive.stage], position[receive]))
        elif action.op in RECEIVES:
            clock[rank] = [*map(max, clock[rank], at_send[other_end(action)])]
            result[action] = [send for send, q, at in pending[rank] if clock[rank][q] > at]
            pending[rank] = [entry for entry in pending[rank] if clock[rank][entry[1]] <= entry[2]]
        clock[rank][rank] = index + 1
    return result


def posted_ahead(lists: Schedule) -> dict[Position, list[Action]]:
    """Position -> the receives to post just before it, one ahead of need on each link.

    The first receive of a link is posted before everything else, each later one when the previous
    one is taken, so messages travel while their receivers compute. Use this for gloo, where a
    posted receive is just a waiting buffer.
    """
    rank_of = placement(lists)
    posts: dict[Position, list[Action]] = {}
    for rank, actions in enumerate(lists):
        latest: dict[Link, int] = {}
        for index, action in enumerate(actions):
            if action.op in RECEIVES:
                taken = latest.get(link(action, rank_of), 0)
                posts.setdefault((rank, taken), []).append(action)
                latest[link(action, rank_of)] = index
    return posts


def posted_at_need(lists: Schedule) -> dict[Position, list[Action]]:
    """Position -> the receives to post just before it: each at its own position, or when it must.

    Use this for NCCL, where a posted receive is a running kernel, and so is a send without a
    matching receive. A host that waits for its device waits for both. It does so when it first
    launches a kernel (to load it), when an allocator that is short of memory frees some, and when a
    number is read. If a rank has started an operation that only its own later actions can complete,
    such a wait never ends. Everything that a rank has started must therefore end without its next
    actions. Receives at their own positions fulfill this, unless ranks hold several stages
    (interleaved 1F1B):

    ====  =====================  ==============  ========================================
    rank  has started            is at           where it waits for the other to post
    ====  =====================  ==============  ========================================
    0     2SEND_B0               0F3             1RECV_B0, which comes after 1F2
    1     3SEND_B1               1F2             2RECV_B1, which comes after 0F3
    ====  =====================  ==============  ========================================

    So the lists are walked as if every action that is not a message waited in this way, and a TIE
    also waited for its peer's. When all ranks are stuck, each posts the receives of messages that
    have been sent to it.
    """
    order(lists, begun_before(lists))  # raises if the lists are stuck for another reason
    rank_of = placement(lists)
    last = len(rank_of) - 1
    posts: dict[Position, list[Action]] = {}
    early: set[Action] = set()
    sent: dict[Action, int] = {}  # receive that is not posted yet -> the rank that has sent it
    waiting: dict[Action, int] = {}  # receive that is not sent yet -> the rank that waits
    tied: dict[int, list[int]] = {}  # stage -> the indices of its TIEs that have begun
    at = [0] * len(lists)

    def post(receive: Action) -> None:
        rank = rank_of[receive.stage]
        posts.setdefault((rank, at[rank]), []).append(receive)
        if sent.pop(receive, None) is None:
            waiting[receive] = rank

    def passes(rank: int, action: Action) -> bool:
        if action.op in SENDS:
            receive = other_end(action)
            if waiting.pop(receive, None) is None:
                sent[receive] = rank
        elif action.op in RECEIVES:
            if action not in early:
                post(action)
        elif rank in sent.values() or rank in waiting.values():
            return False
        elif action.op == TIE and len(tied_stages(rank_of)) == 2:
            mine, peer = (tied.setdefault(s, []) for s in (action.stage, last - action.stage))
            if at[rank] not in mine:
                mine.append(at[rank])
            return len(peer) >= len(mine)
        return True

    while True:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions) and passes(rank, actions[at[rank]]):
                at[rank] += 1
                moved = True
        if not moved and not sent:
            return posts
        for receive in list(sent) if not moved else ():
            early.add(receive)
            post(receive)
