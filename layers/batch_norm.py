"""Synchronized BatchNorm: normalization over the samples of all data ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from warpweave.parallel.data.batch_norm import Moments, is_recomputing, sync_batch_norm
from warpweave.parallel.mesh import ConnectedMesh, connected


class SyncBatchNorm(_BatchNorm):
    """``nn.BatchNorm1d`` to ``3d`` over the batch of all data ranks, like ``nn.SyncBatchNorm``.

    It also works on CPUs, and with any number of samples per rank, even none.

    In training, every rank must call its forward and backward. Each micro-batch is normalized by
    its own moments over all ranks. Each updates the running statistics once, even if activation
    checkpointing runs its forward twice. In evaluation, no rank waits for others.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as for
            ``nn.BatchNorm2d``.
        mesh: the connected mesh, whose data axis is used; None is one device.

    Examples:
        >>> SyncBatchNorm(3)(torch.randn(8, 3, 16, 16)).shape
        torch.Size([8, 3, 16, 16])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: ConnectedMesh | None = None,
    ) -> None:
        factory = {"device": device, "dtype": dtype}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self.mesh = connected(mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x[N, C, ...] -> y of the same shape; ValueError if C is not num_features."""
        if x.ndim < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"expected x[N, {self.num_features}, ...], got {[*x.shape]}")
        weight, bias = self.weight, self.bias
        if not self.training and self.running_mean is not None:
            return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.eps)
        y, moments = sync_batch_norm(x, weight, bias, self.eps, group=self.mesh.group("data"))
        if self.running_mean is not None and not is_recomputing():
            self._track(moments)
        return y

    @torch.no_grad()
    def _track(self, moments: Moments) -> None:
        """Move the running statistics toward the moments, using the unbiased variance. If no rank
        has a value, they stay unchanged."""
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        some = (moments.n > 0).to(moments.n.dtype)
        self.num_batches_tracked += some.to(torch.int64)
        rate = some / self.num_batches_tracked.clamp(min=1)
        if self.momentum is not None:
            rate = some * self.momentum
        var = moments.m2 / (moments.n - 1).clamp(min=1)
        for running, now in ((self.running_mean, moments.mean), (self.running_var, var)):
            running.copy_(running.to(now.dtype).lerp(now, rate))


def convert_sync_batchnorm(module: nn.Module, mesh: ConnectedMesh | None) -> nn.Module:
    """Replace every ``nn.BatchNorm1d`` to ``3d`` in `module` by a `SyncBatchNorm`.

    The replacements run over the mesh's data axis and keep parameters, buffers and mode. Returns
    `module`, or its replacement if `module` itself is a BatchNorm.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> type(convert_sync_batchnorm(model, None)[1]).__name__
        'SyncBatchNorm'
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        given = (module.num_features, module.eps, module.momentum, module.affine)
        new = SyncBatchNorm(*given, module.track_running_stats, device="meta", mesh=mesh)
        new._parameters, new._buffers = module._parameters, module._buffers
        return new.train(module.training)
    for name, child in module._modules.items():  # includes a child that has two names
        if child is not None:
            setattr(module, name, convert_sync_batchnorm(child, mesh))
    return module
