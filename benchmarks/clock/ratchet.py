"""Committed figures of hot loops, which may improve but not get worse unnoticed.

A table has one line per kernel of one part. For each hot loop, in the order of their addresses, it
holds [instructions, stalls] per 1,000 FLOPs of the tensor cores. It applies to one version of
Triton, because others compile differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

SLACK = 0.03  # of a figure; smaller changes are noise of the scheduling

Figures = Mapping[str, list[tuple[float, float]]]


def worsened(now: Figures, committed: Figures) -> list[str]:
    """One line for each kernel of `now` that costs more than committed, or is not committed."""
    return [f"{name}: {why}" for name in now if (why := _worse(now[name], committed.get(name)))]


def _worse(now: list[tuple[float, float]], committed: list[tuple[float, float]] | None) -> str:
    if committed is None:
        return "not in the clock's table"
    if len(now) != len(committed):
        return f"{len(now)} hot loops, expected {len(committed)} as committed"
    for number, (new, old) in enumerate(zip(now, committed, strict=True), 1):
        for what, value, limit in zip(("instructions", "stalls"), new, old, strict=True):
            if value > limit * (1 + SLACK):
                return (
                    f"hot loop {number} of {len(now)} has {value:.3f} {what} per 1,000 FLOPs, "
                    f"{value / limit - 1:+.1%} compared with the committed {limit:.3f}"
                )
    return ""


def read_table(path: Path, triton: str) -> Figures | None:
    """The committed figures; None if there are none yet, or none for this version of Triton.

    Raises ValueError, which names the file, if it is not such a table.
    """
    if not path.exists():
        return None
    try:
        table = json.loads(path.read_text())
        if table["triton"] != triton:
            return None
        return {name: [(i, s) for i, s in loops] for name, loops in table["kernels"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a table of the clock: {error!r}") from error


def write_table(path: Path, triton: str, figures: Figures) -> None:
    """Write the figures, one line per kernel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(loops)}" for name, loops in sorted(figures.items())]
    kernels = "{\n" + ",\n".join(lines) + "\n}"
    path.write_text(f'{{"triton": {json.dumps(triton)},\n"kernels": {kernels}}}\n')
