"""The command ``warpweave plan``: search, and print one page of text about the result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from warpweave.cli.messages import refusing
from warpweave.launch.processes import Processes
from warpweave.parallel.mesh import Mesh
from warpweave.plan.choose import Chosen, Found, Search, choose_layouts
from warpweave.plan.device import find_hardware
from warpweave.plan.explain import explained
from warpweave.plan.layout import options_of_job, write_layout
from warpweave.plan.memory import parameters_of
from warpweave.plan.options import PlanConfig
from warpweave.plan.time import step_traffic
from warpweave.plan.timeline import check_suffix, write_timeline

_GIB = 2**30


def run(config: PlanConfig, processes: Processes | None = None) -> None:
    """Search, print the page and, as the last line, one JSON object; exit with 2 if the options
    cannot be planned."""
    with refusing(ValueError):
        search = Search(config.config, config.gpus, find_hardware(config.hw), config.step_sequences)
        if config.best < 1:
            raise ValueError(f"best must be at least 1, got {config.best}")
        check_suffix(config.timeline)
        if config.out is not None and config.out.suffix != ".toml":
            raise ValueError(f"--out must end in .toml, got {config.out}")
        for path in filter(None, (config.out, config.html, config.timeline)):
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise ValueError(f"{path} cannot be written; name a file in an existing folder")
        found = choose_layouts(search, config.best)
    result = as_record(config, search, found)
    print("\n".join(lines(config, search, found)))
    if config.explain:
        print("\n".join(explained(found.best[0])))
    if config.html is not None:
        config.html.write_text(_html(config, search, found))
    if config.timeline is not None:
        write_timeline(config.timeline, {"simulated": found.best[0].time.timeline})
    if config.out is not None:
        write_layout(config.out, found.best[0].job)
    print(json.dumps(result))


def as_record(config: PlanConfig, search: Search, found: Found) -> dict[str, Any]:
    """Return the result as JSON; `layouts` is in order, each with its training options."""
    miss = None
    if found.miss is not None:
        miss = {"options": options_of_job(found.miss[0]), "memory": found.miss[1]}
    return {
        "model": config.model,
        "gpus": search.gpus,
        "hardware": search.hardware.name,
        "sequences": search.sequences,
        "seq_len": search.config.seq_len,
        "layouts": [_chosen_row(chosen) for chosen in found.best],
        "refused": dict(found.refused),
        "nearest_miss": miss,
        "simulated": found.simulated,
        "bounded": found.bounded,
    }


def _chosen_row(chosen: Chosen) -> dict[str, Any]:
    """Return a layout's options and predictions, in bytes and seconds."""
    job, time = chosen.job, chosen.time
    tokens = job.sequences * job.config.seq_len
    return {
        "options": options_of_job(job),
        "seconds": time.seconds,
        "mfu": time.mfu,
        "tokens_per_second": tokens / time.seconds,
        "bubble": time.timeline.bubble,
        "memory": [dataclasses.asdict(rank) | {"total": rank.total} for rank in chosen.memory],
        "traffic": {
            axis: {"link": link, "bytes": moved} for axis, link, moved in step_traffic(job)
        },
    }


def lines(config: PlanConfig, search: Search, found: Found) -> Iterator[str]:
    """Yield the lines of the page of text."""
    model, first = search.config, found.best[0].job
    yield _about(config, search, found)
    yield ""
    yield (
        " seconds    MFU  tokens/s/GPU    GiB  tp  pp  cp    dp  microbatches  batch  ZeRO"
        "  recompute  schedule"
    )
    for chosen in found.best:
        job, time = chosen.job, chosen.time
        mesh, plan = job.mesh, job.plan
        most = max(rank.total for rank in chosen.memory) / _GIB
        speed = job.sequences * model.seq_len / time.seconds / search.gpus
        chunks = f" x {plan.chunks}" if plan.chunks > 1 else ""
        yield (
            f"{time.seconds:8.3f} {time.mfu:6.1%} {speed:13.0f} {most:6.1f} {mesh.tp:3} "
            f"{mesh.pp:3} {mesh.cp:3} {mesh.dp:5} {plan.microbatches:13} {job.batch:6} "
            f"{plan.zero:5}  {plan.recompute:9}  {plan.schedule}{chunks}"
        )
    yield ""
    yield "each rank sends, in a step of the first layout:"
    for axis, link, moved in step_traffic(first):
        yield f"  {axis:3} {moved / 1e9:10.2f} GB  {link}"
    yield ""
    yield f"{_searched(found)}; why others were rejected:"
    for why, count in found.refused.most_common():
        yield f"  {count:6}  {why}"
    fits = search.sequences // search.gpus * search.gpus
    if 0.9 * search.sequences <= fits < search.sequences:  # nearly the same batch
        yield (
            f"{search.sequences} sequences are not divisible by {search.gpus} data ranks; "
            f"--sequences {fits} allows dp = {search.gpus}"
        )
    yield from _nearest_miss(search, found)


def _about(config: PlanConfig, search: Search, found: Found) -> str:
    """Return a line about the model, the GPUs and the data of a step."""
    first, model, hardware = found.best[0].job, search.config, search.hardware
    plan = dataclasses.replace(first.plan, schedule="1f1b", chunks=1)
    alone = dataclasses.replace(first, mesh=Mesh(), plan=plan)
    billions, tokens = parameters_of(alone)[0] / 1e9, search.sequences * model.seq_len
    return (
        f"{config.model}, {billions:.3g} B parameters, on {search.gpus} {hardware.name} "
        f"({hardware.node} per node); a step has {search.sequences} sequences of "
        f"{model.seq_len} tokens, {tokens:,} in total. Predicted, not measured."
    )


def _searched(found: Found) -> str:
    ranked = f"{found.bounded} were ranked by a lower bound on their step time"
    return f"{found.simulated} layouts were simulated, {ranked}"


def _nearest_miss(search: Search, found: Found) -> Iterator[str]:
    if found.miss is not None:
        job, needed = found.miss
        options = " ".join(f"{k} {v}" for k, v in options_of_job(job).items())
        room = f"{search.hardware.name} has {search.hardware.capacity / _GIB:.1f}"
        yield f"nearest miss: {options} needs {needed / _GIB:.1f} GiB per GPU, but {room}"


def _html(config: PlanConfig, search: Search, found: Found) -> str:
    """Return the page of `plan.page`."""
    from warpweave.plan.page import plan_page

    record, rows = as_record(config, search, found), []
    figures = ("seconds", "mfu", "tokens_per_second", "bubble")
    for row in record["layouts"]:
        most = max(rank["total"] for rank in row["memory"]) / _GIB
        rows.append({name: row[name] for name in figures} | {"GiB": most} | row["options"])
    memory = [_stacked(rank) for rank in found.best[0].memory]
    timeline = found.best[0].time.timeline
    words = f"{config.model} on {search.gpus} {search.hardware.name}", _about(config, search, found)
    searched = "; ".join((_searched(found), *_nearest_miss(search, found)))
    return plan_page(record, (*words, searched), rows, memory, search.hardware.capacity, timeline)


def _stacked(rank: Any) -> dict[str, float]:
    """Return a rank's memory by kind; of the kinds that never coexist, only the largest."""
    held = dataclasses.asdict(rank)
    rest = ("activations", "loading", "update")
    most = max(rest, key=held.__getitem__)
    return {name: value for name, value in held.items() if name == most or name not in rest}
