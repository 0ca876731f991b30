"""How often the host waits for its device, counted without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def waits() -> dict[str, dict[str, int]]:
    """Case -> function of ours (or of transformers) -> how often the host waited there."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot register a device from Python")
    program = Path(__file__).parent / "support" / "syncs.py"
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, program], env=env, capture_output=True, text=True, timeout=800
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_generation_reads_its_tokens_once_and_looks_for_ends_every_sixteen(waits, positions):
    assert waits[f"generate {positions} 4"] == {"warpweave/generate.py go_on": 1}
    assert waits[f"generate {positions} 20"] == {"warpweave/generate.py go_on": 2}
