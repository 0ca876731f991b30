"""Real jobs: what they print, where they listen, how they end (faults: `test_trials`)."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.gpus import pretend_gpus
from support.pretend_nccl import _Options

from warpweave.checkpoint import CheckpointError, open_latest
from warpweave.launch import Session, _loopback_listener, _store, join
from warpweave.parallel.mesh import Mesh
from warpweave.trials.job import ranks_among

ROOT = Path(__file__).parent.parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
WAIT = 600.0  # seconds, on a machine that does much else


_C = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """In a new process: SIGKILL when the one that started it ends, even by SIGKILL (Linux)."""
    _C.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Job:
    """A training job in a process group of its own, as a shell would start it.

    It ends with this process, and its ranks end with it.
    """

    def __init__(self, folder: Path, *options: str, command: tuple[str, ...] = ()) -> None:
        text = folder / "text"
        text.write_bytes(b" ".join(b"%d" % (i * i % 977) for i in range(1500)))
        self.out = folder / "run"
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        self.temporary, self.ours = folder / "tmp", not command
        self.temporary.mkdir()
        sizes = "--model toy --layers 2 --width 16 --heads 2 --seq-len 16 --batch 2 --sample 4"
        files = ("--data", text, "--out", self.out, "--warmup", "1")
        command = command or (sys.executable, "-P", "-m", "warpweave.cli", "train")
        with self.stdout.open("w") as out, self.stderr.open("w") as err:
            self.process = subprocess.Popen(
                [*command, *sizes.split(), *files, *options],
                cwd=ROOT,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
            )

    def members(self) -> list[int]:
        """Every living process of the job, in whichever process group."""
        return sorted(_marked(f"TMPDIR={self.temporary}"))

    def ranks(self) -> list[int]:
        """The ranks' processes, in the order in which they were started."""
        others = [p for p in self.members() if p != self.process.pid]
        if self.ours:
            return ranks_among(others)
        return [p for p in others if b"warpweave.train" in Path(f"/proc/{p}/cmdline").read_bytes()]

    def tell_ranks(self, number: signal.Signals) -> None:
        """Send a signal to every rank."""
        for pid in self.ranks():
            os.kill(pid, number)

    def listening(self) -> set[str]:
        """Addresses (hexadecimal) on which any process of the job listens."""
        sockets = set()
        for pid in self.members():
            try:
                links = [os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir()]
            except OSError:
                continue
            sockets |= {name[8:-1] for name in links if name.startswith("socket:[")}
        rows = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        ]
        return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT
        while not what():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline, self.stderr.read_text()
            time.sleep(0.05)

    def steps(self) -> int:
        """Steps done so far."""
        path = self.out / "metrics.jsonl"
        return path.read_text().count('"loss"') if path.exists() else 0

    def end(self) -> tuple[int, list[str], str]:
        """Exit code, lines of stdout, and what was said on stderr; nothing is left behind."""
        code = self.process.wait(WAIT)
        self.leave()
        if self.ours:  # torchrun leaves a folder of its own
            assert [*self.temporary.iterdir()] == []
        return code, self.stdout.read_text().splitlines(), self.stderr.read_text()

    def leave(self, seconds: float = 5.0) -> None:
        """Nobody is left soon (Python's resource tracker ends when it sees the others gone)."""
        deadline = time.monotonic() + seconds
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []

    def stop(self) -> None:
        """Leave nothing running, whatever the test found."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def job(tmp_path):
    jobs: list[Job] = []

    def start(*options: str, name: str = "job", **more) -> Job:
        (tmp_path / name).mkdir()
        jobs.append(Job(tmp_path / name, *options, **more))
        return jobs[-1]

    yield start
    for each in jobs:
        each.stop()


def _said(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("warpweave: ")]


def _noise(stderr: str) -> list[str]:
    """What stderr holds beside our own lines and the progress bar."""
    lines = [line for line in stderr.replace("\r", "\n").splitlines() if line.strip()]
    return [x for x in lines if not x.startswith("warpweave: ") and "step" not in x.split("|")[-1]]


def _losses(job: Job) -> list[float]:
    rows = [json.loads(line) for line in (job.out / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("val_loss")) for row in rows]


LONG = ("--steps", "100000", "--save-every", "1", "--keep", "2", "--eval-every", "0")


def _spare_port() -> int:
    """A port where nobody listens, below those that the system gives to connections."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first - 8192, first), 64):
        with contextlib.suppress(OSError), _loopback_listener(port):
            return port
    raise OSError("64 ports are all taken")


@LINUX
def test_one_command_trains_on_a_mesh_and_torchruns_of_two_nodes_train_the_same(job, tmp_path):
    options = ("--pp", "2", "--microbatches", "2", "--steps", "4", "--zero", "2")
    ours = job(*options)
    heard: set[str] = set()

    def listen() -> bool:
        heard.update(ours.listening())
        return ours.process.poll() is not None or ours.steps() >= 3

    ours.wait_for(listen)
    code, out, err = ours.end()
    assert code == 0, err
    assert heard <= {"0100007F", "0" * 24 + "01000000"}, "listens beyond loopback"
    assert "0100007F" in heard
    result = json.loads(out[-1])
    assert list(result) == ["val_loss", "steps", "stopped", "tokens_per_second", "mesh", "zero",
                            "checkpoint", "plot"]  # fmt: skip
    assert result["mesh"] == {"dp": 1, "cp": 1, "tp": 1, "pp": 2, "ulysses": 1, "dp_shard": None,
                              "outer": 1}  # fmt: skip
    assert (result["steps"], result["zero"], result["stopped"]) == (4, 2, False)
    assert 4 < result["val_loss"] < 7
    assert Path(result["plot"]).read_bytes().startswith(b"\x89PNG")
    assert open_latest(ours.out / "checkpoints").path == Path(result["checkpoint"])
    assert "--- sample ---" in out
    peaks = next(line for line in out if line.startswith("peak memory per rank: "))
    assert peaks.count("MiB") == 2
    assert len(_said(err)) == 1
    assert re.search(
        r"2 ranks \(cpu.*, gloo\), dp=1 tp=1 cp=1 pp=2, ZeRO 2, 1f1b with 2 micro-"
        r"batches of 2; [\d,]+ parameters in fp32, 64 tokens per step$",
        _said(err)[0],
    )
    assert "loss=" in err
    assert _noise(err) == []

    # The repository's root is on these ones' path, with its folders named kernels and parallel.
    port, nodes = str(_spare_port()), []
    for node in ("0", "1"):
        where = ("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", node,
                 "--master-addr", "127.0.0.1", "--master-port", port)  # fmt: skip
        runner = (sys.executable, "-m", "torch.distributed.run", *where, "-m", "warpweave.train")
        shared = ("--out", str(tmp_path / "shared"))
        nodes.append(job(*options, *shared, name=f"node{node}", command=runner))
    ends = [node.end() for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert json.loads(ends[0][1][-1])["val_loss"] == result["val_loss"]
    nodes[0].out = tmp_path / "shared"
    assert _losses(nodes[0]) == _losses(ours)
    assert ends[1][1] == []  # the second node's ranks have nothing to say


def _torchrun(ranks: int, *options: str) -> tuple[str, ...]:
    """The command of a run under torchrun."""
    torch = (sys.executable, "-P", "-m", "torch.distributed.run")
    return (*torch, "--nproc-per-node", str(ranks), *options, "-m", "warpweave.train")


@LINUX
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("command", [(), _torchrun(2)], ids=["ours", "torchrun"])
def test_a_stop_that_comes_twice_saves_and_leaves_nobody(job, first, command):
    """A doubled Ctrl-C; a closed terminal, and then ``timeout``."""
    run = job("--steps", "100000", "--eval-every", "0", "--dp", "2", command=command)
    run.wait_for(lambda: run.steps() >= 3)
    os.killpg(run.process.pid, first)
    time.sleep(0.3)
    if run.ours:  # torchrun takes a second one for another matter, and has ended its own wait
        os.killpg(run.process.pid, signal.SIGINT)
    code, out, err = run.end()
    result = json.loads(out[-1])
    assert (result["val_loss"], result["stopped"]) == (None, True)
    assert open_latest(run.out / "checkpoints").step == result["steps"] == run.steps()
    assert len(_said(err)) == 1, err
    if run.ours:
        assert code == 128 + first, err
        assert _noise(err) == []


@LINUX
def test_ctrl_c_while_ranks_start_is_quiet(job):
    early = job("--steps", "100000", "--dp", "2", name="early")
    early.wait_for(lambda: len(early.ranks()) == 2)
    os.killpg(early.process.pid, signal.SIGINT)
    code, _, err = early.end()
    assert code == 130, err
    assert _noise(err) == []


RUNS = ("ours", "torchrun", "own store", "early")


def _suite(folder: Path) -> None:
    """What a test does that is killed: three runs that train, a fourth whose ranks just start.

    A rank of torchrun is alone, so that no peer's end is what it notices.
    """
    for name in RUNS:
        (folder / name).mkdir()
    ours = Job(folder / "ours", *LONG, "--tp", "2")
    runner = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1")
    theirs = Job(folder / "torchrun", *LONG, command=(*runner, "-m", "warpweave.train"))
    # Where a rank keeps the store instead of torchrun, no rank loses a connection with it. torchrun
    # names a port that was free a while ago, and a connection of others may have taken it since.
    apart = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *runner, "--standalone", "--no-python")
    rank = ("env", f"MASTER_PORT={_spare_port()}", sys.executable, "-m", "warpweave.train")
    own = Job(folder / "own store", *LONG, command=(*apart, *rank))
    for run in (ours, theirs, own):
        run.wait_for(lambda run=run: run.steps() >= 2)
        run.tell_ranks(signal.SIGSTOP)  # and they stay so
    early = Job(folder / "early", *LONG, "--tp", "2")
    early.wait_for(lambda: len(early.ranks()) == 2)
    print("ready", flush=True)
    time.sleep(600)


def _marked(mark: str) -> list[int]:
    """Living processes with `mark` in the environment they were started with."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:  # a zombie's environment is empty
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:  # another user's, or gone
            continue
    return found


@LINUX
def test_a_killed_suite_leaves_no_run_behind(tmp_path):
    mark = f"STARTED_BY={tmp_path}"
    code = f"import test_launch as t; t._suite(t.Path({str(tmp_path)!r}))"
    suite = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "STARTED_BY": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    try:
        with suite.stdout:
            assert suite.stdout.readline() == b"ready\n"
        assert len(_marked(mark)) >= 11  # four launchers, six ranks and the suite
        suite.kill()
        deadline = time.monotonic() + WAIT
        while _marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [(p, Path(f"/proc/{p}/cmdline").read_bytes()) for p in _marked(mark)]
        said = [(tmp_path / name / "stderr").read_text() for name in RUNS]
        assert left == [], said
    finally:
        suite.kill()
        suite.wait()
        for pid in _marked(mark):
            os.kill(pid, signal.SIGKILL)


@LINUX
def test_a_refused_resume_ends_with_2_and_one_line(job):
    first = job("--steps", "1", "--eval-every", "0")
    assert first.end()[0] == 0
    before = sorted((path, path.stat().st_mtime_ns) for path in first.out.rglob("*"))
    options = ("--resume", "--seed", "3", "--out", str(first.out))
    for ranks in ("1", "2"):
        code, out, err = job(*options, "--tp", ranks, name=f"tp{ranks}").end()
        assert (code, out, len(_said(err)), _noise(err)) == (2, [], 1, []), err
        assert _said(err)[0].endswith("step_00000001 was trained with seed 0, now 3")
    assert sorted((path, path.stat().st_mtime_ns) for path in first.out.rglob("*")) == before


# -------------------------------------------------------------------------- who says what


def _sessions(world: int) -> list[Session]:
    store = dist.HashStore()
    mesh = Mesh(tp=world)
    return [Session(torch.device("cpu"), r, world, store, 9.0, mesh) for r in range(world)]


LOST = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:12345"


def test_the_cause_speaks_and_those_that_lost_it_stay_silent():
    first, second, third = _sessions(3)
    assert first.explain(TypeError("no\n such thing")) == (
        "rank 0 (tp=0) failed: TypeError: no such thing"
    )
    assert second.explain(RuntimeError(LOST)) is None
    assert third.explain(ValueError("late")) is None


def test_an_error_of_all_ranks_is_said_once_and_blames_nobody():
    sessions = _sessions(3)
    error = CheckpointError("/runs/gloo Connection/x is damaged")  # a path that looks like a loss
    said = [s.explain(error, (CheckpointError,)) for s in sessions]
    assert said == [str(error), None, None]


def test_a_rank_that_said_why_leaves_no_blame_for_those_that_had_not_yet(monkeypatch):
    monkeypatch.setattr("warpweave.heartbeat.SILENCE", 0.3)
    first, second, _ = _sessions(3)  # the third one is silent
    assert second.explain(TypeError("no")) == "rank 1 (tp=1) failed: TypeError: no"
    assert first.explain(RuntimeError(LOST)) is None


def test_silent_ranks_are_named_with_their_last_word(monkeypatch):
    monkeypatch.setattr("warpweave.heartbeat.SILENCE", 0.3)
    sessions = _sessions(4)
    sessions[2].beat(7, "saving")
    for rank in (1, 3):
        sessions[rank].store.set(f"failed/{rank}", "lost")
    said = sessions[1].explain(RuntimeError(LOST))
    assert re.fullmatch(
        r"no word from rank 0 \(tp=0\): it died or hangs before its first step; no word from "
        r"rank 2 \(tp=2\): it died or hangs, last seen at step 7 \(saving\), \d+\.\d s ago", said
    )  # fmt: skip
    assert sessions[3].explain(RuntimeError(LOST)) is None


def test_a_single_process_speaks_for_itself():
    alone = Session(torch.device("cpu"), 0, 1, None, 9.0, Mesh())
    assert alone.explain(KeyError("x")) == "KeyError: 'x'"
    assert alone.explain(ValueError("two\nlines")) == "two lines"


def _environment(monkeypatch):
    """Rank 3 of 4, the second one on its machine."""
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("tp", [2, 8])
def test_as_many_ranks_as_the_mesh_needs_are_wanted(monkeypatch, tp):
    _environment(monkeypatch)
    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match=rf"tp={tp} x pp=1 needs {tp} ranks"):
        join(Mesh(tp=tp))
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("gpus", "asked", "backend", "device", "where"),
    [
        (2, None, "nccl", "cuda:1", "H, nccl"),
        (1, None, "nccl", "cuda:0", "H, nccl"),  # each rank is shown its own, as SLURM may
        (2, "gloo", "gloo", "cpu", "cpu, gloo"),
        (0, None, "gloo", "cpu", "cpu, gloo"),
    ],
)
def test_a_gpu_for_every_local_rank_means_nccl(monkeypatch, gpus, asked, backend, device, where):
    """The choice alone: CUDA's answers are made up and nothing is connected."""
    groups = []
    _environment(monkeypatch)
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    chosen = pretend_gpus(monkeypatch, gpus)
    store = dist.HashStore()
    for rank in (0, 1, 2):
        name = "H" if backend == "nccl" else "cpu"
        store.set(f"device/{rank}", json.dumps({"name": name, "uuid": f"of {rank}"}))
    monkeypatch.setattr("warpweave.launch._store", lambda *args: store)
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: groups.append((a, k)))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    session = join(Mesh(tp=2, pp=2), backend=asked)
    if backend == "gloo" and sys.platform == "linux":
        assert torch.get_num_threads() == 4  # of 8 cores, with another rank on this machine
    torch.set_num_threads(threads)
    assert (str(session.device), session.where) == (device, where)
    assert chosen == ([session.device] if backend == "nccl" else [])
    ((name,), options) = groups[0]
    assert (name, options["rank"], options["world_size"]) == (backend, 3, 4)
    assert options["device_id"] == (session.device if backend == "nccl" else None)
    blocks = options["pg_options"] and options["pg_options"].config.max_ctas
    assert blocks == (16 if backend == "nccl" else None)  # as many as kernels leave free


@pytest.mark.parametrize("port", [None, 1])
def test_ranks_that_cannot_compute_together_say_so_before_they_connect(monkeypatch, port):
    """Under torchrun as an error of all ranks alike, under `launch` in the line that it says."""
    _environment(monkeypatch)
    monkeypatch.setattr("warpweave.launch.end_with_parent", lambda: None)
    pretend_gpus(monkeypatch, 2)
    store = dist.HashStore()
    for rank, uuid in enumerate(("0", "1", "2")):
        store.set(f"device/{rank}", json.dumps({"name": "H", "uuid": uuid}))
    monkeypatch.setattr("warpweave.launch._store", lambda *args: store)
    monkeypatch.setattr(dist, "init_process_group", None)
    line = "ranks 1, 3 are shown one GPU (1)"
    with pytest.raises(ValueError if port is None else SystemExit) as end:
        join(Mesh(tp=2, pp=2), port=port)
    if port is None:
        assert line in str(end.value)
    else:
        assert end.value.code == 2
        assert store.check(["verdict"])
        assert line in store.get("verdict").decode()


def test_ranks_that_torchrun_starts_again_do_not_read_what_the_dead_wrote(monkeypatch):
    kept = dist.HashStore()
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **options: kept)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = _store(1, 4, 2, timedelta(seconds=1))
        assert not store.check(["address"])
        store.set("address", "here")


def test_free_ports_differ_and_a_taken_one_is_named():
    with _loopback_listener(0) as a, _loopback_listener(0) as b:
        assert a.getsockname()[0] == b.getsockname()[0] == "127.0.0.1"
        taken = a.getsockname()[1]
        assert taken != b.getsockname()[1]
        with pytest.raises(OSError, match=f"store cannot listen on 127.0.0.1:{taken}: "):
            _loopback_listener(taken)
