"""Data parallelism and ZeRO: sharded parameters, gradients and optimizer states over the ranks that
see different tokens.

`flat` the flat buffer of a unit's parameters · `parameters` their storage and all-gather · `reduce`
gradient accumulation and reduction · `optimizer` update rules and their state · `unit` the three
for one block, sharded as a ZeRO stage says · `zero` the optimizer over all units · `muon` its whole
matrices · `batch_norm` statistics of the whole batch.
"""
