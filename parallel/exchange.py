"""JSON between ranks, sent as bytes because torch's object collectives unpickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def exchange(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """All-gather JSON values, in rank order. Every rank of `group` must call it."""
    if group is None:
        return [value]
    nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(n) for n in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group=group)
    return [
        json.loads(row[:n].cpu().numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)
    ]
