"""RMSNorm and LayerNorm of residual + dropout(x + bias): `rms_norm`, `layer_norm` and halves.

`function` the ops · `forward`, `backward` kernels with their launches · `device`, `launch` what
those share · `checks` of arguments · `torch_path` on a CPU.
"""

from warpweave.kernels.norm.backward import NormGradients, norm_bwd
from warpweave.kernels.norm.forward import norm_fwd
from warpweave.kernels.norm.function import layer_norm, rms_norm

__all__ = ["NormGradients", "layer_norm", "norm_bwd", "norm_fwd", "rms_norm"]
