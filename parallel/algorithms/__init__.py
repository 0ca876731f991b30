"""Collectives by their algorithms, as data, of the standard library alone.

They are rounds of messages, which run on tensors (``run_collective``), are counted and priced.

`rounds` what a round is, duality · `rooted` broadcast, reduce, scatter, gather · `ring` ·
`doubling` recursive doubling, halving-doubling · `trees` binary and double binary tree ·
`hierarchical` within nodes, then across · `direct` naive, parallel, ordered, all-to-all ·
`all_reduce` by name · `network` bytes and seconds on a network.
"""
