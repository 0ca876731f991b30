"""What a run compares between its ranks: whoever differs is named, on every rank alike."""

from __future__ import annotations

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
from warpweave.train import Trainer
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
