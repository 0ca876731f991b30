"""A planned layout as a file of options for ``warpweave train`` and ``warpweave prove``.

``warpweave plan --out plan.toml`` writes the options of the fastest layout, and ``--config
plan.toml`` reads them. Options on the command line override those of the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpweave.cli.toml import options_of, read_options, write_options
from warpweave.model.config import ParallelPlan
from warpweave.parallel.mesh import Mesh
from warpweave.plan.time import Job

# Options of the mesh and the plan among which the planner does not choose.
_WITHOUT = ("ulysses", "dp_shard", "outer", "early_gradients", "layout", "cp_strategy", "reduce")


@dataclass(frozen=True)
class PlannedLayout:
    """A layout, whose options are those of ``warpweave train``.

    Raises ValueError for a schedule that these ranks cannot run.
    """

    mesh: Mesh = field(default_factory=Mesh)
    plan: ParallelPlan = ParallelPlan()
    batch: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        self.plan.placement(self.mesh.pp)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the layout by name."""
        return {name: v for name, v in options_of(self).items() if name not in _WITHOUT}


def options_of_job(job: Job) -> dict[str, Any]:
    """Return the options that train with a job's layout."""
    return PlannedLayout(job.mesh, job.plan, job.batch).options


def write_layout(path: Path, job: Job) -> None:
    """Write the options of a job's layout as TOML."""
    path.write_text(write_options(PlannedLayout(job.mesh, job.plan, job.batch), _WITHOUT))


def read_layout(path: Path) -> dict[str, Any]:
    """Return the options in a file of `write_layout`; raise ValueError, with the path, if one is
    unknown or invalid."""
    return read_options(path, PlannedLayout(), _WITHOUT).options
