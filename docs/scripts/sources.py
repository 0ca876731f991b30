"""A hook of mkdocs: link the sources at their import paths, as an installation has them.

The API pages are read from the sources without importing them. In a checkout, kernels/, parallel/,
and layers/ are next to warpweave/, and setuptools' package-dir mapping is unknown to griffe.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINKS = ROOT / "build" / "sources" / "warpweave"  # `paths` in mkdocs.yml


def on_startup(**_: Any) -> None:
    """Make the tree of links again, before mkdocstrings looks for its `paths`."""
    shutil.rmtree(LINKS, ignore_errors=True)
    LINKS.mkdir(parents=True)
    parts = [ROOT / part for part in ("kernels", "parallel", "layers")]
    for path in (*parts, *(ROOT / "warpweave").iterdir()):
        (LINKS / path.name).symlink_to(path)
