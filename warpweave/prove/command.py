"""The command ``warpweave prove``: start the ranks and report their verdict."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NoReturn

import torch

from warpweave.cli.messages import say
from warpweave.kernels.words import did_you_mean
from warpweave.launch.devices import BACKENDS
from warpweave.launch.interrupt import Interrupt, Stopped
from warpweave.launch.processes import Processes, under_torchrun
from warpweave.launch.ranks import launch
from warpweave.launch.session import join, reported
from warpweave.model.gpt import PRESETS
from warpweave.parallel.checked import CheckedCollectives, CollectiveMismatch
from warpweave.parallel.mesh import Mesh
from warpweave.prove.graph import GraphProof, prove_graph
from warpweave.prove.layouts import Layout
from warpweave.prove.options import ProveConfig
from warpweave.prove.proof import LIMITS, Errors, prove_layout
from warpweave.train.idle_options import PROVE, idle_lines


def prove_rank(
    layouts: list[Layout], timeout: float, path: str, port: int | None = None, graph: bool = False
) -> None:
    """Prove `layouts`, or with `graph` their CUDA graphs, as one rank of the first, largest worlds
    first; rank 0 writes to `path`.

    Rank 0 writes one line of JSON per layout as soon as it is proven. A rank exits when no
    remaining layout needs it. Ranks compare their collectives in the first step of each layout.
    """
    backend = BACKENDS[layouts[0].device]
    session = join(layouts[0].mesh, timeout=timeout, backend=backend, port=port)
    torch.set_num_threads(1)
    store = None
    if session.store is not None:  # a separate process
        gc.freeze()  # imports live forever: freeing a layout's groups need not scan them
        store = session.store.clone()  # type: ignore[attr-defined]  # a wait blocks a connection
    with reported(session, (CollectiveMismatch,)) if store is not None else nullcontext():
        for number, layout in enumerate(layouts):
            if session.rank >= layout.mesh.world:
                break
            session.beat(number, str(layout))
            checked = None
            if number == 0 or not _in_another_dtype(layout, layouts[number - 1]):
                if number > 0:
                    session.renew(layout.mesh)
                mesh = layout.mesh.connect(layout.device)
                if store is not None and not graph:
                    # Name a rank that skips a collective, so that nobody hangs.
                    ranks = layout.mesh, session.rank, timeout, session.device
                    checked = CheckedCollectives(store, *ranks)
            if graph:
                proof: GraphProof | Errors = prove_graph(layout, mesh, timeout)
            else:
                proof = prove_layout(layout, mesh, timeout, checked)
            if session.rank == 0:
                with open(path, "a") as file:
                    row = {"layout": str(layout), "errors": dataclasses.asdict(proof)}
                    file.write(json.dumps(row) + "\n")
                if number == 0 and not graph:
                    print(table_head(len(layouts)))
                print(table_row(number + 1, len(layouts), layout, proof), flush=True)
        session.close()


def _in_another_dtype(layout: Layout, before: Layout) -> bool:
    """Return True if `layout` is `before` in a different dtype, so that it can keep the groups."""
    return dataclasses.replace(layout, dtype=before.dtype) == before


_COLUMNS = {  # fields of `Errors` -> column headings
    "loss": "loss",
    "grad": "gradient",
    "norm": "gradient norm",
    "weight": "weight",
    "moment": "Adam moment",
    "evaluation": "evaluation",
    "token": "token",
}
_WIDTH = 14  # of a column such as "2.5e-16 x0.67"
_LEGEND = """\
Each column has the largest error, relative to the size of the value, then (x) as a multiple of the
error that rounding alone causes in that value in the plain model. A layout is ok if all multiples
are at most {limits}.
evaluation: losses without training; token: the logit of each generated token; layout: options of
`warpweave prove`, where batch = data ranks x micro-batches x sequences x tokens.
"""


def table_head(count: int) -> str:
    """Return the table's header for `count` layouts: a legend and the column names."""
    limits = ", ".join(f"x{LIMITS[dtype]:.0f} in {dtype}" for dtype in LIMITS)
    names = "".join(f"{name:<{_WIDTH}}" for name in _COLUMNS.values())
    return f"{_LEGEND.format(limits=limits)}{_row_start(count, count, '')}{names}layout"


def table_row(number: int, count: int, layout: Layout, errors: Errors | GraphProof) -> str:
    """Return a layout's row: verdict, errors and, if it is wrong, the command that repeats it."""
    if isinstance(errors, GraphProof):
        row = _row_start(number, count, "ok" if errors.right else "WRONG")
        row += f"{errors.calls} calls, {errors.replays} replays  {layout}"
        return "\n    ".join([row, *errors.differences, *errors.unequal])
    wrong = not errors.worst <= LIMITS[layout.dtype]
    row = _row_start(number, count, "WRONG" if wrong else "ok")
    for kind in _COLUMNS:
        row += f"{errors.relative[kind]:.1e} x{errors.each[kind]:.2g}".ljust(_WIDTH - 1) + " "
    if not wrong:
        return f"{row}{layout}"
    first = f"; first wrong: {errors.first}" * bool(errors.first)
    return f"{row}{layout}{first}; largest: {errors.where}; rerun: {layout.command}"


def _row_start(number: int, count: int, verdict: str) -> str:
    """Return the first two columns: the row's number and the verdict."""
    places = len(str(count))
    text = f"[{number:>{places}}/{count}] {verdict}" if verdict else "row"
    return text.ljust(2 * places + 10)


def judge(layouts: Sequence[Layout], lines: Sequence[str]) -> dict:
    """Summarize what rank 0 wrote: passed if every layout has a line within its limit.

    A missing, truncated or surplus line is wrong, and so is a line of a different layout.
    """
    worst: dict[str, float] = {}
    right = 0
    for layout, line in zip(layouts, lines):
        if not line.endswith("\n"):
            break
        row = json.loads(line)
        error = _worst(row["errors"])
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


def _worst(errors: dict) -> float:
    """The largest error of a row; 0 or infinity for CUDA graphs."""
    if "replays" in errors:
        return 0.0 if GraphProof(**errors).right else math.inf
    return Errors(**errors).worst


class _RefusedError(Exception):
    """A request that cannot be fulfilled; only its message is printed."""


def _prove(config: ProveConfig, summary: dict, processes: Processes | None = None) -> None:
    """Prove layouts on ranks of this machine; `summary` is filled in even if they fail."""
    try:
        layouts = config.layouts()
    except (ValueError, ImportError) as error:
        raise _RefusedError(error) from error
    if under_torchrun():
        raise _RefusedError("prove starts its own ranks; run it without torchrun")
    world = layouts[0].mesh.world
    for line in idle_lines(PROVE, config):
        say(line)
    prove = partial(prove_rank, graph=True) if config.graph else prove_rank
    failed = False
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        try:
            if world == 1:
                prove(layouts, config.timeout, file.name)
            else:
                backend = BACKENDS[layouts[0].device]
                args = (layouts, config.timeout, file.name)
                launch(prove, args, Mesh(dp=world), backend=backend, processes=processes)
        except SystemExit as error:
            failed = not isinstance(error, Stopped)
            raise
        finally:  # a dead rank has set the exit code; a layout without a row is not proven
            rows = file.readlines()
            summary |= judge(layouts, rows)
            if failed and len(rows) < len(layouts):
                say(f"the ranks failed in this layout; rerun: {layouts[len(rows)].command}")


def _typecheck(config: ProveConfig, summary: dict) -> None:
    """Check the types of a layout's program, stage by stage."""
    from warpweave.prove.typecheck import typecheck

    if config.model is not None and config.model not in PRESETS:
        known, near = ", ".join(PRESETS), did_you_mean(config.model, PRESETS)
        raise _RefusedError(f"model must be one of {known}, got {config.model!r}{near}")
    try:
        layout = config.typechecked()
        mesh, model = layout.mesh, layout.model
        if config.model is not None:
            model = dataclasses.replace(PRESETS[config.model], dropout=model.dropout)
        summary |= {"typechecked": 0, "ranks": mesh.world}
        for stage in range(mesh.pp):
            typecheck(
                model, mesh, stages=[stage], sequence_parallel=layout.sequence_parallel,
                recompute=layout.recompute, layout=layout.layout,
            )  # fmt: skip
            summary["typechecked"] = stage + 1
            print(f"stage {stage} of {mesh.pp}: ok", flush=True)
        summary["passed"] = True
    except TypeError as error:
        summary |= {"passed": False, "error": str(error)}
    except (ValueError, ImportError) as error:
        raise _RefusedError(error) from error


def run(config: ProveConfig, processes: Processes | None = None) -> NoReturn:
    """Run the command ``warpweave prove``: exit with 0 if everything was proven, else with 1.

    The exit code is 2 for invalid layouts and 128 plus its number for a signal. The last line
    always reports what was proven; after a signal its ``passed`` is null. Ranks are started in
    `processes`, if those were prepared early.
    """
    began, code = time.perf_counter(), 1
    summary: dict = {"passed": None}
    with Interrupt(raises=True):  # in this process; `launch` handles signals itself
        try:
            if config.typecheck:
                _typecheck(config, summary)
            else:
                _prove(config, summary, processes)
            code = 0 if summary["passed"] else 1
        except _RefusedError as error:
            print(f"warpweave: {error}", file=sys.stderr)
            summary, code = {}, 2
        except Stopped as error:
            summary |= {"passed": None, "stopped": True}
            code = 128 + error.number
        finally:
            if summary:
                summary["seconds"] = round(time.perf_counter() - began, 1)
                print(json.dumps(summary), flush=True)
    sys.exit(code)
