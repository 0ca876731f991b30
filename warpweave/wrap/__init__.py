"""Pipelines and ZeRO for modules of your own.

`Pipeline` runs a list of modules as pipeline stages · `Zero` shards the parameters, gradients, and
optimizer state of one model · `units` what both have in common: ZeRO units of parameters, the
optimizer step, and the tensors of a checkpoint.
"""

from warpweave.wrap.pipeline import Pipeline
from warpweave.wrap.zero import Zero

__all__ = ["Pipeline", "Zero"]
