"""The compile gate: every kernel compiled for GPUs that are not there, and what is wrong with it.

`cases` the calls that are compiled · `tiles` one for every shipped tile · `planted` kernels that
must be refused · `report` what is read of each kernel, and what may not be · `compile` the process
that compiles. ``benchmarks/compiled.py`` runs all of it (``make compiled``), `test_compiles.py` a
case of each family. It is not installed: scripts in ``benchmarks`` and tests import it as ``gate``.
"""
