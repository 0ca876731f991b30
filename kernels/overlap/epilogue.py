"""How overlapped products are cut, and what follows them, the same as in `gemm.fused_gemm`: bias,
activation, dropout, residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpweave.kernels.activation import find_activation
from warpweave.kernels.dropout import Drop, check_drop, launch_arguments
from warpweave.kernels.gemm.epilogue import find_precision
from warpweave.kernels.gemm.mainloop import tile_count
from warpweave.kernels.runtime.dispatch import processors
from warpweave.kernels.runtime.tile_table import GemmTile
from warpweave.kernels.runtime.tiles import find


def shared_tile(a: torch.Tensor, b: torch.Tensor) -> GemmTile:
    """The tile for a[M, K] b[K, N]: the same on every rank, by sizes alone.

    Parts are tiles, so ranks must agree on them; `mainloop.find_tile` also looks at where the
    operands of this rank lie in memory.
    """
    tile = find("gemm", a.device, a.element_size(), "large")
    odd = a.shape[1] % 16 or b.shape[1] % 16  # not to be loaded 16 bytes at a time
    if odd or tile_count(tile, a.shape[0], b.shape[1]) < processors(a.device):
        tile = find("gemm", a.device, a.element_size(), "small")
    return tile


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

    def check(self, shape: tuple[int, int]) -> None:
        """Raise ValueError unless it can follow [M, N] = `shape` products."""
        gated = self.activation is not None and find_activation(self.activation).gated
        if gated and shape[1] % 2:
            raise ValueError(f"{self.activation} needs b[K, 2F] of gate, up pairs, got {shape[1]}")
        if self.save_z and self.activation is None:
            raise ValueError("save_z=True saves the argument of an activation: activation is None")
        width = shape[1] // 2 if gated else shape[1]
        if self.residual is not None and self.residual.shape != (shape[0], width):
            raise ValueError(
                f"residual must be {[shape[0], width]} as the result, got {[*self.residual.shape]}"
            )
        check_drop(self.drop, torch.Size(shape[:1]))
        find_precision(self.precision)

    def outputs(self, a: torch.Tensor, N: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Empty y[M, N or N / 2] and z[M, N] or None for the rows of a[M, K]."""
        gated = self.activation is not None and find_activation(self.activation).gated
        dtype = a.dtype if self.out_dtype is None else self.out_dtype
        z = a.new_empty(a.shape[0], N) if self.save_z else None
        return a.new_empty(a.shape[0], N // 2 if gated else N, dtype=dtype), z

    def pointers(self, z: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """bias, z, tokens and residual as the kernels take them."""
        bias = None if self.bias is None else self.bias.contiguous()
        return bias, z, launch_arguments(self._key())[0], self.residual

    def key(self) -> tuple[int, int]:
        """The dropout's seed and site."""
        _, seed, site, _ = launch_arguments(self._key())
        return seed, site

    def _key(self) -> Drop | None:
        """The dropout, unless it drops nothing."""
        return None if self.drop is None else check_drop(self.drop, self.drop.tokens.shape)

    def strides(self) -> tuple[int, ...]:
        """Of the residual."""
        return (0, 0) if self.residual is None else self.residual.stride()

    def constants(self) -> tuple[str | None, bool, int, float]:
        """ACT, GATED, THRESHOLD and SCALE."""
        name, gated = (None, False) if self.activation is None else find_activation(self.activation)
        return name, gated, *launch_arguments(self._key())[3]

    def multiplies(self) -> str:
        """How float32 is multiplied."""
        return find_precision(self.precision)
