"""What ``warpweave trials`` does."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from warpweave.cli.messages import one_line, say
from warpweave.parallel.words import did_you_mean
from warpweave.trials import deaths, disagreements, disk, stops
from warpweave.trials.job import BrokenPromiseError
from warpweave.trials.options import TrialsConfig
from warpweave.trials.trial import Arena, Trial

TRIALS = tuple(
    each
    for module in (deaths, stops, disagreements, disk)
    for each in vars(module).values()
    if isinstance(each, Trial)
)


class TrialResult(NamedTuple):
    """What came of a trial on a layout.

    Attributes:
        trial, layout: their names.
        passed: whether it was what is promised.
        late: it was, and took longer than is promised, as it may on a busy machine.
        seconds: of the whole trial.
        said: what happened, in words.
    """

    trial: str
    layout: str
    passed: bool
    late: bool
    seconds: float
    said: str


def outcome(trial: Trial, layout: str, references: Path) -> TrialResult:
    """Run a trial on one of its layouts, in a folder of its own that is removed afterwards."""
    began = time.monotonic()
    arena = Arena(Path(tempfile.mkdtemp(prefix="warpweave-trial-")), layout, references)
    try:
        passed, said = True, trial.run(arena)
    except BrokenPromiseError as error:
        passed, said = False, one_line(error)
    finally:
        arena.leave()
    said = "; ".join(filter(None, (said, arena.late)))
    seconds = round(time.monotonic() - began, 1)
    return TrialResult(trial.name, layout, passed, bool(arena.late), seconds, said)


def chosen(config: TrialsConfig) -> Iterator[tuple[Trial, str]]:
    """The trials that are asked for, with each layout to try them on."""
    for trial in TRIALS:
        if not config.only or any(word in trial.name for word in config.only):
            for layout in trial.layouts[: 1 if config.layout == "first" else None]:
                yield trial, layout


def run(config: TrialsConfig) -> NoReturn:
    """The command ``warpweave trials``; it ends the process."""
    asked = list(chosen(config))
    if not asked:
        words = {word for trial in TRIALS for word in trial.name.split()}
        near = next(filter(None, (did_you_mean(word, words) for word in config.only)), "")
        say(f"no trial has one of {', '.join(config.only)} in its name (see --list){near}")
        sys.exit(2)
    if sys.platform != "linux":
        say(f"trials watch processes in /proc, which {sys.platform} does not have")
        sys.exit(2)
    if config.list:
        for trial, layout in asked:
            print(f"{trial.name:40}{layout:24}{trial.promise}")
        print(json.dumps({"trials": len(asked)}))
        sys.exit(0)
    found = []
    print(f"{'trial':40}{'layout':22}{'seconds':>8}  {'verdict':9}what happened")
    references = tempfile.TemporaryDirectory(prefix="warpweave-trials-")
    for trial, layout in asked:
        found.append(outcome(trial, layout, Path(references.name)))
        verdict = "FAILED" if not found[-1].passed else "late" if found[-1].late else "passed"
        print(
            f"{trial.name:40}{layout:22}{found[-1].seconds:8.1f}  {verdict:9}{found[-1].said}",
            flush=True,
        )
    references.cleanup()
    failed, late = (
        [f"{each.trial}, {each.layout}" for each in found if bad(each)]
        for bad in (lambda each: not each.passed, lambda each: each.late)
    )
    result = {"passed": not failed, "trials": len(found), "failed": failed, "late": late}
    print(json.dumps(result), flush=True)
    sys.exit(1 if failed else 0)
