"""Column- and row-parallel linear layers (Shoeybi et al. 2019, arXiv:1909.08053).

On one device (``mesh=None``) both behave like ``nn.Linear``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from warpweave.layers.keywords import fields_as_keywords
from warpweave.layers.place import Place
from warpweave.parallel.collectives import gather, scatter
from warpweave.parallel.mesh import connected
from warpweave.parallel.shard import Cut, ParamRecord
from warpweave.parallel.tensor.linear import column_parallel_linear, row_parallel_linear

_UNUSED = ("strategy", "recompute", "impl")  # fields of `Place` that a linear layer does not use


def check_divides(what: str, size: int, tp: int) -> None:
    """Raise ValueError unless the tensor axis can share `size` features or heads evenly."""
    if size % tp:
        raise ValueError(f"{what} ({size}) is not divisible by the size of the mesh axis tp ({tp})")


class _ParallelLinear(nn.Module):
    """Base class of both layers: parameters, records, and ``nn.Linear``'s initialization."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        shard_dim: int,
        init: float,
        place: Place,
        matrices: tuple[int, ...] = (1,),
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.mesh = connected(place.mesh)
        self.sequence_parallel, self.overlap = place.sequence_parallel, place.overlap
        factory = {"device": place.device, "dtype": place.dtype}
        tp = self.mesh.size("tp")
        cut = "in_features" if shard_dim else "out_features"
        check_divides(cut, in_features if shard_dim else out_features, tp)
        cuts: tuple[Cut, ...] = (Cut("tp", shard_dim, tp),)
        shape = (out_features, in_features)
        weight = ParamRecord("weight", shape, cuts, init=init, matrices=matrices)
        self.records = {"weight": weight}
        self.weight = nn.Parameter(torch.empty(weight.local_shape, **factory))
        self.register_parameter("bias", None)
        if bias:
            # A row-parallel bias is added after the sum over ranks; with sequence parallelism each
            # rank adds it to its own tokens, so that its gradient is a partial sum.
            whole = shard_dim == 1
            cuts = () if whole else cuts
            partial = ("tp",) if whole and self.sequence_parallel and tp > 1 else ()
            record = ParamRecord("bias", (out_features,), cuts, partial, init="zeros", decay=False)
            self.records["bias"] = record
            self.bias = nn.Parameter(torch.empty(record.local_shape, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as ``nn.Linear`` does, from torch's global generator. Every rank draws the
        whole weight and keeps its shard. With the same ``torch.manual_seed`` on all ranks, the
        layer equals the one on a single device."""
        if self.weight.is_meta:
            return
        here = self.mesh.coords
        full = self.weight.new_empty(self.records["weight"].shape)  # in its dtype, on its device
        nn.init.kaiming_uniform_(full, a=math.sqrt(5))
        self.weight.copy_(self.records["weight"].slice(full, here))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            full = self.bias.new_empty(self.out_features).uniform_(-bound, bound)
            self.bias.copy_(self.records["bias"].slice(full, here))

    @property
    def over_ranks(self) -> dict[str, Any]:
        """Keyword arguments for a function over the tensor ranks."""
        return {
            "group": self.mesh.group("tp"),
            "sequence_parallel": self.sequence_parallel,
            "overlap": self.overlap,
            "workspace": self.mesh.workspace("tp"),
        }

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tp={self.mesh.size('tp')}, "
            f"sequence_parallel={self.sequence_parallel}, overlap={self.overlap!r}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """Column-parallel linear layer ``y = x W^T + b``: output features sharded over the tensor axis.

    weight[out/tp, in], bias[out/tp]. The arguments of ``nn.Linear``, then:

    Args:
        mesh: the connected mesh; None is one device.
        sequence_parallel: the input is x[T/tp, in], tokens sharded over the tensor axis, and is
            all-gathered; otherwise it is x[..., in], the same on every tensor rank.
        overlap: overlap of collectives with matrix products: "none", "bulk", "chunked" or "fused",
            see ``parallel.tensor.ranks``.
        place: a `Place`, instead of these options, device and dtype.
        gather_output: return y[..., out], all-gathered, instead of y[..., out/tp].
        init: standard deviation of the weight in a keyed initialization (``GPT``).
        matrices: if several linear maps are fused in the weight, the number of rows of each per
            turn (`ParamRecord`).

    Raises:
        ValueError: out_features is not divisible by tp.

    Examples:
        >>> from warpweave import Mesh
        >>> mesh = Mesh().connect()  # under torchrun: Mesh(tp=2).connect()
        >>> ColumnParallelLinear(64, 256, mesh=mesh)(torch.randn(2, 16, 64)).shape  # 256 / tp
        torch.Size([2, 16, 256])
    """

    @fields_as_keywords("device", "dtype", unused=_UNUSED, place=Place)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        place: Place,
        gather_output: bool = False,
        init: float = 0.02,
        matrices: tuple[int, ...] = (1,),
    ) -> None:
        super().__init__(in_features, out_features, bias, 0, init, place, matrices)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """x[..., in] (or x[T/tp, in] with sequence parallelism) -> y[..., out/tp]."""
        y = column_parallel_linear(x, self.weight, self.bias, **self.over_ranks)
        return gather(y, self.mesh.group("tp"), dim=-1) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """Row-parallel linear layer ``y = sum over r of x_r W_r^T + b``: input features sharded over
    the tensor axis.

    weight[out, in/tp], bias[out], added once. The arguments of ``nn.Linear``, then:

    Args:
        mesh: the connected mesh; None is one device.
        sequence_parallel: the output is y[T/tp, out], reduce-scattered over the tensor axis;
            otherwise y[..., out], all-reduced.
        overlap, place, init: as for ``ColumnParallelLinear``.
        input_is_parallel: the input is x[..., in/tp], already sharded; otherwise it is x[..., in],
            and each rank uses its own slice.

    Raises:
        ValueError: in_features is not divisible by tp.

    Examples:
        >>> from warpweave import ColumnParallelLinear, Mesh
        >>> mesh = Mesh().connect()  # under torchrun: Mesh(tp=2).connect()
        >>> up = ColumnParallelLinear(64, 256, mesh=mesh)
        >>> down = RowParallelLinear(256, 64, mesh=mesh)
        >>> down(up(torch.randn(2, 16, 64)).relu()).shape
        torch.Size([2, 16, 64])
    """

    @fields_as_keywords("device", "dtype", unused=_UNUSED, place=Place)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        place: Place,
        input_is_parallel: bool = True,
        init: float = 0.02,
    ) -> None:
        super().__init__(in_features, out_features, bias, 1, init, place)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        """x[..., in/tp] -> y[..., out] (or y[T/tp, out] with sequence parallelism). Without
        `add_bias`, the caller must add the bias, for example in a norm as its ``x_bias``."""
        if not self.input_is_parallel:
            x = scatter(x, self.mesh.group("tp"), dim=-1)
        bias = self.bias if add_bias else None
        return row_parallel_linear(x, self.weight, bias, **self.over_ranks)


def fusable(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a fused Function may use the parameters of `module` without calling it.

    It may if the module is a plain `kind`: not wrapped, replaced, sharded or hooked. Adapters,
    quantizers and parametrizations replace a module or its class. FSDP2 changes its class and frees
    its parameters outside its forward. All of them rely on the module being called.
    """
    return type(module) is kind and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Return True if calling a module does more than run its forward."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after or module._backward_hooks or module._backward_pre_hooks)
