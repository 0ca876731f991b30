"""Comparisons between the ranks of a run, and the origin of numbers that are not finite: every rank
names the rank that differs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pretend_nccl import run_nccl
from ranks import run_ranks
from test_train import _config
from thread_store import Store
from threads import run_threads

from warpweave.launch.session import Session
from warpweave.parallel.checked import CollectiveMismatch
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.schedule import Action
from warpweave.train.checks import Agreement, TrainingStopped
from warpweave.train.options import METRICS, TrainConfig
from warpweave.train.replicas import checksum
from warpweave.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("undrawn")


def _trainer(rank: int, config: TrainConfig, store: Any) -> Trainer:
    session = Session(torch.device("cpu"), rank, config.mesh.world, store, 60.0, config.mesh)
    return Trainer(config, session)


def _small(folder: Path, **changes: Any) -> TrainConfig:
    return _config(folder, save_every=0, dropout=0.0, **changes)


# ---------------------------------------------------------------- collectives

LAYOUTS = {
    "tp, dp, ZeRO 1": {"dp": 2, "tp": 2, "zero": 1},
    "tp, cp, ZeRO 3": {"cp": 2, "tp": 2, "zero": 3, "recompute": "full"},
    "hybrid cp, shards": {"cp": 4, "ulysses": 2, "dp": 2, "dp_shard": 1, "zero": 2, "heads": 4},
    "interleaved": {"pp": 2, "tp": 2, "layers": 4, "schedule": "interleaved", "chunks": 2},
    "zero bubble": {"pp": 3, "layers": 6, "schedule": "zb-v", "microbatches": 6, "chunks": 2},
    "asynchronous": {"pp": 2, "tp": 2, "schedule": "pipedream", "tied": False, "clip": 0.0},
    "replicas": {"outer": 2, "dp": 2, "outer_every": 2, "zero": 3},
    "ordered": {"dp": 2, "pp": 2, "reduce": "ordered", "optimizer": "muon"},
}  # fmt: skip


def _loss(rank: int, config: TrainConfig, store: Any) -> float:
    return _trainer(rank, config, store).run()["val_loss"]


def _rows(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.out / METRICS).read_text().splitlines()]


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_whose_steps_are_all_compared_is_the_same_run(tmp_path, layout):
    """Waiting for the others at each collective deadlocks in no layout, and replicas are equal bit
    for bit."""
    options = {"steps": 2, "eval_every": 2, **LAYOUTS[layout]}
    config = _small(tmp_path, **options)
    every = _small(tmp_path, **options, check_every=1, out=tmp_path / "every")
    plain, *_ = run_threads(config.mesh.world, _loss, config, None)
    compared, *_ = run_threads(config.mesh.world, _loss, every, Store())
    assert compared == plain
    assert [row["step"] for row in _rows(every) if "slowest_rank" in row] == [1, 2]


@pytest.mark.usefixtures("saved_at_once")
def test_comparing_collectives_is_no_deadlock_in_nccls_order(tmp_path):
    layout = LAYOUTS["interleaved"] | {"layers": 4, "steps": 1, "eval_every": 0, "tp": 1, "dp": 2}
    run_nccl(4, _loss, _small(tmp_path, **layout), Store(), drains="never")


def _strays(rank: int, config: TrainConfig, store: Any, at: int) -> tuple[str, int]:
    """Give a collective of step `at` one element more on rank 1. Return the
    error and the number of steps."""
    trainer = _trainer(rank, config, store)
    group = trainer.mesh.group("world")

    def stray(*_: Any) -> None:
        dist.all_reduce(torch.ones(3 + (rank == 1 and trainer.step == at)), group=group)

    trainer.engine.gpt.blocks["0"].register_forward_hook(stray)
    with pytest.raises(CollectiveMismatch) as caught:
        trainer.run()
    return str(caught.value), trainer.step


@pytest.mark.parametrize(
    ("at", "more"), [(1, {}), (5, {"check_every": 6}), (3, {"check_collectives": True})]
)
def test_mismatched_collectives_raise_in_the_first_and_in_compared_steps(tmp_path, at, more):
    config = _small(tmp_path, dp=2, steps=7, eval_every=0, microbatches=1, **more)
    found = run_threads(2, _strays, config, Store(), at)
    words = "rank 0 (dp=0) calls all_reduce of float32[3], rank 1 (dp=1) calls all_reduce of "
    assert found == [(f"{words}float32[4]", at)] * 2


def test_between_compared_steps_nothing_is_compared(tmp_path):
    config = _small(tmp_path, dp=2, steps=4, eval_every=0, microbatches=1, check_every=0)
    with pytest.raises(AssertionError, match="the ranks of a group begin different collectives"):
        run_threads(2, _strays, config, Store(), 2)


# ---------------------------------------------------------------- not finite


def _poison(trainer: Trainer, where: str, value: float) -> None:
    """Make a weight, a module's output or its gradient NaN in every step from now on."""
    kind, _, name = where.partition(" ")
    if kind == "weight":
        trainer.engine.gpt.get_parameter(name).data.view(-1)[0] = value
        return

    def spoil(_module: Any, _inputs: Any, out: Any) -> Any:
        first, *others = out if isinstance(out, tuple) else (out,)
        if kind == "output":
            first = first * value
        elif first.requires_grad:
            first.register_hook(lambda dy: dy * value)
        return (first, *others) if others else first

    trainer.engine.gpt.get_submodule(name).register_forward_hook(spoil)


def _stopped(
    rank: int, config: TrainConfig, ranks: tuple[int, ...], where: str, value: float = math.nan
) -> str:
    trainer = _trainer(rank, config, None)
    if rank in ranks:
        _poison(trainer, where, value)
    with pytest.raises(TrainingStopped) as caught:
        trainer.run()
    return str(caught.value).partition("first seen on ")[2].partition(";")[0]


TP, DP_TP = {"tp": 2}, {"dp": 2, "tp": 2}
POISONED = [
    (TP, (1,), "weight blocks.1.mlp.down.weight",
     "rank 1 (tp=1) in the input of reduce_scatter in blocks.1.mlp.down"),
    (TP | {"sequence_parallel": False}, (1,), "weight blocks.0.attention.qkv.weight",
     "rank 1 (tp=1) in blocks.0.attention.qkv"),
    (TP, (1,), "output blocks.1.attention_norm", "rank 1 (tp=1) in blocks.1.attention_norm"),
    (TP, (0, 1), "output blocks.1.mlp", "ranks 0, 1 in blocks.1.mlp"),
    (DP_TP | {"zero": 3}, (3,), "gradient blocks.0.mlp",
     "rank 3 (dp=1, tp=1) in the gradient of blocks.0.mlp"),
    ({"pp": 2, "tp": 2}, (1,), "output blocks.0.attention_norm",
     "rank 1 (pp=0, tp=1) in blocks.0.attention_norm"),
    ({"pp": 2, "tp": 2}, (3,), "gradient blocks.1.mlp_norm",
     "rank 3 (pp=1, tp=1) in the gradient of blocks.1.mlp_norm"),
    ({"cp": 2, "cp_strategy": "ring"}, (1,), "output blocks.1.attention.qkv",
     "rank 1 (cp=1) in blocks.1.attention.qkv"),
    ({}, (0,), "output final_norm", "rank 0 in final_norm"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "ranks", "where", "words"), POISONED)
def test_the_rank_and_module_that_first_had_nan_are_named(tmp_path, layout, ranks, where, words):
    config = _small(tmp_path, steps=1, eval_every=0, **layout)
    found = run_threads(config.mesh.world, _stopped, config, ranks, where)
    assert found == [words] * config.mesh.world


def test_ranks_whose_own_modules_have_nan_are_named_module_by_module(tmp_path):
    config = _small(tmp_path, steps=1, eval_every=0, dp=4)
    where = {0: "output blocks.0.mlp", 2: "output final_norm", 3: "output blocks.0.mlp"}
    found = run_threads(4, lambda rank: _stopped(rank, config, (*where,), where.get(rank, "")))
    assert found == ["ranks 0, 3 in blocks.0.mlp, rank 2 (dp=2) in final_norm"] * 4


def test_infinity_is_named_as_nan_is(tmp_path):
    config = _small(tmp_path, steps=1, eval_every=0, tp=2)
    found = run_threads(2, _stopped, config, (1,), "gradient blocks.0.mlp", math.inf)
    assert found == ["rank 1 (tp=1) in the gradient of blocks.0.mlp"] * 2


@pytest.mark.usefixtures("saved_at_once")
def test_where_steps_cannot_be_run_again_the_tensor_group_is_named(tmp_path):
    layout = LAYOUTS["asynchronous"] | {"microbatches": 2}
    config = _small(tmp_path, steps=1, eval_every=0, **layout)
    found = run_threads(4, _stopped, config, (3,), "output blocks.1.attention_norm")
    assert found == ["ranks 2, 3, within this tensor-parallel group"] * 4


# ---------------------------------------------------------------- replicas


def _held(rank: int, config: TrainConfig, store: Any, spoil: Any) -> str:
    """Return the message after step 2, once `spoil` has changed what this rank holds."""
    trainer = _trainer(rank, config, store)
    begin = trainer.engine.begin

    def spoiled(*given: Any, **options: Any) -> Any:
        if trainer.step == 0:
            spoil(rank, trainer)
        return begin(*given, **options)

    trainer.engine.begin = spoiled
    with pytest.raises(TrainingStopped) as caught:
        trainer.run()
    assert trainer.step == 2
    return str(caught.value).partition(" after step 2")[0]


def _flip(x: torch.Tensor) -> None:
    """Flip a low bit of the first number. The rounding of two updates may undo the lowest one."""
    x.view(-1)[:1].view(torch.int32).bitwise_xor_(64)


def _flip_weight(name: str, ranks: tuple[int, ...]) -> Any:
    def spoil(rank: int, trainer: Trainer) -> None:
        parameter = trainer.engine.gpt.get_parameter(name) if rank in ranks else None
        if parameter is not None:
            _flip(parameter.data)

    return spoil


def _flip_moment(rank: int, trainer: Trainer) -> None:
    if rank == 2:
        unit = next(unit for unit in trainer.engine.units if unit.name == "block 0")
        unit.state.moments["exp_avg"][0] += 1.0


def _other_tokens(rank: int, trainer: Trainer) -> None:
    tokens, *rest = trainer.batches.step(rank)
    trainer.batches.step = lambda step: (tokens, *rest)


def _other_count(rank: int, trainer: Trainer) -> None:
    trainer.engine.optimizer.count += rank == 0


NORM = "blocks.1.mlp_norm.weight"
SPOILT = [
    ({"tp": 2, "zero": 0}, _flip_weight(NORM, (1,)),
     f"rank 0 (tp=0) and rank 1 (tp=1) differ in {NORM}"),
    ({"dp": 2, "tp": 2, "zero": 0}, _flip_weight(NORM, (3,)),
     f"rank 3 (dp=1, tp=1) differs from ranks 0, 1, 2 in {NORM}"),
    ({"dp": 3, "zero": 0}, _flip_weight("blocks.0.mlp.up.weight", (1,)),
     "rank 1 (dp=1) differs from ranks 0, 2 in blocks.0.mlp.up.weight"),
    ({"dp": 4, "dp_shard": 2, "zero": 3}, _flip_moment,
     "rank 0 (dp=0) and rank 2 (dp=2) differ in blocks.0."),
    ({"pp": 2, "zero": 0}, _flip_weight("embedding.weight", (1,)),
     "rank 0 (pp=0) and rank 1 (pp=1) differ in embedding.weight"),
    ({"tp": 2}, _other_tokens, "rank 0 (tp=0) and rank 1 (tp=1) differ in tokens"),
    ({"dp": 3}, _other_count,
     "rank 0 (dp=0) differs from ranks 1, 2 in the optimizer's step count"),
]  # fmt: skip


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize(("layout", "spoil", "words"), SPOILT)
def test_a_replica_that_differs_is_named(tmp_path, layout, spoil, words):
    config = _small(tmp_path, steps=3, eval_every=0, check_every=2, microbatches=2, **layout)
    found = run_threads(config.mesh.world, _held, config, Store(), spoil)
    assert len({*found}) == 1
    first, second = words.split(" differ", 1)
    assert found[0].startswith(first)
    assert second.partition(" from ")[0].removeprefix("s") in found[0]
    assert found[0].endswith(words.partition(" from ")[2])


def test_every_flipped_bit_changes_a_checksum():
    for dtype, words in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        x = torch.randn(7).to(dtype)
        for at, bit in itertools.product(range(7), range(8 * x.element_size())):
            y = x.clone()
            y[at : at + 1].view(words).bitwise_xor_(-(2**15) if bit == 15 and words == torch.int16
                                            else torch.tensor(2**bit).to(words))  # fmt: skip
            assert checksum(y) != checksum(x)
            assert torch.equal(checksum(y), checksum(y.clone()))


# ---------------------------------------------------------------- stragglers


def _slow(rank: int, folder: str, config: TrainConfig, slow: int) -> None:
    trainer = _trainer(rank, config, dist.FileStore(f"{folder}/store", config.mesh.world))
    if rank == slow:
        trainer.engine.gpt.blocks["1"].register_forward_hook(lambda *_: time.sleep(0.1))
    trainer.run()


def test_a_slow_rank_stands_in_the_metrics(tmp_path):
    """One rank is 200 ms slower per step, in two micro-batches, for which the other stage waits.
    `tests/faults/test_disagreements.py` slows a tensor rank."""
    config, slow = _small(tmp_path, steps=4, eval_every=0, check_every=2, pp=2), 1
    run_ranks(2, _slow, str(tmp_path), config, slow)
    found = [row for row in _rows(config) if "slowest_rank" in row]
    assert [(row["step"], row["slowest_rank"]) for row in found] == [(2, slow), (4, slow)]
    for row in found:
        lead = 2 * (row["slowest_seconds"] - row["median_seconds"])  # of two ranks: half their sum
        assert lead > 0  # 0.2 on an idle machine
        assert row["slowest_seconds"] > 0.2  # it sleeps that long


# ---------------------------------------------------------------- comparisons, and their seconds


class _Checked:
    """Collectives that are compared, with their count and the total seconds waited."""

    def __init__(self) -> None:
        self.entered, self.waited = 0, 100.0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.waited += 2.0


def _agreement(**options: Any) -> tuple[Agreement, _Checked]:
    config = dataclasses.replace(TrainConfig(), **options)
    session = Session(torch.device("cpu"), 0, 1, None, 9.0, Mesh())
    engine = mock.Mock(mesh=mock.Mock(index=lambda axis: int(axis == "pp")))
    engine.device, engine.units = torch.device("cpu"), []
    rows = [[Action("F", 0, 0)], [Action(op, 1, 0) for op in ("RECV_F", "F", "SEND_F", "RECV_B",
                                                              "B", "TIE", "UPDATE")]]  # fmt: skip
    engine.passes.lists = rows
    found = Agreement(config, session, engine)
    assert not any(found.due(step) for step in range(9))  # a single rank has no peer
    with found.of_step(1, 0.0, {}, None), found.of_evaluation():
        pass
    found = Agreement(config, session, engine)
    found._checked = checked = _Checked()
    return found, checked


@pytest.mark.parametrize(
    ("options", "steps", "evaluations"),
    [
        ({"check_every": 0}, [1, 2], [1]),
        ({"check_every": 0, "check_collectives": True}, [1, 2, 3, 4, 5, 6, 7], [1, 2, 3]),
        ({"check_every": 3}, [1, 2, 3, 6], [1]),
        ({"check_every": 1}, [1, 2, 3, 4, 5, 6, 7], [1]),
    ],
)
def test_the_first_steps_and_those_that_are_due_are_compared(options, steps, evaluations) -> None:
    agreement, checked = _agreement(**options)
    marks = mock.Mock(seconds=list)
    for which, context in (
        (steps, lambda n: agreement.of_step(n, 0.0, {}, marks)),
        (evaluations, lambda n: agreement.of_evaluation()),
    ):
        compared = []
        for number in range(1, 8 if which is steps else 4):
            before = checked.entered
            with context(number):
                pass
            compared += [number] * (checked.entered - before)
        assert compared == which
    every = options["check_every"]
    due = [n for n in range(1, 8) if every and n % every == 0]
    assert [n for n in range(1, 8) if agreement.due(n)] == due


def test_a_ranks_own_seconds_are_those_without_any_wait_of_this_step() -> None:
    """The waits are its stage's receives, the tie, and those at collectives, of this step only."""
    agreement, _ = _agreement(check_every=1)
    times = [0.0, 0.5, 1.5, 1.75, 2.0, 3.0, 7.0, 8.0]  # receives take 0.5 and 0.25, the tie 4
    marks = mock.Mock(seconds=lambda: times)
    clock = mock.Mock(perf_counter=lambda: 1020.0)
    with mock.patch("warpweave.train.checks.time", clock):
        for step in (1, 2, 3):
            with agreement.of_step(step, 1000.0, {"tokens": step}, marks):
                pass
            assert agreement._own == 20.0 - 2.0 - 0.5 - 0.25 - 4.0
            assert agreement._data == {"tokens": step}


def test_slowest_rank_is_reported_and_differing_replicas_stop_the_run() -> None:
    agreement, _ = _agreement(check_every=2)
    agreement._own, agreement._data = 1.5, {"x": 1}
    agreement._replicas = mock.Mock()
    compare = agreement._replicas.compare
    for seconds, found in (
        ([0.5, 0.12345678, 9.87654321, 1.0], (2, 9.8765, 0.75)),
        ([3.0, 1.0, 3.0], (0, 3.0, 3.0)),
        ([0.1, 0.2, 0.2, 0.2, 7.00006], (4, 7.0001, 0.2)),
    ):
        compare.return_value = None, seconds
        assert agreement.after_step(4) == dict(
            zip(("slowest_rank", "slowest_seconds", "median_seconds"), found, strict=True)
        )
        compare.assert_called_with({"x": 1}, 1.5)
    compare.return_value = "rank 3 differs in x", [0.0]
    assert agreement.after_step(5) == {}
    with pytest.raises(TrainingStopped, match=r"^rank 3 differs in x after step 6: "):
        agreement.after_step(6)


def test_the_row_of_a_step_is_kept_before_other_ranks_are_heard_again(tmp_path, monkeypatch):
    """A dead rank is noticed in that exchange, when the step already counts."""
    trainer, made = _trainer(0, _small(tmp_path, steps=2), None), []
    monkeypatch.setattr(trainer, "_made", lambda row, _: made.append((row["step"], trainer.step)))
    monkeypatch.setattr(trainer.agreement, "after_step", mock.Mock(side_effect=ConnectionError))
    with pytest.raises(ConnectionError):
        trainer.run()
    assert made == [(1, 1)]
