"""Layouts and collectives that `explain_sharding` lists on three ranks: bytes and modules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from warpweave.layers.sharding.explain import explain_sharding

R, ELEMENTS = 3, 12
LEAVES = {  # elements of 8 bytes that leave a rank, of the 12 that it has, by rings and trees
    "all_reduce": 2 * ELEMENTS * 2 // R,  # two thirds of them twice
    "all_gather_into_tensor": 2 * ELEMENTS,  # its own, to two others
    "reduce_scatter_tensor": ELEMENTS * 2 // R,
    "all_to_all_single": ELEMENTS * 2 // R,  # all except what stays
    "broadcast": ELEMENTS,
}


class _Sends(nn.Module):
    """A module with a collective of each kind, and a longer all-reduce after the first."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.group = mesh.get_group("a")

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        given: dict[str, Any] = {"group": self.group}
        collectives.wait_tensor(collectives.all_reduce(x, "sum", **given))
        collectives.wait_tensor(collectives.all_reduce(torch.cat([x, x]), "sum", **given))
        collectives.wait_tensor(collectives.all_gather_tensor(x, 0, **given))
        collectives.wait_tensor(collectives.reduce_scatter_tensor(x, "sum", 0, **given))
        collectives.wait_tensor(collectives.all_to_all_single(x, None, None, **given))
        collectives.wait_tensor(collectives.broadcast(x, 0, **given))
        return x, "beside"


class _Places(nn.Module):
    """A module whose result is sharded over both axes, or partial over both; as a tuple or not."""

    def __init__(self, mesh: Any, where: list, *, alone: bool) -> None:
        super().__init__()
        self.mesh, self.where, self.alone = mesh, where, alone

    def forward(self, x: Tensor) -> Any:
        y = DTensor.from_local(x.view(4, 3), self.mesh, self.where, run_check=False)
        return y if self.alone else (y, 1)


class _Model(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()

        def held(where: list) -> DTensor:
            return DTensor.from_local(torch.ones(4, 3), mesh, where, run_check=False)

        self.weight = nn.Parameter(held([Shard(0), Replicate()]))
        self.register_buffer("table", held([Shard(1), Shard(1)]))
        self.register_buffer("plain", torch.ones(3))
        self.inner = nn.Sequential(_Places(mesh, [Shard(0), Shard(0)], alone=True), nn.Identity())
        self.sends, self.partial = _Sends(mesh), _Places(mesh, [Partial(), Partial()], alone=False)

    def forward(self, x: Tensor) -> Tensor:
        self.inner[0](x)
        self.sends(x)
        self.partial(x)
        collectives.wait_tensor(collectives.broadcast(x, 0, group=self.sends.group))
        return x


def _explained(rank: int) -> tuple[list, dict, str, int]:
    mesh = init_device_mesh("cpu", (R, 1), mesh_dim_names=("a", "b"))
    model = _Model(mesh)
    with explain_sharding(model) as seen:
        model(torch.ones(ELEMENTS, dtype=torch.float64))
        x = torch.ones(5, requires_grad=True)
        y = x * 2  # its gradient is sent
        y.register_hook(
            lambda g: collectives.wait_tensor(collectives.broadcast(g, 0, group=model.sends.group))
        )
        y.sum().backward()
    assert seen.counts("a", "forward") == Counter([*LEAVES, "all_reduce", "broadcast"])
    assert seen.counts("a", "backward") == Counter(["broadcast"])
    assert seen.counts("b", "forward") == seen.counts("b", "backward") == Counter()
    left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return seen.sent, seen.layouts, str(seen), left


def test_layouts_and_the_bytes_of_every_collective_are_listed_by_module() -> None:
    first, *others = run_ranks(R, _explained)
    sent, layouts, text, left = first
    assert others == [first] * 2
    assert left == 0
    assert layouts == {
        "weight": "[12/a, 3]",
        "table": "[4, 9/a/b]",
        "inner.0()": "[12/a/b, 3]",
        "partial()": "[4, 3] {partial a b}",
    }
    own = [(name, 8 * n) for name, n in LEAVES.items()]
    longer = ("all_reduce", 16 * LEAVES["all_reduce"])
    expected = [("sends", *pair) for pair in (own[0], longer, *own[1:])]
    expected += [("", *own[-1]), ("", "broadcast", 4 * 5)]
    assert [(s.module, s.name, s.bytes) for s in sent] == expected
    phases = ["forward"] * (len(sent) - 1) + ["backward"]
    assert [(s.phase, s.axis) for s in sent] == [(phase, "a") for phase in phases]
    told, table = text.split("\n\n")
    assert [line.split("  ", 1)[0].strip() for line in told.splitlines()] == [*layouts]
    assert [line.split("  ", 1)[1].strip() for line in told.splitlines()] == [*layouts.values()]
    head, *rows = [line.split() for line in table.splitlines()]
    assert head == ["phase", "axis", "collective", "times", "bytes", "module"]
    total = dict(own) | {"all_reduce": own[0][1] + longer[1]}
    assert rows == [
        *(["forward", "a", name, "2" if name == "all_reduce" else "1", f"{total[name]}", "sends"]
          for name in LEAVES),
        ["forward", "a", "broadcast", "1", f"{total['broadcast']}"],
        ["backward", "a", "broadcast", "1", "20"],
    ]  # fmt: skip
