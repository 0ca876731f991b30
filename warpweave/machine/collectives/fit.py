"""Fit of the α-β-γ model's constants to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from warpweave.parallel.algorithms.network import Network, traffic
from warpweave.parallel.algorithms.rounds import Algorithm

_UNITS = (Network(1.0, 0.0), Network(0.0, 1.0), Network(0.0, 0.0, 1.0))


def terms(algorithm: Algorithm, ranks: int, n: int) -> list[float]:
    """The factors of α, β, and γ in the seconds of a collective over fp32 x[n]."""
    return [traffic(algorithm, ranks, n, unit).seconds for unit in _UNITS]


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> Network:
    """The network with nonnegative constants that predicts the measured `seconds` of collectives
    with these `terms` in `rows` with the smallest sum of squared relative errors."""
    weighted = np.array(rows) / np.array(seconds)[:, None]  # predicted / measured, unit networks
    best, least = np.zeros(3), np.inf
    for count in (1, 2, 3):  # the best of all unconstrained fits without negative constants
        for chosen in combinations(range(3), count):
            found, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(rows)), rcond=None)
            error = float(((weighted[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    return Network(*best.tolist())
