"""Sequence layouts of context parallelism: the positions that each rank of the cp axis holds.

    sequence of 16 tokens on four ranks: the rank that holds each position

    position     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15    causal pairs of ranks 0 to 3
    contiguous   0  0  0  0  1  1  1  1  2  2  2  2  3  3  3  3    10 26 42 58
    zigzag       0  0  1  1  2  2  3  3  3  3  2  2  1  1  0  0    34 34 34 34
    striped      0  1  2  3  0  1  2  3  0  1  2  3  0  1  2  3    28 32 36 40

    contiguous   Rank r holds chunk r of P. Under a causal mask the last rank has almost twice the
                 mean work, and every step of a ring waits for the busiest rank.
    zigzag       The sequence has 2P chunks, and rank r holds chunks r and 2P-1-r (Zhu 2024, zigzag
                 ring attention; "head-tail" elsewhere). Under a causal mask every rank has the same
                 number of visible pairs, in total and in every step of a ring.
    striped      Rank r holds positions r, r + P, r + 2P, ... (Brandon et al. 2023, Striped
                 Attention, arXiv:2311.09431). In a step of a causal ring, ranks differ only by the
                 diagonal. No two adjacent tokens are on one rank, so windows and documents leave
                 more tiles to visit than in the other layouts.
    balanced     Each rank holds the same number of equal chunks, assigned by their work: with
                 packed documents, equal chunks have unequal work. `balance` assigns them for the
                 documents of a batch. Use it with "gather", "stream" and "ulysses" only, because
                 the steps of a ring would not be balanced.

`SequenceLayout` is the only place that depends on the layout. It returns the positions for RoPE,
the runs of positions for the attention mask, a rank's shard of tokens, labels or activations, and
the whole sequence from shards, so these cannot disagree.

Local rows are in ascending order of position, in at most two runs per rank unless balanced. Every
rank has the same number of rows; a sequence whose length is not divisible is padded at its end.
`shard` takes the sequence without padding, and `unshard` returns it without padding. On a rank,
padding has the positions from `seq_len` on, which no token attends to, and ignored labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from warpweave.kernels.reference import Run
from warpweave.parallel.words import Kind, chunks_of, local_rows

# Boundaries of packed documents, for one sample or several; None means one document.
Documents = Sequence[int] | torch.Tensor | None


@dataclass(frozen=True)
class SequenceLayout:
    """The layout of `seq_len` tokens on `parts` ranks, `local_len` rows on each.

    Attributes:
        seq_len: length of the sequence without padding.
        parts: P, the number of cp ranks.
        kind: "zigzag", "contiguous", "striped" or "balanced".
        chunks: for "balanced" only, the numbers of each rank's chunks, as `balance` assigns them.

    Messages have one size, so the sequence is padded to a multiple of P times the number of chunks
    per rank (two for zigzag, one for contiguous and striped).

    Raises:
        ValueError: the kind is unknown, `parts` is less than 1, `seq_len` is negative, or the
            chunks are not each on exactly one rank, with the same number on every rank.

    Examples:
        >>> layout = SequenceLayout(16, 2)
        >>> layout.positions(0).tolist()
        [0, 1, 2, 3, 12, 13, 14, 15]
        >>> layout.shard(torch.arange(16), rank=1, dim=0).tolist()
        [4, 5, 6, 7, 8, 9, 10, 11]
    """

    seq_len: int
    parts: int
    kind: Kind = "zigzag"
    chunks: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {get_args(Kind)}, got {self.kind!r}")
        if self.parts < 1 or self.seq_len < 0:
            given = f"parts={self.parts}, seq_len={self.seq_len}"
            raise ValueError(f"expected parts >= 1 and seq_len >= 0, got {given}")
        if (self.chunks is not None) != (self.kind == "balanced"):
            raise ValueError(
                "kind 'balanced' requires chunks, and other kinds do not allow them (use "
                f"`balance` to make a balanced layout), got {self}"
            )
        if self.chunks is not None:
            numbers = sorted(n for own in self.chunks for n in own)
            counts = {len(own) for own in self.chunks}
            if len(self.chunks) != self.parts or len(counts) != 1 or 0 in counts:
                raise ValueError(
                    "expected the same nonzero number of chunks for each of the "
                    f"{self.parts} parts, got {[len(own) for own in self.chunks]}"
                )
            ascending = all([*own] == sorted(own) for own in self.chunks)
            if numbers != [*range(len(numbers))] or not ascending:
                raise ValueError(
                    f"expected chunks 0 to {len(numbers) - 1} exactly once each, in ascending "
                    f"order on each rank, got {self.chunks}"
                )

    @property
    def local_len(self) -> int:
        """Rows on each rank, including padding."""
        if self.chunks is not None:
            return local_rows(self.seq_len, self.parts, len(self.chunks[0]))
        return local_rows(self.seq_len, self.parts, chunks_of(self.seq_len, self.parts, self.kind))

    @property
    def padded_len(self) -> int:
        """Total number of rows of all ranks, including padding."""
        return self.local_len * self.parts

    @property
    def padded(self) -> SequenceLayout:
        """The same layout, with padding counted as tokens."""
        return replace(self, seq_len=self.padded_len)

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The global positions of `rank`'s rows as runs: one or two, or more if balanced."""
        if not 0 <= rank < self.parts:
            raise ValueError(f"rank must be in [0, {self.parts}), got {rank}")
        length = self.local_len
        if self.kind == "contiguous" or self.parts == 1:
            return (Run(rank * length, length),)
        if self.kind == "striped":
            return (Run(rank, length, self.parts),)
        if self.chunks is not None:
            chunk, starts = length // len(self.chunks[0]), self.chunks[rank]
            first = [n for n in starts if n - 1 not in starts]  # adjacent chunks are one run
            last = [n for n in starts if n + 1 not in starts]
            return tuple(Run(a * chunk, (b - a + 1) * chunk) for a, b in zip(first, last))
        chunk = length // 2
        head, tail = rank * chunk, (2 * self.parts - 1 - rank) * chunk
        if head + chunk == tail:  # the last rank's chunks are adjacent: one run, fewer tiles
            return (Run(head, length),)
        return Run(head, chunk), Run(tail, chunk)

    def positions(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """The global position of every local row of `rank`: int64[local_len], ascending."""
        ranges = ((at.start, at.stop, at.step) for at in self._ranges(rank))
        return torch.cat([torch.arange(*bounds, device=device) for bounds in ranges])

    def owner(self, position: int) -> int:
        """Return the rank that holds a position."""
        return next(r for r in range(self.parts) if any(position in at for at in self._ranges(r)))

    def _ranges(self, rank: int) -> list[range]:
        return [run.positions for run in self.runs(rank)]

    def shard(self, x: torch.Tensor, rank: int, dim: int, fill: float = 0) -> torch.Tensor:
        """Return `rank`'s shard x[..., local_len, ...] of `x[..., seq_len, ...]` along `dim`. The
        value of padding is `fill`.

        It is a view of `x` if the rows are one run and nothing is padded, otherwise a copy. Both
        are differentiable.
        """
        if x.shape[dim] != self.seq_len:
            raise ValueError(
                f"expected the full sequence length {self.seq_len} in dim {dim}, got {x.shape[dim]}"
            )
        runs = self.runs(rank)
        if self.padded_len != self.seq_len:
            behind = (0, 0) * (x.dim() - 1 - dim % x.dim())
            missing = self.padded_len - self.seq_len
            x = torch.nn.functional.pad(x, (*behind, 0, missing), value=fill)
        if self.kind == "striped":
            rows = x.unflatten(dim, (self.local_len, self.parts))
            return rows.select(dim % x.dim() + 1, runs[0].start)
        parts = [x.narrow(dim, run.start, run.length) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return x[..., seq_len, ...] in order of position from all shards; inverse of `shard`."""
        if len(shards) != self.parts:
            raise ValueError(f"expected one shard per rank ({self.parts}), got {len(shards)}")
        parts: list[tuple[int, torch.Tensor]] = []
        for rank, shard in enumerate(shards):
            if shard.shape[dim] != self.local_len:
                raise ValueError(
                    f"expected {self.local_len} rows in dim {dim} of shard {rank}, got "
                    f"{shard.shape[dim]}"
                )
            starts, lengths, _ = zip(*self.runs(rank))
            parts += zip(starts, shard.split(lengths, dim))
        if self.kind == "striped":
            dim %= shards[0].dim()
            whole = torch.stack(tuple(shards), dim + 1).flatten(dim, dim + 1)
        else:
            parts.sort(key=lambda entry: entry[0])
            whole = torch.cat([part for _, part in parts], dim)
        return whole if self.padded_len == self.seq_len else whole.narrow(dim, 0, self.seq_len)

    def for_documents(self, documents: Documents) -> SequenceLayout:
        """Return the layout for a batch of these documents. A balanced layout gets the same number
        and size of chunks, assigned again (`balance`); any other is returned unchanged."""
        if self.chunks is None:
            return self
        return balance(self.seq_len, self.parts, documents, each=len(self.chunks[0]))

    def pairs(self, documents: Documents = None) -> list[int]:
        """The number of visible (query, key) pairs on each rank, under a causal mask within
        documents. This is the rank's work in attention; padding adds none."""
        seen = _keys_seen(self.seq_len, documents)
        return [
            sum(int(seen[at.start : at.stop : at.step].sum()) for at in self._ranges(rank))
            for rank in range(self.parts)
        ]

    def draw(self, documents: Sequence[int] | None = None, width: int = 64) -> str:
        """Draw each rank's queries and keys under a causal mask within documents.

        There is one line per rank, with at most `width` letters for the sequence: ``#`` for its
        queries, ``-`` for the keys that they see. The line ends with the rank's `pairs`, in
        multiples of the mean.
        """
        seen, work = _keys_seen(self.seq_len, documents).tolist(), self.pairs(documents)
        mean, step = sum(work) / self.parts or 1, max(1, -(-self.seq_len // width))
        lines = []
        for rank, pairs in enumerate(work):
            line = ["."] * -(-self.seq_len // step)
            mine = [p for at in self._ranges(rank) for p in at if p < self.seq_len]
            for p in mine:
                first, stop = (p - seen[p] + 1) // step, p // step + 1
                line[first:stop] = "-" * (stop - first)
            for p in mine:
                line[p // step] = "#"
            lines.append(f"{rank:3} {''.join(line)} {pairs / mean:5.2f}")
        return "\n".join(lines)


def _keys_seen(seq_len: int, documents: Documents) -> torch.Tensor:
    """The number of keys that each position sees, int64[seq_len]: itself and the positions before
    it in its document, summed over samples."""
    given = [0] if documents is None else documents
    position = torch.arange(seq_len)
    seen = torch.zeros_like(position)
    for row in torch.atleast_2d(torch.as_tensor(given, dtype=torch.int64, device="cpu")):
        begins = row.contiguous()
        seen += position + 1 - begins[torch.searchsorted(begins, position, right=True) - 1]
    return seen


def balance(
    seq_len: int, parts: int, documents: Documents = None, *, each: int | None = None
) -> SequenceLayout:
    """Return the balanced layout for these documents: `pairs` differs little between ranks.

    Greedy assignment: the chunk with the most work goes to the least-loaded rank that still has
    room for a chunk. The number of chunks per rank is 2, then 4, ..., 32, until no rank has more
    than 1.02 times the mean work. A single rank has one chunk.

    Args:
        seq_len, parts: of the layout.
        documents: boundaries [n + 1] that ascend from 0, as for attention. Positions from the last
            boundary on are one more document. None means one document. Pass [B, n + 1] for several
            samples that share a layout; their work is added. The values are read.
        each: use this number of chunks per rank.
    """
    sums = torch.cat((torch.zeros(1, dtype=torch.int64), _keys_seen(seq_len, documents).cumsum(0)))
    found: list[tuple[float, SequenceLayout]] = []
    counts = (2, 4, 8, 16, 32) if parts > 1 else (1,)
    for count in counts if each is None else (each,):
        length = max(1, -(-seq_len // (parts * count)))
        ends = (torch.arange(parts * count + 1) * length).clamp(max=seq_len)
        costs = sums[ends].diff().tolist()
        chunks = _assign(costs, parts)
        most = max(sum(costs[i] for i in own) for own in chunks)
        layout = SequenceLayout(seq_len, parts, "balanced", chunks)
        found.append((most * parts / max(1, sum(costs)), layout))
        if found[-1][0] <= 1.02 or length == 1:
            break
    return min(found, key=lambda entry: entry[0])[1]


def _assign(costs: list[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Assign the same number of chunks to each of `parts` ranks, greedily by the chunks' costs."""
    each, ranks = len(costs) // parts, range(parts)
    own: list[list[int]] = [[] for _ in ranks]
    work = [0] * parts
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min((r for r in ranks if len(own[r]) < each), key=work.__getitem__)
        own[rank].append(i)
        work[rank] += costs[i]
    return tuple(tuple(sorted(mine)) for mine in own)


def cut(seq_len: int, parts: int, kind: Kind) -> SequenceLayout:
    """Return the layout of that kind. A balanced one has `chunks_of` chunks per rank and is for a
    single document; call its `for_documents` for others."""
    if kind != "balanced":
        return SequenceLayout(seq_len, parts, kind)
    return balance(seq_len, parts, each=chunks_of(seq_len, parts, kind))


def shift_labels(tokens: torch.Tensor, *, dim: int = -1, ignore_index: int = -100) -> torch.Tensor:
    """Return next-token labels of the whole sequence: ``labels[i] = tokens[i + 1]``; the last is
    ignored.

    Shift first, then shard. The label of a run's last token is in another run, often on another
    rank. Shifting shards instead trains on wrong labels without any error.
    """
    labels, last = torch.full_like(tokens, ignore_index), tokens.shape[dim] - 1
    if last > 0:
        labels.narrow(dim, 0, last).copy_(tokens.narrow(dim, 1, last))
    return labels
