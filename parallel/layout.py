"""Which rank of the cp axis holds which positions of the sequence.

One object answers every question that depends on it: the positions for RoPE, the runs the
attention kernels mask by, the shard of tokens, labels or activations, and the way back. So they
cannot disagree.

    contiguous   rank r holds chunk r of P chunks. Under a causal mask rank 0 has 1/P of the work of
                 the last rank, so every ring step waits for the busiest one.
    zigzag       the sequence is cut into 2P chunks and rank r holds chunks r and 2P-1-r (Zhu 2024,
                 zigzag ring attention; "head-tail" elsewhere). Every rank then has the same number
                 of visible (query, key) pairs under a causal mask, in total and in every ring step.
    striped      rank r holds the positions r, r + P, r + 2P, ... (Brandon et al. 2023, Striped
                 Attention, arXiv:2311.09431). Under a causal mask the ranks' work in a ring step
                 differs by the diagonal alone. No token has a neighbour on its rank, so windows and
                 documents leave more tiles to visit than with the others.

Local rows are in ascending order of position, at most two runs per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from warpweave.kernels.reference import Run
from warpweave.parallel.words import Kind


@dataclass(frozen=True)
class SequenceLayout:
    """How a sequence of `seq_len` tokens lies on `parts` ranks, `seq_len / parts` tokens on each.

    Raises ``ValueError`` when `seq_len` is not a multiple of `parts` (contiguous, striped) or of
    ``2 * parts`` (zigzag): ranks exchange messages of one size. One part takes every length.
    """

    seq_len: int
    parts: int
    kind: Kind = "zigzag"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {get_args(Kind)}, got {self.kind!r}")
        if self.parts < 1 or self.seq_len < 0:
            raise ValueError(
                f"need parts >= 1 and seq_len >= 0, got seq_len={self.seq_len}, parts={self.parts}"
            )
        chunks = 2 * self.parts if self.kind == "zigzag" and self.parts > 1 else self.parts
        if self.seq_len % chunks:
            rule = "parts" if chunks == self.parts else "2 * parts"
            raise ValueError(
                f"a {self.kind} layout needs seq_len to be a multiple of {rule} = {chunks}, "
                f"got seq_len={self.seq_len}, parts={self.parts}; "
                f"pad by {-self.seq_len % chunks} to {self.seq_len + -self.seq_len % chunks}"
            )

    @property
    def local_len(self) -> int:
        """Tokens on each rank."""
        return self.seq_len // self.parts

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The global positions of `rank`'s local rows, as one or two runs."""
        if not 0 <= rank < self.parts:
            raise ValueError(f"rank must be in [0, {self.parts}), got {rank}")
        length = self.local_len
        if self.kind == "contiguous" or self.parts == 1:
            return (Run(rank * length, length),)
        if self.kind == "striped":
            return (Run(rank, length, self.parts),)
        chunk = length // 2
        head, tail = rank * chunk, (2 * self.parts - 1 - rank) * chunk
        if head + chunk == tail:  # the last rank's chunks are neighbours: one run, fewer tiles
            return (Run(head, length),)
        return Run(head, chunk), Run(tail, chunk)

    def positions(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """The global position of every local row of `rank`: int64[seq_len / parts], ascending."""
        return torch.cat(
            [torch.arange(at.start, at.stop, at.step, device=device) for at in self._ranges(rank)]
        )

    def owner(self, position: int) -> int:
        """The rank that holds a position."""
        return next(r for r in range(self.parts) if any(position in at for at in self._ranges(r)))

    def _ranges(self, rank: int) -> list[range]:
        return [run.positions for run in self.runs(rank)]

    def shard(self, x: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        """`rank`'s rows of the whole `x[..., seq_len, ...]` along `dim`.

        A view of `x` when the rows are one run (striped rows are not contiguous in it), a copy
        otherwise; differentiable either way.
        """
        if x.shape[dim] != self.seq_len:
            raise ValueError(
                f"dim {dim} must have the whole sequence, {self.seq_len}, got {x.shape[dim]}"
            )
        ranges = self._ranges(rank)
        if self.kind == "striped":
            rows = x.unflatten(dim, (self.local_len, self.parts))
            return rows.select(dim % x.dim() + 1, ranges[0].start)
        pieces = [x.narrow(dim, at.start, len(at)) for at in ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole sequence in order of position from every rank's shard: inverse of `shard`."""
        if len(shards) != self.parts:
            raise ValueError(f"needs one shard per rank, {self.parts}, got {len(shards)}")
        pieces = []
        for rank, shard in enumerate(shards):
            if shard.shape[dim] != self.local_len:
                raise ValueError(
                    f"dim {dim} of shard {rank} must have {self.local_len} rows, "
                    f"got {shard.shape[dim]}"
                )
            ranges = self._ranges(rank)
            pieces += zip([at.start for at in ranges], shard.split([*map(len, ranges)], dim))
        if self.kind == "striped":
            dim %= shards[0].dim()
            return torch.stack(tuple(shards), dim + 1).flatten(dim, dim + 1)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda entry: entry[0])], dim)


def shift_labels(tokens: torch.Tensor, *, dim: int = -1, ignore_index: int = -100) -> torch.Tensor:
    """Next-token labels of the whole sequence: ``labels[i] = tokens[i + 1]``, the last is ignored.

    Shift first and shard the result: the label of a shard's last row is the first token of another
    run, often on another rank, so shifting after sharding trains on wrong pairs without any error.
    """
    labels = torch.full_like(tokens, ignore_index)
    labels.narrow(dim, 0, tokens.shape[dim] - 1).copy_(tokens.narrow(dim, 1, tokens.shape[dim] - 1))
    return labels
