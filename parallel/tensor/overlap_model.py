"""What it should cost to hide messages under products: a model, for those who plan. What
`overlap="auto"` takes was measured (`overlap_table`); this says beside it what is to be expected.

    whole      the product, and before or after it the whole collective; `none` takes as long
    chunked    pieces of a rank's rows: the message of one under the product of another
    fused      tiles: a kernel multiplies what has arrived, or sends what it has multiplied

Everything here is PREDICTED from data sheets (`kernels.devices`) and from the constants below, of
which those marked "assumed" are guesses that published measurements bear out
(`benchmarks/overlap.py` prints them side by side). Nothing was measured with this project on
several GPUs. So `recommend` also keeps what is known in general: small products lose by being cut
or fused, whatever a model says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warpweave.kernels.devices import Device

Moves = Literal["gather", "scatter", "reduce"]
Link = Literal["nvlink", "network"]

TILES = ((128, 256, 1.0), (128, 128, 1.1), (64, 128, 1.3))  # and how much longer per FLOP (assumed)
PRODUCT = 0.65  # of the stated FLOP/s that a large product reaches (assumed)
TRITON = 0.95  # of that, for a kernel of ours (wanted, not measured)
TRAFFIC = 0.6  # of a link's stated bytes/s (assumed; NCCL all-gathers on 8 x H100 reach 0.5 to 0.6)
HIDDEN = 0.75  # of what could be hidden (assumed; 0.58 to 0.80 in published large products): the
# rest pays for processors that copy and for memory that is busy
LAUNCH = 5e-6  # seconds (assumed)
MESSAGE = 15e-6  # until a collective, or a message of its own, moves at full speed (assumed)
FLAG = 3e-6  # from a store to a peer that sees the flag (assumed)

LEAST_FLOPS = 1e11  # Triton-distributed falls back below that (`_SMALL_GEMM_FLOPS_THRESHOLD`)
LEAST_ROWS = 2048  # below 2 to 4 thousand tokens every published fused product loses
LEAST_GAIN = 1.02  # less is within the model's error of nothing


@dataclass(frozen=True)
class Product:
    """What one rank multiplies, a[M, K] b[K, N], and what its group moves for it.

    Attributes:
        M: rows, those of all ranks: gathered, or before they are scattered.
        N, K: columns and depth on this rank.
        ranks: of the group.
        moves: "gather": rows of a, before; "scatter" or "reduce": terms of the result, after.
        size: bytes of an element of a and b.
        wire: bytes of an element that moves, by default `size` for rows and 4 for terms.
    """

    M: int
    N: int
    K: int
    ranks: int
    moves: Moves
    size: int = 2
    wire: int | None = None

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K

    @property
    def moved(self) -> int:
        """Bytes that reach a rank in a ring, or go straight from rank to rank."""
        wire = self.wire or (self.size if self.moves == "gather" else max(4, self.size))
        share = self.M * (self.K if self.moves == "gather" else self.N) * wire // self.ranks
        return share * (self.ranks - 1) * (2 if self.moves == "reduce" else 1)


@dataclass(frozen=True)
class Prediction:
    """Seconds: of the product alone, of its messages alone, and of both in each way; `fused` is
    None where there is no way to it."""

    product: float
    messages: float
    whole: float
    chunked: float
    fused: float | None


@dataclass(frozen=True)
class Recommendation:
    """What the model would take and why; `gain`: how many times as fast as `whole` it should be."""

    overlap: Literal["whole", "chunked", "fused"]
    why: str
    gain: float = 1.0
    predicted: Prediction | None = None

    def __str__(self) -> str:
        lines = [f"overlap: {self.overlap}, {self.why}"]
        if p := self.predicted:
            fused = "" if p.fused is None else f", fused {p.fused * 1e6:.0f}"
            lines += [
                f"PREDICTION: {self.gain:.2f} x whole collectives; product {p.product * 1e6:.0f}, "
                f"messages {p.messages * 1e6:.0f},",
                f"whole {p.whole * 1e6:.0f}, chunked {p.chunked * 1e6:.0f}{fused} microseconds",
            ]
        return "\n".join(lines)


# ---------------------------------------------------------------- arithmetic


def product_seconds(M: int, N: int, K: int, device: Device, size: int = 2) -> float:
    """One launch: whole waves of the tiles that suit best, or the traffic, whichever is slower."""
    peak = PRODUCT * (device.half if size <= 2 else device.single) / device.processors
    seconds = []
    for m, n, longer in TILES:
        waves = -(-(-(-M // m) * -(-N // n)) // device.processors)
        seconds.append(waves * longer * 2 * m * n * K / peak)
    traffic = (M * K + K * N + M * N) * size / device.memory
    return LAUNCH + max(min(seconds), traffic)


def predict(
    product: Product, device: Device, link: Link = "nvlink", *, symmetric: bool
) -> Prediction:
    """What the product should take in each way; fused only over NVLink with `symmetric` memory."""
    M, N, K, R = product.M, product.N, product.K, product.ranks
    rate = TRAFFIC * (device.nvlink if link == "nvlink" else device.network)
    alone, moving = product_seconds(M, N, K, device, product.size), product.moved / rate
    whole = alone + MESSAGE + moving

    # a rank's rows after the other's: the first message or the last has nothing to hide under
    piece = product_seconds(-(-M // R), N, K, device, product.size)
    pieces = R if product.moves == "reduce" else R - 1  # own rows stay
    message = MESSAGE + moving / max(pieces, 1)
    chunked = max(R * piece, piece + pieces * message, message + (R - 1) * piece)
    if R > 1:
        chunked += (1 - HIDDEN) * moving

    fused = None
    if symmetric and link == "nvlink":
        fused = _fused(product, device, (alone - LAUNCH) / TRITON, moving, rate)
    return Prediction(alone, MESSAGE + moving, whole, chunked, fused)


def _fused(
    product: Product, device: Device, multiplying: float, moving: float, rate: float
) -> float:
    """Two launches, and a flag between them. Own rows come first, or last, and wait for nobody."""
    R, fixed = product.ranks, 2 * LAUNCH + FLAG
    terms = product.M * product.N * (product.wire or max(4, product.size))
    if product.moves == "reduce":  # in one shot: all terms of all peers, after the product
        return fixed + multiplying + max((R - 1) * terms / rate, R * terms / device.memory)
    shard, message = multiplying / R, moving / max(R - 1, 1)
    hiding = max(multiplying, message + (R - 1) * shard, moving + shard)
    adding = 0.0 if product.moves == "gather" else terms / device.memory
    return fixed + hiding + (1 - HIDDEN) * moving + adding


def recommend(
    product: Product, device: Device | None, link: Link = "nvlink", *, symmetric: bool
) -> Recommendation:
    """What the model would take for a product; `symmetric` says whether the ranks have symmetric
    memory, and None is a device whose figures are not known, such as a CPU."""
    if product.ranks == 1:
        return Recommendation("whole", "one rank moves nothing")
    if device is None:
        return Recommendation("whole", "nothing is known of the speed of this device")
    p = predict(product, device, link, symmetric=symmetric)
    sizes = f"[{product.M}, {product.K}] [{product.K}, {product.N}]"
    where = f"{product.moves} around {sizes} on {product.ranks} x {device.name} over {link}"
    if product.M < LEAST_ROWS:
        return Recommendation("whole", f"{where}: fewer than {LEAST_ROWS} rows", 1.0, p)
    if product.flops < LEAST_FLOPS:
        return Recommendation("whole", f"{where}: less than {LEAST_FLOPS:.0e} FLOP", 1.0, p)
    ways = {"chunked": p.chunked} | ({} if p.fused is None else {"fused": p.fused})
    best = min(ways, key=lambda way: ways[way])
    gain = p.whole / ways[best]
    if gain < LEAST_GAIN:
        return Recommendation("whole", f"{where}: nothing would be faster", 1.0, p)
    return Recommendation("fused" if best == "fused" else "chunked", where, gain, p)
