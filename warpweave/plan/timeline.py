"""Timelines of pipeline schedules as pictures (SVG, PNG) and as traces for Chrome's viewer and
Perfetto, both of simulated steps (`parallel.simulate`) and of measured ones.

A row is a rank, a bar is an action over its time, and a gap is idle time (the bubble). The axis
shows the unit of time, a legend the kinds of action:

    rank 0  | F0 | F1 |....|  B0    |  B1    |
    rank 1  |....| F0 |  B0    | F1 |  B1    |

SVG and traces need only the standard library; PNG requires matplotlib.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from warpweave.parallel.schedule.actions import RECEIVES, Action
from warpweave.parallel.simulate import Cell, Timeline

WIDTH, ROW, LEFT, TOP, GAP, LABEL = 726.0, 20, 56, 26, 22, 12.0  # pixels; wider bars get labels
SUFFIXES = (".svg", ".png", ".json")
# Colors by op, from a rank's first stage to its last; receives are waiting, the rest is `OTHER`.
COLOURS = {
    "F": ("#7fb2e5", "#3f7fbf"),
    "B": ("#8fd19e", "#3f9d5b"),
    "I": ("#8fd1c4", "#3f9d8a"),
    "W": ("#f0c987", "#c98f2f"),
}
WAITING, OTHER = "#eeeeee", "#b8a0d0"
NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_DARKER = "; darker: a rank's later stages"
_LETTER = 6.2  # average width of a letter in pixels


class Bar(NamedTuple):
    """One action of a rank in time, with its color."""

    rank: int
    cell: Cell
    colour: str


def bars(timeline: Timeline) -> Iterator[Bar]:
    """Yield the bars to draw: every action that takes time."""
    for rank, row in enumerate(timeline.cells):
        stages = sorted({cell.action.stage for cell in row})
        for cell in row:
            if cell.end > cell.start:
                at = stages.index(cell.action.stage) / max(1, len(stages) - 1)
                yield Bar(rank, cell, _colour(cell.action.op, at))


def _colour(op: str, at: float) -> str:
    if op not in COLOURS:
        return WAITING if op in RECEIVES else OTHER
    # With many stages, each gets a shade between the two.
    light, dark = (bytes.fromhex(colour[1:]) for colour in COLOURS[op])
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(light, dark))


def _title(name: str, timeline: Timeline) -> str:
    held, rows = max(timeline.activations), timeline.cells
    work = sum(c.end - c.start for row in rows for c in row if c.action.op not in RECEIVES)
    idle = 1 - work / (timeline.span * len(rows))  # a receive that takes time is waiting
    return f"{name}: idle {idle:.0%}, activations of at most {held:g} micro-batches"


def kinds(panels: Mapping[str, Timeline]) -> dict[str, str]:
    """Return the legend: the kinds of action that are drawn -> their color."""
    ops = {cell.action.op for timeline in panels.values() for _, cell, _ in bars(timeline)}
    found = {NAMES[op]: shades[0] for op, shades in COLOURS.items() if op in ops}
    rest = ops - set(COLOURS)
    found |= {"sends, sums and updates": OTHER} if rest - set(RECEIVES) else {}
    return found | ({"waiting to receive": WAITING} if rest & set(RECEIVES) else {})


def _note(panels: Mapping[str, Timeline]) -> str:
    """Return the line below the legend."""
    rows = [row for timeline in panels.values() for row in timeline.cells]
    several = any(len({cell.action.stage for cell in row}) > 1 for row in rows)
    return "gaps: idle" + _DARKER * several


def in_units(span: float, unit: str) -> tuple[float, str]:
    """Return the display unit that suits `span`: how many of it make one `unit`, and its name.

    Less than a second is shown in ms or µs.
    """
    if unit == "s" and span < 1:
        return (1e3, "ms") if span >= 1e-3 else (1e6, "µs")
    return 1.0, unit


def ticks(span: float) -> list[float]:
    """Return 5 to 12 round numbers from 0 to `span`."""
    rough = span / 10
    step = 10.0 ** math.floor(math.log10(rough))
    step *= next(n for n in (1, 2, 5, 10) if n * step >= rough)
    return [step * n for n in range(int(span / step + 1e-9) + 1)]


def _edge(timeline: Timeline) -> float:
    """Return the width of the white line around a bar: 0 if a row has many bars."""
    return 0.5 if max(map(len, timeline.cells)) < 200 else 0


def _name(action: Action) -> str:
    return str(action.mb) if action.mb >= 0 else ""


def svg(panels: Mapping[str, Timeline], *, tooltips: bool = False, unit: str = "s") -> str:
    """Draw all timelines below each other as one SVG document, with a shared time axis and a
    legend.

    `panels` are title -> timeline, all in the same `unit` of time. `tooltips` show each bar's
    action and times on hover; they make the file larger.
    """
    span = max(timeline.span for timeline in panels.values())
    scale, (many, shown) = WIDTH / span, in_units(span, unit)
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
            number, end_of_rect, places = "", "/>", 1
            if tooltips:
                tip = f"<title>{action}: {start * many:g} to {end * many:g} {shown}</title>"
                number, end_of_rect = f' data-n="{_name(action)}"', f">{tip}</rect>"
                places = 3  # pages can be zoomed
            rect = f'<rect x="{x:.{places}f}" y="{y}" width="{width:.{places}f}"'
            elements.append(f'{rect} height="{ROW - 2}"{number} class="{shade}"{end_of_rect}')
            if width >= LABEL and _name(action):
                elements.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 13}" class="n">{action.mb}</text>'
                )
        top += len(timeline.cells) * ROW + GAP
    elements += _time_axis(top - GAP + 2, span * many, scale / many, shown)
    elements += _legend(panels, top + 24, colours)
    top += 52
    right, bottom, edge = LEFT + WIDTH + 24, top + 6, min(map(_edge, panels.values()))
    style = (
        "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}"
        ".axis path{stroke:#333;fill:none}.axis .tick{text-anchor:middle}"
        f"rect{{stroke:#fff;stroke-width:{edge}}}"
        ".n{font-size:9px;text-anchor:middle;fill:#102030}"
    ) + "".join(f".{shade}{{fill:{colour}}}" for colour, shade in colours.items())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {bottom}" '
        f'width="{right:.0f}" height="{bottom}" data-left="{LEFT}" data-width="{WIDTH:g}" '
        f'data-span="{span * many:g}" data-label="{LABEL:g}">\n'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([head, *elements, "</svg>\n"])


def _time_axis(top: float, span: float, scale: float, unit: str) -> list[str]:
    """Draw the time axis below the last row: `span` units of `scale` pixels."""
    marks = [(LEFT + at * scale, f"{at:g}") for at in ticks(span)]
    return [
        f'<g class="axis" data-y="{top:g}"><path d="M{LEFT} {top:g}H{LEFT + WIDTH:g}"/>',
        *(f'<path d="M{x:.1f} {top:g}v4"/>' for x, _ in marks),
        *(f'<text x="{x:.1f}" y="{top + 15:g}" class="tick">{word}</text>' for x, word in marks),
        "</g>",
        f'<text x="{LEFT + WIDTH / 2:g}" y="{top + 29:g}">time in {escape(unit)}</text>',
    ]


def _legend(panels: Mapping[str, Timeline], top: float, colours: dict[str, str]) -> list[str]:
    """Draw a square and a name for each color, and a line for the rest."""
    found, x = [], float(LEFT)
    for name, colour in kinds(panels).items():
        shade = colours.setdefault(colour, f"c{len(colours)}")
        found.append(f'<path d="M{x:.0f} {top + 1:g}h11v11h-11z" class="{shade}"/>')
        found.append(f'<text x="{x + 15:.0f}" y="{top + 10:g}">{name}</text>')
        x += 30 + _LETTER * len(name)
    note = f"numbers: micro-batches; {_note(panels)}"
    return [*found, f'<text x="{LEFT}" y="{top + 26:g}">{note}</text>']


def png(panels: Mapping[str, Timeline], path: Path) -> None:
    """Draw the same picture as a PNG, of timelines in seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    many, shown = in_units(max(timeline.span for timeline in panels.values()), "s")
    heights = [len(timeline.cells) for timeline in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False,
        figsize=(10, 0.28 * sum(heights) + len(panels) + 1.0), height_ratios=heights,
    )  # fmt: skip
    for axis, (name, timeline) in zip(axes[:, 0], panels.items()):
        drawn: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for rank, cell, colour in bars(timeline):
            drawn[rank, colour].append((cell.start * many, (cell.end - cell.start) * many))
        for (rank, colour), spans in drawn.items():
            how = {"facecolors": colour, "edgecolors": "white", "linewidth": _edge(timeline)}
            axis.broken_barh(spans, (rank - 0.45, 0.9), **how)
        ranks = range(len(timeline.cells))
        axis.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        axis.set_ylim(len(ranks) - 0.5, -0.5)
        axis.set_title(_title(name, timeline), loc="left", fontsize=10)
    axes[-1, 0].set_xlabel(f"time in {shown}")
    squares = [Patch(facecolor=colour, label=name) for name, colour in kinds(panels).items()]
    figure.legend(handles=squares, loc="lower left", ncols=6, fontsize=8, frameon=False,
                  title=_note(panels), title_fontsize=8, alignment="left")  # fmt: skip
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def trace(panels: Mapping[str, Timeline], second: float = 1.0) -> dict[str, Any]:
    """Return the timelines as Chrome trace events, which Perfetto also reads.

    Each title is a process, each rank a thread, and each action a complete event ("X"), with times
    in microseconds. `second` is one second in the timelines' unit of time.
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
    """Raise ValueError unless `write_timeline` can write such a file; None is always valid."""
    if path is not None and Path(path).suffix not in SUFFIXES:
        raise ValueError(
            f"a timeline's name must end in {' or '.join(SUFFIXES)}, got {str(path)!r}"
        )


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
