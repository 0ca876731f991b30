"""Launches of a training step on a GPU, counted without one (`benchmarks/host_time.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "host_time.py"
LAYERS = 12  # of GPT-2
LAUNCHES, OPERATORS = 191, 331


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> dict:
    """The counts of GPT-2's step, from a process in which Triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-P", str(SCRIPT), "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["steps"]["gpt2"]


def test_a_step_makes_no_more_launches_than_it_did(gpt2) -> None:
    """One more launch in every layer, or for every range of parameters, is seen."""
    launches, operators = gpt2["launches"], gpt2["operators"]
    assert LAYERS < sum(launches.values()) <= LAUNCHES, launches
    assert LAYERS < sum(operators.values()) <= OPERATORS, operators
    assert launches["_adamw_scalars_kernel"] == 1
    assert "clone.default" not in operators
    assert operators["copy_.default"] < LAYERS
