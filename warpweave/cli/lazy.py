"""Names of a package, each from its module when it is first asked for (PEP 562).

What answers a command line, or `import warpweave` itself, imports no torch that way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_of(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose modules, by their names within it, have these names.

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
