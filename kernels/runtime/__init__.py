"""What all ops use: the choice of implementation, operators, dtypes, tiles, deferred weight
gradients.

`dispatch` Triton or torch, refused derivatives · `op` the registrar of operators · `dtypes` the
dtypes that ops compute in, and casts inside kernels · `tiles`, `tile_table` the tables of tiles ·
`fusion` a fused kernel, or torch's product and then our kernels · `wgrad` weight gradients computed
now, deferred, or added to their buffer.
"""
