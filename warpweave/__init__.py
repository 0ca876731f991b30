"""warpweave: Triton kernel-fused parallel transformer layers.

Import the names below from here: ``from warpweave import TransformerBlock``. Each is loaded at its
first use, so ``import warpweave`` itself does not import torch. Kernels stay in the modules of
their families (`warpweave.kernels` lists them).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# The lower layers (kernels, parallel, layers) are inside this folder in an installation and next to
# it in a checkout. Both work, even if the working folder is a checkout and shadows an installation.
if not os.path.isdir(os.path.join(__path__[0], "kernels")):
    __path__.append(os.path.dirname(__path__[0]))

from warpweave.cli.lazy import names_of

if TYPE_CHECKING:
    from warpweave.launch import Session, join
    from warpweave.layers.attention import Attention
    from warpweave.layers.block import TransformerBlock
    from warpweave.layers.context import TokenContext
    from warpweave.layers.embedding import PositionEmbedding, VocabParallelEmbedding
    from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear
    from warpweave.layers.loss import VocabParallelCrossEntropy, VocabParallelLinearCrossEntropy
    from warpweave.layers.mlp import MLP
    from warpweave.layers.norm import LayerNorm, RMSNorm
    from warpweave.layers.sharding import explain_sharding, shard
    from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
    from warpweave.model.engine import Engine
    from warpweave.model.generate import Sampling, generate
    from warpweave.model.gpt import GPT
    from warpweave.parallel.mesh import Mesh
    from warpweave.wrap import Pipeline, Zero

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
    "Pipeline",
    "PositionEmbedding",
    "RMSNorm",
    "RowParallelLinear",
    "Sampling",
    "Session",
    "TokenContext",
    "TransformerBlock",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelLinearCrossEntropy",
    "Zero",
    "__version__",
    "explain_sharding",
    "generate",
    "join",
    "shard",
]

_MODULES = {
    "launch": ("Session", "join"),
    "layers.attention": ("Attention",),
    "layers.block": ("TransformerBlock",),
    "layers.context": ("TokenContext",),
    "layers.embedding": ("PositionEmbedding", "VocabParallelEmbedding"),
    "layers.linear": ("ColumnParallelLinear", "RowParallelLinear"),
    "layers.loss": ("VocabParallelCrossEntropy", "VocabParallelLinearCrossEntropy"),
    "layers.mlp": ("MLP",),
    "layers.norm": ("LayerNorm", "RMSNorm"),
    "layers.sharding": ("explain_sharding", "shard"),
    "model.config": ("PRESETS", "GPTConfig", "ParallelPlan"),
    "model.engine": ("Engine",),
    "model.generate": ("Sampling", "generate"),
    "model.gpt": ("GPT",),
    "parallel.mesh": ("Mesh",),
    "wrap": ("Pipeline", "Zero"),
}
# The modules of kernels, for the message of an AttributeError.
_ELSEWHERE = {
    "kernels.activation": ("activate",),
    "kernels.adamw": ("adamw_step", "adamw_update", "begin_adamw", "sum_of_squares"),
    "kernels.attention": ("attention",),
    "kernels.cross_entropy": ("cross_entropy", "linear_cross_entropy"),
    "kernels.dropout": ("dropout",),
    "kernels.gemm": ("fused_gemm", "gemm", "gemm_into"),
    "kernels.merge": ("merge",),
    "kernels.mlp": ("gelu_mlp", "mlp", "swiglu_mlp"),
    "kernels.muon": ("orthogonalize", "symmetric_product"),
    "kernels.norm": ("layer_norm", "rms_norm"),
    "kernels.overlap": ("all_gather_gemm", "gemm_all_reduce", "gemm_reduce_scatter"),
    "kernels.qkv": ("qkv_rope",),
    "kernels.rope": ("apply_rope", "rope_table"),
}

_find = names_of(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    for module, names in _ELSEWHERE.items():
        if name in names:
            raise AttributeError(f"{name} is in warpweave.{module}, not in warpweave itself")
    return _find(name)


def __dir__() -> list[str]:
    return [*__all__]
