"""Draw the pictures of pipeline schedules, and fill the table of docs/schedules.md.

    python docs/scripts/schedules.py

A picture follows each ``<!-- draw NAME ranks micro-batches chunks op=time ... -->`` of the page,
the table ``<!-- table ranks micro-batches op=time ... -->``. The simulator makes both, from the
lists that the engine runs. The home page has a picture of three schedules.
"""

from __future__ import annotations

import re
from pathlib import Path

from warpweave.parallel.schedule import FAMILIES
from warpweave.parallel.simulate import Timeline, simulate
from warpweave.plan.timeline import svg

DOCS = Path(__file__).resolve().parents[1]
PAGE, PICTURES = DOCS / "schedules.md", DOCS / "pictures"
HOME = {  # a backward takes twice as long as a forward; with two chunks, a cell has half the work
    "GPipe": ("gpipe", 1, ["F=1", "B=2"]),
    "1F1B": ("1f1b", 1, ["F=1", "B=2"]),
    "interleaved 1F1B, 2 chunks a rank": ("interleaved", 2, ["F=0.5", "B=1"]),
}
# A picture in a page follows the scheme of the page, light or dark.
DARK = (
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.axis path{stroke:#ddd}"
    "rect{stroke:#1e2129}rect:not([class]){fill:#1e2129}}</style>"
)


def timeline(name: str, p: int, m: int, chunks: int, costs: list[str]) -> Timeline:
    """Simulate a schedule whose actions take the times `costs` (op=time)."""
    cost = {op: float(time) for op, _, time in (word.partition("=") for word in costs)}
    return simulate(FAMILIES[name].make(p, m, chunks), cost)


def picture(panels: dict[str, Timeline], of: str) -> str:
    """Return timelines, in forward passes `of` a stage or rank, as one SVG for light and dark."""
    return svg(panels, unit=f"forward passes of a {of}").replace("</style>", DARK)


def pictures(page: str) -> dict[str, str]:
    """Return the file names of all pictures -> their contents."""
    home = {title: timeline(name, 4, 8, n, costs) for title, (name, n, costs) in HOME.items()}
    found = {"pipelines.svg": picture(home, "rank")}
    for words in re.findall("<!-- draw (.*) -->", page):
        name, p, m, chunks, *costs = words.split()
        shown = timeline(name, int(p), int(m), int(chunks), costs)
        found[f"{name}.svg"] = picture({name: shown}, "stage")
    return found


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
    """Return the page with links to its pictures and a new table."""

    def made(found: re.Match[str]) -> str:
        kind, *words = found[1].split()
        link = f"![Timeline of {words[0]}](pictures/{words[0]}.svg)"
        return f"<!-- {found[1]} -->\n{link if kind == 'draw' else table(*words)}\n"

    block = r"!\[[^\n]*\n|(?:\|[^\n]*\n)+|"
    return re.sub(rf"<!-- ((?:draw|table) [^>]*) -->\n(?:{block})", made, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    for name, text in pictures(PAGE.read_text()).items():
        (PICTURES / name).write_text(text)
        print(name, len(text), "bytes")
