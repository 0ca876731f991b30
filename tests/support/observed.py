"""Collectives of ranks that are threads, observed as `parallel.observe`
observes torch's dispatcher."""

from __future__ import annotations

from typing import Any

import torch

from warpweave.parallel.observe import Operation, described, observers


def observe(
    group: Any,
    name: str,
    x: torch.Tensor,
    peer: int | None = None,
    sizes: tuple[list[int], list[int]] | None = None,
) -> Any:
    """Report an operation of `threads.Group` to this rank's observers, and return its peer. It is a
    message if it has a peer."""
    what = f"{name} of {x.dtype if sizes else described((x,))}"
    for observer in observers():
        number, ranks, side = str(id(group.shared)), group.shared.members, ""
        if peer is not None:
            src, dst = (group.rank, peer) if name == "send" else (peer, group.rank)
            number, ranks, side = f"{number}/{src}>{dst}", (ranks[src], ranks[dst]), name
        key = observer.numbered(number)
        observer.before(Operation(key, ranks, what, (x,), side, sizes))
    return peer
