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
    """Pass one micro-batch through all stages, and return the output of this rank's last one.

    Collective over the pipeline `group`. `forward` maps a stage of this rank (`stages`, ascending)
    and its input, None for stage 0, to its output; `like` maps a stage to its input's (shape,
    dtype, device). `rank_of` has the rank of every stage.
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
