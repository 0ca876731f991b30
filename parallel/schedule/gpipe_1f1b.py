"""Schedules that end every step with a flush: all gradients are of the weights they will change.

GPipe (arXiv:1811.06965), 1F1B (PipeDream-Flush, arXiv:2006.09503) and 1F1B interleaved over several
stages per rank (Narayanan et al. 2021, arXiv:2104.04473).
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Action, B, F, Schedule


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards: `p` stages on `p` ranks, `m` micro-batches.

    Idle time over the ideal m(F+B) is (p-1)(F+B); m micro-batches of activations live on every
    rank.
    """
    _need("GPipe", p, m)
    return [
        [Action(F, s, i) for i in range(m)] + [Action(B, s, i) for i in range(m)] for s in range(p)
    ]


def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward, one backward in turn after min(m, p-1-s) warm-up forwards on stage s.

    As idle as GPipe, but stage s holds min(m, p-s) micro-batches of activations. Any m >= 1 will
    do.
    """
    _need("1F1B", p, m)
    lists = []
    for s in range(p):
        warm = min(m, p - 1 - s)
        forwards = [Action(F, s, i) for i in range(m)]
        backwards = [Action(B, s, i) for i in range(m)]
        steady = [a for pair in zip(forwards[warm:], backwards) for a in pair]
        lists.append(forwards[:warm] + steady + backwards[m - warm :])
    return lists


def interleaved(p: int, m: int, c: int) -> Schedule:
    """1F1B over p * c stages, of which rank r holds r, r + p, ..., r + (c-1) p.

    Micro-batches go through in groups of p (p to 2p - 1, as even as can be, where p does not divide
    m): on each rank a group passes one stage after the other. Idle time over the ideal is that of
    1F1B with an F and a B that are c times shorter, for c times the messages and up to
    (1 + (p-1)/(p c)) times the activations of rank 0.
    """
    _need("interleaved 1F1B", p, m)
    if c < 1:
        raise ValueError(f"interleaved 1F1B needs c >= 1 stages per rank, got c={c}")
    rounds = max(1, m // p)
    groups = [range(m * i // rounds, m * (i + 1) // rounds) for i in range(rounds)]
    forwards = [(k, i) for group in groups for k in range(c) for i in group]
    backwards = [(k, i) for group in groups for k in reversed(range(c)) for i in group]
    lists = []
    for r in range(p):
        warm = min(m * c, 2 * (p - 1 - r) + (c - 1) * max(map(len, groups)))
        f = [Action(F, k * p + r, i) for k, i in forwards]
        b = [Action(B, k * p + r, i) for k, i in backwards]
        steady = [a for pair in zip(f[warm:], b) for a in pair]
        lists.append(f[:warm] + steady + b[m * c - warm :])
    return lists


def _need(name: str, p: int, m: int) -> None:
    if p < 1 or m < 1:
        raise ValueError(f"{name} needs p >= 1 stages and m >= 1 micro-batches, got p={p} m={m}")
