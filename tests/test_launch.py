"""Real jobs: their output, the addresses they listen on, and how they end (faults:
`tests/faults`)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from jobs import TINY, TrainingJob, marked
from ranks import QuickProcesses
from support.gpus import pretend_gpus
from support.pretend_nccl import _Options
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from warpweave.checkpoint import CheckpointError, open_latest
from warpweave.cli.messages import refusing
from warpweave.launch.session import Session, _store, join
from warpweave.launch.supervise import loopback_listener
from warpweave.parallel.mesh import Mesh
from warpweave.train import command as train
from warpweave.train.options import parse

ROOT = Path(__file__).parent.parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
WAIT = 600.0  # seconds, on a busy machine


class Job(TrainingJob):
    """A training job started in the repository's root."""

    def __init__(self, folder: Path, *options: str, command: tuple[str, ...] = ()) -> None:
        command = command or (sys.executable, "-P", "-m", "warpweave", "train")
        super().__init__(folder, ("--sample", "4", *options), command=command, cwd=ROOT)


@pytest.fixture
def job(tmp_path):
    jobs: list[Job] = []

    def start(*options: str, name: str = "job", **more) -> Job:
        jobs.append(Job(tmp_path / name, *options, **more))
        return jobs[-1]

    yield start
    for each in jobs:
        each.stop()


def _noise(stderr: str) -> list[str]:
    """Return the lines of stderr other than our own and the progress bar."""
    lines = [line for line in stderr.replace("\r", "\n").splitlines() if line.strip()]
    return [x for x in lines if not x.startswith("warpweave: ") and "step" not in x.split("|")[-1]]


def _losses(job: Job) -> list[float]:
    return [row.get("loss", row.get("val_loss")) for row in job.rows()]


LONG = ("--steps", "100000", "--save-every", "1", "--keep", "2", "--eval-every", "0")


def _spare_port() -> int:
    """Return a port with no listener, below those that the system assigns to connections."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first - 8192, first), 64):
        with contextlib.suppress(OSError), loopback_listener(port):
            return port
    raise OSError("64 ports are all taken")


@LINUX
def test_one_command_trains_on_a_mesh_and_two_torchrun_nodes_train_the_same(job, tmp_path):
    options = ("--pp", "2", "--microbatches", "2", "--steps", "4", "--zero", "2", "--dtype", "fp64")
    ours = job(*options)
    heard: set[str] = set()

    def listen() -> bool:
        if ours.out.exists():
            heard.update(ours.listening())
        return ours.process.poll() is not None or ours.steps() >= 3

    ours.wait_for(listen)
    _, result, out, err, _ = end = ours.end(0)
    assert "0100007F" in heard
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
    idle, ranks, evaluated = end.said
    assert "zero = 2 has no effect" in idle
    assert f"step 4: validation loss {result['val_loss']}" in evaluated
    assert re.search(
        r"2 ranks \(cpu.*, gloo\), dp=1 tp=1 cp=1 pp=2, ZeRO 2, 1f1b with 2 micro-"
        r"batches of 2; [\d,]+ parameters in fp64, 64 tokens per step$",
        ranks,
    )
    assert "loss=" in err
    assert _noise(err) == []

    # The path of these processes has the repository's root, with its folders named kernels and
    # parallel.
    port, nodes = str(_spare_port()), []
    for node in ("0", "1"):
        where = ("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", node,
                 "--master-addr", "127.0.0.1", "--master-port", port)  # fmt: skip
        runner = (sys.executable, "-m", "torch.distributed.run", *where, "-m", "warpweave.train")
        shared = ("--out", str(tmp_path / "shared"))
        nodes.append(job(*options, *shared, name=f"node{node}", command=runner))
    ends = [node.end(0) for node in nodes]
    assert ends[0].result["val_loss"] == result["val_loss"]
    nodes[0].out = tmp_path / "shared"
    # Not to the bit: where a process has its memory may decide how a library adds.
    assert _losses(nodes[0]) == pytest.approx(_losses(ours), rel=1e-10)
    assert ends[1].stdout == []  # the second node's ranks print nothing


def _torchrun(ranks: int, *options: str) -> tuple[str, ...]:
    """Return the command of a run under torchrun."""
    torch = (sys.executable, "-P", "-m", "torch.distributed.run")
    return (*torch, "--nproc-per-node", str(ranks), *options, "-m", "warpweave.train")


@LINUX
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 2), (signal.SIGHUP, 1)])
def test_a_stop_under_torchrun_saves_and_leaves_nobody(job, number, ranks):
    """`tests/faults/test_stops.py` stops our own command."""
    options = ("--steps", "100000", "--eval-every", "0", "--dp", str(ranks))
    run = job(*options, command=_torchrun(ranks))
    run.wait_for(lambda: run.steps() >= 3)
    os.killpg(run.process.pid, number)
    end = run.end()
    assert (end.result["val_loss"], end.result["stopped"]) == (None, True)
    assert open_latest(run.out / "checkpoints").step == end.result["steps"] == run.steps()
    _, saved = end.said
    assert f"saved step {end.result['steps']}; continue with --resume" in saved


@LINUX
def test_ctrl_c_while_ranks_start_is_quiet(job):
    early = job("--steps", "100000", "--dp", "2", name="early")
    early.wait_for(lambda: len(early.ranks()) == 2)
    os.killpg(early.process.pid, signal.SIGINT)
    assert _noise(early.end(130).stderr) == []


RUNS = ("own store", "early")


def _suite(folder: Path) -> None:
    """Act as a test that is killed: start torchrun with a stopped rank, and our own command whose
    ranks are just starting.

    The torchrun rank is alone and hosts the store itself, so it notices neither a peer's end nor
    torchrun's. `tests/faults/test_deaths.py` kills our launchers.
    """
    os.environ["STARTED_BY"] = str(folder)
    # torchrun picks a port that was free a while ago; another connection may have taken it.
    runner = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1")
    apart = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *runner, "--standalone", "--no-python")
    rank = ("env", f"MASTER_PORT={_spare_port()}", sys.executable, "-m", "warpweave.train")
    own = Job(folder / "own store", *LONG, command=(*apart, *rank))
    early = Job(folder / "early", *LONG, "--tp", "2")
    own.wait_for(lambda: own.steps() >= 2)
    for rank in own.ranks():
        os.kill(rank, signal.SIGSTOP)  # and it stays stopped
    early.wait_for(lambda: len(early.ranks()) == 2)
    (folder / "ready").touch()
    time.sleep(600)


@LINUX
def test_a_killed_suite_leaves_no_run_behind(tmp_path):
    mark = f"STARTED_BY={tmp_path}"
    suite = QuickProcesses().start(_suite, tmp_path)
    try:
        deadline = time.monotonic() + WAIT
        while not (tmp_path / "ready").exists():
            assert suite.exitcode is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(marked(mark)) >= 5  # two launchers and three ranks
        suite.kill()
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [(p, Path(f"/proc/{p}/cmdline").read_bytes()) for p in marked(mark)]
        said = [(tmp_path / name / "stderr").read_text() for name in RUNS]
        assert left == [], said
    finally:
        suite.kill()
        suite.join()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def test_a_refused_resume_ends_with_2_and_one_line(tmp_path):
    (tmp_path / "text").write_bytes(b" ".join(b"%d" % (i * i % 977) for i in range(1500)))
    words = f"{TINY} --data {tmp_path}/text --out {tmp_path}/run --eval-every 0".split()
    files = tmp_path / "run"

    def ends(name: str, *more: str) -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr of a run in processes of ours."""
        folder = tmp_path / name
        folder.mkdir()
        with QuickProcesses(folder) as processes:
            if "--tp" in more:
                with pytest.raises(SystemExit) as end:
                    train.run(parse([*words, *more]), processes)
                code = end.value.code
            else:
                alone = processes.start(train.main, [*words, *more])
                alone.join()
                code = alone.exitcode
        return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()

    assert ends("first", "--steps", "1")[0] == 0
    before = sorted((path, path.stat().st_mtime_ns) for path in files.rglob("*"))
    assert files / "checkpoints" / "step_00000001" in [path for path, _ in before]
    again = ("--resume", "--seed", "3")
    for name, more in (("alone", again), ("two", (*again, "--tp", "2"))):
        code, out, err = ends(name, *more)
        assert (code, out, _noise(err)) == (2, "", []), err
        (line,) = filter(None, err.splitlines())
        assert line.startswith("warpweave: ")
        assert line.endswith(
            "step_00000001 was trained with seed 0, but this run has seed 3; pass --seed 0"
        )
    assert sorted((path, path.stat().st_mtime_ns) for path in files.rglob("*")) == before


# -------------------------------------------------------------------------- which rank prints


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
    # a path that looks like a lost connection
    error = CheckpointError("/runs/gloo Connection/x is damaged")
    said = [s.explain(error, (CheckpointError,)) for s in sessions]
    assert said == [str(error), None, None]


def test_a_rank_that_said_why_leaves_no_blame_for_those_that_had_not_yet(monkeypatch):
    monkeypatch.setattr("warpweave.launch.heartbeat.SILENCE", 0.3)
    first, second, _ = _sessions(3)  # the third one is silent
    assert second.explain(TypeError("no")) == "rank 1 (tp=1) failed: TypeError: no"
    assert first.explain(RuntimeError(LOST)) is None


def test_silent_ranks_are_named_with_their_last_word(monkeypatch):
    monkeypatch.setattr("warpweave.launch.heartbeat.SILENCE", 0.3)
    sessions = _sessions(4)
    sessions[2].beat(7, "saving")
    for rank in (1, 3):
        sessions[rank].store.set(f"failed/{rank}", "lost")
    said = sessions[1].explain(RuntimeError(LOST))
    assert re.fullmatch(
        r"no heartbeat from rank 0 \(tp=0\): it died or is hanging before its first step; "
        r"no heartbeat from rank 2 \(tp=2\): it died or is hanging, last seen at step 7 "
        r"\(saving\), \d+\.\d s ago", said,
    )  # fmt: skip
    assert sessions[3].explain(RuntimeError(LOST)) is None


def test_a_single_process_speaks_for_itself():
    alone = Session(torch.device("cpu"), 0, 1, None, 9.0, Mesh())
    assert alone.explain(KeyError("x")) == "KeyError: 'x'"
    assert alone.explain(ValueError("two\nlines")) == "two lines"


PROGRAM = """
from warpweave import Mesh, join

with join(Mesh(), backend="gloo"):
    try:
        raise ValueError("handled")
    except ValueError:
        pass
    raise ValueError("width (3)\\nmust be even")
"""


def test_torchruns_report_ends_with_the_reason_of_a_failure(monkeypatch, tmp_path):
    """Read the file as torchrun does: of a program that raised, and of a refused command."""

    def report() -> str:
        failure = ProcessFailure(0, 7, 1, str(tmp_path / "error.json"))
        return str(ChildFailedError("train.py", {0: failure}))

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: width (3)\nmust be even\n")
    assert "  traceback : ValueError: width (3) must be even\n===" in report()
    with pytest.raises(SystemExit), refusing(OSError):
        raise OSError("no such\nfile")
    assert "  traceback : no such file\n===" in report()


def test_a_session_leaves_its_group_at_the_end_but_not_after_an_error():
    session = Session(torch.device("cpu"), 0, 1, None, 9.0, Mesh())
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with pytest.raises(ValueError, match="planted"), session:
        raise ValueError("planted")
    assert dist.is_initialized()  # its peers may be stuck in it
    with session as entered:
        assert entered is session
    assert not dist.is_initialized()


def _environment(monkeypatch):
    """Set the environment of rank 3 of 4, the second one on its machine."""
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def _others(monkeypatch, name: str, uuid: str) -> dist.HashStore:
    """Make a store in which the other three ranks have written their devices."""
    store = dist.HashStore()
    for rank in range(3):
        device = {"name": name, "uuid": uuid.format(rank)}
        store.set(f"device/{rank}", json.dumps(device))
    monkeypatch.setattr("warpweave.launch.session._store", lambda *args: store)
    return store


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
        (1, None, "nccl", "cuda:0", "H, nccl"),  # each rank sees only its own, as SLURM may arrange
        (2, "gloo", "gloo", "cpu", "cpu, gloo"),
        (0, None, "gloo", "cpu", "cpu, gloo"),
    ],
)
def test_a_gpu_for_every_local_rank_means_nccl(monkeypatch, gpus, asked, backend, device, where):
    """Only the choice is tested: CUDA's answers are faked and nothing is connected."""
    groups = []
    _environment(monkeypatch)
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    chosen = pretend_gpus(monkeypatch, gpus)
    _others(monkeypatch, "H" if backend == "nccl" else "cpu", "of {}")
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: groups.append((a, k)))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    session = join(Mesh(tp=2, pp=2), backend=asked, timeout=77.0)
    session.close()
    if backend == "gloo" and sys.platform == "linux":
        assert torch.get_num_threads() == 4  # 8 cores, with another rank on this machine
    torch.set_num_threads(threads)
    assert (str(session.device), session.where) == (device, where)
    assert chosen == ([session.device] if backend == "nccl" else [])
    ((name,), options) = groups[0]
    assert (name, options["rank"], options["world_size"]) == (backend, 3, 4)
    assert options["timeout"] == timedelta(seconds=77)
    assert options["device_id"] == (session.device if backend == "nccl" else None)
    blocks = options["pg_options"] and options["pg_options"].config.max_ctas
    assert blocks == (16 if backend == "nccl" else None)  # as many as kernels leave free


@pytest.mark.parametrize("port", [None, 1])
def test_ranks_that_cannot_compute_together_say_so_before_they_connect(monkeypatch, port):
    """Under torchrun all ranks raise the same error; under `launch` it is in
    the line that is printed."""
    _environment(monkeypatch)
    monkeypatch.setattr("warpweave.launch.session.end_with_parent", lambda: None)
    pretend_gpus(monkeypatch, 2)
    store = _others(monkeypatch, "H", "{}")
    monkeypatch.setattr(dist, "init_process_group", None)
    line = "ranks 1, 3 share one GPU (1)"
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


def test_an_attempt_goes_on_where_any_before_it_had_begun(monkeypatch):
    for began in range(4):
        kept, told = dist.HashStore(), []
        for attempt in range(4):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
            store = dist.PrefixStore(f"attempt_{attempt}", kept)
            session = Session(torch.device("cpu"), 0, 2, store, 9.0, Mesh(tp=2))
            if attempt == began:
                session.begin()
            told.append(session.goes_on)
        assert told == [attempt > began for attempt in range(4)]


def test_free_ports_differ_and_a_taken_one_is_named():
    with loopback_listener(0) as a, loopback_listener(0) as b:
        assert a.getsockname()[0] == b.getsockname()[0] == "127.0.0.1"
        taken = a.getsockname()[1]
        assert taken != b.getsockname()[1]
        with pytest.raises(OSError, match=f"store cannot listen on 127.0.0.1:{taken}: "):
            loopback_listener(taken)
