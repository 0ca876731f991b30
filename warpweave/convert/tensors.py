"""Rules that combine transformers' tensors into ours, and split ours into theirs.

Our tensor concatenates theirs and reorders the rows: queries, keys and values by KV head (for each
head, the rows of its queries, its key and its value), gate and up by hidden unit. GPT-2's Conv1D
stores its weights transposed. Both directions preserve every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from warpweave.convert.families import Family
from warpweave.kernels.words import find_activation
from warpweave.model.config import GPTConfig
from warpweave.model.gpt import GPT
from warpweave.parallel.shard import ParamRecord


@dataclass(frozen=True)
class TensorRule:
    """The mapping between one of our parameters and the tensors in their file."""

    shape: tuple[int, ...]  # of our parameter
    shapes: dict[str, tuple[int, ...]]  # their tensors, in the order of concatenation -> shape
    rows: tuple[int, ...]  # the number of our rows that each tensor has
    order: Callable[[], Tensor] | None  # the concatenated row of each of ours; None keeps them
    transposed: bool  # they store (in, out)

    def pack(self, theirs: Callable[[str], Tensor]) -> Tensor:
        """Return our tensor, made from theirs by name."""
        parts = [t.T if self.transposed else t for t in map(theirs, self.shapes)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (whole if self.order is None else whole[self.order()]).contiguous()

    def unpack(self, ours: Tensor) -> dict[str, Tensor]:
        """Return their tensors by name, made from ours."""
        if self.order is not None:
            ours = ours[self.order().argsort()]
        parts = (part.T if self.transposed else part for part in ours.split(self.rows))
        return {n: part.contiguous() for n, part in zip(self.shapes, parts, strict=True)}


def rules_of(config: GPTConfig, family: Family) -> dict[str, TensorRule]:
    """Return our parameter's name -> its rule, for every parameter of the whole model."""
    records = GPT(config, device="meta").parameter_records()
    return {name: _rule(record, config, family) for name, record in records.items()}


def _rule(record: ParamRecord, config: GPTConfig, family: Family) -> TensorRule:
    module, _, kind = record.name.rpartition(".")
    prefix = ""
    if module.startswith("blocks."):
        _, number, module = module.split(".", 2)
        prefix = family.blocks.format(number)
    names = [f"{prefix}{theirs}.{kind}" for theirs in family.modules[module]]
    H, Hkv, D, F = config.heads, config.num_kv_heads, config.head_dim, config.num_hidden
    rows: tuple[int, ...] = (record.shape[0],)
    order = None
    if module == "attention.qkv":
        rows, order = (H * D, Hkv * D, Hkv * D), lambda: _by_kv_head(H, Hkv, D)
    elif module == "mlp.up" and find_activation(config.activation).gated:
        rows, order = (F, F), lambda: rearrange(torch.arange(2 * F), "(pair f) -> (f pair)", pair=2)
    if len(names) == 1:
        rows = (sum(rows),)
    transposed = module in family.transposed and len(record.shape) == 2
    shapes = [(n, *record.shape[1:]) for n in rows]
    if transposed:
        shapes = [shape[::-1] for shape in shapes]
    return TensorRule(record.shape, dict(zip(names, shapes, strict=True)), rows, order, transposed)


def _by_kv_head(H: int, Hkv: int, D: int) -> Tensor:
    """Return the rows of [all queries, all keys, all values] in the order of our qkv projection."""
    parts = torch.arange((H + 2 * Hkv) * D).split((H * D, Hkv * D, Hkv * D))
    return torch.cat([part.view(Hkv, -1) for part in parts], 1).flatten()
