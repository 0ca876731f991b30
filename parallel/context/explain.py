"""The cost of each context-parallel strategy, and the choice of "auto". Arithmetic only.

    links = Links(link=50e9, flops=400e12)
    print(table(explain(SequenceLayout(131072, 8), heads=32, kv_heads=8, head_dim=64, links=links)))

For each strategy this computes what it sends, holds in memory and leaves exposed; it runs nothing.
Bytes are exactly those that leave a rank (`test_explain.py` counts them). Memory is the largest
total of the strategy's own buffers, to leading order, without q, k, v, o and their gradients and
without the workspace of a kernel. Seconds are a prediction from the given speeds: each message is
alone on its link, and compute is spread evenly over the steps of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from warpweave.parallel.context.links import Links
from warpweave.parallel.context.ring import distances, reaches
from warpweave.parallel.context.ulysses import HeadSplit
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.words import Strategy


@dataclass(frozen=True)
class StrategyCost:
    """The cost of a strategy for one rank in the attention of one layer.

    Attributes:
        strategy: its name.
        forward, backward: bytes that leave the rank; the mean over ranks if they differ ("ulysses"
            and "hybrid", and a ring whose blocks travel unequally far).
        messages: number of collectives, or of ring sends, in forward and backward.
        memory: the most bytes held in forward or backward, in addition to inputs and results.
        exposed: predicted seconds in which a link is busy and the rank waits; None without speeds.
        auto: the reason why "auto" chooses this strategy; empty for the others.

    Examples:
        >>> from warpweave import Attention
        >>> from warpweave.parallel.layout import SequenceLayout
        >>> costs = Attention(64, 8).context_costs(SequenceLayout(1024, 4), batch=1)
        >>> costs[0].strategy
        'ulysses'
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
    ulysses: int | None = None,
    links: Links | None = None,
) -> tuple[StrategyCost, ...]:
    """Return the costs of every strategy that fits the layout and the heads, and mark "auto".

    Args:
        layout: the positions that each rank holds.
        heads, kv_heads, head_dim, batch: of this rank's q and k.
        itemsize: bytes of an element of q, k and v.
        causal, window: the mask, which may save messages of the ring.
        ulysses: the Ulysses degree of a pair of groups, for which "hybrid" is the only strategy;
            None for one group.
        links: measured speeds. With them, strategies are sorted by exposed time, then by messages,
            and "auto" is the first that holds at most ``links.memory`` bytes, if any does. Without
            them, strategies are sorted by bytes, and "auto" is what `by_bytes` returns.
    """
    shape = _Shape(layout, heads, kv_heads, head_dim, batch, itemsize, causal, window)
    if ulysses is not None:
        found = [*_hybrid(shape, ulysses)]
    else:
        found = [*_ring(shape), *_gathers(shape), *_ulysses(shape)]
    if links is None:
        costs = [use.cost(None) for use in found]
        costs.sort(key=lambda cost: (cost.forward + cost.backward, cost.memory))
        taken = by_bytes(layout, heads, kv_heads, causal, window, ulysses)
        why = "by bytes: no link speeds were given"
        return tuple(replace(c, auto=why if c.strategy == taken else "") for c in costs)
    costs = [use.cost(use.exposed(shape, links)) for use in found]
    costs.sort(key=lambda cost: (cost.exposed, cost.messages, cost.memory))
    held, why = links.memory, "least exposed time"
    if held is not None:
        why += f" among the strategies that hold at most {held / 1e6:.2f} MB"
    first = next((c for c in costs if held is None or c.memory <= held), None)
    return tuple(replace(c, auto=why) if c is first else c for c in costs)


def by_bytes(
    layout: SequenceLayout,
    heads: int,
    kv_heads: int,
    causal: bool,
    window: int | None,
    ulysses: int | None,
) -> Strategy:
    """Return the strategy that "auto" chooses without link speeds.

    For a pair of groups it is "hybrid"; for a balanced layout, which cannot use a ring, "gather".
    Otherwise it is "ring" if the mask saves the ring messages, because it then sends the least;
    "gather" if P <= 1 + Hq/Hkv, because its forward then sends no more than that of Ulysses, in one
    kernel call; or else "ring", which sends as much as "gather" and holds only two blocks.
    """
    if ulysses is not None:
        return "hybrid"
    if layout.kind == "balanced":
        return "gather"
    if len(distances(layout, causal, window)) < layout.parts:
        return "ring"
    return "gather" if layout.parts <= 1 + heads // kv_heads else "ring"


def table(costs: Sequence[StrategyCost]) -> str:
    """Format the costs as lines of text."""
    lines = ["strategy  forward MB  backward MB  messages  memory MB  exposed ms (predicted)"]
    for c in costs:
        exposed = "unknown" if c.exposed is None else f"{c.exposed * 1e3:.3f}"
        lines.append(
            f"{c.strategy:8}  {c.forward / 1e6:10.2f}  {c.backward / 1e6:11.2f}  {c.messages:8}  "
            f"{c.memory / 1e6:9.2f}  {exposed:>10}{c.auto and f'  auto ({c.auto})'}"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------ resources of each strategy


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
        """Seconds of a rank's attention forward. The backward has 2.5 times as many FLOPs."""
        seen = self.layout.seq_len / (2 if self.causal else 1)
        if self.window is not None:
            seen = min(seen, self.window if self.causal else 2 * self.window)
        return 4 * self.rows * self.head_dim * seen / flops


@dataclass(frozen=True)
class _Use:
    """The resources that a strategy uses on a rank, each as (forward, backward).

    Attributes:
        sent: bytes that leave a rank, the mean over ranks.
        carried: bytes that leave the busiest rank in messages that compute can hide.
        hidden: the fraction of the compute time that can hide them.
        bare: bytes of the Ulysses group's all-to-alls, which nothing hides.
    """

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
        """The exposed seconds at these speeds."""
        forward = shape.tiles(links.flops)
        near = links.link if self.strategy == "ulysses" else links.near or links.link
        return sum(
            bare / near + max(0.0, carried / links.link - tiles * self.hidden)
            for bare, carried, tiles in zip(self.bare, self.carried, (forward, 2.5 * forward))
        )


def _hops(shape: _Shape, layout: SequenceLayout) -> tuple[int, int, int]:
    """Number of ring steps, number of messages in both directions, and number of K‖V blocks that
    all ranks together send in the forward."""
    visits, reach = (of(layout, shape.causal, shape.window) for of in (distances, reaches))
    n, gaps = len(visits) - 1, [b - a for a, b in pairwise(visits)]
    extra = sum(a != b for a, b in pairwise(gaps))  # K‖V and dK‖dV in separate messages
    extra += len({d for d in reach if 0 < d < visits[-1]})  # and owners send theirs again
    return n, n + (n + 1 + extra if n else 0), sum(map(visits.index, reach))


def _ring(shape: _Shape) -> Iterator[_Use]:
    if shape.layout.kind == "balanced":
        return
    n, messages, of_all = _hops(shape, shape.layout)
    width = shape.itemsize, shape.itemsize + shape.wide
    sent = tuple(of_all * shape.kv * w // shape.layout.parts for w in width)
    carried = tuple(n * shape.kv * w for w in width)
    # n messages hide behind n of the n + 1 tiles; no tile hides the backward's first K‖V.
    yield _Use("ring", sent, messages, _buffers(shape, shape.kv), carried, n / (n + 1))


def _buffers(shape: _Shape, kv: int) -> int:
    """The memory of a ring: two buffers of K‖V and dK‖dV, and the gradient of one tile."""
    return 2 * kv * (shape.itemsize + shape.wide) + kv * shape.wide


def _gathers(shape: _Shape) -> Iterator[_Use]:
    others, item, wide = (shape.layout.parts - 1) * shape.kv, shape.itemsize, shape.wide
    whole, sent = shape.layout.parts * shape.kv, (others * item, others * (item + wide))
    # K‖V both as gathered and in order of position; dK, dV both stacked and cut into shards.
    yield _Use("gather", sent, 3, 2 * whole * item + 3 * whole * wide, sent)
    share, heads = whole // shape.kv_heads, shape.kv_heads
    held = 3 * share * item + 3 * share * wide
    yield _Use("stream", sent, 3 * heads, held, sent, 0.5 * (heads - 1) / heads)


def _all_to_all(shape: _Shape, ranks: int) -> tuple[tuple[int, int], int, int]:
    """For a Ulysses group of `ranks`: mean bytes that leave a rank in forward and backward, memory,
    and the elements of K‖V for the heads that the mean rank attends."""
    split = HeadSplit(shape.layout, ranks, shape.heads, shape.kv_heads)
    each = shape.kv // shape.kv_heads  # of one head
    copies = sum(len(split.kv(r)) for r in range(ranks))
    read = sum(len(split.kv(r)) if split.even(r) else len(split.q(r)) for r in range(ranks))
    common = 2 * shape.rows * shape.head_dim * shape.itemsize + shape.rows * shape.wide
    back = shape.wide if split.copied else shape.itemsize
    forward, backward = (
        (common + copies * each * width) * (ranks - 1) // ranks for width in (shape.itemsize, back)
    )
    held = 2 * (2 * shape.rows * shape.head_dim + copies * each) * shape.itemsize
    return (forward, backward), held, read * each


def _ulysses(shape: _Shape) -> Iterator[_Use]:
    ranks = shape.layout.parts
    if shape.heads >= ranks:
        sent, held, _ = _all_to_all(shape, ranks)
        yield _Use("ulysses", sent, 2 + 2, held, bare=sent)


def _hybrid(shape: _Shape, ranks: int) -> Iterator[_Use]:
    layout = shape.layout
    if shape.heads < ranks or layout.parts % ranks or layout.kind == "balanced":
        return
    if layout.kind == "striped" and 1 < ranks < layout.parts:
        return
    split = HeadSplit(layout, ranks, shape.heads, shape.kv_heads)
    bare, held, kv = _all_to_all(shape, ranks)
    n, messages, of_all = _hops(shape, split.ring)
    width = shape.itemsize, shape.itemsize + shape.wide
    carried = tuple(n * kv * w for w in width)
    sent = tuple(b + of_all * kv * w // split.ring.parts for b, w in zip(bare, width))
    memory = held + _buffers(shape, kv)
    yield _Use("hybrid", sent, 4 + messages, memory, carried, n / (n + 1), bare)
