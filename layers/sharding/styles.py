"""Our tensor-parallel layers as torch's parallel styles, for `parallelize_module`.

    plan = {"up": ColwiseParallel(overlap="chunked"), "down": RowwiseParallel(overlap="chunked")}
    parallelize_module(model, mesh["tp"], plan)

Names, arguments and layouts are those of `torch.distributed.tensor.parallel`, and a plan may mix
both libraries' styles. They run the functions of `parallel.tensor`, which overlap collectives with
matrix products according to `overlap`. Parameters become DTensors, sharded as torch shards them,
with the values of the mesh's first rank. Optimizers, clipping and saving see logical tensors.

A layout is Replicate(), or Shard(d): dim d is sharded evenly. The last dim, Shard(-1), holds the
features; any other holds tokens. With sequence parallelism:

    ColwiseParallel(input_layouts=Shard(1))    all-gather of x[B, S/R, E], then the product
    RowwiseParallel(output_layouts=Shard(1))   the product, then reduce-scatter to y[B, S/R, E]
    SequenceParallel()                         norms between them, on S/R tokens, no collective

`warpweave.hf.styles` has the same styles as values of a `tp_plan` of transformers.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from warpweave.layers.sharding.dtensor import local, padded_rows, use_local
from warpweave.parallel.collectives import (
    all_gather,
    copy_to,
    gather,
    group_size,
    own_slice,
    scatter,
)
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor import (
    column_parallel_linear,
    row_parallel_linear,
    vocab_parallel_embedding,
)
from warpweave.parallel.tensor.ranks import check_overlap

Group = dist.ProcessGroup | None


class Style(ParallelStyle):
    """Base of `ColwiseParallel` and `RowwiseParallel`: linear layers and embeddings with a sharded
    weight.

    Args:
        input_layouts, output_layouts: layouts of input and output, Replicate() or Shard(d); the
            sharded dim must be divisible by the number of ranks.
        use_local_output: return a plain tensor, not a DTensor.
        overlap, workspace: as for `column_parallel_linear`; "fused" requires a workspace.

    Raises ValueError for an unknown layout or overlap. When applied to a module, raises ValueError
    if the module has a different class or its features are not divisible by the ranks. When called,
    raises ValueError if the tensor does not have a layout's dim, or that is not divisible by the
    ranks.
    """

    inputs: Placement = Replicate()  # the default
    outputs: Placement = Replicate()

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        overlap: str = "bulk",
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__()
        self.input_layouts = self.inputs if input_layouts is None else input_layouts
        self.output_layouts = self.outputs if output_layouts is None else output_layouts
        for what in ("input_layouts", "output_layouts"):
            if type(getattr(self, what)) not in (Replicate, Shard):
                raise ValueError(
                    f"{type(self).__name__}: {what} cannot be {getattr(self, what)}; pass "
                    "Replicate() or Shard(d)"
                )
        self.use_local_output = use_local_output
        self.over: dict[str, Any] = {"overlap": check_overlap(overlap), "workspace": workspace}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh.size())
        for name in module._parameters:
            self.cut(module, name, device_mesh, self.src_data_rank)
        self.install(module, device_mesh)
        return module

    def cut(self, module: Any, name: str, mesh: DeviceMesh, source: int | None) -> None:
        """Make a parameter of the module a DTensor with the values of rank `source` of the mesh. If
        `source` is None, each rank uses its own values."""
        _distribute(module, name, mesh, self.placement(module, name), source)

    def check(self, module: Any, ranks: int) -> None:
        """Raise ValueError, naming the module, if this style cannot be applied to it."""
        if type(module) not in (nn.Linear, nn.Embedding):
            kind = type(module).__name__
            raise ValueError(f"{type(self).__name__} shards Linear or Embedding, not {kind}")
        if type(module) is nn.Embedding and not is_plain_embedding(module):
            raise ValueError(
                f"{type(self).__name__}: an embedding with max_norm, scale_grad_by_freq or sparse "
                "cannot be sharded"
            )

    def placement(self, module: Any, name: str) -> Placement:
        """The placement of a parameter of the module."""
        raise NotImplementedError

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replace the forward of a module whose parameters are sharded."""
        module.forward = MethodType(self._forward_on(mesh), module)

    def weight(self, module: Any) -> torch.Tensor:
        """This rank's part of the weight, (out, in)."""
        return local(module.weight)

    def bias(self, module: Any, group: Group) -> torch.Tensor | None:
        """This rank's part of the bias."""
        return _bias(module)

    def _forward_on(self, mesh: DeviceMesh) -> Any:
        name = type(self).__name__

        def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
            x = _local(x, mesh, self.input_layouts, f"{name}: input_layouts")
            ndim = x.ndim + isinstance(module, nn.Embedding)
            dim_of(self.output_layouts, ndim, f"{name}: output_layouts")
            y = self.compute(module, x, mesh.get_group())
            if self.use_local_output:
                return y
            return DTensor.from_local(y, mesh, [self.output_layouts], run_check=False)

        return forward

    def compute(self, module: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """The module's output on this rank in `output_layouts`, for x in `input_layouts`."""
        dim = dim_of(self.input_layouts, x.ndim)
        if type(module) is nn.Embedding:
            ids = x if dim is None else all_gather(x, group, dim)
            return self._look_up(module, ids, group, dim_of(self.output_layouts, x.ndim + 1))
        if x.ndim == 1:  # one token
            dim = None if dim is None else -1
            out = None if self.output_layouts == Replicate() else -1
            return self._multiply(module, x[None], group, dim, out)[0]
        return self._multiply(module, x, group, dim, dim_of(self.output_layouts, x.ndim))

    def _multiply(
        self, module: Any, x: torch.Tensor, group: Group, dim: int | None, out: int | None
    ) -> torch.Tensor:
        """Run a linear layer with x sharded along `dim` and y along `out`. -1 means features, None
        means not sharded."""
        raise NotImplementedError

    def _look_up(self, module: Any, ids: torch.Tensor, group: Group, out: int | None) -> Any:
        """Look up replicated ids in an embedding, with y sharded along `out`."""
        raise NotImplementedError

    def _check_features(self, what: str, features: int, ranks: int) -> None:
        if features % ranks:
            name = type(self).__name__
            raise ValueError(
                f"{name}: {features} {what} features are not divisible by {ranks} ranks"
            )


class ColwiseParallel(Style):
    """A linear layer or an embedding with sharded output features.

    By default, `input_layouts` is Replicate() and `output_layouts` is Shard(-1). The output
    features of a linear layer must be divisible by the ranks, unless the output is Replicate().
    Other arguments as for `Style`.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> up = parallelize_module(nn.Linear(8, 32), mesh, ColwiseParallel())
        >>> up(torch.randn(2, 8)).shape
        torch.Size([2, 32])
    """

    outputs = Shard(-1)

    def check(self, module: Any, ranks: int) -> None:
        super().check(module, ranks)
        looks_up = type(module) is nn.Embedding
        if looks_up or self.output_layouts != Replicate():
            features = module.embedding_dim if looks_up else module.out_features
            self._check_features("output", features, ranks)

    def placement(self, module: Any, name: str) -> Placement:
        if type(module) is nn.Embedding:
            return Shard(1)
        return Replicate() if self.output_layouts == Replicate() and name == "bias" else Shard(0)

    def _multiply(
        self, module: Any, x: torch.Tensor, group: Group, dim: int | None, out: int | None
    ) -> torch.Tensor:
        over, tokens = {**self.over, "group": group}, None
        if dim == -1:
            x, over = all_gather(x, group, -1), {**self.over, "group": None}
        elif dim is not None:
            x, tokens, over["sequence_parallel"] = x.movedim(dim, 0), dim, True
        if out is None:
            y = project(module, x, whole=group, **over)
        else:
            y = column_parallel_linear(x, self.weight(module), self.bias(module, group), **over)
        y = y if tokens is None else y.movedim(0, tokens)
        return y if out in (None, -1) else scatter(gather(y, group, -1), group, out)

    def _look_up(self, module: Any, ids: torch.Tensor, group: Group, out: int | None) -> Any:
        y = F.embedding(ids, local(module.weight), module.padding_idx)
        if out == -1:
            return y
        y = gather(y, group, -1)
        return y if out is None else scatter(y, group, out)


class RowwiseParallel(Style):
    """A linear layer with sharded input features, or an embedding with a sharded vocabulary.

    By default, `input_layouts` is Shard(-1), even for an embedding, whose ids are usually
    Replicate(), and `output_layouts` is Replicate(). Other arguments as for `Style`.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> down = parallelize_module(nn.Linear(32, 8), mesh, RowwiseParallel())
        >>> down(torch.randn(2, 32)).shape
        torch.Size([2, 8])
    """

    inputs = Shard(-1)

    def check(self, module: Any, ranks: int) -> None:
        super().check(module, ranks)
        if type(module) is nn.Linear:
            self._check_features("input", module.in_features, ranks)

    def placement(self, module: Any, name: str) -> Placement:
        if type(module) is nn.Embedding:
            return Shard(0)
        return Replicate() if name == "bias" else Shard(1)

    def _multiply(
        self, module: Any, x: torch.Tensor, group: Group, dim: int | None, out: int | None
    ) -> torch.Tensor:
        if dim != -1:
            x = scatter(x if dim is None else gather(x, group, dim), group, -1)
        w, b = self.weight(module), self.bias(module, group)
        over = {**self.over, "group": group}
        if out in (None, -1):
            y = row_parallel_linear(x, w, b, **over)
            return y if out is None else scatter(y, group, -1)
        b = None if b is None else copy_to(b, group)  # each rank adds it to its own tokens
        y = row_parallel_linear(x.movedim(out, 0), w, b, sequence_parallel=True, **over)
        return y.movedim(0, out)

    def _look_up(self, module: Any, ids: torch.Tensor, group: Group, out: int | None) -> Any:
        if out in (None, -1):
            y = look_up(module, ids, group)
            return y if out is None else scatter(y, group, -1)
        y = look_up(module, ids.movedim(out, 0), group, sequence_parallel=True)
        return y.movedim(0, out)


class SequenceParallel(ParallelStyle):
    """A token-wise module, such as a norm, on a sequence that is sharded over the ranks.

    The forward has no collective. The backward all-reduces the gradients of the parameters.

    Args:
        sequence_dim: the dim of x that is sharded.
        use_local_output: return a plain tensor, not a DTensor.

    Raises ValueError when called if x does not have that dim, or if it is the last (the features).

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> norm = parallelize_module(nn.LayerNorm(8), mesh, SequenceParallel())
        >>> norm(torch.randn(2, 16, 8)).shape
        torch.Size([2, 16, 8])
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__()
        self.layout, self.use_local_output = Shard(sequence_dim), use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh, sums = device_mesh, (device_mesh.get_group(),)
        for part in module.modules():
            for name in part._parameters:
                _distribute(part, name, mesh, Replicate(), self.src_data_rank)
            use_local(part, dict.fromkeys(part._parameters, sums))

        def enter(_: nn.Module, args: tuple) -> tuple:
            x = args[0]
            if dim_of(self.layout, x.ndim, "SequenceParallel: sequence_dim") == -1:
                raise ValueError(
                    f"SequenceParallel: {self.layout} shards the feature dim of a tensor with "
                    f"{x.ndim} dims; shard a token dim"
                )
            return (_local(x, mesh, self.layout, "SequenceParallel: sequence_dim"), *args[1:])

        def leave(_: nn.Module, args: tuple, y: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(y, mesh, [self.layout], run_check=False)

        module.register_forward_pre_hook(enter)
        if not self.use_local_output:
            module.register_forward_hook(leave)
        return module


# ---------------------------------------------------------------- over a sharded vocabulary


def look_up(
    module: Any, ids: torch.Tensor, group: Group, *, sequence_parallel: bool = False
) -> torch.Tensor:
    """Look up ids in an embedding with sharded rows: ceil(V/R) per rank, fewer on the last.

    Returns y[..., E].

    Args:
        module: an `nn.Embedding`; its `padding_idx` gets no gradient.
        ids: int64[...], replicated.
        group: the tensor ranks.
        sequence_parallel: shard dim 0 of the output over the ranks; it must be divisible by them.
    """
    if _does_more(module):
        raise ValueError(
            "an embedding with max_norm, scale_grad_by_freq or sparse cannot be sharded"
        )
    rows, over = module.num_embeddings, {"group": group, "sequence_parallel": sequence_parallel}
    w = padded_rows(local(module.weight), rows, group_size(group))
    own = own_slice(ids, group) if sequence_parallel else ids
    y = vocab_parallel_embedding(ids.flatten(), w, vocab_size=rows, **over).view(*own.shape, -1)
    if module.padding_idx is None:
        return y
    return torch.where((own == module.padding_idx)[..., None], y.detach(), y)


def is_plain_embedding(module: Any) -> bool:
    """Return True if an embedding is a plain lookup, which `look_up` can compute."""
    return type(module) is nn.Embedding and not _does_more(module)


def _does_more(embedding: Any) -> bool:
    return embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse


def project(
    module: Any, x: torch.Tensor, *, group: Group, whole: Group = None, **over: Any
) -> torch.Tensor:
    """Multiply by a linear layer with sharded rows and gather the output y[..., V].

    Each rank has ceil(V/R) rows, fewer on the last. The bias is replicated.

    Args:
        group: the ranks over which x is gathered or its gradient is summed; None if the caller does
            that.
        whole: the ranks over which the rows are sharded, by default `group`.
        over: additional arguments of `column_parallel_linear`.
    """
    whole = group if whole is None else whole
    w = padded_rows(local(module.weight), module.out_features, group_size(whole))
    y = gather(column_parallel_linear(x, w, group=group, **over), whole, dim=-1)
    b = _bias(module)
    return y[..., : module.out_features] if b is None else y[..., : module.out_features] + b


def _distribute(
    module: Any, name: str, mesh: DeviceMesh, where: Placement, source: int | None
) -> None:
    """Make a parameter of the module, if it has one, a DTensor with the values of rank `source`."""
    p = module._parameters[name]
    if p is not None:
        shard = distribute_tensor(p.detach(), mesh, [where], src_data_rank=source)
        module._parameters[name] = nn.Parameter(shard, p.requires_grad)


def _bias(module: Any) -> torch.Tensor | None:
    return None if module.bias is None else local(module.bias)


def dim_of(layout: Placement, ndim: int, what: str = "layout") -> int | None:
    """The dim that `layout` shards in a tensor with `ndim` dims: -1 for the last, None for none."""
    if not isinstance(layout, Shard):
        return None
    if not -ndim <= layout.dim < ndim:
        raise ValueError(f"{what} {layout} is out of range for a tensor with {ndim} dims")
    dim = layout.dim % ndim
    return -1 if dim == ndim - 1 else dim


def _local(x: torch.Tensor, mesh: DeviceMesh, layout: Placement, what: str) -> torch.Tensor:
    """This rank's part of x in `layout`; a plain tensor is already that part."""
    dim = dim_of(layout, x.ndim, what)
    if not isinstance(x, DTensor):
        return x
    if dim is not None and x.shape[dim] % mesh.size():
        raise ValueError(
            f"{what} {layout}: dim size {x.shape[dim]} is not divisible by {mesh.size()} ranks"
        )
    return x.redistribute(mesh, [layout]).to_local()
