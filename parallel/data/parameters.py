"""A unit's parameters in one flat buffer: whole on every rank, or a slice on each (ZeRO 3).

``unshard`` starts an all-gather and ``wait`` ends it, so that a unit's parameters travel while
another unit computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpweave.parallel.collectives import all_gather_into
from warpweave.parallel.data.flat import FlatLayout, allocate, free
from warpweave.parallel.shard import ParamRecord


class FlatParameters:
    """Storage of parameters as views of one flat buffer, and its gathering over the shard group.

    Args:
        layout: where each of them lies.
        params: (record, parameter) pairs of one dtype; their ``.data`` become views.
        group: the ranks that shards lie over; None is one.
        sharded: between uses only this rank's slice is kept.
        device: where the buffers live.

    Attributes:
        layout, params, group: as given.
        flat: [layout.size], the whole buffer; without memory while not `materialised`.
        shard: [layout.slice_size], this rank's slice of sharded parameters; otherwise None.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[tuple[ParamRecord, nn.Parameter]],
        group: dist.ProcessGroup | None,
        *,
        sharded: bool,
        device: torch.device,
    ) -> None:
        self.layout, self.params, self.group = layout, list(params), group
        dtype = params[0][1].dtype
        self.flat = torch.zeros(layout.size, dtype=dtype, device=device)
        self.shard = self.flat.new_zeros(layout.slice_size) if sharded else None
        self.materialised = True
        self._gather: dist.Work | None = None
        for record, param in params:
            if tuple(param.shape) != record.local_shape:
                raise ValueError(
                    f"parameter {record.name} has shape {tuple(param.shape)}, "
                    f"its record says {record.local_shape}"
                )
            value = None if param.is_meta else param.detach()
            if param.is_meta:  # a parameter cannot change its device by assignment
                torch.utils.swap_tensors(
                    param, nn.Parameter(torch.empty(0, dtype=dtype, device=device))
                )
            # Assigning ``.data`` keeps the parameter's own version counter: autograd does not mind
            # that the flat buffer is freed and gathered again between forward and backward.
            param.data = layout.view(self.flat, record)
            if value is not None:
                param.data.copy_(value)
        if self.shard is not None:
            self.shard.copy_(self.flat[layout.own])
            self.reshard()

    @property
    def own(self) -> Tensor:
        """This rank's slice [layout.slice_size], where it persists."""
        return self.flat[self.layout.own] if self.shard is None else self.shard

    def unshard(self) -> None:
        """Start gathering the parameters, if they are not there; `wait` finishes it."""
        if self.materialised or self._gather is not None:
            return
        allocate(self.flat)
        self._gather = all_gather_into(self.flat, self.shard, group=self.group, async_op=True)

    def publish(self) -> None:
        """Start giving every rank the slices of whole parameters that the others updated."""
        self._gather = all_gather_into(self.flat, self.own, group=self.group, async_op=True)

    def wait(self) -> None:
        """Finish a gather that `unshard` or `publish` started: the parameters are now usable."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            self.materialised = True

    def reshard(self) -> None:
        """Free the gathered parameters of a sharded unit; their own slice stays."""
        if self.shard is not None and self.materialised:
            free(self.flat)
            self.materialised = False

    @torch.no_grad()
    def set(self, whole: Tensor) -> None:
        """Take the values `whole` [layout.size], of any dtype; the same on every data rank."""
        self.wait()  # a gather in flight would put the old values back
        if self.shard is None:
            self.flat.copy_(whole)
            return
        self.shard.copy_(whole[self.layout.own])
        self.reshard()
