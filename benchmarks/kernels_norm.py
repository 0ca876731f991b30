"""RMSNorm and LayerNorm with a fused residual add, and rotary embedding: memory-bound."""

from __future__ import annotations

from typing import Any

import kernel_harness
import torch
import torch.nn.functional as F
from kernel_harness import OURS, Problem

from warpweave.kernels import cost, reference, rope
from warpweave.kernels.norm import function as norm

CLAIM = "Norms and RoPE move each tensor once, at the speed of a copy; torch.compile is the rival."
SIZES = {"tiny": (6, 40), "check": (512, 4096), "full": (16384, 4096)}
HEADS = {"tiny": (1, 5, 2, 16), "check": (1, 512, 8, 128), "full": (2, 8192, 32, 128)}


def _norm(scale: str, layer: bool, residual: bool) -> list[Problem]:
    rows, E = SIZES[scale]
    dtype = torch.bfloat16

    def inputs(device: torch.device) -> tuple[Any, ...]:
        new = {"device": device, "dtype": dtype}
        x, r, w, dy = (torch.randn(*s, **new) for s in ((rows, E), (rows, E), (E,), (rows, E)))
        return (x, w, *([r] if residual else []), dy)

    def ours(x, w, r=None):
        if layer:
            y = norm.layer_norm(x, w, None, residual=r, impl="triton")
        else:
            y = norm.rms_norm(x, w, residual=r, impl="triton")
        return y if r is None else y[0]

    def truth(x, w, r=None):
        y = (
            reference.layer_norm(x, w, residual=r)
            if layer
            else reference.rms_norm(x, w, residual=r)
        )
        return y if r is None else y[0]

    def eager(x, w, r=None):
        s = x if r is None else x + r
        return F.layer_norm(s, (E,), w) if layer else F.rms_norm(s, (E,), w, 1e-6)

    variants = {OURS: ours, "torch": eager, "torch.compile": kernel_harness.compiled(eager)}
    absent = {}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Liger
    except ImportError:
        absent["Liger"] = "liger-kernel is not installed"
    else:
        if not layer and not residual:
            variants["Liger"] = lambda x, w: Liger.apply(x, w, 1e-6)
    kind = {"layer": layer, "residual": residual}
    return kernel_harness.both(
        f"{'layer' if layer else 'rms'}_norm{' + residual' if residual else ''}",
        f"T={rows} E={E}", dtype,
        (cost.norm(rows, E, **kind), cost.norm(rows, E, backward=True, **kind)),
        inputs, 3 if residual else 2, variants, truth, absent,
    )  # fmt: skip


def _rope(scale: str) -> list[Problem]:
    B, S, H, D = HEADS[scale]

    def inputs(device: torch.device) -> tuple[Any, ...]:
        x, dy = (torch.randn(B, S, H, D, device=device, dtype=torch.bfloat16) for _ in range(2))
        return (x, *rope.rope_table(torch.arange(S, device=device), D), dy)

    return kernel_harness.both(
        "rope", f"B={B} S={S} H={H} D={D}", torch.bfloat16, (cost.rope(B, S, H, D),) * 2, inputs, 1,
        {
            OURS: lambda x, cos, sin: rope.apply_rope(x, cos, sin, impl="triton"),
            "torch": reference.apply_rope,
            "torch.compile": kernel_harness.compiled(reference.apply_rope),
        },
        reference.apply_rope,
    )  # fmt: skip


def problems(scale: str) -> list[Problem]:
    """Return both norms, with and without a residual, and RoPE."""
    norms = [_norm(scale, layer, residual) for layer in (False, True) for residual in (False, True)]
    return [problem for found in (*norms, _rope(scale)) for problem in found]


def main(arguments: list[str] | None = None) -> None:
    """Run `kernel_harness.main`."""
    kernel_harness.main("kernels_norm", CLAIM, problems, arguments)


if __name__ == "__main__":
    main()
