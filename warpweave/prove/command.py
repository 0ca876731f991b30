"""What ``warpweave prove`` does: the ranks it starts, and their verdict."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NoReturn

import torch

from warpweave.gpt import PRESETS
from warpweave.launch import join, launch, reported, under_torchrun
from warpweave.parallel.mesh import Mesh
from warpweave.prove.layouts import Layout
from warpweave.prove.options import ProveConfig
from warpweave.prove.proof import LIMITS, Errors, prove_layout


def prove_rank(layouts: list[Layout], timeout: float, path: str, port: int | None = None) -> None:
    """Prove `layouts`, largest worlds first, as one rank of the first; rank 0 writes to `path`.

    One line of JSON for each layout as soon as it is proven. A rank that the rest of the layouts
    are too small for has done its part.
    """
    session = join(layouts[0].mesh, timeout=timeout, backend="gloo", port=port)
    torch.set_num_threads(1)
    with reported(session) if session.store is not None else nullcontext():
        for number, layout in enumerate(layouts):
            if session.rank >= layout.mesh.world:
                break
            if number:
                session.renew(layout.mesh)
            session.beat(number, str(layout))
            mesh = layout.mesh.connect()
            errors = prove_layout(layout, mesh, timeout)
            if session.rank == 0:
                with open(path, "a") as file:
                    row = {"layout": str(layout), "errors": dataclasses.asdict(errors)}
                    file.write(json.dumps(row) + "\n")
                found = "  ".join(f"{kind} {error:.1e}" for kind, error in errors.each.items())
                words = "ok"
                if not errors.worst <= LIMITS[layout.dtype]:
                    words = f"WRONG: {errors.where}; again: {layout.command}"
                print(f"[{number + 1}/{len(layouts)}] {layout}  {found}  {words}", flush=True)
        session.close()


def judge(layouts: Sequence[Layout], lines: Sequence[str]) -> dict:
    """The summary of what rank 0 wrote: passed if every layout has its line, within its limit.

    A line that is missing, cut short, of another layout or one too many is wrong.
    """
    worst: dict[str, float] = {}
    right = 0
    for layout, line in zip(layouts, lines):
        if not line.endswith("\n"):
            break
        row = json.loads(line)
        error = Errors(**row["errors"]).worst
        worst[layout.dtype] = max(error, worst.get(layout.dtype, 0.0))
        right += row["layout"] == str(layout) and error <= LIMITS[layout.dtype]
    finite = {dtype: e if math.isfinite(e) else None for dtype, e in worst.items()}  # for JSON
    return {
        "layouts": len(layouts),
        "right": right,
        "worst": next(iter(finite.values()), None),
        "worst_by_dtype": finite,
        "limits": {dtype: LIMITS[dtype] for dtype in worst},
        "passed": right == len(layouts) == len(lines) > 0,
    }


def _typecheck(config: ProveConfig) -> None:
    """The command ``warpweave prove --typecheck``."""
    from warpweave.prove.typecheck import typecheck

    if config.packed:
        raise ValueError("--packed: types see no documents, prove it with ranks")
    layout = config.given()
    mesh, model = layout.mesh, layout.model
    if config.model is not None:
        if config.model not in PRESETS:
            raise ValueError(f"model must be one of {', '.join(PRESETS)}, got {config.model!r}")
        model = dataclasses.replace(PRESETS[config.model], dropout=model.dropout)
    began, stage, problem = time.perf_counter(), 0, None
    try:
        for stage in range(mesh.pp):
            only = range(stage, stage + 1)
            typecheck(
                model,
                mesh,
                stages=only,
                sequence_parallel=layout.sequence_parallel,
                recompute=layout.recompute,
                layout=layout.layout,
            )
            print(f"stage {stage} of {mesh.pp}: ok", flush=True)
    except TypeError as error:
        problem = str(error)
    summary = {
        "typechecked": mesh.pp if problem is None else stage,
        "ranks": mesh.world,
        "seconds": round(time.perf_counter() - began, 1),
        "passed": problem is None,
    }
    print(json.dumps(summary if problem is None else summary | {"error": problem}))
    sys.exit(0 if problem is None else 1)


def run(config: ProveConfig) -> NoReturn:
    """The command ``warpweave prove``: exits with 0 if everything was proven, else with 1.

    2 is for layouts that cannot be. Whatever ends the ranks, the last line says what was proven.
    """
    try:
        if config.typecheck:
            _typecheck(config)
        layouts = config.layouts()
    except (ValueError, ImportError) as error:
        print(f"warpweave: {error}", file=sys.stderr)
        sys.exit(2)
    if under_torchrun():
        print("warpweave: prove starts its own ranks, run it without torchrun", file=sys.stderr)
        sys.exit(2)
    began, world = time.perf_counter(), layouts[0].mesh.world
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        try:
            if world == 1:
                prove_rank(layouts, config.timeout, file.name)
            else:
                launch(prove_rank, (layouts, config.timeout, file.name), Mesh(dp=world))
        finally:  # a rank that died has its own exit code, and what is missing is not proven
            summary = judge(layouts, file.readlines())
            summary["seconds"] = round(time.perf_counter() - began, 1)
            print(json.dumps(summary))
    sys.exit(0 if summary["passed"] else 1)
