"""Draw docs/pictures/pipelines.svg: three pipeline schedules as the simulator runs them.

python docs/scripts/pipeline_picture.py

The lists of actions are those that the engine runs, four ranks and eight micro-batches; the times
are the simulator's, a backward takes twice as long as a forward. Two model chunks a rank
(interleaved) halve the work of a cell.
"""

from __future__ import annotations

from pathlib import Path

from warpweave.config import ParallelPlan
from warpweave.parallel.simulate import Timeline, simulate

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "pipelines.svg"
RANKS, MICROBATCHES = 4, 8
SCHEDULES = {
    "GPipe": ParallelPlan(schedule="gpipe", microbatches=MICROBATCHES),
    "1F1B": ParallelPlan(schedule="1f1b", microbatches=MICROBATCHES),
    "interleaved 1F1B, 2 chunks a rank": ParallelPlan(
        schedule="interleaved", chunks=2, microbatches=MICROBATCHES
    ),
}
UNIT, ROW, LEFT, TOP, GAP = 22.0, 20, 56, 26, 30  # pixels: a forward, a rank, margins, between
COLOURS = {("F", 0): "#7fb2e5", ("F", 1): "#3f7fbf", ("B", 0): "#8fd19e", ("B", 1): "#3f9d5b"}


def draw(name: str, timeline: Timeline, top: float) -> list[str]:
    """The SVG elements of one schedule, whose title stands at the height `top`."""
    work = sum(cell.end - cell.start for cell in timeline.cells[0])
    scale = UNIT * 3 * MICROBATCHES / work  # a rank has the same work in every schedule
    held = max(timeline.activations)
    title = f"{name}: idle {timeline.bubble:.0%}, activations of at most {held:g} micro-batches"
    found = [f'<text x="{LEFT}" y="{top + 15:g}" class="title">{title}</text>']
    for rank, row in enumerate(timeline.cells):
        y = top + TOP + rank * ROW
        found.append(f'<text x="8" y="{y + 14:g}">rank {rank}</text>')
        for action, start, end in row:
            x, width = LEFT + start * scale, (end - start) * scale
            colour = COLOURS[action.op, action.stage // RANKS]
            found.append(
                f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{ROW - 2}" '
                f'fill="{colour}"/><text x="{x + width / 2:.1f}" y="{y + 13:g}" '
                f'class="cell">{action.mb}</text>'
            )
    return found


def picture() -> str:
    """The whole picture."""
    elements, top, right = [], 4.0, 0.0
    for name, plan in SCHEDULES.items():
        chunks = plan.chunks
        cost = {"F": 1 / chunks, "B": 2 / chunks}
        timeline = simulate(plan.make_schedule(RANKS), cost)
        elements += draw(name, timeline, top)
        right = max(right, LEFT + timeline.span * UNIT)
        top += TOP + RANKS * ROW + GAP - 8
    legend = (
        "blue: forward, green: backward, by micro-batch; dark: a rank's second chunk; "
        "white: idle (the bubble)"
    )
    elements.append(f'<text x="{LEFT}" y="{top + 10:g}">{legend}</text>')
    width, height = right + 12, top + 20
    style = (
        "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}"
        ".cell{font-size:9px;text-anchor:middle;fill:#102030}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}">',
            f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>',
            *elements,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture())
    print(PICTURE.name, len(PICTURE.read_text()), "bytes")
