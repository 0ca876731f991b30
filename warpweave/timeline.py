"""Timelines of pipeline schedules as pictures (SVG, PNG) and as traces for Chrome's viewer and
Perfetto, of simulated steps (`parallel.simulate`) and of measured ones beside them.

A row is a rank, a bar is an action over its time, and white is idle (the bubble):

    rank 0  | F0 | F1 |....|  B0    |  B1    |
    rank 1  |....| F0 |  B0    | F1 |  B1    |

The standard library draws SVG and writes traces; PNG takes matplotlib.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from warpweave.parallel.schedule.actions import RECEIVES, Action
from warpweave.parallel.simulate import Cell, Timeline

WIDTH, ROW, LEFT, TOP, GAP, LABEL = 726.0, 20, 56, 26, 22, 12.0  # pixels; bars from LABEL on named
SUFFIXES = (".svg", ".png", ".json")
# By op, from the first of a rank's stages to its last; receives are waiting, the rest is `OTHER`.
COLOURS = {
    "F": ("#7fb2e5", "#3f7fbf"),
    "B": ("#8fd19e", "#3f9d5b"),
    "I": ("#8fd1c4", "#3f9d8a"),
    "W": ("#f0c987", "#c98f2f"),
}
WAITING, OTHER = "#eeeeee", "#b8a0d0"
LEGEND = (  # lines
    "blue: forward, green: backward (teal: of the input, amber: of the weights), by micro-batch;",
    "dark: a rank's later stages; violet: sums and updates; white and grey: idle",
)


class Bar(NamedTuple):
    """One action of a rank in time, coloured."""

    rank: int
    cell: Cell
    colour: str


def bars(timeline: Timeline) -> Iterator[Bar]:
    """What is drawn: every action that takes time."""
    for rank, row in enumerate(timeline.cells):
        stages = sorted({cell.action.stage for cell in row})
        for cell in row:
            if cell.end > cell.start:
                at = stages.index(cell.action.stage) / max(1, len(stages) - 1)
                yield Bar(rank, cell, _colour(cell.action.op, at))


def _colour(op: str, at: float) -> str:
    if op not in COLOURS:
        return WAITING if op in RECEIVES else OTHER
    light, dark = (
        [int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS[op]
    )  # a shade between the two for each of many stages
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(light, dark))


def _title(name: str, timeline: Timeline) -> str:
    held, rows = max(timeline.activations), timeline.cells
    work = sum(c.end - c.start for row in rows for c in row if c.action.op not in RECEIVES)
    idle = 1 - work / (timeline.span * len(rows))  # a receive that lasts is waiting
    return f"{name}: idle {idle:.0%}, activations of at most {held:g} micro-batches"


def _edge(timeline: Timeline) -> float:
    """Width of the white line round a bar: none where it would hide a row of many."""
    return 0.5 if max(map(len, timeline.cells)) < 200 else 0


def _name(action: Action) -> str:
    return str(action.mb) if action.mb >= 0 else ""


def svg(panels: Mapping[str, Timeline], *, tooltips: bool = False) -> str:
    """All timelines under one another as one SVG document, on one scale of time.

    Args:
        panels: title -> timeline, all in one unit of time.
        tooltips: every bar says its action and its times when pointed at; larger.
    """
    scale = WIDTH / max(timeline.span for timeline in panels.values())
    colours: dict[str, str] = {}
    elements, top = [], 4
    for name, timeline in panels.items():
        elements.append(
            f'<text x="{LEFT}" y="{top + 15}" class="title">{escape(_title(name, timeline))}</text>'
        )
        top += TOP
        for rank in range(len(timeline.cells)):
            elements.append(f'<text x="8" y="{top + rank * ROW + 14}">rank {rank}</text>')
        begin = min(row[0].start for row in timeline.cells if row)
        for rank, (action, start, end), colour in bars(timeline):
            x, width, y = LEFT + (start - begin) * scale, (end - start) * scale, top + rank * ROW
            shade = colours.setdefault(colour, f"c{len(colours)}")
            tip = f"<title>{action}: {start:g} to {end:g}</title>" if tooltips else ""
            rect = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 2}"'
            elements.append(f'{rect} class="{shade}"' + (f">{tip}</rect>" if tip else "/>"))
            if width >= LABEL and _name(action):
                elements.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 13}" class="n">{action.mb}</text>'
                )
        top += len(timeline.cells) * ROW + GAP
    for line in LEGEND:
        elements.append(f'<text x="{LEFT}" y="{top + 10}">{line}</text>')
        top += 14
    right, bottom, edge = LEFT + WIDTH + 12, top + 6, min(map(_edge, panels.values()))
    style = (
        "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}"
        f"rect{{stroke:#fff;stroke-width:{edge}}}"
        ".n{font-size:9px;text-anchor:middle;fill:#102030}"
    ) + "".join(f".{shade}{{fill:{colour}}}" for colour, shade in colours.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {bottom}" '
            f'width="{right:.0f}" height="{bottom}">',
            f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>',
            *elements,
            "</svg>\n",
        ]
    )


def png(panels: Mapping[str, Timeline], path: Path) -> None:
    """The same picture as a PNG, time on its axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [len(timeline.cells) for timeline in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(10, 0.28 * sum(heights) + len(panels)),
        height_ratios=heights,
    )  # fmt: skip
    for axis, (name, timeline) in zip(axes[:, 0], panels.items()):
        drawn: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for rank, cell, colour in bars(timeline):
            drawn[rank, colour].append((cell.start, cell.end - cell.start))
        for (rank, colour), spans in drawn.items():
            axis.broken_barh(
                spans,
                (rank - 0.45, 0.9),
                facecolors=colour,
                edgecolors="white",
                linewidth=_edge(timeline),
            )
        ranks = range(len(timeline.cells))
        axis.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        axis.set_ylim(len(ranks) - 0.5, -0.5)
        axis.set_title(_title(name, timeline), loc="left", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def trace(panels: Mapping[str, Timeline], second: float = 1.0) -> dict[str, Any]:
    """The timelines as Chrome's trace events, which Perfetto reads as well: a process per title, a
    thread per rank, a complete event ("X") per action, times in microseconds.

    `second` is one second in the timelines' unit of time.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(panels.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for rank in range(len(timeline.cells)):
            named = {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank}
            events.append(named | {"args": {"name": f"rank {rank}"}})
        for rank, (action, start, end), _ in bars(timeline):
            event = {"ph": "X", "name": str(action), "cat": action.op, "pid": pid, "tid": rank}
            event |= {"ts": 1e6 * start / second, "dur": 1e6 * (end - start) / second}
            args = {"stage": action.stage, "micro-batch": action.mb, "version": action.ver}
            events.append(event | {"args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def check_suffix(path: str | Path | None) -> None:
    """ValueError unless `write_timeline` can write such a file; None is no file."""
    if path is not None and Path(path).suffix not in SUFFIXES:
        raise ValueError(f"a timeline is a file in {', '.join(SUFFIXES)}, got {str(path)!r}")


def write_timeline(path: str | Path, panels: Mapping[str, Timeline]) -> None:
    """Write timelines in seconds to a file: a picture (.svg, .png) or a trace (.json)."""
    check_suffix(path)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        png(panels, path)
    elif path.suffix == ".svg":
        path.write_text(svg(panels, tooltips=True))
    else:
        path.write_text(json.dumps(trace(panels)))
