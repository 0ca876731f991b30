"""Processes of a run: forked or new, they have this process's environment and end with it."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy.random  # numpy 2 imports it at its first use
import pytest

from warpweave.launch import processes
from warpweave.launch.interrupt import STOPS
from warpweave.launch.processes import Forked, Processes, environment, import_for_good

MODULE = __name__


@pytest.fixture(scope="module")
def started():
    with environment(OLD="of the server"):
        first, second = Processes("warpweave.launch.session"), Processes()
    with first as forked, second as spawned:  # as ranks are, and new interpreters
        yield {"forked": forked, "spawned": spawned}


def _tells(path: Path) -> None:
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    told = {name: os.environ.get(name) for name in ("TOLD", "OLD")}
    path.write_text(json.dumps(told | {"blocked": blocked, "pid": os.getpid()}))


def _exits(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _sleeps(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(600)


def _raises() -> None:
    raise RuntimeError("planted")


def _has_children(path: Path) -> None:
    """Start two that outlive it, and keep its open files."""
    children = []
    for _ in range(2):
        children.append(os.fork())
        if not children[-1]:
            time.sleep(300)
            os._exit(0)
    path.write_text(" ".join(map(str, children)))
    os._exit(3)


def _wait_for(what, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["forked", "spawned"])
def test_a_process_has_the_environment_of_its_start_and_waits_with_signals(started, how, tmp_path):
    with environment(OLD="x", TOLD="first"):
        first = started[how].start(_tells, tmp_path / "first")
    with environment(TOLD="second"):
        second = started[how].start(_tells, tmp_path / "second")
    for process, name, old in ((first, "first", "x"), (second, "second", None)):
        process.join()
        assert process.exitcode == 0
        found = json.loads((tmp_path / name).read_text())
        assert (found["TOLD"], found["OLD"], found["pid"]) == (name, old, process.pid)
        assert set(STOPS) <= set(found["blocked"])
    assert not set(STOPS) & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ranks_are_forked_whatever_threads_numpy_would_start(monkeypatch):
    """OMP_NUM_THREADS, which is set in all other tests, would prevent those threads."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    with Processes("warpweave.train.command") as forked:
        process = forked.start(_exits, 0)
        assert isinstance(process, Forked)
        process.join()


@pytest.mark.parametrize("how", ["forked", "spawned"])
def test_how_each_ended_is_known_in_any_order(started, how):
    codes = [0, 3, -9, -6, 255]
    several = [started[how].start(_exits, code) for code in codes]
    broken = started[how].start(_raises)
    for process in reversed(several):
        process.join()
    assert [process.exitcode for process in several] == codes
    broken.join()
    assert broken.exitcode == 1


@pytest.mark.parametrize("how", ["forked", "spawned"])
def test_waiting_ends_with_a_process_or_in_time(started, how, tmp_path):
    started[how].end()  # of other tests: their ends would be reported here
    sleeper = started[how].start(_sleeps, tmp_path / "pid")
    _wait_for(lambda: (tmp_path / "pid").exists())
    began = time.monotonic()
    sleeper.join(0.2)
    started[how].wait(0.2)
    assert time.monotonic() > began + 0.4
    assert sleeper.exitcode is None
    os.kill(sleeper.pid, signal.SIGKILL)
    while sleeper.exitcode is None:
        assert time.monotonic() < began + 60
        started[how].wait(60.0)
    assert sleeper.exitcode == -signal.SIGKILL
    sleeper.kill()  # nothing else is hit
    started[how].start(_exits, 0).join()  # its end is also one since the last call
    began = time.monotonic()
    started[how].wait(60.0)
    assert time.monotonic() < began + 60
    started[how].wait(0.2)  # the end of both is known
    assert time.monotonic() > began + 0.2
    started[how].end()
    assert started[how].started == []


@pytest.mark.parametrize("how", ["forked", "spawned"])
def test_a_stop_waits_until_a_process_listens(started, how, tmp_path):
    process = started[how].start(_listens, tmp_path / "there", tmp_path / "listen")
    _wait_for(lambda: (tmp_path / "there").exists())
    process.terminate()
    process.join(0.3)
    assert process.exitcode is None
    (tmp_path / "listen").touch()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def _listens(there: Path, listen: Path) -> None:
    there.touch()
    _wait_for(listen.exists)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def test_an_end_is_noticed_though_children_of_the_process_live_on(tmp_path):
    with Processes(MODULE) as forked:
        parent = forked.start(_has_children, tmp_path / "pids")
        parent.join(60.0)
        assert parent.exitcode == 3
    children = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(_alive, children))  # the server does not wait for them to end
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def test_if_the_fork_server_is_killed_all_are_and_another_takes_its_place(tmp_path):
    with Processes(MODULE) as forked:
        sleeper = forked.start(_sleeps, tmp_path / "pid")
        sleeper.server.kill()
        forked.wait(60.0)
        assert sleeper.exitcode == -signal.SIGKILL
        _wait_for(lambda: not _alive(sleeper.pid))
        again = forked.start(_exits, 5)
        assert isinstance(again, Forked)
        again.join()
        assert again.exitcode == 5


def test_a_stopped_fork_server_does_not_keep_an_end_waiting(tmp_path):
    with Processes(MODULE) as forked:
        sleeper = forked.start(_sleeps, tmp_path / "pid")
        _wait_for(lambda: (tmp_path / "pid").exists())
        os.kill(sleeper.server.pid, signal.SIGSTOP)
    assert sleeper.exitcode == -signal.SIGKILL
    assert not _alive(sleeper.pid)


def test_exit_codes_are_known_although_the_parent_ignores_sigchld():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        forked = Processes(MODULE)  # inherits that setting
    finally:
        signal.signal(signal.SIGCHLD, before)
    with forked:
        several = [forked.start(_exits, code) for code in (3, 0)]
        for process in several:
            process.join(20.0)
        assert [process.exitcode for process in several] == [3, 0]


def test_what_cannot_be_started_fails_alone(started):
    """The server and the processes that it has forked continue."""
    fine = started["forked"].start(_exits, 4)
    wrong = started["forked"].start(_exits, _Broken())
    for process, code in ((wrong, 1), (fine, 4)):
        process.join()
        assert process.exitcode == code


class _Broken:
    """An object that cannot be unpickled."""

    def __reduce__(self):
        return _raises, ()


def test_a_module_with_threads_is_not_forked_from(tmp_path, monkeypatch):
    (tmp_path / "with_a_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Processes("with_a_thread") as new:
        process = new.start(_exits, 6)
        assert isinstance(process, BaseProcess)
        process.join()
        assert process.exitcode == 6


def test_each_forked_process_draws_numbers_of_its_own(tmp_path):
    with Processes(MODULE) as forked:
        for name in ("a", "b"):
            forked.start(_draws, tmp_path / name).join()
    first, second = ((tmp_path / name).read_text().split() for name in ("a", "b"))
    assert all(a != b for a, b in zip(first, second, strict=True))


def _draws(path: Path) -> None:
    path.write_text(f"{random.random()} {numpy.random.rand()}")


def test_a_fork_server_that_dies_while_it_imports_ends_the_start(tmp_path, monkeypatch, capfd):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('planted')")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        Processes("broken_module") as new,
        pytest.raises(ChildProcessError, match="the process that forks ranks has ended"),
    ):
        new.start(_exits, 0)
    assert "RuntimeError: planted" in capfd.readouterr().err


@pytest.mark.parametrize("module", [MODULE, None])
@pytest.mark.parametrize("number", [None, signal.SIGSTOP])
def test_none_outlives_a_killed_parent_stopped_or_not(module, number, tmp_path):
    program = (
        "import pathlib, sys, time; sys.path.insert(0, sys.argv[1])\n"
        "import test_processes as t\n"
        "from warpweave.launch.processes import Processes\n"
        "if __name__ == '__main__':\n"
        f"    with Processes({module!r}) as some:\n"
        "        some.start(t._sleeps, pathlib.Path(sys.argv[2]))\n"
        "        time.sleep(600)\n"
    )
    (tmp_path / "program.py").write_text(program)
    args = [tmp_path / "program.py", Path(__file__).parent, tmp_path / "pid"]
    parent = subprocess.Popen([sys.executable, *map(str, args)], env=os.environ | _paths())
    _wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    if number is not None:
        os.kill(pid, number)
    parent.kill()
    parent.wait()
    _wait_for(lambda: not _alive(pid), 5.0)


def _paths() -> dict[str, str]:
    support = Path(__file__).parent / "support"
    return {"PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize(("early", "shuts"), [(f"Processes({MODULE!r})", ""), ("None", " shut")])
def test_what_has_only_started_ranks_ends_without_the_interpreters_shutdown(early, shuts):
    program = (
        "import atexit, sys\n"
        "from warpweave.launch.processes import Processes, starting\n"
        "if __name__ == '__main__':\n"
        "    atexit.register(lambda: print(' shut', end=''))\n"
        f"    with starting({early}) as given:\n"
        f"        assert (given is None) == {shuts != ''}\n"
        "        print('said', end='')\n"
        "        sys.exit(7)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | _paths(), capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, f"said{shuts}", "")


@pytest.mark.parametrize(("code", "left"), [(7, [7]), (0, [0]), ("words", []), (None, [])])
def test_an_end_in_words_is_the_interpreters_own_which_prints_them(code, left, monkeypatch):
    codes: list = []
    monkeypatch.setattr(processes, "leave", codes.append)
    with pytest.raises(SystemExit) as caught, processes.starting(Processes()):
        sys.exit(code)
    assert (caught.value.code, codes) == (code, left)


def test_what_is_prepared_early_starts_no_ranks_on_gpus():
    """Ranks on GPUs are new interpreters, because torch may have initialized a GPU."""
    with Processes(MODULE) as early:
        assert Processes.of(_exits, "gloo", early) is early
        assert Processes.of(_exits, "nccl", early)._server is None


def test_ranks_are_forked_from_a_process_that_has_the_module_of_their_entry(monkeypatch):
    """A partial counts by its function. On GPUs none is forked, prepared or not."""
    monkeypatch.setattr(processes, "_ForkServer", lambda module: [module])
    given = functools.partial(functools.partial(_exits, 3))
    for entry in (_exits, functools.partial(_exits, 3), given, subprocess.run):
        of = "subprocess" if entry is subprocess.run else MODULE
        assert Processes.of(entry, "gloo", None)._server == [of]
        assert Processes.of(entry, "nccl", None)._server is None


def test_what_is_prepared_early_is_for_ranks_on_the_cpu_that_we_start(monkeypatch, tmp_path):
    made: list[dict] = []
    monkeypatch.setattr(processes, "_ForkServer", lambda module: made.append(dict(os.environ)))
    monkeypatch.setattr(processes, "DRIVER", tmp_path / "none")
    before = dict(os.environ)
    assert isinstance(Processes.early(MODULE), Processes)
    assert made[0]["TORCH_CPP_LOG_LEVEL"] == "FATAL"
    assert dict(os.environ) == before
    with environment(RANK="0", WORLD_SIZE="1"):
        assert Processes.early(MODULE) is None
    for one in ("RANK", "WORLD_SIZE"):  # one alone belongs to something else
        with environment(**{one: "0"}):
            assert isinstance(Processes.early(MODULE), Processes)
    (tmp_path / "none").touch()
    assert Processes.early(MODULE) is None
    assert len(made) == 3


def test_the_garbage_collector_skips_what_is_imported_for_good(tmp_path, monkeypatch) -> None:
    """It does not run during the import, and is afterwards as it was before."""
    (tmp_path / "needed_until_the_end.py").write_text("import gc\nENABLED = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    frozen = gc.get_freeze_count()
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            module = import_for_good("needed_until_the_end")
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
        assert not module.ENABLED
        assert module is import_for_good("needed_until_the_end")
        del sys.modules["needed_until_the_end"]
    assert gc.get_freeze_count() > frozen
    with pytest.raises(ModuleNotFoundError):
        import_for_good("no_such_module")
    assert gc.isenabled()
