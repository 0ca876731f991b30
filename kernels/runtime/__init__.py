"""Under every op: which implementation runs, casts, tiles and deferred weight gradients.

`dispatch` Triton or torch, refused derivatives · `op` the registrar of operators · `dtypes` the
dtypes that ops compute in, and casts inside kernels · `tiles`, `tile_table` the tables of tiles ·
`fusion` one kernel or torch's product and then ours · `wgrad` weight gradients now, later, or into
their buffer.
"""
