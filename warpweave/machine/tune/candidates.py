"""Candidate tiles of a kernel, and what is wrong with each once compiled; no GPU is needed.

Candidates lie a step or two from the shipped tile; a step doubles or halves one side or the warps,
or is one stage more or less. Those that a lower bound on shared memory or registers rules out are
not compiled. `fault` says what is wrong with what the compiler made of the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpweave.kernels.devices import TARGETS, Device
from warpweave.kernels.runtime.tile_table import SIZES, GemmTile, Tile
from warpweave.kernels.runtime.tiles import pinned
from warpweave.machine.tune.aot import Compiled, compiling
from warpweave.machine.tune.calls import Problem, other_calls, timed_call

# ---------------------------------------------------------------- which


def candidates(problem: Problem, part: Device, steps: int) -> list[Tile]:
    """The shipped tile, then those up to so many steps from it that could fit, nearest first."""
    found = [problem.shipped(part.arch)]
    for tile in around(found[0], steps):
        if could_fit(problem, tile, part):
            found.append(tile)
    return found


def around(tile: Tile, steps: int) -> list[Tile]:
    """Every tile up to so many steps from this one, without it, nearest first."""
    found, edge = {tile: None}, [tile]
    for _ in range(steps):
        edge = [new for old in edge for new in _next(old) if new not in found]
        found |= dict.fromkeys(edge)
    return [*found][1:]


def _next(tile: Tile) -> list[Tile]:
    """One step from `tile`. How a walk is grouped only matters to L2, and how many programs reside
    is the compiler's to say."""
    sides = [name for name in tile._fields if name not in ("group", "residents", "stages")]
    changes = [{name: getattr(tile, name) * 2} for name in sides]
    changes += [{name: getattr(tile, name) // 2} for name in sides]
    changes += [{"stages": tile.stages + 1}, {"stages": tile.stages - 1}]
    return [
        tile._replace(**change)
        for change in changes
        if all(value in SIZES[name] for name, value in change.items())
        and change.get("warps", 4) in (4, 8)  # tensor cores of Hopper take warps by fours
    ]


def could_fit(problem: Problem, tile: Tile, part: Device) -> bool:
    """False if a lower bound of a tile's needs exceeds the device.

    That is, in shared memory, the operands of the steps in flight (Triton keeps one of `stages` in
    registers in some versions), and in registers the sums and one tile of scores.
    """
    size, wide = problem.size, 2 if problem.size == 8 else 1
    if problem.kernel == "gemm":
        step, held = (tile.m + tile.n) * tile.k, tile.m * tile.n
    else:
        D = max(16, 1 << (problem.head_dim - 1).bit_length())
        fixed, moving = tile.q, tile.k
        sums = 1
        if problem.kernel == "attention_dkdv":
            fixed, moving, sums = tile.k, tile.q, 2
        step, held = 2 * moving * D, sums * fixed * D + fixed * moving
    shared = max(1, tile.stages - 1) * step * size
    return shared <= part.block_shared and held * wide <= 255 * 32 * tile.warps


# ---------------------------------------------------------------- compiled


def compile_tile(target: str, problem: Problem, tile: Tile) -> list[Compiled] | str:
    """What the compiler makes of the timed call under `tile`, or in a line why it does not."""
    return _compile(target, problem, tile, timed_call(problem, _meta))


def first_fault(target: str, problem: Problem, tile: Tile) -> str:
    """What is wrong with `tile` in the calls that are not timed; "" if nothing is. Where the
    shipped tile spills, it may spill as much."""
    shipped = problem.shipped(TARGETS[target].arch)
    for name, call in other_calls(problem, _meta).items():
        found, spilled = _compile(target, problem, tile, call), 0
        if fault(found, problem):
            known = _compile(target, problem, shipped, call)
            spilled = 0 if isinstance(known, str) else max(kernel.stack for kernel in known)
        if wrong := fault(found, problem, spilled):
            return f"{name}: {wrong}"
    return ""


def fault(found: list[Compiled] | str, problem: Problem, spilled: int = 0) -> str:
    """What is wrong with a compiled call; "" if nothing is. Up to `spilled` bytes are not; nor are
    any in float64, which is for proofs: it has to fit, not to be fast."""
    if isinstance(found, str):
        return found
    for kernel in found:
        if kernel.occupancy == 0:
            return f"{kernel.shared} bytes of shared memory and {kernel.registers} registers"
        if kernel.stack > spilled and problem.dtype != "fp64":
            return f"spills {kernel.stack} bytes"
    return ""


def resident(tile: Tile, found: list[Compiled]) -> Tile:
    """A product's tile with as many programs per multiprocessor as fit; others have no number."""
    if not isinstance(tile, GemmTile):
        return tile
    return tile._replace(residents=min(kernel.occupancy for kernel in found))


def _compile(target: str, problem: Problem, tile: Tile, call: Callable) -> list[Compiled] | str:
    with compiling(target) as found, pinned(problem.pins(tile)):
        try:
            call()
        except Exception as error:  # of any pass of the compiler: the other tiles go on
            inner: BaseException = error
            while inner.__cause__ is not None:  # Triton wraps it once per device function
                inner = inner.__cause__
            return " ".join(f"{type(inner).__name__}: {inner}".split())[:200]
    own = [c for c in found if problem.kernel == "gemm" or problem.kernel in c.kernel]
    if not own:
        raise RuntimeError(f"{problem} launched no kernel of its own")
    return own


def _meta(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def target_of(arch: int) -> str:
    """The target of `compiling` for a capability, or ValueError."""
    target = f"sm_{arch}"
    if target not in TARGETS:
        raise ValueError(f"tiles are compiled for {', '.join(TARGETS)}, and this GPU is {target}")
    return target
