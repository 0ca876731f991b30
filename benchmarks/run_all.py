"""Check and time kernels and training steps on the CUDA device: one command, nine minutes at most.

    python benchmarks/run_all.py            # writes benchmarks/results/<device>/kernels_*.json
    python benchmarks/run_all.py --dry      # no GPU: checks outputs in the interpreter, time bounds
    python benchmarks/clock_beside.py --target sm_90    # no GPU: PREDICTED times of the same

Each family runs in a separate process, so that a failing one does not end the others, and within
its share of the remaining time. Problems that were not reached are listed, and measurements made
until then are written. At the end, in up to two more minutes, predicted times are compared with the
measured ones (`clock_beside.py`). The exit status is 1 if any family failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Families and their shares of the time: a training step compiles whole models.
FAMILIES = {"attention": 1, "norm": 1, "gemm": 1, "loss": 1, "optimizer": 1, "training": 3}


def main(arguments: list[str] | None = None) -> int:
    """Run the families in sequence; the last line is JSON."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--dry", action="store_true", help="no GPU: check tiny outputs, print time bounds"
    )
    options.add_argument("--minutes", type=float, default=9.0, help="limit for everything")
    options.add_argument("--families", default=",".join(FAMILIES))
    options.add_argument("--results", type=Path, help="folder instead of benchmarks/results")
    options.add_argument("--tiles", type=Path, help="a table written by `warpweave tune`")
    given = options.parse_args(arguments)
    families = given.families.split(",")
    if unknown := [name for name in families if name not in FAMILIES]:
        options.error(f"unknown families {unknown}; expected some of {', '.join(FAMILIES)}")
    end = time.monotonic() + 60 * given.minutes
    summary: dict[str, str] = {}
    for index, family in enumerate(families):
        left = max(0.0, end - time.monotonic())
        share = left * FAMILIES[family] / sum(FAMILIES[name] for name in families[index:])
        # A started problem is finished: it may start until 20 s before the end of the share.
        command = [str(HERE / f"kernels_{family}.py"), f"--seconds={max(0.0, share - 20)}"]
        command += ["--dry"] * given.dry
        command += [f"--results={given.results}"] if given.results else []
        command += [f"--tiles={given.tiles.resolve()}"] if given.tiles else []
        print(f"\n== {family}", flush=True)
        summary[family] = _run(command, left)
    if not given.dry and {"attention", "gemm"} & set(families):
        tiles = " (with the shipped tiles)" if given.tiles else ""
        print(f"\n== predicted{tiles} and measured", flush=True)
        command = [str(HERE / "clock_beside.py")]
        command += [f"--results={given.results}"] if given.results else []
        summary["clock"] = _run(command, 120.0)  # compiles for a minute on 2 cores
    print(json.dumps({"script": "run_all", "dry": given.dry, "families": summary}))
    return 0 if set(summary.values()) == {"ok"} else 1


def _run(command: list[str], seconds: float) -> str:
    """Run a script with its options, print its table without the JSON, and return its result."""
    code = (
        "import sys, runpy; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(HERE), *command],
            capture_output=True, text=True, timeout=max(1.0, seconds),
        )  # fmt: skip
    except subprocess.TimeoutExpired as end:
        print((end.stdout or b"").decode(), "out of time", sep="")
        return "out of time"
    lines = done.stdout.splitlines()
    print("\n".join(lines[:-1] if done.returncode == 0 else lines))
    if done.returncode:
        print(done.stderr[-2000:])
        return f"failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return "ok"


if __name__ == "__main__":
    sys.exit(main())
