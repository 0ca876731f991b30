"""A description of this machine: versions, devices, remarks on them, and links between GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from warpweave import __version__
from warpweave.launch.devices import gpu_count
from warpweave.machine.doctor.check import Check, Measured

PACKAGES = ("triton", "numpy", "transformers", "liger-kernel")
BUSY = 0.1  # fraction of a GPU's memory that others may hold without a remark


def versions() -> dict[str, str | None]:
    """Versions of the software that results depend on; None if not installed."""
    found: dict[str, str | None] = {"warpweave": __version__, "commit": _commit()}
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["CUDA"] = torch.version.cuda
    nccl = gpu_count() > 0 and dist.is_nccl_available()
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found["driver"] = driver.splitlines()[0] if driver else None
    return found


def devices() -> list[str]:
    """A line for each GPU, or one for the CPU."""
    lines = []
    for number in range(gpu_count()):
        p = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        lines.append(
            f"GPU {number}: {p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} "
            f"multiprocessors, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        )
    kind = torch.backends.cpu.get_cpu_capability()
    return lines or [f"CPU: {platform.machine()}, {os.cpu_count()} cores, {kind}"]


def remarks() -> list[str]:
    """Remarks on the GPUs, a line each: slices, mixed kinds, memory in use, no peer access."""
    gpus = range(gpu_count())
    names = [torch.cuda.get_device_name(number) for number in gpus]
    found = []
    if len(set(names)) > 1:
        found.append(f"different kinds of GPUs; the slowest sets the pace: {', '.join(names)}")
    for number, name in enumerate(names):
        if "MIG" in name:
            found.append(f"GPU {number} is a MIG slice ({name}): NCCL cannot connect slices")
        free, total = torch.cuda.mem_get_info(number)
        if free < (1 - BUSY) * total:
            found.append(
                f"GPU {number} is busy ({(total - free) / 1e9:.1f} of {total / 1e9:.1f} GB in "
                "use): times and memory figures are not reliable"
            )
        peers = (peer for peer in gpus if peer != number)
        alone = [p for p in peers if not torch.cuda.can_device_access_peer(number, p)]
        if alone:
            found.append(f"GPU {number} has no peer access to {alone}: overlap='fused' cannot run")
    return found


def topology() -> str:
    """The output of nvidia-smi about links and atomics over them; "" without nvidia-smi."""
    of = (("topo", "-m"), ("topo", "-p2p", "a"))
    return "\n".join(filter(None, (_said("nvidia-smi", *words) for words in of)))


def copies(size: int = 1 << 28) -> Iterator[Check]:
    """Checks that copy `size` bytes from the first GPU to every other one, and back."""
    for peer in range(1, gpu_count()):
        for a, b in ((0, peer), (peer, 0)):
            ends = torch.device("cuda", a), torch.device("cuda", b)
            yield Check(f"copy GPU {a} -> {b}", "its source", partial(_copy, *ends, size))


def _copy(a: torch.device, b: torch.device, size: int) -> Measured:
    """Measure the fraction of words that arrive wrong, and the speed."""
    source = torch.arange(size // 8, device=a)
    arrived = torch.empty(size // 8, dtype=source.dtype, device=b)
    for _ in range(2):  # the first one opens the link
        drain(a, b)
        began = time.perf_counter()
        arrived.copy_(source)
        drain(a, b)
        seconds = time.perf_counter() - began
    wrong = (arrived.cpu() != source.cpu()).double().mean().item()
    return Measured(wrong, 0.0, f"{size / seconds / 1e9:.1f} GB/s")


def drain(*devices: torch.device) -> None:
    """Wait until the devices have finished all queued work."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _commit() -> str | None:
    """The commit of the running checkout; None in an installation."""
    root = Path(__file__).resolve().parents[3]
    return _said("git", "-C", str(root), "rev-parse", "--short=12", "HEAD") or None


def _said(*command: str) -> str:
    """The output of a command without colors; "" if the command is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return re.sub(r"\x1b\[[\d;]*m", "", done.stdout).strip() if done.returncode == 0 else ""


def summary() -> dict[str, Any]:
    """The whole description, for the line of JSON."""
    return {
        "command": " ".join(["warpweave", *sys.argv[1:]]),
        "versions": versions(),
        "devices": devices(),
        "remarks": remarks(),
    }
