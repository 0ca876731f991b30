"""Local SGD and DiLoCo against ten lines of them, and against what they are in the limit.

Ranks are threads, weights float64. The reference trains each replica as an engine of its own on one
rank, and meets their logical tensors by the formulas of the papers.
"""

from __future__ import annotations

import functools
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from threads import on_mesh
from torch import Tensor

from warpweave.config import GPTConfig, ParallelPlan
from warpweave.engine import Engine
from warpweave.engine_stage import StepResult
from warpweave.parallel.collectives import start_all_gather
from warpweave.parallel.data.optimizer import SGD, AdamW
from warpweave.parallel.data.outer import OuterOptimizer, OuterRule
from warpweave.parallel.mesh import ConnectedMesh, Mesh, single

CONFIG = GPTConfig(23, 8, 2, 8, 2, dropout=0.1)
SAMPLES = 4  # of a step, over all replicas
STEPS = 7
LOCAL_SGD = {"lr": 1.0, "momentum": 0.0}
Weights = dict[str, Tensor]


def _engine(mesh: ConnectedMesh, outer: OuterRule | None, zero: int = 1, **options: Any) -> Engine:
    replicas = mesh.size("outer") * mesh.size("dp")
    options = {"rule": AdamW(), "seed": 3, "micro_batch_size": SAMPLES // replicas} | options
    return Engine(
        CONFIG, mesh, ParallelPlan(zero=zero), dtype=torch.float64, outer=outer, **options
    )


def _step(engine: Engine, step: int, replica: int, replicas: int, lr: float = 0.01) -> StepResult:
    """A step on this part of the batch of that number."""
    drawn = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(23, (SAMPLES, 8), generator=drawn) for _ in range(2))
    every = (tokens, labels, torch.arange(SAMPLES))
    parts = (x.unflatten(0, (replicas, 1, -1))[replica] for x in every)
    return engine.step(*parts, lr=lr, key=step)


def _read(engine: Engine, kind: str = "param") -> Weights:
    return {record.name: tensor.clone() for record, tensor, _ in engine.read(kind)}


def _steps(engine: Engine, steps: range) -> list[float]:
    """The losses of these steps, of which each data replica takes its part of the batch."""
    (outer, replicas), (dp, each) = (
        (engine.mesh.index(axis), engine.mesh.size(axis)) for axis in ("outer", "dp")
    )
    at = outer * each + dp
    return [float(_step(engine, step, at, replicas * each).loss) for step in steps]


def _run(
    mesh: ConnectedMesh, rule: OuterRule | None, zero: int = 1, options: Any = MappingProxyType({})
) -> tuple[Weights, list[float]]:
    """The weights of this rank's stages after the steps, and the losses."""
    engine = _engine(mesh, rule, zero, **options)
    losses = _steps(engine, range(STEPS))
    return _read(engine), losses


def _close(found: Weights, expected: Weights, tolerance: float = 1e-11) -> None:
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=tolerance), name


# -------------------------------------------------------------------------- the reference


def _layer(name: str) -> int:
    """The layer that a parameter meets with."""
    first, *rest = name.split(".")
    return int(rest[0]) if first == "blocks" else 0 if first in ("embedding", "positions") else 1


def _reference(rule: OuterRule, replicas: int = 2) -> list[Weights]:
    """Streaming DiLoCo in one process: the local weights of each replica after the steps."""
    engines = [_engine(single(), None, micro_batch_size=SAMPLES // replicas) for _ in range(2)]
    together, sent = _read(engines[0]), {}
    momentum = {name: torch.zeros_like(w) for name, w in together.items()}
    for step in range(1, STEPS + 1):
        for r, engine in enumerate(engines):
            _step(engine, step - 1, r, replicas)
        local = sent[step] = [_read(engine) for engine in engines]
        start, apart = step - rule.delay, rule.every // rule.fragments
        turn = (start // apart - 1) % rule.fragments if start > 0 and start % apart == 0 else None
        for name, w in together.items():
            if _layer(name) % rule.fragments != turn:
                continue
            delta = w - sum(x[name] for x in sent[start]) / replicas
            momentum[name] = rule.momentum * momentum[name] + delta
            together[name] = w - rule.lr * (delta + rule.momentum * momentum[name])
            for x in local:
                x[name] = rule.mix * x[name] + (1 - rule.mix) * together[name]
        for engine, weights in zip(engines, local, strict=True):
            engine.load("param", lambda record, weights=weights: weights[record.name])
    return local


RULES = {
    "local SGD": OuterRule(3, **LOCAL_SGD),
    "DiLoCo": OuterRule(3),
    "fragments": OuterRule(4, fragments=2),
    "streaming": OuterRule(4, 0.4, 0.8, fragments=2, delay=1, mix=0.3),
    "late": OuterRule(3, delay=2),
}


@functools.cache
def _expected(name: str) -> list[Weights]:
    return _reference(RULES[name])


@pytest.mark.parametrize("name", RULES)
def test_replicas_meet_as_the_papers_say(name: str) -> None:
    for (found, _), expected in zip(on_mesh(Mesh(outer=2), _run, RULES[name]), _expected(name)):
        _close(found, expected)


INSIDE = {"tp": 1, "pp": 0, "dp": 3, "cp": 2}  # axis -> ZeRO stage


@pytest.mark.parametrize("axis", INSIDE)
def test_a_replica_may_be_many_ranks(axis: str) -> None:
    mesh = Mesh(**{axis: 2}, outer=2)
    for rank, (found, _) in enumerate(on_mesh(mesh, _run, RULES["streaming"], INSIDE[axis])):
        _close(found, _expected("streaming")[mesh.index("outer", rank)])


# -------------------------------------------------------------------------- identities


_SGD = {"rule": SGD(momentum=0.0), "clip": None}  # the inner optimizer


@pytest.mark.parametrize("axis", ["", "tp", "pp", "dp"])
def test_every_step_with_sgd_is_data_parallelism(axis: str) -> None:
    """The mean of weights is the mean of gradients, if all have as many tokens."""
    ((alone, losses),) = on_mesh(Mesh(), _run, None, 0, _SGD)
    mesh = Mesh(**{axis: 2} if axis else {}, outer=2)
    rule = OuterRule(1, **LOCAL_SGD)
    for found, means in on_mesh(mesh, _run, rule, INSIDE.get(axis, 0), _SGD):
        _close(found, alone, 1e-14)
        assert means == pytest.approx(losses, rel=1e-13)


@pytest.mark.parametrize("fragments", [1, 2])
def test_one_replica_that_takes_the_mean_is_plain_training(fragments: int) -> None:
    rule = OuterRule(2, **LOCAL_SGD, fragments=fragments)
    ((plain, losses),), ((found, same),) = (on_mesh(Mesh(), _run, r) for r in (None, rule))
    assert same == losses
    assert all(torch.equal(found[name], w) for name, w in plain.items())


def _interleaved(mesh: ConnectedMesh, rule: OuterRule) -> Weights:
    """As many DiLoCos as fragments, each of its own units, each begun a turn later."""
    engine = _engine(mesh, OuterRule(rule.every))
    every = []
    for part in range(rule.fragments):
        units = [u for u in engine.units if _layer(u.params[0][0].name) % rule.fragments == part]
        alone = OuterOptimizer(OuterRule(rule.every), units, [0] * len(units), mesh)
        alone.step = (rule.fragments - 1 - part) * rule.apart
        every.append(alone)
    engine._update.outer = SimpleNamespace(
        before_update=lambda: [alone.before_update() for alone in every],
        after_update=lambda: [alone.after_update() for alone in every],
    )
    _steps(engine, range(STEPS))
    return _read(engine)


def test_fragments_without_delay_are_interleaved_diloco() -> None:
    rule = RULES["fragments"]
    for (found, _), expected in zip(
        on_mesh(Mesh(outer=2), _run, rule), on_mesh(Mesh(outer=2), _interleaved, rule)
    ):
        assert all(torch.equal(found[name], w) for name, w in expected.items())


def test_the_warm_up_is_data_parallelism_with_any_optimizer() -> None:
    """Post-local SGD: equal weights and moments until then, and other ones after it."""
    ((alone, losses),) = on_mesh(Mesh(), _run, None, 0)
    for found, means in on_mesh(Mesh(outer=2), _run, OuterRule(2, warmup=STEPS), 0):
        _close(found, alone)
        assert means == pytest.approx(losses, rel=1e-12)

    def differ(mesh: ConnectedMesh) -> list[bool]:
        engine = _engine(mesh, OuterRule(2, **LOCAL_SGD, warmup=3), zero=0)
        found = []
        for step in range(7):
            _steps(engine, range(step, step + 1))
            mine = torch.cat([w.flatten() for w in _read(engine).values()])
            low, high = start_all_gather(mine[None], mesh.group("outer")).wait()
            found.append(not torch.equal(low, high))
        return found

    assert on_mesh(Mesh(outer=2), differ)[0] == [False] * 3 + [True, False] * 2
