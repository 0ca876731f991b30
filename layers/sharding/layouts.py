"""Layouts of DTensors in a declared model: whole, partial, sharded, and reshaped.

If a reshape merges dims and the first of them is not sharded, each rank holds several pieces:

    x[B, S, E], S sharded        x.flatten(0, 1)[B S, E]: rank 0 has the first half of every sample

DTensor calls this placement a strided shard. Elementwise operators, matrix products, and the
reshape back to B and S handle it correctly. After any other reshape, DTensor's layout is silently
wrong, so `reshapable` gathers strided shards first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

# Functions whose result has the same elements in the same order, in a different shape.
RESHAPES = frozenset(["view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "unflatten"])


# ---------------------------------------------------------------- whole and partial tensors


def whole_tensor(x: Any) -> Any:
    """The plain logical tensor of a DTensor, on every rank; return anything else unchanged. The
    gradient that the result receives must be the same on all ranks."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()


def is_partial(x: DTensor) -> bool:
    """Return True if x is a partial sum, or another partial result, over some mesh axis."""
    return any(p.is_partial() for p in x.placements)


def without_sums(x: DTensor) -> list:
    """The placements of x with partial ones changed to replicated."""
    return [Replicate() if p.is_partial() else p for p in x.placements]


def sum_partial(x: Any) -> Any:
    """Reduce the partial sums of x; return anything else unchanged."""
    if not isinstance(x, DTensor) or not is_partial(x):
        return x
    return x.redistribute(placements=without_sums(x))


def reduced_truth(x: Any) -> Any:
    """Reduce a partial tensor of bools, as `any` returns it; return anything else unchanged.
    DTensor would cast each rank's truth value and then add them."""
    if not isinstance(x, DTensor) or x.dtype != torch.bool or not is_partial(x):
        return x
    counts = laid_out_like(x, x.to_local().int())
    return counts.redistribute(placements=[Replicate()] * x.device_mesh.ndim).bool()


def laid_out_like(x: DTensor, part: torch.Tensor) -> DTensor:
    """A DTensor of `part`, with the layout, shape and strides of x."""
    mesh, where, shape, stride = x.device_mesh, x.placements, x.shape, x.stride()
    return DTensor.from_local(part, mesh, where, run_check=False, shape=shape, stride=stride)


# ---------------------------------------------------------------- strided shards


def is_strided(p: Any) -> bool:
    """Return True for a placement in which each rank has several pieces of a dim."""
    return hasattr(p, "split_factor")


def has_strides(x: DTensor) -> bool:
    """Return True if x is sharded in several pieces per rank over some mesh axis."""
    return any(map(is_strided, x.placements))


def is_cut(p: Any, dim: int | None = None) -> bool:
    """Return True for a placement that shards this dim (None: any dim), in one or more pieces."""
    return p.is_shard(dim) or (is_strided(p) and dim in (None, p.dim))


def gather_where(x: DTensor, cut: list[bool]) -> DTensor:
    """Gather x over the mesh axes whose `cut` is True; return x itself if none is."""
    if not any(cut):
        return x
    where = [Replicate() if c else p for c, p in zip(cut, x.placements, strict=True)]
    return x.redistribute(placements=where)


def gather_strided(x: DTensor) -> DTensor:
    """Gather x over the mesh axes that shard it in strides."""
    return gather_where(x, [*map(is_strided, x.placements)])


def reshapable(reshape: Callable, args: tuple, kwargs: dict) -> DTensor:
    """The tensor to reshape; strided shards are gathered if the result's layout would be wrong."""
    x, rest = args[0], args[1:]
    if reshape.__name__ in ("view_as", "reshape_as"):
        shape = rest[0].shape
    else:
        shape = reshape(torch.empty(x.shape, device="meta", dtype=x.dtype), *rest, **kwargs).shape
    return x if _follows(x, shape) else gather_strided(x)


def _follows(x: DTensor, shape: torch.Size) -> bool:
    """Return True if DTensor's layout of x after a reshape to `shape` is right. It is right if the
    dims up to the last strided one are unchanged, or if the only strided dim is split into the dims
    from which it was merged."""
    axes: list[tuple[Any, int]] = list(zip(x.placements, x.device_mesh.shape, strict=True))
    strided = [(p, size) for p, size in axes if is_strided(p)]
    if all(shape[: p.dim + 1] == x.shape[: p.dim + 1] for p, _ in strided):
        return True
    if len(strided) > 1:
        return False
    ((p, ranks),) = strided
    ahead = p.split_factor * prod([size for q, size in axes if q.is_shard(p.dim)])
    for at in range(p.dim + 1, len(shape)):
        if prod(shape[p.dim : at]) == ahead and shape[at] % ranks == 0:
            same = shape[: p.dim] == x.shape[: p.dim]
            return same and prod(shape[p.dim : at + 1]) == x.shape[p.dim]
    return False
