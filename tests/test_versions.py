"""``make versions``: what is installed of what was wanted, and what is named as not to be had."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import versions


class Index:
    """In the place of pip and of the tests: lacks some versions, remembers what it was asked."""

    def __init__(self, lacks: set[str], tests: int = 0) -> None:
        self.lacks, self.tests, self.asked = lacks, tests, []

    def run(self, command, **_):
        words = [*map(str, command)]
        self.asked.append(words)
        if "install" in words:
            return SimpleNamespace(returncode=int(bool(self.lacks & {*words})))
        found = {} if "torch<2.15.0" in self.lacks else {"torch": "2.14.1"}
        return SimpleNamespace(returncode=self.tests, stdout=json.dumps(found))


def test_the_oldest_are_the_declared_floors():
    found = versions.oldest()
    assert set(found) == set(versions.NEWEST)
    assert (found["torch"], found["triton"]) == ("2.10", "3.6")


@pytest.mark.parametrize(
    ("lacks", "tests", "lacking", "passed"),
    [
        (set(), 0, [], True),
        (set(), 1, [], False),
        ({"torch==2.15.0", "numpy==2.4.6"}, 0, ["torch==2.15.0", "numpy==2.4.6"], True),
        ({"torch==2.15.0", "torch<2.15.0"}, 0, ["torch==2.15.0", "any torch before it"], False),
    ],
)
def test_what_is_not_to_be_had_is_named(monkeypatch, capsys, lacks, tests, lacking, passed):
    index = Index(lacks, tests)
    monkeypatch.setattr(subprocess, "run", index.run)
    row = versions.try_set("newest", versions.NEWEST, ["tests/test_x.py"])
    assert (row["lacking"], row["passed"]) == (lacking, passed)
    said = capsys.readouterr().out
    assert all(f"newest: not to be had here: {what}" in said for what in lacking)
    assert any("tests/test_x.py" in words for words in index.asked) == ("any torch" not in said)
    triton = [words for words in index.asked if "triton==3.9.0" in words]
    assert all("--no-deps" in words for words in triton)
