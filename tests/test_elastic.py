"""Elastic data parallelism: whoever leaves and joins, the run is that of one device on the samples
of those that were there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from close import relative_error
from threads import run_threads

from warpweave.checkpoint import open_latest
from warpweave.config import ParallelPlan
from warpweave.elastic.membership import Generation, Regroup
from warpweave.elastic.seat import Seat, replica_width
from warpweave.elastic.trainer import Carried, ElasticTrainer
from warpweave.interrupt import Interrupt
from warpweave.launch import Session
from warpweave.lr_schedule import learning_rate
from warpweave.plain_gpt import PlainConfig, plain_adamw_step, plain_gpt_loss, plain_init
from warpweave.train_config import GPTOverrides, TrainConfig


def _config(folder: Path, **changes) -> TrainConfig:
    """A small model in float64; its data is `folder`/text, of files of other lengths."""
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for i in range(60):
        (text / f"{i}.txt").write_bytes(b" ".join(b"%d" % (j * j % 977) for j in range(i, i + 12)))
    plan = {name: changes.pop(name) for name in ("zero", "schedule") if name in changes}
    return dataclasses.replace(
        TrainConfig(
            model="toy",
            overrides=GPTOverrides(layers=2, width=16, heads=2, seq_len=16, dropout=0.1),
            plan=ParallelPlan(**{"microbatches": 2, "zero": 0} | plan), dtype="fp64", clip=0.4,
            weight_decay=0.3, data=text, batch=2, steps=6, warmup=2, lr=0.02, eval_every=0,
            eval_batches=1, sample=0, out=folder / "run", timeout=30.0, seed=5, elastic=1,
        ),
        **changes,
    )  # fmt: skip


def _plain_run(
    config: TrainConfig, replicas: list[list[int]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one device on the samples of the `replicas` that made each step."""
    data = config.open_data("train")
    model = config.model_config(data.vocab_size)
    plain = PlainConfig(
        model.vocab_size, model.seq_len, model.layers, model.width, model.heads,
        model.num_kv_heads, model.num_hidden, model.positions, model.norm, model.activation,
        model.bias, model.tied, model.norm_eps, model.rope_theta, model.dropout,
    )  # fmt: skip
    params, losses = plain_init(plain, config.seed, torch.float64), []
    moments: dict[str, dict[str, torch.Tensor]] = {}
    width = replica_width(config)
    each = width * config.plan.microbatches * config.batch
    for step, there in enumerate(replicas):
        tokens, labels = data.batch(step, range(each * config.mesh.dp // width))
        for replica in {*range(config.mesh.dp // width)} - {*there}:
            labels[replica * each : (replica + 1) * each] = -100
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        key = config.dropout_key(step)
        total, valid = plain_gpt_loss(leaves, tokens, labels, plain, seed=key)
        losses.append((total / valid).item())
        got = torch.autograd.grad(total / valid, list(leaves.values()))
        plain_adamw_step(
            params, dict(zip(leaves, got, strict=True)), moments, step + 1,
            lr=learning_rate(config, step), weight_decay=config.weight_decay, clip=config.clip,
            beta1=config.betas[0], beta2=config.betas[1], eps=config.eps,
        )  # fmt: skip
    return losses, params


def _rows(config: TrainConfig) -> list[dict]:
    rows = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def _is_the_plain_run(config: TrainConfig) -> None:
    """The rows of metrics say who made each step; losses and weights are then one device's."""
    rows = _rows(config)
    assert [row["step"] for row in rows] == [*range(1, config.steps + 1)]
    losses, params = _plain_run(config, [row["replicas"] for row in rows])
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-11)
    reader = open_latest(config.out / "checkpoints")
    assert reader.step == config.steps
    for name, tensor in params.items():
        assert relative_error(reader.tensor(name), tensor) < 1e-11, name


# -------------------------------------------------------------------------- ranks as threads


class _Script:
    """A `Member` whose votes are written down: generation -> {step: decision}."""

    def __init__(self, seat: Seat, generation: Generation, decisions: dict[str, str]) -> None:
        self.seat, self.current, self._decisions = seat, generation, decisions
        self.updating = torch.autograd.profiler.record_function("")  # any context

    def vote(self, step: str, world: int) -> str:
        return self._decisions.get(step, "go")


def _generation(rank: int, config: TrainConfig, generation: Generation, decisions, carried):
    """One generation of the rank: what it carries into the next."""
    width = replica_width(config)
    whole = [Seat(config.mesh, width, r) for r in range(config.mesh.world)]
    (seat,) = (
        s
        for s in whole
        if s.replica in generation.members and s.among(generation.replicas)[1] == rank
    )
    mesh, _ = seat.among(generation.replicas)
    session = Session(torch.device("cpu"), rank, mesh.world, None, 30.0, mesh)
    member = _Script(seat, generation, decisions)
    mine = carried.get(seat.rank, Carried())
    trainer = ElasticTrainer(config, session, Interrupt(), member, mine)
    with contextlib.suppress(Regroup):
        trainer.run()
    return seat.rank, trainer.carry()


# Who is there, and how it ends: "abort" at a step, or a last step after which replicas join.
STORY = [([0, 1, 2], {"2": "abort"}), ([0, 2], {"3": "regroup"}), ([0, 1, 2], {})]
TWO = [([0, 1], {"1": "abort"}), ([1], {"3": "regroup"}), ([0, 1], {})]
RUNS = (
    ({"dp": 3}, STORY),
    ({"dp": 3, "zero": 1, "dp_shard": 1}, [([0, 1, 2], {"1": "abort"}), ([2], {})]),
    ({"dp": 2, "tp": 2}, TWO),
    ({"dp": 2, "pp": 2}, TWO),
    ({"dp": 4, "dp_shard": 2, "zero": 3}, TWO),
    ({"dp": 4, "dp_shard": 2, "zero": 2}, TWO),
    ({"dp": 2, "cp": 2, "dp_shard": 1, "zero": 1}, TWO),
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": ParallelPlan(zero=1)}, "ZeRO 1 shards it over all dp = 3: give --zero 0 or --dp"),
        ({"elastic": 3}, "elastic = 3 must be at least 1 and less than the replicas, which are 3"),
        ({"dp": 4, "dp_shard": 2, "elastic": 2}, "the replicas, which are 2"),
        ({"elastic": -1}, "elastic = -1 must be at least 1"),
        ({"outer_every": 4}, "outer_every = 4 does not go with --elastic"),
        ({"plan": ParallelPlan(zero=0, schedule="pipedream")}, "schedule = pipedream does not go"),
        ({"plan": ParallelPlan(zero=0, reduce="ordered")}, "reduce = ordered does not go"),
        ({"plan": ParallelPlan(zero=0, overlap="fused")}, "overlap = fused does not go"),
        ({"optimizer": "muon"}, "optimizer = muon, whose update exchanges matrices, does not go"),
        ({"max_restarts": 1}, "max_restarts = 1 does not go with --elastic"),
        ({"timeline": Path("last.svg")}, "timeline = last.svg does not go with --elastic"),
    ],
)
def test_what_cannot_be_elastic_is_refused(changes, words):
    config = dataclasses.replace(TrainConfig(dp=3, elastic=1, plan=ParallelPlan(zero=0)), **changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        replica_width(config)


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize(("changes", "story"), RUNS)
def test_a_run_is_that_of_one_device_on_the_samples_of_those_that_were_there(
    tmp_path, changes, story
):
    config = _config(tmp_path, **changes)
    carried: dict[int, Carried] = {}
    for number, (replicas, decisions) in enumerate(story, 1):
        generation = Generation(number, 0, dict.fromkeys(replicas, 0))
        world = Seat(config.mesh, replica_width(config), 0).mesh.world
        world = world * len(replicas) * replica_width(config) // config.mesh.dp
        carried = dict(run_threads(world, _generation, config, generation, decisions, carried))
    _is_the_plain_run(config)
    assert len({tuple(row["replicas"]) for row in _rows(config)}) == len(
        {tuple(replicas) for replicas, _ in story}
    )
