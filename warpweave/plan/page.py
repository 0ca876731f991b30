"""What the planner found as one HTML page without any network: `warpweave plan --html plan.html`.

Three parts, from the records that the command prints as JSON and the chosen layout's simulated
timeline; the same JSON stands in the page (``<script id="plan">``):

    the table of layouts    a click on a column's head sorts by it
    memory per rank         stacked by kind, beside the GPU's capacity
    the timeline            SVG; the wheel zooms in time, dragging moves, a double click shows all
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from warpweave.parallel.simulate import Timeline
from warpweave.timeline import svg

COLOURS = ("#4c78a8", "#f2cf5b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
WIDTH, ROW, LEFT, TOP = 640, 20, 64, 24  # pixels of the bars of memory
_GIB = 2**30

_STYLE = """
body{font:14px sans-serif;color:#222;margin:24px;max-width:1100px}h1{font-size:20px}
h2{font-size:16px;margin-top:28px}table{border-collapse:collapse}
td,th{padding:3px 10px;text-align:right;border-bottom:1px solid #ddd}
th{cursor:pointer;user-select:none}tr.chosen{background:#eef5ee}
#timeline svg{width:100%;height:auto;border:1px solid #ddd;cursor:grab}
"""

# Sorts the table; zooms the timeline's time, not its height, within what it shows at first.
_SCRIPT = """
for (const head of document.querySelectorAll("#layouts th")) head.onclick = () => {
  const body = document.querySelector("#layouts tbody"), at = head.cellIndex
  const up = head.dataset.up = head.dataset.up == "1" ? "" : "1"
  const key = row => row.cells[at].dataset.value
  const order = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b))
    : key(a) - key(b)
  body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)))
}
const drawing = document.querySelector("#timeline svg"), all = drawing.viewBox.baseVal
const whole = {x: all.x, y: all.y, width: all.width, height: all.height}
drawing.setAttribute("preserveAspectRatio", "none")
drawing.style.height = Math.min(whole.height, 900) + "px"
const show = (x, width) => {
  width = Math.min(width, whole.width)
  x = Math.max(0, Math.min(x, whole.width - width))
  drawing.setAttribute("viewBox", [x, 0, width, whole.height].join(" "))
}
drawing.onwheel = event => {
  event.preventDefault()
  const box = drawing.viewBox.baseVal, part = event.offsetX / drawing.clientWidth
  const width = box.width * Math.exp(event.deltaY / 500)
  show(box.x + part * (box.width - width), width)
}
drawing.onmousemove = event => {
  const box = drawing.viewBox.baseVal
  if (event.buttons) show(box.x - event.movementX * box.width / drawing.clientWidth, box.width)
}
drawing.ondblclick = () => show(0, whole.width)
"""


def plan_page(
    title: str,
    layouts: Sequence[Mapping[str, Any]],
    memory: Sequence[Mapping[str, float]],
    capacity: float,
    timeline: Timeline,
) -> str:
    """The page as one HTML document.

    Args:
        title: model, GPUs and hardware in words.
        layouts: the layouts found, the chosen one first; records of the same columns.
        memory: of the chosen layout, a rank each: kind -> bytes.
        capacity: bytes of a GPU's memory.
        timeline: of the chosen layout, in seconds.
    """
    plan = {"title": title, "layouts": layouts, "memory": memory, "capacity": capacity}
    data = json.dumps(plan).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            "<p>Predicted by warpweave plan; nothing here is measured.</p>",
            "<h2>Layouts</h2>",
            _layout_table(layouts),
            "<h2>Memory per rank of the first layout</h2>",
            _memory_bars(memory, capacity),
            "<h2>Timeline of the first layout</h2>",
            "<p>The wheel zooms, dragging moves, a double click shows all.</p>",
            f'<div id="timeline">{svg({"simulated": timeline}, tooltips=True)}</div>',
            f'<script type="application/json" id="plan">{data}</script>',
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def _layout_table(layouts: Sequence[Mapping[str, Any]]) -> str:
    """The layouts as a table; `data-value` of a cell is what it is sorted by."""
    names = list(layouts[0])
    rows = []
    for at, layout in enumerate(layouts):
        cells = "".join(
            f'<td data-value="{escape(str(layout[name]))}">{escape(_shown(layout[name]))}</td>'
            for name in names
        )
        rows.append(("<tr>" if at else '<tr class="chosen">') + f"{cells}</tr>")
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    return (
        f'<table id="layouts"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _memory_bars(memory: Sequence[Mapping[str, float]], capacity: float) -> str:
    """Bars of each rank's memory, stacked by kind, and a line at the capacity, as SVG."""
    kinds = list(dict.fromkeys(kind for rank in memory for kind in rank))
    scale = WIDTH / max(capacity, *(sum(rank.values()) for rank in memory))
    bottom = TOP + len(memory) * ROW
    parts = []
    for at, kind in enumerate(kinds):
        start = LEFT + at * 110
        box = f'<rect x="{start}" y="4" width="12" height="12" fill="{_colour_of_kind(at)}"/>'
        parts.append(f'{box}<text x="{start + 16}" y="14">{escape(kind)}</text>')
    for rank, held in enumerate(memory):
        x, y = float(LEFT), TOP + rank * ROW
        parts.append(f'<text x="4" y="{y + 14}">rank {rank}</text>')
        for at, kind in enumerate(kinds):
            width = held.get(kind, 0) * scale
            tip = f"<title>{escape(kind)}: {held.get(kind, 0) / _GIB:.2f} GiB</title>"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 3}" '
                f'fill="{_colour_of_kind(at)}">{tip}</rect>'
            )
            x += width
        total = sum(held.values()) / _GIB
        parts.append(f'<text x="{x + 4:.2f}" y="{y + 14}">{total:.1f} GiB</text>')
    line = LEFT + capacity * scale
    parts.append(
        f'<line x1="{line:.2f}" x2="{line:.2f}" y1="{TOP}" y2="{bottom}" stroke="#c00"/>'
        f'<text x="{line - 110:.2f}" y="{bottom + 14}">capacity {capacity / _GIB:.1f} GiB</text>'
    )
    return (
        f'<svg id="memory" xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 80}" '
        f'height="{bottom + 20}" font-size="11" font-family="sans-serif">{"".join(parts)}</svg>'
    )


def _colour_of_kind(at: int) -> str:
    return COLOURS[at % len(COLOURS)]
