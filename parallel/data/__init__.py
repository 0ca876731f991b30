"""Data parallelism and ZeRO: sharded parameters, gradients and optimizer states over the ranks that
see different tokens.

`flat` the flat buffer of a unit's parameters · `parameters` their storage and all-gather · `reduce`
gradient accumulation and reduction · `optimizer` update rules and their state · `unit` all three
for one block, sharded according to a ZeRO stage · `zero` the optimizer over all units · `muon` its
whole matrices · `batch_norm` statistics of the whole batch.
"""
