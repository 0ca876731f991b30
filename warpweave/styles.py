"""Our tensor-parallel layers as torch's parallel styles, for `parallelize_module`.

    plan = {"up": ColwiseParallel(overlap="chunked"), "down": RowwiseParallel(overlap="chunked")}
    parallelize_module(model, mesh["tp"], plan)

Names, arguments and layouts are those of `torch.distributed.tensor.parallel`, beside whose styles
these may stand in a plan; what runs are the functions of `parallel.tensor`, whose messages hide
under the products by `overlap`. Parameters become DTensors, cut as by torch, with the numbers of
the mesh's first rank, so that optimizers, clipping and saving see whole ones. For sequences that
are cut as well:

    ColwiseParallel(input_layouts=Shard(1))    x[B, S/R, E] is gathered under the product
    RowwiseParallel(output_layouts=Shard(1))   y[B, S/R, E] is the scattered sum
    SequenceParallel()                         between them, a norm's own tokens: no message forward

`warpweave.hf.styles` are the same as words of a `tp_plan` of transformers.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from warpweave.parallel.collectives import copy_to, gather, group_size, own_slice, scatter
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor import (
    column_parallel_linear,
    row_parallel_linear,
    vocab_parallel_embedding,
)
from warpweave.parallel.tensor.overlap import check_overlap
from warpweave.shards import local, padded, use_local

Group = dist.ProcessGroup | None


class Style(ParallelStyle):
    """What columns and rows share.

    Args:
        input_layouts, output_layouts: how tokens and features lie on the ranks, outside.
        use_local_output: give a plain tensor, not a DTensor.
        overlap, workspace: as `column_parallel_linear` takes them; "fused" needs the latter.

    Raises ValueError on a layout or an overlap that there is not; where it is put on a module, if
    the module is of another class or the ranks do not divide its features.
    """

    inputs: Placement = Replicate()  # the default
    outputs: Placement = Replicate()
    modules: tuple[type, ...] = (nn.Linear,)

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        overlap: str = "auto",
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__()
        self.input_layouts = self.inputs if input_layouts is None else input_layouts
        self.output_layouts = self.outputs if output_layouts is None else output_layouts
        self.use_local_output = use_local_output
        self.over: dict[str, Any] = {"overlap": check_overlap(overlap), "workspace": workspace}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh.size())
        for name in list(module._parameters):
            self.cut(module, name, device_mesh, self.src_data_rank)
        self.install(module, device_mesh)
        return module

    def cut(self, module: Any, name: str, mesh: DeviceMesh, source: int | None) -> None:
        """Make a parameter of the module a DTensor, of this rank's numbers if `source` is None."""
        p = module._parameters[name]
        if p is not None:
            placements = [self.placement(module, name)]
            shard = distribute_tensor(p.detach(), mesh, placements, src_data_rank=source)
            module._parameters[name] = nn.Parameter(shard, p.requires_grad)

    def check(self, module: Any, ranks: int) -> None:
        """Raise ValueError, naming the module, if this style cannot be put on it."""
        if type(module) not in self.modules:
            known = " or ".join(kind.__name__ for kind in self.modules)
            raise ValueError(f"{type(self).__name__} cuts {known}, not {type(module).__name__}")

    def placement(self, module: Any, name: str) -> Placement:
        """How a parameter of the module lies on the ranks."""
        raise NotImplementedError

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replace the forward of a module whose parameters are cut."""
        module.forward = MethodType(self._forward_on(mesh), module)

    def _forward_on(self, mesh: DeviceMesh) -> Any:
        def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
            y = self._compute(module, _local(x, mesh, self.input_layouts), mesh.get_group())
            if self.use_local_output:
                return y
            return DTensor.from_local(y, mesh, [self.output_layouts], run_check=False)

        return forward

    def _compute(self, module: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        raise NotImplementedError

    def _refuse(self, what: str, found: Placement) -> ValueError:
        return ValueError(f"{type(self).__name__}: {what} cannot be {found}")

    def _check_features(self, what: str, features: int, ranks: int) -> None:
        if features % ranks:
            raise ValueError(
                f"{type(self).__name__}: {features} {what} features do not divide by {ranks} ranks"
            )


class ColwiseParallel(Style):
    """A linear layer whose output features are cut.

    `input_layouts` is Replicate() or tokens, Shard(0) or Shard(1) of three dims; `output_layouts`
    Shard(-1), or Replicate(), for which the ranks need not divide the features. Others as `Style`.
    """

    outputs = Shard(-1)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tokens = _tokens_of(self.input_layouts)
        if self._tokens is None and self.input_layouts != Replicate():
            raise self._refuse("input_layouts", self.input_layouts)
        if self.output_layouts not in (Shard(-1), Replicate()):
            raise self._refuse("output_layouts", self.output_layouts)
        self._whole = self.output_layouts == Replicate()

    def check(self, module: Any, ranks: int) -> None:
        super().check(module, ranks)
        if not self._whole:
            self._check_features("output", module.out_features, ranks)

    def placement(self, module: Any, name: str) -> Placement:
        return Replicate() if self._whole and name == "bias" else Shard(0)

    def _compute(self, module: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        if self._tokens is not None:
            over = {**self.over, "group": group, "sequence_parallel": True}
            x = x.movedim(self._tokens, 0)
        else:
            over = {**self.over, "group": group}
        if self._whole:
            y = project(module, x, **over)
        else:
            y = column_parallel_linear(x, local(module.weight), _bias(module), **over)
        return y if self._tokens is None else y.movedim(0, self._tokens)


class RowwiseParallel(Style):
    """A linear layer whose input features are cut, or an embedding whose rows are.

    `input_layouts` is Shard(-1), or Replicate() where each rank takes its features of x (always, of
    the ids of an embedding); `output_layouts` Replicate() or tokens, Shard(0) or Shard(1) of three
    dims. Others as `Style`.
    """

    inputs = Shard(-1)
    modules = (nn.Linear, nn.Embedding)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tokens = _tokens_of(self.output_layouts)
        if self.input_layouts not in (Shard(-1), Replicate()):
            raise self._refuse("input_layouts", self.input_layouts)
        if self._tokens is None and self.output_layouts != Replicate():
            raise self._refuse("output_layouts", self.output_layouts)

    def check(self, module: Any, ranks: int) -> None:
        super().check(module, ranks)
        if type(module) is nn.Linear:
            self._check_features("input", module.in_features, ranks)
        elif self.input_layouts != Replicate():
            raise self._refuse("input_layouts of an embedding", self.input_layouts)
        elif module.max_norm is not None:
            raise ValueError(f"{type(self).__name__}: an embedding with max_norm is not cut")

    def placement(self, module: Any, name: str) -> Placement:
        if type(module) is nn.Embedding:
            return Shard(0)
        return Replicate() if name == "bias" else Shard(1)

    def _compute(self, module: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        sequence = self._tokens is not None
        if type(module) is nn.Embedding:
            ids = x.movedim(self._tokens, 0) if sequence else x
            y = look_up(module, ids, group, sequence_parallel=sequence)
            return y.movedim(0, self._tokens) if sequence else y
        if self.input_layouts == Replicate():
            x = scatter(x, group, dim=-1)
        w, b = local(module.weight), _bias(module)
        over = {**self.over, "group": group}
        if self._tokens is None:
            return row_parallel_linear(x, w, b, **over)
        b = None if b is None else copy_to(b, group)  # each rank adds it to tokens of its own
        y = row_parallel_linear(x.movedim(self._tokens, 0), w, b, sequence_parallel=True, **over)
        return y.movedim(0, self._tokens)


class SequenceParallel(ParallelStyle):
    """A module, as a norm, that computes each token alone, of a sequence that is cut.

    Nothing is sent forward, and backward the sums of its parameters' gradients.

    Args:
        sequence_dim: the dim of x that is cut.
        use_local_output: give a plain tensor, not a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__()
        self.layout, self.use_local_output = Shard(sequence_dim), use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh, sums = device_mesh, (device_mesh.get_group(),)
        for part in module.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    whole = distribute_tensor(
                        p.detach(), mesh, [Replicate()], src_data_rank=self.src_data_rank
                    )
                    part._parameters[name] = nn.Parameter(whole, p.requires_grad)
            use_local(part, dict.fromkeys(part._parameters, sums))

        def enter(_: nn.Module, args: tuple) -> tuple:
            return (_local(args[0], mesh, self.layout), *args[1:])

        def leave(_: nn.Module, args: tuple, y: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(y, mesh, [self.layout], run_check=False)

        module.register_forward_pre_hook(enter)
        if not self.use_local_output:
            module.register_forward_hook(leave)
        return module


# ---------------------------------------------------------------- over a cut vocabulary


def look_up(
    module: Any, ids: torch.Tensor, group: Group, *, sequence_parallel: bool = False
) -> torch.Tensor:
    """y[..., E] of an embedding whose rows are cut into parts of ceil(V/R), the last one shorter.

    Args:
        module: an `nn.Embedding`, whose `padding_idx` learns nothing.
        ids: int64[...], whole on every rank.
        group: the tensor ranks.
        sequence_parallel: cut dim 0 of the output over them.
    """
    w = padded(local(module.weight), module.num_embeddings, group_size(group))
    y = vocab_parallel_embedding(
        ids, w, group=group, vocab_size=module.num_embeddings, sequence_parallel=sequence_parallel
    )
    if module.padding_idx is None:
        return y
    if sequence_parallel:
        ids = own_slice(ids, group)
    return torch.where((ids == module.padding_idx)[..., None], y.detach(), y)


def project(module: Any, x: torch.Tensor, *, group: Group, **over: Any) -> torch.Tensor:
    """The whole y[..., V] of a linear layer whose rows are cut into parts of ceil(V/R), the last
    one shorter, and whose bias is whole; `over` is what `column_parallel_linear` is told."""
    w = padded(local(module.weight), module.out_features, group_size(group))
    y = gather(column_parallel_linear(x, w, group=group, **over), group, dim=-1)
    b = _bias(module)
    return y[..., : module.out_features] if b is None else y[..., : module.out_features] + b


def _bias(module: Any) -> torch.Tensor | None:
    return None if module.bias is None else local(module.bias)


def _tokens_of(layout: Placement) -> int | None:
    """The dim along which tokens are cut, None where they are not."""
    return layout.dim if isinstance(layout, Shard) and layout.dim in (0, 1) else None


def _local(x: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> torch.Tensor:
    """This rank's part of x, which lies on the ranks by `layout` if it is plain."""
    return x.redistribute(mesh, [layout]).to_local() if isinstance(x, DTensor) else x
