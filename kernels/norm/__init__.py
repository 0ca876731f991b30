"""RMSNorm and LayerNorm of residual + dropout(x + bias): `rms_norm`, `layer_norm` and halves.

The sum in the kernel saves 2 of the 10 bytes an element that it and a norm of it move in 16 bits,
dropout in it 4 more.

`function` the ops · `forward`, `backward` kernels with their launches · `shared` what those share,
on the host and inside the kernels · `torch_path` on a CPU.
"""

from warpweave.kernels.norm.backward import NormGradients, norm_bwd
from warpweave.kernels.norm.forward import norm_fwd
from warpweave.kernels.norm.function import layer_norm, rms_norm

__all__ = ["NormGradients", "layer_norm", "norm_bwd", "norm_fwd", "rms_norm"]
