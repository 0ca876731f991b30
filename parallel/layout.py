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
    balanced     many equal chunks, as many on each rank, chosen by their work: with packed
                 documents equal chunks are not equal work. `balance` chooses, for the documents of
                 a batch. For "gather", "stream" and "ulysses": the hops of a ring are balanced by
                 nothing.

Local rows are in ascending order of position, at most two runs per rank if not balanced. Every rank
has as many rows: a length that does not divide is padded behind its end. The padding is in no whole
sequence, neither one given to `shard` nor one from `unshard`; on its rank it has the positions from
`seq_len` on, which no token attends to, and labels that are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from warpweave.kernels.reference import Run
from warpweave.parallel.words import Kind

# Boundaries of packed documents, of one sample or of several; None is one document.
Documents = Sequence[int] | torch.Tensor | None
FEWEST_ROWS = 128  # of a chunk: a tile of the attention kernels


@dataclass(frozen=True)
class SequenceLayout:
    """How a sequence of `seq_len` tokens lies on `parts` ranks, `local_len` rows on each.

    Ranks exchange messages of one size, so the last rows of all may be padding: fewer than `parts`
    times the chunks of a rank (zigzag: two; contiguous, striped: one). `chunks` is of "balanced"
    alone: the numbers of every rank's chunks, as `balance` makes them.

    Raises ``ValueError`` for another kind, no part, a negative length, or chunks of which a rank
    has more than another, or that are not each of them once.
    """

    seq_len: int
    parts: int
    kind: Kind = "zigzag"
    chunks: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {get_args(Kind)}, got {self.kind!r}")
        if self.parts < 1 or self.seq_len < 0:
            raise ValueError(
                f"need parts >= 1 and seq_len >= 0, got seq_len={self.seq_len}, parts={self.parts}"
            )
        if (self.chunks is not None) != (self.kind == "balanced"):
            raise ValueError(f"a balanced layout, and no other, has chunks (`balance`), got {self}")
        if self.chunks is not None:
            numbers = sorted(n for own in self.chunks for n in own)
            counts = {len(own) for own in self.chunks}
            if len(self.chunks) != self.parts or len(counts) != 1 or 0 in counts:
                raise ValueError(f"chunks must be as many for each of the {self.parts} parts")
            if numbers != [*range(len(numbers))] or any(
                [*own] != sorted(own) for own in self.chunks
            ):
                raise ValueError(f"chunks must be 0 to {len(numbers) - 1}, ascending on each rank")

    @property
    def local_len(self) -> int:
        """Rows on each rank, padding included."""
        each = 2 if self.kind == "zigzag" and self.parts > 1 else 1
        each = each if self.chunks is None else len(self.chunks[0])
        return -(-self.seq_len // (self.parts * each)) * each

    @property
    def padded_len(self) -> int:
        """Rows of all ranks."""
        return self.local_len * self.parts

    @property
    def padded(self) -> SequenceLayout:
        """The same rows, with padding taken for tokens."""
        return replace(self, seq_len=self.padded_len)

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The global positions of `rank`'s local rows, as one or two runs; if balanced, more."""
        if not 0 <= rank < self.parts:
            raise ValueError(f"rank must be in [0, {self.parts}), got {rank}")
        length = self.local_len
        if self.kind == "contiguous" or self.parts == 1:
            return (Run(rank * length, length),)
        if self.kind == "striped":
            return (Run(rank, length, self.parts),)
        if self.chunks is not None:
            chunk, starts = length // len(self.chunks[0]), self.chunks[rank]
            first = [n for n in starts if n - 1 not in starts]  # neighbours are one run
            last = [n for n in starts if n + 1 not in starts]
            return tuple(Run(a * chunk, (b - a + 1) * chunk) for a, b in zip(first, last))
        chunk = length // 2
        head, tail = rank * chunk, (2 * self.parts - 1 - rank) * chunk
        if head + chunk == tail:  # the last rank's chunks are neighbours: one run, fewer tiles
            return (Run(head, length),)
        return Run(head, chunk), Run(tail, chunk)

    def positions(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """The global position of every local row of `rank`: int64[local_len], ascending."""
        return torch.cat(
            [
                torch.arange(start, start + length * stripes, stripes, device=device)
                for start, length, stripes in self.runs(rank)
            ]
        )

    def owner(self, position: int) -> int:
        """The rank that holds a position."""
        return next(r for r in range(self.parts) if any(position in at for at in self._ranges(r)))

    def _ranges(self, rank: int) -> list[range]:
        return [run.positions for run in self.runs(rank)]

    def shard(self, x: torch.Tensor, rank: int, dim: int, fill: float = 0) -> torch.Tensor:
        """`rank`'s rows of the whole `x[..., seq_len, ...]` along `dim`, padding being `fill`.

        A view of `x` when the rows are one run (striped rows are not contiguous in it) and nothing
        is padded, a copy otherwise; differentiable either way.
        """
        if x.shape[dim] != self.seq_len:
            raise ValueError(
                f"dim {dim} must have the whole sequence, {self.seq_len}, got {x.shape[dim]}"
            )
        runs = self.runs(rank)
        if self.padded_len != self.seq_len:
            behind = (0, 0) * (x.dim() - 1 - dim % x.dim())
            missing = self.padded_len - self.seq_len
            x = torch.nn.functional.pad(x, (*behind, 0, missing), value=fill)
        if self.kind == "striped":
            rows = x.unflatten(dim, (self.local_len, self.parts))
            return rows.select(dim % x.dim() + 1, runs[0].start)
        pieces = [x.narrow(dim, run.start, run.length) for run in runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole sequence in order of position from every rank's shard: inverse of `shard`."""
        if len(shards) != self.parts:
            raise ValueError(f"needs one shard per rank, {self.parts}, got {len(shards)}")
        pieces: list[tuple[int, torch.Tensor]] = []
        for rank, shard in enumerate(shards):
            if shard.shape[dim] != self.local_len:
                raise ValueError(
                    f"dim {dim} of shard {rank} must have {self.local_len} rows, "
                    f"got {shard.shape[dim]}"
                )
            runs = self.runs(rank)
            pieces += zip(
                [run.start for run in runs], shard.split([run.length for run in runs], dim)
            )
        if self.kind == "striped":
            dim %= shards[0].dim()
            whole = torch.stack(tuple(shards), dim + 1).flatten(dim, dim + 1)
        else:
            pieces.sort(key=lambda entry: entry[0])
            whole = torch.cat([piece for _, piece in pieces], dim)
        return whole if self.padded_len == self.seq_len else whole.narrow(dim, 0, self.seq_len)

    def for_documents(self, documents: Documents) -> SequenceLayout:
        """The layout of a batch of these documents (`balance`): if balanced, with as many chunks of
        the same size on each rank, but others; else itself."""
        if self.chunks is None:
            return self
        return balance(self.seq_len, self.parts, documents, each=len(self.chunks[0]))

    def pairs(self, documents: Documents = None) -> list[int]:
        """Every rank's visible (query, key) pairs under a causal mask within documents (`balance`):
        its share of attention's work. Padding has none."""
        seen = _keys_seen(self.seq_len, documents)
        return [
            sum(int(seen[at.start : at.stop : at.step].sum()) for at in self._ranges(rank))
            for rank in range(self.parts)
        ]

    def draw(self, documents: Sequence[int] | None = None, width: int = 64) -> str:
        """A picture of who computes what under a causal mask within documents (`balance`).

        A line for each rank, at most `width` letters for the sequence: ``#`` where it has queries,
        ``-`` where it only reads keys. At the end its `pairs`, in multiples of the mean.
        """
        seen, work = _keys_seen(self.seq_len, documents).tolist(), self.pairs(documents)
        mean, step = sum(work) / self.parts or 1, max(1, -(-self.seq_len // width))
        lines = []
        for rank, pairs in enumerate(work):
            line = ["."] * -(-self.seq_len // step)
            mine = [p for at in self._ranges(rank) for p in at if p < self.seq_len]
            for p in mine:
                line[(p - seen[p] + 1) // step : p // step + 1] = "-" * (
                    p // step + 1 - (p - seen[p] + 1) // step
                )
            for p in mine:
                line[p // step] = "#"
            lines.append(f"{rank:3} {''.join(line)} {pairs / mean:5.2f}")
        return "\n".join(lines)


def _keys_seen(seq_len: int, documents: Documents) -> torch.Tensor:
    """How many keys each position sees, int64[seq_len]: itself and those before it in its document;
    summed over samples."""
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
    """The balanced layout for these documents: `pairs` differ little between ranks.

    With 2 chunks for each rank, and twice as many until no rank has 2 % more than the mean (or
    there are 32): the dearest chunk goes to the rank with the least work that has room.

    Args:
        seq_len, parts: of the layout.
        documents: boundaries [n + 1] that ascend from 0, as attention's, by value; positions from
            the last one on are one more document. None is one document. Of several samples
            [B, n + 1], for which one layout must do, the work is added.
        each: so many chunks for each rank, whatever comes of it.
    """
    sums = torch.cat((torch.zeros(1, dtype=torch.int64), _keys_seen(seq_len, documents).cumsum(0)))
    found: list[tuple[float, SequenceLayout]] = []
    for count in (2, 4, 8, 16, 32) if each is None else (each,):
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
    """Which chunks each of `parts` ranks has, as many each, by the chunks' costs."""
    each, ranks = len(costs) // parts, range(parts)
    own: list[list[int]] = [[] for _ in ranks]
    work = [0] * parts
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min((r for r in ranks if len(own[r]) < each), key=work.__getitem__)
        own[rank].append(i)
        work[rank] += costs[i]
    return tuple(tuple(sorted(mine)) for mine in own)


def cut(seq_len: int, parts: int, kind: Kind) -> SequenceLayout:
    """The layout of that kind. If balanced, it is for one document, and `for_documents` for others:
    with 16 chunks on each rank, or as many, at least 2, as have `FEWEST_ROWS` rows."""
    if kind != "balanced":
        return SequenceLayout(seq_len, parts, kind)
    rows = seq_len // parts
    each = next((n for n in (16, 8, 4) if rows >= n * FEWEST_ROWS), 2)
    return balance(seq_len, parts, each=each)


def shift_labels(tokens: torch.Tensor, *, dim: int = -1, ignore_index: int = -100) -> torch.Tensor:
    """Next-token labels of the whole sequence: ``labels[i] = tokens[i + 1]``, the last is ignored.

    Shift first and shard the result: the label of a shard's last row is the first token of another
    run, often on another rank, so shifting after sharding trains on wrong pairs without any error.
    """
    labels = torch.full_like(tokens, ignore_index)
    labels.narrow(dim, 0, tokens.shape[dim] - 1).copy_(tokens.narrow(dim, 1, tokens.shape[dim] - 1))
    return labels
