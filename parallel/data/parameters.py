"""A unit's parameters in one flat buffer: replicated, or a slice on each rank (ZeRO 3).

``unshard`` starts an all-gather and ``wait`` ends it, so the all-gather of one unit's parameters is
hidden behind the computation of another:

    ZeRO 3, forward of blocks 0, 1, 2
    network   gather 0 | gather 1   | gather 2   |
    compute            | F0, free 0 | F1, free 1 | F2, free 2

Weight stashing (PipeDream, arXiv:1806.03377) keeps several versions. Each is a buffer that is not
written again after its update. An update uses the next buffer, and a forward or backward pass
points the parameters to the buffer of its version (`show`). No weights are copied back and forth.
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
        group: the ranks over which parameters are sharded; None for a single rank.
        sharded: ZeRO 3: keep only this rank's slice between uses.
        device: of the buffers.

    Attributes:
        layout, params, group: as given.
        flat: [layout.size], the gathered buffer of the newest version; it has no memory unless
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
        self._older: list[Tensor] = []  # buffers of older versions, the newest first
        for record, param in params:
            if tuple(param.shape) != record.local_shape:
                raise ValueError(
                    f"parameter {record.name}: expected shape {record.local_shape}, the local "
                    f"shape of its ParamRecord, got {tuple(param.shape)}"
                )
            value = None if param.is_meta else param.detach()
            if param.is_meta:  # a parameter cannot change its device by assignment
                torch.utils.swap_tensors(
                    param, nn.Parameter(torch.empty(0, dtype=dtype, device=device))
                )
            # Assigning ``.data`` keeps the parameter's version counter, so autograd accepts that
            # the flat buffer is freed and gathered again between forward and backward.
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
        """Start the all-gather of sharded parameters unless they are gathered; `wait` ends it."""
        if self.materialised or self._gather is not None:
            return
        allocate(self.flat)
        self._gather = all_gather_into(self.flat, self.shard, group=self.group, async_op=True)

    def publish(self) -> None:
        """Start the all-gather of replicated parameters of which each rank has updated a slice
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
        """Number of versions that exist: those of 0 (the newest) to `kept` - 1 updates ago."""
        return 1 + len(self._older)

    def keep_versions(self, count: int) -> None:
        """Keep the `count` newest versions from now on.

        Raises:
            ValueError: `count` is less than 1, or more than 1 for sharded parameters (ZeRO 3).
        """
        if count < 1 or (count > 1 and self.shard is not None):
            raise ValueError(
                "versions must be at least 1, and exactly 1 if ZeRO 3 shards parameters, got "
                f"{count}"
            )
        self._versions = count

    @torch.no_grad()
    def fill_versions(self) -> None:
        """Create all versions that are kept, equal to the newest."""
        self.wait()
        self._older = [self.flat.clone() for _ in range(self._versions - 1)]

    def older(self, age: int) -> Tensor:
        """Return the buffer [layout.size] of `age` >= 1 updates ago, which must be kept."""
        return self._older[age - 1]

    @torch.no_grad()
    def next_version(self, region: slice) -> None:
        """Prepare an in-place update of `region`. If older versions are kept, the newest becomes
        one of them, and `flat` becomes a buffer with its values in `region`, in the memory of the
        oldest."""
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
        """Point the parameters to those of `age` updates ago, which must be kept."""
        if age != self._shown:
            self._point_to(self.older(age) if age else self.flat)
            self._shown = age

    def _point_to(self, buffer: Tensor) -> None:
        for record, param in self.params:
            param.data = self.layout.view(buffer, record)

    @torch.no_grad()
    def set(self, whole: Tensor, age: int = 0) -> None:
        """Set the parameters to `whole` [layout.size], of any dtype, the same on every data rank.
        This sets all versions that are kept, or only the one of `age` updates ago."""
        self.wait()  # otherwise a pending all-gather would restore the old values
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
