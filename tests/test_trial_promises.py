"""Trials of faults on made-up runs: which outcomes keep a promise and which break it, when and on
which rank a fault happens, and the command. `test_trials.py` has the real runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from warpweave.layers.block import TransformerBlock
from warpweave.model.config import GPTConfig
from warpweave.model.gpt import GPT
from warpweave.train.trainer import Trainer
from warpweave.trials import command, deaths, disagreements, disk, faults, stops
from warpweave.trials.faults import ACTS, Fault, FaultyTrainer
from warpweave.trials.job import BrokenPromiseError, Ended, promised
from warpweave.trials.options import TrialsConfig
from warpweave.trials.trial import STEPS, Arena, Trial, trial

LOSSES = {step: 1.0 / step for step in range(1, STEPS + 1)}


class Job:
    """A made-up run that has ended; what it left behind is given by keyword."""

    def __init__(self, **said: Any) -> None:
        self.code = said.get("code", 1)
        self.stderr = said.get("stderr", "warpweave: rank 1 (tp=1) is at fault\n")
        self.step, self.kept = said.get("step", 7), said.get("losses", LOSSES)
        self.lines, self.done = said.get("rows", []), said.get("done", self.step)
        self.result = said.get("result")
        self.out = said.get("out", Path("run"))
        self.process = SimpleNamespace(pid=4321, poll=lambda: None)

    def end(self, code: int | None = None) -> Ended:
        promised(code in (None, self.code), f"exit status {self.code}, expected {code}")
        return Ended(self.code, self.result, [], self.stderr, 100.0)

    def wait_for(self, what) -> None:
        assert what()

    def newest(self) -> SimpleNamespace:
        return SimpleNamespace(step=self.step)

    def losses(self) -> dict[int, float]:
        return self.kept

    def rows(self) -> list[dict]:
        return self.lines

    def steps(self) -> int:
        return self.done


class Here(Arena):
    """An arena whose every job is `job`, which ended `seconds` after its fault."""

    def __init__(self, folder: Path, job: Job, seconds: float = 1.0, layout: str = "tp2") -> None:
        super().__init__(folder, layout, folder)
        self.job, self.seconds, self.given = job, seconds, []

    def start(self, *options, **given):
        self.given.append((options, given))
        return self.job

    def since(self, job, end):
        return self.seconds

    def saved(self):
        return Job()


def _kept(one: Trial, folder: Path, **said: Any) -> bool:
    """Whether the trial's promise holds of a job that left this behind."""
    try:
        one.run(Here(folder, Job(**said)))
    except BrokenPromiseError:
        return False
    return True


# ---------------------------------------------------------------- who is named


@pytest.mark.parametrize(
    ("stderr", "ranks"),
    [
        ("", set()),
        ("rank 3 died\n", set()),  # not one of our lines
        ("warpweave: rank 3 (tp=1) died\n", {3}),
        ("warpweave: ranks 0, 12, 3 differ\nother: rank 5\n", {0, 3, 12}),
        ("warpweave: rank 1 died\nwarpweave: rank 10 left; not so rank 2\n", {1, 2, 10}),
        ("warpweave: all 4 ranks and frank 9\n", set()),
    ],
)
def test_only_our_own_lines_name_ranks(stderr, ranks):
    assert deaths.named(Ended(1, None, [], stderr, 0.0)) == ranks


NAMES_ONE = (
    deaths.left_with_0, deaths.hung, deaths.spinning, deaths.holding_the_lock, deaths.stopped
)  # fmt: skip


@pytest.mark.parametrize("one", NAMES_ONE, ids=lambda each: each.name)
def test_the_rank_that_died_or_hung_alone_is_named_and_the_last_checkpoint_is_there(one, tmp_path):
    assert _kept(one, tmp_path)
    assert _kept(one, tmp_path, step=deaths.AT - 1)
    for broken in (
        {"step": deaths.AT - 2},
        {"code": 0},
        {"stderr": "warpweave: ranks 0, 1 are at fault\n"},
        {"stderr": "warpweave: rank 0 is at fault\n"},
        {"stderr": "warpweave: nobody\n"},
        {"stderr": "Traceback (most recent)\nwarpweave: rank 1 is at fault\n"},
    ):
        assert not _kept(one, tmp_path, **broken), broken


@pytest.mark.parametrize(
    ("one", "act", "most"),
    [
        (deaths.killed_in_a_step, "kill", 2.0),
        (deaths.left_with_0, "leave", 2.0),
        (deaths.hung, "sleep", 11.0),
        (deaths.spinning, "spin", 11.0),
        (deaths.holding_the_lock, "hold the lock", 11.0),
        (deaths.stopped, "stop", 11.0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_each_trial_plants_its_fault_and_notes_a_late_end(one, act, most, tmp_path):
    """A hung rank is noticed within the timeout of a message, six seconds here, and five more."""
    assert act in ACTS
    for seconds, late in ((most, ""), (most + 0.1, f"late: {most:g} s are promised")):
        arena = Here(tmp_path, Job(), seconds)
        with suppress(BrokenPromiseError):  # the rank to kill is drawn, and may be another
            one.run(arena)
            assert arena.late == late
        ((options, given),) = arena.given
        assert (options, given["fault"].act, given["fault"].step) == ((), act, deaths.AT)
        assert arena.timeout == (6.0 if most > 2 else 20.0)


def test_the_killed_rank_is_the_one_that_must_be_named(tmp_path):
    found = set()
    for layout in ("tp2 pp2", "tp2 dp2, ZeRO 3", "cp2 dp2"):
        for rank in range(4):
            job = Job(stderr=f"warpweave: rank {rank} is at fault\n")
            arena = Here(tmp_path, job, layout=layout)
            with suppress(BrokenPromiseError):
                deaths.killed_in_a_step.run(arena)
                assert arena.given[0][1]["fault"].rank == rank
                found.add(layout)
    assert len(found) == 3


def test_an_error_must_be_told_once_and_name_its_rank(tmp_path):
    trace, line = "Traceback (most recent)\n", "warpweave: rank 1 (tp=1) failed\n"
    both = "warpweave: ranks 0, 1 failed\n"
    for stderr, kept in ((trace + line, True), (2 * trace + line, False), (line, False),
                         (trace + both, False), (trace, False)):  # fmt: skip
        assert _kept(deaths.raised, tmp_path, stderr=stderr) == kept
    for stderr, kept in ((line, True), ("warpweave: rank 0 failed\n", False), ("", False)):
        assert _kept(deaths.killed_under_torchrun, tmp_path, stderr=stderr) == kept


GOES_ON = (deaths.killed_and_restarted, deaths.killed_and_restarted_by_torchrun)


@pytest.mark.parametrize("one", GOES_ON, ids=lambda each: each.name)
def test_a_restarted_run_must_resume_once_and_have_the_same_losses(one, tmp_path):
    resumed = "warpweave: 2 ranks; resumed at step 3\n"
    fine = {"code": 0, "stderr": resumed}
    assert _kept(one, tmp_path, **fine)
    for broken in (
        {"code": 1}, {"stderr": ""}, {"stderr": 2 * resumed},
        {"losses": LOSSES | {STEPS: 0.5}}, {"losses": {1: 1.0}},
    ):  # fmt: skip
        assert not _kept(one, tmp_path, **fine | broken), broken
    arena = Here(tmp_path, Job(**fine), 15.5)
    said = one.run(arena)
    assert said == f"went on at step 3, {STEPS} losses to the bit; 15.5 s from kill to end"
    assert arena.late == "late: 15 s are promised"
    ((_, given),) = arena.given
    assert given["max_restarts"] == 1
    assert given["torchrun"] == (0 if one is deaths.killed_and_restarted else 2)


def test_a_run_is_killed_within_a_step_and_within_a_save_each_in_a_folder_of_its_own(
    tmp_path, monkeypatch
):
    made: list[Here] = []

    def here(folder: Path, layout: str, references: Path) -> Here:
        assert references == tmp_path
        code = 1 if len(made) == fails else 0
        job = Job(code=code, stderr=f"warpweave: resumed at step {len(made) + 1}\n")
        made.append(Here(folder, job, layout=layout))
        monkeypatch.setattr(made[-1], "leave", lambda folder=folder: left.append(folder))
        return made[-1]

    monkeypatch.setattr(deaths, "Arena", here)
    for fails, count in ((None, 2), (1, 2), (0, 1)):
        made.clear()
        left: list[Path] = []
        arena = Arena(tmp_path / "a", "tp2", tmp_path)
        if fails is None:
            said = deaths.killed_at_any_moment.run(arena)
            assert said.startswith("2 of 2: went on at step 2, ")
        else:
            with pytest.raises(BrokenPromiseError, match="exit status 1, expected 0"):
                deaths.killed_at_any_moment.run(arena)
        planted = [given["fault"] for each in made for _, given in each.given]
        moments = [Fault("kill", 0, 2, at="within", delay=0.01), Fault("kill", 1, 3, "save", 0.003)]
        assert planted == moments[:count]
        assert left == [tmp_path / "a" / name for name in ("0", "1")[:count]]
        assert {each.layout for each in made} == {"tp2"}


@pytest.mark.parametrize(
    ("one", "act"),
    [(deaths.launcher_killed_with_a_stopped_rank, "stop"),
     (deaths.launcher_killed_with_a_stuck_rank, "hold the lock"),
     (deaths.launcher_of_servers_killed, None)],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
@pytest.mark.parametrize("leaves", [False, True])
def test_the_launcher_is_killed_once_a_rank_is_stuck_and_nobody_may_be_left(
    one, act, leaves, tmp_path, monkeypatch
):
    """Of servers it is a worker that is stopped, the second process that was started."""
    sent: list[tuple] = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    monkeypatch.setattr(Job, "ranks", lambda self: [11, 22], raising=False)
    monkeypatch.setattr(deaths, "planted_at", lambda out: out == Path("run") and 1.0)
    clock = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: 5.0)
    monkeypatch.setattr(deaths, "time", clock)
    job = Job(done=2)

    def end(code: int | None = None) -> None:
        assert code is None  # of a launcher that was killed
        promised(not leaves, "left behind: [11]")

    monkeypatch.setattr(job, "end", end, raising=False)
    arena = Here(tmp_path, job)
    if leaves:
        with pytest.raises(BrokenPromiseError, match="left behind"):
            one.run(arena)
    else:
        assert one.run(arena) == "nobody left after 0.0 s"
    ((_, given),) = arena.given
    killed = [(4321, signal.SIGKILL)]
    if act is None:
        assert (sent, given["steps"] > 9999) == ([(22, signal.SIGSTOP), *killed], True)
    else:
        assert (sent, given) == (killed, {"fault": Fault(act, 1, deaths.AT)})


def test_no_step_is_missing_while_a_replica_is_away(tmp_path, monkeypatch):
    """The trial waits until a row has two replicas and a later one three."""
    sent = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    monkeypatch.setattr(Job, "ranks", lambda self: [11, 22, 33], raising=False)
    three, two = [0, 1, 2], [0, 2]
    there = [three, two, two, three]
    rows = [{"step": i + 1, "loss": 1.0, "replicas": r} for i, r in enumerate(there)]
    evaluated = {"step": 2, "val_loss": 1.0}
    job = {"code": 128 + signal.SIGTERM}
    arena = Here(tmp_path, Job(rows=[*rows[:2], evaluated, *rows[2:]], **job))
    assert deaths.replica_killed.run(arena) == "away for 2 of 4 steps, no row is missing"
    assert sent == [(22, signal.SIGKILL), (4321, signal.SIGTERM)]
    assert not _kept(deaths.replica_killed, tmp_path, rows=[*rows[:2], rows[3]], **job)
    assert not _kept(deaths.replica_killed, tmp_path, rows=rows, code=0)
    for away in (rows[:1] + rows[3:], rows[:3]):  # it was never away; it never came back
        with pytest.raises(AssertionError):
            _kept(deaths.replica_killed, tmp_path, rows=away, **job)


# ---------------------------------------------------------------- who differs, what is damaged


@pytest.mark.parametrize(
    ("one", "alone"),
    [(disagreements.not_a_number, True), (disagreements.flipped_bit, False),
     (disagreements.another_collective, False)],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_the_rank_that_differs_must_be_named(one, alone, tmp_path):
    assert _kept(one, tmp_path)
    both = "warpweave: rank 0 and rank 1 differ\n"
    assert _kept(one, tmp_path, stderr=both) == (not alone)
    for broken in ({"stderr": "warpweave: rank 0 differs\n"}, {"code": 0}, {"code": 2}):
        assert not _kept(one, tmp_path, **broken), broken


def test_the_slow_rank_must_be_named_in_every_row_once_it_is_slow(tmp_path):
    def rows(*slowest: int | None) -> list[dict]:
        return [{"step": 2 * i + 2, "slowest_rank": rank} for i, rank in enumerate(slowest)]

    for found, kept in (((0, 0, 1, 1), True), ((0, None, 1, 1), True), ((1, 1, 0, 1), False),
                        ((1, 1, 1, 0), False), ((1, 1), False)):  # fmt: skip
        assert _kept(disagreements.slow_rank, tmp_path, code=0, rows=rows(*found)) == kept, found
    assert not _kept(disagreements.slow_rank, tmp_path, code=1, rows=rows(1, 1, 1))


@pytest.mark.parametrize("missed", [0, 1])
def test_every_flipped_bit_must_be_found_and_is_flipped_back(tmp_path, monkeypatch, missed):
    files = {"a": bytes(range(9)), "b": b"x" * 5}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(Job, "newest", lambda self: SimpleNamespace(path=tmp_path))
    seen: set[tuple[str, int]] = set()

    def opened(path: Path) -> None:
        now = {name: (path / name).read_bytes() for name in files}
        flips = [
            (name, i, a ^ b)
            for name in files
            for i, (a, b) in enumerate(zip(files[name], now[name], strict=True))
            if a != b
        ]
        if not flips:
            return
        ((name, at, bits),) = flips
        assert bits.bit_count() == 1
        seen.add((name, at))
        if len(seen) > 1 or not missed:
            raise disk.CheckpointError("damaged")

    monkeypatch.setattr(disk, "open_checkpoint", opened)
    assert _kept(disk.flipped_bits, tmp_path) == (not missed)
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    assert {name for name, _ in seen} == set(files)


# ---------------------------------------------------------------- stops


@pytest.mark.parametrize(
    ("one", "number", "sends"),
    [
        (stops.terminated, signal.SIGTERM, ["kill"]),
        (stops.hung_up, signal.SIGHUP, ["killpg"]),
        (stops.ctrl_c_twice_at_once, signal.SIGINT, ["killpg", "killpg"]),
        (stops.timed_out, signal.SIGTERM, ["kill", "killpg"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_run_that_is_asked_to_stop_must_save_its_last_step(
    one, number, sends, tmp_path, monkeypatch
):
    """The trials hold `os.kill` and `os.killpg` themselves, so what they pass on is replaced."""
    done: list[tuple[str, int, int]] = []

    def tried(**said: Any) -> bool:
        done.clear()

        def saves(arena: Arena, number: signal.Signals, *to: Any) -> str:
            fakes = [lambda pid, n, to=to: done.append((to.__name__, pid, n)) for to in to]
            return _saves(arena, number, *fakes)

        monkeypatch.setattr(stops, "_saves", saves)
        return _kept(one, tmp_path, **{"code": 128 + number, "step": 5} | said)

    _saves = stops._saves
    monkeypatch.setattr(stops, "time", SimpleNamespace(sleep=lambda seconds: None))
    stopped = {"stopped": True, "steps": 5}
    assert tried(result=stopped)
    assert done == [(name, 4321, number) for name in sends]
    for broken in (
        {"result": None}, {"result": stopped | {"stopped": False}}, {"code": 0, "result": stopped},
        {"result": stopped | {"steps": 4}}, {"result": stopped, "code": 128 + 9},
        {"result": stopped, "done": 6}, {"result": stopped, "done": 4},
    ):  # fmt: skip
        assert not tried(**broken), broken
    ended = SimpleNamespace(pid=4321, poll=lambda: len(done) or None)  # by the first signal
    monkeypatch.setattr(Job, "process", property(lambda self: ended, lambda self, _: None), False)
    assert tried(result=stopped)
    assert done == [(sends[0], 4321, number)]
    counts = iter((6, 6, 5, 5))  # a step that was there before the signal is gone
    monkeypatch.setattr(Job, "steps", lambda self: next(counts))
    assert not tried(result=stopped)


def test_a_second_signal_must_stop_a_run_whose_ranks_are_stopped_without_saving(
    tmp_path, monkeypatch
):
    """Which come with more time between them than the two seconds in which they are one."""
    done: list[Any] = []
    clock = SimpleNamespace(sleep=done.append)
    monkeypatch.setattr(os, "kill", lambda *given: done.append(given))
    monkeypatch.setattr(stops, "time", clock)
    monkeypatch.setattr(Job, "ranks", lambda self: [11, 22], raising=False)
    at_once = "warpweave: stopped at once, without saving\n"
    fine = {"code": 128 + signal.SIGINT, "stderr": at_once, "done": 3}
    arena = Here(tmp_path, Job(**fine))
    assert stops.stopped_twice.run(arena) == "stopped at once, without saving"
    asked = (4321, signal.SIGINT)
    assert done == [(11, signal.SIGSTOP), (22, signal.SIGSTOP), asked, 2.5, asked]
    (((option, value), given),) = arena.given
    assert (option, value, given["steps"] > 9999) == ("--save-every", "0", True)
    for broken in (
        {"code": 0}, {"code": 128 + signal.SIGTERM}, {"stderr": "warpweave: saved\n"},
        {"stderr": at_once + "warpweave: saved\n"},
    ):  # fmt: skip
        assert not _kept(stops.stopped_twice, tmp_path, **fine | broken), broken


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("at", ["begin", "within", "save"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_fault_happens_once_at_its_step_of_its_rank(tmp_path, monkeypatch, at, rank):
    log: list[Any] = []
    monkeypatch.setattr(Trainer, "_begin", lambda self, step, *_: log.append(("begin", step)))
    monkeypatch.setattr(Trainer, "save", lambda self: log.append(("save", self.step)))
    monkeypatch.setitem(ACTS, "note", lambda trainer: log.append("now"))
    slept: list[float] = []

    class Timer:
        def __init__(self, seconds: float, act: Any) -> None:
            self.seconds, self.act = seconds, act

        def start(self) -> None:
            slept.append(self.seconds)
            self.act()

    monkeypatch.setattr(faults, "threading", SimpleNamespace(Timer=Timer))
    clock = SimpleNamespace(sleep=slept.append, time=lambda: 12.5)
    monkeypatch.setattr(faults, "time", clock)
    trainer = FaultyTrainer.__new__(FaultyTrainer)
    trainer._fault = Fault("note", 2, 3, at=at, delay=0.25)
    trainer._marker, trainer.session = tmp_path / "planted", SimpleNamespace(rank=rank)
    for _ in range(2):  # a run that is started again
        for step in range(5):
            trainer._begin(step)
            trainer.step = step + 1
            trainer.save()
    plain = [(what, step + (what == "save")) for step in range(5) for what in ("begin", "save")] * 2
    assert [entry for entry in log if entry != "now"] == plain
    assert log.count("now") == (rank == 2) == (tmp_path / "planted").exists()
    if rank == 2:
        assert log[log.index("now") - 1] == ("save", 3)  # and before step 3 begins
        assert slept == ([] if at == "begin" else [0.25])
        assert float((tmp_path / "planted").read_text()) == 12.5
        assert sorted(path.name for path in tmp_path.iterdir()) == ["planted"]


def _tiny() -> SimpleNamespace:
    return SimpleNamespace(engine=SimpleNamespace(gpt=GPT(GPTConfig(11, 8, 2, 8, 2))))


def test_each_fault_of_the_model_changes_one_thing(monkeypatch):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    trainer = _tiny()
    gpt = trainer.engine.gpt
    before = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    ACTS["flip"](trainer)
    changed = {n: p for n, p in gpt.named_parameters() if not torch.equal(p, before[n])}
    ((name, p),) = changed.items()
    assert "norm" in name
    bits = p.detach().view(torch.int32) ^ before[name].view(torch.int32)
    assert (bits.count_nonzero(), int(bits[0]).bit_count()) == (1, 1)
    assert torch.isfinite(p).all()

    finite: list[bool] = []
    blocks = [m for m in gpt.modules() if isinstance(m, TransformerBlock)]
    ACTS["nan"](trainer)
    for block in blocks:
        block.register_forward_hook(lambda m, i, x: finite.append(bool(torch.isfinite(x).all())))
    gpt(ids)
    assert finite == [True, False]

    slept: list[float] = []
    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=slept.append))
    trainer = _tiny()
    ACTS["lag"](trainer)
    for _ in range(2):
        trainer.engine.gpt(ids)
    assert slept == [0.2, 0.2]

    issued: list[Any] = []
    reduces = SimpleNamespace(all_reduce=lambda x, group: issued.append(group))
    monkeypatch.setattr(faults, "dist", reduces)
    trainer = _tiny()
    trainer.mesh = SimpleNamespace(group=lambda axis: axis)
    ACTS["extra"](trainer)
    for _ in range(2):
        trainer.engine.gpt(ids)
    assert issued == ["world"]


def test_faults_of_a_process_hit_this_process(monkeypatch):
    done: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *given: done.append(given))
    monkeypatch.setattr(os, "_exit", lambda code: done.append(code))
    for act in ("kill", "stop", "leave"):
        ACTS[act](None)
    assert done == [(os.getpid(), signal.SIGKILL), (os.getpid(), signal.SIGSTOP), 0]
    with pytest.raises(RuntimeError, match=r"^planted$"):
        ACTS["raise"](None)


def test_a_fault_and_a_port_reach_the_trainer_of_each_rank(monkeypatch, tmp_path):
    fault, early, seen = Fault("nan", 1, 2, at="save", delay=0.5), object(), []
    monkeypatch.setattr(faults, "run", lambda *given, **more: seen.append((given, more)))
    out = tmp_path / "run"
    words = ["faulty", fault.text, "--steps", "7", "--seed", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    faults.main(early)
    (((config, processes), more),) = seen
    assert (config.steps, config.seed, config.out, processes) == (7, 3, out, early)
    rank = more.pop("as_rank")
    assert more == {}
    ended = mock.Mock(return_value=3)
    monkeypatch.setattr(faults, "train_rank", ended)
    monkeypatch.setattr(Trainer, "__init__", lambda self, *given: seen.append(given))
    for port in (41, None):
        assert rank(config, *[port] * (port is not None)) == 3
        assert ended.call_args.args == (config, port)
        trainer = ended.call_args.kwargs["kind"](config, "session", "interrupt")
        assert seen.pop() == (config, "session", "interrupt")
        assert (trainer._fault, trainer._marker) == (fault, tmp_path / "planted")


# ---------------------------------------------------------------- the command


def test_each_trial_has_its_own_folder_which_is_removed_however_it_ends(tmp_path):
    seen: list[Path] = []

    def run(arena: Arena) -> str:
        seen.append(arena.folder)
        assert (arena.layout, arena.references) == ("cp2 dp2", tmp_path)
        (arena.folder / "left").touch()
        if len(seen) == 2:
            arena.took(9.0, 3.0)
            raise BrokenPromiseError("it\nbroke")
        if len(seen) == 3:
            raise ArithmeticError
        return "fine"

    one = Trial("a name", "p", run, ("cp2 dp2",))
    found = [command.outcome(one, "cp2 dp2", tmp_path) for _ in range(2)]
    with pytest.raises(ArithmeticError):
        command.outcome(one, "cp2 dp2", tmp_path)
    assert [(*each[:4], each.said) for each in found] == [
        ("a name", "cp2 dp2", True, False, "fine"),
        ("a name", "cp2 dp2", False, True, "it broke; late: 3 s are promised"),
    ]
    assert len({*seen}) == 3
    assert not any(folder.exists() for folder in seen)


def test_the_command_lists_and_runs_the_chosen_trials_on_one_layout_or_all(monkeypatch, capsys):
    @trial("it holds", "tp2 pp2", "cp2 dp2")
    def first_of_two(arena: Arena) -> str:
        return ""

    @trial("so does this")
    def another(arena: Arena) -> str:
        return "said"

    assert (first_of_two.name, another.layouts) == ("first of two", ("tp2",))
    monkeypatch.setattr(command, "TRIALS", (first_of_two, another))
    monkeypatch.setattr(command, "sys", SimpleNamespace(platform="linux", exit=sys.exit))
    every = [(first_of_two, "tp2 pp2"), (first_of_two, "cp2 dp2"), (another, "tp2")]
    for config, wanted in (
        (TrialsConfig(), [every[0], every[2]]),
        (TrialsConfig(layout="all"), every),
        (TrialsConfig(only=("two", "first")), every[:1]),
        (TrialsConfig(only=("other", "zzz"), layout="all"), every[2:]),
        (TrialsConfig(only=("zzz",)), []),
    ):
        assert list(command.chosen(config)) == wanted
    with pytest.raises(SystemExit) as end:
        command.run(TrialsConfig(list=True, layout="all"))
    out = capsys.readouterr().out.splitlines()
    assert (end.value.code, [line.split("  ")[0] for line in out[:-1]]) == (
        0, ["first of two", "first of two", "another"]
    )  # fmt: skip
    assert [line.split()[-2:] for line in out[:-1]] == [["it", "holds"]] * 2 + [["does", "this"]]
    assert json.loads(out[-1]) == {"trials": 3}
    with pytest.raises(SystemExit) as end:
        command.run(TrialsConfig(layout="all"))
    out = capsys.readouterr().out.splitlines()
    assert end.value.code == 0
    assert [line.split()[-1] for line in out[1:-1]] == ["passed", "passed", "said"]
    assert json.loads(out[-1]) == {"passed": True, "trials": 3, "failed": [], "late": []}
    for config, platform, words in (
        (TrialsConfig(only=("zzz",)), "linux", "no trial has one of zzz in its name"),
        (TrialsConfig(), "darwin", "which darwin does not have"),
    ):
        monkeypatch.setattr(command.sys, "platform", platform)
        with pytest.raises(SystemExit) as end:
            command.run(config)
        assert end.value.code == 2
        assert words in capsys.readouterr().err


def test_a_broken_promise_is_a_failure_even_if_it_is_late_and_lateness_alone_is_none(
    monkeypatch, capsys
):
    def made(name: str, fails: bool, late: bool) -> Trial:
        def run(arena: Arena) -> str:
            arena.took(9.0, 3.0 if late else 9.0)
            promised(not fails, f"{name} broke")
            return f"{name} held"

        return Trial(name, "p", run, ("tp2", "cp2 dp2"))

    kinds = {"fine": (False, False), "slow": (False, True), "bad": (True, False),
             "worst": (True, True)}  # fmt: skip
    verdicts = {"fine": "passed", "slow": "late", "bad": "FAILED", "worst": "FAILED"}
    for names in (("slow", "fine"), ("bad", "fine"), (*kinds,), ("worst",)):
        monkeypatch.setattr(command, "TRIALS", tuple(made(n, *kinds[n]) for n in names))
        with pytest.raises(SystemExit) as end:
            command.run(TrialsConfig())
        _, *rows, last = capsys.readouterr().out.splitlines()
        for name, row in zip(names, rows, strict=True):
            fails, late = kinds[name]
            said = f"{name} {'broke' if fails else 'held'}" + "; late: 3 s are promised" * late
            words = row.split(maxsplit=4)
            assert (*words[:2], *words[3:]) == (name, "tp2", verdicts[name], said)
        failed = [f"{name}, tp2" for name in names if kinds[name][0]]
        assert json.loads(last) == {
            "passed": not failed, "trials": len(names), "failed": failed,
            "late": [f"{name}, tp2" for name in names if kinds[name][1]],
        }  # fmt: skip
        assert end.value.code == (1 if failed else 0)
