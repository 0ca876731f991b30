"""``warpweave tune``: measure tiles on this GPU and keep the best; without a GPU, compile them.

`options` the command line, without torch · `command` runs it · `search` finds the fastest tile ·
`candidates` tiles to try, and faults of compiled ones · `calls` the calls that compare them ·
`timing` on a CUDA device · `aot` compilation for a GPU that is not present.
"""

from typing import TYPE_CHECKING

from warpweave.cli.lazy import names_of
from warpweave.machine.tune.options import TuneConfig

if TYPE_CHECKING:
    from warpweave.machine.tune.command import tune_here
    from warpweave.machine.tune.search import Bench, tune

__all__ = ["Bench", "TuneConfig", "tune", "tune_here"]

__getattr__ = names_of(__name__, {"command": ("tune_here",), "search": ("Bench", "tune")})
