"""Sharding of another library's model (Hugging Face) over tensor ranks, with DTensor parameters.

Every parameter is a DTensor, sharded or replicated, so clipping by the global norm, optimizers and
saving see logical tensors. During a module's forward, its parameters are this rank's plain tensors.
If a replicated parameter sees only some of the tokens or heads, its gradient is summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from warpweave.parallel.collectives import all_gather, copy_to

Groups = tuple[dist.ProcessGroup, ...]


def placed(p: nn.Parameter, mesh: DeviceMesh | None, placement: Placement) -> nn.Parameter:
    """Turn a parameter that is equal on all ranks into a DTensor; each rank keeps its shard.

    Args:
        mesh: the tensor ranks; with None (one rank), return the parameter itself.
        placement: Replicate(); Shard(dim), possibly uneven: ceil(n/R) rows per rank, the rest on
            the last; or _StridedShard: equal blocks, each of which is sharded.
    """
    if mesh is None:
        return p
    whole = shard = p.detach()
    if isinstance(placement, (Shard, _StridedShard)):
        dim, blocks = placement.dim, getattr(placement, "split_factor", 1)
        rank, ranks = mesh.get_local_rank(), mesh.size()
        size = -(-whole.shape[dim] // (ranks * blocks))
        shares = [block.split(size, dim) for block in whole.chunk(blocks, dim)]
        empty = whole.narrow(dim, 0, 0)
        own = [share[rank] if rank < len(share) else empty for share in shares]
        shard = torch.cat(own, dim)  # a copy, so the whole tensor can be freed
    cut = DTensor.from_local(
        shard, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(cut, p.requires_grad)


def local(p: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter, as a plain tensor."""
    return p.to_local() if isinstance(p, DTensor) else p


def whole(p: torch.Tensor) -> torch.Tensor:
    """The logical parameter, all-gathered; every rank of its mesh must call this."""
    return p.full_tensor() if isinstance(p, DTensor) else p


def padded_rows(weight: torch.Tensor, rows: int, ranks: int) -> torch.Tensor:
    """Pad this rank's rows of a vocabulary with zeros to ceil(rows / ranks)."""
    missing = -(-rows // ranks) - len(weight)
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def replace_parameters(model: nn.Module, found: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters of a model; tied ones are replaced in every module that has them."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p in found:
                module._parameters[name] = found[p]


def use_local(
    module: nn.Module,
    sums: dict[str, Groups],
    parts: dict[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
) -> list[Any]:
    """Replace the module's own parameters by this rank's plain tensors during its forward.

    Args:
        sums: by a parameter's name, the groups over which its gradient is summed. Entries may be
            added later.
        parts: by name, a function that returns this rank's part of a replicated parameter.

    Returns the hooks.
    """

    whole: dict[nn.Module, dict[str, Any]] = {}  # of the module, or a copy of it, while it runs
    parts = parts or {}

    def enter(module: nn.Module, args: tuple) -> None:
        own: dict[str, Any] = module._parameters
        whole[module] = dict(own)
        for name, p in own.items():
            if p is None:
                continue
            own[name] = local(p)
            for group in sums.get(name, ()):
                own[name] = copy_to(own[name], group)
            if name in parts:
                own[name] = parts[name](own[name])

    def leave(module: nn.Module, args: tuple, out: Any) -> None:
        module._parameters.update(whole.pop(module, {}))

    vars(enter)["sums"] = sums
    after = module.register_forward_hook(leave, always_call=True)
    return [module.register_forward_pre_hook(enter), after]


def sums_of(module: nn.Module) -> dict[str, Groups]:
    """The `sums` passed to `use_local` for a module, or for the module it was copied from."""
    hooks = module._forward_pre_hooks.values()
    return next((vars(h)["sums"] for h in hooks if "sums" in getattr(h, "__dict__", {})), {})


def check_alike(parameters: Iterable[tuple[str, nn.Parameter]], groups: Groups) -> None:
    """Raise ValueError on every rank unless the named parameters are equal on all groups' ranks."""
    named = list(parameters)
    sums = torch.stack([local(p.detach()).sum(dtype=torch.float64) for _, p in named])
    for (name, _), alike in zip(named, _alike(sums, groups), strict=True):
        if not alike:
            raise ValueError(
                f"{name}: the ranks hold different values; on every rank, load the same weights or "
                "call torch.manual_seed with the same seed"
            )


def check_same_inputs(inputs: Iterable[Any], groups: Groups) -> None:
    """Raise ValueError on every rank unless integer inputs are equal on all groups' ranks."""
    tensors = (x for x in inputs if isinstance(x, torch.Tensor) and not x.is_floating_point())
    given = [x.double().flatten() for x in tensors]
    if given:
        x = torch.cat(given)
        places = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
        digest = torch.stack((places.new_tensor(len(x)), x.sum(), (x * places.sin()).sum()))
        if not all(_alike(digest, groups)):
            raise ValueError(
                "the ranks of tp and cp received different tokens; pass the same batch to all of "
                "them (use a DistributedSampler only over data ranks)"
            )


def _alike(numbers: torch.Tensor, groups: Groups) -> list[bool]:
    """For each of `numbers`, True if it is the same on the ranks of all groups."""
    low = high = numbers
    for group in groups:  # one after the other, so that each rank sees all ranks' extremes
        low = all_gather(low[None], group).amin(0)
        high = all_gather(high[None], group).amax(0)
    return (low == high).tolist()


def saver(model: Any) -> Any:
    """`save_pretrained` for a model with sharded parameters: rank 0 writes the logical tensors."""
    before = model.save_pretrained

    def save_pretrained(*args: Any, state_dict: dict | None = None, **kwargs: Any) -> None:
        """Save like transformers; every rank must call it."""
        given = model.state_dict(keep_vars=True) if state_dict is None else state_dict
        first = dist.get_rank() == 0
        gathered: dict[int, Any] = {}  # tied parameters once, so that transformers sees the tie
        for value in given.values():
            if id(value) not in gathered:
                found = whole(value.detach())
                gathered[id(value)] = found.cpu() if first else None
        if first:  # all gathers are done: this rank waits for no other
            told = model.config.__dict__.pop("distributed_config", None)
            tensors = {name: gathered[id(value)] for name, value in given.items()}
            try:
                before(*args, state_dict=tensors, **kwargs)
            finally:
                if told is not None:
                    model.config.distributed_config = told
        dist.barrier()

    return save_pretrained
