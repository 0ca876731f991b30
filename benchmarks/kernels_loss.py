"""Cross entropy of logits, and of a linear head without ever storing its logits."""

from __future__ import annotations

from typing import Any

import kernel_harness
import torch
import torch.nn.functional as F
from kernel_harness import OURS, Problem

from warpweave.kernels import cost, reference
from warpweave.kernels.cross_entropy import cross_entropy
from warpweave.kernels.linear_cross_entropy import linear_cross_entropy

CLAIM = "Cross entropy reads its logits once each way; with the head fused they are never stored."
SIZES = {"tiny": (5, 97, 16), "check": (256, 4099, 512), "full": (8192, 128256, 4096)}
ABSENT = {
    "F.linear_cross_entropy": "this torch does not have it",
    "Liger fused linear cross entropy": "liger-kernel is not installed",
}


def _mean(losses: torch.Tensor) -> torch.Tensor:
    return losses.mean()


def _plain(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z.float(), labels)


def _head(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _plain(x @ weight.t(), labels)


def _head_baselines() -> dict[str, Any]:
    """Return torch's chunked op if it exists, and Liger's if it is installed."""
    found: dict[str, Any] = {
        "torch": _head,
        "torch.compile": kernel_harness.compiled(_head),
    }
    if hasattr(F, "linear_cross_entropy"):
        found["F.linear_cross_entropy"] = F.linear_cross_entropy
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction as Liger,
        )
    except ImportError:
        return found
    found["Liger fused linear cross entropy"] = lambda x, w, t: Liger.apply(x, w, t)[0]
    return found


def problems(scale: str) -> list[Problem]:
    """Return both ops, forward, and forward with backward."""
    T, V, E = SIZES[scale]
    half = torch.bfloat16

    def logits(device: torch.device) -> tuple[Any, ...]:
        z = torch.randn(T, V, device=device, dtype=half)
        return z, torch.randint(V, (T,), device=device), torch.ones((), device=device)

    def head(device: torch.device) -> tuple[Any, ...]:
        x, w = (torch.randn(n, E, device=device, dtype=half) for n in (T, V))
        return x, w / E**0.5, torch.randint(V, (T,), device=device), torch.ones((), device=device)

    baselines = _head_baselines()
    return [
        *kernel_harness.both(
            "cross_entropy", f"T={T} V={V}", half,
            (cost.cross_entropy(T, V), cost.cross_entropy(T, V, backward=True)), logits, 1,
            {
                OURS: lambda z, t: cross_entropy(z, t, impl="triton"),
                "torch": _plain,
                "torch.compile": kernel_harness.compiled(_plain),
            },
            lambda z, t: _mean(reference.cross_entropy(z, t)),
        ),
        *kernel_harness.both(
            "linear_cross_entropy", f"T={T} V={V} E={E}", half,
            (cost.linear_cross_entropy(T, V, E), cost.linear_cross_entropy(T, V, E, backward=True)),
            head, 2,
            {
                OURS: lambda x, w, t: linear_cross_entropy(x, w, t, impl="triton"),
                **baselines,
            },
            lambda x, w, t: _mean(reference.linear_cross_entropy(x, w, t)),
            {name: why for name, why in ABSENT.items() if name not in baselines},
        ),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run `kernel_harness.main`."""
    kernel_harness.main("kernels_loss", CLAIM, problems, arguments)


if __name__ == "__main__":
    main()
