"""Committed figures of hot loops, which may get better, and worse only if that is said.

A table holds, for each kernel of one part, [instructions, stalls] per 1,000 FLOPs of the tensor
cores for each of its hot loops in the order of their addresses, a line a kernel. It is of one
Triton: others compile otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

SLACK = 0.03  # of a figure; what is less is scheduling's noise

Figures = Mapping[str, list[tuple[float, float]]]


def worsened(now: Figures, committed: Figures) -> list[str]:
    """One line for each kernel of `now` that costs more than is committed, or is not committed."""
    return [f"{name}: {why}" for name in now if (why := _worse(now[name], committed.get(name)))]


def _worse(now: list[tuple[float, float]], committed: list[tuple[float, float]] | None) -> str:
    if committed is None:
        return "the clock's table does not have it"
    if len(now) != len(committed):
        return f"{len(now)} hot loops, {len(committed)} are committed"
    for number, (new, old) in enumerate(zip(now, committed, strict=True), 1):
        for what, value, limit in zip(("instructions", "stalls"), new, old, strict=True):
            if value > limit * (1 + SLACK):
                return (
                    f"hot loop {number} of {len(now)} has {value:.3f} {what} per 1,000 FLOPs, "
                    f"{value / limit - 1:+.1%} on the {limit:.3f} that are committed"
                )
    return ""


def read_table(path: Path, triton: str) -> Figures | None:
    """The committed figures; None if they are of another Triton than `triton`, or there are none
    yet. ValueError, which names the file, for what is no such table."""
    if not path.exists():
        return None
    try:
        table = json.loads(path.read_text())
        if table["triton"] != triton:
            return None
        return {name: [(i, s) for i, s in loops] for name, loops in table["kernels"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of the clock: {error!r}") from error


def write_table(path: Path, triton: str, figures: Figures) -> None:
    """Write them, a line a kernel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(loops)}" for name, loops in sorted(figures.items())]
    kernels = "{\n" + ",\n".join(lines) + "\n}"
    path.write_text(f'{{"triton": {json.dumps(triton)},\n"kernels": {kernels}}}\n')
