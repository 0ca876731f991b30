"""warpweave: Triton kernel-fused parallel transformer layers.

The classes below are importable from here, ``from warpweave import TransformerBlock``; each is
loaded when it is first asked for, so that ``import warpweave`` itself imports no torch. Functions
stay in the modules of their families (`warpweave.kernels` lists them).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# An installation has the rungs inside this folder, a checkout beside it: whole in both, also where
# a checkout is the working folder and so comes before what is installed.
if not os.path.isdir(os.path.join(__path__[0], "kernels")):
    __path__.append(os.path.dirname(__path__[0]))

from warpweave.lazy import names_of

if TYPE_CHECKING:
    from warpweave.config import PRESETS, GPTConfig, ParallelPlan
    from warpweave.engine import Engine
    from warpweave.gpt import GPT
    from warpweave.layers.attention import Attention
    from warpweave.layers.block import TransformerBlock
    from warpweave.layers.context import TokenContext
    from warpweave.layers.embedding import PositionEmbedding, VocabParallelEmbedding
    from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear
    from warpweave.layers.loss import VocabParallelLinearCrossEntropy
    from warpweave.layers.mlp import MLP
    from warpweave.layers.norm import LayerNorm, RMSNorm
    from warpweave.parallel.mesh import Mesh

__version__ = "0.2.0"

__all__ = [
    "GPT",
    "MLP",
    "PRESETS",
    "Attention",
    "ColumnParallelLinear",
    "Engine",
    "GPTConfig",
    "LayerNorm",
    "Mesh",
    "ParallelPlan",
    "PositionEmbedding",
    "RMSNorm",
    "RowParallelLinear",
    "TokenContext",
    "TransformerBlock",
    "VocabParallelEmbedding",
    "VocabParallelLinearCrossEntropy",
    "__version__",
]

_MODULES = {
    "config": ("PRESETS", "GPTConfig", "ParallelPlan"),
    "engine": ("Engine",),
    "gpt": ("GPT",),
    "layers.attention": ("Attention",),
    "layers.block": ("TransformerBlock",),
    "layers.context": ("TokenContext",),
    "layers.embedding": ("PositionEmbedding", "VocabParallelEmbedding"),
    "layers.linear": ("ColumnParallelLinear", "RowParallelLinear"),
    "layers.loss": ("VocabParallelLinearCrossEntropy",),
    "layers.mlp": ("MLP",),
    "layers.norm": ("LayerNorm", "RMSNorm"),
    "parallel.mesh": ("Mesh",),
}


__getattr__ = names_of(__name__, _MODULES)


def __dir__() -> list[str]:
    return [*__all__]
