"""The planner's result as one offline HTML page: `warpweave plan --html plan.html`.

It shows the record that the command prints as JSON and the chosen layout's simulated timeline. The
page also contains that JSON (``<script id="plan">``):

    the table of layouts    click a column header to sort by it
    memory per rank         stacked by kind, next to the GPU's capacity
    the timeline            SVG; the wheel zooms in time, dragging moves, a double click shows all
    traffic                 bytes that a rank sends in a step, by axis and link
    refused layouts         their number, by reason
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

from warpweave.parallel.simulate import Timeline
from warpweave.plan.timeline import svg, ticks

COLOURS = ("#4c78a8", "#f2cf5b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
WIDTH, ROW, LEFT, TOP = 640, 20, 64, 24  # pixels of the memory bars
_GIB = 2**30

_STYLE = """
body{font:14px sans-serif;color:#222;margin:24px;max-width:1100px}h1{font-size:20px}
h2{font-size:16px;margin-top:28px}table{border-collapse:collapse}
td,th{padding:3px 10px;text-align:right;border-bottom:1px solid #ddd}
th{cursor:pointer;user-select:none}tr.chosen{background:#eef5ee}
td.words,th.words{text-align:left}
#timeline{overflow-x:auto}#timeline svg{border:1px solid #ddd;cursor:grab}
#memory text.halo{paint-order:stroke;stroke:#fff;stroke-width:3px}
"""

# Column heads and value formats. Other columns use their option's name.
_HEADS = {"seconds": "seconds per step", "mfu": "MFU", "tokens_per_second": "tokens/s of all GPUs",
          "bubble": "pipeline idle", "GiB": "GiB of the fullest rank", "zero": "ZeRO"}  # fmt: skip
_PERCENT, _COUNTS = ("mfu", "bubble"), ("tokens_per_second",)
_KINDS = {"gpu": "GPU's own"}  # of memory

# Sort the table, and zoom the timeline in time. Zooming lays out bars and the axis again, so that
# text is not stretched.
_SCRIPT = """
for (const head of document.querySelectorAll("#layouts th")) head.onclick = () => {
  const body = document.querySelector("#layouts tbody"), at = head.cellIndex
  const up = head.dataset.up = head.dataset.up == "1" ? "" : "1"
  const key = row => row.cells[at].dataset.value
  const order = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b))
    : key(a) - key(b)
  body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)))
}
const drawing = document.querySelector("#timeline svg"), data = drawing.dataset
const left = +data.left, width = +data.width, span = +data.span
const axis = drawing.querySelector(".axis"), y = +axis.dataset.y
const bars = [...drawing.querySelectorAll("rect[class]")].map(rect => {
  const start = (rect.getAttribute("x") - left) / width, long = rect.getAttribute("width") / width
  const label = document.createElementNS(drawing.namespaceURI, "text")
  label.setAttribute("class", "n")
  label.setAttribute("y", +rect.getAttribute("y") + 13)
  label.textContent = rect.dataset.n
  return {rect, start, long, label}
})
for (const text of drawing.querySelectorAll("text.n")) text.remove()
for (const bar of bars) drawing.append(bar.label)
let from = 0, part = 1
const show = (start, long) => {
  part = Math.max(1e-3, Math.min(long, 1))
  from = Math.max(0, Math.min(start, 1 - part))
  for (const {rect, start, long, label} of bars) {
    const begin = Math.max(0, Math.min(1, (start - from) / part))
    const end = Math.min(1, (start + long - from) / part)
    const pixels = Math.max(0, end - begin) * width
    rect.setAttribute("x", left + begin * width)
    rect.setAttribute("width", pixels)
    label.setAttribute("x", left + (begin + end) / 2 * width)
    label.style.display = pixels < +data.label ? "none" : ""
  }
  const rough = span * part / 10, power = 10 ** Math.floor(Math.log10(rough))
  const step = [1, 2, 5, 10].find(n => n * power >= rough * (1 - 1e-9)) * power
  let drawn = `<path d="M${left} ${y}H${left + width}"/>`
  const last = span * (from + part) / step + 1e-9
  for (let n = Math.ceil(span * from / step - 1e-9); n <= last; n++) {
    const x = left + (n * step / span - from) / part * width
    drawn += `<path d="M${x} ${y}v4"/><text x="${x}" y="${y + 15}" class="tick">`
    drawn += `${+(n * step).toPrecision(6)}</text>`
  }
  axis.innerHTML = drawn
}
const at = event => Math.max(0, Math.min(1, (event.clientX - drawing.getBoundingClientRect().left
  - left) / width))
drawing.onwheel = event => {
  event.preventDefault()
  const long = Math.min(1, part * Math.exp(event.deltaY / 500))
  show(from + at(event) * (part - long), long)
}
drawing.onmousemove = event => {
  if (event.buttons) show(from - event.movementX / width * part, part)
}
drawing.ondblclick = () => show(0, 1)
show(0, 1)
"""


def plan_page(
    record: Mapping[str, Any],
    words: Sequence[str],
    layouts: Sequence[Mapping[str, Any]],
    memory: Sequence[Mapping[str, float]],
    capacity: float,
    timeline: Timeline,
) -> str:
    """Return the page as one HTML document.

    Args:
        record: the JSON that the command prints.
        words: the title, a line about the plan, and a line about the search.
        layouts: the layouts found, the chosen one first; records with the same columns.
        memory: of the chosen layout, for each rank: kind -> bytes.
        capacity: bytes of a GPU's memory.
        timeline: of the chosen layout, in seconds.
    """
    title, about, searched = words
    plan = {"title": title, "layouts": layouts, "memory": memory, "capacity": capacity}
    data = json.dumps(plan | {"record": record}).replace("<", "\\u003c")
    refused = sorted(((n, why) for why, n in record["refused"].items()), reverse=True)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(about)}</p>",
            "<h2>Layouts</h2>",
            "<p>The fastest layout of each family. A family's layouts shard over the same axes. "
            "Click a column header to sort by it.</p>",
            _layout_table(layouts),
            "<h2>Memory per rank of the first layout</h2>",
            _memory_bars(memory, capacity),
            "<h2>Timeline of the first layout</h2>",
            "<p>Scroll to zoom, drag to move, double-click to show everything.</p>",
            f'<div id="timeline">{svg({"simulated": timeline}, tooltips=True)}</div>',
            "<h2>Traffic of the first layout</h2>",
            _traffic_table(record["layouts"][0]["traffic"]),
            "<h2>Refused layouts</h2>",
            f"<p>{escape(searched)}</p>",
            _plain_table("refused", ("layouts", "reason"), refused),
            f'<script type="application/json" id="plan">{data}</script>',
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def _layout_table(layouts: Sequence[Mapping[str, Any]]) -> str:
    """Return the layouts as a table; the cells' `data-value` is the sort key."""
    rows = ""
    for at, layout in enumerate(layouts):
        rows += "<tr>" if at else '<tr class="chosen">'
        for name, value in layout.items():
            rows += f'<td data-value="{escape(str(value))}">{escape(_shown(name, value))}</td>'
        rows += "</tr>"
    head = "".join(f"<th>{escape(_HEADS.get(n, n.replace('_', ' ')))}</th>" for n in layouts[0])
    return f'<table id="layouts"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _shown(name: str, value: Any) -> str:
    if name in _PERCENT:
        return f"{value:.1%}"
    if name in _COUNTS:
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _traffic_table(traffic: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the bytes that a rank sends in a step, or a sentence if it sends none."""
    if not traffic:
        return "<p>A single rank sends nothing.</p>"
    rows = [(axis, of["link"], f"{of['bytes'] / 1e9:.2f}") for axis, of in traffic.items()]
    return _plain_table("traffic", ("axis", "link", "GB sent per rank and step"), rows)


def _plain_table(name: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table; columns whose first cell is not a number are left-aligned."""

    def cell(tag: str, at: int, value: Any) -> str:
        words = rows and not str(rows[0][at]).replace(".", "").isdigit()
        return f"<{tag}{' class=words' if words else ''}>{escape(str(value))}</{tag}>"

    lines = [("th", heads), *(("td", row) for row in rows)]
    drawn = [f"<tr>{''.join(cell(tag, *of) for of in enumerate(row))}</tr>" for tag, row in lines]
    return f'<table id="{name}">{"".join(drawn)}</table>'


def _memory_bars(memory: Sequence[Mapping[str, float]], capacity: float) -> str:
    """Draw each rank's memory as SVG bars, stacked by kind, and a line at the capacity."""
    names = dict.fromkeys(kind for rank in memory for kind in rank)
    kinds = [
        (kind, escape(_KINDS.get(kind, kind)), colour)
        for kind, colour in zip(names, cycle(COLOURS))
    ]
    scale = WIDTH / max(capacity, *(sum(rank.values()) for rank in memory))
    bottom = TOP + len(memory) * ROW
    parts = []
    for at, (_, name, colour) in enumerate(kinds):
        start = LEFT + at * 110
        box = f'<rect x="{start}" y="4" width="12" height="12" fill="{colour}"/>'
        parts.append(f'{box}<text x="{start + 16}" y="14">{name}</text>')
    for rank, held in enumerate(memory):
        x, y = float(LEFT), TOP + rank * ROW
        parts.append(f'<text x="4" y="{y + 14}">rank {rank}</text>')
        for kind, name, colour in kinds:
            width = held.get(kind, 0) * scale
            tip = f"<title>{name}: {held.get(kind, 0) / _GIB:.2f} GiB</title>"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 3}" '
                f'fill="{colour}">{tip}</rect>'
            )
            x += width
        total = sum(held.values()) / _GIB
        parts.append(f'<text x="{x + 4:.2f}" y="{y + 14}" class="halo">{total:.1f} GiB</text>')
    line = LEFT + capacity * scale
    limit = f'<line x1="{line:.2f}" x2="{line:.2f}" y1="{TOP}" y2="{bottom}" stroke="#c00"/>'
    parts.insert(0, limit)
    parts.append(f'<path d="M{LEFT} {bottom}H{LEFT + WIDTH}" stroke="#333"/>')
    for gib in ticks(WIDTH / scale / _GIB):
        x = LEFT + gib * _GIB * scale
        parts.append(
            f'<path d="M{x:.2f} {bottom}v4" stroke="#333"/>'
            f'<text x="{x:.2f}" y="{bottom + 15}" text-anchor="middle">{gib:g}</text>'
        )
    middle = LEFT + WIDTH / 2
    parts.append(f'<text x="{middle:g}" y="{bottom + 29}" text-anchor="middle">GiB</text>')
    parts.append(
        f'<text x="{line:.2f}" y="{bottom + 29}" text-anchor="end" fill="#c00">capacity '
        f"{capacity / _GIB:.1f} GiB</text>"
    )
    return (
        f'<svg id="memory" xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 80}" '
        f'height="{bottom + 36}" font-size="11" font-family="sans-serif">{"".join(parts)}</svg>'
    )
