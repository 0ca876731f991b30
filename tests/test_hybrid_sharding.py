"""Hybrid sharding: ZeRO shards over dp_shard neighbors, and replicates across the groups.

The whole engine is compared with the plain GPT in float64; checkpoints move between placements; the
bytes of each kind of group are counted. `test_zero.py` compares the optimizer with a textbook.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from close import relative_error
from plants import Plant, planted
from ranks import run_ranks
from threads import on_mesh, run_threads
from torch import Tensor

from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel.collectives import Pending
from warpweave.parallel.data import parameters, reduce
from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.prove.layouts import Layout, draw
from warpweave.prove.proof import prove_layout
from warpweave.train.options import TrainConfig
from warpweave.train.trainer import Trainer

ENOUGH = 32.0  # in units of the rounding error in float64; see `prove`


# -------------------------------------------------------------------------- equal to one device


def _proven(rank: int, layouts: list[Layout]) -> None:
    for layout in layouts:
        errors = prove_layout(layout, layout.mesh.connect(), 60.0)
        assert errors.worst <= ENOUGH, (layout, errors)


def _drawn(mesh: Mesh, stage: int) -> Layout:
    """Draw a model of two layers on `mesh`, with sizes not divisible by any axis."""
    at = next(s for s in range(9999) if (lay := draw(s)).mesh == dataclasses.replace(
        mesh, dp_shard=lay.mesh.dp_shard))  # fmt: skip
    sizes, each = draw(at).sizes, draw(at).micro_batch_size
    sizes = dataclasses.replace(sizes, layers=2, samples=2 * mesh.dp * each)
    return dataclasses.replace(draw(at), mesh=mesh, zero=stage, count=2, drawn=sizes)


HYBRID = {
    4: [
        Layout(Mesh(dp=4, dp_shard=2), zero=3, style="llama", recompute="full"),
        Layout(Mesh(dp=2, cp=2, dp_shard=1), zero=2, tied=False, packed=True),
        _drawn(Mesh(dp=4, dp_shard=2), 2),
    ],
    6: [_drawn(Mesh(dp=6, dp_shard=3), 1), _drawn(Mesh(dp=6, dp_shard=2), 3)],
    8: [
        Layout(Mesh(dp=4, pp=2, dp_shard=2), zero=2),  # the embedding is tied over the stages
        Layout(Mesh(dp=4, pp=2, dp_shard=2), zero=3, schedule="interleaved"),
        Layout(Mesh(dp=4, tp=2, dp_shard=2), True, 1, style="llama", count=1),
        Layout(Mesh(dp=4, cp=2, dp_shard=2), zero=3),
    ],
}


@pytest.mark.parametrize("world", HYBRID)
def test_replicated_shards_train_as_one_device_does(world):
    run_threads(world, _proven, HYBRID[world])


def test_a_run_says_over_how_many_ranks_its_shards_lie():
    for given, said in (({}, "dp=4 tp=1"), ({"dp_shard": 2}, "dp=4 dp_shard=2 tp=1")):
        config = TrainConfig(model="toy", dp=4, **given)
        trainer = SimpleNamespace(config=config, model=config.base, step=0, tokens_per_step=1,
                                  session=SimpleNamespace(where="cpu"))  # fmt: skip
        assert said in Trainer.describe(trainer)


# -------------------------------------------------------------------------- checkpoints

CONFIG = GPTConfig(vocab_size=37, seq_len=7, layers=2, width=12, heads=3, dropout=0.0)
KINDS = ("param", "exp_avg", "exp_avg_sq")


def _batch(mesh: ConnectedMesh, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this data replica's part of eight samples in micro-batches of one."""
    mine = torch.arange(8).chunk(mesh.size("dp"))[mesh.index("dp")]
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, 37, (2, 8, 7), generator=generator)[:, mine, None]
    return tokens, labels, mine[:, None]


def _engine(mesh: ConnectedMesh, stage: int) -> Engine:
    plan = ParallelPlan(zero=stage, microbatches=8 // mesh.size("dp"))
    return Engine(CONFIG, mesh, plan, dtype=torch.float64, rule=AdamW(eps=1e-4))


def _steps(mesh: ConnectedMesh, stage: int, first: int, state: dict | None) -> tuple[dict, list]:
    """Run two steps from `state`. Return (the state as in a checkpoint,
    the writer of each tensor)."""
    engine = _engine(mesh, stage)
    if state is not None:
        for kind in KINDS:
            engine.load(kind, lambda record, kind=kind: state[kind, record.name])
        engine.optimizer.load_state({"count": float(first)})
    for step in (first, first + 1):
        engine.step(*_batch(mesh, step), lr=0.01)
    found = {(k, r.name): (t.clone(), mine) for k in KINDS for r, t, mine in engine.read(k)}
    return {at: t for at, (t, _) in found.items()}, [at for at, (_, mine) in found.items() if mine]


def test_a_checkpoint_moves_from_one_placement_to_another():
    """dp_shard is 2, then 4, then there is one device. Every tensor is
    written by exactly one rank."""
    (one, _), *_ = on_mesh(Mesh(), _steps, 0, 0, None)
    (one, _), *_ = on_mesh(Mesh(), _steps, 0, 2, one)
    (one, _), *_ = on_mesh(Mesh(), _steps, 0, 4, one)
    state = None
    moves = ((Mesh(dp=8, dp_shard=2), 3), (Mesh(dp=8, dp_shard=4), 1), (Mesh(), 0))
    for first, (mesh, stage) in zip((0, 2, 4), moves, strict=True):
        found = on_mesh(mesh, _steps, stage, first, state)
        state = found[0][0]
        for other, _ in found[1:]:
            assert all(torch.equal(other[at], state[at]) for at in state), mesh
        written = [at for _, mine in found for at in mine]
        assert sorted(written) == sorted(state), mesh
    for at, tensor in one.items():
        assert relative_error(state[at], tensor) < 1e-10, at


# -------------------------------------------------------------------------- on the wire


@contextmanager
def _wire(mesh: ConnectedMesh) -> Iterator[tuple[Counter, list]]:
    """Record (name, axis) of every collective: the bytes of the whole buffers, and the order."""
    moved, order = Counter(), []
    axes = {id(mesh.group(axis)): axis for axis in ("world", "shard", "replica")}

    def recorded(right, name: str, whole: int):
        def run(*args, group=None, **options):
            order.append((name, axes[id(group)]))
            moved[order[-1]] += args[whole].nbytes
            return right(*args, group=group, **options)

        return run

    places = (parameters, "all_gather_into", 0), (dist, "all_reduce", 0)
    places = *places, (reduce, "reduce_scatter_into", 1)
    with planted(*(Plant(p, n, partial(recorded, name=n, whole=w)) for p, n, w in places)):
        yield moved, order


def _moved(rank: int) -> None:
    mesh = Mesh(dp=4, dp_shard=2).connect()
    for stage in (1, 2, 3):
        engine = _engine(mesh, stage)
        size = sum(unit.gradients.flat.nbytes for unit in engine.units)
        assert size == 2 * sum(unit.gradients.reduced.nbytes for unit in engine.units)
        engine._count_valid = lambda labels: Pending(None, lambda: torch.tensor(56.0))  # over dp
        with _wire(mesh) as (moved, order):
            engine.step(*_batch(mesh, 0), lr=0.01)
        scatter, replicas = ("reduce_scatter_into", "shard"), ("all_reduce", "replica")
        if stage > 1:  # while earlier segments are still in their backward
            last = len(order) - 1 - order[::-1].index(scatter)
            assert order.index(replicas) < last
        assert engine.plan.microbatches == 2
        assert moved.pop(scatter) == (size if stage == 1 else 2 * size), stage
        assert moved.pop(replicas) == size // 2, stage  # one shard per step
        # ZeRO 3 gathers a unit for each pass; the head's stays from its forward to its backward,
        # the embedding's is read at both ends.
        of = {unit.name: unit.gradients.flat.nbytes for unit in engine.units}
        gathered = size if stage < 3 else 2 * (2 * size + of["embedding"] - of["head"])
        assert moved.pop(("all_gather_into", "shard")) == gathered, stage
        assert moved.pop(("all_reduce", "world")) <= 24, stage  # the norm and the loss
        assert not moved, (stage, moved)


def test_only_a_shard_a_step_crosses_the_replicas():
    run_ranks(4, _moved)
