"""Fake answers of CUDA and NCCL on a machine without GPUs: their number, names, and errors."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

DRIVER = 12080  # CUDA 12.8


def pretend_gpus(
    monkeypatch, count: int, *, name: str = "H", nccl: bool = True, driver: int = DRIVER,
    problem: str | None = None,
) -> list[torch.device]:  # fmt: skip
    """Make torch report `count` GPUs for one test, each with its index as uuid. Return a list that
    fills with the chosen devices. With a `problem` the GPUs are visible but cannot be used."""
    chosen: list[torch.device] = []

    def memory(device: torch.device) -> tuple[int, int]:
        if problem is not None:
            raise RuntimeError(problem)
        return 80 << 30, 80 << 30

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=name, uuid=device.index)

    for which, answer in (
        ("device_count", lambda: count), ("set_device", chosen.append), ("mem_get_info", memory),
        ("get_device_properties", properties),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, which, answer)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.setenv(variable, "")  # so that values set in between are undone
        monkeypatch.delenv(variable)
    return chosen
