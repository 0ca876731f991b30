"""warpweave: Triton kernel-fused parallel transformer layers.

The classes below are importable from here, ``from warpweave import TransformerBlock``; each is
loaded when it is first asked for, so that ``import warpweave`` itself imports no torch. Functions
stay in the modules of their families (`warpweave.kernels` lists them).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """A name of `__all__`, from its module (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"warpweave.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
