"""One forward pass through all stages, one after the other, without a schedule or gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.parallel.pipeline.interface import Like


def relay(
    forward: Callable[[int, Tensor | None], Tensor | None],
    stages: Iterable[int],
    rank_of: Sequence[int],
    group: dist.ProcessGroup | None,
    like: Callable[[int], Like],
) -> Tensor | None:
    """Pass one micro-batch through all stages. Collective over the pipeline ranks.

    Args:
        forward: (stage, input) -> output; the input of stage 0 is None.
        stages: the stages of this rank, ascending.
        rank_of: the rank of every stage.
        group: the pipeline group; None for a single rank.
        like: stage -> (shape, dtype, device) of its input, for stages of this rank.

    Returns the output of this rank's last stage.
    """
    x: Tensor | None = None
    for stage in stages:
        if stage > 0 and rank_of[stage - 1] != rank_of[stage]:
            shape, dtype, device = like(stage)
            x = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(x, group_src=rank_of[stage - 1], group=group)
        x = forward(stage, x)
        if stage + 1 < len(rank_of) and rank_of[stage + 1] != rank_of[stage]:
            assert x is not None
            dist.send(x.contiguous(), group_dst=rank_of[stage + 1], group=group)
    return x
