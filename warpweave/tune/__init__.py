"""``warpweave tune``: measure tiles on this GPU and keep the best; without one, compile them.

`command` the command · `search` which tile wins · `candidates` which are tried, and what is wrong
with one · `calls` what they are compared by · `timing` on a CUDA device · `aot` compiles for GPUs
that are not there · `parts` what each GPU offers.
"""

from warpweave.tune.command import TuneConfig, main, tune_here
from warpweave.tune.search import Bench, tune

__all__ = ["Bench", "TuneConfig", "main", "tune", "tune_here"]
