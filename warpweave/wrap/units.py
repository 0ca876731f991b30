"""ZeRO units of modules, their optimizer, and their tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpweave.parallel.data.optimizer import Muon, Rule
from warpweave.parallel.data.unit import Unit, guard_state_dict, make_unit, read_units
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.parallel.shard import ParamRecord


def make_units(
    name: str,
    params: Iterable[tuple[ParamRecord, nn.Parameter]],
    mesh: ConnectedMesh,
    zero: int,
) -> tuple[Unit, ...]:
    """Return the ZeRO units of some parameters, one for each dtype.

    Frozen parameters are left as they are. The others get the values of the first data rank, and
    become views of flat buffers. Collective over the data ranks.
    """
    group, kinds = mesh.group("data"), dict[tuple, list[tuple[ParamRecord, nn.Parameter]]]()
    for record, param in params:
        if param.is_meta:
            raise ValueError(
                f"{record.name} is on the meta device; materialize and initialize it first"
            )
        if group is not None:
            dist.broadcast(param.data, group=group, group_src=0)
        if param.requires_grad:
            kind = param.dtype, record.sum_over, param.device
            kinds.setdefault(kind, []).append((record, param))
    return tuple(
        make_unit(name, pairs, mesh, zero=zero, device=device)
        for (_, _, device), pairs in kinds.items()
    )


def share_buffers(module: nn.Module, mesh: ConnectedMesh) -> None:
    """Set a module's buffers to those of the first data rank. Collective over the data ranks."""
    group = mesh.group("data")
    if group is not None:
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)


class Sharded:
    """The ZeRO units of this rank, in the same order on all ranks of a stage, with their optimizer.

    Gradients are divided by `divisor`: a mean over data ranks instead of a sum.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        mesh: ConnectedMesh,
        rule: Rule,
        clip: float | None,
        *,
        divisor: int = 1,
    ) -> None:
        self.units, self.mesh = list(units), mesh
        if not self.units:
            raise ValueError(f"rank {mesh.rank} has no parameter that requires a gradient")
        if isinstance(rule, Muon) and not any(r.matrices for u in self.units for r, _ in u.params):
            raise ValueError(
                "Muon updates only the weight matrices of warpweave's layers, and the modules of "
                f"rank {mesh.rank} have none; use AdamW"
            )
        self.optimizer = ZeroOptimizer(self.units, mesh, rule, clip=clip, divisor=divisor)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole CPU tensor) of what this rank writes into a checkpoint.

        These are the weights that are trained, under their parameters' names, and their moments,
        "exp_avg/NAME" and so on; not frozen parameters and buffers. Each tensor is yielded by
        exactly one rank. Collective over the data and tensor ranks: pass the result to
        `save_checkpoint` on every rank.
        """
        for kind in ("param", *self.optimizer.rule.moments):
            prefix = "" if kind == "param" else f"{kind}/"
            for record, tensor, mine in read_units(self.units, kind, self.mesh):
                if mine:
                    yield prefix + record.name, tensor.cpu()

    def load(self, tensor: Callable[[str], Tensor]) -> None:
        """Set weights and moments to ``tensor(name)``, whole tensors under the names of `tensors`,
        on any mesh."""
        for kind in ("param", *self.optimizer.rule.moments):
            prefix = "" if kind == "param" else f"{kind}/"
            for unit in self.units:
                unit.write(kind, partial(self._own_part, tensor, prefix))

    def _own_part(
        self, tensor: Callable[[str], Tensor], prefix: str, record: ParamRecord
    ) -> Tensor:
        return record.slice(tensor(prefix + record.name), self.mesh.coords)

    def state(self) -> dict[str, float]:
        """Return the optimizer's state besides tensors, as JSON numbers for a checkpoint."""
        return self.optimizer.state()

    def load_state(self, state: Mapping[str, float]) -> None:
        """Set what `state` returned."""
        self.optimizer.load_state(dict(state))

    def _guard(self, module: nn.Module) -> None:
        """Make ``state_dict`` wait for a pending all-gather and refuse sharded parameters, and
        refuse ``load_state_dict``, which would not reach master weights."""

        def refuse(*given: object) -> None:
            raise RuntimeError("load_state_dict() would not set master weights; use load()")

        guard_state_dict(module, self.units, "tensors()")
        module.register_load_state_dict_pre_hook(refuse)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter, or the CPU."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device
