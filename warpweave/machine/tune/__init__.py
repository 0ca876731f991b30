"""``warpweave tune``: measure tiles on this GPU and keep the best; without a GPU, compile them.

`options` the command line, without torch · `command` runs it · `search` finds the fastest tile ·
`candidates` tiles to try, and faults of compiled ones · `calls` the calls that compare them ·
`timing` on a CUDA device · `aot` compilation for a GPU that is not present.
"""
