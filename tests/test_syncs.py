"""Counts of how often the host waits for its device, without a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def waits() -> dict[str, dict[str, int]]:
    """Return case -> function of ours (or of transformers) -> how often the host waited there."""
    maker = "_setup_privateuseone_for_python_backend"
    if not hasattr(torch.utils.backend_registration, maker):
        pytest.skip(f"the private {maker}, which pretends a device, is not in {torch.__version__}")
    program = Path(__file__).parent / "support" / "syncs.py"
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    how = {"env": env, "capture_output": True, "text": True, "timeout": 800}
    run = subprocess.run([sys.executable, program], **how)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def _ours(found: dict[str, int]) -> dict[str, int]:
    return {place: n for place, n in found.items() if place.startswith("warpweave/")}


def test_generation_reads_its_tokens_once_and_looks_for_ends_every_sixteen(waits):
    assert waits["generate 4"] == {"warpweave/model/generate.py go_on": 1}
    assert waits["generate 20"] == {"warpweave/model/generate.py go_on": 2}


def test_hf_model_reads_its_mask_once_per_forward_and_never_while_decoding(waits):
    """It reads each of gemma 2's two masks once."""
    for case in ("forward", "dynamic", "static"):
        assert _ours(waits[case]) == {"warpweave/hf/mask.py _padding": 2}, case


def test_flash_attentions_boundaries_are_read_once_for_all_layers(waits):
    """They are read again after a write: two tensors, and two versions of each."""
    assert _ours(waits["flash same"]) == {}
    for case in ("flash lopsided", "flash two", "flash cache"):
        assert _ours(waits[case]) == {"warpweave/compat/flash_attn.py _read_numbers": 4}, case
