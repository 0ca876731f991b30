"""The API pages: each entry exists, has an example that runs on one rank, and its companions."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, is_typeddict

import pytest
import torch
import torch.distributed as dist
from test_docs import DOCS
from torch import nn

import warpweave

PAGES = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
NAMES = re.findall(r"^::: ([\w.]+)$", PAGES, re.MULTILINE)


def _entry(name: str) -> Any:
    module, _, member = name.rpartition(".")
    return getattr(importlib.import_module(module), member)


ENTRIES = {name: _entry(name) for name in NAMES}


def _is_protocol(entry: Any) -> bool:
    """An interface that users implement. Its implementations have the examples."""
    return getattr(entry, "_is_protocol", False) and not entry.__doc__.count("Examples:")


def test_every_class_that_the_package_exports_is_in_the_reference() -> None:
    members = {name.rpartition(".")[2] for name in NAMES}
    assert set(warpweave.__all__) - {"PRESETS", "__version__"} <= members


@contextlib.contextmanager
def _process_group(code: str) -> Iterator[None]:
    """For an example with torch's own device mesh, the process group that torchrun makes."""
    if "init_device_mesh" not in code:
        yield
        return
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# Their examples are not run.
SEVERAL_RANKS = {
    "warpweave.parallel.context.measure_links",
    "warpweave.parallel.server.worker.Worker",
}


@pytest.mark.parametrize("name", [n for n, entry in ENTRIES.items() if not _is_protocol(entry)])
def test_example_of_an_entry_runs(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    entry = ENTRIES[name]
    known = {"torch": torch, "nn": nn, name.rpartition(".")[2]: entry}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(entry), known, name, None, None)
    assert test.examples, f"{name} has no example"
    assert any(doctest.SKIP in e.options for e in test.examples) == (name in SEVERAL_RANKS)
    printed: list[str] = []
    with _process_group(test.docstring):
        result = doctest.DocTestRunner().run(test, out=printed.append)
    assert result.failed == 0, "".join(printed)


def _annotations(entry: Any) -> Iterator[str]:
    """Yield the annotations of an entry's parameters and, for a function, of its result."""
    if is_typeddict(entry):
        yield from map(str, entry.__annotations__.values())
        return
    signature = inspect.signature(inspect.unwrap(entry))
    public = [p for p in signature.parameters.values() if not p.name.startswith("_")]
    yield from (str(parameter.annotation) for parameter in public)
    yield str(signature.return_annotation)


# An argument that only our own layers pass, as the docstrings say.
INTERNAL = {"Local"}


def test_every_class_in_a_signature_has_an_entry() -> None:
    documented, missing = [*ENTRIES.values()], set()
    for name, entry in ENTRIES.items():
        module = vars(sys.modules[inspect.unwrap(entry).__module__])
        for word in re.findall(r"[A-Z]\w+", " ".join(_annotations(entry))):
            found = module.get(word)
            if inspect.isclass(found) and found.__module__.startswith("warpweave"):
                missing |= set() if found in documented else {(name, word)}
    assert {word for _, word in missing} == INTERNAL, missing
