"""Token and position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from warpweave.kernels.runtime.dtypes import check_integers
from warpweave.layers.keywords import fields_as_keywords
from warpweave.layers.place import Place
from warpweave.parallel.mesh import connected
from warpweave.parallel.shard import Cut, ParamRecord
from warpweave.parallel.tensor.embedding import vocab_parallel_embedding


class VocabParallelEmbedding(nn.Module):
    """``nn.Embedding`` whose vocabulary (rows) is sharded over the tensor axis.

    weight[ceil(V/tp), E]; rows past V on the last ranks are padding and stay zero.

    Args:
        num_embeddings, embedding_dim, device, dtype: as for ``nn.Embedding``.
        mesh: the connected mesh; None is one device.
        sequence_parallel: return y[T/tp, E], tokens sharded over the tensor axis; ids must be 1-D.
        place: a `Place`, instead of these options, device and dtype.
        init: standard deviation of the weight in a keyed initialization (``GPT``).

    Examples:
        >>> VocabParallelEmbedding(256, 64)(torch.arange(16)).shape
        torch.Size([16, 64])
    """

    @fields_as_keywords(unused=("overlap", "strategy", "recompute", "impl"), place=Place)
    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, place: Place, init: float = 0.02
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mesh = connected(place.mesh)
        self.sequence_parallel = place.sequence_parallel
        cut = Cut("tp", 0, self.mesh.size("tp"))
        record = ParamRecord("weight", (num_embeddings, embedding_dim), (cut,), init=init)
        self.records = {"weight": record}
        weight = torch.empty(record.local_shape, device=place.device, dtype=place.dtype)
        self.weight = nn.Parameter(weight)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the whole table, standard normal as ``nn.Embedding``; keep this rank's rows."""
        if not self.weight.is_meta:
            full = self.weight.new_empty(self.records["weight"].shape).normal_()
            self.weight.copy_(self.records["weight"].slice(full, self.mesh.coords))

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> y[..., E] (or ids[T] -> y[T/tp, E] with sequence parallelism)."""
        return vocab_parallel_embedding(
            ids, self.weight, group=self.mesh.group("tp"), vocab_size=self.num_embeddings,
            sequence_parallel=self.sequence_parallel,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, tp={self.mesh.size('tp')}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class PositionEmbedding(nn.Module):
    """Learned absolute positions: weight[seq_len, E], replicated over the tensor axis.

    Args:
        seq_len, embedding_dim: shape of the table.
        partial: tensor ranks look up positions of different tokens (sequence parallelism), so the
            table's gradient is {partial tp}.
        init: standard deviation of a keyed initialization.

    Examples:
        >>> PositionEmbedding(128, 64)(torch.arange(16)).shape
        torch.Size([16, 64])
    """

    def __init__(
        self,
        seq_len: int,
        embedding_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        partial: bool = False,
        init: float = 0.02,
    ) -> None:
        super().__init__()
        shape = (seq_len, embedding_dim)
        summed = ("tp",) if partial else ()
        self.records = {"weight": ParamRecord("weight", shape, partial=summed, init=init)}
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from torch's global generator with the layer's standard deviation."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=float(self.records["weight"].init))

    def forward(self, positions: Tensor) -> Tensor:
        """positions int64 [T] -> y[T, E]."""
        check_integers("positions", positions)
        return nn.functional.embedding(positions, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"
