"""Run numeric tests as other kinds of CPU would, with environment variables of torch's libraries.

    make cpus                                     # every setting; ARGS="--settings native AVX2"
    python benchmarks/cpus.py --settings OMP_NUM_THREADS=2 --tests tests/test_prove.py

A setting is a name in `SETTINGS`, or your own variables: ``NAME=value,NAME=value``. Each setting
runs the tests in a new pytest process and prints a line: the result, the counts, and whether it
changes any bit of products, sums and exponentials on this CPU (MKL_ENABLE_INSTRUCTIONS has no
effect on AMD CPUs). The exit status is 1 if a test failed; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2"),
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX2", "AVX512_CORE"),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2"),
    "MKL_CBWR": ("COMPATIBLE",),
    "OMP_NUM_THREADS": ("1", "2", "4"),
}
SETTINGS = {  # the first three are kinds of CPU
    "native": {},
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "SSE": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
} | {f"{name}={value}": {name: value} for name, values in VARIABLES.items() for value in values}
TESTS = (
    "activation", "adamw", "attention", "attention_halves", "attention_layer", "attention_mask",
    "attention_scores", "batch_norm", "block", "chunked", "context", "cross_entropy", "derivatives",
    "doctor_figures", "dropout", "dtypes", "embedding", "engine", "gemm", "gpt", "hf_training",
    "hybrid_sharding", "kernel_gradients", "kernels_at_random", "linear", "linear_cross_entropy",
    "linear_cross_entropy_halves", "linear_loss", "loss", "losses", "merge", "mlp", "mlp_kernel",
    "muon", "norm", "norm_halves", "norm_layer", "numeric", "ordered", "outer", "parallel_mlp",
    "parallel_qkv", "pipeline", "plain_gpt", "planted_faults", "prove", "qkv", "ring", "rope",
    "schedules", "sums", "tensor", "ulysses", "unit_parts", "zero", "zero_step",
)  # fmt: skip


def setting(words: str) -> tuple[str, dict[str, str]]:
    """Parse a setting from the command line; return its name and variables."""
    if words in SETTINGS:
        return words, SETTINGS[words]
    pairs = [pair.partition("=") for pair in words.split(",")]
    if not all(name and value for name, _, value in pairs):
        raise argparse.ArgumentTypeError(
            f"expected NAME=value[,NAME=value] or one of {', '.join(SETTINGS)}, got {words!r}"
        )
    return words, {name: value for name, _, value in pairs}


def bits() -> str:
    """Return a digest of results whose last bits depend on instructions, libraries and threads."""
    generator, found = torch.Generator().manual_seed(0), hashlib.sha256()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = (torch.rand(257, 193, generator=generator, dtype=torch.float64) - 0.5).to(dtype)
        q = x[:256].reshape(1, 4, 64, 193)
        for y in (
            x @ x.t(),
            q @ q.mT,
            torch.exp(x),
            x.softmax(-1),
            x.sum(),
            x.sum(0),
            torch.nn.functional.gelu(x, approximate="tanh"),
            torch.nn.functional.scaled_dot_product_attention(q, q, q),
        ):
            found.update(y.double().numpy().tobytes())
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # oneDNN, as in kernels/gemm/cpu.py
        x = torch.rand(257, 193, generator=generator)
        y = torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], "")
        found.update(y.numpy().tobytes())
    return found.hexdigest()


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with the variables of one setting only.

    Waiting threads sleep, because a test machine may have fewer cores than threads.
    """
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | kept | variables


def bits_under(variables: dict[str, str]) -> str:
    """Compute `bits` in a new process."""
    return subprocess.run(
        [sys.executable, __file__, "--bits"],
        env=environment(variables), capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


def run(variables: dict[str, str], tests: list[str], workers: int) -> dict[str, Any]:
    """Run pytest under a setting; return the counts and the failed tests."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *tests]
        if workers > 1:
            command += ["-n", str(workers), "--dist", "loadfile"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(variables), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    if done.returncode not in (0, 1) or (done.returncode == 1) != bool(failed) or not cases:
        print(done.stdout[-4000:] + done.stderr[-4000:], file=sys.stderr)
        failed.append(f"pytest ended with exit status {done.returncode} after {len(cases)} tests")
    return {
        "passed": not failed,
        "tests": len(cases),
        "skipped": skipped,
        "failed": failed,
        "seconds": round(time.monotonic() - begun),
    }


def main() -> None:
    """Run the command; see the module's docstring."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [setting(name) for name in SETTINGS]
    options.add_argument("--settings", nargs="+", type=setting, default=every, metavar="SETTING")
    options.add_argument("--tests", nargs="+", default=[f"tests/test_{n}.py" for n in TESTS])
    options.add_argument("--workers", type=int, default=1, help="pytest processes")
    options.add_argument("--bits", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.bits:
        print(bits())
        return
    native, rows = bits_under({}), {}
    for name, variables in chosen.settings:
        row = run(variables, chosen.tests, chosen.workers)
        row["changes_bits"] = bits_under(variables) != native
        rows[name] = row
        print(
            f"{'ok    ' if row['passed'] else 'FAILED'} {name}: {row['tests']} tests, "
            f"{row['skipped']} skipped, {len(row['failed'])} failed, {row['seconds']} s, "
            f"{'different bits from' if row['changes_bits'] else 'the same bits as'} native",
            *row["failed"], sep="\n       ", flush=True,
        )  # fmt: skip
    passed = all(row["passed"] for row in rows.values())
    cpu = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "")
    print(json.dumps({"passed": passed, "cpu": cpu, "torch": torch.__version__, "settings": rows}))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
