"""Whether a product and what follows it are one kernel of ours, or torch's product (cuBLAS) and
then our kernels over its result ("apart").

impl="triton" is always one kernel: it needs no memory for the product in between. impl=None on CUDA
tensors goes by this table for 16-bit operands on a GPU that is in it; on every other GPU, and in
float32 and float64, the product is fused. Forward decides by op, dtype and device, not by what is
saved for backward: what is recomputed is what it saw.
"""

from __future__ import annotations

import torch

from warpweave.kernels.runtime.dispatch import capability, choose

# The ops that one kernel does faster, by compute capability: PREDICTED for Llama 8B's sizes with
# 16,384 tokens (benchmarks/fusion.py, results/clock/fusion.md), measured by nobody. All others are
# apart there: a fused epilogue saves a pass over the result, and cuBLAS saves more, whose main loop
# is faster than ours (by about 20 % on A100, 7 % on H100, 64 % on B200).
FUSED: dict[int, tuple[str, ...]] = {
    80: (),  # A100
    90: (  # H100
        "relu2", "slope of relu2", "slope of swiglu", "slope of geglu", "residual",
        "dropout and residual",
    ),
    100: (),  # B200
}  # fmt: skip


def choose_or_auto(impl: str | None, *tensors: torch.Tensor | None) -> str:
    """`choose`, but "auto" where nobody asked for Triton: an operator then asks `fused_or_apart`
    when it runs, which a compiler could not while it traces. Raises what `choose` raises."""
    chosen = choose(impl, *tensors)
    return "auto" if impl is None and chosen == "triton" else chosen


def fused_or_apart(impl: str, op: str, x: torch.Tensor) -> str:
    """What an operator does that was given `impl` by `choose_or_auto`, for an operand x: "triton",
    one kernel; "torch", all of it by torch; "apart", torch's product and then our kernels.

    `op` is an activation, "slope of" one, "dropout", "residual", "dropout and residual", "qkv", or
    "bias" where nothing follows that is worth a kernel.
    """
    if impl != "auto":
        return impl
    fused = FUSED.get(capability(x.device))
    if fused is None or op in fused or x.dtype not in (torch.bfloat16, torch.float16):
        return "triton"
    return "apart"
