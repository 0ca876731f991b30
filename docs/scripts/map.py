"""Write docs/map.md: every source file, what it is for, and the tests that import it.

python docs/scripts/map.py

What a file is for is the first sentence of its docstring; which tests go with it is read from the
imports in tests/. `tests/test_docs.py` fails when the page is not what this writes.
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
MOST = 5  # tests named in a row
HEAD = """# Map of features and tests

Made by `python docs/scripts/map.py` from the docstrings of the source and the imports of the tests:
do not edit it by hand. A file imports from its own part and from those above it on this page, never
from below (`tests/test_ladder.py`). The tests of a file or folder are those that import it, those
that are named like it first.
"""


def first_sentence(path: Path) -> str:
    """The first sentence of a file's docstring, on one line that a table can hold."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    words = " ".join(text.split("\n\n")[0].split())
    found = re.match(r"(.+?)\.(?= [A-Z`]|$)", words)
    return (found[1] if found else words.rstrip(".:")).replace("|", "\\|")


def module_of(path: Path) -> str:
    """The name under which a source file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "warpweave" else ("warpweave", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a test imports, and what it imports from them, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("warpweave.")}


def tests_by_module() -> dict[str, set[str]]:
    """For each module and package, the tests that import it or something of it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for name in imports_of(path):
            while "." in name:
                found[name].add(path.name)
                name = name.rpartition(".")[0]
    return found


def named(module: str, tests: set[str]) -> str:
    """The tests of a module: first those that are named like it, then by the alphabet."""
    stem = module.rpartition(".")[2]
    order = sorted(tests, key=lambda name: (stem not in name, name))
    return ", ".join(f"`{name}`" for name in order[:MOST]) + " and others" * (len(order) > MOST)


def section(folder: Path, tests: dict[str, set[str]]) -> list[str]:
    """The lines of one folder; of a whole part the tests stand beside each file."""
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
    """The whole page."""
    tests, lines = tests_by_module(), [HEAD]
    for part in PARTS:
        packages = {path.parent for path in (ROOT / part).rglob("__init__.py")}
        for folder in sorted(packages):
            lines += section(folder, tests)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.name}: {len(page().splitlines())} lines")
