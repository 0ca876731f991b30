"""The report of `apply`: for each module whether it was replaced, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One module.

    Attributes:
        name: its name in the model, "" for the model itself.
        kind: "norm", "mlp", "attention", "rotary", "loss" or, over ranks, "parallel".
        module: its class.
        replaced: whether its forward is warpweave's now.
        why: by what it was replaced, or why it was kept.
    """

    name: str
    kind: str
    module: str
    replaced: bool
    why: str


@dataclass
class Report:
    """Every module that `apply` looked at; as a string, a table of one line per kind of module."""

    entries: list[Entry] = field(default_factory=list)

    def add(
        self, name: str, kind: str, module: object, why: object, *, replaced: bool | None = None
    ) -> None:
        """Add a module; by default it was replaced unless `why` is a string, and no form."""
        replaced = not isinstance(why, str) if replaced is None else replaced
        self.entries.append(Entry(name, kind, type(module).__name__, replaced, str(why)))

    def replaced(self, kind: str | None = None) -> list[Entry]:
        """The entries whose forward is warpweave's now, of one kind or of all."""
        return [e for e in self.entries if e.replaced and kind in (None, e.kind)]

    def kept(self, kind: str | None = None) -> list[Entry]:
        """The entries that stay as they were, of one kind or of all."""
        return [e for e in self.entries if not e.replaced and kind in (None, e.kind)]

    def __str__(self) -> str:
        alike = Counter((e.kind, e.module, e.replaced, e.why) for e in self.entries)
        rows = [
            (f"{count} x {module}", kind, "replaced" if replaced else "kept", why)
            for (kind, module, replaced, why), count in alike.items()
        ]
        wide = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(n) for cell, n in zip(row, wide)), row[3]]) for row in rows
        )
