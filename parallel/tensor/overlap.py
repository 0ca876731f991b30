"""What a layer's `overlap` says: how collectives of tensor ranks and products hide one another.

    none      every collective is waited for at once: the blocking twin, equal in its results
    chunked   a rank's share of the tokens after the other: messages under products of other shares
    fused     within the kernels of the products, through symmetric memory (`kernels.overlap`)
    auto      what should be fastest for the sizes at hand, see `overlap_model`: fused, chunked, or
              whole collectives, which nothing hides in a forward; on a CPU always these

In the backward of a column-parallel product all but `none` run whole collectives under whole
products, of which there are two.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
import torch.distributed as dist

from warpweave.kernels.gemm.local import LOCAL, Local
from warpweave.parallel.symmetric import Workspace
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
    """What `auto` takes for a product of this rank, why, and the gain that the model expects.

    Args:
        product: M, N, K of a[M, K] b[K, N] as this rank multiplies it: M rows of all ranks, its own
            columns or depth.
        moves: "gather" before it; "scatter" or "reduce" after it.
        dtype, device: of a.
        workspace: without one nothing is fused.
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
    product: tuple[int, int, int] | None = None,
    moves: Moves = "gather",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Local:
    """What the ranks of `group` do around a product; a group of None is one device.

    Args:
        overlap: see above.
        workspace: the group's symmetric memory, which `fused` needs.
        product, moves, dtype, device: what `auto` chooses by, see `choose_overlap`; without a
            product it takes whole collectives.
    """
    check_overlap(overlap)
    if group is None:
        return LOCAL
    if overlap == "fused":
        if workspace is None:
            raise ValueError("overlap='fused' needs the workspace of the group, got None")
        return FusedRanks(group, sequence_parallel, workspace=workspace)
    if overlap == "auto" and product is not None:
        overlap = choose_overlap(
            group, product, moves, dtype=dtype, device=torch.device(device), workspace=workspace
        ).overlap
    return TensorRanks(group, sequence_parallel, bulk=overlap != "none")
