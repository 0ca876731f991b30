"""Measure tiles of the attention and product kernels on this GPU, and keep the best.

For each kernel, dtype, and head dim (or kind of product), ``warpweave tune`` compiles the shipped
tile and tiles close to it, and drops those that spill or do not fit. It checks that the others
compute the same as the shipped tile, times them, and writes a table of the best, which ``warpweave
train --tiles`` and `kernels.runtime.tiles.load` read. A tile replaces the shipped one only if it is
at least 1 % faster in a second, longer measurement, and compiles cleanly in every other call that
uses it.

Run it alone on the GPU. Every row is written as soon as it is measured, so Ctrl-C loses at most
one. ``warpweave tune --dry --target sm_90`` needs no GPU: it lists the tiles that compile cleanly,
with their registers, shared memory, and occupancy. It takes 2 to 5 minutes with ``--steps 1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from warpweave.cli.command_line import read_command_line
from warpweave.kernels.runtime.tile_table import MAX_HEAD_DIM

if TYPE_CHECKING:
    from warpweave.machine.tune.calls import Problem


@dataclass(frozen=True)
class TuneConfig:
    """Options of ``warpweave tune``."""

    kernels: tuple[
        Literal["attention_fwd", "attention_dkdv", "attention_dq", "attention_bwd", "gemm"], ...
    ] = ("attention_fwd", "attention_dkdv", "attention_dq", "gemm")
    """Kernels to tune; the MLP and the QKV projection use gemm's tiles. attention_bwd computes dk,
    dv, and dq in one kernel. It gets a row, and is then used, only where it is faster than
    attention_dkdv and attention_dq. With such a row, gradients are not bitwise reproducible."""
    dtypes: tuple[Literal["bf16", "fp32", "fp64"], ...] = ("bf16",)
    """Precisions to tune; fp16 uses bf16's tiles."""
    head_dims: tuple[int, ...] = (64, 128, 256)
    """Attention head dims to tune; any other head dim uses the tiles of the next larger one in the
    table."""
    steps: int = 2
    """Size of the search around the shipped tile: 1 tries about eight tiles for each row of the
    table (a kernel, a dtype, and a head dim or kind of product), 2 about thirty."""
    minutes: float = 20.0
    """Time limit in minutes: no row is started after that."""
    output: Path = Path("tiles.json")
    """Output table; existing rows of other devices or kernels are kept."""
    dry: bool = False
    """Dry run without a GPU: list the tiles that compile cleanly for `target`; write nothing."""
    target: Literal["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"] = "sm_90"
    """Compilation target of --dry."""

    def problems(self) -> list[Problem]:
        """The rows to tune. Raises ValueError for invalid options."""
        if wrong := [D for D in self.head_dims if not 1 <= D <= MAX_HEAD_DIM]:
            raise ValueError(f"head dims must be 1..{MAX_HEAD_DIM}, got {wrong}")
        if self.steps not in (1, 2):
            raise ValueError(f"steps must be 1 or 2, got {self.steps}")
        if not 0 < self.minutes <= 24 * 60:
            raise ValueError(f"minutes must be in (0, {24 * 60}], got {self.minutes}")
        if self.dry and self.output != TuneConfig.output:
            raise ValueError(f"--dry does not write a table; leave out --output {self.output}")
        if not self.dry and self.target != TuneConfig.target:
            raise ValueError(
                f"--target {self.target} requires --dry: without it, tune measures this GPU"
            )
        from warpweave.machine.tune.calls import problems  # imports torch, which parsing avoids

        if not (found := problems(self.kernels, self.dtypes, self.head_dims)):
            raise ValueError("nothing to tune: --kernels, --dtypes, or --head-dims is empty")
        return found


parse = partial(read_command_line, TuneConfig, "tune", __doc__)
