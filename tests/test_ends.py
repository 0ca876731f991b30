"""The ends of runs and their messages: exit codes, which rank prints, and the texts and numbers.

Ranks, engines and launchers are mocks: nothing is computed and no process is left.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_train import _config, _replace, _rows, _trainer

import warpweave.launch.ranks as launch
import warpweave.launch.session as sessions
import warpweave.train.command as train
import warpweave.train.not_finite as not_finite
import warpweave.train.trainer as trainer_module
from warpweave.checkpoint import CheckpointError
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.launch.heartbeat import SILENCE
from warpweave.launch.interrupt import Interrupt, Stopped
from warpweave.launch.processes import Processes, environment, leave
from warpweave.launch.session import Session, reported
from warpweave.launch.supervise import kept_store
from warpweave.model.config import PRESETS, ParallelPlan
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.train.checks import TrainingStopped
from warpweave.train.metrics import peak_memory
from warpweave.train.options import GPTOverrides, TrainConfig
from warpweave.train.resume import Progress
from warpweave.train.trainer import Trainer

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
WORDS_OF_TORCH = "gloo", "NCCL", "Connection", "Timed out", "timeout"


class LeftError(Exception):
    """Raised in place of ending the process."""


def _leaves(monkeypatch, module) -> None:
    def leave(code: int):
        raise LeftError(code)

    monkeypatch.setattr(module, "leave", leave)


# -------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "code", "traced"),
    [
        (ValueError("x"), 2, False), (CheckpointError("x"), 2, False),
        (TrainingStopped("x"), 1, False), (OSError("x"), 1, False), (MemoryError("x"), 1, False),
        (torch.OutOfMemoryError("x"), 1, False), (LOST, 1, False),
        (dist.DistBackendError("x"), 1, False), (RuntimeError("x"), 1, True),
        (KeyError("x"), 1, True), (SystemExit(3), 1, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)  # fmt: skip
def test_errors_end_a_rank_with_their_code_and_bugs_print_a_traceback(
    monkeypatch, capsys, error, code, traced
):
    _leaves(monkeypatch, sessions)
    for spoken in (True, False):  # another rank may have reported it
        session = mock.Mock(explain=lambda *_, spoken=spoken: "a line" if spoken else None)
        refused = {"refused": (ValueError, CheckpointError)}
        with (
            pytest.raises(LeftError) as left,
            reported(session, (TrainingStopped, CheckpointError), **refused),
        ):
            raise error
        said = capsys.readouterr().err
        assert left.value.args == (code,)
        assert ("warpweave: a line" in said) == spoken
        assert ("Traceback" in said) == (spoken and traced)
    with pytest.raises(LeftError) as left, reported(session):  # once the run has begun
        raise error
    assert left.value.args == (1,)


def test_a_second_ctrl_c_ends_with_130_and_no_error_with_nothing(monkeypatch, capsys):
    _leaves(monkeypatch, sessions)
    with pytest.raises(LeftError, match="130"), reported(mock.Mock()):
        raise KeyboardInterrupt
    assert "stopped at once, without saving" in capsys.readouterr().err
    with reported(mock.Mock()):
        pass


def test_what_was_printed_is_out_before_a_process_leaves(monkeypatch):
    done: list[object] = []
    for name in ("stdout", "stderr"):
        stream = SimpleNamespace(flush=lambda name=name: done.append(name))
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(os, "_exit", done.append)
    leave(7)
    monkeypatch.undo()
    assert (set(done[:2]), done[2:]) == ({"stdout", "stderr"}, [7])


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True), (dist.DistNetworkError("x"), True),
        *((RuntimeError(f"a {word} b"), True) for word in WORDS_OF_TORCH),
        (RuntimeError("x"), False), (ValueError("gloo timeout"), False),
        (TrainingStopped("timeout"), False),
    ],
)  # fmt: skip
def test_what_torch_raises_for_a_peer_that_is_gone_is_no_error_of_ones_own(error, lost):
    assert sessions.is_connection_error(error) == lost


class _Rank:
    """A process that ends with `code` at `at`, in seconds after its start."""

    def __init__(self, clock: list[float], code: int | None, at: float = 0.0) -> None:
        self._clock, self._code, self._at, self.killed = clock, code, at, None

    @property
    def exitcode(self) -> int | None:
        ended = self._code is not None and self._clock[0] >= self._at
        return -9 if self.killed is not None else self._code if ended else None

    def kill(self) -> None:
        if self.exitcode is None:
            self.killed = self._clock[0]

    terminate = join = lambda self, *_: None


class _Ranks(Processes):
    """Ranks that have these ends; those in `results` first write a result. `signal` arrives when
    the last one starts, and each wait takes a quarter of a second of `clock`."""

    def __init__(self, clock, ends, verdict=True, results=(), signal=None) -> None:
        super().__init__()
        self._clock, self._ends, self._signal = clock, ends, signal
        self._verdict, self._results = verdict, results

    def start(self, target, rank, world, port, attempt, *_) -> _Rank:
        store = dist.PrefixStore(f"attempt_{attempt}", kept_store(port))
        store.set("beat/0", json.dumps([4, "saving", 0.0]))
        if self._verdict:
            store.set("verdict", "word")
        if rank in self._results:
            store.set(f"result/{rank}", "[]")
        self.started.append(_Rank(self._clock, *self._ends.get(rank, (None,))))
        if rank == world - 1 and self._signal is not None:
            os.kill(os.getpid(), self._signal)
        return self.started[-1]

    def wait(self, timeout: float) -> None:
        self._clock[0] += 0.25


@pytest.mark.parametrize(
    ("codes", "stopped", "raised", "said"),
    [
        ({1: 2}, None, SystemExit(2), "word"),
        ({1: 2, 0: 5}, None, SystemExit(2), "word"),
        ({1: -9}, None, SystemExit(1), "rank 1 (tp=1) was killed by SIGKILL before its first step"),
        ({0: -11, 1: 1}, None, SystemExit(1), "rank 0 (tp=0) was killed by SIGSEGV, last seen at"),
        ({1: 0, 0: 1}, None, SystemExit(1), "rank 1 (tp=1) left (exit 0) before its first step"),
        ({1: -9}, 15, Stopped(15), ""),
        ({1: 3}, 15, Stopped(15, 3), "word"),
    ],
)  # fmt: skip
def test_a_launch_ends_as_its_first_rank_did_or_as_the_signal_says(
    capsys, codes, stopped, raised, said
):
    """Of ranks that end at once, killed ones count first."""
    ranks = _Ranks([0.0], {rank: (code,) for rank, code in codes.items()}, signal=stopped)
    with pytest.raises(SystemExit) as ended:
        launch.launch(_fails, (), Mesh(tp=2), processes=ranks)
    assert (type(ended.value), ended.value.code) == (type(raised), raised.code)
    assert getattr(ended.value, "number", None) == stopped
    err = capsys.readouterr().err
    assert said in err
    assert bool(err) == bool(said)


@pytest.mark.parametrize("results", [(0, 1), (0,)])
def test_a_rank_that_ends_without_an_error_has_died_if_it_left_no_result(capsys, results):
    ranks = _Ranks([0.0], {0: (0,), 1: (0,)}, results=results)
    if len(results) == 2:
        assert launch.launch(_fails, (), Mesh(tp=2), processes=ranks) == []
        return
    with pytest.raises(SystemExit, match=r"^1$"):
        launch.launch(_fails, (), Mesh(tp=2), processes=ranks)
    assert "rank 1 (tp=1) left (exit 0) before its first step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "ends", "verdict", "killed"),
    [
        # A rank that failed reports it, and the others have time to name the rank at fault.
        ("gloo", {0: (1, 5.0)}, False, 5.0 + SILENCE + 1.0),
        ("nccl", {0: (1, 5.0)}, False, 35.0),
        ("nccl", {0: (-6, 5.0)}, False, 35.0),  # its watchdog ended it, and recorders write
        ("gloo", {0: (1, 5.0)}, True, 5.0),
        # A dead rank has reported nothing, with or without a code.
        ("gloo", {0: (-6, 5.0)}, False, 5.0),
        ("gloo", {0: (-9, 5.0)}, False, 5.0),
        ("nccl", {0: (-9, 5.0)}, False, 5.0),
        ("gloo", {0: (0, 5.0)}, False, 5.0),
        # The time counts from the first failure, unless a later one reports more.
        ("nccl", {0: (1, 5.0), 1: (1, 20.0)}, False, 35.0),
        ("nccl", {0: (1, 5.0), 1: (-9, 20.0)}, False, 20.0),
        ("nccl", {0: (-9, 5.0), 1: (1, 5.0)}, False, 5.0),
    ],
)
def test_ranks_that_outlive_a_failure_are_killed_when_their_time_is_over(
    monkeypatch, backend, ends, verdict, killed
):
    now = [0.0]
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    ranks = _Ranks(now, ends, verdict)
    monkeypatch.setattr(launch.Processes, "of", lambda *_: ranks)  # on NCCL, too
    last = []
    monkeypatch.setattr(ranks, "end", lambda: last.append(ranks.started[-1]))
    with pytest.raises(SystemExit):
        launch.launch(_fails, (), Mesh(tp=len(ends) + 1), backend=backend)
    assert last[0].killed == killed


def _told_and_failed() -> None:
    with environment(THERE="now", NEW="1"):
        assert (os.environ["THERE"], os.environ["NEW"]) == ("now", "1")
        raise LeftError


def test_what_ranks_are_told_is_told_to_nobody_else_however_a_launch_ends(monkeypatch):
    monkeypatch.setenv("THERE", "before")
    before = dict(os.environ)
    with pytest.raises(LeftError):
        _told_and_failed()
    assert dict(os.environ) == before


# -------------------------------------------------------------------------- restarts


def _fails(code: int, port: int) -> list[bool]:
    """Fail rank 1 in the first attempt, after both began. Return the second attempt's input."""
    session = sessions.join(Mesh(dp=2), port=port, backend="gloo")
    goes_on = session.goes_on
    dist.barrier()
    session.begin()
    dist.barrier()
    if session.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(code)
    dist.barrier()
    return [goes_on, session.goes_on, session.rank]


def test_ranks_that_fail_are_started_again_and_told_that_they_go_on(capfd):
    assert launch.launch(_fails, (0,), Mesh(dp=2), max_restarts=1) == [True, True, 0]
    lines = capfd.readouterr().err.splitlines()  # including rank 0's own, if it was fast enough
    said = [line for line in lines if line.startswith("warpweave: ")]
    assert re.fullmatch(r"warpweave: rank 1 \(dp=1\) left \(exit 0\).*", said[0])
    assert said[1:] == ["warpweave: restarting all ranks (restart 1 of 1)"]


def test_under_torchrun_restarts_are_its_own_option(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for dp in (2, 1):  # or as many as torchrun has started
        with pytest.raises(SystemExit) as ended:
            train.run(TrainConfig(dp=dp, max_restarts=1))
        assert ended.value.code == 2
        words = "max_restarts = 1 is not supported under torchrun; pass --max-restarts to torchrun"
        assert words in capsys.readouterr().err


def test_a_refusal_is_final(capfd):
    with pytest.raises(SystemExit) as ended:
        launch.launch(_fails, (2,), Mesh(dp=2), max_restarts=1)
    assert ended.value.code == 2
    assert "restarting" not in capfd.readouterr().err


def _fails_when_it_is_stopped(launcher: int, port: int) -> None:
    os.kill(launcher, signal.SIGTERM)
    signal.sigwait([signal.SIGTERM])  # the launcher forwards it; blocked until then
    os._exit(3)


def test_a_failure_after_a_signal_is_final(capfd):
    with pytest.raises(Stopped) as ended:
        launch.launch(_fails_when_it_is_stopped, (os.getpid(),), Mesh(), max_restarts=1)
    assert (ended.value.number, ended.value.code) == (signal.SIGTERM, 3)
    assert "restarting" not in capfd.readouterr().err


# -------------------------------------------------------------------------- one rank of a run


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("stopped", "number", "code"),
    [(False, None, 0), (False, 15, 0), (True, 2, 130), (True, 15, 143), (True, None, 143)],
)
def test_rank_exits_with_the_code_of_the_signal_and_only_rank_0_prints(
    monkeypatch, capsys, rank, stopped, number, code
):
    """If this rank received no signal itself, another rank received SIGTERM."""
    session = Session(torch.device("cpu"), rank, 2, None, 9.0, Mesh(dp=2))
    trainer = mock.Mock(stopped=stopped, step=3, run=lambda: {"steps": 3}, describe=lambda: "it")
    monkeypatch.setattr(train, "join", lambda *_, **__: session)
    monkeypatch.setattr(train, "Trainer", lambda *_: trainer)
    monkeypatch.setattr(train, "reported", lambda *_, **__: contextlib.nullcontext())
    interrupt = Interrupt()
    interrupt.number, interrupt.listen = number, lambda: None
    monkeypatch.setattr(train, "Interrupt", lambda: interrupt)
    assert train.train_rank(TrainConfig(dp=2), 1) == code
    out, err = capsys.readouterr()
    assert (out, err.strip()) == (('{"steps": 3}\n', "warpweave: it") if rank == 0 else ("", ""))


def test_interrupted_run_saves_and_defers_evaluation_and_sample_to_resume(tmp_path, capsys):
    """This also holds at a step with an evaluation after it, with and without early stopping."""
    for number, early in enumerate((0, 2)):
        config = _config(tmp_path, steps=4, save_every=0, early_stop=early, sample=3, layers=1,
                         out=tmp_path / f"{number}")  # fmt: skip
        trainer = _trainer(config)
        step = trainer._train_step
        trainer._train_step = lambda step=step, t=trainer: (*step()[:2], t.step == 2)
        trainer.engine.evaluate = trainer.engine.generate = mock.Mock(side_effect=AssertionError)
        result = trainer.run()
        assert (result["steps"], result["val_loss"], result["stopped"]) == (2, None, True)
        said = capsys.readouterr().err.split("\n")
        assert "warpweave: saved step 2; continue with --resume" in said
        assert Path(result["checkpoint"]).name == "step_00000002"
        assert [row["step"] for row in _rows(config.out)] == [1, 2]
        resumed = _trainer(_replace(config, resume=True))
        assert resumed.run()["stopped"] is False
        assert "saved step" not in capsys.readouterr().err
        evaluated = [row["step"] for row in _rows(config.out) if "val_loss" in row]
        assert evaluated == [2, 4]
        assert (resumed.progress.evaluated, resumed.progress.since) == (2, 0)


def test_a_wait_that_gave_up_ends_the_run_before_its_numbers_are_used(monkeypatch, tmp_path):
    trainer = _trainer(_config(tmp_path))
    monkeypatch.setattr(ConnectedMesh, "check_waits", mock.Mock(side_effect=LeftError))
    for call in (trainer._train_step, trainer.evaluate):
        with pytest.raises(LeftError):
            call()
    assert (trainer.step, trainer._evaluation[0]) == (0, -1)


@pytest.mark.parametrize(
    ("loss", "norm", "what", "words"),
    [
        (math.nan, 1.0, "loss", "loss is nan at step 8"),
        (math.inf, math.nan, "loss", "loss is inf at step 8"),
        (1.0, math.inf, "loss", "gradient norm is inf at step 8"),
        (math.nan, 0.0, "validation loss", "validation loss is nan at step 7"),
    ],
)
@pytest.mark.parametrize("ranks", [[], [1], [0, 3]])
@pytest.mark.parametrize(
    "checkpoint", [None, Path("runs/step_00000006"), CheckpointError("cannot write x: disk full")]
)
def test_a_run_that_cannot_go_on_says_what_where_and_what_is_left(
    monkeypatch, loss, norm, what, words, ranks, checkpoint
):
    engine = mock.Mock(outer=None, not_finite_ranks=lambda *_: ranks)
    engine.passes.asynchronous = False
    engine.mesh.sizes, engine.mesh.size = Mesh(dp=2, tp=2), lambda axis: 2
    saver = SimpleNamespace(wait=mock.Mock(side_effect=[checkpoint]))
    batches = mock.Mock(step=lambda step: range(4), held_out=lambda: ())
    given = {"engine": engine, "config": TrainConfig(dp=2, tp=2), "saver": saver}
    trainer = SimpleNamespace(step=7, batches=batches, **given)
    monkeypatch.setattr(not_finite, "origins", lambda engine, again: {})
    with pytest.raises(TrainingStopped) as caught:
        Trainer._stop(trainer, loss, norm, what)
    groups = {0: "ranks 0, 1", 1: "ranks 0, 1", 3: "ranks 2, 3"}
    names = ", ".join(f"{groups[rank]}, within this tensor-parallel group" for rank in ranks)
    where = f"first seen on {names}" if ranks else "not seen on any single rank"
    kept = "" if math.isfinite(norm) else "the weights were not updated; "
    last = "there is no checkpoint"
    if isinstance(checkpoint, CheckpointError):
        last = "cannot write x: disk full"
    elif checkpoint is not None:
        last = "the last good checkpoint is runs/step_00000006"
    assert str(caught.value) == f"{words}, {where}; a rerun did not reproduce it; {kept}{last}"


@pytest.mark.parametrize("what", ["loss", "validation loss"])
@pytest.mark.parametrize("kind", ["plain", "outer", "asynchronous"])
def test_stop_reruns_the_step_only_if_the_weights_are_unchanged(monkeypatch, kind, what):
    """An outer optimizer, or the stages of an asynchronous pipeline, may already have changed
    weights. An evaluation can be rerun under any schedule."""
    ran: list = []
    engine = mock.Mock(not_finite_ranks=lambda *_: ran.append("asked") or [])
    engine.outer = object() if kind == "outer" else None
    engine.passes.asynchronous = kind == "asynchronous"
    engine.mesh.sizes, engine.mesh.size = Mesh(dp=2), lambda axis: 1
    batches = mock.Mock(step=lambda step: (step, "y", "docs", "ids"), held_out=lambda: ("held", 9))
    config = TrainConfig(seed=2, outer_every=4 if kind == "outer" else None)
    batches.config = config
    saver = SimpleNamespace(wait=lambda: None)
    trainer = SimpleNamespace(step=7, engine=engine, config=config, saver=saver, batches=batches)
    monkeypatch.setattr(not_finite, "origins", lambda engine, again: ran.append(again()) or {})
    with pytest.raises(TrainingStopped) as caught:
        Trainer._stop(trainer, math.nan, math.nan, what)
    again = kind == "plain" or what == "validation loss"
    said = str(caught.value)
    assert ("the weights were not updated" in said) == (kind == "plain")
    assert ("; a rerun did not reproduce it" in said) == again
    assert ran[0] == "asked"  # about the last run, before anything runs again
    assert len(ran) == 1 + again
    assert engine.step.called == (what == "loss" and again)
    if engine.step.called:
        key = config.dropout_key(7)
        engine.step.assert_called_once_with(7, "y", "ids", lr=None, key=key, documents="docs")
    elif again:
        engine.evaluate.assert_called_once_with("held", 9)


def test_a_run_says_what_it_trains_and_shows_where_it_is(capsys):
    plan = ParallelPlan(zero=3, schedule="gpipe", microbatches=5)
    config = TrainConfig(model="toy", dp=2, tp=3, cp=4, pp=6, plan=plan, batch=7, dtype="bf16")
    stub = SimpleNamespace(
        config=config, model=config.model_config(1), session=SimpleNamespace(where="somewhere"),
        tokens_per_step=12345, step=9,
    )  # fmt: skip
    # 256 x 128 + 128 x 128 + 2 (12 x 128^2 + 13 x 128) + 2 x 128
    assert Trainer.describe(stub) == (
        "144 ranks (somewhere), dp=2 tp=3 cp=4 pp=6, ZeRO 3, gpipe with 5 micro-batches of 7; "
        "445,952 parameters in bf16, 12,345 tokens per step"
    )
    stub.config = TrainConfig(model="toy", init_from=Path("there"))
    assert Trainer.describe(stub).startswith("1 rank (somewhere), dp=1 ")
    assert Trainer.describe(stub).endswith("12,345 tokens per step; starts from there")
    stub.config = TrainConfig(model="toy", init_from=Path("there"), resume=True)
    assert Trainer.describe(stub).endswith("tokens per step; resumed at step 9")

    stub.config = TrainConfig(model="toy", outer=5, dp=6, dp_shard=3, outer_every=4)
    sizes = "outer=5 dp=6 dp_shard=3 tp=1 cp=1 pp=1, ZeRO 1, 1f1b with 1 micro-"
    assert Trainer.describe(stub).startswith(f"30 ranks (somewhere), {sizes}")

    row = {"loss": 1.23456, "tokens_per_second": 98.7, "mfu": 0.4567}
    stub.metrics = mock.Mock(trained=lambda row, seconds: row)
    for peak, words in (
        ([1.4], "1 MiB"), ([1.4, 2.6], "3 MiB max"), ([19.0] + [1.4] * 8, "19 MiB max"),
    ):  # fmt: skip
        bar, stub.peak_memory = mock.Mock(), peak
        Trainer._log(stub, bar, row, 2.0)
        shown = {"loss": "1.235", "tokens/s": "99", "mfu": "45.7%", "peak": words}
        bar.set_postfix.assert_called_once_with(shown, refresh=False)
        bar.update.assert_called_once_with()


def test_the_lowest_loss_is_told_of_evaluations_and_of_the_end() -> None:
    def lowest(best, at, step, last):
        return (*Progress(best=best, best_step=at).lowest(step, last).values(),)

    assert lowest(None, 0, 9, None) == (None, None)
    assert lowest(2.123456, 4, 9, None) == (2.1235, 4)
    assert lowest(None, 0, 9, 1.0) == (1.0, 9)
    assert lowest(2.0, 4, 9, 1.0) == (1.0, 9)
    assert lowest(1.0, 4, 9, 2.0) == (1.0, 4)
    progress = Progress()
    seen = [progress.see(step, loss) for step, loss in ((2, 3.0), (4, 3.0), (6, 2.0), (8, 5.0))]
    assert seen == [True, False, True, False]
    assert progress == Progress(evaluated=8, best=2.0, best_step=6, since=1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_a_process_is_what_the_system_says_in_mib():
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    (peak,) = peak_memory(torch.device("cpu"), mock.Mock(group=lambda axis: None))
    assert peak == pytest.approx(int(line.split()[1]) / 1024, rel=0.05)


@pytest.mark.parametrize(
    ("device", "given", "dtype"),
    [("cuda", None, "bf16"), ("cpu", None, "fp32"), ("cuda", "fp32", "fp32")],
)
def test_a_gpu_trains_in_bf16_unless_told_and_its_memory_is_judged_by_that(
    monkeypatch, tmp_path, device, given, dtype
):
    """The engine and the GPU are mocks."""
    judged = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    monkeypatch.setattr(trainer_module, "check_memory", lambda step, **_: judged.append(step.dtype))
    monkeypatch.setattr(trainer_module, "Engine", mock.Mock(side_effect=LeftError))
    session = Session(torch.device(device), 0, 1, None, 9.0, Mesh())
    with pytest.raises(LeftError):
        Trainer(_config(tmp_path, dtype=given), session)
    assert trainer_module.Engine.call_args.kwargs["dtype"] == NAMED_DTYPES[dtype]
    assert judged == ([dtype] if device == "cuda" else [])


# -------------------------------------------------------------------------- the command


@pytest.mark.parametrize("ranks", ["one", "one again", "launched", "first", "of its node", "other"])
def test_one_rank_checks_one_locks_and_each_ends_as_it_should(monkeypatch, capsys, ranks):
    """With torchrun, the first rank of each machine checks, for all ranks on it. A run of one rank
    that may restart is launched as well."""
    done: dict[str, object] = {}
    places = {"first": ("0", "0"), "of its node": ("2", "0"), "other": ("3", "1")}
    if ranks in places:
        rank, local = places[ranks]
        for name, value in (("RANK", rank), ("LOCAL_RANK", local), ("WORLD_SIZE", "6"),
                            ("LOCAL_WORLD_SIZE", "2")):  # fmt: skip
            monkeypatch.setenv(name, value)

    @contextlib.contextmanager
    def locked(folder):
        done["locked"] = folder
        yield

    monkeypatch.setattr(TrainConfig, "check", lambda config: done.update(checked=config.dp))
    backend = lambda here, *_, **__: "nccl" if here == 1 else "gloo"  # noqa: E731
    monkeypatch.setattr(train, "choose_backend", backend)
    monkeypatch.setattr(train, "free_host_memory", lambda: 77)
    memory = lambda *_, free, ranks: done.update(memory=(free, ranks))  # noqa: E731
    monkeypatch.setattr(train, "check_fits", memory)
    monkeypatch.setattr(train, "locked", locked)
    monkeypatch.setattr(train, "train_rank", lambda config: done.update(alone=config.dp) or 143)
    told = lambda entry, args, mesh, max_restarts, **_: (  # noqa: E731
        done.update(launched=(mesh, max_restarts)) or 130
    )
    monkeypatch.setattr(train, "launch", told)
    _leaves(monkeypatch, train)
    restarts = 3 * (ranks == "one again")
    tp = 1 if ranks.startswith("one") else 2
    unusual = {"overrides": GPTOverrides(activation="relu2"), "momentum": 0.5, "warmup": 3}
    config = TrainConfig(model="toy", tp=tp, steps=2, max_restarts=restarts, **unusual)
    with pytest.raises((SystemExit, LeftError)) as ended:
        train.run(config)
    end = (type(ended.value).__name__, *ended.value.args)
    expected = {
        "one": {"checked": 1, "locked": config.out, "alone": 1, "end": ("SystemExit", 143)},
        "launched": {"checked": 1, "memory": (77, 2), "locked": config.out,
                     "launched": (Mesh(tp=2), 0), "end": ("SystemExit", 130)},
        "one again": {"checked": 1, "locked": config.out, "launched": (Mesh(), 3),
                      "end": ("SystemExit", 130)},
        "first": {"checked": 3, "memory": (77, 2), "locked": config.out, "alone": 3,
                  "end": ("LeftError", 0)},
        "of its node": {"checked": 3, "memory": (77, 2), "alone": 3, "end": ("LeftError", 0)},
        "other": {"alone": 3, "end": ("LeftError", 0)},
    }  # fmt: skip
    assert done | {"end": end} == expected[ranks]
    said = capsys.readouterr().err
    for line in (
        "warmup (3) is longer than the run (steps = 2)",
        "export will not accept this run: none of the model types tried (gpt2",
        "warpweave: momentum = 0.5 has no effect: optimizer = adamw uses --betas",
    ):
        assert (line in said) == ("locked" in done)


def test_every_preset_can_be_exported_and_is_not_warned_of(capsys):
    for model in PRESETS:
        train._say_of_export(TrainConfig(model=model))
    started = TrainConfig(init_from=Path("theirs"), overrides=GPTOverrides(activation="relu2"))
    train._say_of_export(started)  # judged by its config.json at the export
    assert capsys.readouterr().err == ""
