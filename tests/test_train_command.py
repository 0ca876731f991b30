"""``warpweave train``: the order of its actions, the ranks and backends it launches, and the
arguments that a trainer passes to its parts. Ranks and launchers are mocks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_train import _config, _trainer
from threads import on_mesh

import warpweave.train.command as train
import warpweave.train.trainer as trainer_module
from warpweave.checkpoint import CheckpointError, open_checkpoint
from warpweave.launch import processes
from warpweave.launch.processes import starting
from warpweave.launch.session import Session
from warpweave.model.config import ParallelPlan
from warpweave.parallel.checked import CollectiveMismatch
from warpweave.parallel.data.outer import OuterRule
from warpweave.parallel.mesh import Mesh
from warpweave.plan.memory import TrainingStep
from warpweave.train.checks import TrainingStopped
from warpweave.train.options import TrainConfig
from warpweave.train.trainer import Trainer, check_fits

# ---------------------------------------------------------------- one rank


@pytest.fixture
def rank(monkeypatch) -> SimpleNamespace:
    """Make one rank of mocks; `log` records their calls in order."""
    log: list[Any] = []
    session = mock.Mock(rank=0, goes_on=False)
    session.begin = lambda: log.append("begin")
    session.beat = lambda step, what: log.append((step, what))
    session.close = lambda: log.append("close")
    engine = SimpleNamespace(gpt=SimpleNamespace(explain_context=lambda batch: f"context {batch}"))
    made = SimpleNamespace(describe=lambda: "described", engine=engine, stopped=False, step=6)
    made.run = lambda: log.append("run") or {"steps": 6}

    def make(config: TrainConfig, *given: Any) -> Any:
        log.append(("made", config.resume))
        return made

    def join(mesh: Mesh, **given: Any) -> Any:
        log.append("join")
        return session

    interrupt = SimpleNamespace(number=None, listen=lambda: log.append("listen"))
    monkeypatch.setattr(train, "Trainer", make)
    monkeypatch.setattr(train, "join", join)
    monkeypatch.setattr(train, "Interrupt", lambda: interrupt)
    monkeypatch.setattr(train, "reported", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(train, "say", lambda line: log.append(f"say {line}"))
    return SimpleNamespace(log=log, session=session, trainer=made)


@pytest.mark.parametrize(
    ("port", "torchrun", "first"), [(None, False, True), (7, True, True), (None, True, False)]
)
def test_a_rank_listens_before_it_joins_unless_torchruns(rank, monkeypatch, port, torchrun, first):
    for name in ("RANK", "WORLD_SIZE") if torchrun else ():
        monkeypatch.setenv(name, "1")
    assert train.train_rank(TrainConfig(), port) == 0
    assert rank.log == [
        *["listen"] * first, "join", "listen", ("made", False), "begin", "say described", "run",
        (6, "closing"), "close",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("resume", [False, True, "auto"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_restarted_rank_resumes_and_only_rank_0_prints(rank, number, resume, goes_on, capsys):
    rank.session.goes_on, rank.session.rank = goes_on, number
    plan = ParallelPlan(cp_strategy="measured")
    train.train_rank(TrainConfig(resume=resume, plan=plan, batch=3), 7)
    assert ("made", "auto" if goes_on else resume) in rank.log
    said = [entry for entry in rank.log if str(entry).startswith("say")]
    assert said == ["say described", "say context 3"] * (number == 0)
    assert capsys.readouterr().out == '{"steps": 6}\n' * (number == 0)


def test_what_is_wrong_before_the_first_step_is_refused_and_later_a_failure(rank, monkeypatch):
    """Covers an invalid value or checkpoint; an error that all ranks raise is reported once."""
    told: list[Any] = []

    @contextlib.contextmanager
    def reported(*given: Any, **more: Any) -> Any:
        told.append((*given, more, [entry for entry in rank.log if entry == "run"]))
        yield
        told.append("run" in rank.log)

    monkeypatch.setattr(train, "reported", reported)
    train.train_rank(TrainConfig(), 7)
    alike = (TrainingStopped, CheckpointError, CollectiveMismatch)
    refused = {"refused": (ValueError, CheckpointError)}
    first, *rest = told
    assert first == (rank.session, alike, refused, [])
    assert rest == [False, (rank.session, alike, {}, []), True]


def test_a_rank_that_cannot_connect_says_which_it_is(monkeypatch, capsys):
    fails = mock.Mock(side_effect=dist.DistError("the reason"))
    monkeypatch.setattr(train, "join", fails)
    monkeypatch.setattr(train, "Interrupt", mock.Mock)
    for given, name in (({}, "0"), ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, "3")):
        with mock.patch.dict(os.environ, given), pytest.raises(SystemExit) as ended:
            train.train_rank(TrainConfig(), 7)
        assert ended.value.code == 1
        said = capsys.readouterr().err.strip()
        assert said == f"warpweave: rank {name} could not connect to the other ranks: the reason"


# ---------------------------------------------------------------- the command


class Done(Exception):
    """Ends a call after the part under test."""


@pytest.fixture
def command(monkeypatch) -> list[Any]:
    """Record what the command requests from mocks of backend and launch; no option is checked."""
    asked: list[Any] = []

    def choose(ranks: int, backend: str | None, *, launched: bool) -> str:
        asked.append((ranks, backend, launched))
        return "nccl"

    def launched(entry: Any, args: tuple, mesh: Mesh, **given: Any) -> int:
        asked.append((entry, args[0].dp, mesh, given))
        return 5

    monkeypatch.setattr(TrainConfig, "check", lambda config: None)
    monkeypatch.setattr(train, "choose_backend", choose)
    monkeypatch.setattr(train, "locked", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(train, "launch", launched)
    monkeypatch.setattr(train, "leave", mock.Mock(side_effect=Done))
    return asked


def _ends(config: TrainConfig, *given: Any, **options: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        train.run(config, *given, **options)
    return ended.value.code


def test_ranks_are_launched_with_the_options_given_and_in_prepared_processes(command):
    early, entry = object(), lambda config: 9
    for device, backend in ((None, None), ("cpu", "gloo"), ("cuda", "nccl")):
        config = TrainConfig(tp=2, dp=3, device=device, max_restarts=4)
        for as_rank in (None, entry):
            command.clear()
            assert _ends(config, early, as_rank=as_rank) == 5
            (chosen, (target, dp, mesh, given)) = command
            assert chosen == (6, backend, True)
            assert (target, dp, mesh) == (as_rank or train.train_rank, 3, Mesh(dp=3, tp=2))
            assert given == {"backend": "nccl", "max_restarts": 4, "processes": early}
    command.clear()
    assert _ends(TrainConfig(), as_rank=entry) == 9
    assert command == [(1, None, True)]


def test_under_torchrun_the_backend_is_chosen_for_the_ranks_of_this_machine(command, monkeypatch):
    given = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ran = []
    with pytest.raises(Done):
        train.run(TrainConfig(tp=2), as_rank=lambda config: ran.append(config.dp))
    assert (command, ran) == ([(4, None, False)], [4])
    train.leave.assert_called_once_with(0)


@pytest.mark.parametrize("kind", ["elastic", "server"])
def test_replicas_and_servers_are_started_by_their_own_programs(command, monkeypatch, kind):
    calls, early, config = [], object(), TrainConfig(**{kind: 1}, dp=2)
    monkeypatch.setattr(f"warpweave.train.{kind}.run.run", lambda *given: calls.append(given))
    assert _ends(config, early) == 0
    assert calls == [(config, early)]


def test_an_elastic_run_is_refused_under_torchrun(command, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert _ends(TrainConfig(elastic=1, dp=2)) == 2
    words = "--elastic 1 starts its own ranks; run it without torchrun"
    assert capsys.readouterr().err.strip() == f"warpweave: {words}"


# ---------------------------------------------------------------- arguments of a trainer's parts


def _replica(mesh: Any, config: TrainConfig) -> int:
    session = SimpleNamespace(
        device=torch.device("cpu"), timeout=9.0, rank=mesh.rank, world=config.mesh.world,
        mesh=SimpleNamespace(connect=lambda *_, **__: mesh),
    )  # fmt: skip
    with pytest.raises(Done) as given:
        Trainer(config, session)
    return given.value.args[0]


def test_each_data_replica_of_each_outer_one_has_its_own_samples(monkeypatch, tmp_path):
    def batches(config: TrainConfig, replica: int, device: torch.device) -> None:
        raise Done(replica)

    monkeypatch.setattr(trainer_module, "Batches", batches)
    config = _config(tmp_path, outer=2, dp=3, tp=2, outer_every=2)
    found = on_mesh(config.mesh, _replica, config)
    assert found == [replica for replica in range(6) for _ in range(2)]


@pytest.mark.usefixtures("undrawn")
def test_tokens_per_step_count_the_replicas_left_and_sequences_per_step_all(tmp_path):
    config = _config(tmp_path, dp=3, elastic=1, zero=0, batch=2)  # two micro-batches
    session = Session(torch.device("cpu"), 0, 1, None, 60.0, Mesh())
    trainer = Trainer(config, session)
    assert (trainer.sequences_per_step, trainer.tokens_per_step) == (12, 4 * 16)


@pytest.mark.usefixtures("undrawn")
def test_a_checkpoint_records_the_mesh_the_model_and_the_progress(tmp_path):
    config = _config(tmp_path, steps=1, zero=3, layers=1, seed=4)
    reader = open_checkpoint(_trainer(config).run()["checkpoint"])
    assert reader.mesh == dataclasses.asdict(config.mesh) | {"zero": 3}
    assert reader.config == json.loads(json.dumps(dataclasses.asdict(config.model_config(256))))
    assert (reader.step, reader.state["seed"], reader.state["step"]) == (1, 4, 1)
    assert reader.state["optimizers"] == [reader.state["optimizer"]]
    assert reader.state["progress"] == {
        "tokens": 64, "evaluated": 0, "best": None, "best_step": 0, "since": 0
    }  # fmt: skip


def test_the_memory_check_is_given_the_training_step_of_the_options(monkeypatch):
    judged = []
    monkeypatch.setattr(trainer_module, "check_memory", lambda *a, **k: judged.append((a, k)))
    config = TrainConfig(
        dp=2, outer=2, outer_every=3, optimizer="sgd", batch=5, dtype="bf16",
        plan=ParallelPlan(zero=2, microbatches=3),
    )  # fmt: skip
    model = config.model_config(300)
    check_fits(config, model, "cpu", free=7, ranks=4)
    step = TrainingStep(
        model, config.mesh, config.plan, 5, "bf16", "cpu", "sgd",
        OuterRule(3, config.outer_lr, config.outer_momentum),
    )  # fmt: skip
    assert judged == [((step,), {"free": 7, "ranks": 4})]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("ahead", [False, True])
def test_step_times_do_not_overlap_and_only_the_last_step_is_recorded(monkeypatch, tmp_path, ahead):
    """The clock advances by a second whenever it is read: as a step begins, and as it ends."""
    now, recorded = [0.0], []

    def look() -> float:
        now[0] += 1.0
        return now[0]

    off = {"eval_every": 0, "save_every": 0}
    config = _config(tmp_path, steps=4, layers=1, timeline=tmp_path / "t.svg", **off)
    trainer = _trainer(config)
    trainer.ahead = ahead
    record = lambda _, marks, path: recorded.append((len(took), path))  # noqa: E731
    monkeypatch.setattr(trainer_module, "write_measured", record)
    monotonic = trainer_module.time.monotonic
    clock = SimpleNamespace(perf_counter=look, monotonic=monotonic)
    monkeypatch.setattr(trainer_module, "time", clock)
    took: list[float] = []
    for _ in range(4):
        took.append(trainer._train_step()[1])
    assert took == ([2.0, 2.0, 2.0, 1.0] if ahead else [1.0] * 4)
    assert recorded == [(2 if ahead else 3, config.timeline)]  # as the last step is launched
    assert trainer.over


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("there", [(), ("RANK",), ("WORLD_SIZE",), ("RANK", "WORLD_SIZE")])
def test_torchrun_is_recognised_by_rank_and_world_size_together(monkeypatch, there):
    for name in there:
        monkeypatch.setenv(name, "0")
    assert processes.under_torchrun() == (len(there) == 2)


def test_compiler_cache_is_in_the_temporary_folder_unless_the_user_sets_it(monkeypatch):
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setattr(processes.tempfile, "gettempdir", lambda: "/somewhere")
    monkeypatch.delenv(name, raising=False)
    assert processes.no_cache() == {name: "/somewhere"}
    assert processes.told_ranks("gloo", "")[name] == "/somewhere"
    monkeypatch.setenv(name, "/mine")
    assert processes.no_cache() == {name: "/mine"}
    assert processes.told_ranks("nccl", "")[name] == "/mine"


class Early:
    """Processes that were prepared early."""

    def __init__(self, log: list) -> None:
        self.log = log

    def __enter__(self) -> Early:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("ended")


@pytest.mark.parametrize(
    ("error", "left"),
    [(SystemExit(7), 7), (SystemExit(0), 0), (SystemExit("why"), None), (SystemExit(), None),
     (KeyboardInterrupt(), None), (ArithmeticError(), None)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("early", [True, False])
def test_only_an_integer_exit_code_skips_the_interpreters_shutdown(monkeypatch, error, left, early):
    log: list[Any] = []
    monkeypatch.setattr(processes, "leave", lambda code: log.append(code))
    given = Early(log) if early else None

    def ends() -> None:
        with starting(given) as found:
            assert found is given
            raise error

    with pytest.raises(type(error)) as caught:
        ends()
    assert caught.value is error
    assert log == (["ended"] * early + [left] * (early and left is not None))


def test_of_processes_that_end_together_the_killed_ones_are_reported_first(monkeypatch):
    class Child:
        def __init__(self, pid: int) -> None:
            self.pid, self.sentinel, self.exitcode, self.start = pid, pid, None, lambda: None

    children: list[Child] = []

    def made(**given: Any) -> Child:
        children.append(Child(len(children)))
        return children[-1]

    sent: list[tuple] = []
    pipe = SimpleNamespace(recv=lambda: ({}, b""), send=sent.append)
    codes = [1, 0, -9, 3, -15]

    def wait(waited: list, timeout: float) -> list:
        if len(children) < len(codes):
            return [pipe]
        if children[0].exitcode is not None:
            raise EOFError  # no other process asks
        for child, code in zip(children, codes, strict=True):
            child.exitcode = code
        return []

    monkeypatch.setattr(processes, "connection", SimpleNamespace(wait=wait))
    context = SimpleNamespace(Process=made)
    make = SimpleNamespace(get_context=lambda kind: context)
    monkeypatch.setattr(processes, "multiprocessing", make)
    with pytest.raises(EOFError):
        processes._fork_as_told(pipe)
    assert sent[:5] == [(pid, None) for pid in range(5)]
    assert sent[5:] == [(4, -15), (2, -9), (1, 0), (0, 1), (3, 3)]
