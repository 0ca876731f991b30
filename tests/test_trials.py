"""Every promise of docs/faults.md is tried (``pytest -m faults``), and a broken one is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from warpweave.trials import command
from warpweave.trials.job import BrokenPromiseError, promised
from warpweave.trials.options import TrialsConfig
from warpweave.trials.trial import LAYOUTS, Arena, trial

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CASES = tuple(command.chosen(TrialsConfig()))


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return tmp_path_factory.mktemp("references")


@LINUX
@pytest.mark.faults
@pytest.mark.parametrize(("trial", "layout"), CASES, ids=lambda case: getattr(case, "name", case))
def test_what_is_promised_of_a_fault_happens(trial, layout, references):
    """Late is no failure here, as the machine may be busy."""
    found = command.outcome(trial, layout, references)
    assert found.passed, found.said
    print(f"{found.seconds} s, {found.said}")


def test_the_page_of_promises_has_each_trial_and_its_layouts() -> None:
    page = (Path(__file__).parent.parent / "docs" / "faults.md").read_text()
    for each in command.TRIALS:
        assert f"| {each.name} | {each.promise} | {'; '.join(each.layouts)} |" in page
        assert set(each.layouts) <= set(LAYOUTS)


@trial("it holds")
def _kept(arena: Arena) -> str:
    arena.folder.joinpath("left").touch()
    return arena.took(3.0, 2.0)


@trial("it holds")
def _broken(arena: Arena) -> str:
    promised(arena.layout == "none", f"this is {arena.layout}")
    return "never"


def test_a_broken_promise_is_a_failed_trial_and_a_late_one_is_not(monkeypatch, capsys):
    monkeypatch.setattr(command, "TRIALS", (_kept, _broken))
    with pytest.raises(SystemExit) as end:
        command.run(TrialsConfig())
    out = capsys.readouterr().out.splitlines()
    assert end.value.code == 1
    assert json.loads(out[-1]) == {
        "passed": False, "trials": 2, "failed": [" broken, tp2"], "late": [" kept, tp2"],
    }  # fmt: skip
    assert "late     3.0 s; late: 2 s are promised" in out[1]
    assert "FAILED   this is tp2" in out[2]
    with pytest.raises(BrokenPromiseError, match="otherwise"):
        promised(False, "otherwise")
