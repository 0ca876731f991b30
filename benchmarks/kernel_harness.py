"""Shared parts of the kernel benchmarks: check a problem's outputs, then time or predict it.

Each family (`kernels_attention.py`, `kernels_norm.py`, ...) has ``problems(scale)`` and calls
`main` here. On a CUDA device every variant's outputs are checked first, against the float64
reference at scale "check" and against each other at "full". Then the variants are timed by events,
in turn and in a new random order each round, with L2 flushed before every call. The report has the
median with p20 and p80, TFLOP/s and GB/s by `kernels/cost.py`, the fraction of the device's peak
*measured in the same run* (a large matrix product, a large copy), and the ratio to every baseline,
slower or faster.

With ``--dry``, and no GPU, our variants at scale "tiny" run in Triton's interpreter and are
compared with the reference; nothing is timed. The times in its table are PREDICTIONS for the full
shapes: the roofline of the data sheet's peaks. No kernel can be faster; they are no claim about
ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:  # Triton reads this when a kernel is decorated, so set it before imports
    os.environ["TRITON_INTERPRET"] = "1"

import harness
import torch
from gate.cases import GATED
from torch import Tensor

from warpweave.kernels.cost import Cost
from warpweave.kernels.devices import TARGETS
from warpweave.kernels.runtime import tiles
from warpweave.machine.tune.timing import CudaTimer, Timer, interleave

OURS = "warpweave"
REFUSALS = (RuntimeError, TypeError, ImportError, AttributeError)  # a baseline cannot run
Outputs = Sequence[Tensor]


@dataclass(frozen=True)
class Problem:
    """One op at one shape.

    Attributes:
        name, shape: in words.
        dtype: the dtype of the inputs.
        cost: the least FLOPs and bytes.
        inputs: creates new inputs on a device.
        variants: "warpweave" and the baselines, by name: inputs -> outputs.
        truth: the reference: inputs of any dtype -> outputs.
        absent: baselines that cannot run here, with the reason.
    """

    name: str
    shape: str
    dtype: torch.dtype
    cost: Cost
    inputs: Callable[[torch.device], tuple[Any, ...]]
    variants: Mapping[str, Callable[..., Outputs]]
    truth: Callable[..., Outputs]
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One variant of one problem; `ratios` has its speed relative to each baseline.

    On a CPU the times are None and `predicted_us` has the rooflines by target.
    """

    name: str
    variant: str
    shape: str
    dtype: str
    error: float
    limit: float
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    tflops: float | None = None
    gb_s: float | None = None
    of_peak: float | None = None
    ratios: dict[str, harness.Ratio] = field(default_factory=dict)
    predicted_us: dict[str, float] = field(default_factory=dict)

    def words(self) -> str:
        """Return the row's line of the table."""
        start = f"{self.name:28} {self.variant:22} {self.dtype:8} "
        start += f"error {self.error:.1e}/{self.limit:.1e}"
        if self.ms is None:
            bound = ", ".join(
                f"{TARGETS[t].name} >= {us:.1f} us" for t, us in self.predicted_us.items()
            )
            return f"{start}  PREDICTION {bound}  {self.shape}"
        return (
            f"{start} {self.ms:8.3f} ms ({self.p20:.3f} to {self.p80:.3f}) {self.tflops:7.1f} "
            f"TFLOP/s {self.gb_s:7.0f} GB/s {self.of_peak:4.0%}{self.more()}  {self.shape}  "
            + ", ".join(f"{x.median:.3f} x {name}" for name, x in self.ratios.items())
        )

    def more(self) -> str:
        """Return text about further measurements."""
        return ""


@dataclass(frozen=True)
class Bench:
    """The device and the limits of the measurements.

    Attributes:
        device, clock: the device, and the timer.
        peak: measured FLOP/s and bytes/s of the device.
        rounds: timed calls of each variant.
        left: seconds until no more problems should be started.
    """

    device: torch.device
    clock: Timer
    peak: tuple[float, float]
    rounds: int
    left: Callable[[], float]


Measured = tuple[list[Row], Mapping[str, str]]
"""A problem's rows, and the baselines that are absent from them, with the reason."""


def wide(value: Any) -> Any:
    """Return a floating-point tensor in float64; return everything else unchanged."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def copied(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return separate copies of the inputs, for a variant that changes them in place."""
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs)


def check(
    problem: Problem, inputs: tuple[Any, ...], only: Sequence[str] = ()
) -> dict[str, tuple[float, float]]:
    """Return the error and limit of every variant (or of `only` these), or raise AssertionError.

    The error is the largest of an output over the output's largest element, against the float64
    reference. The limit is twice the error of the reference itself in this dtype, plus one
    rounding; the baselines must also keep it.
    """
    expected = problem.truth(*copied(tuple(map(wide, inputs))))
    plain = problem.truth(*copied(inputs))
    eps = torch.finfo(problem.dtype).eps
    limit = 2 * max(map(harness.relative_error, plain, expected)) + eps
    found = {}
    for name in only or problem.variants:
        outputs = problem.variants[name](*copied(inputs))
        if len(outputs) != len(expected):
            raise AssertionError(f"{problem.name}: {name} returns {len(outputs)} outputs")
        error = max(map(harness.relative_error, outputs, expected))
        if not error <= limit:
            raise AssertionError(
                f"{problem.name} {problem.shape}: {name} is off by {error:.1e}, limit {limit:.1e}"
            )
        found[name] = (error, limit)
    return found


def agree(problem: Problem, inputs: tuple[Any, ...]) -> None:
    """Raise AssertionError unless every baseline's outputs equal ours up to eight roundings (at
    least 1e-4, for long sums). This runs at the full shape, which is too large for the
    reference."""
    limit = max(8 * torch.finfo(problem.dtype).eps, 1e-4)
    ours = problem.variants[OURS](*copied(inputs))
    for name, call in problem.variants.items():
        if name != OURS:
            theirs = call(*copied(inputs))
            error = max(map(harness.relative_error, theirs, ours))
            if not error <= limit:
                raise AssertionError(
                    f"{problem.name} {problem.shape}: {name} and {OURS} differ by {error:.1e}"
                )


def able(problem: Problem, inputs: tuple[Any, ...]) -> Problem:
    """Return the problem without the baselines that torch refuses to run; they become absent."""
    variants, absent = dict(problem.variants), dict(problem.absent)
    for name, call in problem.variants.items():
        if name == OURS:
            continue
        try:
            call(*copied(inputs))
        except REFUSALS as error:
            del variants[name]
            absent[f"{name} for {problem.name} {problem.shape}"] = reason(error)
    return dataclasses.replace(problem, variants=variants, absent=absent)


def reason(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def forward_backward(forward: Callable[..., Any], wanted: int) -> Callable[..., Outputs]:
    """Return (*inputs, dy) -> (y, gradients of the first `wanted` inputs), for forward -> y."""

    def run(*inputs: Any) -> Outputs:
        *values, dy = inputs
        leaves = [x.detach().requires_grad_() for x in values[:wanted]]
        y = forward(*leaves, *values[wanted:])
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    return run


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` under torch.compile, compiled at its first call (a slow import)."""
    made: list[Callable[..., Any]] = []

    def run(*inputs: Any) -> Any:
        if not made:
            made.append(torch.compile(function, dynamic=False))
        return made[0](*inputs)

    return run


def only_forward(forward: Callable[..., Any]) -> Callable[..., Outputs]:
    """Return (*inputs) -> (forward(*inputs),)."""
    return lambda *inputs: (forward(*inputs),)


def both(
    name: str, shape: str, dtype: torch.dtype, costs: tuple[Cost, Cost],
    inputs: Callable[[torch.device], tuple[Any, ...]], wanted: int,
    variants: Mapping[str, Callable[..., Any]], truth: Callable[..., Any],
    absent: Mapping[str, str] | None = None,
) -> list[Problem]:  # fmt: skip
    """Return a problem for the forward, and one for forward and backward together.

    `inputs` ends with the output's gradient. `costs` are those of the forward and of the backward.
    The first `wanted` inputs get gradients.
    """
    return [
        Problem(
            f"{name} fwd", shape, dtype, costs[0], lambda device: inputs(device)[:-1],
            {n: only_forward(f) for n, f in variants.items()}, only_forward(truth), absent or {},
        ),
        Problem(
            f"{name} fwd+bwd", shape, dtype, costs[0] + costs[1], inputs,
            {n: forward_backward(f, wanted) for n, f in variants.items()},
            forward_backward(truth, wanted), absent or {},
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- on a GPU


def peaks(device: torch.device, clock: CudaTimer) -> tuple[float, float]:
    """Measure FLOP/s of a bfloat16 product of 8192 x 8192 and bytes/s of copying 1 GiB."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    big = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    copy = torch.empty_like(big)
    times = interleave({"mm": lambda: a @ a, "copy": lambda: copy.copy_(big)}, clock, rounds=10)
    return 2 * 8192**3 / min(times["mm"]) * 1e3, 2 * (1 << 30) / min(times["copy"]) * 1e3


def rows(
    problem: Problem, errors: Mapping[str, tuple[float, float]],
    times: Mapping[str, Sequence[float]], peak: tuple[float, float],
) -> list[Row]:  # fmt: skip
    """Return the measured rows of a problem: ours first, with its ratio to each baseline."""
    found = []
    for name, ms in times.items():
        median, low, high = harness._quantiles(ms)
        ratios = {
            other: harness.Ratio(
                *harness._quantiles([b / a for a, b in zip(ms, times[other], strict=True)])
            )
            for other in times
            if name == OURS and other != OURS
        }
        found.append(
            Row(
                problem.name, name, problem.shape, _dtype(problem), *errors[name],
                median, low, high,
                tflops=problem.cost.flops / median / 1e9,
                gb_s=problem.cost.bytes / median / 1e6,
                of_peak=problem.cost.seconds(*peak) * 1e3 / median,
                ratios=ratios,
            )
        )  # fmt: skip
    return found


def measure(small: Problem, problem: Problem, bench: Bench) -> Measured:
    """Check every variant at both shapes, then time it at the second."""
    torch.manual_seed(0)
    inputs = problem.inputs(bench.device)
    problem = able(problem, inputs)
    errors = check(small, small.inputs(bench.device), list(problem.variants))
    agree(problem, inputs)
    calls = {n: lambda f=f: f(*inputs) for n, f in problem.variants.items()}
    times = interleave(calls, bench.clock, rounds=bench.rounds)
    return rows(problem, errors, times, bench.peak), problem.absent


# ---------------------------------------------------------------- without a GPU


def predictions(problem: Problem) -> dict[str, float]:
    """Return the lower bound in microseconds by target: the roofline of the stated peaks."""
    found = {}
    for target in GATED:
        part = TARGETS[target]
        found[target] = problem.cost.seconds(part.half, part.memory) * 1e6
    return found


def _dtype(problem: Problem) -> str:
    return str(problem.dtype).removeprefix("torch.")


def _dry(tiny: Problem, full: Problem) -> list[Row]:
    torch.manual_seed(0)
    errors = check(tiny, tiny.inputs(torch.device("cpu")), [OURS])
    shape = f"{full.shape} (checked at {tiny.shape})"
    return [
        Row(full.name, name, shape, _dtype(full), *errors[name], predicted_us=predictions(full))
        for name in [OURS]
    ]


# ---------------------------------------------------------------- the command


class Table:
    """A family's report, printed and written as it grows, so that a crash keeps earlier rows.

    Args:
        script, claim: those of the family.
        folder: the results folder, or None.
        problems: all problems to measure.
    """

    def __init__(
        self, script: str, claim: str, folder: Path | None, problems: Sequence[Problem]
    ) -> None:
        self.script, self.claim, self.folder = script, claim, folder
        self.left_out = [f"{p.name} {p.shape}" for p in problems]
        self.absent = {name: why for p in problems for name, why in p.absent.items()}
        self.rows: list[Row] = []

    def open(self, **header: Any) -> None:
        """Print the claim; `header` describes the device."""
        command = f"python benchmarks/{self.script}.py"
        self.header = harness.header(command=command, **header)
        dry = self.header["kind"] == "dry"
        print(f"to be tested on a GPU, not here: {self.claim}" if dry else self.claim, flush=True)

    def add(self, problem: Problem, rows: Sequence[Row], absent: Mapping[str, str]) -> None:
        """Add a problem's rows, and the baselines that are absent from them."""
        self.left_out.remove(f"{problem.name} {problem.shape}")
        self.absent |= absent
        self.rows += rows
        for row in rows:
            print(row.words(), flush=True)
        self._write()

    def finish(self) -> None:
        """Print what is missing, and the line of JSON."""
        for name, why in self.absent.items():
            print(f"baseline left out: {name}: {why}")
        for name in self.left_out:
            print(f"not reached in time: {name}")
        self._write()
        print(json.dumps(self._report()), flush=True)

    def _report(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "claim": self.claim,
            "measured": self.header["kind"] != "dry",
            "header": self.header,
            "absent_baselines": self.absent,
            "not_reached_in_time": self.left_out,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def _write(self) -> None:
        if self.folder is not None:
            path = self.folder / self.header["kind"] / f"{self.script}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._report(), indent=1) + "\n")


def main(
    script: str, claim: str, problems: Callable[[str], list[Problem]],
    arguments: list[str] | None = None,
    measure: Callable[[Problem, Problem, Bench], Measured] = measure,
) -> None:  # fmt: skip
    """Run a family: check and time it on the CUDA device, or with --dry check in the interpreter.

    `measure` does the former, for a problem at scale "check" and at "full". Exits with one line if
    there is no CUDA device and --dry was not given.
    """
    options = argparse.ArgumentParser(description=claim)
    options.add_argument("--dry", action="store_true", help="no GPU: check tiny outputs only")
    options.add_argument("--only", default="", help="only problems whose name contains this")
    options.add_argument("--rounds", type=int, default=30, help="timed calls of each variant")
    options.add_argument("--seconds", type=float, default=1e9, help="start no problem after this")
    options.add_argument("--results", type=Path, help="folder; default: benchmarks/results, or "
                         "with --dry none")  # fmt: skip
    options.add_argument("--tiles", type=Path, help="a table written by `warpweave tune`")
    given = options.parse_args(arguments)
    tiles.load(given.tiles)
    if not given.dry and not torch.cuda.is_available():
        options.exit(2, f"{script} times a CUDA device and there is none: pass --dry\n")
    began = time.monotonic()
    folder = given.results
    if folder is None and not given.dry:
        folder = harness.ROOT / "benchmarks" / "results"
    full = [p for p in problems("full") if given.only in p.name]
    table = Table(script, claim, folder, full)
    if given.dry:
        table.open(kind="dry", device="none: interpreted, and times are PREDICTIONS")
        tiny = [p for p in problems("tiny") if given.only in p.name]
        for small, problem in zip(tiny, full, strict=True):
            table.add(problem, _dry(small, problem), {})
    else:
        device = torch.device("cuda")
        name, clock = torch.cuda.get_device_name(device), CudaTimer(device)
        peak = peaks(device, clock)
        table.open(
            kind=name.lower().replace(" ", "-"), device=name, peak_tflops=peak[0] / 1e12,
            peak_gb_s=peak[1] / 1e9, own_tiles=len(tiles.own_rows(name)),
        )  # fmt: skip
        bench = Bench(
            device, clock, peak, given.rounds, lambda: given.seconds - (time.monotonic() - began)
        )
        checks = [p for p in problems("check") if given.only in p.name]
        for small, problem in zip(checks, full, strict=True):
            if bench.left() >= 0:
                torch.cuda.empty_cache()
                table.add(problem, *measure(small, problem, bench))
    table.finish()
