"""Ranks of a job: start, connect, watch, and restart them.

`session` connects ranks (`join`) and starts them (`launch`) · `processes` processes in which torch
is already imported · `devices` the GPU and the backend of each rank · `heartbeat` and `blame` find
the rank that failed · `interrupt` signals.
"""

from typing import TYPE_CHECKING

from warpweave.cli.lazy import names_of

if TYPE_CHECKING:
    from warpweave.launch.session import Session, Stopped, join, launch, reported

__all__ = ["Session", "Stopped", "join", "launch", "reported"]

__getattr__ = names_of(__name__, {"session": ("Session", "Stopped", "join", "launch", "reported")})
