"""What each strategy of context parallelism sends, holds and leaves exposed: arithmetic, not a run.

    print(table(explain(SequenceLayout(131072, 8), heads=32, kv_heads=8, head_dim=128)))

Bytes are those that leave a rank, exactly (`test_explain.py` counts them). Memory is what the
strategy's own buffers take at once, to leading order: not q, k, v, o and their gradients, nor what
a kernel takes while it runs. Seconds are a prediction: the given speeds, every message alone on its
link, compute spread evenly over hops.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from warpweave.parallel.context.ring import distances, reaches
from warpweave.parallel.context.ulysses import Trade
from warpweave.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class Cost:
    """One strategy for one rank and one layer.

    Attributes:
        strategy: its name.
        forward, backward: bytes that leave the rank; of "ulysses", and of a ring in which not all
            blocks are seen by as many ranks, the mean over ranks.
        messages: collectives or hops in forward and backward, counted over all ranks.
        memory: bytes held at the worst moment of forward or backward besides inputs and results.
        exposed: predicted seconds in which a link is busy and the rank waits.
    """

    strategy: str
    forward: int
    backward: int
    messages: int
    memory: int
    exposed: float


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
    neighbours: int = 1,
    link: float = 50e9,
    flops: float = 400e12,
) -> list[Cost]:
    """The costs of every strategy that fits the layout and the heads, in order of exposed time.

    Args:
        layout: who holds which positions.
        heads, kv_heads, head_dim, batch: of this rank's q and k.
        itemsize: bytes of an element of q, k and v.
        causal, window: the mask, which may spare hops of the ring.
        neighbours: of a pair of groups, the ranks that trade rows for heads: "hybrid" alone then.
        link: bytes per second that a rank sends, one direction.
        flops: FLOP/s that attention reaches.
    """
    P, s, wide = layout.parts, layout.local_len, max(4, itemsize)
    kv = 2 * batch * s * kv_heads * head_dim  # elements of this rank's K‖V
    rows = batch * s * heads
    seen = layout.seq_len / (2 if causal else 1)
    if window is not None:
        seen = min(seen, window if causal else 2 * window)
    tiles = 4 * rows * head_dim * seen / flops  # of the forward; the backward has 2.5 times as much
    found = []

    def add(name: str, sent: tuple[int, int], messages: int, memory: int, hidden: float,
            links: tuple[int, int] | None = None, bare: int = 0) -> None:  # fmt: skip
        pairs = zip(links or sent, (tiles, 2.5 * tiles))  # what the busiest link carries
        exposed = sum(bare / link + max(0.0, n / link - by * hidden) for n, by in pairs)
        found.append(Cost(name, *sent, messages, memory, exposed))

    def ring(layout: SequenceLayout) -> tuple[int, int, int]:
        """Hops, messages, and the mean elements that leave a rank in one direction."""
        visits, reach = (of(layout, causal, window) for of in (distances, reaches))
        n, gaps = len(visits) - 1, [b - a for a, b in pairwise(visits)]
        extra = sum(a != b for a, b in pairwise(gaps))  # K‖V and dK‖dV go on separately
        extra += len({d for d in reach if 0 < d < visits[-1]})  # and some start at home
        messages = n + (n + 1 + extra if n else 0)
        return n, messages, kv * sum(visits.index(d) for d in reach) // layout.parts

    def traded(U: int) -> int:
        """The mean bytes of rows, lse and delta that leave one of U ranks, one direction."""
        return ((2 * rows * head_dim + kv) * itemsize + rows * wide) * (U - 1) // U

    held = 2 * (2 * rows * head_dim + kv) * itemsize
    buffers = 2 * kv * (itemsize + wide) + kv * wide
    if neighbours > 1:
        if heads % neighbours == 0 and kv_heads % neighbours == 0 and P % neighbours == 0:
            n, messages, each = ring(Trade(layout, neighbours, heads, kv_heads).ring)
            part = traded(neighbours)  # which nothing hides
            add("hybrid", (part + each * itemsize, part + each * (itemsize + wide)),
                2 + 2 + messages, held + buffers, n / (n + 1),
                (n * kv * itemsize, n * kv * (itemsize + wide)), part)  # fmt: skip
        return found
    if layout.kind != "balanced":
        n, messages, each = ring(layout)
        # A hop hides behind its tile, and one has none: of the backward that is the first K‖V.
        add("ring", (each * itemsize, each * (itemsize + wide)), messages, buffers, n / (n + 1),
            (n * kv * itemsize, n * kv * (itemsize + wide)))  # fmt: skip
    whole = P * kv
    sent = (P - 1) * kv * itemsize, (P - 1) * kv * (itemsize + wide)
    # What arrived and its order by position; dK‖dV, one behind the other, and cut into shards.
    add("gather", sent, 3, 2 * whole * itemsize + 3 * whole * wide, 0.0)
    share = whole // kv_heads
    add("stream", sent, 3 * kv_heads, 3 * share * itemsize + 3 * share * wide,
        0.5 * (kv_heads - 1) / kv_heads)  # fmt: skip
    if heads >= P and kv_heads % P == 0 and heads % P == 0:
        add("ulysses", (traded(P), traded(P)), 2 + 2, held, 0.0)
    return sorted(found, key=lambda cost: cost.exposed)


def table(costs: list[Cost]) -> str:
    """The costs as lines of text."""
    lines = ["strategy  forward MB  backward MB  messages  memory MB  exposed ms (predicted)"]
    for c in costs:
        lines.append(
            f"{c.strategy:8}  {c.forward / 1e6:10.2f}  {c.backward / 1e6:11.2f}  {c.messages:8}  "
            f"{c.memory / 1e6:9.2f}  {c.exposed * 1e3:10.3f}"
        )
    return "\n".join(lines)
