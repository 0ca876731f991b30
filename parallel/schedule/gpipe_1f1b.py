"""Synchronous schedules, which end every step with a flush: GPipe (arXiv:1811.06965), 1F1B
(PipeDream-Flush, arXiv:2006.09503) and interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473).

A line per rank, a column per time step; F one and B two steps long; ``.`` idle (`Timeline.draw`):

    GPipe, four ranks and micro-batches
    F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 -  B1 -  B2 -  B3 -
    .  F0 F1 F2 F3 .  .  .  .  .  .  B0 -  B1 -  B2 -  B3 -  .  .
    .  .  F0 F1 F2 F3 .  .  .  B0 -  B1 -  B2 -  B3 -  .  .  .  .
    .  .  .  F0 F1 F2 F3 B0 -  B1 -  B2 -  B3 -  .  .  .  .  .  .

    1F1B, the same
    F0 F1 F2 F3 .  .  .  .  .  .  B0 -  .  B1 -  .  B2 -  .  B3 -
    .  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -  .  .
    .  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -  .  .  .  .
    .  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .  .  .

    interleaved 1F1B, two ranks with two stages each (stage before the op), first part
    0F0 0F1 2F0 2F1 0F2 .   2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -   .   2B2 -   .   2B3 -
    .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 -   3F3 3B3 -   1B2 -
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Action, B, F, Schedule


def gpipe(p: int, m: int) -> Schedule:
    """GPipe: all forwards, then all backwards, of `m` micro-batches in `p` stages on `p` ranks.

    The bubble is (p-1)(F+B) beside the ideal m(F+B); every rank holds the activations of m
    micro-batches.
    """
    _need("GPipe", p, m)
    return [
        [Action(F, s, i) for i in range(m)] + [Action(B, s, i) for i in range(m)] for s in range(p)
    ]


def one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B: min(m, p-1-s) warm-up forwards on stage s, then one forward and one backward in turn.

    The bubble is that of GPipe, but stage s holds the activations of min(m, p-s) micro-batches
    only. Any m >= 1.
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
    """Interleaved 1F1B: p * c stages on p ranks, of which rank r holds r, r + p, ..., r + (c-1) p.

    Micro-batches pass in groups of p: on each rank a whole group passes one of its stages before
    the next. If p does not divide m, groups have p to 2p - 1 micro-batches, as even as possible.
    The bubble is c times smaller than that of 1F1B, for c times the messages and up to
    1 + (p-1)/(p c) times the activations on rank 0.
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
