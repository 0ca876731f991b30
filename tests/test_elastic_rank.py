"""A rank of an elastic run: errors that mean a lost peer, reports to the keeper, the end of the
process, and state carried into the next generation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from warpweave.checkpoint import CheckpointError
from warpweave.model.config import ParallelPlan
from warpweave.parallel.checked import CollectiveMismatch
from warpweave.parallel.mesh import Mesh
from warpweave.train.elastic import rank as module
from warpweave.train.elastic import trainer
from warpweave.train.elastic.membership import Generation, Regroup
from warpweave.train.elastic.seat import Seat
from warpweave.train.elastic.trainer import Carried, ElasticTrainer, StateLostError
from warpweave.train.options import TrainConfig
from warpweave.train.resume import Progress

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
GRACE = 15.0  # seconds in which the keeper finds the rank that hangs


class LeftError(Exception):
    """Raised in place of ending the process."""


def _rank(**member: Any) -> module._Rank:
    config = TrainConfig(dp=3, elastic=1, plan=ParallelPlan(zero=0))
    return module._Rank(config, mock.Mock(number=None), mock.Mock(**member), mock.Mock())


@pytest.mark.parametrize(
    ("error", "waits", "by_all"),
    [
        (LOST, GRACE, False), (dist.DistNetworkError("x"), GRACE, False),
        (CollectiveMismatch("x"), GRACE, True), (CheckpointError("x"), 1.0, True),
        (StateLostError("x"), None, True), (ValueError("x"), None, False),
        (RuntimeError("x"), None, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_an_error_is_the_ranks_own_unless_a_replica_is_lost(error, waits, by_all):
    """The keeper learns of a failed connection, and that the run is over (`give_up`) by an error
    that all ranks raise."""

    def fails() -> None:
        raise error

    for lost in (True, False):
        before = lost and waits is None  # otherwise the rank learns of it while it waits
        rank = _rank(lost=before, wait_for_loss=mock.Mock(return_value=lost))
        with contextlib.nullcontext() if lost else pytest.raises(type(error)):
            assert rank.survive(fails) is None
        closes = waits == GRACE
        assert rank.connections.close.call_count == closes
        assert rank.member.complain.call_count == closes
        expected = [] if waits is None else [mock.call(waits)]
        assert rank.member.wait_for_loss.call_args_list == expected
        assert rank.member.give_up.call_count == (not lost and by_all)


def test_a_result_is_returned_and_the_end_of_a_generation_is_no_error():
    rank = _rank()
    assert rank.survive(lambda: 7) == 7

    def regroups() -> None:
        raise Regroup

    assert rank.survive(regroups) is None
    for name in ("complain", "give_up", "wait_for_loss"):
        assert getattr(rank.member, name).call_count == 0
    with pytest.raises(KeyboardInterrupt):
        rank.survive(mock.Mock(side_effect=KeyboardInterrupt))


@pytest.fixture
def outside(monkeypatch) -> SimpleNamespace:
    """Replace everything around a rank's training: `leave` raises `LeftError`, ranks agree unless
    `differ` is set, and `connect` and `trainer` (the class) record their calls."""
    leave = mock.Mock(side_effect=LeftError)
    found = SimpleNamespace(leave=leave, connect=mock.Mock(), trainer=mock.Mock(), differ=None)
    monkeypatch.setattr(module, "leave", found.leave)
    monkeypatch.setattr(module, "connect", found.connect)
    monkeypatch.setattr(module, "ElasticTrainer", found.trainer)
    monkeypatch.setattr(module, "disagreement", lambda *_: found.differ)
    monkeypatch.setattr(module, "reported", lambda *_, **__: contextlib.nullcontext())
    return found


def _train(rank: module._Rank, generation: Generation, carried: Carried) -> Carried:
    given = dist.HashStore(), torch.device("cpu"), {"name": "cpu"}
    return rank.train(generation, *given, carried)


@pytest.mark.parametrize(
    ("stopped", "asked", "number", "code"),
    [
        (False, False, None, 0),
        (False, False, 15, 0),  # the loss came after the last step
        (True, False, signal.SIGINT, 130),
        (True, False, None, 143),  # another rank was interrupted
        (True, True, signal.SIGTERM, 0),  # the keeper requested it, because too few are left
    ],
)
def test_a_rank_ends_with_the_code_of_the_signal_that_stopped_the_run(
    outside, stopped, asked, number, code
):
    outside.trainer.return_value.stopped = stopped
    rank = _rank(seat=Seat(Mesh(dp=3), 1, 2), vote=mock.Mock(return_value="go"))
    rank.interrupt.number = number
    with pytest.raises(LeftError):
        _train(rank, Generation(4, 0, {0: 0, 2: 1}, stop=asked), Carried())
    assert outside.leave.call_args_list == [mock.call(code)]


@pytest.mark.parametrize(("members", "connects"), [({0: 0, 2: 0}, True), ({2: 0}, False)])
def test_ranks_connect_unless_alone_and_incompatible_ranks_are_rejected(outside, members, connects):
    """Rank 2 of all is the second of two."""
    outside.trainer.side_effect = LeftError
    rank, generation = _rank(seat=Seat(Mesh(dp=3), 1, 2), lost=False), Generation(1, 0, members)
    with pytest.raises(LeftError):
        _train(rank, generation, Carried())
    assert [call.args[2:4] for call in outside.connect.call_args_list] == [(1, 2)] * connects
    outside.differ = "they differ"
    with pytest.raises(ValueError, match=r"^they differ$"):
        _train(rank, generation, Carried())
    assert outside.connect.call_count == connects


@pytest.mark.parametrize("built", [True, False])
def test_a_rank_carries_its_state_out_of_a_generation_that_ends(outside, monkeypatch, built):
    """This is the previous generation's state, if this one ends before the trainer is built."""
    if not built:
        outside.trainer.side_effect = Regroup
    rank = _rank(seat=Seat(Mesh(dp=3), 1, 2), lost=False)
    monkeypatch.setattr(rank, "_run", mock.Mock(side_effect=Regroup))
    carried = Carried(step=3)
    found = _train(rank, Generation(1, 0, {2: 0}), carried)
    assert found is (outside.trainer.return_value.carry.return_value if built else carried)


@pytest.mark.parametrize("change", ["", "replica 1 joins"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("decision", ["go", "abort"])
def test_a_rank_settles_trains_and_votes_on_the_end_and_rank_0_reports(
    capsys, change, first, decision
):
    rank = _rank(current=SimpleNamespace(change=change), vote=mock.Mock(return_value=decision))
    trained = mock.Mock(step=6, describe=lambda: "it trains", run=lambda: {"steps": 9})
    trained.session = SimpleNamespace(rank=0 if first else 1, world=3)
    order = mock.Mock()
    order.attach_mock(rank.connections.complete, "complete")
    order.attach_mock(rank.member.settle, "settle")
    with contextlib.nullcontext() if decision == "go" else pytest.raises(Regroup):
        assert rank._run(trained)
    assert [call[0] for call in order.mock_calls] == ["complete", "settle"]
    said = capsys.readouterr().err.strip()
    words = f"warpweave: step 6: {change}" if change else "warpweave: it trains"
    assert said == (words if first else "")
    assert rank.member.finish.call_args_list == [mock.call('{"steps": 9}')] * first
    assert rank.member.vote.call_args_list == [mock.call("end", 3)]


# ---------------------------------------------------------------- between two generations


def _trainer(step: int, **attributes: Any) -> ElasticTrainer:
    """Make a trainer with these attributes and no engine."""
    found = object.__new__(ElasticTrainer)
    options = attributes.pop("options", {})
    found.config = TrainConfig(dp=3, elastic=1, steps=10, plan=ParallelPlan(zero=0), **options)
    usual = {
        "stopped": False, "progress": Progress(tokens=5), "metrics": None, "saver": mock.Mock(),
        "engine": mock.Mock(), "_row": None, "_source": 0, "_written": -1, "_leaves": False,
    }  # fmt: skip
    for name, value in (usual | {"step": step} | attributes).items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize("path", [None, Path("x/step_00000012"), Path("x/step_123456789")])
@pytest.mark.parametrize("cut", [None, CheckpointError("cut"), RuntimeError("gone")])
def test_a_rank_carries_its_state_and_the_step_of_the_last_whole_checkpoint(monkeypatch, path, cut):
    monkeypatch.setattr(trainer, "held_state", lambda optimizer: ("held", optimizer))
    found = _trainer(7, _row=({"step": 7}, 0.5), _written=4, metrics=mock.Mock())
    found.saver.path, found.saver.wait.side_effect = path, cut
    found.engine.optimizer.state.return_value = {"count": 7.0}
    carried = found.carry()
    found.metrics.close.assert_called_once_with()
    found.saver.wait.assert_called_once_with()
    saved = 4 if path is None else int(str(path).rpartition("_")[2])
    assert (carried.step, carried.state) == (7, ("held", found.engine.optimizer))
    assert carried.about == {
        "optimizer": {"count": 7.0}, "progress": dataclasses.asdict(Progress(tokens=5)),
        "row": ({"step": 7}, 0.5), "saved": saved,
    }  # fmt: skip


def test_the_row_that_a_rank_carries_is_of_its_weights(monkeypatch):
    monkeypatch.setattr(trainer, "held_state", lambda optimizer: None)
    found = _trainer(7, _row=({"step": 6}, 0.5), member=mock.Mock())
    found.saver.path = None
    found.member.current.replicas = [0, 2]
    monkeypatch.setattr(trainer, "time", mock.Mock(perf_counter=lambda: 3.5))
    found._made({"step": 7}, 3.25)
    assert found.carry().about["row"] == ({"step": 7, "replicas": [0, 2]}, 0.25)


@pytest.mark.parametrize(
    ("step", "every", "stopped", "source", "written", "saves"),
    [
        (6, 3, False, 0, 3, True), (6, 3, False, 0, 6, False),  # the state is there
        (6, 3, False, None, 3, False),  # the first generation has no predecessor
        (6, 4, False, 0, 4, False), (6, 0, False, 0, -1, False), (6, 4, True, 1, 4, True),
        (6, 0, True, 1, -1, True), (6, 0, True, 1, 6, False),
        (0, 3, True, 0, -1, False),  # nothing was trained
        (10, 0, False, 0, 9, True), (10, 0, False, 0, 10, False),  # the last step
    ],
)  # fmt: skip
def test_a_checkpoint_that_the_last_generation_missed_is_saved_first(
    monkeypatch, step, every, stopped, source, written, saves
):
    given = {"stopped": stopped, "_source": source, "_written": written}
    found = _trainer(step, options={"save_every": every}, **given)
    done: list[str] = []
    found.save = lambda: done.append("save")
    monkeypatch.setattr(trainer.Trainer, "_steps", lambda self: done.append("steps"))
    found._steps()
    assert done == ["save"] * saves + ["steps"]


@pytest.mark.parametrize(
    ("rows", "writes"),
    [
        ([{"step": 5, "loss": 1.0}], True),
        ([{"step": 5, "loss": 1.0}, {"step": 6, "loss": 1.0}], False),
        ([{"step": 5, "loss": 1.0}, {"step": 6, "val_loss": 1.0}], True),
        ([{"step": 6, "loss": 1.0}, {"step": 6, "val_loss": 1.0}], False),
        ([], True),
        (None, False),
    ],
)
def test_the_last_row_is_written_unless_the_rank_that_died_had_written_it(tmp_path, rows, writes):
    metrics = mock.Mock(path=tmp_path / "metrics.jsonl")
    if rows is not None:
        metrics.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _trainer(6, _row=({"step": 6, "loss": 1.0}, 0.5))._write_lost_row(metrics)
    assert metrics.trained.call_args_list == [mock.call({"step": 6, "loss": 1.0}, 0.5)] * writes


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(
    ("held", "own", "alike"),
    [([6, 6, 6], 6, True), ([5, 6, 6], 5, False), ([None, 6, 5], None, False),
     ([5, 6, None], 6, False)],
)  # fmt: skip
def test_rank_recovers_the_newest_state_and_offers_its_own_only_if_current(
    monkeypatch, held, own, alike, zero
):
    recovers = mock.Mock()
    monkeypatch.setattr(trainer, "recover", recovers)
    about = {"optimizer": {"count": 4}, "progress": {"tokens": 70}, "row": "row", "saved": 3}
    state = None if own is None else "state"
    found = _trainer(
        0, _held=held, _carried=Carried(own, None, state), _source=1, _about=about,
        mesh=SimpleNamespace(group=lambda axis: axis),
    )  # fmt: skip
    found.config = SimpleNamespace(plan=SimpleNamespace(zero=zero))
    assert found._resume() is True
    given = found.engine.optimizer, state if own == 6 else None, "replica" if zero else "dp", 1
    assert recovers.call_args_list == [mock.call(*given, alike=alike)]
    found.engine.optimizer.load_state.assert_called_once_with({"count": 4})
    assert (found.step, found.progress) == (6, Progress(tokens=70))
    assert (found._row, found._written) == ("row", 3)
    monkeypatch.setattr(trainer.Trainer, "_resume", lambda self: "of a checkpoint")
    found._source = None
    assert found._resume() == "of a checkpoint"
    assert recovers.call_count == 1


@pytest.mark.parametrize("decision", ["go", "regroup", "abort"])
def test_a_step_counts_unless_aborted_and_a_regroup_comes_after_it(monkeypatch, decision):
    member = mock.MagicMock(vote=mock.Mock(return_value=decision))
    found = _trainer(6, member=member, session=mock.Mock(world=4))
    begun = mock.Mock(lr=0.25)
    with pytest.raises(Regroup) if decision == "abort" else contextlib.nullcontext():
        found._commit(begun)
    assert member.vote.call_args_list == [mock.call("6", 4)]
    step = found.engine.optimizer.step
    expected = mock.call(0.25, norm=begun.result.wait.return_value.norm)
    assert step.call_args_list == [expected] * (decision != "abort")
    assert member.updating.__enter__.call_count == (decision != "abort")
    monkeypatch.setattr(trainer.Trainer, "_begin", lambda self, step, before: step)
    with pytest.raises(Regroup) if decision == "regroup" else contextlib.nullcontext():
        assert found._begin(7) == 7
