"""What each strategy of context parallelism sends, holds and leaves exposed, and which of them
"auto" takes: arithmetic, not a run.

    links = Links(link=50e9, flops=400e12)
    print(table(explain(SequenceLayout(131072, 8), heads=32, kv_heads=8, head_dim=64, links=links)))

Bytes are those that leave a rank, exactly (`test_explain.py` counts them). Memory is what the
strategy's own buffers take at once, to leading order: not q, k, v, o and their gradients, nor what
a kernel takes while it runs. Seconds are a prediction: the given speeds, every message alone on its
link, compute spread evenly over hops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from warpweave.parallel.context.links import Links
from warpweave.parallel.context.ring import distances, reaches
from warpweave.parallel.context.ulysses import Trade
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.words import Strategy


@dataclass(frozen=True)
class StrategyCost:
    """One strategy for one rank and one layer.

    Attributes:
        strategy: its name.
        forward, backward: bytes that leave the rank; of "ulysses" and "hybrid", and of a ring in
            which not all blocks are seen by as many ranks, the mean over ranks.
        messages: collectives or hops in forward and backward, counted over all ranks.
        memory: bytes held at the worst moment of forward or backward besides inputs and results.
        exposed: predicted seconds in which a link is busy and the rank waits; None without speeds.
        auto: why "auto" takes this strategy; empty for the others.
    """

    strategy: Strategy
    forward: int
    backward: int
    messages: int
    memory: int
    exposed: float | None
    auto: str = ""


@lru_cache(maxsize=256)
def explain(
    layout: SequenceLayout,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int = 1,
    itemsize: int = 2,
    causal: bool = True,
    window: int | None = None,
    neighbours: int | None = None,
    links: Links | None = None,
) -> tuple[StrategyCost, ...]:
    """The costs of every strategy that fits the layout and the heads, and which of them is "auto".

    Args:
        layout: who holds which positions.
        heads, kv_heads, head_dim, batch: of this rank's q and k.
        itemsize: bytes of an element of q, k and v.
        causal, window: the mask, which may spare hops of the ring.
        neighbours: of a pair of groups, the ranks that trade rows for heads: "hybrid" alone then.
        links: measured speeds. With them the strategies are in order of exposed time, then of
            messages, and "auto" is the first that holds no more than ``links.memory``, if any does.
            Without they are in order of bytes, and "auto" is what `by_bytes` says.
    """
    shape = _Shape(layout, heads, kv_heads, head_dim, batch, itemsize, causal, window)
    if neighbours is not None:
        found = [*_hybrid(shape, neighbours)]
    else:
        found = [*_ring(shape), *_gathers(shape), *_ulysses(shape)]
    if links is None:
        costs = [use.cost(None) for use in found]
        costs.sort(key=lambda cost: (cost.forward + cost.backward, cost.memory))
        taken = by_bytes(layout, heads, kv_heads, causal, window, neighbours)
        why = "by bytes: no link speeds were given"
        return tuple(replace(c, auto=why if c.strategy == taken else "") for c in costs)
    costs = sorted(
        (use.cost(use.exposed(shape, links)) for use in found),
        key=lambda cost: (cost.exposed, cost.messages, cost.memory),
    )
    held, why = links.memory, "least exposed"
    if held is not None:
        why += f" of those that hold at most {held / 1e6:.2f} MB"
    first = next((c for c in costs if held is None or c.memory <= held), None)
    return tuple(replace(c, auto=why) if c is first else c for c in costs)


def by_bytes(
    layout: SequenceLayout,
    heads: int,
    kv_heads: int,
    causal: bool,
    window: int | None,
    neighbours: int | None,
) -> Strategy:
    """What "auto" takes without link speeds: "hybrid" for a pair of groups. "ring" if the mask
    spares it hops, as it sends least then. Else "gather" if P <= 1 + Hq/Hkv, where it sends no more
    forward than Ulysses would, in one kernel call; else "ring", which sends as much as "gather" and
    holds two blocks (a balanced layout has no ring)."""
    if neighbours is not None:
        return "hybrid"
    if layout.kind == "balanced":
        return "gather"
    if len(distances(layout, causal, window)) < layout.parts:
        return "ring"
    return "gather" if layout.parts <= 1 + heads // kv_heads else "ring"


def table(costs: Sequence[StrategyCost]) -> str:
    """The costs as lines of text."""
    lines = ["strategy  forward MB  backward MB  messages  memory MB  exposed ms (predicted)"]
    for c in costs:
        exposed = "unknown" if c.exposed is None else f"{c.exposed * 1e3:.3f}"
        lines.append(
            f"{c.strategy:8}  {c.forward / 1e6:10.2f}  {c.backward / 1e6:11.2f}  {c.messages:8}  "
            f"{c.memory / 1e6:9.2f}  {exposed:>10}{c.auto and f'  auto ({c.auto})'}"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------ what each strategy uses


@dataclass(frozen=True)
class _Shape:
    layout: SequenceLayout
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    itemsize: int
    causal: bool
    window: int | None

    @property
    def wide(self) -> int:
        """Bytes of an element of partial results."""
        return max(4, self.itemsize)

    @property
    def rows(self) -> int:
        """Rows of this rank's q, over all heads."""
        return self.batch * self.layout.local_len * self.heads

    @property
    def kv(self) -> int:
        """Elements of this rank's K‖V."""
        return 2 * self.batch * self.layout.local_len * self.kv_heads * self.head_dim

    def tiles(self, flops: float) -> float:
        """Seconds of a forward's tiles on a rank; the backward has 2.5 times as many FLOPs."""
        seen = self.layout.seq_len / (2 if self.causal else 1)
        if self.window is not None:
            seen = min(seen, self.window if self.causal else 2 * self.window)
        return 4 * self.rows * self.head_dim * seen / flops


@dataclass(frozen=True)
class _Use:
    """`sent` leaves a rank in forward and backward, `carried` leaves the busiest one by messages of
    which compute hides `hidden` of its time, and `bare` by messages among neighbours that nothing
    hides."""

    strategy: Strategy
    sent: tuple[int, int]
    messages: int
    memory: int
    carried: tuple[int, int] = (0, 0)
    hidden: float = 0.0
    bare: tuple[int, int] = (0, 0)

    def cost(self, exposed: float | None) -> StrategyCost:
        return StrategyCost(self.strategy, *self.sent, self.messages, self.memory, exposed)

    def exposed(self, shape: _Shape, links: Links) -> float:
        """Seconds, at these speeds."""
        forward = shape.tiles(links.flops)
        near = links.link if self.strategy == "ulysses" else links.near or links.link
        return sum(
            bare / near + max(0.0, carried / links.link - tiles * self.hidden)
            for bare, carried, tiles in zip(self.bare, self.carried, (forward, 2.5 * forward))
        )


def _hops(shape: _Shape, layout: SequenceLayout) -> tuple[int, int, float]:
    """Hops, messages, and how many times its K‖V the mean rank sends in one direction."""
    visits, reach = (of(layout, shape.causal, shape.window) for of in (distances, reaches))
    n, gaps = len(visits) - 1, [b - a for a, b in pairwise(visits)]
    extra = sum(a != b for a, b in pairwise(gaps))  # K‖V and dK‖dV go on separately
    extra += len({d for d in reach if 0 < d < visits[-1]})  # and some start at home
    return n, n + (n + 1 + extra if n else 0), sum(map(visits.index, reach)) / layout.parts


def _ring(shape: _Shape) -> Iterator[_Use]:
    if shape.layout.kind == "balanced":
        return
    n, messages, each = _hops(shape, shape.layout)
    width = shape.itemsize, shape.itemsize + shape.wide
    sent, carried = (tuple(int(hops * shape.kv) * w for w in width) for hops in (each, n))
    # A hop hides behind its tile, and one has none: of the backward that is the first K‖V.
    yield _Use("ring", sent, messages, _buffers(shape, shape.kv), carried, n / (n + 1))


def _buffers(shape: _Shape, kv: int) -> int:
    """Two messages of K‖V and dK‖dV, and a tile's gradient."""
    return 2 * kv * (shape.itemsize + shape.wide) + kv * shape.wide


def _gathers(shape: _Shape) -> Iterator[_Use]:
    others, item, wide = (shape.layout.parts - 1) * shape.kv, shape.itemsize, shape.wide
    whole, sent = shape.layout.parts * shape.kv, (others * item, others * (item + wide))
    # What arrived and its order by position; dK‖dV, one behind the other, and cut into shards.
    yield _Use("gather", sent, 3, 2 * whole * item + 3 * whole * wide, sent)
    share, heads = whole // shape.kv_heads, shape.kv_heads
    held = 3 * share * item + 3 * share * wide
    yield _Use("stream", sent, 3 * heads, held, sent, 0.5 * (heads - 1) / heads)


def _traded(shape: _Shape, ranks: int) -> tuple[tuple[int, int], int, int]:
    """Of `ranks` that trade: mean bytes that leave one in forward and backward, the memory, and the
    elements of K‖V of the mean rank's heads."""
    trade = Trade(shape.layout, ranks, shape.heads, shape.kv_heads)
    each = shape.kv // shape.kv_heads  # of one head
    copies = sum(len(trade.kv(r)) for r in range(ranks))
    read = sum(len(trade.kv(r)) if trade.even(r) else len(trade.q(r)) for r in range(ranks))
    common = 2 * shape.rows * shape.head_dim * shape.itemsize + shape.rows * shape.wide
    back = shape.wide if trade.copied else shape.itemsize
    forward, backward = (
        (common + copies * each * width) * (ranks - 1) // ranks for width in (shape.itemsize, back)
    )
    held = 2 * (2 * shape.rows * shape.head_dim + copies * each) * shape.itemsize
    return (forward, backward), held, read * each


def _ulysses(shape: _Shape) -> Iterator[_Use]:
    ranks = shape.layout.parts
    if shape.heads >= ranks:
        sent, held, _ = _traded(shape, ranks)
        yield _Use("ulysses", sent, 2 + 2, held, bare=sent)


def _hybrid(shape: _Shape, ranks: int) -> Iterator[_Use]:
    layout = shape.layout
    if shape.heads < ranks or layout.parts % ranks or layout.kind == "balanced":
        return
    if layout.kind == "striped" and 1 < ranks < layout.parts:
        return
    trade = Trade(layout, ranks, shape.heads, shape.kv_heads)
    bare, held, kv = _traded(shape, ranks)
    n, messages, each = _hops(shape, trade.ring)
    width = shape.itemsize, shape.itemsize + shape.wide
    carried = tuple(n * kv * w for w in width)
    sent = tuple(b + int(each * kv) * w for b, w in zip(bare, width))
    memory = held + _buffers(shape, kv)
    yield _Use("hybrid", sent, 4 + messages, memory, carried, n / (n + 1), bare)
