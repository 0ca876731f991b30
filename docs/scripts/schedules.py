"""Redraw the schedules in docs/schedules.md, and fill its table.

    python docs/scripts/schedules.py

A drawing follows each ``<!-- draw NAME ranks micro-batches chunks op=time ... -->``. The table
follows ``<!-- table ranks micro-batches op=time ... -->``. The simulator makes both, from the lists
that the engine runs.
"""

from __future__ import annotations

import re
from pathlib import Path

from warpweave.parallel.schedule import FAMILIES
from warpweave.parallel.simulate import Timeline, simulate

PAGE = Path(__file__).resolve().parents[1] / "schedules.md"
_COLUMNS = 112  # characters per line


def timeline(name: str, p: int, m: int, chunks: int, costs: list[str]) -> Timeline:
    """Simulate a schedule whose actions take the times `costs` (op=time)."""
    cost = {op: float(time) for op, _, time in (word.partition("=") for word in costs)}
    return simulate(FAMILIES[name].make(p, m, chunks), cost)


def drawing(name: str, p: str, m: str, chunks: str, *costs: str) -> str:
    """Return a code block with the schedule, cut off if its lines are too long."""
    lines = timeline(name, int(p), int(m), int(chunks), list(costs)).draw().splitlines()
    return "\n".join(["```text", *(line[:_COLUMNS].rstrip() for line in lines), "```"])


def table(p: str, m: str, *costs: str) -> str:
    """Tabulate idle time and peak activations of the synchronous schedules, least idle first."""
    rows = []
    for name, family in FAMILIES.items():
        if family.asynchronous or family.least(int(p)) > int(m):
            continue
        several = (2,) if name in ("interleaved", "looped-bfs") else (1, 2)  # 1 is 1f1b, gpipe
        for chunks in several if family.chunks is None else (family.chunks,):
            each = [f"{op}={float(time) / chunks}" for op, time in (c.split("=") for c in costs)]
            line = timeline(name, int(p), int(m), chunks, each)
            over = line.span / max(line.busy) - 1
            widest = max(line.width) / max(line.busy) - 1
            rows.append((over, widest, f"`{name}`", chunks, max(line.activations)))
    head = "| schedule | chunks | over the work, whole | over the work, widest rank | activations |"
    body = [
        f"| {name} | {chunks} | {over:.1%} | {widest:.1%} | {held:g} |"
        for over, widest, name, chunks, held in sorted(rows)
    ]
    return "\n".join([head, "|---|---|---|---|---|", *body])


def filled(page: str) -> str:
    """Return the page with new drawings and a new table."""

    def made(found: re.Match[str]) -> str:
        kind, *words = found[1].split()
        return f"<!-- {found[1]} -->\n{(drawing if kind == 'draw' else table)(*words)}\n"

    block = r"```text\n.*?```\n|(?:\|[^\n]*\n)+|"
    return re.sub(rf"<!-- ((?:draw|table) [^>]*) -->\n(?:{block})", made, page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    print(PAGE.name, len(PAGE.read_text().splitlines()), "lines")
