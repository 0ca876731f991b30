"""A planned layout as options of ``warpweave train`` and ``warpweave prove``.

``--layout plan.json`` uses the first layout of the file that ``warpweave plan --out`` wrote. Other
options on the command line must agree with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warpweave.model.config import ParallelPlan
from warpweave.parallel.mesh import Mesh
from warpweave.plan.time import Job

_PLAN = ("zero", "schedule", "chunks", "microbatches", "recompute", "sequence_parallel", "overlap")
_MESH = ("dp", "cp", "tp", "pp")
OPTIONS = (*_MESH, *_PLAN, "batch")


def options_of_job(job: Job) -> dict[str, Any]:
    """Return the options that train with a job's layout."""
    found = {name: getattr(job.mesh, name) for name in _MESH}
    found |= {name: getattr(job.plan, name) for name in _PLAN}
    return found | {"batch": job.batch}


def take_layout(argv: Sequence[str] | None) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments without ``--layout FILE.json``, and that file's options ({} if none).

    ``--layout`` with any other word is a different option (for context ranks) and stays.

    Raises:
        ValueError: the file is not a plan; one line that names it.
    """
    rest, found = [], {}
    words = iter(sys.argv[1:] if argv is None else argv)
    for word in words:
        name, _, path = word.partition("=")
        if name == "--layout" and not path:
            path = next(words, "")
            word = f"{name}={path}" if path else name
        if name == "--layout" and path.endswith(".json"):
            found = read_layout(Path(path))
        else:
            rest.append(word)
    return rest, found


def read_layout(path: Path) -> dict[str, Any]:
    """Return the options of the first layout in a plan's file; raise ValueError if it has none."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    try:
        options = found["layouts"][0]["options"]
        known = {name: options[name] for name in OPTIONS}
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"{path} has no layout: write one with warpweave plan --out") from None
    if extra := set(options) - set(OPTIONS):
        raise ValueError(f"{path}: unknown layout option {sorted(extra)[0]}")
    try:
        _check_options(known)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return known


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for an invalid value, or a schedule that these ranks cannot run."""
    for name, kind in {"schedule": str, "batch": int}.items():
        if type(options[name]) is not kind:
            raise ValueError(f"{name} must be {kind.__name__}, got {options[name]!r}")
    if options["batch"] < 1:
        raise ValueError(f"batch must be at least 1, got {options['batch']}")
    plan = ParallelPlan(**{name: options[name] for name in _PLAN})
    plan.placement(Mesh(**{name: options[name] for name in _MESH}).pp)


def check_agree(layout: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a given option differs from the layout's."""
    for name, value in layout.items():
        if given[name] != value:
            raise ValueError(
                f"{name} = {given[name]} conflicts with the layout of --layout, which has {value}"
            )
