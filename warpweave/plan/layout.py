"""A planned layout as a file of options for ``warpweave train`` and ``warpweave prove``.

``warpweave plan --out plan.toml`` writes the options of the fastest layout, and ``--config
plan.toml`` reads them. Options on the command line override those of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpweave.cli.toml import options_of, read_options, write_options
from warpweave.model.config import ParallelPlan, Recompute
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.words import Overlap
from warpweave.plan.time import Job

_PLAN = ("zero", "schedule", "chunks", "microbatches", "recompute", "sequence_parallel", "overlap")
_MESH = ("dp", "cp", "tp", "pp")


@dataclass(frozen=True)
class PlannedLayout:
    """The options of a layout, as `Mesh`, `ParallelPlan`, and ``warpweave train`` name them.

    Raises ValueError for an invalid value, or a schedule that these ranks cannot run.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    overlap: Overlap = "bulk"
    batch: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        plan = ParallelPlan(**{name: getattr(self, name) for name in _PLAN})
        plan.placement(Mesh(**{name: getattr(self, name) for name in _MESH}).pp)


def options_of_job(job: Job) -> dict[str, Any]:
    """Return the options that train with a job's layout."""
    found = {name: getattr(job.mesh, name) for name in _MESH}
    found |= {name: getattr(job.plan, name) for name in _PLAN}
    return found | {"batch": job.batch}


def write_layout(path: Path, job: Job) -> None:
    """Write the options of a job's layout as TOML."""
    path.write_text(write_options(PlannedLayout(**options_of_job(job))))


def read_layout(path: Path) -> dict[str, Any]:
    """Return the options in a file of `write_layout`; raise ValueError, with the path, if one is
    unknown or invalid."""
    return options_of(read_options(path, PlannedLayout()))
