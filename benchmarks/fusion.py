"""Compute what each fused product saves, and whether it pays.

    python benchmarks/fusion.py              # no GPU, minutes
    python benchmarks/fusion.py --accept     # writes results/clock/fusion.md

Every fused product is compiled for A100, H100 and B200 in the sizes of Llama 8B at 16,384 tokens,
and read by the clock. It is compared with cuBLAS, by its published figures
(`results/clock/points.json`), followed by passes over the result. Each pass takes a launch, and its
bytes at 0.9 of the stated bandwidth: kernels that only move data reach about that (QuACK's
published 3 TB/s of an H100's 3.35). An epilogue saves those passes minus its own time. The kernel's
loop may be slower than cuBLAS by that much; results/clock/fusion.md lists it for each op. How much
slower it is was measured on an H100 by `kernels_gemm.py`, and is a prediction for the other parts.
The table of `kernels/runtime/fusion.py` comes from there: the exit status is 1 if the two disagree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import harness
import numpy as np
import torch
from clock.kernel import read_kernel
from clock.predict import CLOCK, CONSTANTS, START, Kernel, Work, reading_of, terms
from gate.cases import GATED

from warpweave.kernels.activation import ACTIVATIONS
from warpweave.kernels.devices import TARGETS, Device
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import fused_gemm
from warpweave.kernels.mlp import hidden_bwd
from warpweave.kernels.qkv import qkv_fwd
from warpweave.kernels.runtime.fusion import FUSED
from warpweave.machine.tune.aot import compiling

CLAIM = "Products are fused if that saves time."
RESULTS = harness.ROOT / "benchmarks" / "results" / "clock"
MEASURED = {"sm_90": RESULTS.parent / "nvidia-h100-80gb-hbm3" / "kernels_gemm.json"}
T, E, F = 16384, 4096, 14336  # tokens, width and hidden units
REACHED = 0.9  # of the stated bandwidth, for a kernel that only moves data


class Rates(NamedTuple):
    """The cost of one way: femtoseconds per FLOP, picoseconds per element of [M, N], microseconds
    to start."""

    flop: float
    element: float
    start: float

    def us(self, M: int, N: int, K: int) -> float:
        """Return the PREDICTED microseconds for [M, K] [K, N]."""
        return 2e-9 * M * N * K * self.flop + 1e-6 * M * N * self.element + self.start


class Case(NamedTuple):
    """A fused product of [M, K] [K, N], and, for each pass that does the same after torch's
    product, its bytes per element of [M, N] in 16 bits."""

    call: Callable[..., object]
    sizes: tuple[int, int, int]
    passes: tuple[float, ...]


def m(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor with a shape and a dtype but no values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cases() -> dict[str, Case]:
    """Return the cases by their names in the table; "kept" ones (z or h) are only for the text."""
    x, h, down = m(T, E), m(T, F), m(E, F)
    found = {"bias": _up(None, False)}
    for name, (_, gated) in ACTIVATIONS.items():
        found |= {name: _up(name, True), f"{name}, z not kept": _up(name, False)}
        z, own = (m(T, 2 * F), 10.0) if gated else (h, 6.0)  # dh, z and dz
        for kept, passes in ((False, (own, own - 4)), (True, (own,))):
            slope = partial(hidden_bwd, x, down, z, activation=name, want_hidden=not kept)
            found[f"slope of {name}" + ", h kept" * kept] = Case(slope, (T, F, E), passes)
    drop = {"drop": Drop(0.1, 7, 3, m(T, dtype=torch.int64))}
    after: dict[str, tuple[dict, tuple[float, ...]]] = {
        "dropout": (drop, (4.0,)),
        "residual": ({"residual": x}, (6.0,)),
        "dropout and residual": ({**drop, "residual": x}, (4.0, 6.0)),
    }
    for name, (options, passes) in after.items():
        found[name] = Case(partial(fused_gemm, h, down.t(), **options), (T, E, F), passes)
    table = m(T // 2, 64, dtype=torch.float32)
    # 8 heads with 4 queries, a key and a value: queries are copied, then rotated with the keys;
    # values are copied.
    qkv = partial(qkv_fwd, x.view(2, T // 2, E), m(8, 6, 128, E), None, table, table)
    found["qkv"] = Case(qkv, (T, 48 * 128, E), (4 * 4 / 6, 4 * 5 / 6, 4 * 1 / 6))
    return found


def _up(name: str | None, save_z: bool) -> Case:
    gated = name is not None and ACTIVATIONS[name].gated
    N = 2 * F if gated or name is None else F
    call = partial(fused_gemm, m(T, E), m(N, E).t(), m(N), activation=name, save_z=save_z)
    return Case(call, (T, N, E), () if name is None else (3.0,) if gated else (4.0,))


def fused_rates(kernel: Kernel, tile: tuple[int, int], plain: int, part: Device) -> Rates:
    """Return the rates of a compiled product whose tiles have (rows, columns), by whole waves.

    Published figures say nothing about A100's stalls outside of loops, whose price is part of the
    price of a wave. There, those beyond the `plain` ones of a kernel without an epilogue cost as
    much as the loop's.
    """
    c, cycle = CONSTANTS[part.arch], 1 / CLOCK[part.arch]
    items = kernel.occupancy * part.processors
    elements = items * tile[0] * tile[1]
    flops = 2.0 * 4096 * elements  # per wave, at any depth
    busy, stalls, exposed, outside, wave = terms(kernel, Work(items, flops), part, c.rate)
    loop = busy * c.busy + stalls * c.stalls + exposed * c.exposed
    beyond = 0.0 if c.outside else outside * (1 - plain / kernel.outside) * c.stalls
    rest = outside * c.outside + wave * c.wave + beyond
    return Rates(loop * cycle / flops * 1e15, rest * cycle / elements * 1e12, START * cycle * 1e6)


def measured_rates(fused: Rates, plain: Rates, product: Rates, ratio: float) -> Rates:
    """Return the rates of a product that takes 1 / `ratio` of cuBLAS's time, and of the epilogue
    that is predicted to make the difference between `fused` and a product with a bias, `plain`."""
    epilogue = fused.element - plain.element
    return Rates(product.flop / ratio, product.element / ratio + epilogue, fused.start)


def measured_ratio(target: str) -> float | None:
    """Return cuBLAS's time over that of our product with a bias; None if it was not measured."""
    if target not in MEASURED:
        return None
    rows = json.loads(MEASURED[target].read_text())["rows"]
    return next(r["ratios"]["cuBLAS"]["median"] for r in rows if r["name"] == "gemm + bias")


def unfused_rates(product: Rates, passes: Sequence[float], part: Device) -> Rates:
    """Return the rates of cuBLAS's `product` followed by passes of so many bytes per element."""
    element = sum(passes) / (REACHED * part.memory) * 1e12
    starts = (1 + len(passes)) * product.start
    return Rates(product.flop, product.element + element, starts)


def cublas(target: str) -> Rates:
    """Return the rates of cuBLAS on `target`, from published figures."""
    published = json.loads((RESULTS / "points.json").read_text())["cublas"]
    own = [(p["M"], p["N"], p["K"], p["tflops"]) for p in published if p["part"] == target]
    return fit_product(own, TARGETS[target])


def fit_product(published: Sequence[tuple[int, int, int, float]], part: Device) -> Rates:
    """Return the rates of cuBLAS from published (M, N, K, TFLOP/s): least squares of relative
    errors, with nothing below 0."""
    sizes = np.array([point[:3] for point in published], dtype=float)
    M, N, K = sizes.T
    start = START / CLOCK[part.arch] * 1e6
    us = 2e-6 * M * N * K / np.array([point[3] for point in published])
    columns = np.stack((2e-9 * M * N * K, 1e-6 * M * N), 1) / us[:, None]
    flop, element = np.linalg.lstsq(columns, 1 - start / us, rcond=None)[0]
    if element < 0:
        flop, element = np.linalg.lstsq(columns[:, :1], 1 - start / us, rcond=None)[0][0], 0.0
    return Rates(float(flop), float(element), start)


def read(target: str, product: Rates) -> dict[str, tuple[Rates, Rates]]:
    """Return (fused, unfused) of each case on `target`; `product` has the rates of its cuBLAS."""
    part, ratio, found = TARGETS[target], measured_ratio(target), {}
    stalls, plain = 0, None  # of "bias", which comes first
    for name, case in cases().items():
        with compiling(target) as launches:
            case.call(impl="triton")
        (one,) = (x for x in (read_kernel(launch, target) for launch in launches) if x.product)
        rows, columns = (
            next(one.constants[n] for n in names if n in one.constants)
            for names in (("BLOCK_M", "BLOCK_T"), ("BLOCK_N", "BLOCK_F"))
        )
        stalls = stalls or one.outside
        fused = fused_rates(reading_of(one), (rows, columns), stalls, part)
        plain = plain or fused
        if ratio is not None:
            fused = measured_rates(fused, plain, product, ratio)
        found[name] = fused, unfused_rates(product, case.passes, part)
    return found


def words(target: str, rows: dict[str, tuple[Rates, Rates]], product: Rates) -> str:
    """Return a Markdown table."""
    lines = [
        f"\n## {TARGETS[target].name}\n",
        "| op | M, N, K | epilogue | passes | saves | may | is | fused | unfused | faster |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    plain, _ = rows["bias"]
    for name, ways in rows.items():
        sizes = cases()[name].sizes
        cublas, fused, unfused = (rates.us(*sizes) / 1e3 for rates in (product, *ways))
        epilogue = (ways[0].element - plain.element) * sizes[0] * sizes[1] / 1e9
        passes = max(0.0, unfused - cublas)  # negative values are rounding
        saves = passes - epilogue
        faster = "fused" if fused <= unfused else "unfused"
        lines.append(
            f"| {name} | {', '.join(map(str, sizes))} | {epilogue:.2f} | {passes:.2f} | "
            f"{saves:.2f} | {saves / cublas:.1%} | {(fused - epilogue) / cublas - 1:.1%} | "
            f"{fused:.2f} | {unfused:.2f} | {faster} |"
        )
    return "\n".join(lines) + "\n"


INTRODUCTION = """# What fusions save

`python benchmarks/fusion.py --accept` writes this file, from which the table in
`kernels/runtime/fusion.py` is taken. Milliseconds in bfloat16 for Llama 8B with 16,384 tokens.
MEASURED is, on an H100, how much slower than cuBLAS our product with a bias is
(`nvidia-h100-80gb-hbm3/kernels_gemm.json`). All other figures are PREDICTIONS of the clock.

* epilogue: what the kernel does once a tile beyond one that adds a bias
* passes: the kernels after torch's product: their launches, and their bytes through 0.9 of the
  stated bandwidth
* saves: passes less epilogue. As a share of cuBLAS's time that is what the kernel's loop may be
  slower by than cuBLAS (may); next to it, by how much it is slower (is)
* fused: the kernel. unfused: cuBLAS by its published figures (`points.json`), and the passes

Dispatch does not ask what is kept of z and h: checkpointing must not change what is computed. On
figures kept out of its constants the clock errs on average by 5 % on A100, 6 % on H100 and 12 % on
B200; of ten, nine lay within 12, 14 and 23 % (`calibration.json`). Closer calls are open.
"""


def main(arguments: list[str] | None = None) -> int:
    """Compile, predict, print; compare with the table that dispatch uses."""
    options = argparse.ArgumentParser(description=CLAIM)
    options.add_argument("--accept", action="store_true", help="write fusion.md")
    given = options.parse_args(arguments)
    text, other = INTRODUCTION, []
    for target in GATED:
        product = cublas(target)
        rows = read(target, product)
        text += words(target, rows, product)
        for name, (fused, unfused) in rows.items():
            sizes, listed = cases()[name].sizes, name in FUSED[TARGETS[target].arch]
            if "kept" not in name and listed != (fused.us(*sizes) <= unfused.us(*sizes)):
                other.append(f"{target} {name}")
    print(text)
    if given.accept:
        (RESULTS / "fusion.md").write_text(text)
    print(json.dumps({"script": "fusion", "claim": CLAIM, "ok": not other, "other": other}))
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
