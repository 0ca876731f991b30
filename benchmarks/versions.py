"""Kernel and rank tests under the oldest declared and the newest versions, in throw-away venvs.

    make versions                       # both; ARGS="--sets newest --tests tests/test_norm.py"

The oldest are the floors of pyproject.toml. Each set is installed by pip from the index, gigabytes
where it brings CUDA, and removed afterwards. A version that the index or pip's constraints do not
give is named, and the newest that they do give takes its place. The exit status is 1 if a set
could not be installed or its tests failed; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEWEST = {"torch": "2.15.0", "triton": "3.9.0", "numpy": "2.4.6", "transformers": "5.23.0"}
NEEDS = (
    "safetensors", "tyro", "tokenizers", "tqdm", "matplotlib", "pytest", "pytest-timeout",
    "spmd_types",
)  # fmt: skip
# A warning of Triton 3.6's own interpreter, from numpy 1.25 on; all others are errors, as always.
TRITONS_OWN = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
TESTS = (
    "kernels_at_random", "kernel_gradients", "overlap", "overlap_protocol", "quick_interpreter",
    "collectives", "ring", "ulysses", "zero", "pipeline",
)  # fmt: skip


def oldest() -> dict[str, str]:
    """The floors that pyproject.toml declares of the same packages."""
    text = (ROOT / "pyproject.toml").read_text()
    found = {name: re.search(rf'"{name}>=([\d.]+)', text) for name in NEWEST}
    return {name: match[1] for name, match in found.items() if match is not None}


def install(python: Path, versions: dict[str, str]) -> list[str]:
    """Install `versions`, torch first with the Triton that it brings; what could not be had."""
    lacking = []

    def pip(*words: str) -> bool:
        command = [python, "-m", "pip", "install", "--quiet", *words]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        return done.returncode == 0

    torch = f"torch=={versions['torch']}"
    if not pip(torch):
        lacking.append(torch)
        if not pip(f"torch<{versions['torch']}"):
            return [*lacking, "any torch before it"]
    for name in [name for name in versions if name != "torch"]:
        only = ["--no-deps"] * (name == "triton")  # torch asks for the one that it ships
        if not pip(*only, f"{name}=={versions[name]}"):
            lacking.append(f"{name}=={versions[name]}")
    if not pip(*NEEDS):
        lacking.append("what the tests need")
    return lacking


def seen(python: Path) -> dict[str, str]:
    """The versions that are installed."""
    program = (
        "import importlib.metadata as m, json, sys; print(json.dumps("
        "{n: m.version(n) for n in sys.argv[1:] if any(True for _ in m.distributions(name=n))}))"
    )
    done = subprocess.run(
        [python, "-c", program, *NEWEST], capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout or "{}")


def try_set(name: str, versions: dict[str, str], tests: list[str]) -> dict:
    """Make a venv with `versions`, run `tests` in it, remove it; what came of it."""
    folder = Path(tempfile.mkdtemp(prefix=f"warpweave-{name}-"))
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        python = folder / "bin" / "python"
        lacking = install(python, versions)
        for what in lacking:
            print(f"{name}: not to be had here: {what}", flush=True)
        row = {"set": name, "wanted": versions, "lacking": lacking, "installed": seen(python)}
        print(f"{name}: {row['installed']}", flush=True)
        if "torch" not in row["installed"]:
            return row | {"passed": False}
        command = [python, "-P" if sys.version_info >= (3, 11) else "-s", "-m", "pytest", "-q"]
        command += ["-W", TRITONS_OWN]
        code = subprocess.run([*map(str, command), *tests], cwd=ROOT, check=False).returncode
        return row | {"passed": code == 0}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """See the module."""
    sets = {"newest": NEWEST, "oldest": oldest()}
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sets", nargs="+", choices=[*sets], default=[*sets])
    tests = [f"tests/test_{name}.py" for name in TESTS]
    options.add_argument("--tests", nargs="+", default=tests)
    chosen = options.parse_args()
    rows = [try_set(name, sets[name], chosen.tests) for name in chosen.sets]
    print(json.dumps({"passed": all(row["passed"] for row in rows), "sets": rows}))
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


if __name__ == "__main__":
    main()
