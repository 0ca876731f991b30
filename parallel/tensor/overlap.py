"""What a layer's `overlap` says: how collectives of tensor ranks and products hide one another.

    none      every collective is waited for at once: the blocking twin, equal in its results
    bulk      the default: in the backward of a column-parallel product, which has two products and
              two collectives, each collective runs under a product; blocking otherwise
    chunked   a rank's share of the tokens after the other: messages under products of other shares
    fused     within the kernels of the products, through symmetric memory (`kernels.overlap`)

The backward of a column-parallel product is that of `bulk` in the last two as well.
``benchmarks/overlap.py`` prints which of them is fastest on the ranks that it runs on.
"""

from __future__ import annotations

from typing import cast, get_args

import torch
import torch.distributed as dist

from warpweave.kernels.gemm.local import LOCAL, Local
from warpweave.kernels.overlap.gathering import check_fusing
from warpweave.kernels.runtime.dispatch import choose
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor.ranks import TensorRanks
from warpweave.parallel.words import Overlap


def check_overlap(overlap: str) -> Overlap:
    """`overlap`, or ValueError if it is none of the words."""
    if overlap not in get_args(Overlap):
        raise ValueError(f"overlap must be one of {', '.join(get_args(Overlap))}, got {overlap!r}")
    return cast(Overlap, overlap)


def tensor_ranks(
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    overlap: str = "bulk",
    workspace: Workspace | None = None,
    *,
    x: torch.Tensor | None = None,
    impl: str | None = "triton",
) -> Local:
    """The ranks of `group` as a layer's Function sees them; a group of None is one device.

    Args:
        overlap: see above.
        workspace: the group's symmetric memory, which `fused` needs.
        x, impl: what is multiplied, and by which implementation.

    Raises:
        ValueError: `overlap` is no such word, or what is fused cannot run.
    """
    word = check_overlap(overlap)
    if group is None:
        return LOCAL
    if word == "fused":
        if workspace is None:
            raise ValueError("overlap='fused' needs the workspace of the group, got None")
        if x is not None:
            check_fusing(choose(impl, x))
    return TensorRanks(group, sequence_parallel, word, workspace if word == "fused" else None)
