"""The device that a rank computes on, and in one line each what is wrong with the GPUs at hand.

A rank on a GPU needs one of its own, and NCCL. There is no step down to the CPU from GPUs that
cannot be used: ``--device cpu`` asks for it. A machine that shows no GPU is a CPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from warpweave.kernels.devices import CTAS
from warpweave.launch.processes import DRIVER
from warpweave.parallel.group_options import nccl_options
from warpweave.parallel.mesh import Mesh

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by the type of the device
_OVERLAPPING = 12030  # CUDA of the driver from which on ordered launches may overlap


def gpu_count() -> int:
    """GPUs that this process is shown; does not start CUDA where torch can ask the driver."""
    return torch.cuda.device_count()


def choose_backend(local_world: int, asked: str | None = None, *, launched: bool = True) -> str:
    """ "nccl" if `local_world` ranks of this machine compute on GPUs, "gloo" if on its CPU.

    Args:
        local_world: ranks on this machine.
        asked: "nccl", "gloo", or None for GPUs where there are any.
        launched: by `launch.launch`, so that all ranks are shown the same GPUs; another launcher
            (SLURM) may show each rank its own only.

    Raises:
        ValueError: GPUs were asked for or are there, and these ranks cannot use them.
    """
    if asked == "gloo":
        return asked
    gpus, instead = gpu_count(), "or pass --device cpu"
    if not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if asked == "nccl":
            raise ValueError(f"this process is shown no GPU by torch {torch.__version__}")
        if DRIVER.exists() and not hidden:
            raise ValueError(
                f"this machine has NVIDIA's driver, but torch {torch.__version__} finds no GPU: "
                f"install one for its CUDA, {instead}"
            )
        return "gloo"
    if local_world > 1 and not dist.is_nccl_available():
        raise ValueError(
            f"torch {torch.__version__} has no NCCL, which {local_world} ranks on GPUs need: "
            f"install one that has, {instead}"
        )
    if gpus < local_world and (launched or gpus > 1):
        raise ValueError(
            f"{gpus} GPU(s) are too few for {local_world} ranks: start as many ranks, {instead}"
        )
    return "nccl"


def share_cores(processes: int) -> None:
    """Give torch this process's share of the cores, of as many as compute on this machine's CPU."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // processes))


def prepare_nccl() -> None:
    """Set for this process, before CUDA starts, what many communicators on one GPU need.

    A layout may have 14 streams; CUDA gives 8 of them a hardware queue of their own, and an
    operation behind a receive that waits, in one queue, waits for it (CUDA Programming Guide,
    CUDA_DEVICE_MAX_CONNECTIONS, at most 32). NCCL from 2.26 on can keep the operations of all
    communicators of a GPU in the order in which the host issued them (NCCL User Guide,
    NCCL_LAUNCH_ORDER_IMPLICIT): none starts while an earlier one has no room. Drivers below CUDA
    12.3 would finish each before the next, so that a receive that is posted early would hold back
    what it waits for: there it stays unset. What the user has set stays.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if torch._C._cuda_getDriverVersion() >= _OVERLAPPING:  # type: ignore[attr-defined]
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def take_device(asked: str | None, *, launched: bool) -> tuple[str, torch.device, dict[str, Any]]:
    """This process's backend, its device, made the current one, and what other ranks must know of
    it (`disagreement`). `asked` and `launched` as for `choose_backend`, whose errors it raises."""
    world, local_world, local_rank = (
        int(os.environ.get(name, default))
        for name, default in (("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    backend = choose_backend(local_world, asked, launched=launched)
    if backend == "gloo":
        return backend, torch.device("cpu"), {"name": "cpu"}
    if world > 1:
        prepare_nccl()
    device = torch.device("cuda", 0 if gpu_count() == 1 else local_rank)
    try:
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)  # the first to fail on a GPU that others fill or own
        found = torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        return backend, device, {"name": str(device), "problem": str(error).splitlines()[0]}
    return backend, device, {"name": found.name, "uuid": str(found.uuid)}


def disagreement(
    store: dist.Store | None, rank: int, mesh: Mesh, own: dict[str, Any]
) -> str | None:
    """Exchange what `take_device` said over the store (None: a single rank); why these ranks cannot
    compute, the same line on all of them, or None."""
    if store is None:
        return refusal([own], mesh)
    store.set(f"device/{rank}", json.dumps(own))
    keys = [f"device/{r}" for r in range(mesh.world)]
    return refusal([json.loads(value) for value in store.multi_get(keys)], mesh)


def refusal(devices: list[dict[str, Any]], mesh: Mesh) -> str | None:
    """Why ranks with these devices, in their order, cannot compute together, or None."""
    ranks: dict[str, list[int]] = defaultdict(list)
    kinds: dict[str, int] = {}
    for rank, device in enumerate(devices):
        name = device["name"]
        if "problem" in device:
            return f"{mesh.describe(rank)} cannot use {name}: {device['problem']}"
        if "MIG" in name.split() and len(devices) > 1:
            return f"{mesh.describe(rank)} has {name}, a MIG slice, which NCCL does not connect"
        kinds.setdefault(name, rank)
        if "uuid" in device:
            ranks[device["uuid"]].append(rank)
    for uuid, sharing in ranks.items():
        if len(sharing) > 1:
            return (
                f"ranks {', '.join(map(str, sharing))} are shown one GPU ({uuid}) and need one "
                "each: start as many ranks as GPUs, or pass --device cpu"
            )
    if len(kinds) > 1:
        found = ", ".join(f"{mesh.describe(rank)} has {name}" for name, rank in kinds.items())
        return f"ranks must compute alike, on devices of one kind, but {found}"
    return None


def connect(device: torch.device, store: dist.Store, rank: int, world: int, timeout: float) -> None:
    """Make the default process group: NCCL on GPUs, with no more thread blocks than kernels leave
    free for it (`leaving`), else gloo."""
    nccl, limit = device.type == "cuda", timedelta(seconds=timeout)
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=limit,
        device_id=device if nccl else None,
        pg_options=nccl_options(CTAS, limit) if nccl else None,
    )
