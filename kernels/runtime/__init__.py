"""Under every op: which implementation runs, casts, tiles and deferred weight gradients.

`dispatch` Triton or torch, refused derivatives · `numeric` casts inside kernels · `tiles`,
`tile_table` the tables of tiles · `fusion` one kernel or torch's product and then ours ·
`json_table` any table as a file · `wgrad` weight gradients now, later, or into their buffer.
"""
