"""RMSNorm and LayerNorm of residual + dropout(x + bias): `rms_norm`, `layer_norm` and halves.

In 16 bits, a sum and a norm of it move 10 bytes per element. Adding within the kernel saves 2 of
them, and dropout within it saves 4 more.

`function` the ops · `forward`, `backward` the kernels and their launches · `shared` helpers for
both, on the host and inside the kernels · `torch_path` the CPU path.
"""

from warpweave.kernels.norm.backward import NormGradients, norm_bwd
from warpweave.kernels.norm.forward import norm_fwd
from warpweave.kernels.norm.function import layer_norm, rms_norm

__all__ = ["NormGradients", "layer_norm", "norm_bwd", "norm_fwd", "rms_norm"]
