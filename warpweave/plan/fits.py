"""Whether a training step fits into the memory that there is."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from warpweave.plan.memory import TrainingStep, estimate

_GIB = 2**30


def free_host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes of this machine within the limits of this process's control groups.

    File cache counts as free. Where neither is known (not on Linux), all of the machine's memory.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        fields = dict(line.split(":") for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_limits(proc, cgroups)])


def _limits(proc: Path, cgroups: Path) -> list[int]:
    """Bytes left in each control group, of version 1 or 2, from this process's own to the root."""
    names = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    left = []
    try:
        rows = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, path in rows:
        kind = "memory" if "memory" in controllers.split(",") else controllers
        if kind not in names:
            continue
        limit, usage, cached = names[kind]
        top = cgroups / kind
        own = top / path.lstrip("/")
        for folder in [own, *own.parents]:  # a container may see its own group as the root
            try:
                most, used = (folder / limit).read_text(), int((folder / usage).read_text())
                stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                if most.strip() != "max":
                    left.append(int(most) - used + int(stat.get(cached, 0)))
            except (OSError, ValueError):
                pass
            if folder == top:
                break
    return left


def check_memory(step: TrainingStep, *, free: int, ranks: int, total: int | None = None) -> None:
    """Raise a one-line ``ValueError`` if a training step does not fit into `free` bytes of memory,
    shared by `ranks` ranks: 1 on a GPU, all of this machine's on a CPU. `total` is a GPU's."""

    def needed(step: TrainingStep) -> float:
        totals = [rank.total for rank in estimate(step)]
        return max(totals) if ranks == 1 else sum(totals) / len(totals) * ranks

    def other(**changes: Any) -> TrainingStep:
        return dataclasses.replace(step, **changes)

    now, mesh, plan, on_gpu = needed(step), step.mesh, step.plan, step.device_type == "cuda"
    if now <= free:
        return
    spare: dict[str, Any] = {"recompute": "full"} | ({"zero": 3} if mesh.data > 1 else {})
    ways = {
        f"--{name} {value}": other(plan=dataclasses.replace(plan, **{name: value}))
        for name, value in spare.items()
    }
    no_replicas = dataclasses.replace(mesh, dp_shard=None)
    if mesh.size("replica") > 1:
        ways[f"--dp-shard {mesh.dp}"] = other(mesh=no_replicas)
    ways |= {"--dtype bf16": other(dtype="bf16"), "--batch 1": other(batch=1)}
    for tp in (2, 4, 8) if on_gpu else ():  # on CPUs they share the memory
        wider = dataclasses.replace(mesh, tp=mesh.tp * tp)
        try:
            step.config.check(wider, plan)
        except ValueError:
            break
        ways[f"--tp {wider.tp}"] = other(mesh=wider)
    less = {name: needed(way) for name, way in ways.items()}
    helps = sorted((size, name) for name, size in less.items() if size < 0.95 * now)
    words = ", ".join(f"{name} {size / _GIB:.1f} GiB" for size, name in helps)
    helping = {name for _, name in helps if not name.startswith("--tp ")}
    if helping and helps[0][0] > free:
        fields = {n: value for n, value in spare.items() if f"--{n} {value}" in helping}
        together = other(
            mesh=no_replicas if f"--dp-shard {mesh.dp}" in helping else mesh,
            plan=dataclasses.replace(plan, **fields),
            batch=1 if "--batch 1" in helping else step.batch,
            dtype="bf16" if "--dtype bf16" in helping else step.dtype,
        )
        every = "all but --tp" if on_gpu else "all of them"
        words += f"; with {every} {needed(together) / _GIB:.1f}"
    most = max(estimate(step), key=lambda rank: rank.total)
    parts = ", ".join(
        f"{name} {value / _GIB:.1f}"
        for name, value in dataclasses.asdict(most).items()
        if name != "loading" and (value or name not in ("gpu", "update"))
    )
    of_all = "" if total is None else f" of {total / _GIB:.1f}"
    where = "this GPU" if on_gpu else "this machine"
    of = "" if ranks == 1 else f" for {ranks} ranks"
    raise ValueError(
        f"training needs about {now / _GIB:.1f} GiB{of} (a rank: {parts}), {where} has "
        f"{free / _GIB:.1f}{of_all} GiB free; "
        + (f"it would need, with {words}" if words else "take a smaller --model")
    )
