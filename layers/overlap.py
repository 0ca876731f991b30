"""What ``overlap="auto"`` takes for the layers of a module, in words."""

from __future__ import annotations

from torch import nn

from warpweave.layers.attention import Attention
from warpweave.layers.fusable import fusable
from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from warpweave.layers.mlp import MLP
from warpweave.parallel.tensor.overlap import column_product, explain, row_product
from warpweave.parallel.tensor.overlap_model import Product

Linear = ColumnParallelLinear | RowParallelLinear


def explain_overlap(module: nn.Module, tokens: int) -> str:
    """For each product of `module` (a block, a model) that is cut over tensor ranks: what is taken,
    whether it was measured, and what the model predicts; see ``parallel.tensor.overlap.explain``.

    Args:
        module: layers that were given ``overlap``.
        tokens: that their products multiply at a time, of all tensor ranks.

    Returns:
        Lines: one per layer, and one below it for each product around which something moves.
    """
    lines: list[str] = []
    told: set[nn.Module] = set()
    impls: dict[nn.Module, str | None] = {}  # a linear layer by itself is fused into Triton's
    for name, child in module.named_modules():
        layers: list[Linear] = []
        if isinstance(child, MLP):
            if fusable(child.up, ColumnParallelLinear) and fusable(child.down, RowParallelLinear):
                layers, impls[child.up] = [child.up, child.down], child.impl
        elif isinstance(child, Attention) and fusable(child.qkv, ColumnParallelLinear):
            impls[child.qkv] = child.impl
        elif isinstance(child, Linear) and child not in told:
            layers = [child]
        if layers:
            told.update(layers)
            lines += _explained(name, layers, tokens, impls.get(layers[0], "triton"))
    return "\n".join(lines)


def _explained(name: str, layers: list[Linear], tokens: int, impl: str | None) -> list[str]:
    first = layers[0]
    if first.overlap != "auto":
        return [f"{name}: overlap {first.overlap}, asked for"]
    group = first.mesh.group("tp")
    products: tuple[Product, ...] = ()
    for layer in layers if group is not None else ():
        product = column_product if isinstance(layer, ColumnParallelLinear) else row_product
        products += product(tokens, layer.weight, group, layer.sequence_parallel)
    return explain(name, products, first.weight, group, first.mesh.workspace("tp"), impl)
