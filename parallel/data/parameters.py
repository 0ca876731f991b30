"""A unit's parameters in one flat buffer: replicated, or a slice on each rank (ZeRO 3).

``unshard`` starts an all-gather and ``wait`` ends it, so that the all-gather of one unit's
parameters is hidden behind the computation of another:

    ZeRO 3, forward of blocks 0, 1, 2
    network   gather 0 | gather 1   | gather 2   |
    compute            | F0, free 0 | F1, free 1 | F2, free 2

Weight stashing (PipeDream, arXiv:1806.03377) keeps several versions: each is a buffer that nobody
writes once it has been updated. An update takes the next buffer, and a forward or backward pass has
the parameters point to the buffer of its version (`show`); no weights are copied back and forth.
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
    """Parameters as views of one flat buffer, and its all-gather over the shard group.

    Args:
        layout: the offsets and slices.
        params: (record, parameter) pairs of one dtype; their ``.data`` become views.
        group: the ranks over which parameters are sharded; None is one.
        sharded: ZeRO 3: between uses only this rank's slice is kept.
        device: of the buffers.

    Attributes:
        layout, params, group: as given.
        flat: [layout.size], the gathered buffer of the newest version; without memory while not
            `materialised`.
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
        self._versions, self._shown = 1, 0
        self._older: list[Tensor] = []  # buffers of older versions, the newest of them first
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
            # Assigning ``.data`` keeps the parameter's version counter, so that autograd accepts
            # that the flat buffer is freed and gathered again between forward and backward.
            param.data = layout.view(self.flat, record)
            if value is not None:
                param.data.copy_(value)
        if self.shard is not None:
            self.shard.copy_(self.flat[layout.own])
            self.reshard()

    @property
    def own(self) -> Tensor:
        """This rank's slice [layout.slice_size], in the memory that persists between uses."""
        return self.flat[self.layout.own] if self.shard is None else self.shard

    def unshard(self) -> None:
        """Start the all-gather of sharded parameters, unless they are gathered; `wait` ends it."""
        if self.materialised or self._gather is not None:
            return
        allocate(self.flat)
        self._gather = all_gather_into(self.flat, self.shard, group=self.group, async_op=True)

    def publish(self) -> None:
        """Start the all-gather of the slices of replicated parameters that each rank has updated
        (ZeRO 1 and 2); `wait` ends it."""
        self._gather = all_gather_into(self.flat, self.own, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the all-gather that `unshard` or `publish` started."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            self.materialised = True

    def reshard(self) -> None:
        """Free the gathered parameters of a sharded unit; this rank's slice stays."""
        if self.shard is not None and self.materialised:
            free(self.flat)
            self.materialised = False

    # ------------------------------------------------------------------ versions

    @property
    def kept(self) -> int:
        """How many versions are there: those of age 0 (the newest) to `kept` - 1 updates."""
        return 1 + len(self._older)

    def keep_versions(self, count: int) -> None:
        """Keep the `count` newest versions from now on.

        Raises:
            ValueError: none, or several of sharded parameters (ZeRO 3).
        """
        if count < 1 or (count > 1 and self.shard is not None):
            raise ValueError(
                f"versions must be at least 1, and 1 where ZeRO 3 shards parameters, got {count}"
            )
        self._versions = count

    @torch.no_grad()
    def fill_versions(self) -> None:
        """All versions that are kept are there from the beginning: equal to the newest."""
        self.wait()
        self._older = [self.flat.clone() for _ in range(self._versions - 1)]

    def older(self, age: int) -> Tensor:
        """The buffer [layout.size] of `age` >= 1 updates ago, which must be kept."""
        return self._older[age - 1]

    @torch.no_grad()
    def next_version(self, region: slice) -> None:
        """Before an update in place of `region`: if older versions are kept, the newest becomes one
        of them, and `flat` a buffer with its values in `region`. The oldest gives its memory."""
        if self._versions == 1:
            return
        self.wait()
        full = self.kept == self._versions
        buffer = self._older.pop() if full else torch.zeros_like(self.flat)
        buffer[region].copy_(self.flat[region])
        self._older.insert(0, self.flat)
        self.flat = buffer
        self._point_to(buffer)
        self._shown = 0

    def show(self, age: int) -> None:
        """The parameters are those of `age` updates ago, which must be kept."""
        if age != self._shown:
            self._point_to(self.older(age) if age else self.flat)
            self._shown = age

    def _point_to(self, buffer: Tensor) -> None:
        for record, param in self.params:
            param.data = self.layout.view(buffer, record)

    @torch.no_grad()
    def set(self, whole: Tensor, age: int = 0) -> None:
        """Set the parameters to `whole` [layout.size], of any dtype, the same on every data rank:
        all versions that are kept, or only that of `age` updates ago."""
        self.wait()  # or a pending all-gather would restore the old values
        if age:
            self.older(age).copy_(whole)
            return
        for older in self._older:
            older.copy_(whole)
        if self.shard is None:
            self.flat.copy_(whole)
            return
        self.shard.copy_(whole[self.layout.own])
        self.reshard()
