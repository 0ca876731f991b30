"""Measurements of this machine: kernels and links (`doctor`), collectives, tiles (`tune`)."""
