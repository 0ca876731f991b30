"""How a Hugging Face model is spread over ranks: what all of its parts are told."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from warpweave.layers.sharding.dtensor import padded_rows
from warpweave.parallel.collectives import copy_to, own_slice
from warpweave.parallel.context import Links, Strategy
from warpweave.parallel.mesh import ConnectedMesh


class Spread(NamedTuple):
    """How a model is spread: what `apply` was told."""

    mesh: ConnectedMesh
    sequence_parallel: bool = False
    overlap: str = "bulk"
    strategy: Strategy | Links = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """What styles of linear layers are told."""
        workspace = self.mesh.workspace("tp") if self.overlap == "fused" else None
        return {"overlap": self.overlap, "workspace": workspace}


class Replicas(NamedTuple):
    """What transformers' Trainer asks of the configuration of a model that its ranks share: it then
    gives them the same tokens, wraps nothing and lets all of them save.

    Attributes:
        tp_size: ranks that share one replica, over tensor and context ranks.
        replicas: data ranks.
        device: where the parameters are.
    """

    tp_size: int
    replicas: int
    device: str
    ep_size: int = 1
    fsdp_size: int = 1
    dp_replicate_size: int = 1

    @property
    def dp_size(self) -> int:
        """Data ranks as a Trainer takes them: one; ValueError where it, or accelerate, does not."""
        recipe = "train it in a loop of your own (docs/from_hugging_face.md)"
        if self.replicas > 1:
            raise ValueError(
                f"Trainer takes no model over Mesh(dp={self.replicas}, ...): fully_shard it over "
                f'mesh.device_mesh["dp"] and {recipe}, or use Mesh(dp=1, ...)'
            )
        if self.device == "cpu":
            raise ValueError(
                f"accelerate lets {self.tp_size} ranks share a model on GPUs only: on CPUs {recipe}"
            )
        return 1


class HeadVocabulary(NamedTuple):
    """A head whose rows are sharded over tensor ranks, and its loss's tokens over context ranks; a
    fact of the head.

    Attributes:
        size: of the whole vocabulary.
        cut: whether rows are sharded, or replicated.
    """

    size: int
    cut: bool
    spread: Spread

    @property
    def group(self) -> Any:
        """The ranks that have other rows."""
        return self.spread.mesh.group("tp") if self.cut else None

    def padded(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's rows, with zeros where the last ranks' are missing."""
        return padded_rows(weight, self.size, self.spread.mesh.size("tp"))

    def own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows, padded, of something that every rank has all of: its gradient is summed
        over the ranks."""
        if len(whole) != self.size:
            raise ValueError(
                f"expected {self.size} rows, as of the head that is sharded over ranks, got "
                f"{len(whole)}"
            )
        ranks = self.spread.mesh.size("tp")
        rows = -(-self.size // ranks)
        full = F.pad(copy_to(whole, self.group), (0, 0, 0, rows * ranks - self.size))
        return own_slice(full, self.group)
