"""Write docs/map.md: every source file, its purpose, and the tests that import it.

    python docs/scripts/map.py

The purpose of a file is the first sentence of its docstring. Its tests are read from the imports in
tests/, including imports through helpers that tests share. `tests/test_docs.py` fails if the page
differs from the output of this script.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "map.md"
PARTS = {
    "kernels": "compute: tensors in, tensors out, no process group",
    "parallel": "move: functions over ranks and plans of work, no parameters",
    "layers": "remember: modules that own parameters, no algorithms",
    "warpweave": "the top: models, training, data, proofs, commands",
}
MOST, FEW = 20, 5  # name all tests of a file if it has at most MOST, otherwise FEW
HEAD = """# Map of features and tests

Made by `python docs/scripts/map.py` from the docstrings of the source and the imports of the tests:
do not edit it by hand. A file imports from its own part and from those above it on this page, never
from below (`tests/test_ladder.py`). The tests of a file or folder are those that import it, by
themselves or through a helper that they share with other tests. Those that are named like it come
first; where there are more than 20, only five are named.
"""


def first_sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring as one line for a table cell."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    words = " ".join(text.split("\n\n")[0].split())
    found = re.match(r"(.+?)\.(?= [A-Z`]|$)", words)
    return (found[1] if found else words.rstrip(".:")).replace("|", "\\|")


def module_of(path: Path) -> str:
    """Return the module name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "warpweave" else ("warpweave", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Helpers:
    """The Python files of tests/ and tests/support/, by the names that tests import."""

    def __init__(self, folder: Path) -> None:
        paths = [*folder.glob("*.py"), *(folder / "support").glob("*.py")]
        self.trees = {path.stem: ast.parse(path.read_text()) for path in paths}
        self.definitions = {stem: definitions_of(tree) for stem, tree in self.trees.items()}
        self._steps: dict[tuple[str, str], tuple[set[str], set[tuple[str, str]]]] = {}

    def modules_of(self, test: str) -> set[str]:
        """Return warpweave's modules that a test imports, and the names it imports from them, as
        dotted names.

        An import from another test file is followed to the function or constant of that name, to
        every name that it refers to in turn, and to their imports.
        """
        found: set[str] = set()
        seen, todo = {(test, "*")}, [(test, "*")]
        while todo:
            ours, others = self._step(*todo.pop())
            found |= ours
            todo += others - seen
            seen |= others
        return found

    def _step(self, stem: str, name: str) -> tuple[set[str], set[tuple[str, str]]]:
        """Return the imports from warpweave of one name in a file ("*": the whole file), and the
        (file, name) pairs that it refers to."""
        if (stem, name) not in self._steps:
            known = self.definitions[stem]
            nodes = [self.trees[stem]] if name == "*" else known.get(name, [])
            imports = {dotted for node in nodes for dotted in imports_in(node)}
            parts = (dotted.partition(".") for dotted in imports)
            others = {(file, part or "*") for file, _, part in parts if file in self.trees}
            if name != "*":
                loads = (n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
                others |= {(stem, loaded) for loaded in loads if loaded in known}
            ours = {dotted for dotted in imports if dotted.startswith("warpweave.")}
            self._steps[stem, name] = ours, others
        return self._steps[stem, name]


def definitions_of(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Return the top-level statements of a file that bind each name."""
    found: dict[str, list[ast.AST]] = defaultdict(list)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name].append(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                one = ast.Import([alias])
                if isinstance(node, ast.ImportFrom):
                    one = ast.ImportFrom(node.module, [alias], node.level)
                found[alias.asname or alias.name.partition(".")[0]].append(one)
        else:
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    found[name.id].append(node)
    return found


def imports_in(tree: ast.AST) -> set[str]:
    """Return all imports anywhere inside a node, as dotted names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def tests_by_module() -> dict[str, set[str]]:
    """Return, for each module and package, the tests that import it or a name from it."""
    found: dict[str, set[str]] = defaultdict(set)
    helpers = Helpers(ROOT / "tests")
    for stem in helpers.trees:
        for name in helpers.modules_of(stem) if stem.startswith("test_") else ():
            while "." in name:
                found[name].add(f"{stem}.py")
                name = name.rpartition(".")[0]
    return found


def named(module: str, tests: set[str]) -> str:
    """List the tests of a module: those with its name first, then the others alphabetically."""
    stem = module.rpartition(".")[2]
    order = sorted(tests, key=lambda name: (stem not in name, name))
    chosen = order if len(order) <= MOST else order[:FEW]
    return ", ".join(f"`{name}`" for name in chosen) + " and others" * (chosen is not order)


def section(folder: Path, tests: dict[str, set[str]]) -> list[str]:
    """Return the lines of one folder. The table of a whole part also has a column of tests."""
    init, is_part = folder / "__init__.py", folder.parent == ROOT
    about = PARTS[folder.name] if is_part else first_sentence(init)
    lines = [f"{'##' if is_part else '###'} {folder.relative_to(ROOT).as_posix()}", ""]
    lines += [f"{about[0].upper()}{about[1:]}."]
    if not is_part and (found := named(module_of(init), tests[module_of(init)])):
        lines += [f"Tests: {found}."]
    files = [path for path in sorted(folder.glob("*.py")) if path != init]
    if files:
        lines += ["", f"| file | what it is for |{' tests |' if is_part else ''}"]
        lines += ["|---|---|" + "---|" * is_part]
    for path in files:
        beside = f" {named(module_of(path), tests[module_of(path)])} |" if is_part else ""
        lines += [f"| `{path.name}` | {first_sentence(path)} |{beside}"]
    return [*lines, ""]


def page() -> str:
    """Return the whole page."""
    tests, lines = tests_by_module(), [HEAD]
    for part in PARTS:
        packages = {path.parent for path in (ROOT / part).rglob("__init__.py")}
        for folder in sorted(packages):
            lines += section(folder, tests)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    text = page()
    PAGE.write_text(text)
    print(f"{PAGE.name}: {len(text.splitlines())} lines")
