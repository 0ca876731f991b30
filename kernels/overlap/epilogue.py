"""How overlapped products are cut, and what follows them, the same as in `gemm.fused_gemm`: bias,
activation, dropout, residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from warpweave.kernels.activation import find_activation
from warpweave.kernels.dropout import Drop, launch_arguments
from warpweave.kernels.gemm.fused import check_epilogue
from warpweave.kernels.gemm.mainloop import tile_count
from warpweave.kernels.runtime.dispatch import processors
from warpweave.kernels.runtime.tile_table import GemmTile
from warpweave.kernels.runtime.tiles import find


def shared_tile(a: torch.Tensor, rows: int, b: torch.Tensor, kind: str = "large") -> GemmTile:
    """The tile for so many rows [rows, K] like a's, times b[K, N]: the same on every rank, by sizes
    alone; that of `kind` where they are many: "large", "heavy", or "wide" for what leaves in a
    wider dtype than it is multiplied in.

    Parts are tiles, so ranks must agree on them; `mainloop.find_tile` also looks at where the
    operands of this rank lie in memory.
    """
    tile = find("gemm", a.device, a.element_size(), kind)
    odd = a.shape[1] % 16 or b.shape[1] % 16  # not to be loaded 16 bytes at a time
    if odd or tile_count(tile, rows, b.shape[1]) < processors(a.device):
        tile = find("gemm", a.device, a.element_size(), "small")
    return tile


class Arguments(NamedTuple):
    """bias, z, tokens and residual; seed and site; the residual's strides; ACT, GATED, THRESHOLD
    and SCALE."""

    tensors: tuple[torch.Tensor | None, ...]
    key: tuple[int, int]
    strides: tuple[int, ...]
    constants: tuple[str | None, bool, int, float]


@dataclass(frozen=True)
class Epilogue:
    """residual + dropout(act(product + bias)), each optional; `save_z` saves the argument of act.

    Its tensors are those of the rows that are stored: residual [M, N], drop.tokens [M].
    """

    bias: torch.Tensor | None = None
    activation: str | None = None
    save_z: bool = False
    drop: Drop | None = None
    residual: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    precision: str | None = None

    def checked(self, shape: tuple[int, int]) -> Epilogue:
        """This, without a dropout that drops nothing; ValueError unless it can follow [M, N] =
        `shape` products."""
        given = self.activation, self.save_z, self.residual, self.drop, self.precision
        return replace(self, drop=check_epilogue(shape, *given))

    def of_rows(self, rows: slice) -> Epilogue:
        """What follows these rows of the products alone."""
        drop, residual = self.drop, self.residual
        return replace(
            self,
            drop=drop and drop._replace(tokens=drop.tokens[rows]),
            residual=None if residual is None else residual[rows],
        )

    def outputs(self, a: torch.Tensor, M: int, N: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Empty y[M, N or N / 2] and z[M, N] or None of a product with rows like a's."""
        gated = self.activation is not None and find_activation(self.activation).gated
        dtype = a.dtype if self.out_dtype is None else self.out_dtype
        z = a.new_empty(M, N) if self.save_z else None
        return a.new_empty(M, N // 2 if gated else N, dtype=dtype), z

    def arguments(self, z: torch.Tensor | None) -> Arguments:
        """As the kernels take it."""
        name, gated = (None, False) if self.activation is None else find_activation(self.activation)
        tokens, seed, site, dropping = launch_arguments(self.drop)
        bias = None if self.bias is None else self.bias.contiguous()
        strides = (0, 0) if self.residual is None else self.residual.stride()
        tensors = bias, z, tokens, self.residual
        return Arguments(tensors, (seed, site), strides, (name, gated, *dropping))
