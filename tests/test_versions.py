"""``make versions`` and ``make pythons``: what they install and run, and when they fail."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import versions


class Machine:
    """A mock of pip, make and interpreters: a command with a word of `fails` fails."""

    def __init__(self, *fails: str) -> None:
        self.fails, self.asked = fails, []

    def run(self, command, **_):
        line = " ".join(map(str, command))
        self.asked.append(line)
        failed = any(word in line for word in self.fails)
        said = {"stdout": json.dumps({"torch": "2.13.0"}), "stderr": "no such version"}
        return SimpleNamespace(returncode=int(failed), **said)


def test_oldest_set_is_every_declared_floor():
    given = versions.requirements("oldest")
    project = versions.project()
    floors = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    assert all(">=" in line for line in floors)
    assert {line.replace(">=", "==") for line in floors} <= {*given}
    assert not any(">=" in line for line in given)
    assert sum(line.startswith("transformers") for line in given) == 1


def test_newest_set_has_no_pin():
    assert not any(re.search(r"==\d", line) for line in versions.requirements("newest"))


@pytest.mark.parametrize(
    ("fails", "passed"),
    [((), True), (("torch",), False), ((" train ",), False), (("tests/test_x.py",), False)],
)
def test_row_passes_only_if_install_training_and_tests_do(monkeypatch, capsys, fails, passed):
    machine = Machine(*fails)
    monkeypatch.setattr(subprocess, "run", machine.run)
    row = versions.run_row("3.12", "python3.12", "oldest", ["tests/test_x.py"])
    assert row["passed"] == passed
    assert ("no such version" in capsys.readouterr().out) == (fails == ("torch",))
    assert any("ARGS=tests/test_x.py" in line for line in machine.asked) == (fails != ("torch",))
    shown = versions.table([row], "all")
    assert ("FAILED" in shown) != passed


def test_others_are_the_supported_pythons_but_this_one():
    names = versions.supported()
    own = f"3.{sys.version_info.minor}"
    assert names[0] == versions.project()["requires-python"].removeprefix(">=")
    rows = versions.chosen_rows(names, others=True, given=[])
    assert [name for name, _ in rows] == [name for name in names if name != own]
    assert {kind for _, kind in rows} == {"pins"}


def test_unknown_row_is_refused_with_the_choices():
    with pytest.raises(SystemExit, match=r"\['3.9:pins'\].*PYTHON:SET"):
        versions.chosen_rows(["3.11"], others=False, given=["3.11:newest", "3.9:pins"])


def test_an_interpreter_of_this_version_is_found():
    """It is pyenv's or PATH's; either one has this version."""
    name = f"3.{sys.version_info.minor}"
    found = versions.interpreters([name, "3.99"])
    assert [*found] in ([name], [])
    for path in found.values():
        program = "import sys; print(f'3.{sys.version_info.minor}')"
        done = subprocess.run([path, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == name


def test_install_page_lists_each_supported_python_and_set_of_libraries():
    """`make versions` and `make pythons` print these rows."""
    page = (versions.ROOT / "docs" / "install.md").read_text()
    rows = [re.split(r" *\| *", line)[1:-1] for line in re.findall(r"^\| 3\.\d+ .*", page, re.M)]
    tested = {(row[0], row[5]): dict(zip(versions.SHOWN, row[1:5], strict=True)) for row in rows}
    text = (versions.ROOT / "constraints.txt").read_text()
    pins = {name: re.search(rf"^{name}==([\d.]+)$", text, re.M)[1] for name in versions.SHOWN}
    names = versions.supported()
    for name in names:
        assert tested[name, "all (pinned versions)"] == pins
    oldest = tested[names[0], "all (minimum versions)"]
    for line in versions.requirements("oldest"):
        found = re.match(r"([\w-]+)==([\d.]+)", line)
        if found and found[1] in oldest:
            assert f"{oldest[found[1]]}.".startswith(f"{found[2]}.")
    assert (names[-1], "all (versions without pins)") in tested
