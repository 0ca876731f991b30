"""Draw docs/pictures/pipelines.svg: three pipeline schedules as the simulator runs them.

    python docs/scripts/pipeline_picture.py

The engine runs the same lists of actions, here for four ranks and eight micro-batches. The times
are simulated: a backward takes twice as long as a forward. With two model chunks per rank
(interleaved), a cell has half the work.
"""

from __future__ import annotations

from pathlib import Path

from warpweave.model.config import ParallelPlan
from warpweave.parallel.simulate import simulate
from warpweave.plan.timeline import svg

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "pipelines.svg"
RANKS, MICROBATCHES = 4, 8
SCHEDULES = {
    "GPipe": ParallelPlan(schedule="gpipe", microbatches=MICROBATCHES),
    "1F1B": ParallelPlan(schedule="1f1b", microbatches=MICROBATCHES),
    "interleaved 1F1B, 2 chunks a rank": ParallelPlan(
        schedule="interleaved", chunks=2, microbatches=MICROBATCHES
    ),
}


def picture() -> str:
    """Return the whole picture as SVG."""
    return svg(
        {
            name: simulate(plan.make_schedule(RANKS), {"F": 1 / plan.chunks, "B": 2 / plan.chunks})
            for name, plan in SCHEDULES.items()
        },
        unit="forward passes of a rank",
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture())
    print(PICTURE.name, len(PICTURE.read_text()), "bytes")
