"""Runs of parameter servers: their files and reports, invalid replays, and supervision."""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from refused import check
from test_server import _options

from warpweave.data import boundaries
from warpweave.model.config import ParallelPlan
from warpweave.parallel.server.clocks import Term
from warpweave.train.options import CONFIG, METRICS, UPDATES, TrainConfig
from warpweave.train.server import replay, roles
from warpweave.train.server import run as servers
from warpweave.train.server.log import plot_staleness, read_log, staleness_of, write_log
from warpweave.train.server.replay_config import ReplayConfig
from warpweave.train.server.roles import RunNotes, ServedModel

HEAD = {"threads": 1, "torch": "2", "servers": 2}


def _row(version: int, *terms: tuple[int, int, int]) -> dict[str, Any]:
    """Return an update with terms of (worker, version that it pulled, staleness)."""
    of = [{"worker": w, "pulled": p, "staleness": s} for w, p, s in terms]
    return {"version": version, "terms": of}


# ---------------------------------------------------------------- the log


def test_a_log_comes_back_whole_but_for_a_last_line_that_was_cut(tmp_path):
    path, rows = tmp_path / "updates.jsonl", [_row(1, (0, 0, 0)), _row(2, (1, 0, 1))]
    write_log(path, HEAD, rows)
    assert read_log(path) == (HEAD, rows)
    with path.open("a") as file:
        file.write(json.dumps(_row(3, (0, 2, 0))))  # complete, except for the newline
    assert read_log(path) == (HEAD, rows)
    write_log(path, HEAD, rows[:1])
    assert read_log(path) == (HEAD, rows[:1])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


WRONG = "is not a log of updates: a line has the wrong fields"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is not a log of updates: it has no complete line"),
        ("{\n", "is not a log of updates: "),
        *((text, WRONG) for text in ("[1]\n", '{"servers": 1}\n', '{"threads": 1}\n')),
        *((f'{{"threads": 1, "servers": 1}}\n{row}\n', WRONG) for row in ('{"version": 1}', "3")),
    ],
)
def test_what_is_no_log_is_refused_with_its_name(tmp_path, text, words):
    path = tmp_path / "updates.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path} {words}"):
        read_log(path)


def test_staleness_and_delay_are_counted_in_the_order_of_numbers_and_drawn(tmp_path):
    rows = [_row(v, (0, v - 1, 0), (1, max(v - 12, 0), v % 11)) for v in range(1, 24)]
    rows.append(_row(24, (2, 3, 2)))
    ages = [0] * 23 + [min(v - 1, 11) for v in range(1, 24)] + [20]
    ahead = [0] * 23 + [v % 11 for v in range(1, 24)] + [2]
    expected = {
        name: {str(n): each.count(n) for n in sorted({*each})}
        for name, each in (("staleness", ahead), ("delay", ages))
    }
    assert json.dumps(staleness_of(rows)) == json.dumps(expected)  # in this order
    plot_staleness(rows[:1], tmp_path / "x.png")
    from matplotlib.axes import Axes

    with mock.patch.object(Axes, "bar") as drawn:
        plot_staleness(rows, tmp_path / "x.png")
    assert [call.args for call in drawn.call_args_list] == [
        ([int(n) for n in counts], [*counts.values()]) for counts in expected.values()
    ]


# ---------------------------------------------------------------- notes of server 0


def _served(tmp_path: Path, *more: str) -> ServedModel:
    words = "--server 2 --dp 3 --microbatches 2 --dropout 0.3 --staleness 9 --keep 2"
    return ServedModel(_options(tmp_path, *words.split(), *more), "cpu")


def _saved(served: ServedModel, notes: RunNotes, version: int) -> None:
    shards = [served.shard(k) for k in range(served.config.server)]
    tensors = [pair for shard in shards for pair in shard.read()]
    notes.save({"version": version}, tensors)


def test_each_update_has_a_row_of_what_its_terms_say(tmp_path):
    served = _served(tmp_path)
    clock = mock.Mock(perf_counter=mock.Mock(side_effect=[10.0, 12.0, 16.0, 17.0, 20.0, 24.0]))
    with mock.patch.object(roles, "time", clock):
        notes = RunNotes(served, None)
        notes.update(1, 0.1, 3.0, [Term(0, 0, 0, 0, 30, 2.0), Term(1, 0, 0, 4, 10, 4.0)])
        notes.update(2, 0.2, 4.0, [Term(2, 0, 0, 1, 7, 5.0)])
        _saved(served, notes, 2)
        notes.update(3, 0.3, 5.0, [Term(2, 1, 1, 3, 8, 6.0), Term(0, 1, 2, 1, 8, 1.0)])
        each = 2 * 2 * 16  # micro-batches, sequences, tokens
        rows = [json.loads(x) for x in (served.config.out / METRICS).read_text().splitlines()]
        assert rows == [
            {"step": 1, "loss": 2.5, "grad_norm": 3.0, "lr": 0.1, "tokens": 2 * each,
             "tokens_per_second": 2 * each / 2, "staleness": 4, "delay": 0},
            {"step": 2, "loss": 5.0, "grad_norm": 4.0, "lr": 0.2, "tokens": 3 * each,
             "tokens_per_second": each / 4, "staleness": 1, "delay": 1},
            {"step": 3, "loss": 3.5, "grad_norm": 5.0, "lr": 0.3, "tokens": 5 * each,
             "tokens_per_second": 2 * each, "staleness": 3, "delay": 1},
        ]  # fmt: skip
        head, logged = read_log(served.config.out / UPDATES)
        assert (head["servers"], head["threads"]) == (2, torch.get_num_threads())
        assert [(r["version"], r["lr"], r["norm"]) for r in logged] == [
            (1, 0.1, 3.0), (2, 0.2, 4.0), (3, 0.3, 5.0),
        ]  # fmt: skip
        terms = [Term(**term) for row in logged for term in row["terms"]]
        assert (len(terms), terms[-1]) == (5, Term(0, 1, 2, 1, 8, 1.0))
        # It dies, and continues from version 2.
        again = RunNotes(served, reader := served.open_run())
        again.update(3, 0.5, 6.0, [Term(1, 1, 2, 0, 4, 1.5)])
    assert reader.state["data"]["sequences_per_step"] == 3 * 2 * 2
    assert reader.state["server"] == {"version": 2}
    assert reader.state["optimizer"] == {"count": 2.0}
    rows[2:] = [
        {"step": 3, "loss": 1.5, "grad_norm": 6.0, "lr": 0.5, "tokens": 4 * each,
         "tokens_per_second": each / 4, "staleness": 0, "delay": 0}
    ]  # fmt: skip
    assert [json.loads(x) for x in (served.config.out / METRICS).read_text().splitlines()] == rows
    assert [row["lr"] for row in read_log(served.config.out / UPDATES)[1]] == [0.1, 0.2, 0.5]


@pytest.mark.parametrize("stopped", [False, True])
def test_last_line_names_the_newest_checkpoint_and_keep_limits_them(tmp_path, stopped, capsys):
    served = _served(tmp_path)
    notes = RunNotes(served, None)
    with mock.patch.object(notes.metrics, "flush") as flushed:
        for version in (1, 2, 3):
            notes.update(version, 0.1, 1.0, [Term(0, 0, version - 1, version, 8, 2.0)])
            _saved(served, notes, version)
            assert flushed.call_count == version  # no row is lost that a checkpoint counts
    folder = served.config.out / "checkpoints"
    assert sorted(p.name for p in folder.glob("step_*")) == ["step_00000002", "step_00000003"]
    with (
        mock.patch.object(roles, "evaluate", return_value=1.23456) as evaluated,
        mock.patch.object(notes.metrics, "evaluated", wraps=notes.metrics.evaluated) as told,
    ):
        found = notes.result(stopped)
    line = "saved step 3; continue with --resume" if stopped else "step 3: validation loss 1.2346"
    assert capsys.readouterr().err.strip() == f"warpweave: {line}"
    assert evaluated.call_count == (not stopped)
    assert told.call_args_list == [mock.call(3, 1.23456, [])] * (not stopped)
    assert found == {
        "val_loss": None if stopped else 1.2346, "updates": 3, "stopped": stopped, "servers": 2,
        "workers": 3, "staleness": {"1": 1, "2": 1, "3": 1}, "delay": {"0": 3},
        "checkpoint": str(folder / "step_00000003"), "plot": found["plot"],
    }  # fmt: skip
    assert Path(found["plot"]).exists()


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("packed", [False, True])
def test_losses_of_workers_and_evaluation_equal_those_of_samples_alone(tmp_path, packed):
    """Without dropout, document by document; each sample counts by its valid tokens."""
    words = ("--packed", "--separator", "32") if packed else ()
    served = _served(tmp_path, "--dtype", "fp64", "--eval-batches", "2", "--dropout", "0", *words)
    gpt = served.make_gpt(torch.device("cpu"))

    def alone(x: torch.Tensor, y: torch.Tensor) -> tuple[float, int]:
        total, count = 0.0, 0
        for row, labels in zip(x, y, strict=True):
            ends = {"documents": boundaries(labels[None])} if packed else {}
            n = int((labels != -100).sum())
            total += float(gpt(row[None], labels[None], **ends).detach()) * n
            count += n
        return total, count

    seen = []
    with mock.patch.object(roles, "module_gradient", lambda _, losses: losses):
        for number in range(3):
            losses = served.gradient(gpt, number)
            found = [(float(total.detach()), n) for total, n in losses(gpt, 5)]
            ids = range(4 * number, 4 * number + 4)
            tokens, labels = served.data.batch(5, [*ids])
            expected = [alone(tokens[at : at + 2], labels[at : at + 2]) for at in (0, 2)]
            assert [n for _, n in found] == [n for _, n in expected]
            assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], rel=1e-12)
            seen += [n for _, n in found]
    assert (len({*seen}) > 1) == packed
    reader = mock.Mock(mapped=dict(gpt.named_parameters()).__getitem__)
    count = 2 * 2 * 3  # batches, sequences, workers
    held_out = served.config.open_data("validation").fixed_batch(range(count), count=count)
    total, valid = alone(*held_out)
    assert roles.evaluate(served, reader) == pytest.approx(total / valid, rel=1e-12)


def test_dropout_of_a_worker_is_that_of_its_samples_at_the_clock(tmp_path):
    served = _served(tmp_path, "--dtype", "fp64")
    gpt, ids = served.make_gpt(torch.device("cpu")), torch.arange(4, 8)
    with mock.patch.object(roles, "module_gradient", lambda _, losses: losses):
        losses = served.gradient(gpt, 1)
    for clock in (0, 5):
        tokens, labels = served.data.batch(clock, ids.tolist())
        for at, (total, n) in zip((0, 2), losses(gpt, clock), strict=True):
            part = slice(at, at + 2)
            key = {"seed": served.config.dropout_key(clock), "sample_ids": ids[part]}
            expected = gpt(tokens[part], labels[part], **key) * n
            assert torch.equal(total, expected)


def test_servers_go_on_with_the_checkpoints_weights_and_moments_at_its_step(tmp_path):
    served, draw = _served(tmp_path), torch.Generator().manual_seed(3)
    notes = RunNotes(served, None)
    for version in (1, 2, 3):
        notes.update(version, 0.1, 1.0, [Term(0, 0, 0, version - 1, 8, 2.0)])
    held = [pair for index in range(2) for pair in served.shard(index).read()]
    saved = {name: torch.randn(x.shape, generator=draw) for name, x in held}
    notes.save({"version": 3}, [*saved.items()])
    for index in range(2):
        shard = served.shard(index)
        assert float(shard.count) == 0.0
        served.restore(shard, served.open_run())
        assert float(shard.count) == 3.0
        for name, x in shard.read():
            assert torch.equal(x, saved.pop(name)), name
    assert not saved


def test_an_evaluation_has_no_dropout(tmp_path):
    served = _served(tmp_path)
    gpt = served.make_gpt(torch.device("cpu"))
    reader = mock.Mock(mapped=dict(gpt.named_parameters()).__getitem__)
    assert roles.evaluate(served, reader) == roles.evaluate(served, reader)


def test_servers_begin_with_the_weights_of_the_model_that_is_given(tmp_path):
    served = _served(tmp_path)
    other = ServedModel(served.config, "cpu")
    other.config = dataclasses.replace(served.config, init_from=tmp_path)
    weights = {r.name: torch.full(r.shape, 0.5 + i) for i, r in enumerate(other.records)}
    source = mock.Mock(tensor=lambda record: weights[record.name])
    with mock.patch.object(roles, "open_model", return_value=source) as opened:
        parts = [dict(other.shard(k).read()) for k in range(2)]
    assert [call.args for call in opened.call_args_list] == [(tmp_path, None)] * 2
    found = {name: x for part in parts for name, x in part.items() if "/" not in name}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name].to(found[name])) for name in found)


def test_servers_begin_with_the_weights_that_their_seed_draws(tmp_path):
    served = _served(tmp_path, "--seed", "4")
    parts = [dict(served.shard(k).read()) for k in range(2)]
    found = {name: x for part in parts for name, x in part.items() if "/" not in name}
    assert found.keys() == {record.name for record in served.records}
    for seed, same in ((4, True), (0, False)):
        drawn = {record.name: record.draw(seed) for record in served.records}
        assert all(torch.equal(found[n], x.to(found[n])) for n, x in drawn.items()) is same


# ---------------------------------------------------------------- replay


class _Replayed:
    """A run of two servers with a checkpoint of version 3; nothing is recomputed."""

    def __init__(self, tmp_path: Path, monkeypatch) -> None:
        self.served = _served(tmp_path, "--seed", "4")
        self.out = self.served.config.out
        notes = RunNotes(self.served, None)
        for version in (1, 2, 3):
            terms = [Term(11 - version, 0, 0, version, 8, 2.0)]
            terms += [Term(7, 0, 0, 5, 8, 2.0), Term(9, 1, 0, 5, 8, 2.0)] * (version == 3)
            notes.update(version, 0.1, 1.0, terms)
        _saved(self.served, notes, 3)
        self.rows: Any = None
        self.threads: list[int] = []
        monkeypatch.setattr(replay, "replay", lambda rows, *_: setattr(self, "rows", rows))
        monkeypatch.setattr(torch, "set_num_threads", self.threads.append)

    def run(self, capfd) -> tuple[int, Any, str]:
        with pytest.raises(SystemExit) as end:
            replay.run(ReplayConfig(self.out))
        said = capfd.readouterr()
        return end.value.code, said.out and json.loads(said.out.splitlines()[-1]), said.err.strip()


def test_a_replay_says_what_it_has_repeated_and_how_much_differs(tmp_path, monkeypatch, capfd):
    there = _Replayed(tmp_path, monkeypatch)
    head, rows = read_log(there.out / UPDATES)
    write_log(there.out / UPDATES, head | {"threads": 3, "torch": "old"}, [*rows, rows[0]])
    code, found, err = there.run(capfd)
    reader = there.served.open_run()
    assert (code, err, there.rows, there.threads) == (0, "", rows, [3])
    assert found == {
        "equal": True, "updates": 3, "workers": [7, 8, 9, 10], **staleness_of(rows),
        "checkpoint": str(reader.path), "torch": ["old", torch.__version__],
    }  # fmt: skip
    drawn, names = ServedModel._draw, []
    shards = [name for k in range(2) for name, _ in there.served.shard(k).read()]
    for record in there.served.records[2:4]:
        names.append(record.name)
        other = lambda self, r: drawn(self, r) + (r.name in names)  # noqa: E731
        monkeypatch.setattr(ServedModel, "_draw", other)
        code, found, err = there.run(capfd)
        first = min(names, key=shards.index)
        assert (code, found["equal"]) == (1, False)
        how_many = f"{len(names)} tensor{'s' * (len(names) == 2)}; the first is {first}"
        assert err == f"warpweave: the replay differs from {reader.path} in {how_many}"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("servers",
         "run: the update log is from 3 parameter servers, but config.toml has server = 2"),
        ("no servers",
         "run: the update log is from 2 parameter servers, but config.toml has server = 0"),
        ("short", "step_00000003 has 3 updates, but the log has 2"),
        ("no log", "updates.jsonl cannot be read"),
        ("no options", "config.toml cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_is_refused_in_one_line(tmp_path, monkeypatch, capfd, what, words):
    there = _Replayed(tmp_path, monkeypatch)
    path, options = there.out / UPDATES, there.out / CONFIG
    head, rows = read_log(path)
    if what == "servers":
        write_log(path, head | {"servers": 3}, rows)
    elif what == "no servers":
        options.write_text(options.read_text().replace("server = 2", "server = 0").replace(
            "staleness = 9", "staleness = 0"))  # fmt: skip
    elif what == "short":
        write_log(path, head, rows[:2])
    else:
        (path if what == "no log" else options).unlink()
    code, found, err = there.run(capfd)
    assert (code, found, there.rows) == (2, "", None)
    assert words in err
    assert "\n" not in err


# ---------------------------------------------------------------- supervision


@pytest.mark.parametrize(
    ("device", "gpus", "workers", "found"),
    [(None, 0, 1, "cpu"), (None, 2, 3, "cpu"), (None, 3, 3, "cuda"), ("cpu", 8, 3, "cpu"),
     ("cuda", 3, 3, "cuda"),
     ("cuda", 2, 3, "3 workers need one GPU each, but this process sees 2")],
)  # fmt: skip
def test_workers_have_a_gpu_each_or_compute_on_the_cpu(monkeypatch, device, gpus, workers, found):
    monkeypatch.setattr(servers, "gpu_count", lambda: gpus)
    config = TrainConfig(server=1, dp=workers, device=device)
    words = None if found in ("cpu", "cuda") else f"^{found}$"
    check(lambda: servers._device(config), words)
    assert words or servers._device(config) == found


@pytest.mark.parametrize(("gpus", "device", "backend"), [(0, "cpu", "gloo"), (4, "cuda", "nccl")])
def test_run_says_who_trains_and_uses_what_is_prepared(monkeypatch, capsys, gpus, device, backend):
    seen: dict[str, Any] = {}
    early, plan = object(), ParallelPlan(microbatches=6)
    config = TrainConfig(server=2, dp=3, staleness=5, batch=4, plan=plan)
    watch = lambda *given: SimpleNamespace(run=lambda: seen.update(watch=given, env={**os.environ}))  # noqa: E731
    monkeypatch.setattr(servers, "gpu_count", lambda: gpus)
    monkeypatch.setattr(servers, "ServedModel", lambda *_: SimpleNamespace(records=["a", "b"]))
    monkeypatch.setattr(servers, "spread", lambda *given: seen.update(spread=given))
    monkeypatch.setattr(servers, "check_loopback", lambda address: seen.update(at=address))
    monkeypatch.setattr(servers.Processes, "of", lambda *given: given)
    monkeypatch.setattr(servers, "Servers", watch)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    servers.run(config, early)
    assert seen["watch"] == (config, device, (servers._rank, backend, early))
    assert seen["env"]["GLOO_SOCKET_IFNAME"] == "mine"
    assert (seen["spread"], seen["at"]) == ((["a", "b"], 2), "127.0.0.1")
    said = f"servers: 2, workers: 3 ({device}), staleness 5; 24 sequences per worker per step"
    assert capsys.readouterr().err.strip() == f"warpweave: {said}"


class _Servers(servers.Servers):
    """A run of two servers and three workers whose processes end as `codes` say: role, number ->
    exit codes of one start after the other, None for a running process."""

    def __init__(self, **codes: list[int | None]) -> None:
        self.started: list[tuple] = []
        self.waits: list[float] = []  # seconds that the end of the run waits for each process
        self.codes = {name: iter(of) for name, of in codes.items()}
        config = TrainConfig(server=2, dp=3, staleness=1, timeout=5.0)
        with mock.patch.object(servers, "keep_store", torch.distributed.HashStore):
            super().__init__(config, "cpu", mock.MagicMock())
        self.processes.wait.side_effect = range(100)  # until the run ends

    def _start(self, role: str, number: int, *more: Any) -> Any:
        self.started.append((role, number, *more))
        code = next(self.codes.get(f"{role}{number}", iter(())), None)
        return SimpleNamespace(exitcode=code, join=self.waits.append)


@pytest.fixture
def quick(monkeypatch):
    for name in ("latest", "end", "start_generation"):
        monkeypatch.setattr(servers, name, lambda _: None)
    told: list[tuple] = []
    monkeypatch.setattr(servers, "tell", lambda _, op, **more: told.append((op, more)))
    return told


@pytest.mark.parametrize("killed", [1, 5, 6])
def test_servers_that_are_killed_are_all_started_again_at_most_five_times(quick, killed, capsys):
    """They start from the beginning if nothing was saved, with the remaining workers: worker 1 is
    lost together with the servers, and the new ones are informed."""
    codes = {"server0": [None] * killed + [0], "server1": [-9] * killed + [None]}
    watch = _Servers(**codes, worker1=[-9])
    with pytest.raises(SystemExit, match=r"^1$") if killed > 5 else nullcontext():
        watch.run()
    said = capsys.readouterr().err
    starts = [args for args in watch.started if args[0] == "server"]
    again = min(killed, 5)
    assert starts[:2] == [("server", k, [0, 1, 2], False) for k in range(2)]
    left = [[0, 1, 2]] * 2 + [[0, 2]] * 9  # by the number of the start
    wanted = [("server", k, left[at], False) for at in range(1 + again) for k in range(2)]
    assert starts == wanted
    assert said.count("a server was killed; restarting all servers from the beginning") == again
    assert ("servers were killed 6 times" in said) == (killed > 5)
    assert quick == [("lost", {"worker": 1})]


@pytest.mark.parametrize("resume", [False, True, "auto"])
@pytest.mark.parametrize("there", [None, "step_00000004"])
def test_servers_start_as_asked_then_from_what_is_saved(quick, monkeypatch, capsys, resume, there):
    asked: list[Any] = []
    monkeypatch.setattr(servers, "latest", lambda folder: asked.append(folder) or there)
    watch = _Servers(server0=[None, 0], server1=[-15, None])
    watch.config = dataclasses.replace(watch.config, resume=resume)
    watch.run()
    first, again = resume is True or (resume == "auto" and there is not None), there is not None
    begun = [args[3] for args in watch.started if args[0] == "server"]
    assert begun == [first] * 2 + [again] * 2
    assert {*asked} == {watch.config.out / "checkpoints"}
    said = capsys.readouterr().err
    assert f"a server was killed; restarting all servers from {there or 'the beginning'}\n" in said


@pytest.mark.parametrize(
    ("codes", "code", "told", "says"),
    [
        ({"server0": [0]}, 0, [], ""),
        ({"server1": [3]}, 3, [], ""),
        ({"server0": [2], "server1": [1]}, 2, [], ""),
        ({"server1": [1], "worker0": [-9]}, 1, [], ""),
        ({"worker0": [1], "worker1": [-9], "worker2": [2]}, 1, [0, 1, 2], "no workers are left"),
    ],
)
def test_run_ends_as_its_servers_or_when_no_worker_is_left(quick, capsys, codes, code, told, says):
    watch = _Servers(**codes)
    watch.store.set("result", '{"updates": 3}')
    with pytest.raises(SystemExit, match=rf"^{code}$") if code else nullcontext():
        watch.run()
    out, err = capsys.readouterr()
    assert out == ('{"updates": 3}\n' if code == 0 else "")
    assert says in err
    assert quick == [("lost", {"worker": number}) for number in told]


def test_workers_that_are_done_may_end_and_a_signal_is_passed_on_once(quick):
    watch = _Servers(worker0=[0], worker1=[0], worker2=[0])
    watch.start()
    assert [watch.watch(stop) for stop in (None, 15, 15)] == [None] * 3
    assert quick == [("stop", {})]
    watch.servers[0].exitcode = 0
    watch.config = dataclasses.replace(watch.config, timeout=300.0)
    assert watch.watch(15) == 0
    assert len(watch.waits) == 5
    assert max(watch.waits) <= 5.0  # a worker may still look for servers that were restarted
    assert watch.watch(None) == 0
    assert max(watch.waits) > 5.0


def test_servers_that_are_started_again_are_also_told_to_stop(quick):
    watch = _Servers(server0=[None, None], server1=[-9, None])
    watch.start()
    for _ in range(3):
        assert watch.watch(15) is None
    assert quick == [("stop", {})] * 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 2), (OSError("x"), 2), (servers.CheckpointError("x"), 2),
        (servers.LostError("x"), 1), (TimeoutError("x"), 1), (FloatingPointError("x"), 1),
        (torch.distributed.DistNetworkError("x"), 1), (None, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["server", "worker"])
def test_a_server_or_worker_ends_with_its_code_and_one_line(monkeypatch, capsys, role, error, code):
    store, cores, left = mock.Mock(), mock.Mock(), mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(servers.signal, "signal", lambda *_: None)
    monkeypatch.setattr(servers, "share_cores", cores)
    monkeypatch.setattr(servers.dist, "TCPStore", lambda *_, **__: store)
    for name in ("serve", "work"):
        monkeypatch.setattr(servers, name, mock.Mock(side_effect=error, return_value={"a": 1}))
    monkeypatch.setattr(servers, "leave", left)
    with pytest.raises(InterruptedError):
        servers._rank(role, 0, config := TrainConfig(server=2, dp=3), "cpu", 1, [0], error is None)
    served = [mock.call(config, store, 0, [0], resume=error is None)] * (role == "server")
    worked = [mock.call(config, store, 0, torch.device("cpu"))] * (role == "worker")
    assert (servers.serve.call_args_list, servers.work.call_args_list) == (served, worked)
    assert left.call_args_list == [mock.call(code)]
    assert cores.call_args_list == [mock.call(5)]
    said = capsys.readouterr().err.strip()
    assert said == ("" if error is None else f"warpweave: {role} 0: x")
    given = [mock.call("result", '{"a": 1}')] * (role == "server" and error is None)
    assert store.set.call_args_list == given
