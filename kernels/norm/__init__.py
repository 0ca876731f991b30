"""RMSNorm and LayerNorm of residual + dropout(x + bias): `rms_norm`, `layer_norm` and halves.

`function` the ops · `device` kernels · `options` arguments, checked · `torch_path` on a CPU.
"""

from warpweave.kernels.norm.function import NormGradients, layer_norm, norm_bwd, norm_fwd, rms_norm

__all__ = ["NormGradients", "layer_norm", "norm_bwd", "norm_fwd", "rms_norm"]
