"""``warpweave prove``: show that a layout computes what one plain device computes.

`options` the command line, without torch · `command` the ranks that it starts and their verdict ·
`layouts` the layouts, listed or drawn · `proof` of one layout, and its limits · `expected` the
batches, and the plain model's training on them · `truth` the reference values and the effect of
rounding · `typecheck` the types of a program, without any ranks.
"""

from typing import TYPE_CHECKING

from warpweave.cli.lazy import names_of
from warpweave.prove.layouts import Layout
from warpweave.prove.options import ProveConfig, parse

if TYPE_CHECKING:
    from warpweave.prove.command import judge
    from warpweave.prove.proof import LIMITS, Errors, prove_layout

__all__ = ["LIMITS", "Errors", "Layout", "ProveConfig", "judge", "main", "prove_layout"]


__getattr__ = names_of(
    __name__, {"command": ("judge",), "proof": ("LIMITS", "Errors", "prove_layout")}
)


def main(argv: list[str] | None = None) -> None:
    """The command ``warpweave prove``; torch is imported once its options are understood."""
    config = parse(argv)
    from warpweave.prove.command import run

    run(config)
