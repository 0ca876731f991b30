"""Blocks of the logits z[T, V] = x[T, E] W[V, E]^T, of which only a few are held at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from warpweave.kernels.cross_entropy.forward import fwd
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.gemm.fused import gemm, gemm_into
from warpweave.kernels.overlap.gathering import Gathering, multiply


class BlockSizes(NamedTuple):
    """Limits on blocks of z.

    These are the number of elements of z that are held, the most rows of a block, the fewest rows
    of a block with whole rows, and the number of elements up to which z may be held at once instead
    of half of its rows.
    """

    elements: int
    most_rows: int
    fewest_rows: int
    at_once: int = 2**62


# A CPU's block is 4 MiB of float32, which malloc keeps and caches hold. A GPU's is 128 MiB of
# bfloat16: 4096 columns of 16384 rows, so that its products are bound by arithmetic.
CPU, GPU = BlockSizes(2**20, 2**10, 2**10, 2**23), BlockSizes(2**26, 2**14, 2**12)


def sizes(x: torch.Tensor) -> BlockSizes:
    """The block sizes for the device of x."""
    return CPU if x.device.type == "cpu" else GPU


def slices(length: int, step: int) -> list[slice]:
    """Adjacent slices of at most `step`."""
    return [slice(a, min(a + step, length)) for a in range(0, length, step)]


def column_slices(columns: int, rows: int, elements: int) -> list[slice]:
    """Column slices of a block of `rows` rows; a single empty one for a shard of only padding."""
    if columns == 0:
        return [slice(0, 0)]
    wide = elements // max(1, rows)
    return slices(columns, columns if wide >= columns else max(128, wide // 128 * 128))


def row_step(x: torch.Tensor, columns: int) -> int:
    """The number of rows of a block of z[T, columns]."""
    return max(sizes(x).most_rows, sizes(x).elements // max(1, columns))


def block_grid(x: torch.Tensor, columns: int) -> Iterator[tuple[slice, list[slice]]]:
    """Row slices of z[T, columns], and the column slices of each: one block is held at a time."""
    for rows in slices(len(x), row_step(x, columns)):
        yield rows, column_slices(columns, rows.stop - rows.start, sizes(x).elements)


def aligned_empty(x: torch.Tensor, columns: int) -> torch.Tensor:
    """An empty block [N, columns] of z for x[N, E], with rows a multiple of 128 elements apart.

    A GPU's 16-byte copies and tensor descriptors need this. Unless 128 divides the vocabulary,
    there is one such block, which may be most of it.
    """
    return x.new_empty(x.shape[0], columns + -columns % 128)[:, :columns]


def aligned_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The block z[N, V] = x[N, E] weight[V, E]^T by torch's product, in `aligned_empty` memory."""
    if len(weight) % 128 == 0:
        return gemm(x, weight.t())
    z = aligned_empty(x, len(weight))
    gemm_into(x, weight.t(), z, False, impl="torch")
    return z


def aligned(z: torch.Tensor) -> torch.Tensor:
    """The block z[N, V], copied to `aligned_empty` memory unless its rows are already aligned."""
    return z if z.stride(0) % 128 == 0 else aligned_empty(z, z.shape[1]).copy_(z)


def gathering_product(x: Gathering, weight: torch.Tensor) -> torch.Tensor:
    """The first block of columns of z[T, V], by a product that gathers x[T, E] in its kernel.

    It is equally wide on all ranks, so it may be a few columns wider than the block, with or
    without padding.
    """
    wide = sizes(x.shard).elements // max(1, *x.shape)
    cut = max(128, -(-wide // 128) * 128)
    return multiply(x, weight[:cut].to(x.shard.dtype).t())[0]


def product_impl(impl: str) -> str | None:
    """The `impl` of the products: "torch" if `impl` is, else None: `gemm_into` chooses."""
    return "torch" if impl == "torch" else None


def from_column(vocabulary: Vocabulary, first: int) -> Vocabulary:
    """The `Vocabulary` of a block whose first column is the weight's row `first`."""
    return vocabulary._replace(start=vocabulary.start + first)


def block_stats(
    z: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, keep_softmax: bool = False
) -> torch.Tensor:
    """stats[2 or 3, N] of the block z: lse, the label's logit and, with smoothing, the logit sum.

    With `keep_softmax`, the softmax of the block overwrites it.
    """
    want_sum = vocabulary.label_smoothing != 0.0
    return torch.stack(fwd(z, labels, vocabulary, want_sum, keep_softmax)[: 2 + want_sum])


def merged(parts: list[torch.Tensor], labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Merge stats[k, N] of adjacent blocks into those of one; 0 in ignored rows."""
    if len(parts) == 1:
        return parts[0]
    part = torch.stack(parts)
    whole = torch.cat((part[:, 0].logsumexp(0)[None], part[:, 1:].sum(0)))
    return whole.masked_fill_(labels == ignore_index, 0.0)
