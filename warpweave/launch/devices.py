"""The device of each rank, and one-line errors for GPUs that cannot be used.

A rank on a GPU needs a GPU to itself, and NCCL. If GPUs cannot be used, ranks do not fall back to
the CPU: pass ``--device cpu``. On a machine without visible GPUs, ranks compute on the CPU.
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

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by device type
_OVERLAPPING = 12030  # first CUDA version of the driver in which ordered launches may overlap


def gpu_count() -> int:
    """Number of GPUs visible to this process; does not start CUDA if torch can ask the driver."""
    return torch.cuda.device_count()


def choose_backend(local_world: int, asked: str | None = None, *, launched: bool = True) -> str:
    """ "nccl" if `local_world` ranks of this machine compute on GPUs, "gloo" if on its CPU.

    `asked` is "nccl", "gloo", or None for GPUs if there are any. If `launch.launch` starts the
    ranks (`launched`), all of them see the same GPUs; a different launcher (SLURM) may show each
    rank only its own. Raises ValueError if GPUs were requested or exist, but these ranks cannot
    use them.
    """
    if asked == "gloo":
        return asked
    gpus, instead = gpu_count(), "or pass --device cpu"
    if not gpus:
        if asked == "nccl":
            raise ValueError(f"torch {torch.__version__} sees no GPU")
        if DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            raise ValueError(
                f"this machine has NVIDIA's driver, but torch {torch.__version__} sees no GPU; "
                f"install a torch build for the driver's CUDA version, {instead}"
            )
        return "gloo"
    if local_world > 1 and not dist.is_nccl_available():
        raise ValueError(
            f"torch {torch.__version__} has no NCCL, which {local_world} ranks on GPUs need; "
            f"install a torch build that has it, {instead}"
        )
    if gpus < local_world and (launched or gpus > 1):
        raise ValueError(
            f"{gpus} GPU(s) are too few for {local_world} ranks; start one rank per GPU, {instead}"
        )
    return "nccl"


def share_cores(processes: int) -> None:
    """Limit torch's threads to this process's share of the cores, among `processes` of them."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // processes))


def prepare_nccl() -> None:
    """Set the environment that many communicators on one GPU need; call before CUDA starts.

    A layout may use 14 streams. CUDA has 8 hardware queues by default, and an operation queued
    behind a waiting receive waits for it (CUDA Programming Guide, CUDA_DEVICE_MAX_CONNECTIONS, at
    most 32). NCCL 2.26 and later can keep the operations of all communicators of a GPU in the order
    in which the host issued them (NCCL User Guide, NCCL_LAUNCH_ORDER_IMPLICIT): none starts while
    an earlier one has no room. Drivers below CUDA 12.3 would finish each operation before the next,
    so a receive that is posted early would block the operation it waits for; there the variable is
    not set. Values set by the user are kept.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if torch._C._cuda_getDriverVersion() >= _OVERLAPPING:  # type: ignore[attr-defined]
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def take_device(asked: str | None, *, launched: bool) -> tuple[str, torch.device, dict[str, Any]]:
    """Select this process's device. Return its backend, the device, and a description of it for
    the other ranks (`disagreement`).

    `asked`, `launched`, and errors are those of `choose_backend`."""
    world, local_world = (int(os.environ.get(n, "1")) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    backend = choose_backend(local_world, asked, launched=launched)
    if backend == "gloo":
        return backend, torch.device("cpu"), {"name": "cpu"}
    if world > 1:
        prepare_nccl()
    number = 0 if gpu_count() == 1 else int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", number)
    try:
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)  # fails first if other processes fill or own the GPU
        found = torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        return backend, device, {"name": str(device), "problem": str(error).splitlines()[0]}
    return backend, device, {"name": found.name, "uuid": str(found.uuid)}


def disagreement(
    store: dist.Store | None, rank: int, mesh: Mesh, own: dict[str, Any]
) -> str | None:
    """Exchange the descriptions from `take_device` over the store (None for a single rank).

    Returns the reason why these ranks cannot compute together, the same on all, or None."""
    if store is None:
        return refusal([own], mesh)
    store.set(f"device/{rank}", json.dumps(own))
    keys = [f"device/{r}" for r in range(mesh.world)]
    return refusal([json.loads(value) for value in store.multi_get(keys)], mesh)


def refusal(devices: list[dict[str, Any]], mesh: Mesh) -> str | None:
    """The reason why ranks with these devices, in rank order, cannot compute together, or None."""
    ranks: dict[str, list[int]] = defaultdict(list)
    kinds: dict[str, int] = {}
    for rank, device in enumerate(devices):
        name = device["name"]
        if "problem" in device:
            return f"{mesh.describe(rank)} cannot use {name}: {device['problem']}"
        if "MIG" in name.split() and len(devices) > 1:
            return f"{mesh.describe(rank)} has {name}, a MIG slice, which NCCL does not support"
        kinds.setdefault(name, rank)
        if "uuid" in device:
            ranks[device["uuid"]].append(rank)
    for uuid, sharing in ranks.items():
        if len(sharing) > 1:
            return (
                f"ranks {', '.join(map(str, sharing))} share one GPU ({uuid}), but need one each; "
                "start one rank per GPU, or pass --device cpu"
            )
    if len(kinds) > 1:
        found = ", ".join(f"{mesh.describe(rank)} has {name}" for name, rank in kinds.items())
        return f"all ranks must compute on the same kind of device, but {found}"
    return None


def connect(device: torch.device, store: dist.Store, rank: int, world: int, timeout: float) -> None:
    """Create the default process group: NCCL on GPUs, otherwise gloo.

    NCCL uses at most the thread blocks that kernels leave free for it (`leaving`)."""
    nccl, limit = device.type == "cuda", timedelta(seconds=timeout)
    dist.init_process_group(
        BACKENDS[device.type], store=store, rank=rank, world_size=world, timeout=limit,
        device_id=device if nccl else None,
        pg_options=nccl_options(CTAS, limit) if nccl else None,
    )  # fmt: skip
