"""What a run compares between its ranks, and where a number that is not finite comes from: whoever
differs is named, on every rank alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretend_nccl import run_nccl
from test_train import _config
from thread_store import Store
from threads import run_threads

from warpweave.launch import Session
from warpweave.parallel.checked import CollectiveMismatch
from warpweave.train import Trainer, TrainingStopped
from warpweave.train_config import TrainConfig


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


def _rows(rank: int, config: TrainConfig, store: Any) -> tuple[Any, int]:
    trainer = _trainer(rank, config, store)
    result = trainer.run()
    return result["val_loss"], 0 if store is None else len(store.values)


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_whose_collectives_are_all_compared_is_the_same_run(tmp_path, layout):
    """Waiting for the others at each of them is no deadlock in any layout."""
    options = {"steps": 2, "eval_every": 1, **LAYOUTS[layout]}
    config = _small(tmp_path, **options)
    every = _small(tmp_path, **options, check_collectives=True, out=tmp_path / "every")
    (plain, _), *_ = run_threads(config.mesh.world, _rows, config, None)
    (checked, keys), *_ = run_threads(config.mesh.world, _rows, every, Store())
    assert checked == plain
    assert keys > 0


@pytest.mark.usefixtures("saved_at_once")
def test_comparing_collectives_is_no_deadlock_in_nccls_order(tmp_path):
    layout = LAYOUTS["interleaved"] | {"layers": 4, "steps": 1, "eval_every": 0, "tp": 1, "dp": 2}
    run_nccl(4, _rows, _small(tmp_path, **layout), Store(), drains="never")


def _strays(rank: int, config: TrainConfig, store: Any, at: int) -> tuple[str, int]:
    """Rank 1 gives a collective of step `at` one element more; what it is told, after how many."""
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
def test_ranks_that_differ_are_told_in_the_first_steps_and_in_those_that_are_compared(
    tmp_path, at, more
):
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
    """A weight, a module's output or its gradient is no number, in every step from now on."""
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
     "rank 1 (tp=1) in what it gives to reduce_scatter in blocks.1.mlp.down"),
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


def test_infinity_is_named_as_nan_is(tmp_path):
    config = _small(tmp_path, steps=1, eval_every=0, tp=2)
    found = run_threads(2, _stopped, config, (1,), "gradient blocks.0.mlp", math.inf)
    assert found == ["rank 1 (tp=1) in the gradient of blocks.0.mlp"] * 2


@pytest.mark.usefixtures("saved_at_once")
def test_where_steps_cannot_be_run_again_the_tensor_group_is_named(tmp_path):
    layout = LAYOUTS["asynchronous"] | {"microbatches": 2}
    config = _small(tmp_path, steps=1, eval_every=0, **layout)
    found = run_threads(4, _stopped, config, (3,), "output blocks.1.attention_norm")
    assert found == ["ranks 2, 3, within this tensor group"] * 4
