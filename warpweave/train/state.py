"""The tensors of a run in a checkpoint: save them from an engine, and restore them.

    name                    tensor                                       written by
    NAME                    weights; with an outer optimizer, the        replica 0
                            global weights
    exp_avg/NAME            a moment of the inner optimizer              replica 0
    replica1/param/NAME     with an outer optimizer, local weights       replica 1
    replica1/exp_avg/NAME   and local moments                            replica 1
    outer_momentum/NAME     the outer optimizer's momentum               replica 0
    outer_sum/NAME          the sum in flight of a streaming fragment    replica 0
    version1/NAME           with an asynchronous schedule, the weights   replica 0
                            of one update ago, version2/NAME of two

Weights are therefore always stored under their names, whatever the optimizers are.

Work in flight in an asynchronous pipeline is not saved: forwards that have begun are run again from
these versions, with bitwise identical results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from warpweave.checkpoint import CheckpointReader
from warpweave.model.engine import Engine
from warpweave.parallel.data.outer import GLOBAL, MOMENTUM, SUM
from warpweave.parallel.data.unit import VERSION, version_age


class _Kind(NamedTuple):
    """A state, the prefix of its tensors' names, and True if replica 0 writes it for all."""

    state: str
    prefix: str
    shared: bool


def _states(engine: Engine) -> list[_Kind]:
    """The states that a checkpoint holds for a parameter, in loading order."""
    moments = engine.optimizer.rule.moments
    if engine.outer is None:
        older = [f"{VERSION}{age}" for age in range(1, 1 + max(engine.staleness))]
        return [_Kind("param", "", True), *(_Kind(n, f"{n}/", True) for n in (*older, *moments))]
    here = f"replica{engine.mesh.index('outer')}/"
    found = [_Kind(name, f"{here}{name}/", False) for name in ("param", *moments)]
    found.append(_Kind(GLOBAL, "", True))
    found += [_Kind(MOMENTUM, f"{MOMENTUM}/", True)] * (engine.outer.rule.momentum > 0)
    return [*found, _Kind(SUM, f"{SUM}/", True)]


def saved_tensors(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for everything this rank writes. Collective, because tensors are
    gathered along the way."""
    if engine.outer is not None:
        engine.outer.wait()
    first = engine.mesh.index("outer") == 0
    for kind, prefix, shared in _states(engine):
        for record, tensor, mine in engine.read(kind):
            if mine and (first or not shared):
                yield prefix + record.name, tensor


def restore_tensors(engine: Engine, reader: CheckpointReader, *, versions: bool = True) -> None:
    """Load what `saved_tensors` wrote; each rank reads its own part. If the checkpoint has no
    `versions`, all weight versions are set to the newest. Raises `CheckpointError` if a tensor is
    missing."""
    if engine.outer is not None:
        engine.outer.resume(reader.step)
    for kind, prefix, _ in _states(engine):
        if version_age(kind) and not versions:
            continue

        # The function is called at once, so it reads this round's prefix.
        engine.load(kind, lambda record: reader.mapped(prefix + record.name))  # noqa: B023
