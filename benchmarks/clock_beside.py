"""Compare the clock's predicted times with what `run_all.py` measured for the same launches.

    python benchmarks/clock_beside.py                    # on a GPU: after run_all's attention, gemm
    python benchmarks/clock_beside.py --target sm_90     # without: only the predictions, a minute

Each launch is compiled as `run_all.py` runs it, and read; nothing is timed here. The last line
counts the measured times that are within their predictions' intervals.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import harness
import kernels_attention
import kernels_gemm
import torch
from clock.kernel import read_kernel
from clock.predict import predicted

from warpweave.kernels import cost
from warpweave.kernels.attention import function as attention
from warpweave.kernels.cost import Cost
from warpweave.kernels.devices import TARGETS
from warpweave.kernels.gemm import fused_gemm
from warpweave.kernels.runtime.dispatch import capability
from warpweave.machine.tune.aot import compiling

CLAIM = "Nine of ten measured times are within the intervals that the clock predicts."


class Launch(NamedTuple):
    """A problem of a family: its rows' name and shape, and its launches with the cost of each."""

    name: str
    shape: str
    calls: list[tuple[Callable[[], object], Cost]]


def launches(only: str = "") -> list[Launch]:
    """Return the problems with tensor-core kernels and nothing else that takes time."""
    found = []
    for B, S, H, kv, D, causal in kernels_attention._shapes("full"):
        q, k, row = _meta(B, S, H, D), _meta(B, S, kv, D), _meta(B, H, S, dtype=torch.float32)
        forward = partial(attention.attention_fwd, q, k, k, causal=causal)
        backward = partial(attention.attention_bwd, q, q, k, k, row, row, causal=causal)
        least = partial(cost.attention, B, S, S, H, D, kv_heads=kv, causal=causal)
        calls = [(forward, least()), (backward, least(backward=True))]
        name, shape = f"attention D={D} {'causal' if causal else 'full'}", f"B={B} S={S} H={H}/{kv}"
        found.append(Launch(f"{name} fwd", shape, calls[:1]))
        found.append(Launch(f"{name} fwd+bwd", shape, calls))
    M, K, N = kernels_gemm.SIZES["full"]
    for name, activation in (("gemm + bias", None), ("gemm + bias + gelu", "gelu")):
        product = partial(fused_gemm, _meta(M, K), _meta(K, N), _meta(N), activation=activation)
        call = partial(product, impl="triton"), cost.gemm(M, N, K)
        found.append(Launch(name, f"M={M} N={N} K={K}", [call]))
    return [x for x in found if only in x.name]


def _meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def outlook(launch: Launch, target: str) -> list[float] | None:
    """Return the PREDICTED microseconds [time, low, high] of all kernels, or None if the clock
    cannot predict one of them."""
    total = [0.0, 0.0, 0.0]
    for call, least in launch.calls:
        with compiling(target) as found:
            call()
        for kernel in (read_kernel(compiled, target) for compiled in found):
            if kernel.product:  # the others take little time in comparison
                if (one := predicted(kernel, least, TARGETS[target])) is None:
                    return None
                total = [a + b for a, b in zip(total, vars(one).values(), strict=True)]
    return [round(x, 1) for x in total]


def measured(folder: Path) -> dict[tuple[str, str], float]:
    """Return the microseconds of our rows by name and shape, from a device folder's reports."""
    paths = [folder / f"kernels_{family}.json" for family in ("attention", "gemm")]
    return {
        (row["name"], row["shape"]): row["ms"] * 1e3
        for path in paths
        for row in (json.loads(path.read_text())["rows"] if path.exists() else [])
        if row["variant"] == "warpweave" and row["ms"] is not None
    }


def main(arguments: list[str] | None = None) -> int:
    """Compare and print; return 0 in any case, as finding wrong predictions is the purpose."""
    options = argparse.ArgumentParser(description=CLAIM)
    options.add_argument("--target", help=f"one of {', '.join(TARGETS)}; default: this GPU's")
    options.add_argument("--only", default="", help="only launches whose name contains this")
    options.add_argument("--results", type=Path, default=harness.ROOT / "benchmarks" / "results")
    given = options.parse_args(arguments)
    here = f"sm_{capability(torch.device('cuda'))}" if torch.cuda.is_available() else None
    if (target := given.target or here) is None:
        options.exit(2, "clock_beside: there is no GPU to compare with; `--target sm_90` prints "
                     "only the predictions\n")  # fmt: skip
    if target not in TARGETS:
        options.error(f"unknown target {target}; expected one of {', '.join(TARGETS)}")
    if not (todo := launches(given.only)):
        options.error(f"no launch has {given.only!r} in its name")
    times = {}
    if target == here:
        times = measured(given.results / torch.cuda.get_device_name().lower().replace(" ", "-"))
    inside, rows = 0, []
    print(f"PREDICTED us on {TARGETS[target].name}; the interval in brackets has nine of ten")
    for launch in todo:
        us, took = outlook(launch, target), times.get((launch.name, launch.shape))
        inside += bool(us and took and us[1] <= took <= us[2])
        rows.append({"name": launch.name, "shape": launch.shape, "predicted_us": us, "us": took})
        print(_words(launch, us, took), flush=True)
    both = sum(bool(row["predicted_us"] and row["us"]) for row in rows)
    summary = {"script": "clock_beside", "claim": CLAIM, "target": target, "measured": both}
    print(json.dumps({**summary, "inside": inside, "rows": rows}))
    return 0


def _words(launch: Launch, us: list[float] | None, took: float | None) -> str:
    clock = "predicted {:9.1f} us ({:.1f}-{:.1f})".format(*us) if us else "no prediction"
    beside = "" if took is None else f"  measured {took:9.1f} us"
    if us and took:
        beside += f", {took / us[0]:.2f} of it"
        beside += "" if us[1] <= took <= us[2] else ", OUTSIDE"
    return f"{launch.name:30} {launch.shape:22} {clock}{beside}"


if __name__ == "__main__":
    sys.exit(main())
