"""Choice between one fused kernel for a product and its epilogue, and separate kernels.

"Unfused" means torch's product (cuBLAS) and then our kernels on its result. impl="triton" always
fuses, which needs no memory for the product in between. impl=None on CUDA tensors follows this
table for 16-bit operands on the GPUs listed in it. On other GPUs, and in float32 and float64, it
fuses. The forward decides by op, dtype and device only, not by what is saved for backward, so a
recomputed result equals the first one.
"""

from __future__ import annotations

import torch

from warpweave.kernels.runtime.dispatch import capability, choose

# The ops that are faster fused, by compute capability, in the sizes of Llama 8B with 16,384 tokens
# (benchmarks/fusion.py, docs/performance.md). All other ops are unfused on these GPUs: a fused
# epilogue saves passes over the result, but cuBLAS has a faster main loop, which saves more. How
# much faster is measured on H100 and predicted on the others. What passes cost is predicted on all.
FUSED: dict[int, tuple[str, ...]] = {
    80: (),  # A100
    90: ("slope of relu2", "slope of swiglu", "slope of geglu"),  # H100
    100: (),  # B200
}


def choose_or_auto(impl: str | None, *tensors: torch.Tensor | None) -> str:
    """Return the result of `choose`, but "auto" where impl=None chooses Triton.

    For "auto", an operator calls `fused_or_unfused` when it runs, which a compiler could not do
    while it traces. Raises the same errors as `choose`.
    """
    chosen = choose(impl, *tensors)
    return "auto" if impl is None and chosen == "triton" else chosen


def fused_or_unfused(impl: str, op: str, x: torch.Tensor) -> str:
    """Return how an operator with `impl` from `choose_or_auto` runs for an operand x.

    "triton" is one fused kernel, "torch" uses torch throughout, and "unfused" is torch's product
    followed by our kernels. `op` is an activation, "slope of" one, "dropout", "residual", "dropout
    and residual", "qkv", or "bias" if only a bias follows.
    """
    if impl != "auto":
        return impl
    fused = FUSED.get(capability(x.device))
    if fused is None or op in fused or x.dtype not in (torch.bfloat16, torch.float16):
        return "triton"
    return "unfused"
