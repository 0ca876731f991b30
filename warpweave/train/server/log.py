"""The log of a run's updates, one line of JSON each, and its staleness statistics.

{"threads": 1, "torch": "2.13.0", "servers": 2}
{"version": 1, "lr": 0.001, "norm": 3.2, "terms": [{"worker": 0, "clock": 0, "pulled": 0, ...}]}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_log(path: Path, head: Row, rows: Iterable[Row]) -> None:
    """Rewrite a log with its first line and the rows to keep."""
    new = path.with_suffix(".tmp")
    new.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)))
    new.replace(path)


def read_log(path: Path) -> tuple[Row, list[Row]]:
    """Read the first line and the rows; skip an incomplete last row of a killed server.

    Raises ValueError if the file is missing or is not a log."""
    try:
        lines = path.read_text().split("\n")[:-1]
        if not lines:
            raise ValueError("it has no complete line")
        head, *rows = [json.loads(line) for line in lines]
        wanted = ({"threads", "servers"}, *[{"terms"}] * len(rows))
        for line, names in zip((head, *rows), wanted, strict=True):
            if not isinstance(line, dict) or names - line.keys():
                raise ValueError("a line has the wrong fields")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a log of updates: {error}") from None
    return head, rows


def staleness_of(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Histograms of the gradients' staleness and delay.

    Staleness is the clocks that the worker was ahead of the slowest when it pulled; delay is the
    updates between pull and application."""
    terms = [(row["version"], term) for row in rows for term in row["terms"]]
    found = {
        "staleness": Counter(term["staleness"] for _, term in terms),
        "delay": Counter(version - 1 - term["pulled"] for version, term in terms),
    }
    return {name: {str(k): of[k] for k in sorted(of)} for name, of in found.items()}


def plot_staleness(rows: Iterable[Row], path: Path) -> None:
    """Plot both histograms as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {
        "staleness": "staleness at pull: steps ahead of the slowest worker",
        "delay": "delay: updates between pull and application",
    }
    figure, both = plt.subplots(1, 2, figsize=(9, 3.5), dpi=120)
    for axes, (name, counts) in zip(both, staleness_of(rows).items(), strict=True):
        axes.bar([int(k) for k in counts], list(counts.values()))
        axes.set_xlabel(labels[name])
        axes.set_ylabel("gradients")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
