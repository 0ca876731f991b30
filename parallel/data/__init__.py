"""Data parallelism: what the ranks that see different tokens do with parameters and gradients.

`flat` where parameters lie in a flat buffer · `parameters` their storage and gathering · `reduce`
accumulation and reduction of gradients · `optimizer` update rules and their state · `unit` the
three of a block, placed as ZeRO stages 0 to 3 say · `zero` the optimizer over units.
"""
