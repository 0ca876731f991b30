"""The clock's predicted times beside what `run_all.py` has measured of the same launches.

    python benchmarks/clock_beside.py                    # on a GPU: after run_all's attention, gemm
    python benchmarks/clock_beside.py --target sm_90     # without: the predictions alone

Each launch is compiled for the part, as `run_all.py` would run it, and read; nothing is timed here.
Its last line counts how many measured times lie in their predictions' intervals, so that a first
hour on a GPU says where the clock is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness
import kernels_attention
import kernels_gemm
import torch

from warpweave.kernels import cost
from warpweave.kernels.attention import function as attention
from warpweave.kernels.cost import Cost
from warpweave.kernels.gemm import fused_gemm
from warpweave.kernels.runtime.dispatch import capability
from warpweave.tune.aot import compiling
from warpweave.tune.parts import PARTS
from warpweave.tune.predicted import predicted

CLAIM = "Nine of ten measured times lie in the intervals that the clock predicts."


class Launch(NamedTuple):
    """A problem of a family: its rows' name and shape, its launches, each with the cost of its
    op."""

    family: str
    name: str
    shape: str
    calls: tuple[tuple[Callable[[], object], Cost], ...]


def launches(only: str = "") -> list[Launch]:
    """What has tensor-core kernels and nothing else that takes time."""
    found = []
    for B, S, H, kv, D, causal in kernels_attention._shapes("full"):
        q, k, row = _meta(B, S, H, D), _meta(B, S, kv, D), _meta(B, H, S, dtype=torch.float32)
        sizes: dict[str, Any] = {"kv_heads": kv, "causal": causal}
        forward = (
            lambda q=q, k=k, c=causal: attention.attention_fwd(q, k, k, causal=c),
            cost.attention(B, S, S, H, D, **sizes),
        )
        backward = (
            lambda q=q, k=k, r=row, c=causal: attention.attention_bwd(q, q, k, k, r, r, causal=c),
            cost.attention(B, S, S, H, D, backward=True, **sizes),
        )
        name = f"attention D={D} {'causal' if causal else 'full'}"
        shape = f"B={B} S={S} H={H}/{kv}"
        found.append(Launch("attention", f"{name} fwd", shape, (forward,)))
        found.append(Launch("attention", f"{name} fwd+bwd", shape, (forward, backward)))
    M, K, N = kernels_gemm.SIZES["full"]
    a, b, bias = _meta(M, K), _meta(K, N), _meta(N)
    for name, activation in (("gemm + bias", None), ("gemm + bias + gelu", "gelu")):
        call = (
            lambda x=activation: fused_gemm(a, b, bias, activation=x, impl="triton"),
            cost.gemm(M, N, K),
        )
        found.append(Launch("gemm", name, f"M={M} N={N} K={K}", (call,)))
    return [x for x in found if only in x.name]


def _meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def outlook(launch: Launch, target: str) -> list[float] | None:
    """PREDICTED microseconds [time, low, high] of all its kernels, or None where the clock cannot
    say of one."""
    total = [0.0, 0.0, 0.0]
    for call, least in launch.calls:
        with compiling(target, clock=True) as found:
            call()
        for kernel in found:
            if kernel.product:  # the others take little beside them
                if (one := predicted(kernel, least, PARTS[target])) is None:
                    return None
                total = [a + b for a, b in zip(total, vars(one).values(), strict=True)]
    return [round(x, 1) for x in total]


def measured(folder: Path) -> dict[tuple[str, str, str], float]:
    """Microseconds of our rows by family, name and shape, from the reports in a device's folder."""
    found = {}
    for family in ("attention", "gemm"):
        path = folder / f"kernels_{family}.json"
        for row in json.loads(path.read_text())["rows"] if path.exists() else []:
            if row["variant"] == "warpweave" and row["ms"] is not None:
                found[family, row["name"], row["shape"]] = row["ms"] * 1e3
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print and return 0: predictions that fail are what it is for."""
    options = argparse.ArgumentParser(description=CLAIM)
    options.add_argument("--target", help=f"of {', '.join(PARTS)}; by default this GPU's")
    options.add_argument("--only", default="", help="launches whose name contains this")
    options.add_argument("--results", type=Path, default=harness.ROOT / "benchmarks" / "results")
    given = options.parse_args(arguments)
    here = f"sm_{capability(torch.device('cuda'))}" if torch.cuda.is_available() else None
    target, todo = given.target or here, launches(given.only)
    if target is None:
        options.exit(2, "clock_beside compares with a GPU's times and there is none: --target\n")
    if target not in PARTS:
        options.error(f"unknown target {target}, known are {', '.join(PARTS)}")
    if not todo:
        options.error(f"no launch has {given.only!r} in its name")
    device = torch.cuda.get_device_name().lower().replace(" ", "-") if target == here else ""
    times = measured(given.results / device) if device else {}
    inside, rows = 0, []
    for launch in todo:
        us, took = outlook(launch, target), times.get((launch.family, launch.name, launch.shape))
        inside += bool(us and took and us[1] <= took <= us[2])
        rows.append({"name": launch.name, "shape": launch.shape, "predicted_us": us, "us": took})
        print(_words(launch, us, took), flush=True)
    both = sum(bool(row["predicted_us"] and row["us"]) for row in rows)
    summary = {"target": target, "measured": both, "inside": inside, "rows": rows}
    print(json.dumps({"script": "clock_beside", "claim": CLAIM, **summary}))
    return 0


def _words(launch: Launch, us: list[float] | None, took: float | None) -> str:
    clock = "PREDICTION {:9.1f} us ({:.1f}-{:.1f})".format(*us) if us else "no prediction"
    beside = "" if took is None else f"  measured {took:9.1f} us"
    if us and took:
        beside += f", {took / us[0]:.2f} of it"
        beside += "" if us[1] <= took <= us[2] else ", OUTSIDE"
    return f"{launch.name:28} {launch.shape:26} {clock}{beside}"


if __name__ == "__main__":
    sys.exit(main())
