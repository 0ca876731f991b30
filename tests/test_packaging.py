"""Packaging: wheel and editable install import the same; no source is loaded under two names."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNGS = ("kernels", "parallel", "layers", "warpweave")

PROBE = """
import pathlib, sys
import warpweave, warpweave.kernels.norm, warpweave.parallel.mesh, warpweave.layers
from warpweave.kernels.norm import rms_norm
from warpweave.kernels.runtime.tiles import shipped_table
assert shipped_table()
import torch
assert torch.equal(rms_norm(torch.ones(3), torch.ones(3), 0.0), torch.ones(3))
files = {}
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if name.split(".")[0] in ("warpweave", "kernels", "parallel", "layers") and file:
        files.setdefault(pathlib.Path(file).resolve(), []).append(name)
twice = {file: names for file, names in files.items() if len(names) > 1}
assert not twice, twice
import kernels
assert kernels.OWNER == "somebody else", kernels.__file__
print(pathlib.Path(warpweave.kernels.norm.__file__).resolve())
"""


def run(*command: object, cwd: Path) -> str:
    """Return stdout of a command; the assertion shows its whole output on failure."""
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=800
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def pip(*arguments: object, cwd: Path) -> str:
    return run(
        sys.executable, "-P", "-m", "pip", "--no-input", "-q", "--isolated", *arguments, cwd=cwd
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy only the sources, because builds write next to them."""
    folder = tmp_path_factory.mktemp("sources")
    for rung in RUNGS:
        shutil.copytree(ROOT / rung, folder / rung, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a working folder where `kernels` is another project's package, like PyPI's."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text('OWNER = "somebody else"\n')
    return folder


def clean_environment(folder: Path) -> Path:
    """Return the python of a new venv that sees this one's libraries, but not this one's warpweave.

    A folder named in a .pth file is searched, but the .pth files inside it (which make the editable
    install of the project) are not read.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    libraries = sysconfig.get_path("purelib")
    (Path(site.strip()) / "libraries.pth").write_text(libraries + "\n")
    return python


def test_a_wheel_holds_every_source_file_once_and_works(
    copy: Path, elsewhere: Path, tmp_path: Path
) -> None:
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    pip("wheel", *options, "-w", tmp_path / "dist", copy, cwd=tmp_path)
    [wheel] = (tmp_path / "dist").iterdir()
    packed = sorted(n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n)
    expected = sorted(
        ("" if rung == "warpweave" else "warpweave/") + path.relative_to(copy).as_posix()
        for rung in RUNGS
        for pattern in ("*.py", "*.json", "py.typed")
        for path in (copy / rung).rglob(pattern)
    )
    assert packed == expected
    assert "warpweave/py.typed" in packed  # users' type checkers read our annotations
    python = clean_environment(tmp_path / "venv")
    pip("--python", python, "install", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    where = run(python, "-c", PROBE, cwd=elsewhere).strip()
    assert where.startswith(str((tmp_path / "venv").resolve()))
    _works_from_the_checkout(python, copy)


def test_an_editable_install_works_and_a_bare_rung_says_what_to_do(
    copy: Path, elsewhere: Path, tmp_path: Path
) -> None:
    python = clean_environment(tmp_path / "venv")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    pip("--python", python, "install", *options, "-e", copy, cwd=tmp_path)
    where = run(python, "-c", PROBE, cwd=elsewhere).strip()
    assert where == str((copy / "kernels" / "norm" / "__init__.py").resolve())
    _works_from_the_checkout(python, copy)
    for rung in RUNGS[:3]:
        result = subprocess.run(
            [python, "-c", f"import {rung}"], cwd=copy, capture_output=True, text=True, timeout=800
        )
        assert result.returncode == 1
        assert f"ImportError: this folder is the package 'warpweave.{rung}'" in result.stderr
        assert f"import warpweave.{rung}" in result.stderr


@pytest.mark.parametrize("rung", RUNGS[:3])
def test_a_rung_under_another_name_says_which_package_it_is(rung: str) -> None:
    for name in (rung, f"elsewhere.{rung}", f"warpweave.{rung}.{rung}", f"warpweave_{rung}"):
        spec = importlib.util.spec_from_file_location(name, ROOT / rung / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        words = f"^this folder is the package 'warpweave.{rung}', but it was imported as '{name}'"
        with pytest.raises(ImportError, match=words):
            spec.loader.exec_module(module)


_TRANSFORMERS_FIRST = """
from transformers.utils.import_utils import is_kernels_available
assert not is_kernels_available()
import kernels
assert not hasattr(kernels, "__version__")
try:
    from kernels import norm
except ImportError as error:
    print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="an extra of its own")
def test_transformers_imports_in_a_checkout_and_finds_no_kernels_there() -> None:
    words = "this folder is the package 'warpweave.kernels', but it was imported as 'kernels'"
    assert run(sys.executable, "-c", _TRANSFORMERS_FIRST, cwd=ROOT).startswith(words)


_IN_A_PROCESS_TOO = """
import subprocess, sys, warpweave.parallel

def test_it():
    program = "import warpweave.layers; print(warpweave.__file__)"
    found = subprocess.check_output([sys.executable, "-P", "-c", program], text=True)
    assert found.strip() == warpweave.__file__
"""


def test_a_checkout_that_nobody_installed_works_and_so_do_its_tests(
    copy: Path, tmp_path: Path
) -> None:
    python = clean_environment(tmp_path / "venv")
    _works_from_the_checkout(python, copy)
    (copy / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", copy / "tests")
    (copy / "tests" / "test_it.py").write_text(_IN_A_PROCESS_TOO)
    for pytest_ in (("-P", "-m", "pytest"), ("-m", "pytest")):
        run(python, *pytest_, "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
            "--rootdir", copy, copy / "tests" / "test_it.py", cwd=tmp_path)  # fmt: skip


def _works_from_the_checkout(python: Path, checkout: Path) -> None:
    """Run with the checkout as working folder, which takes precedence
    over the installed package."""
    program = (
        "import warpweave.layers, warpweave.kernels.norm, warpweave.parallel.mesh\n"
        "print(warpweave.kernels.norm.__file__)\n"
    )
    file = checkout / "kernels" / "norm" / "__init__.py"
    assert run(python, "-c", program, cwd=checkout).strip() == str(file)
    assert run(python, "-m", "warpweave", "--version", cwd=checkout).startswith("warpweave ")


def test_no_source_file_is_loaded_under_two_names_here() -> None:
    import warpweave.kernels
    import warpweave.layers
    import warpweave.parallel  # noqa: F401

    names: dict[Path, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(file).resolve() if isinstance(file, str) else None
        empty = name == "kernels"  # transformers looks for PyPI's if the checkout is on sys.path
        if path is not None and path.parent in {ROOT / rung for rung in RUNGS} and not empty:
            names.setdefault(path, []).append(name)
    assert len(names) >= 4
    assert not {path: found for path, found in names.items() if len(found) > 1}


def test_the_pins_agree_with_each_other() -> None:
    """Every exact version in pyproject.toml equals the one in
    constraints.txt; no index is named."""
    import re

    pins, text = {}, (ROOT / "constraints.txt").read_text()
    for line in re.findall(r"^[^#\n].*$", text, re.MULTILINE):
        match = re.fullmatch(r'([\w.-]+)==([\w.]+)(; python_version >= "3\.11")?', line)
        assert match, f"no plain pin: {line!r}"
        name = match[1].lower().replace("_", "-")
        assert name not in pins, f"{name} is pinned twice"
        pins[name] = match[2]
    project = (ROOT / "pyproject.toml").read_text()
    exact = re.findall(r'"([\w.-]+)==([\w.]+)', project)
    assert exact
    assert {n.lower().replace("_", "-"): v for n, v in exact}.items() <= pins.items()
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
    assert tuple(map(int, pins["numpy"].split(".")))[:2] < (2, 4)
    [installed] = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    bounds = re.findall(r'^    "([\w-]+)([^";]*)', installed, re.MULTILINE)
    assert {name for name, _ in bounds} >= {"torch", "triton", "numpy"}
    assert all(re.fullmatch(r">=[\d.]+", bound) for _, bound in bounds), "caps are for the pins"


PUBLIC = {
    "kernels.attention": ["attention", "attention_fwd", "attention_bwd"],
    "kernels.norm": ["rms_norm", "layer_norm"],
    "kernels.rope": ["apply_rope", "rope_table"],
    "kernels.mlp": ["gelu_mlp", "swiglu_mlp"],
    "kernels.cross_entropy": ["cross_entropy", "linear_cross_entropy"],
    "kernels.adamw": ["adamw_step"],
    "kernels.gemm": ["gemm"],
    "parallel.mesh": ["Mesh"],
    "parallel.schedule": ["gpipe", "one_f_one_b"],
    "parallel.simulate": ["simulate"],
    "parallel.context": ["context_attention"],
    "layers.linear": ["ColumnParallelLinear", "RowParallelLinear"],
    "layers.embedding": ["VocabParallelEmbedding"],
    "layers.norm": ["RMSNorm", "LayerNorm"],
    "layers.attention": ["Attention"],
    "layers.mlp": ["MLP"],
    "layers.block": ["TransformerBlock"],
    "layers.sharding": ["ColwiseParallel", "shard"],
    "checkpoint": ["open_checkpoint"],
    "launch": ["Session", "join"],
    "prove": ["main"],
}


def test_public_names_are_where_they_are_promised() -> None:
    for module, names in PUBLIC.items():
        found = importlib.import_module(f"warpweave.{module}")
        assert not [name for name in names if not callable(getattr(found, name, None))], module
