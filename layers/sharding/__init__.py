"""Sharding of modules that were written for one device.

`declare` shards a model by a plan of dim names or mesh axes · `explain` lists the layouts and
collectives of a forward · `styles` has tensor-parallel styles for `parallelize_module` · `dtensor`
turns parameters of other libraries' modules into DTensors · `rules`, `memory` and `layouts` correct
functions that DTensor alone would compute wrongly.
"""

from warpweave.layers.sharding.declare import shard
from warpweave.layers.sharding.explain import explain_sharding
from warpweave.layers.sharding.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "explain_sharding", "shard"]
