"""``warpweave prove``: show that a layout computes what one plain device computes.

`options` defines the command line, without torch · `command` starts the ranks and judges them ·
`layouts` lists or draws the layouts · `proof` proves one layout and holds the limits · `expected`
has the batches and the plain model's training on them · `truth` has the reference values and the
effect of rounding · `graph` proves that CUDA graphs of a step are safe · `recording` records and
replays steps · `typecheck` checks a program's types without any ranks.
"""

from typing import TYPE_CHECKING

from warpweave.cli.lazy import names_of
from warpweave.prove.layouts import Layout
from warpweave.prove.options import ProveConfig, parse

if TYPE_CHECKING:
    from warpweave.prove.command import judge
    from warpweave.prove.graph import GraphProof, graph_safe, prove_graph
    from warpweave.prove.proof import LIMITS, Errors, prove_layout

__all__ = [
    "LIMITS",
    "Errors",
    "GraphProof",
    "Layout",
    "ProveConfig",
    "graph_safe",
    "judge",
    "main",
    "prove_graph",
    "prove_layout",
]


__getattr__ = names_of(
    __name__,
    {
        "command": ("judge",),
        "graph": ("GraphProof", "graph_safe", "prove_graph"),
        "proof": ("LIMITS", "Errors", "prove_layout"),
    },
)


def main(argv: list[str] | None = None) -> None:
    """Run the command ``warpweave prove``; torch is imported only after the options are parsed."""
    config = parse(argv)
    from warpweave.prove.command import run

    run(config)
