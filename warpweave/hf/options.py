"""Options for spreading a Hugging Face model over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from warpweave.layers.sharding.dtensor import Groups, padded_rows
from warpweave.parallel.collectives import copy_to, own_slice
from warpweave.parallel.context import Links, Strategy
from warpweave.parallel.mesh import ConnectedMesh


def some_groups(mesh: ConnectedMesh, *axes: str) -> Groups:
    """The mesh's groups along `axes` (default: tp and cp) that have more than one rank."""
    groups = (mesh.group(axis) for axis in axes or ("tp", "cp"))
    return tuple(group for group in groups if group is not None)


class Spread(NamedTuple):
    """The options of `apply` that spread a model over ranks."""

    mesh: ConnectedMesh
    sequence_parallel: bool = False
    overlap: str = "bulk"
    strategy: Strategy | Links = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for the styles of linear layers."""
        workspace = self.mesh.workspace("tp") if self.overlap == "fused" else None
        return {"overlap": self.overlap, "workspace": workspace}


class Replicas(NamedTuple):
    """Configuration that tells transformers' Trainer that ranks share a model. The Trainer then
    gives these ranks the same tokens, wraps nothing and lets all of them save."""

    tp_size: int  # number of ranks that share one replica, over tensor and context ranks
    replicas: int  # number of data ranks
    device: str  # of the parameters
    ep_size: int = 1
    fsdp_size: int = 1
    dp_replicate_size: int = 1

    @property
    def dp_size(self) -> int:
        """The number of data ranks that a Trainer supports: one. Raises ValueError if there are
        more, or if accelerate does not support the device."""
        recipe = "write your own training loop (docs/from_hugging_face.md)"
        if self.replicas > 1:
            raise ValueError(
                f"Trainer does not support Mesh(dp={self.replicas}, ...); fully_shard the model "
                f'over mesh.device_mesh["dp"] and {recipe}, or use Mesh(dp=1, ...)'
            )
        if self.device == "cpu":
            why = f"accelerate lets {self.tp_size} ranks share a model only on GPUs"
            raise ValueError(f"{why}; on CPUs, {recipe}")
        return 1


class HeadVocabulary(NamedTuple):
    """A head with rows sharded over tensor ranks and the loss's tokens over context ranks. A fact
    of the head (`changes`)."""

    size: int  # of the whole vocabulary
    cut: bool  # True if the rows are sharded, False if they are replicated
    spread: Spread

    @property
    def group(self) -> Any:
        """The ranks that share the rows; None if the rows are replicated."""
        return self.spread.mesh.group("tp") if self.cut else None

    def padded(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's rows, padded with zeros on the last ranks."""
        return padded_rows(weight, self.size, self.spread.mesh.size("tp"))

    def own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows, padded, of a tensor that is whole on every rank. The gradient of the
        tensor is summed over the ranks."""
        if len(whole) != self.size:
            what = "the bias or LoRA weight of the sharded head"
            raise ValueError(f"{what} must have {self.size} rows, got {len(whole)}")
        missing = -self.size % self.spread.mesh.size("tp")
        return own_slice(F.pad(copy_to(whole, self.group), (0, 0, 0, missing)), self.group)
