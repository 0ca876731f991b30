"""The public path of `linear_cross_entropy`, defined in `cross_entropy.linear`."""

from warpweave.kernels.cross_entropy.linear import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
