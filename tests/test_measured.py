"""`warpweave.train.timeline`: marks are the times at which actions begin, and the simulated step
uses the measured times of actions."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from threads import run_threads

from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.pipeline import InProcess, ModuleStage, execute
from warpweave.parallel.schedule import FAMILIES, leave_open, one_f_one_b, with_comm, with_reduce
from warpweave.parallel.schedule.actions import Action
from warpweave.parallel.simulate import simulate
from warpweave.train import timeline as measured
from warpweave.train.timeline import Marks, panels, write_measured

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
    losses = []
    for step in range(steps):
        marks = Marks(engine.device) if path is not None and step == steps - 1 else None
        result = engine.step(*tokens, torch.arange(4)[:, None], lr=0.1, on_action=marks)
        losses.append(float(result.all()[0]))
        if marks is not None:
            write_measured(engine, marks, path)
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


def test_on_action_is_called_before_each_action_and_at_the_end() -> None:
    lists = with_comm(one_f_one_b(2, 1))
    like = (1, 2), torch.float32, torch.device("cpu")
    log: list[object] = []

    class Logged(InProcess):
        def send(self, link, action, tensor) -> None:
            log.append(action)
            super().send(link, action, tensor)

    stages = {
        0: ModuleStage(torch.nn.Linear(2, 2), inputs=lambda mb: torch.ones(1, 2)),
        1: ModuleStage(torch.nn.Linear(2, 2), like=like, loss=lambda mb, y: y.sum()),
    }
    for stage in (0, 1):
        forward = lambda *_, s=stage: log.append(Action("F", s, 0))  # noqa: E731
        stages[stage].module.register_forward_hook(forward)
    execute(lists, stages, Logged(), on_action=lambda rank, index: log.append((rank, index)))
    own = [(rank, at) for rank, row in enumerate(lists) for at in range(len(row) + 1)]
    assert sorted(entry for entry in log if entry in own) == own
    assert log[-2:] == [(rank, len(row)) for rank, row in enumerate(lists)]
    for at, entry in enumerate(log):
        if isinstance(entry, Action):
            rank, index = log[at - 1]
            assert lists[rank][index][:3] == entry[:3]


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
    marks = Marks(torch.device("cuda"))
    for index in range(4):
        marks(0, index)
    assert marks.seconds() == pytest.approx([0.0, 0.002, 0.004, 0.006])
    assert log == [*["record"] * 4, "wait for 6.0", *["read"] * 4]


def _replica(rank: int, path) -> None:
    engine = Engine(CONFIG, Mesh(dp=2, pp=2).connect("cpu"), ParallelPlan(microbatches=2))
    tokens = torch.zeros(2, 2, 1, 8, dtype=torch.int64)
    marks = Marks(engine.device)
    engine.step(*tokens, torch.arange(2)[:, None], lr=0.1, on_action=marks)
    write_measured(engine, marks, path)


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
