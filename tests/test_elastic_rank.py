"""A rank of an elastic run: which errors are another one's end, what it tells the keeper, how its
process ends, and what it takes along into the next generation."""

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
from warpweave.config import ParallelPlan
from warpweave.elastic import rank as module
from warpweave.elastic import trainer
from warpweave.elastic.membership import Generation, Regroup
from warpweave.elastic.seat import Seat
from warpweave.elastic.trainer import Carried, ElasticTrainer, StateLostError
from warpweave.parallel.checked import CollectiveMismatch
from warpweave.parallel.mesh import Mesh
from warpweave.resume import Progress
from warpweave.train_config import TrainConfig

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")


class LeftError(Exception):
    """In the place of a process that ends."""


def _rank(**member: Any) -> module._Rank:
    config = TrainConfig(dp=3, elastic=1, plan=ParallelPlan(zero=0))
    return module._Rank(config, mock.Mock(number=None), mock.Mock(**member), mock.Mock())


@pytest.mark.parametrize(
    ("error", "waits", "by_all"),
    [
        (LOST, module._GRACE, False),
        (dist.DistNetworkError("x"), module._GRACE, False),
        (CollectiveMismatch("x"), module._GRACE, None),
        (CheckpointError("x"), 1.0, None),
        (StateLostError("x"), None, True),
        (ValueError("x"), None, False),
        (RuntimeError("x"), None, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_is_the_ranks_own_unless_a_replica_is_lost(error, waits, by_all):
    """After a connection failed the keeper is told, and may find out who hangs."""

    def fails() -> None:
        raise error

    for lost in (True, False):
        before = lost and waits is None  # else it is heard of while the rank waits
        rank = _rank(lost=before, wait_for_loss=mock.Mock(return_value=lost))
        with contextlib.nullcontext() if lost else pytest.raises(type(error)):
            assert rank.survive(fails) is None
        closes = waits == module._GRACE
        assert rank.connections.close.call_count == closes
        assert rank.member.complain.call_count == closes
        expected = [] if waits is None else [mock.call(waits)]
        assert rank.member.wait_for_loss.call_args_list == expected
        every = isinstance(error, module._BY_ALL) if by_all is None else by_all
        assert rank.member.give_up.call_count == (not lost and every)


def test_what_goes_well_is_passed_on_and_the_end_of_a_generation_is_no_error():
    rank = _rank()
    assert rank.survive(lambda: 7) == 7

    def regroups() -> None:
        raise Regroup

    assert rank.survive(regroups) is None
    for name in ("complain", "give_up", "wait_for_loss"):
        assert getattr(rank.member, name).call_count == 0
    with pytest.raises(KeyboardInterrupt):
        rank.survive(mock.Mock(side_effect=KeyboardInterrupt))


@pytest.mark.parametrize(
    ("stopped", "asked", "number", "code"),
    [
        (False, False, None, 0),
        (False, False, 15, 0),  # it came after the last step
        (True, False, signal.SIGINT, 130),
        (True, False, None, 143),  # another rank was
        (True, True, None, 0),  # as too few are left: the keeper knows
        (True, True, signal.SIGTERM, 0),
    ],
)
def test_a_rank_ends_by_the_signal_that_stopped_the_run(monkeypatch, stopped, asked, number, code):
    left = mock.Mock(side_effect=LeftError)
    trained = mock.Mock(stopped=stopped)
    made = mock.Mock(return_value=trained)
    session = mock.Mock()
    joined = mock.Mock()
    monkeypatch.setattr(module, "leave", left)
    monkeypatch.setattr(module, "ElasticTrainer", made)
    monkeypatch.setattr(module, "Session", mock.Mock(return_value=session))
    monkeypatch.setattr(module, "disagreement", lambda *_: None)
    monkeypatch.setattr(module, "connect", joined)
    monkeypatch.setattr(module, "reported", lambda *_, **__: contextlib.nullcontext())
    rank = _rank(seat=Seat(Mesh(dp=3), 1, 2), vote=mock.Mock(return_value="go"))
    rank.interrupt.number = number
    generation = Generation(4, 0, {0: 0, 2: 1}, stop=asked)
    carried, device = Carried(), torch.device("cpu")
    with pytest.raises(LeftError):
        rank.train(generation, "store", device, {"name": "cpu"}, carried)
    assert left.call_args_list == [mock.call(code)]
    assert joined.call_args_list == [mock.call(device, "store", 1, 2, rank.config.timeout)]
    assert made.call_args.args == (rank.config, session, rank.interrupt, rank.member, carried)
    assert trained.carry.call_count == 0


@pytest.mark.parametrize(("world", "first"), [(2, True), (2, False), (1, True)])
def test_ranks_that_cannot_compute_alike_are_refused_and_a_lone_one_connects_to_nobody(
    monkeypatch, world, first
):
    joined, line = mock.Mock(side_effect=LeftError), []
    monkeypatch.setattr(module, "disagreement", lambda *_: line[0] if line else None)
    monkeypatch.setattr(module, "connect", joined)
    monkeypatch.setattr(module, "ElasticTrainer", mock.Mock(side_effect=LeftError))
    monkeypatch.setattr(module, "reported", lambda *_, **__: contextlib.nullcontext())
    rank = _rank(seat=Seat(Mesh(dp=3), 1, 0 if first else 2), lost=False)
    members = {0: 0, 2: 0} if world == 2 else {0: 0}
    given = Generation(1, 0, members), dist.HashStore(), torch.device("cpu"), {"name": "cpu"}
    with pytest.raises(LeftError):
        rank.train(*given, Carried())
    assert joined.call_count == (world > 1)
    line.append("they differ")
    with pytest.raises(ValueError, match=r"^they differ$"):
        rank.train(*given, Carried())
    assert joined.call_count == (world > 1)


@pytest.mark.parametrize("built", [True, False])
def test_a_rank_whose_generation_ends_takes_along_what_it_has(monkeypatch, built):
    """Also if it ends before the trainer is there: then what came from the one before."""
    trained = mock.Mock()
    made = mock.Mock(return_value=trained) if built else mock.Mock(side_effect=Regroup)
    monkeypatch.setattr(module, "leave", mock.Mock(side_effect=LeftError))
    monkeypatch.setattr(module, "ElasticTrainer", made)
    monkeypatch.setattr(module, "disagreement", lambda *_: None)
    monkeypatch.setattr(module, "reported", lambda *_, **__: contextlib.nullcontext())
    rank = _rank(seat=Seat(Mesh(dp=3), 1, 2), lost=False)
    monkeypatch.setattr(rank, "_run", mock.Mock(side_effect=Regroup))
    given = Generation(1, 0, {2: 0}), dist.HashStore(), torch.device("cpu"), {"name": "cpu"}
    carried = Carried(step=3)
    found = rank.train(*given, carried)
    assert found is (trained.carry.return_value if built else carried)


@pytest.mark.parametrize("change", ["", "replica 1 joins"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("decision", ["go", "abort"])
def test_a_rank_settles_trains_and_votes_on_the_end_and_the_first_one_speaks(
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
    """A trainer with these attributes and no engine."""
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
def test_a_rank_takes_along_its_state_and_which_checkpoint_is_whole(monkeypatch, path, cut):
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


@pytest.mark.parametrize(
    ("step", "every", "stopped", "source", "written", "saves"),
    [
        (6, 3, False, 0, 3, True),
        (6, 3, False, 0, 6, False),  # it is there
        (6, 3, False, None, 3, False),  # of the first generation
        (6, 4, False, 0, 4, False),
        (6, 0, False, 0, -1, False),
        (6, 4, True, 1, 4, True),
        (6, 0, True, 1, -1, True),
        (6, 0, True, 1, 6, False),
        (0, 3, True, 0, -1, False),  # nothing was trained
        (10, 0, False, 0, 9, True),  # the last step
        (10, 0, False, 0, 10, False),
    ],
)
def test_a_checkpoint_that_the_last_generation_has_not_come_to_is_made_first(
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
def test_the_row_of_the_last_step_is_written_if_the_rank_that_died_had_not(tmp_path, rows, writes):
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
def test_a_rank_takes_over_the_newest_state_and_gives_its_own_only_if_that_is_it(
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
def test_a_step_is_updated_as_the_ranks_decide_and_after_it_they_may_leave(monkeypatch, decision):
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
