"""Tables of cos and sin for the rotary embedding, including extended contexts.

    angle[s, i] = position[s] * frequency[i],   frequency[i] = theta^(-2i / R), i < R / 2

Positions are global: a rank's table is the rows of the whole table for its positions. Angles are
computed in float64: at position 10^6 adjacent float32 angles are 0.06 radians apart.

Sources: Su et al. 2021 (arXiv:2104.09864); see `RopeScaling` for the others.
"""

from __future__ import annotations

import torch

from warpweave.kernels.rope_scaling import RopeScaling
from warpweave.kernels.runtime.dtypes import check_integers


def rope_table(
    positions: torch.Tensor,
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos[S, R/2], sin[S, R/2]) for the global `positions`[S] (int64) of the local rows.

    R = `rotary_dim` is the head dim, or the part of it that is rotated. Both tables include YaRN's
    multiplier. Raises ValueError if R is odd or not positive, if positions are not integers of one
    dimension (16-bit floats cannot count past 256 or 2048), or if theta is not greater than 1.

    Examples:
        >>> cos, sin = rope_table(torch.arange(16), 8)
        >>> cos.shape
        torch.Size([16, 4])
    """
    check_integers("positions", positions)
    if rotary_dim % 2 or rotary_dim < 1 or positions.ndim != 1:
        raise ValueError(
            "rotary_dim must be even and at least 2, and positions must be [S], got "
            f"{rotary_dim} and {[*positions.shape]}"
        )
    if not theta > 1:
        raise ValueError(f"theta must be greater than 1, got {theta}")
    wide = {"dtype": torch.float64, "device": positions.device}
    frequencies = theta ** (torch.arange(0, rotary_dim, 2, **wide) / -rotary_dim)
    if scaling is not None:
        frequencies = scaling.scale(frequencies, theta)
    angles = torch.outer(positions.double(), frequencies)
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.multiplier != 1:
        cos, sin = cos * scaling.multiplier, sin * scaling.multiplier
    return cos.to(dtype), sin.to(dtype)
