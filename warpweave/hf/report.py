"""The report of `apply`: each module, replaced or kept, and the reason."""

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
        replaced: True if its forward is now warpweave's.
        why: what replaced it, or the reason why it was kept.

    Examples:
        >>> from warpweave.hf import Report
        >>> report = Report()
        >>> report.add("model.norm", "norm", nn.LayerNorm(8), "no weight")
        >>> report.kept()[0].why
        'no weight'
    """

    name: str
    kind: str
    module: str
    replaced: bool
    why: str


@dataclass
class Report:
    """Every module that `apply` inspected; ``str()`` gives a table, one line per kind of module.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from warpweave.hf import apply
        >>> config = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1)
        >>> report = Report()
        >>> model = apply(LlamaModel(config), only=["norm"], report=report)
        >>> print(report)
        3 x LlamaRMSNorm  norm  replaced  rms_norm
    """

    entries: list[Entry] = field(default_factory=list)

    def add(
        self, name: str, kind: str, module: object, why: object, *, replaced: bool | None = None
    ) -> None:
        """Add a module. By default, it counts as replaced unless `why` is a string."""
        replaced = not isinstance(why, str) if replaced is None else replaced
        self.entries.append(Entry(name, kind, type(module).__name__, replaced, str(why)))

    def replaced(self, kind: str | None = None) -> list[Entry]:
        """The entries whose forward is now warpweave's, of one kind or of all."""
        return [e for e in self.entries if e.replaced and kind in (None, e.kind)]

    def kept(self, kind: str | None = None) -> list[Entry]:
        """The entries that were not replaced, of one kind or of all."""
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
