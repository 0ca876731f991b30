"""Collective algorithms as data, using only the standard library.

An algorithm is a sequence of rounds of messages. It can be run on tensors (``run_collective``),
counted and priced.

`rounds` the data types and duality · `rooted` broadcast, reduce, scatter, gather · `ring` ·
`doubling` recursive doubling, halving-doubling · `trees` binary and double binary tree ·
`hierarchical` within nodes, then across · `direct` naive, parallel, ordered, all-to-all ·
`all_reduce` by name · `network` bytes and seconds on a network.
"""
