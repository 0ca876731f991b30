"""Shared foundation of all ops: implementation choice, operators, dtypes, tiles, weight gradients.

`dispatch` chooses Triton or torch and refuses derivatives · `op` registers operators · `dtypes` has
the compute dtypes of ops and the casts inside kernels · `tiles`, `tile_table` have the tile tables
· `fusion` chooses one fused kernel, or torch's product followed by our kernels · `wgrad` computes
weight gradients now, defers them, or adds them to their buffer.
"""
