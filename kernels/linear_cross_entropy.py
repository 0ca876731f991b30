"""The public path of `linear_cross_entropy`, which stands in the room `cross_entropy`."""

from warpweave.kernels.cross_entropy.linear import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
