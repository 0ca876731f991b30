"""Matrix products with an epilogue, and the fused MLP, compared with cuBLAS and torch.compile."""

from __future__ import annotations

from typing import Any

import kernel_harness
import torch
import torch.nn.functional as F
from kernel_harness import OURS, Problem

from warpweave.kernels import cost, reference
from warpweave.kernels.cost import Cost
from warpweave.kernels.gemm import fused_gemm
from warpweave.kernels.mlp import gelu_mlp, swiglu_mlp

CLAIM = "Epilogues add nothing to the time of cuBLAS's product, and save the intermediates' memory."
SIZES = {"tiny": (8, 16, 24), "check": (512, 512, 1024), "full": (8192, 4096, 14336)}


def _gelu(x, up, down):
    return F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)


def _swiglu(x, up, down):
    gate, value = F.linear(x, up.flatten(0, 1)).unflatten(-1, (-1, 2)).unbind(-1)
    return F.linear(F.silu(gate) * value, down)


def _mlp_cost(T: int, E: int, hidden: int, gated: bool) -> tuple[Cost, Cost]:
    """Return the cost of the products; each saved intermediate is written once and read once."""
    up = cost.gemm(T, hidden * (2 if gated else 1), E)
    down = cost.gemm(T, E, hidden)
    return up + down, 2 * (up + down)


def problems(scale: str) -> list[Problem]:
    """Return a product with nothing to fuse, one with bias and GELU, and two MLPs."""
    T, E, hidden = SIZES[scale]
    half = torch.bfloat16

    def product(device: torch.device) -> tuple[Any, ...]:
        a, b = (torch.randn(*s, device=device, dtype=half) for s in ((T, E), (E, hidden)))
        return a, b / E**0.5, torch.randn(hidden, device=device, dtype=half)

    def mlp(device: torch.device, gated: bool) -> tuple[Any, ...]:
        wide = (hidden, 2, E) if gated else (hidden, E)
        sizes = ((T, E), wide, (E, hidden), (T, E))
        x, up, down, dy = (torch.randn(*s, device=device, dtype=half) for s in sizes)
        return x, up / E**0.5, down / hidden**0.5, dy

    def eager(a, b, bias):
        return F.gelu(torch.addmm(bias, a, b), approximate="tanh")

    compiled = kernel_harness.only_forward(kernel_harness.compiled(eager))

    shape = f"M={T} N={hidden} K={E}"
    found = [
        Problem(
            "gemm + bias", shape, half, cost.gemm(T, hidden, E), product,
            {
                OURS: lambda a, b, c: (fused_gemm(a, b, c, impl="triton")[0],),
                "cuBLAS": lambda a, b, c: (torch.addmm(c, a, b),),
            },
            lambda a, b, c: (reference.fused_gemm(a, b, c),),
        ),
        Problem(
            "gemm + bias + gelu", shape, half, cost.gemm(T, hidden, E), product,
            {
                OURS: lambda a, b, c: (fused_gemm(a, b, c, activation="gelu", impl="triton")[0],),
                "cuBLAS + torch": lambda a, b, c: (eager(a, b, c),),
                "cuBLAS + torch.compile": compiled,
            },
            lambda a, b, c: (reference.fused_gemm(a, b, c, activation="gelu"),),
        ),
    ]  # fmt: skip
    for name, ours, plain, gated in (
        ("gelu_mlp", gelu_mlp, _gelu, False),
        ("swiglu_mlp", swiglu_mlp, _swiglu, True),
    ):
        found += kernel_harness.both(
            name, f"T={T} E={E} F={hidden}", half, _mlp_cost(T, E, hidden, gated),
            lambda device, gated=gated: mlp(device, gated), 3,
            {
                OURS: lambda x, up, down, ours=ours: ours(x, up, down, impl="triton"),
                "cuBLAS + torch": plain,
                "cuBLAS + torch.compile": kernel_harness.compiled(plain),
            },
            plain,
        )  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run `kernel_harness.main`."""
    kernel_harness.main("kernels_gemm", CLAIM, problems, arguments)


if __name__ == "__main__":
    main()
