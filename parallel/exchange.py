"""JSON between ranks, sent as bytes because torch's object collectives unpickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from warpweave.parallel.collectives import start_all_gather


def exchange(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """All-gather JSON values, in rank order. Every rank of `group` must call it."""
    if group is None:
        return [value]
    nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    sizes = start_all_gather(size, group).wait().tolist()
    padded = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))
    rows = start_all_gather(padded.unsqueeze(0), group).wait().cpu()
    return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, sizes, strict=True)]
