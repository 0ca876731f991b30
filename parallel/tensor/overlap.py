"""What a layer's `overlap` says: how collectives of tensor ranks and products hide one another.

    none      every collective is waited for at once: the blocking twin, equal in its results
    chunked   a rank's share of the tokens after the other: messages under products of other shares
    fused     within the kernels of the products, through symmetric memory (`kernels.overlap`)
    auto      the fastest of these that was measured (`overlap_table`) of products like these, and
              `none` where nothing was, or nothing faster: `explain` says which and why

In the backward of a column-parallel product all but a `none` that was asked for run whole
collectives under whole products, of which there are two. A table has no times of head and loss in
one: there `auto` is `none`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist

from warpweave.kernels.devices import find_device
from warpweave.kernels.gemm.local import LOCAL
from warpweave.kernels.overlap.gathering import check_fusing
from warpweave.kernels.runtime.dispatch import choose
from warpweave.kernels.runtime.tiles import device_name
from warpweave.parallel.collectives import group_size
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor.chunked import ChunkedRanks
from warpweave.parallel.tensor.fused import FusedRanks
from warpweave.parallel.tensor.overlap_model import LEAST_GAIN, Moves, Product, predict
from warpweave.parallel.tensor.overlap_table import NEAR, WAYS, Measured, Place, nearest
from warpweave.parallel.tensor.ranks import TensorRanks
from warpweave.parallel.words import Overlap


def check_overlap(overlap: str) -> Overlap:
    """`overlap`, or ValueError if it is none of the words."""
    if overlap not in get_args(Overlap):
        raise ValueError(f"overlap must be one of {', '.join(get_args(Overlap))}, got {overlap!r}")
    return cast(Overlap, overlap)


class Kinds(NamedTuple):
    """What stands for the ranks of a group: for one device, and the class of each way."""

    local: Any = LOCAL
    whole: type[TensorRanks] = TensorRanks
    chunked: type[ChunkedRanks] = ChunkedRanks
    fused: type[FusedRanks] = FusedRanks


PRODUCT = Kinds()


def tensor_ranks(
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    overlap: str = "auto",
    workspace: Workspace | None = None,
    *,
    x: torch.Tensor | None = None,
    impl: str | None = "triton",
    kinds: Kinds = PRODUCT,
    products: Callable[[], Sequence[Product]] = tuple,
) -> Any:
    """What the ranks of `group` do around a product; a group of None is one device.

    Args:
        overlap: see above.
        workspace: the group's symmetric memory, which `fused` needs.
        x, impl: what is multiplied, and by which implementation.
        kinds: those of a product, `Local`, or of one that asks more of its ranks.
        products: what `auto` looks up: the products of the forward around which something moves.

    Raises:
        ValueError: `overlap` is no such word, or what is fused cannot run.
    """
    check_overlap(overlap)
    if group is None:
        return kinds.local
    bulk = overlap != "none"
    if overlap == "auto":
        found = () if x is None else products()
        overlap = choose_way(found, x, group, workspace, impl).overlap
    if overlap == "fused":
        _check_fused(x, workspace, impl)
        return kinds.fused(group, sequence_parallel, workspace=workspace)
    if overlap == "chunked":
        return kinds.chunked(group, sequence_parallel)
    return kinds.whole(group, sequence_parallel, bulk=bulk)


def _check_fused(x: torch.Tensor | None, workspace: Workspace | None, impl: str | None) -> None:
    """ValueError if what is fused cannot run."""
    if workspace is None:
        raise ValueError("overlap='fused' needs the workspace of the group, got None")
    if x is not None:
        check_fusing(choose(impl, x))


# ---------------------------------------------------------------- what auto takes


def tokens_of(x: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> int:
    """How many there are in x[..., K], the rank's or its share with `sequence_parallel`."""
    return x.shape[:-1].numel() * (group_size(group) if sequence_parallel else 1)


def column_product(
    tokens: int, weight: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
) -> tuple[Product, ...]:
    """The product of x[tokens, K] and a column-parallel weight[..., K], if anything moves in its
    forward."""
    return (_product(tokens, weight, group, "gather"),) if sequence_parallel else ()


def row_product(
    tokens: int, weight: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
) -> tuple[Product, ...]:
    """The product of h[tokens, K] and a row-parallel weight[N, K]."""
    return (_product(tokens, weight, group, "scatter" if sequence_parallel else "reduce"),)


def _product(tokens: int, weight: torch.Tensor, group: dist.ProcessGroup, moves: Moves) -> Product:
    N, K = math.prod(weight.shape[:-1]), math.prod(weight.shape[-1:])
    return Product(tokens, N, K, group_size(group), moves, weight.element_size())


def place_of(x: torch.Tensor, group: dist.ProcessGroup) -> Place:
    """Where products of x run: by its device, its dtype or autocast's, and the ranks of `group`."""
    kind, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    name = device_name(x.device) or kind.upper()
    return Place(name, _link(kind, group), dist.get_world_size(group), str(dtype)[6:])


def _link(kind: str, group: dist.ProcessGroup) -> str:
    """How ranks are linked: GPUs of one machine, which share no more than a network unless the
    launcher says how many ranks a machine has, are taken to be NVLink's peers."""
    if kind != "cuda":
        return "gloo"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machines = {rank // local for rank in dist.get_process_group_ranks(group)}
    return "nvlink" if len(machines) == 1 else "network"


class Choice(NamedTuple):
    """What `auto` takes for a layer, why, and what was measured near each of its products."""

    overlap: Literal["fused", "chunked", "none"]
    why: str
    measured: tuple[Measured | None, ...] = ()


def choose_way(
    products: Sequence[Product],
    x: torch.Tensor,
    group: dist.ProcessGroup,
    workspace: Workspace | None,
    impl: str | None,
) -> Choice:
    """The way of least time, in all, for the products of a layer on the device and in the dtype of
    x; "none" if one of them was not measured, or nothing is faster by `LEAST_GAIN`."""
    if not products:
        return Choice("none", "nothing moves in its forward that was measured")
    place = place_of(x, group)
    found = [nearest(product, place) for product in products]
    rows = [row for row in found if row is not None]
    if len(rows) < len(found):
        where = f"{place.ranks} x {place.device} over {place.link} in {place.dtype}"
        why = f"nothing was measured within {NEAR:g} x of its sizes on {where}"
        return Choice("none", why, tuple(found))
    ways = set.intersection(*(set(row.us) for row in rows))
    us = {way: sum(row.us[way] for row in rows) for way in WAYS if way in ways}
    said = "measured, " + ", ".join(f"{way} {time:.0f}" for way, time in us.items()) + " us"
    if "fused" in us and (refusal := _refusal(x, workspace, impl)):
        del us["fused"]
        said += f" (not fused here: {refusal})"
    best = min(us, key=lambda way: us[way])
    if us["none"] < LEAST_GAIN * us[best]:
        return Choice("none", f"{said}: nothing is faster", tuple(found))
    gain = us["none"] / us[best]
    return Choice(cast(Any, best), f"{said}: {gain:.2f} x none", tuple(found))


def _refusal(x: torch.Tensor, workspace: Workspace | None, impl: str | None) -> str:
    """Why nothing can be fused on x's device, or nothing."""
    try:
        _check_fused(x, workspace, impl)
    except ValueError as error:
        return str(error)
    return ""


def explain(
    name: str,
    products: Sequence[Product],
    x: torch.Tensor,
    group: dist.ProcessGroup | None,
    workspace: Workspace | None,
    impl: str | None = "triton",
) -> list[str]:
    """What ``overlap="auto"`` takes for the layer `name`, in lines: the choice and what it rests
    on; for each product where it was measured, and what the model expects, a PREDICTION.

    Arguments as for `tensor_ranks`; x is any tensor of the device and the dtype.
    """
    if group is None:
        return [f"{name}: one rank, nothing moves"]
    place, choice = place_of(x, group), choose_way(products, x, group, workspace, impl)
    lines = [f"{name}: overlap {choice.overlap}, {choice.why}"]
    for product, row in zip(products, choice.measured):
        sizes = f"[{product.M}, {product.K}] [{product.K}, {product.N}]"
        at = "not measured" if row is None else f"measured at [{row.M}, {row.K}] [{row.K}, {row.N}]"
        lines.append(f"  {product.moves} around {sizes}: {at}; {_expected(product, place)}")
    return lines


def _expected(product: Product, place: Place) -> str:
    """What the model says of a product, in words."""
    device = find_device(place.device)
    if device is None or place.link == "gloo":
        return f"no PREDICTION, the model knows nothing of {place.device} over {place.link}"
    near = place.link == "nvlink"
    p = predict(product, device, "nvlink" if near else "network", symmetric=near)
    ways = {"chunked": p.chunked} | ({} if p.fused is None else {"fused": p.fused})
    gains = ", ".join(f"{way} {p.whole / seconds:.2f} x none" for way, seconds in ways.items())
    return f"PREDICTION by {device.name}'s bandwidths, processors and tiles: {gains}"
