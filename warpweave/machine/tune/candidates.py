"""Candidate tiles of a kernel, and their faults once compiled; no GPU is needed.

Candidates are one or two steps from the shipped tile, or for the fused backward of attention, which
has none, from a tile that compiles well for Hopper. A step doubles or halves one side or the warps,
or adds or removes one stage. Candidates are not compiled if a lower bound on their shared
memory or registers exceeds the device. For the others, `fault` describes problems with the compiled
kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpweave.kernels.devices import TARGETS, Device
from warpweave.kernels.runtime.tile_table import SIZES, AttentionTile, GemmTile, Tile
from warpweave.kernels.runtime.tiles import pinned
from warpweave.machine.tune.aot import Compiled, compiling
from warpweave.machine.tune.calls import Problem, other_calls, timed_call

# ---------------------------------------------------------------- candidates


FUSED = AttentionTile(64, 128, 8, 2)  # for head dims 64 and 128 on Hopper nothing spills


def candidates(problem: Problem, part: Device, steps: int) -> list[Tile | None]:
    """The shipped tile, or None without one, then tiles up to `steps` steps from it that could fit,
    nearest first."""
    shipped = problem.shipped(part.arch)
    others = around(FUSED if shipped is None else shipped, steps)
    others = [FUSED, *others] if shipped is None else others
    return [shipped, *(tile for tile in others if could_fit(problem, tile, part))]


def around(tile: Tile, steps: int) -> list[Tile]:
    """Every other tile up to `steps` steps from this one, nearest first."""
    found, edge = {tile: None}, [tile]
    for _ in range(steps):
        edge = [new for old in edge for new in _next(old) if new not in found]
        found |= dict.fromkeys(edge)
    return [*found][1:]


def _next(tile: Tile) -> list[Tile]:
    """Tiles one step from `tile`. The grouping of a walk is not varied, as it only affects L2;
    neither is the number of resident programs, as compiling determines it."""
    sides = [name for name in tile._fields if name not in ("group", "residents", "stages")]
    changes = [{name: getattr(tile, name) * 2} for name in sides]
    changes += [{name: getattr(tile, name) // 2} for name in sides]
    changes += [{"stages": tile.stages + 1}, {"stages": tile.stages - 1}]
    return [
        tile._replace(**change)
        for change in changes
        if all(value in SIZES[name] for name, value in change.items())
        and change.get("warps", 4) in (4, 8)  # Hopper's tensor cores need groups of four warps
    ]


def could_fit(problem: Problem, tile: Tile, part: Device) -> bool:
    """Return False if a lower bound of a tile's needs exceeds the device.

    Shared memory holds the operands of the steps in flight (some versions of Triton keep one of
    `stages` in registers); registers hold the sums and one tile of scores.
    """
    size, wide = problem.size, 2 if problem.size == 8 else 1
    if problem.kernel == "gemm":
        step, held = (tile.m + tile.n) * tile.k, tile.m * tile.n
    else:
        D = max(16, 1 << (problem.head_dim - 1).bit_length())
        fixed, moving, sums = tile.q, tile.k, 1
        if problem.kernel in ("attention_dkdv", "attention_bwd"):
            fixed, moving, sums = tile.k, tile.q, 2
        step, held = 2 * moving * D, sums * fixed * D + fixed * moving
    shared = max(1, tile.stages - 1) * step * size
    return shared <= part.block_shared and held * wide <= 255 * 32 * tile.warps


# ---------------------------------------------------------------- compiled


def compile_tile(target: str, problem: Problem, tile: Tile | None) -> list[Compiled] | str:
    """Compile the timed call with `tile`. Return its kernels, or the error in one line."""
    return _compile(target, problem, tile, timed_call(problem, _meta))


def first_fault(target: str, problem: Problem, tile: Tile) -> str:
    """The first fault of `tile` in the calls that are not timed; "" if there is none. A tile may
    spill as much as the shipped one."""
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
    """The fault of a compiled call; "" if there is none.

    Spilling up to `spilled` bytes is allowed, and any amount in float64, which is for proofs: those
    kernels only have to fit."""
    if isinstance(found, str):
        return found
    for kernel in found:
        if kernel.occupancy == 0:
            return (
                f"does not fit on a multiprocessor ({kernel.shared} bytes of shared memory, "
                f"{kernel.registers} registers per thread)"
            )
        if kernel.stack > spilled and problem.dtype != "fp64":
            return f"spills {kernel.stack} bytes"
    return ""


def resident(tile: Tile | None, found: list[Compiled]) -> Tile | None:
    """Set a product's tile to as many programs per multiprocessor as fit; return others as is."""
    if not isinstance(tile, GemmTile):
        return tile
    return tile._replace(residents=min(kernel.occupancy for kernel in found))


def _compile(
    target: str, problem: Problem, tile: Tile | None, call: Callable
) -> list[Compiled] | str:
    with compiling(target) as found, pinned(problem.pins(tile)):
        try:
            call()
        except Exception as error:  # any compiler pass may fail; other tiles continue
            inner: BaseException = error
            while inner.__cause__ is not None:  # Triton wraps it once per device function
                inner = inner.__cause__
            return " ".join(f"{type(inner).__name__}: {inner}".split())[:200]
    names = problem.replaces or (problem.kernel,)
    own = [c for c in found if problem.kernel == "gemm" or any(n in c.kernel for n in names)]
    if not own or (problem.replaces and (len(own) == 1) is not (tile is not None)):
        raise RuntimeError(f"{problem} did not launch its kernel")
    return own


def _meta(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def target_of(arch: int) -> str:
    """The target of `compiling` for a capability; ValueError if there is none."""
    target = f"sm_{arch}"
    if target not in TARGETS:
        raise ValueError(f"this GPU ({target}) is not supported: expected {', '.join(TARGETS)}")
    return target
