"""Whether a product and what follows it are one kernel of ours, or torch's product and then kernels
that go over its result.

    fused    2 M N K · flop + M N · element + start        the loop; what is done once a tile
    apart    the same, of cuBLAS and of the passes after it

of [M, K] [K, N] in 16 bits: PREDICTED times, nothing was measured. The factors (femtoseconds a
FLOP, picoseconds an element of [M, N], microseconds) are in `fusions.json`, which ``python
benchmarks/fusion.py`` writes from what the clock reads in the compiled kernels.

Where Triton is the default (impl=None on CUDA tensors) the way that is predicted to be faster is
taken; impl="triton" is always the kernel, and needs no memory for the product. Forward decides by
shapes, dtype and device, not by what is kept for backward: what is recomputed is what it saw. The
kernel is taken where nothing is predicted: other capabilities than the table's, other dtypes, less
than a tile for each multiprocessor, epilogues that are not in the table.
"""

from __future__ import annotations

from functools import cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch

from warpweave.kernels.runtime.dispatch import capability, choose
from warpweave.kernels.runtime.json_table import read_rows

FORMAT = "warpweave fusions 1"
TABLE = Path(__file__).with_name("fusions.json")


class Rates(NamedTuple):
    """What one way costs: femtoseconds a FLOP, picoseconds an element, microseconds a call."""

    flop: float
    element: float
    start: float

    def us(self, M: int, N: int, K: int) -> float:
        """PREDICTED microseconds for [M, K] [K, N]."""
        return 2e-9 * M * N * K * self.flop + 1e-6 * M * N * self.element + self.start


class Fusion(NamedTuple):
    """One row: an op on GPUs of a capability (80, 90, 100), for at least `least` elements [M, N].

    `op` is an activation, "slope of" one (with or without h), "dropout", "residual", "dropout and
    residual", "qkv", or "bias" where nothing follows that is worth a kernel.
    """

    capability: int
    op: str
    least: int
    fused: Rates
    apart: Rates

    @property
    def key(self) -> tuple[int, str]:
        """What the table has at most one row for."""
        return self.capability, self.op


def read_table(path: Path) -> dict[tuple[int, str], Fusion]:
    """The rows of a table by `key`; ValueError, which names the file, if it is none."""
    return {row.key: row for row in read_rows(path, "fusion table", FORMAT, _row)}


def _row(fields: Any) -> Fusion:
    if not isinstance(fields, dict) or fields.keys() != {*Fusion._fields}:
        raise ValueError(f"it must have {', '.join(Fusion._fields)}, got {fields!r}")
    capability, op, least = (fields[name] for name in ("capability", "op", "least"))
    if not (type(capability) is type(least) is int and least >= 0 and type(op) is str):
        raise ValueError(
            "capability and least >= 0 must be whole and op a word, got "
            f"{capability!r}, {least!r} and {op!r}"
        )
    for rates in (fields["fused"], fields["apart"]):
        three = isinstance(rates, list) and len(rates) == len(Rates._fields)
        if not three or not all(type(x) is float and 0 <= x < inf for x in rates):
            raise ValueError(f"fused and apart must be three floats >= 0, got {rates!r}")
    return Fusion(**fields | {way: Rates(*fields[way]) for way in ("fused", "apart")})


@cache
def shipped() -> dict[tuple[int, str], Fusion]:
    """The table beside this file."""
    return read_table(TABLE)


class Way(NamedTuple):
    """Whether the kernel is taken, and why in words."""

    fused: bool
    why: str


def choose_way(op: str, M: int, N: int, K: int, *, dtype: torch.dtype, arch: int) -> Way:
    """The way of `op` for [M, K] [K, N] of `dtype` on a GPU of capability `arch`."""
    row = shipped().get((arch, op))
    if row is None or dtype not in (torch.bfloat16, torch.float16):
        return Way(True, f"nothing is predicted for {op} in {dtype} on capability {arch}")
    if row.least > (elements := M * N):
        return Way(True, f"nothing is predicted below {row.least} elements, these are {elements}")
    fused, apart = (rates.us(M, N, K) for rates in (row.fused, row.apart))
    why = f"PREDICTED {fused / 1e3:.3f} ms fused, {apart / 1e3:.3f} ms apart"
    return Way(fused <= apart, why)


def explain(op: str, M: int, N: int, K: int, *, dtype: torch.dtype, arch: int) -> str:
    """The same in a line."""
    way = choose_way(op, M, N, K, dtype=dtype, arch=arch)
    what = "one Triton kernel" if way.fused else "torch's product, then kernels over its result"
    return f"{op} of [{M}, {K}] [{K}, {N}]: {what}; {way.why}"


def ask(impl: str | None, *tensors: torch.Tensor | None) -> str:
    """`choose`, but "auto" where nobody asked for Triton: an operator then finds what is `taken`
    when it runs, by sizes that a trace does not know and must not fix."""
    chosen = choose(impl, *tensors)
    return "auto" if impl is None and chosen == "triton" else chosen


def taken(impl: str, op: str, a: torch.Tensor, N: int) -> str:
    """What an operator does that was given `impl` by `ask`, for a[M, K] [K, N]: "triton", the
    kernel; "torch", all by torch; "apart", torch's product and then our kernels."""
    if impl != "auto":
        return impl
    M, K = a.shape
    found = choose_way(op, M, N, K, dtype=a.dtype, arch=capability(a.device))
    return "triton" if found.fused else "apart"
