"""The jobs that trials of faults watch: how they are started, what is read of them, and what about
their end breaks a promise. The jobs are scripts of one line or stand-ins: nothing is trained."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from warpweave.checkpoint import save_checkpoint
from warpweave.train.options import parse
from warpweave.trials import job as job_module
from warpweave.trials import trial as trial_module
from warpweave.trials.faults import PLANTED, Fault, planted_at
from warpweave.trials.job import TINY, BrokenPromiseError, Ended, TrainingJob, marked
from warpweave.trials.trial import LAYOUTS, STEPS, Arena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BEGIN = "import json, os, signal, socket, sys, time; args = sys.argv[1:]; "
WAITS = "time.sleep(600)"


def _job(folder: Path, script: str, *options: str, **more) -> TrainingJob:
    command = (sys.executable, "-S", "-c", BEGIN + script)
    return TrainingJob(folder, options, command=command, **{"seconds": 60.0} | more)


def _until(what, poll=lambda: None) -> None:
    """Wait for other processes: there is no message to wait for."""
    deadline = time.monotonic() + 60
    while not what():
        poll()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_hears_a_hangup_where_this_process_does_not(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        end = _job(tmp_path, "os.kill(os.getpid(), signal.SIGHUP)").end()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert end.code == -signal.SIGHUP


def test_a_job_has_its_options_its_folder_and_a_session_of_its_own(tmp_path):
    script = (
        "print('first'); print('warpweave: one\\nother\\nwarpweave:two', file=sys.stderr); "
        "print(json.dumps({'args': args, 'tmp': os.environ['TMPDIR'], 'sid': os.getsid(0), "
        "'threads': os.environ['OMP_NUM_THREADS'], 'cwd': os.getcwd()})); sys.exit(3)"
    )
    (tmp_path / "there").mkdir()
    began = time.time()
    job = _job(tmp_path / "a" / "b", script, "--steps", "7", cwd=tmp_path / "there")
    end = job.end()
    assert (end.code, len(end.stdout), end.stdout[0]) == (3, 2, "first")
    assert end.said == ["warpweave: one"]
    assert end.stderr == "warpweave: one\nother\nwarpweave:two\n"
    assert began <= end.seconds <= time.time()
    assert end.result == json.loads(end.stdout[1])
    folder = tmp_path / "a" / "b"
    files = ["--data", str(folder / "text"), "--out", str(folder / "run")]
    assert end.result["args"] == [*TINY.split(), *files, "--steps", "7"]
    assert (end.result["tmp"], end.result["threads"]) == (str(folder / "tmp"), "1")
    assert (end.result["sid"], end.result["cwd"]) == (job.process.pid, str(tmp_path / "there"))
    config = parse([*TINY.split(), *files])
    assert (config.overrides.layers, config.batch, config.sample) == (2, 2, 0)
    (folder / "text").write_bytes(b"mine")
    _job(folder, "").end(0)
    assert (folder / "text").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("script", "code", "wanted", "broken"),
    [
        ("", 0, 0, None),
        ("", 0, 1, "exit status 0, expected 1: "),
        ("sys.exit('why')", 1, 0, "exit status 1, expected 0: why"),
        ("sys.exit(2)", 2, None, None),
        ("sys.exit(2)", 2, 2, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, None, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, 9, "exit status -9, expected 9"),
    ],
)
def test_an_end_with_another_status_breaks_a_promise(tmp_path, script, code, wanted, broken):
    job = _job(tmp_path, script)
    if broken is None:
        end = job.end(wanted)
        assert (end.code, end.result, end.stdout) == (code, None, [])
        return
    with pytest.raises(BrokenPromiseError, match=f"^{broken}"):
        job.end(wanted)


def test_the_result_of_a_job_is_its_last_line_if_that_is_an_object(tmp_path):
    every = (
        ("", None), ("text", None), ('{"steps": 3}', {"steps": 3}), ("7", None),
        ('{"a": 1}\n{"a": 2}', {"a": 2}), ('{"a": 1}\ntext {', None), ('text\n{"a": 1}', {"a": 1}),
    )  # fmt: skip
    lines = [["x", *text.splitlines()] for text, _ in every]
    jobs = [
        _job(tmp_path / str(at), f"print(*{said!r}, sep=chr(10))") for at, said in enumerate(lines)
    ]
    for job, said, (_, result) in zip(jobs, lines, every, strict=True):
        end = job.end(0)
        assert (end.stdout, end.result) == (said, result)


@pytest.mark.parametrize("ours", [True, False])
def test_files_that_a_job_leaves_break_a_promise_but_for_torchruns(tmp_path, ours):
    script = "open(os.environ['TMPDIR'] + '/left', 'w').close()"
    job = _job(tmp_path, script)
    job.ours = ours
    if not ours:
        assert job.end(0).code == 0
        return
    with pytest.raises(BrokenPromiseError, match=r"^left behind: \[\] \['left'\]$"):
        job.end(0)


def test_a_job_of_torchruns_is_not_ours_and_one_that_ran_before_has_no_process(tmp_path):
    for command, ours in (
        (("python", "-m", "torch.distributed.run", "-m", "warpweave"), False),
        (("python", "-m", "warpweave", "train"), True),
    ):
        job = TrainingJob(tmp_path, None, command=command)
        assert job.ours is ours
        assert not hasattr(job, "process")
        job.stop()


@pytest.mark.parametrize("looks", [3, 9])
def test_processes_of_a_job_may_end_up_to_five_seconds_after_it(tmp_path, monkeypatch, looks):
    """On a clock of which each look takes a second."""
    job, now, left = _job(tmp_path, ""), [0.0], iter([*[[12, 13]] * looks, *[[]] * 9])

    def monotonic() -> float:
        now[0] += 1.0
        return now[0]

    clock = SimpleNamespace(monotonic=monotonic, time=time.time, sleep=lambda seconds: None)
    monkeypatch.setattr(job, "members", lambda: next(left))
    monkeypatch.setattr(job_module, "time", clock)
    if looks == 3:
        assert job.end().code == 0
        return
    with pytest.raises(BrokenPromiseError, match=r"^left behind: \[12, 13\] \[\]$"):
        job.end()
    assert now[0] == pytest.approx(6.0, abs=1.0)


def test_a_job_that_does_not_end_in_time_is_ended_with_all_that_it_has_started(tmp_path):
    script = "os.fork(); os.setsid() if os.getpid() != os.getsid(0) else 0; " + WAITS
    job = _job(tmp_path, script)
    try:
        job.wait_for(lambda: len(job.members()) == 2)
        members = job.members()
        assert members == sorted(members)
        assert job.process.pid in members
        assert set(marked(str(tmp_path / "tmp"))) == set(members)
        job.seconds = 0.0
        with pytest.raises(BrokenPromiseError, match=r"^no end in 0 s$"):
            job.end(0)
        assert job.process.poll() == -signal.SIGKILL
        _until(lambda: not job.members())  # one of them is no child of ours
    finally:
        job.stop()


def test_a_wait_ends_with_what_the_job_said_when_it_ends_or_takes_too_long(tmp_path):
    job = _job(tmp_path / "a", "sys.exit('the reason')")
    with pytest.raises(BrokenPromiseError, match=r"^the reason$"):
        job.wait_for(lambda: False)
    job.wait_for(lambda: True)  # which is asked first
    slow = _job(tmp_path / "b", "print('slow', file=sys.stderr, flush=True); " + WAITS)
    try:
        slow.wait_for(lambda: (tmp_path / "b" / "stderr").read_text())
        slow.seconds = 0.0
        with pytest.raises(BrokenPromiseError, match=r"^slow$"):
            slow.wait_for(lambda: False)
    finally:
        slow.stop()


def test_a_process_is_known_by_the_whole_of_its_folder_and_its_parent_whatever_its_name(tmp_path):
    """Of jobs in folders of which one's name begins with another's."""
    script = "open('/proc/self/comm', 'w').write('a) S 1 (b'); open(args[-1], 'w'); " + WAITS
    jobs = []
    try:
        for name in ("x", "x/tmp/y", "x/tmp2"):
            jobs.append(_job(tmp_path / name, script, str(tmp_path / f"{len(jobs)} ready")))
            _until((tmp_path / f"{len(jobs) - 1} ready").exists)
        for job in jobs:
            assert job.members() == [job.process.pid]
            assert job_module._parent_of(job.process.pid) == os.getpid()
    finally:
        for job in jobs:
            job.stop()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_job_may_listen_on_loopback_only(tmp_path, address):
    six = ":" in address
    script = (
        f"s = socket.socket(socket.AF_INET{'6' * six}); s.bind(({address!r}, 0)); s.listen(); "
        "open(args[-1], 'w').close(); " + WAITS
    )
    job = _job(tmp_path, script, str(tmp_path / "ready"))

    def without_ipv6() -> None:
        if six and job.process.poll() is not None:
            pytest.skip("a machine without IPv6")

    try:
        _until((tmp_path / "ready").exists, without_ipv6)
        if address in ("127.0.0.1", "::1"):
            assert job.listening() == {"0" * 24 + "01000000" if six else "0100007F"}
            job.wait_for(lambda: True)
            return
        assert job.listening() == {"0" * (32 if six else 8)}
        with pytest.raises(BrokenPromiseError, match=r"^it listens beyond loopback: "):
            job.wait_for(lambda: True)
        job.ours = False  # as torchrun does
        job.wait_for(lambda: True)
    finally:
        job.stop()


def test_without_ipv6_there_is_no_table_of_its_sockets(tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "_TABLES", ("/proc/net/tcp", str(tmp_path / "tcp6")))
    job = _job(tmp_path, WAITS)
    try:
        assert job.listening() == set()
        job.wait_for(lambda: True)
    finally:
        job.stop()


def test_rows_losses_and_checkpoints_are_read_as_far_as_they_are_written(tmp_path):
    job = TrainingJob(tmp_path, None, command=())
    assert job.steps() == 0
    job.out.mkdir()
    rows = [{"step": 1, "loss": 2.5}, {"step": 1, "val_loss": 3.0}, {"step": 2, "loss": 1.5}]
    (job.out / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "los'
    )
    assert (job.rows(), job.losses(), job.steps()) == (rows, {1: 2.5, 2: 1.5}, 2)
    with pytest.raises(BrokenPromiseError, match=r"^there is no checkpoint$"):
        job.newest()
    for step in (3, 5, 12):
        save_checkpoint(
            job.out / "checkpoints", step, [("a", torch.zeros(1))], config={}, state={}, keep=9
        )
    assert job.newest().step == 12


def test_a_fault_is_read_from_its_text_and_its_time_from_beside_the_run(tmp_path):
    fault = Fault("lag", 3, 5, at="save", delay=0.25)
    assert Fault(**json.loads(fault.text)) == fault
    assert planted_at(tmp_path / "run") is None
    (tmp_path / PLANTED).write_text("12.5")
    assert planted_at(tmp_path / "run") == 12.5
    arena = Arena(tmp_path, "tp2", tmp_path)
    job = SimpleNamespace(out=tmp_path / "run")
    assert arena.since(job, Ended(0, None, [], "", 14.0)) == 1.5
    (tmp_path / PLANTED).unlink()
    with pytest.raises(BrokenPromiseError, match=r"^the fault did not happen: said$"):
        arena.since(job, Ended(0, None, [], "said", 14.0))


# ---------------------------------------------------------------- arenas


class Started:
    """In the place of a job: what it was started with, and how it ends."""

    broken = False

    def __init__(self, folder, words, *, command) -> None:
        self.folder, self.words, self.command = folder, words, command
        self.out, self.stopped, self.ended = folder / "run", 0, None
        folder.mkdir(parents=True, exist_ok=True)
        if words is not None:
            (folder / "made").write_text(" ".join(words))

    def end(self, code=None) -> None:
        self.ended = code
        if self.broken:
            raise BrokenPromiseError("broken")

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def started(monkeypatch) -> type[Started]:
    monkeypatch.setattr(trial_module, "TrainingJob", Started)
    return Started


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_of_a_trial_saves_each_step_on_its_layout(tmp_path, layout):
    arena = Arena(tmp_path / "here", layout, tmp_path / "references")
    job = arena.start("--lr", "0.5")
    assert job.command == (sys.executable, "-P", "-m", "warpweave", "train")
    assert job.folder == arena.folder
    config = parse([*TINY.split(), *job.words])
    plain = parse([*TINY.split(), *LAYOUTS[layout].split()])
    told = (config.steps, config.eval_every, config.save_every, config.keep, config.timeout)
    assert told == (STEPS, 0, 1, 99, 20.0)
    assert (config.mesh, config.plan, config.overrides) == (plain.mesh, plain.plan, plain.overrides)
    assert (config.lr, config.max_restarts) == (0.5, 0)
    own = ("--save-every", "3", "--keep", "2", "--timeout", "4")  # which win
    config = parse([*TINY.split(), *arena.start(*own).words])
    assert (config.save_every, config.keep, config.timeout) == (3, 2, 4.0)
    arena.timeout = 6.0
    fault = Fault("kill", 1, 4)
    job = arena.start(fault=fault, max_restarts=3, steps=77)
    config = parse([*TINY.split(), *job.words])
    assert (config.steps, config.timeout, config.max_restarts) == (77, 6.0, 3)
    faulty = ("-m", "warpweave.trials.faulty", fault.text)
    assert job.command == (sys.executable, "-P", *faulty)
    job = arena.start(fault=fault, max_restarts=2, torchrun=5)
    run = ("-m", "torch.distributed.run", "--nproc-per-node", "5", "--max-restarts", "2")
    assert job.command == (sys.executable, *run, *faulty)
    assert "--max-restarts" not in job.words


@pytest.mark.usefixtures("started")
def test_an_undisturbed_run_of_a_layout_is_made_once_and_copied_into_each_trial(tmp_path):
    references = tmp_path / "references"
    for number, layout in enumerate(("tp2", "cp2 dp2", "tp2")):
        arena = Arena(tmp_path / str(number), layout, references)
        arena.folder.mkdir()
        job = arena.saved()
        assert (job.folder, job.words) == (arena.folder, None)
        assert LAYOUTS[layout] in (arena.folder / "made").read_text()
        (references / layout.replace(" ", "-") / "made").write_text(f"{LAYOUTS[layout]} once")
    assert (tmp_path / "2" / "made").read_text() == f"{LAYOUTS['tp2']} once"
    assert sorted(path.name for path in references.iterdir()) == ["cp2-dp2", "tp2"]
    job = Arena(tmp_path / "3", "tp2 pp2", references).reference()
    assert (job.ended, job.stopped) == (0, 0)


def test_an_undisturbed_run_that_breaks_is_not_kept_for_others(tmp_path, started, monkeypatch):
    monkeypatch.setattr(started, "broken", True)
    arena = Arena(tmp_path / "here", "tp2", tmp_path / "references")
    with pytest.raises(BrokenPromiseError, match="broken"):
        arena.reference()
    assert not (tmp_path / "references" / "tp2").exists()


@pytest.mark.usefixtures("started")
def test_an_arena_leaves_no_job_and_no_file_and_says_what_was_late(tmp_path):
    arena = Arena(tmp_path / "here", "tp2", tmp_path)
    jobs = [arena.start(), arena.start(), arena._job(None)]
    arena.leave()
    assert [job.stopped for job in jobs] == [1, 1, 1]
    assert not arena.folder.exists()
    assert (arena.took(2.0, 2.0), arena.late) == ("2.0 s", "")
    assert arena.took(2.06, 2.0) == "2.1 s"
    assert arena.late == "late: 2 s are promised"


def test_a_job_ends_with_the_process_that_watches_it_if_that_is_killed(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the child has no need of
        pid = os.fork()
    if pid == 0:
        _job(tmp_path, WAITS)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    _until(lambda: not marked(f"TMPDIR={tmp_path / 'tmp'}\0"))
