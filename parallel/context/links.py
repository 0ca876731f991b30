"""Link bandwidth and attention FLOP/s, given or measured, for choosing a context-parallel strategy.

Strategy "auto" uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from warpweave.kernels.attention import attention
from warpweave.parallel.collectives import start_exchange


@dataclass(frozen=True)
class Links:
    """Speeds of a rank. They must be the same on every rank, or ranks choose different strategies
    and deadlock.

    Attributes:
        link: bytes per second that a rank sends to others of its group, in one direction.
        flops: FLOP/s that attention reaches.
        near: bytes per second within the Ulysses group of a hybrid; None means `link`.
        memory: bytes that a strategy may hold in addition to inputs and results; None means no
            limit.

    Raises:
        ValueError: a value is not positive.

    Examples:
        >>> links = Links(link=50e9, flops=400e12)  # pass strategy=links to `context_attention`
    """

    link: float
    flops: float
    near: float | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


def measure_links(
    group: dist.ProcessGroup, x: torch.Tensor, *, size: int = 2**22, rounds: int = 5
) -> Links:
    """Measure the speeds of the slowest rank: sending `size` bytes to the next rank, and the
    forward of attention of x to itself.

    Args:
        group: two ranks or more, all of which call this.
        x: [B, S, H, D] on the device and in the dtype of the run; long enough that a call takes
            much longer than its launch.
        size: bytes per message.
        rounds: number of runs of each; the median is used.

    Examples:
        >>> from warpweave import Mesh
        >>> group = Mesh(cp=2).connect().group("cp")  # doctest: +SKIP
        >>> links = measure_links(group, torch.randn(1, 4096, 8, 64))  # doctest: +SKIP
    """
    sent = torch.empty(size, dtype=torch.uint8, device=x.device)
    arrived = torch.empty_like(sent)
    x = x.detach()
    B, S, H, D = x.shape
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    ends = (rank + 1) % ranks, (rank - 1) % ranks
    hop = _seconds(lambda: start_exchange(sent, arrived, *ends, group).wait(), x.device, rounds)
    tile = _seconds(lambda: attention(x, x, x, causal=False), x.device, rounds)
    speeds = torch.tensor([size / hop, 4 * B * H * S * S * D / tile], device=x.device)
    dist.all_reduce(speeds, dist.ReduceOp.MIN, group)
    link, flops = speeds.tolist()
    return Links(link, flops)


def _seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    def once() -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return median(once() for _ in range(rounds))
