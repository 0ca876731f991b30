"""Measure tiles of the attention and product kernels on this GPU, and keep the best for it.

``warpweave tune`` takes the shipped tile of each kernel, dtype and head dim (or kind of product)
and those around it, leaves out what spills or does not fit once compiled, checks that the others
compute what the shipped tile does, times them, and writes a table of the best, which ``warpweave
train --tiles`` and `kernels.runtime.tiles.load` take. A tile replaces the shipped one only if it is
at least 1 % faster in a second, longer measurement, and compiles cleanly in every other call that
takes it.

Run it alone on the GPU. Every row is written as soon as it is measured: Ctrl-C loses one at most.
``warpweave tune --dry --target sm_90`` needs no GPU: it lists which tiles compile cleanly, with
their registers, shared memory and occupancy: 2 to 5 minutes with ``--steps 1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from warpweave.cli.command_line import read_command_line
from warpweave.kernels.runtime.tile_table import MAX_HEAD_DIM

if TYPE_CHECKING:
    from warpweave.machine.tune.calls import Problem


@dataclass(frozen=True)
class TuneConfig:
    """What to tune, and for how long."""

    kernels: tuple[Literal["attention_fwd", "attention_dkdv", "attention_dq", "gemm"], ...] = (
        "attention_fwd", "attention_dkdv", "attention_dq", "gemm",
    )  # fmt: skip
    """Kernels to tune; the MLP and the QKV projection take gemm's tiles."""
    dtypes: tuple[Literal["bf16", "fp32", "fp64"], ...] = ("bf16",)
    """Precisions to tune; fp16 takes bf16's tiles."""
    head_dims: tuple[int, ...] = (64, 128, 256)
    """Head dims of attention to tune; a tile is used up to its head dim, from the next smaller one
    of the table."""
    steps: int = 2
    """Search distance from the shipped tile: 1 is about eight tiles a row, 2 about thirty."""
    minutes: float = 20.0
    """Time limit in minutes: no row is begun after that."""
    output: Path = Path("tiles.json")
    """Output table; rows that it has of other devices or kernels stay."""
    dry: bool = False
    """Dry run without a GPU: list the tiles that compile cleanly for `target`, and write
    nothing."""
    target: Literal["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"] = "sm_90"
    """Compilation target of --dry."""

    def problems(self) -> list[Problem]:
        """The rows to tune. Raises ValueError on numbers that cannot be."""
        if wrong := [D for D in self.head_dims if not 1 <= D <= MAX_HEAD_DIM]:
            raise ValueError(f"head dims must be 1..{MAX_HEAD_DIM}, got {wrong}")
        if self.steps not in (1, 2):
            raise ValueError(f"steps must be 1 or 2, got {self.steps}")
        if not 0 < self.minutes <= 24 * 60:
            raise ValueError(f"need 0 < minutes <= {24 * 60}, got {self.minutes}")
        if self.dry and self.output != TuneConfig.output:
            raise ValueError(f"--dry measures nothing and writes no table: drop {self.output}")
        if not self.dry and self.target != TuneConfig.target:
            raise ValueError(f"this GPU is tuned, not {self.target}: that is for --dry")
        from warpweave.machine.tune.calls import problems  # and torch: a command line does without

        if not (found := problems(self.kernels, self.dtypes, self.head_dims)):
            raise ValueError("nothing to tune: --kernels, --dtypes or --head-dims are empty")
        return found


def parse(argv: list[str] | None = None) -> TuneConfig:
    """The options of the command line; a wrong one ends the process with 2."""
    return read_command_line(TuneConfig, "tune", __doc__, argv)
