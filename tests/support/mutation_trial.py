"""Does the suite see faults? Plants those of `faults.py`, one at a time, in a copy of the sources.

``python tests/support/mutation_trial.py`` takes hours: for each fault it runs the test files that
import the faulted module or one that imports it, and if they stay green the rest of the suite. The
test that fails must pass without the fault. Prints a line per fault and last a line of JSON; exits
with 1 if more than one fault in sixty survives. ``--quick`` leaves out the rest where such files
exist, ``--only NAME ...`` and ``--tests FILE ...`` choose, ``--list`` only tells what there is.

The copy is imported from a folder of links in which the four rungs stand where an installation has
them; on PYTHONPATH it comes before any installed warpweave, in subprocesses and ranks, too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
RUNGS = ("kernels", "parallel", "layers")
# What installs wheels of its own would import the copy instead.
LEFT_OUT = ("test_packaging.py", "test_mutation_trial.py")
PER_SIXTY = 1


def mutated(fault: Fault, source: str) -> str:
    """`source` with the fault in it; ValueError if the place is not there exactly once."""
    if (times := source.count(fault.old)) != 1:
        raise ValueError(
            f"the trial is out of date: the text of {fault.name} occurs {times} times in "
            f"{fault.file}"
        )
    return source.replace(fault.old, fault.new)


def module_of(file: str) -> str:
    """parallel/zero.py -> warpweave.parallel.zero; warpweave/data/__init__.py -> warpweave.data."""
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if f"{name}.".startswith("warpweave.") else f"warpweave.{name}"


def name_of(source: Path) -> str:
    """The module of a source file of the tree that this file is in."""
    return module_of(source.relative_to(ROOT).as_posix())


def source_files() -> list[Path]:
    """The files of the four rungs."""
    return [path for rung in (*RUNGS, "warpweave") for path in sorted((ROOT / rung).rglob("*.py"))]


def suite_files(folder: Path) -> list[Path]:
    """The suite's files, but for those that cannot run on a copy."""
    return [path for path in sorted(folder.glob("test_*.py")) if path.name not in LEFT_OUT]


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a test file imports, and what it takes from them, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def importers(module: str, files: list[Path]) -> list[Path]:
    """The test files that import `module` or the room it is in: those that bear the name of either
    first, then the smaller."""
    room = module.rpartition(".")[0]
    rungs = {"warpweave", *(f"warpweave.{rung}" for rung in RUNGS)}
    known = {module, room} - rungs
    words = [name.rpartition(".")[2] for name in known]
    mine = [path for path in files if known & imported(path)]
    return sorted(mine, key=lambda p: (not any(w in p.stem for w in words), p.stat().st_size))


def nearest(module: str, files: list[Path]) -> list[Path]:
    """The importers of `module`, and then those of the modules that import it."""
    users = [name_of(path) for path in source_files() if module in imported(path)]
    near = (path for name in (module, *users) for path in importers(name, files))
    return list(dict.fromkeys(near))


class Undecided(Exception):
    """Nothing can be said of a fault: time is up, pytest broke down, a test fails anyway."""


class Copy:
    """The sources and tests in a folder of their own, and what pytest says of them there."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "*.egg-info")
        shutil.copytree(ROOT, self.tree, ignore=skipped)
        package = folder / "links" / "warpweave"
        package.mkdir(parents=True)
        for path in (*(self.tree / "warpweave").iterdir(), *(self.tree / rung for rung in RUNGS)):
            (package / path.name).symlink_to(path)
        self.environment = os.environ | {"PYTHONPATH": str(package.parent)}
        self.writes = 0
        self.sound: set[str] = set()  # tests that passed without a fault

    def write(self, file: str, text: str) -> None:
        """Put `text` into a source file, with a time that no compiled copy of it can have."""
        path = self.tree / file
        path.write_text(text)
        self.writes += 1
        os.utime(path, (self.writes, self.writes))

    def check_imports(self, modules: list[str]) -> None:
        """RuntimeError unless `modules` are imported from here, also in a forkserver's child."""
        program = (
            "import importlib, multiprocessing as mp, os, sys\n"
            "def files(names):\n"
            "    return [os.path.realpath(importlib.import_module(n).__file__) for n in names]\n"
            "if __name__ == '__main__':\n"
            "    with mp.get_context('forkserver').Pool(1) as pool:\n"
            "        print(*files(sys.argv[1:]), *pool.apply(files, (sys.argv[1:],)), sep='\\n')\n"
        )
        script = self.tree / "imports.py"
        script.write_text(program)
        command = [sys.executable, "-P", str(script), *modules]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True
        )
        script.unlink()
        strays = [f for f in done.stdout.split() if not Path(f).is_relative_to(self.tree.resolve())]
        if strays or len(done.stdout.split()) != 2 * len(modules):
            raise RuntimeError(f"not the copy's: {strays or done.stdout}")

    def first_failure(self, tests: list[str], seconds: float) -> str | None:
        """The first test of `tests` that fails, or None; `Undecided` when that cannot be said."""
        command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        with subprocess.Popen(
            [*command, *tests],
            cwd=self.tree,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=max(1.0, seconds))
            except subprocess.TimeoutExpired:
                raise Undecided(f"no failure within {seconds:.0f} s") from None
            finally:  # ranks that a test has started, too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == 0:
            return None
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        if found is None:
            raise Undecided(f"pytest ended with {process.returncode}: {said[-200:]!r}")
        return found[1]

    def catches(self, fault: Fault, tests: list[str], seconds: float) -> str | None:
        """The test that fails with `fault`, and without it does not; None if there is none."""
        source = (self.tree / fault.file).read_text()
        self.write(fault.file, mutated(fault, source))
        try:
            name = self.first_failure(tests, seconds)
        finally:
            self.write(fault.file, source)
        if name is not None and name not in self.sound:
            if self.first_failure([name], 600.0) is not None:
                raise Undecided(f"{name} fails without it, too")
            self.sound.add(name)
        return name


def verdict_on(fault: Fault, copy: Copy, options: argparse.Namespace) -> str:
    """ "caught by <test>", or "SURVIVED" with the reason if it is not that all was green."""
    files = suite_files(copy.tree / "tests")
    own = nearest(module_of(fault.file), files)
    rest = [] if options.quick and own else [path for path in files if path not in own]
    rounds = [own, rest]
    if options.tests is not None:
        rounds = [[Path(test) for test in options.tests]]
    end = time.monotonic() + options.bound
    try:
        for paths in filter(None, rounds):
            tests = [str(Path("tests") / path.name) for path in paths]
            if name := copy.catches(fault, tests, end - time.monotonic()):
                return f"caught by {name}"
    except Undecided as error:
        return f"SURVIVED: {error}"
    return "SURVIVED"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="these test files and no others")
    parser.add_argument(
        "--quick", action="store_true", help="the rest of the suite only for what no test is near"
    )
    parser.add_argument("--bound", type=float, default=3600.0, help="seconds for one fault")
    parser.add_argument("--list", action="store_true", help="list the faults")
    options = parser.parse_args()
    unknown = set(options.only or ()) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [f for f in FAULTS if options.only is None or f.name in options.only]
    if options.list:
        for fault in chosen:
            print(f"{fault.name:32}{fault.file:28}{fault.why}")
        return
    began, survivors = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Copy(Path(folder))
        copy.check_imports(sorted({module_of(fault.file) for fault in chosen}))
        for fault in chosen:
            start = time.monotonic()
            verdict = verdict_on(fault, copy, options)
            if verdict.startswith("SURVIVED"):
                survivors.append(fault.name)
            print(f"{fault.name:32}{time.monotonic() - start:6.0f} s  {verdict}", flush=True)
    passed = len(survivors) <= PER_SIXTY * len(chosen) // 60
    summary = {
        "faults": len(chosen),
        "caught": len(chosen) - len(survivors),
        "survivors": survivors,
        "seconds": round(time.monotonic() - began),
        "passed": passed,
    }
    print(json.dumps(summary))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
