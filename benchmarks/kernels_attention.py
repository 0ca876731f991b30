"""Attention forward and backward, compared with torch's SDPA (flash and cuDNN backends)."""

from __future__ import annotations

from typing import Any

import kernel_harness
import torch
import torch.nn.functional as F
from kernel_harness import OURS, Problem
from torch.nn.attention import SDPBackend, sdpa_kernel

from warpweave.kernels import cost, reference
from warpweave.kernels.attention import attention

CLAIM = "Attention in Triton is as fast as SDPA's flash backend (FlashAttention-2)."
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def _shapes(scale: str) -> list[tuple[int, int, int, int, int, bool]]:
    """Return B, S, H, Hkv, D, causal: 16k tokens each, as in published figures of the field."""
    if scale == "tiny":
        short = [(1, 37, 2, 2, 64, True), (1, 37, 2, 1, 128, True), (1, 37, 2, 2, 128, False)]
        return [*short, (1, 37, 2, 1, 128, True), (1, 29, 1, 1, 256, True)]
    if scale == "check":
        short = [(1, 1024, 8, 8, 64, True), (1, 1024, 8, 2, 128, True)]
        return [*short, (1, 1024, 8, 8, 128, False), (1, 1000, 8, 2, 128, True),
                (1, 1024, 4, 4, 256, True)]  # fmt: skip
    return [
        (2, 8192, 32, 32, 64, True),
        (2, 8192, 16, 4, 128, True),
        (2, 8192, 16, 16, 128, False),
        (8, 2048, 16, 4, 128, True),
        (2, 8192, 8, 8, 256, True),
    ]


def _sdpa(backend: SDPBackend, causal: bool) -> Any:
    def run(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return o.transpose(1, 2)

    return run


def problems(scale: str) -> list[Problem]:
    """Return forward, and forward with backward, for every shape."""
    found = []
    for B, S, H, kv, D, causal in _shapes(scale):

        def inputs(device: torch.device, B=B, S=S, H=H, kv=kv, D=D) -> tuple[Any, ...]:
            heads = (H, kv, kv, H)
            return tuple(
                torch.randn(B, S, h, D, device=device, dtype=torch.bfloat16) for h in heads
            )

        sizes = {"kv_heads": kv, "causal": causal}
        found += kernel_harness.both(
            f"attention D={D} {'causal' if causal else 'full'}", f"B={B} S={S} H={H}/{kv}",
            torch.bfloat16,
            (cost.attention(B, S, S, H, D, **sizes),
             cost.attention(B, S, S, H, D, backward=True, **sizes)),
            inputs, 3,
            {
                OURS: lambda q, k, v, c=causal: attention(q, k, v, causal=c, impl="triton"),
                **{name: _sdpa(backend, causal) for name, backend in BACKENDS.items()},
            },
            lambda q, k, v, c=causal: reference.attention(q, k, v, causal=c)[0],
        )  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run `kernel_harness.main`."""
    kernel_harness.main("kernels_attention", CLAIM, problems, arguments)


if __name__ == "__main__":
    main()
