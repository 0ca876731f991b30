"""Ranks of a job: start, connect, watch, and restart them.

`ranks` starts ranks (`launch`), and `session` connects them (`join`) · `supervise` watches the
processes of any run, and `interrupt` handles signals · `processes` processes in which torch is
already imported · `devices` the GPU and the backend of each rank · `heartbeat` and `blame` find the
rank that failed.
"""

from typing import TYPE_CHECKING

from warpweave.cli.lazy import names_of

if TYPE_CHECKING:
    from warpweave.launch.interrupt import Stopped
    from warpweave.launch.ranks import launch
    from warpweave.launch.session import Session, join, reported

__all__ = ["Session", "Stopped", "join", "launch", "reported"]

__getattr__ = names_of(
    __name__,
    {"interrupt": ("Stopped",), "ranks": ("launch",), "session": ("Session", "join", "reported")},
)
