"""What a layer's `overlap` says: how collectives of tensor ranks and products hide one another.

    none      every collective is waited for at once: the blocking twin, equal in its results
    chunked   a rank's share of the tokens after the other: messages under products of other shares
    fused     within the kernels of the products, through symmetric memory (`kernels.overlap`)
    auto      what should be faster for the sizes at hand, see `overlap_model`: chunked, or whole
              collectives, which nothing hides in a forward; on a CPU always these. It does not take
              fused by itself before that has been measured over NVLink

`chunked` needs no more than messages: several nodes, no peer access. Where tokens are not cut, only
the sum of a row-parallel product is in pieces, of which there are as many as ranks.

In the backward of a column-parallel product all but `none` run whole collectives under whole
products, of which there are two.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
import torch.distributed as dist

from warpweave.kernels.gemm.local import LOCAL, Local
from warpweave.parallel.collectives import group_size
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor.chunked import ChunkedRanks
from warpweave.parallel.tensor.fused import FusedRanks
from warpweave.parallel.tensor.overlap_model import (
    Choice,
    Device,
    Link,
    Moves,
    Product,
    explain,
    find_device,
)
from warpweave.parallel.tensor.ranks import TensorRanks

Overlap = Literal["auto", "fused", "chunked", "none"]


def check_overlap(overlap: str) -> Overlap:
    """`overlap`, or ValueError if it is none of the words."""
    if overlap not in get_args(Overlap):
        raise ValueError(f"overlap must be one of {', '.join(get_args(Overlap))}, got {overlap!r}")
    return cast(Overlap, overlap)


def choose_overlap(
    group: dist.ProcessGroup,
    product: tuple[int, int, int],
    moves: Moves,
    *,
    dtype: torch.dtype,
    device: torch.device,
    workspace: Workspace | None = None,
) -> Choice:
    """What the model takes for a product of this rank, why, and the gain that it expects.

    Args:
        product: M, N, K of a[M, K] b[K, N] as this rank multiplies it: M rows of all ranks, its own
            columns or depth.
        moves: "gather" before it; "scatter" or "reduce" after it.
        dtype, device: of a.
        workspace: without one, as `auto` asks, nothing is fused.
    """
    ranks = dist.get_process_group_ranks(group)
    known: Device | None = None
    link: Link = "network"
    if device.type == "cuda":
        known, link = find_device(torch.cuda.get_device_name(device)), _link(ranks)
    whole = Product(*product, len(ranks), moves, dtype.itemsize)
    return explain(whole, known, link, symmetric=workspace is not None)


def _link(ranks: list[int]) -> Link:
    """What joins these ranks; torchrun fills one machine after the other."""
    machines = {rank // torch.cuda.device_count() for rank in ranks}
    return "nvlink" if len(machines) == 1 else "network"


def tensor_ranks(
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    overlap: str = "auto",
    workspace: Workspace | None = None,
    *,
    x: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    moves: Moves = "gather",
) -> Local:
    """What the ranks of `group` do around a product; a group of None is one device.

    Args:
        overlap: see above.
        workspace: the group's symmetric memory, which `fused` needs.
        x, weight, moves: the layer's product, by which `auto` chooses: x[..., K] of this rank,
            weight[N, ..., K], and whether tokens are gathered before or scattered after it where
            they are cut. Without them it takes whole collectives.
    """
    check_overlap(overlap)
    if group is None:
        return LOCAL
    if overlap == "auto" and x is not None and weight is not None:
        overlap = _choose(group, sequence_parallel, x, weight, moves)
    if overlap == "fused":
        if workspace is None:
            raise ValueError("overlap='fused' needs the workspace of the group, got None")
        return FusedRanks(group, sequence_parallel, workspace=workspace)
    if overlap == "chunked":
        return ChunkedRanks(group, sequence_parallel)
    return TensorRanks(group, sequence_parallel, bulk=overlap != "none")


def _choose(
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    moves: Moves,
) -> str:
    parts = group_size(group) if sequence_parallel and moves == "gather" else 1
    product = x.shape[:-1].numel() * parts, weight.shape[:-1].numel(), weight.shape[-1]
    moves = moves if sequence_parallel else "reduce"
    return choose_overlap(group, product, moves, dtype=x.dtype, device=x.device).overlap
