"""``warpweave prove``: show that a layout computes what one plain device computes.

`options` the command line, without torch · `command` the ranks it starts and their verdict ·
`layouts` what is proven, listed or drawn · `proof` of one layout, and its limits · `expected` its
batches and what `plain_gpt` makes of them · `typecheck` the types of a program, without any ranks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from warpweave.prove.layouts import Layout
from warpweave.prove.options import ProveConfig, parse

if TYPE_CHECKING:
    from warpweave.prove.command import judge
    from warpweave.prove.proof import LIMITS, Errors, prove_layout

__all__ = ["LIMITS", "Errors", "Layout", "ProveConfig", "judge", "main", "prove_layout"]


def __getattr__(name: str) -> Any:
    """What needs torch, when it is asked for: a wrong option is answered without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "command" if name == "judge" else "proof"
    return getattr(import_module(f"warpweave.prove.{module}"), name)


def main(argv: list[str] | None = None) -> None:
    """The command ``warpweave prove``; torch is imported once its options are understood."""
    config = parse(argv)
    from warpweave.prove.command import run

    run(config)
