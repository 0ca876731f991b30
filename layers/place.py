"""Device, mesh and implementation of a layer, as one record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpweave.kernels.activation import RECOMPUTE
from warpweave.kernels.overlap.gathering import check_fusing
from warpweave.kernels.runtime.dispatch import check_impl
from warpweave.parallel.context import Links, Strategy, check_strategy
from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.parallel.tensor.ranks import check_overlap
from warpweave.parallel.words import Overlap


@dataclass(frozen=True)
class Place:
    """Location of a layer's parameters and the way it is computed.

    It does not change the results, except for the rounding of `dtype`. A layer passes its `Place`
    to the layers inside it.

    Attributes:
        device, dtype: of the parameters.
        mesh: the connected mesh; None is one device.
        sequence_parallel: the residual stream is x[T/tp, E], tokens sharded over the tensor axis.
        overlap: overlap of the tensor ranks' collectives with matrix products: "none", "bulk",
            "chunked" or "fused", see ``parallel.tensor.ranks``.
        strategy: context-parallel attention: "ring", "gather", "stream", "ulysses", "hybrid",
            "auto" or `Links`, see ``parallel.context``.
        recompute: what the backward of an MLP recomputes: "nothing", "activation" (the hidden
            activations) or "up" (also the up projection); None means "activation" on a GPU and
            "nothing" on a CPU.
        impl: "triton", "torch" or None, as for the kernels.

    Raises:
        ValueError: the mesh is not connected, an option has an unknown value, or "fused" is
            combined with impl="torch".

    Examples:
        >>> from warpweave import Mesh, TransformerBlock
        >>> place = Place(mesh=Mesh().connect(), dtype=torch.bfloat16)
        >>> blocks = [TransformerBlock(64, 8, 256, place=place) for _ in range(2)]
    """

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    mesh: ConnectedMesh | None = None
    sequence_parallel: bool = False
    overlap: Overlap = "bulk"
    strategy: Strategy | Links = "auto"
    recompute: str | None = None
    impl: str | None = None

    def __post_init__(self) -> None:
        connected(self.mesh)
        check_impl(self.impl)
        check_strategy(self.strategy)
        if check_overlap(self.overlap) == "fused":
            check_fusing(self.impl)
        recompute = self.recompute
        if recompute is not None and recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {RECOMPUTE} or None, got {recompute!r}")
