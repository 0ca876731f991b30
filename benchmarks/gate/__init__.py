"""Compile gate: compiles every kernel for GPUs that need not be present, and reports failures.

`cases` the calls that are compiled · `tiles` a call for every shipped tile · `planted` kernels that
must be refused · `report` what is read from each kernel, and what must not occur · `compile` the
process that compiles. ``benchmarks/compiled.py`` runs all of it (``make compiled``);
`test_compiles.py` runs a case of each family. The package is not installed: scripts in
``benchmarks`` and tests import it as ``gate``.
"""
