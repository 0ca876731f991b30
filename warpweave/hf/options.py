"""Options for spreading a Hugging Face model over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from warpweave.layers.sharding.dtensor import padded_rows
from warpweave.parallel.collectives import copy_to, own_slice
from warpweave.parallel.context import Links, Strategy
from warpweave.parallel.mesh import ConnectedMesh


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
    """Configuration that tells transformers' Trainer that ranks share a model.

    The Trainer then gives these ranks the same tokens, wraps nothing and lets all of them save.

    Attributes:
        tp_size: number of ranks that share one replica, over tensor and context ranks.
        replicas: number of data ranks.
        device: device of the parameters.
    """

    tp_size: int
    replicas: int
    device: str
    ep_size: int = 1
    fsdp_size: int = 1
    dp_replicate_size: int = 1

    @property
    def dp_size(self) -> int:
        """The number of data ranks that a Trainer supports: one.

        Raises ValueError if there are more, or if accelerate does not support the device.
        """
        recipe = "write your own training loop (docs/from_hugging_face.md)"
        if self.replicas > 1:
            raise ValueError(
                f"Trainer does not support Mesh(dp={self.replicas}, ...); fully_shard the model "
                f'over mesh.device_mesh["dp"] and {recipe}, or use Mesh(dp=1, ...)'
            )
        if self.device == "cpu":
            raise ValueError(
                f"accelerate lets {self.tp_size} ranks share a model only on GPUs; on CPUs, "
                f"{recipe}"
            )
        return 1


class HeadVocabulary(NamedTuple):
    """A head with rows sharded over tensor ranks and the loss's tokens over context ranks.

    A fact of the head (`changes`).

    Attributes:
        size: size of the whole vocabulary.
        cut: True if the rows are sharded, False if they are replicated.
    """

    size: int
    cut: bool
    spread: Spread

    @property
    def group(self) -> Any:
        """The ranks that share the rows; None if the rows are replicated."""
        return self.spread.mesh.group("tp") if self.cut else None

    def padded(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's rows, padded with zeros on the last ranks."""
        return padded_rows(weight, self.size, self.spread.mesh.size("tp"))

    def own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows, padded, of a tensor that is whole on every rank.

        The gradient of the tensor is summed over the ranks.
        """
        if len(whole) != self.size:
            raise ValueError(
                f"the bias or LoRA weight of the sharded head must have {self.size} rows, got "
                f"{len(whole)}"
            )
        ranks = self.spread.mesh.size("tp")
        rows = -(-self.size // ranks)
        full = F.pad(copy_to(whole, self.group), (0, 0, 0, rows * ranks - self.size))
        return own_slice(full, self.group)
