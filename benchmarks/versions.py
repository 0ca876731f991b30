"""Run the tests with other Pythons and with the oldest and the newest libraries.

    make versions    # the whole suite: oldest and newest libraries, on the oldest and newest Python
    make pythons     # the pins on every other supported Python: a short training and a few files

The supported Pythons are those of pyproject.toml's classifiers. They are searched for on PATH and
among pyenv's versions. Choose rows with `ARGS="3.12:newest 3.13:pins"`. The library sets are:

    pins      constraints.txt
    oldest    the minimum versions that pyproject.toml declares
    newest    what pip installs without any pin

Each row gets a new venv, which is removed afterwards; if torch includes CUDA, it takes several
gigabytes. The output ends with a Markdown table and one JSON object. The exit status is 1 if an
installation, the training or a test failed, or if a requested Python was not found.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SETS = ("pins", "oldest", "newest")
SHOWN = ("torch", "triton", "numpy", "transformers")
# Processes, options, compilers, and one file per family of kernels: three minutes on two cores.
QUICK = (
    "processes", "options", "train_config", "compile_counts", "ring", "derivatives",
    "kernels_at_random", "attention_halves", "norm", "rope", "qkv", "mlp_kernel", "cross_entropy",
    "adamw", "pipeline",
)  # fmt: skip


def project() -> dict[str, Any]:
    """Return the table ``[project]`` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def supported() -> list[str]:
    """Return the supported Pythons, "3.11" and so on, oldest first."""
    found = (re.fullmatch(r".*:: (3\.\d+)", line) for line in project()["classifiers"])
    return sorted((m[1] for m in found if m), key=lambda name: int(name[2:]))


def interpreters(names: Iterable[str]) -> dict[str, str]:
    """Return the path of each Python in `names` that this machine has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for name in names:
        own = sorted(pyenv.glob(f"{name}.*/bin/python"), key=lambda path: _patch(path.parts[-3]))
        path = own[-1] if own else shutil.which(f"python{name}")
        if path:
            found[name] = str(path)
    return found


def _patch(version: str) -> int:
    digits = re.match(r"\d+", version.rpartition(".")[2])
    return int(digits[0]) if digits else -1


def requirements(libraries: str) -> list[str]:
    """Return the ``pip install`` arguments for a set of libraries, including test tools."""
    if libraries == "pins":
        return ["-c", "constraints.txt", "setuptools", "--no-build-isolation", "-e", ".[dev]"]
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *extras["hf"], *extras["tensorboard"]]
    names = {re.match(r"[\w-]+", line)[0] for line in wanted}
    tools = [line for line in extras["dev"] if re.match(r"[\w-]+", line)[0] not in names]
    if libraries == "newest":
        return [*wanted, *(line.partition("=")[0] for line in tools)]
    return [line.replace(">=", "==") for line in wanted] + tools


def install(python: Path, libraries: str) -> str:
    """Install a set of libraries and this project; return pip's error, empty if there was none."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    project_itself = ["--no-deps", "--no-build-isolation", "-e", "."]
    steps = [["-c", "constraints.txt", "setuptools"], requirements(libraries), project_itself]
    for step in steps:
        done = subprocess.run([*pip, *step], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.splitlines()
            errors = [line for line in lines if line and not line.startswith("WARNING")]
            return " ".join(errors) or f"pip ended with exit status {done.returncode}"
    return ""


def installed(python: Path) -> dict[str, str]:
    """Return the versions of the libraries that the table shows."""
    program = (
        "import importlib.metadata as m, json, sys; print(json.dumps("
        "{n: m.version(n) for n in sys.argv[1:] if any(True for _ in m.distributions(name=n))}))"
    )
    done = subprocess.run(
        [str(python), "-c", program, *SHOWN], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def run_row(name: str, interpreter: str, libraries: str, tests: list[str]) -> dict[str, Any]:
    """Make a venv, train for a few steps, run `tests` (all if empty), and remove the venv."""
    folder = Path(tempfile.mkdtemp(prefix=f"warpweave-{name}-{libraries}-"))
    row: dict[str, Any] = {"python": name, "set": libraries, "installed": {}, "passed": False}
    try:
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
        python = folder / "bin" / "python"
        row["error"] = install(python, libraries)
        if row["error"]:
            print(f"Python {name}, {libraries}: not installed: {row['error']}", flush=True)
            return row
        (folder / ".installed").touch()  # the Makefile's stamp
        row["installed"] = installed(python)
        print(f"Python {name}, {libraries}: {row['installed']}", flush=True)
        make = ["make", f"VENV={folder}", f"PYTHON={interpreter}"]
        short = f"ARGS=--steps 4 --warmup 1 --out {folder}/run"
        trained = subprocess.run([*make, "train", short], cwd=ROOT, check=False).returncode
        chosen = f"ARGS={' '.join(tests)}"
        tested = subprocess.run([*make, "test", chosen], cwd=ROOT, check=False).returncode
        return row | {"passed": trained == 0 and tested == 0}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(rows: list[dict[str, Any]], what: str) -> str:
    """Format the rows as a Markdown table for docs/install.md."""
    date = datetime.date.today().isoformat()
    lines = ["| Python | torch | Triton | numpy | transformers | tests | date |", "|---" * 7 + "|"]
    for row in rows:
        versions = " | ".join(row["installed"].get(name, "-") for name in SHOWN)
        result = what if row["passed"] else f"{what}: FAILED"
        lines.append(f"| {row['python']} | {versions} | {result} | {date} |")
    return "\n".join(lines)


def chosen_rows(names: list[str], others: bool, given: list[str]) -> list[tuple[str, str]]:
    """Return the Python and the library set of each row that the command line chose."""
    own = ".".join(platform.python_version_tuple()[:2])
    if others:
        return [(name, "pins") for name in names if name != own]
    rows = [(name, libraries) for name, _, libraries in (row.partition(":") for row in given)]
    wrong = [row for row, (name, kind) in zip(given, rows) if name not in names or kind not in SETS]
    if wrong:
        sys.exit(f"unknown rows {wrong}: expected PYTHON:SET, of {names} and {list(SETS)}")
    return rows


def main() -> None:
    """Run the command; see the module's docstring."""
    names = supported()
    default = [f"{names[0]}:oldest", f"{names[-1]}:newest"]
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("rows", nargs="*", metavar="PYTHON:SET", help=f"default: {default}")
    options.add_argument("--others", action="store_true", help="the pins on every other Python")
    options.add_argument("--quick", action="store_true", help="a few test files instead of all")
    options.add_argument("--tests", nargs="+", default=[], help="test files instead of all")
    given = options.parse_args()
    wanted = chosen_rows(names, given.others, given.rows or default)
    tests = given.tests or [f"tests/test_{name}.py" for name in QUICK] * given.quick
    found = interpreters(name for name, _ in wanted)
    missing = sorted({name for name, _ in wanted} - {*found})
    if missing:
        print(f"not found on PATH or among pyenv's versions: Python {', '.join(missing)}")
    rows = [run_row(name, found[name], kind, tests) for name, kind in wanted if name in found]
    print(table(rows, "a few files" if tests else "all"))
    passed = all(row["passed"] for row in rows) and (given.others or not missing)
    print(json.dumps({"passed": passed, "missing": missing, "rows": rows}))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
