"""Check that a training step fits into the available memory."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from warpweave.plan.memory import TrainingStep, estimate

_GIB = 2**30


def free_host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return this machine's free bytes, within the limits of this process's control groups.

    File cache counts as free. If neither is known (outside Linux), return all of the machine's
    memory.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        fields = dict(line.split(":") for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_limits(proc, cgroups)])


def _limits(proc: Path, cgroups: Path) -> list[int]:
    """Return the bytes left in each control group (version 1 or 2), from this process's to the
    root."""
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


def _changed(step: TrainingStep, record: str, change: dict[str, Any]) -> TrainingStep:
    """Return the step with other fields, of its plan or mesh if that is the `record`."""
    if record:
        change = {record: dataclasses.replace(getattr(step, record), **change)}
    return dataclasses.replace(step, **change)


def check_memory(step: TrainingStep, *, free: int, ranks: int, total: int | None = None) -> None:
    """Raise a one-line ``ValueError`` if a training step does not fit into `free` bytes of memory.

    The memory is shared by `ranks` ranks: 1 on a GPU, all of this machine's on a CPU. `total` is a
    GPU's total memory.
    """

    def needed(step: TrainingStep) -> float:
        totals = [rank.total for rank in estimate(step)]
        return max(totals) if ranks == 1 else sum(totals) / len(totals) * ranks

    now, mesh, plan, on_gpu = needed(step), step.mesh, step.plan, step.device_type == "cuda"
    if now <= free:
        return
    ways: dict[str, tuple[str, dict[str, Any]]] = {}  # a record of the step ("" for itself), change
    ways["--recompute full"] = "plan", {"recompute": "full"}
    if mesh.data > 1:
        ways["--zero 3"] = "plan", {"zero": 3}
    if mesh.size("replica") > 1:
        ways[f"--dp-shard {mesh.dp}"] = "mesh", {"dp_shard": None}
    ways |= {"--dtype bf16": ("", {"dtype": "bf16"}), "--batch 1": ("", {"batch": 1})}
    for tp in (2, 4, 8) if on_gpu else ():  # on CPUs tensor ranks share the memory
        wider = {"tp": mesh.tp * tp}
        try:
            step.config.check(dataclasses.replace(mesh, **wider), plan)
        except ValueError:
            break
        ways[f"--tp {mesh.tp * tp}"] = "mesh", wider
    less = {name: needed(_changed(step, *way)) for name, way in ways.items()}
    helps = sorted((size, name) for name, size in less.items() if size < 0.95 * now)
    words = ", ".join(f"{name} ({size / _GIB:.1f} GiB)" for size, name in helps)
    if helps and helps[0][0] > free:  # combine several, leaving out any that no longer helps
        best, least, several = step, now, []
        for name in (name for _, name in helps if not name.startswith("--tp ")):
            if (size := needed(way := _changed(best, *ways[name]))) < least:
                best, least = way, size
                several.append(name)
        if len(several) > 1:
            words += f"; combined: {' '.join(several)} ({least / _GIB:.1f} GiB)"
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
        f"training needs about {now / _GIB:.1f} GiB{of} (per rank: {parts}), but {where} has "
        f"{free / _GIB:.1f}{of_all} GiB free; "
        + (f"options that reduce memory use: {words}" if words else "choose a smaller --model")
    )
