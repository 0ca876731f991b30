"""`warpweave.train.timeline`: marks are the times at which actions begin, and the simulated step
uses the measured times of actions."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from threads import run_threads

from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.schedule import FAMILIES, leave_open, one_f_one_b, with_comm, with_reduce
from warpweave.parallel.simulate import simulate
from warpweave.train import timeline as measured
from warpweave.train.timeline import Marked, panels, recording

CONFIG = GPTConfig(vocab_size=19, seq_len=8, layers=2, width=8, heads=2)


def test_the_simulation_takes_the_medians_and_leaves_the_waiting_out() -> None:
    """Two ranks, of which the second is slower, and three micro-batches, the first slow and the
    last fast. The simulation excludes rank 1's waits for messages."""
    lists = with_comm(one_f_one_b(2, 3))
    took = {"F": 1.0, "B": 2.0, "SEND_F": 0.25, "SEND_B": 0.5, "RECV_F": 5.0, "RECV_B": 3.0}
    marks = []
    for actions in lists:
        marks.append([10.0])
        for action in actions:
            usual = took[action.op] * (1 + 2 * action.stage)
            marks[-1].append(marks[-1][-1] + usual * (100.0, 1.0, 0.5)[action.mb])
    found = panels(lists, marks)
    simulated, measured = found.values()
    for row, actions, times in zip(measured.cells, lists, marks):
        assert [(c.action, c.start, c.end) for c in row] == [*zip(actions, times, times[1:])]
    lengths = {c.action: c.end - c.start for row in simulated.cells for c in row}
    for action, length in lengths.items():
        usual = took[action.op] * (1 + 2 * action.stage)
        assert length == pytest.approx(0.0 if "RECV" in action.op else usual)
    first = next(c for c in simulated.cells[1] if c.action.op == "F")
    assert first.start == 1.25  # not 500
    assert simulated.activations == measured.activations


def _run(mesh, path, steps: int) -> list:
    plan = ParallelPlan(microbatches=4, schedule="1f1b")
    engine = Engine(CONFIG, mesh, plan, seed=1, dtype=torch.float64)
    tokens = torch.randint(0, 19, (2, 4, 1, 8), generator=torch.Generator().manual_seed(0))
    before = engine.passes.transport
    losses = []
    for step in range(steps):
        with recording(engine, path, step == steps - 1):
            result = engine.step(*tokens, torch.arange(4)[:, None], lr=0.1)
        assert engine.passes.transport is before
        assert path is None or step == steps - 1 or not path.exists()
        losses.append(float(result.all()[0]))
    return losses


def _rank(rank: int, path) -> list:
    return _run(Mesh(pp=2).connect("cpu"), path, 2)


@pytest.mark.parametrize(
    ("name", "p", "m"), [("pipedream", 3, 2), ("pipedream-vs", 2, 3), ("pipedream-2bw", 3, 3)]
)
def test_a_pass_that_is_left_open_has_both_timelines(name: str, p: int, m: int) -> None:
    """Activations from an earlier pass are present at the start and count as held, as in a run."""
    family = FAMILIES[name]
    run = leave_open(with_reduce(family.make(p, m)), m)
    marks = [[float(at) for at in range(len(row) + 1)] for row in run.steady]
    simulated, measured = panels(run.steady, marks).values()
    whole = simulate(family.make(p, m), {"F": 1, "B": 2})
    for found in (simulated, measured):
        assert (found.activations, found.versions) == (whole.activations, whole.versions)
    done = [c.action for row in simulated.cells for c in row]
    assert sorted(done) == sorted(a for row in run.steady for a in row)


@pytest.mark.parametrize("suffix", ["json", "svg"])
def test_a_step_of_one_rank_is_recorded_and_changes_nothing(tmp_path, suffix) -> None:
    path = tmp_path / f"t.{suffix}"
    assert _run(single(), path, 2) == _run(single(), None, 2)
    assert path.stat().st_size > 1000


def test_two_pipeline_ranks_in_threads(tmp_path) -> None:
    path = tmp_path / "t.json"
    run_threads(2, _rank, path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    for pid in (0, 1):
        for rank in (0, 1):
            own = [e for e in events if (e["pid"], e["tid"]) == (pid, rank)]
            names = [e["name"] for e in sorted(own, key=lambda e: e["ts"]) if e["cat"] in "FBIW"]
            first = ["0F0", "0F1"] if rank == 0 else ["1F0", "1I0", "1W0"]
            assert names[: len(first)] == first
            split = ["F", "I", "W"] if rank else ["F", "B"]  # stage 0 sends no gradient
            assert sorted(names) == sorted(f"{rank}{op}{i}" for op in split for i in range(4))
    waits = [e for e in events if e["cat"] == "RECV_F"]
    assert {e["pid"] for e in waits} == {1}  # the simulated ones take no time
    assert min(e["ts"] for e in events if e["pid"] == 1) == 0


def test_action_time_includes_the_wait_and_the_last_ends_with_the_list(
    monkeypatch,
) -> None:
    """On this clock, waiting for the message of action i takes 5 (i + 1),
    and everything else takes 1."""
    now, reached = [100.0], []
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now[0])

    def reach(rank: int, index: int) -> None:
        reached.append((rank, index))
        now[0] += 5.0 * (index + 1)

    def drive(programs: dict[int, int]) -> None:
        for index in range(programs[2]):
            marked.reach(2, index)
            now[0] += 1.0

    transport = SimpleNamespace(reach=reach, drive=drive, staleness=7)
    marked = Marked(transport, torch.device("cpu"))
    marked.drive({2: 3})
    assert reached == [(2, 0), (2, 1), (2, 2)]
    assert marked.seconds() == [0.0, 6.0, 17.0, 33.0]
    assert marked.staleness == 7  # other attributes are the transport's


def test_marks_on_a_gpu_are_events_that_are_read_once_the_last_has_happened(monkeypatch) -> None:
    """Uses fake events, each 2 ms after the one before."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = None

        def record(self) -> None:
            self.at = 2.0 * log.count("record")
            log.append("record")

        def synchronize(self) -> None:
            log.append(f"wait for {self.at}")

        def elapsed_time(self, other) -> float:
            log.append("read")
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    transport = SimpleNamespace(reach=lambda *_: None, drive=lambda programs: None)
    marked = Marked(transport, torch.device("cuda"))
    for index in range(3):
        marked.reach(0, index)
    marked.drive({})
    assert marked.seconds() == pytest.approx([0.0, 0.002, 0.004, 0.006])
    assert log == [*["record"] * 4, "wait for 6.0", *["read"] * 4]


def test_a_step_that_fails_leaves_the_transport_and_no_file(tmp_path) -> None:
    passes = SimpleNamespace(transport=object())
    engine, before = SimpleNamespace(passes=passes, device=torch.device("cpu")), passes.transport

    def fails() -> None:
        with recording(engine, tmp_path / "t.json"):
            assert passes.transport is not before
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert passes.transport is before
    assert not list(tmp_path.iterdir())


def _replica(rank: int, path) -> None:
    engine = Engine(CONFIG, Mesh(dp=2, pp=2).connect("cpu"), ParallelPlan(microbatches=2))
    tokens = torch.zeros(2, 2, 1, 8, dtype=torch.int64)
    with recording(engine, path):
        engine.step(*tokens, torch.arange(2)[:, None], lr=0.1)


def test_of_several_replicas_the_first_rank_writes_its_pipelines_timeline(
    monkeypatch, tmp_path
) -> None:
    wrote = []
    monkeypatch.setattr(
        measured,
        "write_timeline",
        lambda path, found: wrote.append((dist.get_rank(), path, *map(len, _cells(found)))),
    )
    run_threads(4, _replica, tmp_path / "t.svg")
    assert wrote == [(0, tmp_path / "t.svg", 2, 2)]


def _cells(found: dict) -> list:
    return [timeline.cells for timeline in found.values()]
