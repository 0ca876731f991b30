"""Whether a product and its epilogue are one fused kernel of ours, or torch's product (cuBLAS) and
then our kernels on its result ("unfused").

impl="triton" always fuses: no memory for the product in between. impl=None on CUDA tensors follows
this table for 16-bit operands on a GPU that is in it; on other GPUs, and in float32 and float64, it
fuses. Forward decides by op, dtype and device only, not by what is saved for backward, so that what
is recomputed equals what was computed.
"""

from __future__ import annotations

import torch

from warpweave.kernels.runtime.dispatch import capability, choose

# The ops that are faster fused, by compute capability: PREDICTED for Llama 8B's sizes with 16,384
# tokens (benchmarks/fusion.py, docs/performance.md), not measured. All others are unfused there: a
# fused epilogue saves a pass over the result, but cuBLAS, whose main loop is faster, saves more.
FUSED: dict[int, tuple[str, ...]] = {
    80: (),  # A100
    90: (  # H100
        "relu2", "slope of relu2", "slope of swiglu", "slope of geglu", "residual",
        "dropout and residual",
    ),
    100: (),  # B200
}  # fmt: skip


def choose_or_auto(impl: str | None, *tensors: torch.Tensor | None) -> str:
    """`choose`, but "auto" for Triton by default (impl=None): an operator then calls
    `fused_or_unfused` when it runs, which a compiler could not while it traces. Errors as
    `choose`."""
    chosen = choose(impl, *tensors)
    return "auto" if impl is None and chosen == "triton" else chosen


def fused_or_unfused(impl: str, op: str, x: torch.Tensor) -> str:
    """How an operator with `impl` from `choose_or_auto` runs for an operand x: "triton", one fused
    kernel; "torch", all of it by torch; "unfused", torch's product and then our kernels.

    `op` is an activation, "slope of" one, "dropout", "residual", "dropout and residual", "qkv", or
    "bias" if nothing but a bias follows.
    """
    if impl != "auto":
        return impl
    fused = FUSED.get(capability(x.device))
    if fused is None or op in fused or x.dtype not in (torch.bfloat16, torch.float16):
        return "triton"
    return "unfused"
