"""Matrix products: `gemm`, `gemm_into`, and `fused_gemm` with an epilogue.

`fused` the ops · `epilogue` their kernel · `mainloop` tiles, and the product of one tile, also used
by the MLP and the QKV projection · `cpu` torch's two CPU libraries · `local` a layer's first and
last product, around which tensor ranks communicate, and the gradient of its weight.
"""

from warpweave.kernels.gemm.fused import fused_gemm, gemm, gemm_into

__all__ = ["fused_gemm", "gemm", "gemm_into"]
