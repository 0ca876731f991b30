"""Kernels that the gate must refuse, each for a different reason."""

from __future__ import annotations

from unittest import mock

import torch

from gate.cases import Case, m
from warpweave.kernels.runtime.dispatch import tl, triton


def planted_cases() -> list[Case]:
    """One kernel that spills, one that does not fit, one without the tensor cores that it claims,
    and one that keeps them waiting."""
    f, b = m(1, dtype=torch.float32), m(1)
    return [
        Case("planted spill", lambda: _planted_kernel[(1,)](f, f, 16384, False, num_warps=1)),
        Case("planted tile", lambda: _planted_kernel[(1,)](b, b, 1024, True, num_warps=16)),
        Case(
            "planted claim",
            lambda: _planted_kernel[(1,)](f, f, 128, False, num_warps=4),
            tensor_cores=True,
        ),
        Case("planted order", _planted_order, targets=("sm_90",)),
    ]


@triton.jit
def _planted_kernel(x_ptr, y_ptr, N: tl.constexpr, DOT: tl.constexpr):
    """A kernel that the checks must catch: its row is too long for a warp, or its product's tiles
    are too large."""
    if DOT:
        k, i = tl.arange(0, N), tl.arange(0, 128)
        a = tl.load(x_ptr + i[:, None] * N + k[None, :])
        b = tl.load(y_ptr + i[None, :] + k[:, None] * 128)
        tl.store(x_ptr + i[:, None] * 128 + i[None, :], tl.dot(a, b).to(tl.bfloat16))
    else:
        k = tl.arange(0, N)
        x = tl.load(x_ptr + k)
        tl.store(y_ptr + k, x - tl.sum(x, 0))


def _planted_order() -> None:
    """A tile, loaded by pointers, for which ptxas lets each wgmma wait for the previous one.

    The ptxas of Triton 3.8 and newer no longer does this.
    """
    from warpweave.kernels import mlp
    from warpweave.kernels.runtime.tile_table import GemmTile
    from warpweave.kernels.runtime.tiles import pinned

    x, w, z = m(8192, 4096), m(4096, 14336), m(8192, 2 * 14336)
    pointers = mock.patch.object(
        mlp.hidden, "operands", lambda a, b, tile: (a, b, (*a.stride(), *b.stride()))
    )
    with pointers, pinned({("gemm", 2, "large"): GemmTile(128, 128, 64, 8, 1, 8, 4)}):
        mlp.hidden_bwd(x, w, z, activation="swiglu", want_hidden=True, impl="triton")
