"""Faults that are planted in a rank of a training job, at a step or in a save.

    python -m warpweave.trials.faulty '{"act": "kill", "rank": 1, "step": 3}' --tp 2 --steps 9 ...

is ``warpweave train`` with these options, in which rank 1 kills itself when its step 3 begins.
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

PLANTED = "planted"  # a file beside the run's folder: seconds since the epoch of the fault


@dataclass(frozen=True)
class Fault:
    """What goes wrong where.

    Attributes:
        act: one of `ACTS`.
        rank: the rank that it goes wrong on.
        step: it happens when this step begins, counted from 0, or when it is saved.
        at: at the beginning of the step, `delay` seconds into it, or as long into its save.
        delay: in seconds.

    It happens once, and not again in a run that was started again.
    """

    act: str
    rank: int
    step: int
    at: Literal["begin", "within", "save"] = "begin"
    delay: float = 0.0

    @property
    def text(self) -> str:
        """As JSON, which the command takes."""
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
        """Save, and have the fault happen meanwhile if it is of a save."""
        due = self._is_due(self.step, saving=True)
        super().save()
        if due:
            time.sleep(self._fault.delay)
            self._act()


def faulty_rank(fault: Fault, config: TrainConfig, port: int | None = None) -> int:
    """`train_rank` with a fault."""
    return train_rank(config, port, kind=partial(FaultyTrainer, fault))


# ---------------------------------------------------------------- what can go wrong


def _kill(_: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(_: Trainer) -> None:
    os._exit(0)


def _stop(_: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(_: Trainer) -> None:
    time.sleep(3600)


def _spin(_: Trainer) -> None:
    end = time.monotonic() + 3600
    while time.monotonic() < end:
        pass


def _hold_the_lock(_: Trainer) -> None:
    """As a C extension that computes and does not let go of Python's global lock."""
    ctypes.PyDLL(None).sleep(3600)


def _raise(_: Trainer) -> None:
    raise RuntimeError("planted")


def _lag(trainer: Trainer) -> None:
    """200 ms in each forward from here on."""
    first = next(trainer.engine.gpt.children())
    first.register_forward_pre_hook(lambda *_: time.sleep(0.2))


def _nan(trainer: Trainer) -> None:
    """Not a number in the output of this rank's last block."""
    blocks = [m for m in trainer.engine.gpt.modules() if isinstance(m, TransformerBlock)]
    blocks[-1].register_forward_hook(lambda _module, _inputs, x: x * float("nan"))


def _flip(trainer: Trainer) -> None:
    """One bit of a weight that other ranks hold, too."""
    norm = next(p for n, p in trainer.engine.gpt.named_parameters() if "norm" in n)
    norm.data.view(torch.int32)[0] ^= 1 << 12


def _extra(trainer: Trainer) -> None:
    """A collective in a forward that the others do not issue."""
    group = trainer.mesh.group("world")

    def issue(*_: Any) -> None:
        handle.remove()
        dist.all_reduce(torch.zeros(3), group=group)

    handle = next(trainer.engine.gpt.children()).register_forward_pre_hook(issue)


ACTS: dict[str, Callable[[Trainer], None]] = {
    "kill": _kill, "leave": _leave, "stop": _stop, "sleep": _sleep, "spin": _spin,
    "hold the lock": _hold_the_lock, "raise": _raise, "lag": _lag, "nan": _nan, "flip": _flip,
    "extra": _extra,
}  # fmt: skip


def planted_at(out: Path) -> float | None:
    """When the fault of the run in `out` happened, in seconds since the epoch; None if not yet."""
    path = out.with_name(PLANTED)
    return float(path.read_text()) if path.exists() else None


def main(processes: Processes | None) -> None:
    """A job with a fault, in `processes` if they were prepared early."""
    fault = Fault(**json.loads(sys.argv[1]))
    run(parse(sys.argv[2:]), processes, as_rank=partial(faulty_rank, fault))
