"""Local SGD and DiLoCo compared with ten lines of code, and with their limiting cases.

Ranks are threads, weights float64. The reference trains each replica as a separate engine on one
rank, and syncs their logical tensors by the formulas of the papers.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pretend_nccl import run_nccl
from refused import check, one_line
from threads import on_mesh, run_threads
from torch import Tensor

from warpweave.checkpoint import open_latest
from warpweave.launch.session import Session
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.engine_update import StepResult
from warpweave.model.gpt import GPT
from warpweave.parallel.collectives import reduce_from, start_all_gather
from warpweave.parallel.data.optimizer import SGD, AdamW
from warpweave.parallel.data.outer import GLOBAL, MOMENTUM, SUM, OuterOptimizer, OuterRule
from warpweave.parallel.mesh import ConnectedMesh, Mesh, single
from warpweave.plan.memory import TrainingStep, estimate
from warpweave.prove.layouts import Layout
from warpweave.prove.proof import prove_layout
from warpweave.prove.typecheck import typecheck
from warpweave.train.options import GPTOverrides, TrainConfig
from warpweave.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("undrawn")
CONFIG = GPTConfig(23, 8, 2, 8, 2, dropout=0.1)
SAMPLES = 4  # per step, over all replicas
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
    """Run a step on this part of the batch with that number."""
    drawn = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(23, (SAMPLES, 8), generator=drawn) for _ in range(2))
    every = (tokens, labels, torch.arange(SAMPLES))
    parts = (x.unflatten(0, (replicas, 1, -1))[replica] for x in every)
    return engine.step(*parts, lr=lr, key=step)


def _read(engine: Engine, kind: str = "param") -> Weights:
    return {record.name: tensor.clone() for record, tensor, _ in engine.read(kind)}


def _place(mesh: ConnectedMesh) -> tuple[int, int]:
    """Return (which data replica this is, how many there are), over all outer replicas."""
    each = mesh.size("dp")
    return mesh.index("outer") * each + mesh.index("dp"), mesh.size("outer") * each


def _steps(engine: Engine, steps: range) -> list[float]:
    """Return the losses of these steps, with each data replica on its part of the batch."""
    at, parts = _place(engine.mesh)
    return [float(_step(engine, step, at, parts).loss) for step in steps]


def _run(
    mesh: ConnectedMesh, rule: OuterRule | None, zero: int = 1, options: Any = MappingProxyType({}),
    steps: int = STEPS,
) -> tuple[Weights, list[float]]:  # fmt: skip
    """Return the weights of this rank's stages after the steps, and the losses."""
    engine = _engine(mesh, rule, zero, **options)
    losses = _steps(engine, range(steps))
    return _read(engine), losses


def _close(found: Weights, expected: Weights, tolerance: float = 1e-11) -> None:
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=tolerance), name


# -------------------------------------------------------------------------- the reference


def _layer(name: str) -> int:
    """Return the layer with which a parameter is synced."""
    first, *rest = name.split(".")
    return int(rest[0]) if first == "blocks" else 0 if first in ("embedding", "positions") else 1


def _reference(rule: OuterRule, replicas: int = 2) -> list[Weights]:
    """Run streaming DiLoCo in one process. Return the local weights of
    each replica after the steps."""
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


def test_sums_in_flight_are_right_in_nccls_order() -> None:
    """They are read as late as the wait for them, so earlier reads and writes are detected."""
    mesh = Mesh(dp=2, outer=2)

    def run(rank: int) -> Weights:
        return _run(mesh.connect(), RULES["streaming"], 2)[0]

    for rank, found in enumerate(run_nccl(4, run, drains="never")):
        _close(found, _expected("streaming")[mesh.index("outer", rank)])


# -------------------------------------------------------------------------- identities


_SGD = {"rule": SGD(momentum=0.0), "clip": None}  # the inner optimizer


@pytest.mark.parametrize("axis", ["", "tp", "pp", "dp"])
def test_every_step_with_sgd_is_data_parallelism(axis: str) -> None:
    """The mean of weights gives the mean of gradients, if all have equally many tokens."""
    ((alone, losses),) = on_mesh(Mesh(), _run, None, 0, _SGD, 3)
    mesh = Mesh(**{axis: 2} if axis else {}, outer=2)
    rule = OuterRule(1, **LOCAL_SGD)
    for found, means in on_mesh(mesh, _run, rule, INSIDE.get(axis, 0), _SGD, 3):
        _close(found, alone, 1e-14)
        assert means == pytest.approx(losses, rel=1e-13)


@pytest.mark.parametrize("fragments", [1, 2])
def test_one_replica_that_takes_the_mean_is_plain_training(fragments: int) -> None:
    rule = OuterRule(2, **LOCAL_SGD, fragments=fragments)
    ((plain, losses),), ((found, same),) = (on_mesh(Mesh(), _run, r) for r in (None, rule))
    assert same == losses
    assert all(torch.equal(found[name], w) for name, w in plain.items())


def _interleaved(mesh: ConnectedMesh, rule: OuterRule) -> Weights:
    """Run as many DiLoCos as fragments, each with its units, each starting one turn later."""
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
    """As in post-local SGD, weights and moments are equal until then, and different afterwards."""
    ((alone, losses),) = on_mesh(Mesh(), _run, None, 0)
    for found, means in on_mesh(Mesh(outer=2), _run, OuterRule(2, warmup=STEPS), 0):
        _close(found, alone)
        assert means == pytest.approx(losses, rel=1e-12)

    def differ(mesh: ConnectedMesh) -> list[bool]:
        engine = _engine(mesh, OuterRule(2, **LOCAL_SGD, warmup=3), zero=0)
        found = []
        for step in range(7):
            _steps(engine, range(step, step + 1))
            mine, common = (
                torch.cat([w.flatten() for w in _read(engine, kind).values()])
                for kind in ("param", GLOBAL)
            )
            assert torch.equal(mine, common) == (step < 3 or step % 2 == 0)
            low, high = start_all_gather(mine[None], mesh.group("outer")).wait()
            found.append(not torch.equal(low, high))
        return found

    assert on_mesh(Mesh(outer=2), differ)[0] == [False] * 3 + [True, False] * 2


# -------------------------------------------------------------------------- between steps


def _held_out(engine: Engine) -> float:
    """Return the loss of four sequences outside of any step, each data replica with its part."""
    tokens, labels = torch.randint(23, (2, 4, 8), generator=torch.Generator().manual_seed(99))
    at, parts = _place(engine.mesh)
    return float(engine.evaluate(
        *(x.unflatten(0, (parts, -1, engine.micro_batch_size))[at] for x in (tokens, labels))
    ))  # fmt: skip


def _evaluated(mesh: ConnectedMesh, zero: int) -> tuple[float, list[int], Weights]:
    engine = _engine(mesh, RULES["streaming"], zero)
    _steps(engine, range(3))
    before = _read(engine)
    loss = _held_out(engine)
    text = engine.generate(torch.tensor([1, 2]), 3, temperature=0.0).tolist()
    assert all(torch.equal(w, before[name]) for name, w in _read(engine).items())
    return loss, text, _read(engine, GLOBAL)


@pytest.mark.parametrize("axis", ["", "dp"])
def test_evaluation_and_text_are_of_the_weights_in_common(axis: str) -> None:
    mesh = Mesh(**{axis: 2} if axis else {}, outer=2)
    found = on_mesh(mesh, _evaluated, INSIDE.get(axis, 1))
    alone = _engine(single(), None)
    alone.load("param", lambda record: found[0][2][record.name])
    for loss, text, weights in found:
        assert loss == pytest.approx(_held_out(alone), rel=1e-13)
        assert text == alone.generate(torch.tensor([1, 2]), 3, temperature=0.0).tolist()
        assert all(torch.equal(w, found[0][2][name]) for name, w in weights.items())


def _resumed(rank: int, config: TrainConfig, stops: list[int]) -> None:
    """Compare a run with runs resumed from its checkpoints, with and without a sum in flight."""
    session = Session(torch.device("cpu"), rank, config.mesh.world, None, 60.0, config.mesh)
    whole = Trainer(config, session)
    ids = start_all_gather(whole.batches.step(0)[-1], whole.mesh.group("world")).wait()
    assert ids.flatten().tolist() == [0, 1, 2, 3]  # each data replica has its own samples
    whole.run()
    for stop in stops:
        out = config.out.with_name(f"from-{stop}")
        if rank == 0:
            shutil.copytree(config.out, out)
            for path in (out / "checkpoints").glob("step_*"):
                if int(path.name[5:]) > stop:
                    shutil.rmtree(path)
        dist.barrier()
        resumed = Trainer(dataclasses.replace(config, out=out, resume=True), session)
        assert resumed.step == stop
        resumed.run()
        for kind in ("param", "exp_avg", "exp_avg_sq", GLOBAL, MOMENTUM):
            found, expected = (_read(t.engine, kind) for t in (resumed, whole))
            assert all(torch.equal(found[name], w) for name, w in expected.items()), (stop, kind)


def _config(folder: Path, **changes: Any) -> TrainConfig:
    text = folder / "text"
    text.write_bytes(b" ".join(b"%d" % (i * i % 977) for i in range(1500)))
    small = GPTOverrides(layers=2, width=8, heads=2, seq_len=16)
    return TrainConfig(
        model="toy", overrides=small, plan=ParallelPlan(zero=2), data=text, batch=1, steps=6,
        save_every=1, keep=9, eval_every=0, eval_batches=1, sample=0, out=folder / "run", **changes,
    )  # fmt: skip


STREAMING = {"outer": 2, "outer_every": 4, "fragments": 2, "outer_delay": 1, "outer_mix": 0.3}


@pytest.mark.usefixtures("saved_at_once")
def test_a_run_goes_on_bit_for_bit_with_a_sum_in_flight(tmp_path: Path) -> None:
    config = _config(tmp_path, dp=2, dtype="bf16", **STREAMING)
    with mock.patch.object(dist.distributed_c10d, "_set_pg_timeout"):
        run_threads(4, _resumed, config, [4])
    reader = open_latest(config.out / "checkpoints")
    assert {name.split("/")[0] for name in reader.names if "/" in name} == {
        "replica0", "replica1", MOMENTUM, SUM,
    }  # fmt: skip


def _scaled(rank: int, config: TrainConfig) -> list[dict]:
    """Return the optimizer's values at a run's end and after its resume, with different scales."""
    session = Session(torch.device("cpu"), rank, config.mesh.world, None, 60.0, config.mesh)
    trainer = Trainer(config, session)
    trainer.engine.optimizer.loss_scale.value.fill_(256.0 * (1 + rank))
    trainer.run()
    resumed = Trainer(dataclasses.replace(config, resume=True), session)
    return [t.engine.optimizer.state() for t in (trainer, resumed)]


@pytest.mark.usefixtures("saved_at_once")
def test_each_replica_goes_on_with_its_own_loss_scale(tmp_path: Path) -> None:
    config = dataclasses.replace(_config(tmp_path, outer=2, outer_every=2, dtype="fp16"), steps=1)
    with mock.patch.object(dist.distributed_c10d, "_set_pg_timeout"):
        found = run_threads(2, _scaled, config)
    assert [saved["loss_scale"] for saved, _ in found] == [256.0, 512.0]
    assert all(saved == resumed for saved, resumed in found)


# -------------------------------------------------------------------------- errors

REFUSED = {
    "the outer interval must be at least 1 step, got 0": {"outer_every": 0},
    "fragments must be at least 1 and divide the outer interval of 4 steps, got 3": {
        "outer_every": 4, "fragments": 3
    },
    "outer delay must be .* less than the 2 steps between .* got 2": {
        "outer_every": 4, "fragments": 2, "outer_delay": 2
    },
    "outer delay must be .* got -1": {"outer_every": 4, "outer_delay": -1},
    "outer learning rate must be positive, .* got 0.0, 0.9": {"outer_every": 4, "outer_lr": 0.0},
    "outer warm-up must be at least 0 steps, got -1": {"outer_every": 4, "outer_warmup": -1},
    r"fragments \(4\) must be at most .* layers \(2\)": {"outer_every": 4, "fragments": 4},
    "outer = 2 requires --outer-every": {"outer": 2},
    "mesh axis outer must be a positive integer, got 0": {"outer": 0, "outer_every": 1},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _config(tmp_path, **REFUSED[message]).check()
    one_line(caught)


def _unlike(mesh: ConnectedMesh) -> None:
    engine = _engine(mesh, RULES["DiLoCo"], seed=3 + mesh.index("outer"))
    words = "^replicas must begin with the same weights, but these ranks differ from replica 0: "
    with pytest.raises(ValueError, match=words + r"rank 2 \(outer=1, tp=0\), rank 3 ") as caught:
        _steps(engine, range(1))
    one_line(caught)


def test_replicas_that_begin_with_other_weights_are_named_on_every_rank() -> None:
    on_mesh(Mesh(outer=2, tp=2), _unlike)


def test_the_engine_refuses_what_it_could_not_take_back() -> None:
    words = "2 outer replicas need an OuterRule; pass it as outer="
    check(lambda: _engine(Mesh(outer=2).seen_from(0), None), words)
    engine = _engine(single(), OuterRule(2))
    halted = torch.zeros(())
    tokens = torch.zeros(1, SAMPLES, 8, dtype=torch.int64)
    given = (tokens, tokens, torch.arange(SAMPLES)[None])
    step = functools.partial(engine.step, *given, lr=0.1, halted=halted)
    step()
    check(step, "`halted` must be None in a step after which replicas synchron")


def test_the_estimate_counts_what_the_outer_optimizer_holds() -> None:
    config, rule = GPTConfig(256, 32, 4, 64, 4), RULES["streaming"]
    more, less = (
        estimate(TrainingStep(config, Mesh(), ParallelPlan(), 1, "fp32", outer=outer))[0].optimizer
        for outer in (rule, None)
    )
    engine = Engine(config, single(), outer=rule)
    engine.outer.resume(rule.apart)  # with the first fragment, that of the embedding, in flight
    states = [unit.state.moments for unit in engine.units]
    held = sum(x.nbytes for of in states for name, x in of.items() if name.startswith("outer_"))
    assert more - less == held


# -------------------------------------------------------------------------- prove and typecheck


def test_replicas_train_as_one_device_does() -> None:
    """Compares everything that `prove` compares, on the same batch."""
    for layout in (Layout(Mesh(tp=2, outer=2), True), Layout(Mesh(outer=2), optimizer="muon")):
        for errors in on_mesh(layout.mesh, lambda mesh, layout=layout: prove_layout(layout, mesh)):
            assert errors.worst <= 32.0, errors


def test_types_know_the_outer_axis_and_that_a_replica_computes_alone(monkeypatch) -> None:
    layout = Layout(Mesh(dp=2, outer=3))
    typecheck(layout.model, layout.mesh)
    embed = GPT.embed

    def shared(self: GPT, *given: Any) -> Any:
        return reduce_from(embed(self, *given), self.mesh.group("outer"))

    monkeypatch.setattr(GPT, "embed", shared)
    with pytest.raises(TypeError, match="stage 0"):
        typecheck(layout.model, layout.mesh)
