"""PREDICTED rates of the two ways to multiply and go on: see `kernels.runtime.fusion`.

The fused kernel's are those of its main loop and of what stands outside of it, by `predict` for
whole waves of tiles. Apart, cuBLAS's come from published figures (`fit_product`), and each pass
over its result takes its bytes through 0.9 of the stated bandwidth, and a launch: kernels that
only move reach about that (QuACK's published 3 TB/s of an H100's 3.35).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warpweave.kernels.runtime.fusion import Rates
from warpweave.tune.clock.predict import CLOCK, CONSTANTS, START, Kernel, Work, terms
from warpweave.tune.parts import Part

REACHED = 0.9  # of the stated bandwidth, by a kernel that only moves


def fused_rates(kernel: Kernel, tile: tuple[int, int], plain: int, part: Part) -> Rates:
    """Of a compiled product whose tiles have (rows, columns).

    Published figures tell nothing of A100's stalls outside of loops, whose price is in that of a
    wave: there those beyond the `plain` ones of a kernel without epilogue cost what the loop's do.
    """
    c, cycle = CONSTANTS[part.arch], 1 / CLOCK[part.arch]
    items = max(1, kernel.occupancy) * part.processors
    elements = items * tile[0] * tile[1]
    flops = 2.0 * 4096 * elements  # of a wave, at any depth
    busy, stalls, exposed, outside, wave = terms(kernel, Work(items, flops), part, c.rate)
    loop = busy * c.busy + stalls * c.stalls + exposed * c.exposed
    beyond = 0.0 if c.outside else outside * (1 - plain / kernel.outside) * c.stalls
    rest = outside * c.outside + wave * c.wave + beyond
    return Rates(loop * cycle / flops * 1e15, rest * cycle / elements * 1e12, START * cycle * 1e6)


def apart_rates(product: Rates, passes: Sequence[float], part: Part) -> Rates:
    """Of cuBLAS's `product` and passes that move so many bytes for each element of its result."""
    element = sum(passes) / (REACHED * part.bandwidth) * 1e12
    starts = (1 + len(passes)) * product.start
    return Rates(product.flop, product.element + element, starts)


def fit_product(published: Sequence[tuple[int, int, int, float]], part: Part) -> Rates:
    """Of cuBLAS, by published (M, N, K, TFLOP/s): least squares of relative errors, nothing less
    than 0."""
    sizes = np.array([point[:3] for point in published], dtype=float)
    M, N, K = sizes.T
    start = START / CLOCK[part.arch] * 1e6
    us = 2e-6 * M * N * K / np.array([point[3] for point in published])
    columns = np.stack((2e-9 * M * N * K, 1e-6 * M * N), 1) / us[:, None]
    flop, element = np.linalg.lstsq(columns, 1 - start / us, rcond=None)[0]
    if element < 0:
        flop, element = np.linalg.lstsq(columns[:, :1], 1 - start / us, rcond=None)[0][0], 0.0
    return Rates(float(flop), float(element), start)
