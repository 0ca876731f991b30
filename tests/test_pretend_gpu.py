"""The host's part of a training step on a GPU: one device, and nothing read back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from warpweave.prove import LIMITS

SUPPORT = Path(__file__).parent / "support"
registers_a_device = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device from Python",
)


@registers_a_device
def test_a_proof_on_a_device_has_every_tensor_there_and_the_same_limits() -> None:
    """This is `prove --device cuda` without a GPU, values included. A tensor
    that stays behind raises."""
    program = SUPPORT / "pretend_device.py"
    run = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=800, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for case, dtype in (("alone", "fp64"), ("ranks", "fp32")):
        assert found[case]["worst"] <= LIMITS[dtype]
        assert found[case]["plain model"] == found[case]["results"] == ["elsewhere:0"]
    assert found["engine"]["results"] == ["cpu"]
    assert "of tensors on the CPU and on elsewhere" in found["plain model's batch"]


@registers_a_device
def test_a_step_on_a_gpu_uses_one_device_and_reads_nothing_back() -> None:
    program = SUPPORT / "pretend_gpu.py"
    env = {**os.environ, "TRITON_INTERPRET": "0"}  # so that kernels are compiled ones
    run = subprocess.run(
        [sys.executable, program], env=env, capture_output=True, text=True, timeout=800
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found["healthy"]) == 10
    assert set(found["healthy"].values()) == {None}, found["healthy"]
    for kernel in ("_qkv_fwd_kernel", "_gemm_kernel", "attention_dkdv_kernel"):
        assert found["launches"][kernel] > 0
    assert all("DataDependentOutputException" in error for error in found["read back"].values())
    with_dropout = [error for case, error in found["on the host"].items() if "gpt2" in case]
    assert len(with_dropout) == 2
    assert all("FakeTensorDeviceMismatchError" in error for error in with_dropout)
