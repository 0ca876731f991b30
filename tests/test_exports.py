"""The public names of ``import warpweave``: each comes from its module, and
heavy imports are deferred."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import warpweave

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "triton", "numpy", "tyro")


def _typing_block() -> dict[str, str]:
    """Return the modules that a type checker sees for every name."""
    tree = ast.parse(Path(warpweave.__file__).read_text())
    tests = {ast.unparse(node.test): node for node in tree.body if isinstance(node, ast.If)}
    block = tests["TYPE_CHECKING"]
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_a_type_checker_and_the_interpreter_are_told_the_same():
    told = _typing_block()
    assert {*told, "__version__"} == set(warpweave.__all__)
    for name, module in told.items():
        assert getattr(warpweave, name) is getattr(import_module(module), name)
        assert name in dir(warpweave)
    assert sum(map(len, warpweave._MODULES.values())) == len(told)
    assert dir(warpweave) == sorted(warpweave.__all__)


def test_nothing_heavy_is_imported_before_a_class_is_asked_for():
    program = f"""
import sys, warpweave
dir(warpweave), warpweave.__version__
print([name for name in {HEAVY} if name in sys.modules])
from warpweave import RMSNorm
assert RMSNorm(8)(__import__("torch").ones(2, 8)).shape == (2, 8)
print("torch" in sys.modules)
"""
    words = [sys.executable, "-P", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["[]", "True"], done.stderr


_OFFERING = [
    path
    for package in ("kernels", "layers", "parallel", "warpweave")
    for path in sorted((ROOT / package).rglob("__init__.py"))
    if "__all__" in path.read_text() and path != Path(warpweave.__file__)
]


@pytest.mark.parametrize("path", _OFFERING, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_what_a_package_takes_from_its_modules_is_what_it_offers(path):
    tree = ast.parse(path.read_text())
    taken = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("warpweave.")
        for alias in node.names
    }
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    offered = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert (taken - used) | own == set(*offered)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'warpweave' has no attribute 'RMSNrom'"):
        _ = warpweave.RMSNrom


def test_kernel_at_the_root_is_an_attribute_error_that_names_its_module():
    for module, names in warpweave._ELSEWHERE.items():
        for name in names:
            assert callable(getattr(import_module(f"warpweave.{module}"), name))
            with pytest.raises(AttributeError, match=f"^{name} is in warpweave.{module}, not in"):
                getattr(warpweave, name)


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its names mean something else, which would be wrong without an error."""
    transformers = pytest.importorskip("transformers", reason="an extra of its own")
    monkeypatch.setattr(transformers, "__version__", "5.22.3")
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.23, got 5\.22\.3"):
        runpy.run_path(str(Path(warpweave.__file__).parent / "hf" / "__init__.py"))
