"""Faults that are planted in one rank of a training job, at a step or during a save.

    python -m faulty '{"act": "kill", "rank": 1, "step": 3}' --tp 2 --steps 9 ...

This is ``warpweave train`` with these options, but rank 1 kills itself when its step 3 begins.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from warpweave.launch.processes import Processes
from warpweave.layers.block import TransformerBlock
from warpweave.train.command import run, train_rank
from warpweave.train.options import TrainConfig, parse
from warpweave.train.trainer import Trainer

PLANTED = "planted"  # a file next to the run's folder: when the fault happened, seconds since 1970


@dataclass(frozen=True)
class Fault:
    """One fault of one rank. It happens once, and not again after a restart.

    Attributes:
        act: one of `ACTS`.
        rank: the rank at fault.
        step: the step, counted from 0, in which it happens.
        at: when the step begins, `delay` seconds into it, or `delay` seconds into its save.
        delay: in seconds.
    """

    act: str
    rank: int
    step: int
    at: Literal["begin", "within", "save"] = "begin"
    delay: float = 0.0

    @property
    def text(self) -> str:
        """The JSON that ``python -m faulty`` accepts."""
        return json.dumps(asdict(self))


class FaultyTrainer(Trainer):
    """A trainer with a fault."""

    def __init__(self, fault: Fault, config: TrainConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self._fault, self._marker = fault, config.out.with_name(PLANTED)

    def _is_due(self, step: int, *, saving: bool) -> bool:
        f = self._fault
        here = (f.rank, f.step, f.at == "save") == (self.session.rank, step, saving)
        return here and not self._marker.exists()

    def _act(self) -> None:
        written = self._marker.with_suffix(".part")
        written.write_text(repr(time.time()))
        written.rename(self._marker)
        ACTS[self._fault.act](self)

    def _begin(self, step: int, *before: Any) -> Any:
        if self._is_due(step, saving=False):
            if self._fault.at == "within":
                threading.Timer(self._fault.delay, self._act).start()
            else:
                self._act()
        return super()._begin(step, *before)

    def save(self) -> None:
        """Save; a fault at "save" happens meanwhile."""
        due = self._is_due(self.step, saving=True)
        super().save()
        if due:
            time.sleep(self._fault.delay)
            self._act()


def faulty_rank(fault: Fault, config: TrainConfig, port: int | None = None) -> int:
    """`train_rank` with a fault."""
    return train_rank(config, port, kind=partial(FaultyTrainer, fault))


# ---------------------------------------------------------------- acts


def _spin(_: Trainer) -> None:
    end = time.monotonic() + 3600
    while time.monotonic() < end:
        pass


def _raise(_: Trainer) -> None:
    raise RuntimeError("planted")


def _lag(trainer: Trainer) -> None:
    """Delay each later forward by 200 ms."""
    first = next(trainer.engine.gpt.children())
    first.register_forward_pre_hook(lambda *_: time.sleep(0.2))


def _nan(trainer: Trainer) -> None:
    """Make the output of this rank's last block NaN."""
    blocks = [m for m in trainer.engine.gpt.modules() if isinstance(m, TransformerBlock)]
    blocks[-1].register_forward_hook(lambda _module, _inputs, x: x * float("nan"))


def _flip(trainer: Trainer) -> None:
    """Flip one bit of a replicated weight."""
    norm = next(p for n, p in trainer.engine.gpt.named_parameters() if "norm" in n)
    norm.data.view(torch.int32)[0] ^= 1 << 12


def _extra(trainer: Trainer) -> None:
    """Issue a collective in a forward that other ranks do not issue."""
    group = trainer.mesh.group("world")

    def issue(*_: Any) -> None:
        handle.remove()
        dist.all_reduce(torch.zeros(3), group=group)

    handle = next(trainer.engine.gpt.children()).register_forward_pre_hook(issue)


ACTS: dict[str, Callable[[Trainer], None]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "leave": lambda _: os._exit(0),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda _: time.sleep(3600),
    "hold the lock": lambda _: ctypes.PyDLL(None).sleep(3600),  # Python's, as a C extension may
    "spin": _spin, "raise": _raise, "lag": _lag, "nan": _nan, "flip": _flip, "extra": _extra,
}  # fmt: skip


def planted_at(out: Path) -> float | None:
    """Return when the fault of the run in `out` happened, in seconds since 1970, or None."""
    path = out.with_name(PLANTED)
    return float(path.read_text()) if path.exists() else None


def main(processes: Processes | None) -> None:
    """Run a job with a fault, in `processes` if they were prepared early."""
    fault = Fault(**json.loads(sys.argv[1]))
    run(parse(sys.argv[2:]), processes, as_rank=partial(faulty_rank, fault))
