"""Hot loops of a compiled kernel and the cost of one iteration of each: counts and PREDICTIONS.

A hot loop is an innermost loop with a tensor-core product. Its figures are for one warp and one
iteration, as if each of the program's warps executed all its instructions and an equal share of the
products.

* `ideal`: the tensor cores' share of the time if everything overlapped, so that only the busiest
  pipe counted. No kernel reaches it.
* `serial`: their share if nothing overlapped, with the products' cycles plus the sum of stalls.
  Kernels whose warps hide each other's waits do better.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from clock.disassembly import Instruction, disassemble
from clock.instructions import (
    SCHEDULERS,
    SHARED_RATE,
    TENSOR_RATE,
    class_of,
    copied,
    expected,
    pipe_of,
    product_of,
    shared_cycles,
)
from clock.loops import natural_loops


@dataclass(frozen=True)
class HotLoop:
    """One hot loop; counts are per warp and iteration.

    Attributes:
        instructions: their number.
        stalls: the sum of their stall counts, in cycles.
        flops: of its tensor-core products, per warp.
        tensor: cycles that these occupy a scheduler's tensor core.
        classes: instructions of each class.
        pipes: cycles of each other pipe, per scheduler; shared memory's are those of its warps.
        shared_bytes: read by products and warps, and written.
        global_bytes: loaded, or copied to shared memory; by TMA if a constant gives the number.
        order: the events between products: P product, W wait for products, B barrier, Y mbarrier,
            D wait for copies, C copy, T copy by TMA, L load and S store of shared memory, E
            special functions; a number counts repetitions.
    """

    instructions: int
    stalls: int
    flops: float
    tensor: float
    classes: dict[str, int]
    pipes: dict[str, float]
    shared_bytes: float
    global_bytes: float
    order: str

    @property
    def bound(self) -> str:
        """The busiest pipe, including tensor cores and issue."""
        return max(self._cycles(), key=self._cycles().__getitem__)

    @property
    def busy(self) -> float:
        """The cycles of the busiest pipe."""
        return self._cycles()[self.bound]

    @property
    def ideal(self) -> float:
        """PREDICTION: tensor cycles over those of the busiest pipe."""
        return self.tensor / self.busy

    @property
    def serial(self) -> float:
        """PREDICTION: tensor cycles over tensor cycles and stalls."""
        return self.tensor / (self.tensor + self.stalls)

    def _cycles(self) -> dict[str, float]:
        return {"tensor": self.tensor, **self.pipes, "issue": self.instructions}


def main_loop(loops: list[HotLoop]) -> HotLoop:
    """The loop in which most iterations are: the others have masks."""
    return max(loops, key=lambda loop: loop.serial)


def read_loops(cubin: bytes, *, arch: int, warps: int) -> tuple[list[HotLoop], int]:
    """Return the hot loops of a cubin in the order of their addresses, and the stalls outside them.

    The cubin is for capability `arch`, and its programs have `warps` warps. A program runs the code
    outside the loops once, a persistent program once per tile.

    Raises ValueError if it is not a cubin, is for a different part, or has no hot loop or products
    that the clock does not know; or if nvdisasm prints an unexpected form.
    """
    if arch not in TENSOR_RATE:
        known = ", ".join(f"sm_{number}" for number in TENSOR_RATE)
        raise ValueError(f"the clock has rates for {known}, not for sm_{arch}")
    found, outside = [], 0
    for code in disassemble(cubin, arch):
        if hot := _hot(code):
            found += [_read(loop, code, arch, warps) for loop in hot]
            inside = {i.address for loop in hot for i in loop}
            outside += sum(i.stall for i in code if i.address not in inside)
    if not found:
        raise ValueError("the cubin has no loop with a tensor-core product, so nothing to predict")
    return found, outside


def _hot(code: list[Instruction]) -> list[list[Instruction]]:
    """The innermost loops with a product."""
    loops = [x for x in natural_loops(code) if any(class_of(i) == "tensor" for i in x)]
    return [x for x in loops if not any({*other} < {*x} for other in loops)]


def _read(loop: list[Instruction], code: list[Instruction], arch: int, warps: int) -> HotLoop:
    """The figures of one loop."""
    classes, pipes = Counter(map(class_of, loop)), Counter[str]()
    shared, loaded, flops, tensor = 0.0, 0.0, 0.0, 0.0  # shared: cycles of the multiprocessor
    at = {i.address: number for number, i in enumerate(code)}
    for i in loop:
        pipe, cycles = pipe_of(i, arch)
        pipes[pipe] += cycles
        shared += shared_cycles(i)
        loaded += copied(i)
        if class_of(i) == "tensor":
            product = product_of(i, code[: at[i.address]])
            own = product.flops / (together := product.warps or warps)
            flops += own
            tensor += own * product.slower * SCHEDULERS / TENSOR_RATE[arch]
            shared += product.reads / SHARED_RATE / together
        elif i.base == "SYNCS":
            by_tma = expected(i, code[: at[i.address]]) / warps
            loaded += by_tma
            shared += by_tma / SHARED_RATE
    del pipes[""]
    return HotLoop(
        instructions=len(loop),
        stalls=sum(i.stall for i in loop),
        flops=flops,
        tensor=tensor,
        classes=dict(classes.most_common()),
        pipes=dict(pipes + Counter({"shared memory": shared * SCHEDULERS})),
        shared_bytes=shared * SHARED_RATE,
        global_bytes=loaded,
        order=_order(loop),
    )


_MARKS = {
    "BAR": "B", "SYNCS": "Y", "DEPBAR": "D", "LDGSTS": "C", "UTMALDG": "T", "UBLKCP": "T",
    "LDSM": "L", "LDS": "L", "STSM": "S", "STS": "S", "MUFU": "E", "UTCBAR": "W",
}  # fmt: skip


def _order(loop: list[Instruction]) -> str:
    """An iteration, in the letters of `HotLoop.order`."""
    runs = [(mark, len([*run])) for mark, run in groupby(filter(None, map(_mark, loop)))]
    return " ".join(mark + (str(count) if count > 1 else "") for mark, count in runs)


def _mark(i: Instruction) -> str:
    if i.opcode.startswith("WARPGROUP.DEPBAR"):
        return "W"
    return "P" if class_of(i) == "tensor" else _MARKS.get(i.base, "")
