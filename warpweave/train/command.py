"""``warpweave train``: run one rank, or launch all of them (options: `options`)."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, NoReturn

import torch.distributed as dist

from warpweave.checkpoint import CheckpointError
from warpweave.cli.messages import one_line, say, tell_torchrun
from warpweave.convert.families import write_config
from warpweave.convert.fields import ConvertError
from warpweave.launch.devices import BACKENDS, choose_backend
from warpweave.launch.interrupt import Interrupt
from warpweave.launch.processes import Processes, leave, no_cache, under_torchrun
from warpweave.launch.ranks import launch
from warpweave.launch.session import join, reported
from warpweave.plan.fits import free_host_memory
from warpweave.train import idle_options
from warpweave.train.lr_schedule import short_of_peak
from warpweave.train.metrics import locked
from warpweave.train.options import TrainConfig, parse
from warpweave.train.trainer import RAISED_BY_ALL, Trainer, check_fits


def train_rank(
    config: TrainConfig, port: int | None = None, *, kind: Callable[..., Trainer] | None = None
) -> int:
    """Train as one rank of a launched (or single) job; rank 0 prints the result's JSON line.

    `kind` makes the trainer; None means `Trainer`. Returns the exit code: 0, or 128 + the number of
    the signal that interrupted the run.
    """
    interrupt = Interrupt()
    if port is not None or not under_torchrun():
        interrupt.listen()
    try:
        backend = BACKENDS.get(config.device)
        session = join(config.mesh, timeout=config.timeout, backend=backend, port=port)
    except dist.DistError as error:
        say(f"rank {os.environ.get('RANK', '0')} could not connect to the other ranks: {error}")
        sys.exit(1)
    interrupt.listen()  # not before this under torchrun: it sends SIGTERM to ranks still in `join`
    with reported(session, RAISED_BY_ALL, refused=(ValueError, CheckpointError)):
        if session.goes_on:
            config = dataclasses.replace(config, resume="auto")
        trainer = (kind or Trainer)(config, session, interrupt)
        session.begin()
    with reported(session, RAISED_BY_ALL):
        if session.rank == 0:
            say(trainer.describe())
            if config.plan.cp_strategy == "measured":
                say(trainer.engine.gpt.explain_context(config.batch))
        result = trainer.run()
        session.beat(trainer.step, "closing")
        session.close()
    if session.rank == 0:
        print(json.dumps(result), flush=True)
    return 128 + (interrupt.number or signal.SIGTERM) if trainer.stopped else 0


def _say_of_options(config: TrainConfig, device: Literal["cpu", "cuda"]) -> None:
    """Print which options have no effect in this run on `device`."""
    if line := short_of_peak(config):
        say(line)
    there = dataclasses.replace(config, device=device)
    for line in idle_options.idle_lines(idle_options.TRAIN, there):
        say(line)


def _say_of_export(config: TrainConfig) -> None:
    """Warn before training from scratch if no model family in transformers can represent the model.
    A run that starts from a transformers model is checked against its config.json at export."""
    if config.init_from is not None:
        return
    try:
        write_config(config.model_config(1))
    except ConvertError as error:
        say(f"warpweave export will not accept this run: {error}")


def main(argv: list[str] | None = None) -> None:
    """Run ``warpweave train`` with the options in `argv`."""
    run(parse(argv))


def run(
    config: TrainConfig,
    processes: Processes | None = None,
    *,
    as_rank: Callable[..., int] | None = None,
) -> NoReturn:
    """Run ``warpweave train`` and end the process.

    Ranks start in `processes` if those were prepared early. `as_rank` replaces `train_rank`.
    """
    as_rank = as_rank or train_rank
    torchrun = under_torchrun()
    rank, local_rank = (int(os.environ.get(n, "0")) for n in ("RANK", "LOCAL_RANK"))
    try:
        if config.server and torchrun:
            raise ValueError(
                f"--server {config.server} starts its own ranks; run it without torchrun, which "
                f"started {os.environ['WORLD_SIZE']} ranks"
            )
        if config.max_restarts and torchrun:
            raise ValueError(
                f"max_restarts = {config.max_restarts} is not supported under torchrun; pass "
                "--max-restarts to torchrun instead"
            )
        if config.elastic and torchrun:
            raise ValueError(
                f"--elastic {config.elastic} starts its own ranks; run it without torchrun"
            )
        config = config.for_ranks(int(os.environ["WORLD_SIZE"]) if torchrun else config.mesh.world)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if torchrun else config.mesh.world
        backend = choose_backend(here, BACKENDS.get(config.device), launched=not torchrun)
        if local_rank == 0:  # the others wait in `join` and then read the tokens from the cache
            config.check()
            if backend == "gloo":
                cpu = config.on("cpu")
                free = free_host_memory()
                check_fits(cpu, cpu.model_config(1), "cpu", free=free, ranks=here)
        with locked(config.out) if rank == 0 else nullcontext():
            if rank == 0:
                _say_of_options(config, "cpu" if backend == "gloo" else "cuda")
                _say_of_export(config)
            code = 0
            if config.server:
                from warpweave.train.server.run import run as run_servers

                run_servers(config, processes)
            elif config.elastic:
                from warpweave.train.elastic.run import run as run_elastic

                run_elastic(config, processes)
            elif torchrun or (config.mesh.world == 1 and not config.max_restarts):
                os.environ.update(no_cache())
                code = as_rank(config)
            else:
                restarts = config.max_restarts
                code = launch(
                    as_rank, (config,), config.mesh, backend=backend, max_restarts=restarts,
                    processes=processes,
                )  # fmt: skip
    except (ValueError, ImportError, OSError, CheckpointError) as error:
        if local_rank == 0:
            say(one_line(error))
        tell_torchrun(one_line(error))
        sys.exit(2)
    if torchrun:
        leave(0)
    sys.exit(code)


if __name__ == "__main__":
    main()
