"""Lazy imports: load each name of a package from its module at its first use (PEP 562).

Command-line parsing and ``import warpweave`` itself therefore do not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_of(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package from a map of its modules to the names they define.

    It raises AttributeError on any other name.
    """

    def get(name: str) -> Any:
        for module, names in modules.items():
            if name in names:
                value = getattr(import_module(f"{package}.{module}"), name)
                setattr(sys.modules[package], name, value)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
