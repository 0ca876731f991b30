"""warpweave: Triton kernel-fused parallel transformer layers."""

__version__ = "0.1.0"
