"""Run ``warpweave doctor``: the checks in turn, a page of Markdown, and a line of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from warpweave.cli.messages import refusing, say
from warpweave.launch.devices import choose_backend, gpu_count
from warpweave.launch.interrupt import Stopped
from warpweave.launch.processes import Processes, under_torchrun
from warpweave.machine.doctor import machine
from warpweave.machine.doctor.check import Check, Verdict
from warpweave.machine.doctor.check import run as run_checks
from warpweave.machine.doctor.options import DoctorConfig

MINUTES, QUICK = 10.0, 1.0  # no check starts after this many minutes


def half(config: DoctorConfig) -> tuple[str, int]:
    """The device and the number of ranks. Raises ValueError if this machine does not have them."""
    if under_torchrun():
        raise ValueError("doctor starts its own ranks; run it without torchrun")
    device = config.device or ("cuda" if gpu_count() else "cpu")
    most = min(8, gpu_count()) if device == "cuda" else 2
    ranks = config.ranks if config.ranks is not None else min(most, 2) if config.quick else most
    if config.ranks is not None and not 1 <= ranks <= 8:
        raise ValueError(f"ranks must be 1..8, got {ranks}")
    if device == "cuda":
        choose_backend(max(1, ranks), "nccl")
    return device, ranks


def checks(device: str, ranks: int, quick: bool) -> Iterator[Check]:
    """All checks that can run on `device`, the short ones first."""
    if device == "cpu":  # set before Triton is imported, by the next lines and in the ranks
        os.environ["TRITON_INTERPRET"] = "1"
    from warpweave.machine.doctor import kernels
    from warpweave.machine.doctor.ranks import axes, fused

    low = ("bf16", "fp16", "fp32") if device == "cuda" else ("fp32", "fp16")
    dtypes = low[:1] if quick else low
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    yield from machine.copies()
    yield from kernels.family_checks(where, dtypes)
    yield from fused(device, ranks, dtypes)
    yield from axes(device, ranks, ("fp32", "bf16")[: 1 if quick or device == "cpu" else 2])


def times(device: str) -> list[dict[str, Any]]:
    """The rows of `times.time_ops`; none on a CPU, where kernels are interpreted."""
    if device == "cpu":
        return []
    from warpweave.machine.doctor.times import LayerSizes, time_ops
    from warpweave.machine.tune.timing import CudaTimer

    where = torch.device(device, 0)
    return [*time_ops(where, CudaTimer(where), LayerSizes())]


def examine(device: str, ranks: int, quick: bool) -> dict[str, Any]:
    """The summary: the machine, every verdict, and times. Progress goes to stderr."""
    began = time.monotonic()
    found = machine.summary() | {"half": device, "ranks": ranks}
    todo = [*checks(device, ranks, quick)]
    verdicts: list[Verdict] = []
    until = began + 60 * (QUICK if quick else MINUTES)
    try:
        with tqdm(total=len(todo), desc="doctor", disable=None) as bar:
            for verdict in run_checks(todo, until):
                verdicts.append(verdict)
                bar.set_postfix_str(verdict.name)
                bar.update()
                if verdict.passed is False:
                    say(f"{verdict.name} FAILED: {verdict.said}")
    except (Stopped, KeyboardInterrupt):
        found["stopped"] = True
    failed = [v.name for v in verdicts if v.passed is False]
    left_out = len(todo) - sum(v.passed is not None for v in verdicts)
    passed = False if failed else None if left_out else True
    found |= {"passed": passed, "failed": failed, "left_out": left_out}
    found["checks"] = [dataclasses.asdict(verdict) for verdict in verdicts]
    found["times"] = [] if quick or left_out else times(device)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def page(found: dict[str, Any]) -> str:
    """The summary as one page of Markdown."""
    right = sum(bool(row["passed"]) for row in found["checks"])
    lines = ["# warpweave doctor", "", f"`{found['command']}`, {found['seconds']:.0f} s: "]
    lines[-1] += f"**{right} of {len(found['checks'])} checks passed**, {len(found['failed'])} "
    lines[-1] += f"failed, {found['left_out']} left out. {found['half']}, {found['ranks']} ranks."
    if found["half"] == "cpu":
        lines += ["", "CPU only: kernels were interpreted, ranks used gloo, no kernel was timed."]
    said = [f"{name} {version or '-'}" for name, version in found["versions"].items()]
    lines += ["", ", ".join(said), ""] + [f"* {line}" for line in found["devices"]]
    lines += [f"* **{line}**" for line in found["remarks"]]
    if found["half"] == "cuda" and (topology := machine.topology()):
        lines += ["", "```", topology, "```"]
    lines += ["", *_table(("check", "compared with", "error", "limit", "", "s", ""), [
        (row["name"], row["against"], _number(row["error"]), _number(row["limit"]),
         {True: "ok", False: "**FAILED**", None: "left out"}[row["passed"]], row["seconds"],
         row["said"])
        for row in found["checks"]
    ])]  # fmt: skip
    if found["times"]:
        names = list(dict.fromkeys(name for row in found["times"] for name in row))
        cells = [[row.get(name, "") for name in names] for row in found["times"]]
        lines += ["", "Milliseconds, forward, bf16 (AdamW: fp32), L2 flushed before each call:", ""]
        lines += _table(names, cells)
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [[str(x).replace("|", "/") for x in row] for row in (head, ["---"] * len(head), *rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.2g}"


def run(config: DoctorConfig, processes: Processes | None = None) -> NoReturn:
    """Run ``warpweave doctor`` and print one JSON object on the last line.

    Exits with 0 if all checks that started have passed, 1 if not, 2 for invalid options, and 130 if
    it was stopped."""
    with refusing(ValueError, OSError):
        device, ranks = half(config)
        if config.out is not None:
            config.out.mkdir(parents=True, exist_ok=True)
    found = examine(device, ranks, config.quick)
    text, line = page(found), json.dumps(found)
    if config.out is not None:
        (config.out / "doctor.md").write_text(text)
        (config.out / "doctor.json").write_text(line + "\n")
    print(f"{text}\n{line}", flush=True)
    sys.exit(130 if "stopped" in found else 0 if not found["failed"] else 1)
