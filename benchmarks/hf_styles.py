"""Compare `warpweave.layers.sharding.styles` with torch's parallel styles of the same names.

Column- and row-parallel linear layers and embeddings, inputs of 1 to 4 dims, every input and output
layout (`Shard` of every dim from either end, `Replicate`), with and without a bias, plain tensors
and DTensors in and out: outputs, their layouts and all gradients in float64, on two gloo ranks.
Cases that torch refuses (row-parallel with one token) are compared with one device.

    python benchmarks/hf_styles.py
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor.parallel as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import warpweave.layers.sharding.styles as ours
from warpweave.layers.sharding.dtensor import whole

RANKS, SHAPE, V, E, LIMIT = 2, (4, 2, 6, 8), 13, 8, 1e-12


class Case(NamedTuple):
    """One call of one module; `ndim` is the number of the input's dims."""

    style: str
    kind: str
    ndim: int
    inputs: Placement
    outputs: Placement
    bias: bool = True
    local: bool = True  # returns a plain tensor
    plain: bool = True  # is given a plain tensor


def cases(most: int = 4) -> list[Case]:
    """Return all cases with inputs of up to `most` dims."""
    found = []
    for style, kind, ndim in itertools.product(
        ("ColwiseParallel", "RowwiseParallel"), ("linear", "embedding"), range(1, most + 1)
    ):
        flags = itertools.product((True, False), repeat=3)
        layouts = (_layouts(n) for n in (ndim, ndim + (kind == "embedding")))
        for lay, flag in itertools.product(itertools.product(*layouts), flags):
            if kind == "linear" or flag[0]:
                found.append(Case(style, kind, ndim, *lay, *flag))
    return found


def _layouts(ndim: int) -> list[Placement]:
    return [Replicate(), *map(Shard, range(-ndim, ndim))]


def computed(case: Case, styles: Any, mesh: DeviceMesh) -> tuple:
    """Compute a case on this rank: the output's layout, then the output and all gradients."""
    x, module, rank = *_made(case), mesh.get_local_rank()
    style = getattr(styles, case.style)
    how = {"input_layouts": case.inputs, "output_layouts": case.outputs}
    theirs.parallelize_module(module, mesh, style(**how, use_local_output=case.local))
    x = _part(x, case.inputs, rank).clone()
    if x.is_floating_point():
        x.requires_grad_()
    given = x if case.plain else DTensor.from_local(x, mesh, [case.inputs], run_check=False)
    y = module(given)
    layout = None if case.local else (y.shape, y.placements)
    y = y if case.local else y.to_local()
    _weighted(y, _part(_weights(case), case.outputs, rank)).backward()
    grads = [] if x.grad is None else [x.grad]
    return layout, [y.detach(), *grads, *(whole(p.grad) for p in module.parameters())]


def on_one_device(case: Case, rank: int) -> list[torch.Tensor]:
    """Compute a case on one device, and return this rank's part of it."""
    x, module = _made(case)
    if x.is_floating_point():
        x.requires_grad_()
    y = module(x)
    _weighted(y, _weights(case)).backward()
    grads = [] if x.grad is None else [_part(x.grad, case.inputs, rank)]
    return [_part(y, case.outputs, rank).detach(), *grads, *(p.grad for p in module.parameters())]


def _made(case: Case) -> tuple[torch.Tensor, nn.Module]:
    torch.manual_seed(0)
    shape = SHAPE[-case.ndim :]
    if case.kind == "linear":
        module = nn.Linear(SHAPE[-1], E, bias=case.bias)
        return torch.randn(shape, dtype=torch.float64), module.double()
    return torch.randint(0, V, shape), nn.Embedding(V, E, padding_idx=3).double()


def _part(x: torch.Tensor, layout: Placement, rank: int) -> torch.Tensor:
    return x.chunk(RANKS, layout.dim)[rank] if isinstance(layout, Shard) else x


def _weights(case: Case) -> torch.Tensor:
    shape = (*SHAPE[-case.ndim :], E) if case.kind == "embedding" else (*SHAPE[-case.ndim : -1], E)
    if case.kind == "linear" and case.ndim == 1:
        shape = (E,)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape).cos() + 0.5


def _weighted(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return F.silu(y).mul(weights).sum()


def difference(case: Case, mesh: DeviceMesh) -> str | None:
    """Describe how ours differs from torch's on this rank; None if it does not."""
    layout, found = computed(case, ours, mesh)
    wanted = on_one_device(case, mesh.get_local_rank())
    truths = {"one device": wanted}
    if (case.style, case.kind, case.ndim) != ("RowwiseParallel", "linear", 1):  # torch raises
        theirs_layout, truths["torch"] = computed(case, theirs, mesh)
        if theirs_layout != layout:
            return f"{case}: expected torch's layout {theirs_layout}, got {layout}"
    for name, truth in truths.items():
        for x, y in zip(found, truth, strict=True):
            if x.shape != y.shape or (x - y).abs().max() > LIMIT:
                return f"{case}: differs from {name}"
    return None


def _of_two(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (RANKS,))
    return [d for d in (difference(case, mesh) for case in cases()) if d is not None]


def main() -> int:
    tests = Path(__file__).resolve().parent.parent / "tests"
    sys.path[:0] = [str(tests), str(tests / "support")]  # the ranks import conftest from there
    from ranks import run_ranks

    found = run_ranks(RANKS, _of_two)
    print(*itertools.chain(*found), sep="\n")
    print(json.dumps({"cases": len(cases()), "different": [len(each) for each in found]}))
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main())
