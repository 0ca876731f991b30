"""In which order the lists can run: who waits for whom, and what a message tells its receiver."""

from __future__ import annotations

from warpweave.parallel.schedule.actions import (
    AFTER,
    MATCHING,
    RECEIVES,
    SENDS,
    TIE,
    Action,
    Schedule,
    deps,
    gives,
    lowered,
    placement,
    tied_stages,
)


def order(lists: Schedule) -> list[tuple[int, int]]:
    """Positions (rank, index) in an order in which all lists can run to their ends.

    A receive waits for its send, and the two TIEs wait for each other. Raises with what each rank
    waits for when there is no such order.
    """
    rank_of = placement(lists)
    places = rank_of if lowered(lists) else None
    at, done, result = [0] * len(lists), set(), []

    def head(rank: int) -> Action | None:
        return lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None

    def unmet(action: Action) -> list[Action]:
        return [d for d in deps(action, len(rank_of), places) if d not in done]

    def meets(action: Action) -> Action | None:
        if action.op == TIE and len(tied_stages(rank_of)) == 2:
            return action._replace(stage=len(rank_of) - 1 - action.stage)
        return None

    def go(rank: int, action: Action) -> None:
        result.append((rank, at[rank]))
        at[rank] += 1
        done.update(gives(action))

    moved = True
    while moved:
        moved = False
        for rank in range(len(lists)):
            while (action := head(rank)) is not None and not unmet(action):
                peer = meets(action)
                if peer is not None and head(rank_of[peer.stage]) != peer:
                    break
                go(rank, action)
                if peer is not None:
                    go(rank_of[peer.stage], peer)
                moved = True
    stuck = [
        f"rank {rank} at {action} waits for "
        + (" and ".join(map(str, unmet(action))) or str(meets(action)))
        for rank in range(len(lists))
        if (action := head(rank)) is not None
    ]
    if stuck:
        raise ValueError(f"deadlock: {'; '.join(stuck)}")
    return result


def acknowledged(lists: Schedule) -> dict[Action, list[Action]]:
    """For each receive of a lowered schedule, the sends of its rank that arrived by then for sure.

    A message tells what its sender had received before it, so a send buffer can be freed without
    asking the network, which matters because gloo's ``is_completed`` stays false until one waits.
    Vector clocks over `order`: clock[r][q] counts the actions of rank q known on rank r to have
    finished. Sends that no later message answers are missing; they end with the step.
    """
    rank_of = placement(lists)
    position = {a: i for actions in lists for i, a in enumerate(actions) if a.op in RECEIVES}
    clock = [[0] * len(lists) for _ in lists]
    at_send: dict[Action, list[int]] = {}
    pending: list[list[tuple[Action, int, int]]] = [[] for _ in lists]
    result: dict[Action, list[Action]] = {}
    for rank, index in order(lists):
        action = lists[rank][index]
        if action.op in SENDS:
            at_send[action] = list(clock[rank])
            receive = Action(MATCHING[action.op], action.stage + AFTER[action.op], action.mb)
            pending[rank].append((action, rank_of[receive.stage], position[receive]))
        elif action.op in RECEIVES:
            (sent,) = deps(action, len(rank_of), rank_of)
            clock[rank] = [max(pair) for pair in zip(clock[rank], at_send[sent])]
            result[action] = [send for send, q, at in pending[rank] if clock[rank][q] > at]
            pending[rank] = [entry for entry in pending[rank] if clock[rank][entry[1]] <= entry[2]]
        clock[rank][rank] = index + 1
    return result
