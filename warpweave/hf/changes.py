"""Record of changes to a module of another library, used to undo them.

The record is the attribute `_warpweave` of the module. It holds data and no closures, so a deep
copy of a module has its own record. It also holds facts that replaced forwards need to know about
their module, at most one per class. `note`, `known` and `forget` write, read and remove a fact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

NAME = "_warpweave"
_Fact = TypeVar("_Fact")


@dataclass
class Changes:
    """The changes to one module.

    `before` has (owner, name, value) for attributes that were set, on the module or an object that
    belongs to it, such as its configuration. The value before is in a tuple, empty if there was
    none.
    """

    before: list[tuple[Any, str, tuple]] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)  # their handles
    facts: dict[type, Any] = field(default_factory=dict)  # by their class

    def remember(self, owner: Any, name: str) -> None:
        """Remember an attribute's value for `undo`, unless a value is already remembered."""
        if not any(known is owner and other == name for known, other, _ in self.before):
            value = (owner.__dict__[name],) if name in owner.__dict__ else ()
            self.before.append((owner, name, value))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, until `undo`."""
        self.remember(owner, name)
        owner.__dict__[name] = value

    def restore(self, owner: Any, name: str) -> None:
        """Restore one attribute."""
        for at, (known, other, value) in enumerate(self.before):
            if known is owner and other == name:
                del self.before[at]
                owner.__dict__.pop(name, None)
                if value:
                    owner.__dict__[name] = value[0]
                return

    def undo(self) -> None:
        """Remove the hooks and restore every attribute."""
        for hook in self.hooks:
            hook.remove()
        for owner, name, _ in list(self.before):
            self.restore(owner, name)


def changes_of(module: nn.Module) -> Changes:
    """The record of a module; create an empty one if it has none."""
    return module.__dict__.setdefault(NAME, Changes())


def undo(module: nn.Module) -> None:
    """Undo all changes to a module, if there are any, and remove its record."""
    changes: Changes | None = module.__dict__.pop(NAME, None)
    if changes is not None:
        changes.undo()


def note(module: nn.Module, fact: Any) -> None:
    """Record a fact about a module, replacing any of the same class."""
    changes_of(module).facts[type(fact)] = fact


def known(module: nn.Module, kind: type[_Fact]) -> _Fact | None:
    """The fact of a given class about a module, or None."""
    changes: Changes | None = module.__dict__.get(NAME)
    return None if changes is None else changes.facts.get(kind)


def forget(module: nn.Module, kind: type) -> None:
    """Remove the fact of a given class, and the record if that leaves it empty."""
    changes: Changes | None = module.__dict__.get(NAME)
    if changes is not None:
        changes.facts.pop(kind, None)
        if changes == Changes():
            del module.__dict__[NAME]
