"""docs/faults.md lists every test of faults, and a job that breaks a promise fails its test."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import test_deaths
import test_disagreements
import test_disk
import test_stops
from arena import LAYOUTS
from jobs import TrainingJob

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_the_page_lists_every_test_with_its_promise_and_layouts():
    rows = []
    for module in (test_deaths, test_stops, test_disagreements, test_disk):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_"):
                marks = getattr(function, "pytestmark", [])
                layouts = next((mark.args for mark in marks if mark.name == "layouts"), ("tp2",))
                assert {*layouts} <= LAYOUTS.keys()
                promise = function.__doc__.removesuffix(".")
                name = name.removeprefix("test_").replace("_", " ")
                rows.append(f"| {name} | {promise} | {'; '.join(layouts)} |")
    listed = PAGE.read_text().partition("|---|---|---|\n")[2].splitlines()
    assert sorted(listed) == sorted(rows)


@LINUX
@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)", "left"),
        ("import tempfile; tempfile.mkstemp()", "left"),
        ("raise SystemExit(3)", "exit status 3, expected 0"),
    ],
)
def test_a_job_that_leaves_something_or_fails_is_found(tmp_path, program, complaint):
    job = TrainingJob(tmp_path, (), command=(sys.executable, "-c", program))
    try:
        with pytest.raises(AssertionError, match=complaint):
            job.end(0)
    finally:
        job.stop()


@LINUX
def test_a_job_that_listens_on_every_interface_is_found(tmp_path):
    program = "import socket, time; s = socket.create_server(('0.0.0.0', 0)); time.sleep(60)"
    job = TrainingJob(tmp_path, (), command=(sys.executable, "-c", program))
    try:
        with pytest.raises(AssertionError, match="beyond loopback"):
            job.wait_for(job.listening)
    finally:
        job.stop()
