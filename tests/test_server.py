"""Parameter servers: the clocks simulated, servers and workers as threads over real sockets, and
the replay of their logs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from refused import exits
from torch import nn

from warpweave.checkpoint import CheckpointError, save_checkpoint
from warpweave.model.config import ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel.data.optimizer import SGD, AdamW
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.server.clocks import Clocks, Term
from warpweave.parallel.server.link import Mailbox
from warpweave.parallel.server.replay import replay
from warpweave.parallel.server.server import (
    Notes,
    Server,
    ServerPlan,
    generation,
    start_generation,
    tell,
)
from warpweave.parallel.server.shard import Shard, records_of, spread
from warpweave.parallel.server.worker import LostError, Worker, module_gradient
from warpweave.parallel.shard import ParamRecord
from warpweave.train.command import run as run_train
from warpweave.train.options import STALENESS, UPDATES, TrainConfig, parse
from warpweave.train.server.log import read_log, write_log
from warpweave.train.server.replay import run as run_replay
from warpweave.train.server.replay_config import ReplayConfig
from warpweave.train.server.roles import ServedModel
from warpweave.train.server.run import Servers
from warpweave.train.server.run import run as run_servers

MODES = {"synchronous": (0, True), "ssp 0": (0, False), "ssp 2": (2, False), "async": (None, False)}


# ---------------------------------------------------------------- the clocks, simulated


def _simulated(staleness, joint, *, workers=4, updates=1000, seed=0, leave=(), join=()):
    """Simulate workers of random speed; return (version before it, term) of each applied term."""
    clocks, draw, now = Clocks(staleness, joint), random.Random(seed), 0.0
    slow = {w: draw.choice([1.0, 1.0, 5.0]) for w in range(workers + len(join))}
    for _ in range(workers):
        clocks.ask(clocks.join())
    busy: dict[int, float] = {}
    applied: list[tuple[int, Term]] = []
    while clocks.version < updates:
        if clocks.version in leave and leave[clocks.version] in clocks.clocks:
            busy.pop(leave[clocks.version], None)
            clocks.leave(leave[clocks.version])
        if clocks.version in join and clocks.following < workers + len(join):
            clocks.ask(clocks.join())
        before = clocks.version
        for terms in clocks.updates():
            applied += [(before, term) for term in terms]
            before += 1
        for w in clocks.grant():
            busy[w] = now + draw.expovariate(1.0) * slow[w]
        assert busy, "everybody waits for somebody"
        w = min(busy, key=busy.get)
        now = busy.pop(w)
        clocks.give(w, 1, 0.0)
        clocks.ask(w)
    return applied


def _seen_below(applied, staleness) -> bool:
    """Check SSP's guarantee from the log alone: a worker that computed at clock c had pulled a
    version with every gradient of clocks <= c - staleness - 1 of all workers."""
    ready = {(t.worker, t.clock): at + 1 for at, t in applied}  # the version that contains it
    return not any(
        clock <= term.clock - staleness - 1 and version > term.pulled
        for _, term in applied
        for (_, clock), version in ready.items()
    )


@pytest.mark.parametrize("mode", MODES)
def test_staleness_is_never_above_its_bound_in_1000_updates(mode):
    staleness, joint = MODES[mode]
    applied = _simulated(staleness, joint, updates=1000 // (4 if joint else 1))
    assert len(applied) == 1000
    most = max(term.staleness for _, term in applied)
    if staleness is None:
        assert most > 8, "asynchronous workers drift apart"
        return
    assert most == staleness, "the bound is reached, and not passed"
    assert _seen_below(applied, staleness)
    if staleness:
        assert not _seen_below(applied, staleness - 1), "as the bound below would have it"
    if joint:
        assert all(term.pulled == at for at, term in applied), "synchronous: nothing is stale"


@pytest.mark.parametrize("mode", MODES)
def test_workers_leave_and_join_and_the_others_go_on(mode):
    staleness, joint = MODES[mode]
    more = {"leave": {20: 1, 60: 2}, "join": (40, 80)}
    applied = _simulated(staleness, joint, updates=200, seed=3, **more)
    assert {t.worker for _, t in applied} == set(range(6))
    assert not [t for at, t in applied if t.worker == 1 and at > 25]
    assert len({(t.worker, t.clock) for _, t in applied}) == len(applied), "none is applied twice"


@pytest.mark.parametrize("mode", MODES)
def test_worker_joining_after_all_left_continues_at_the_lowest_clock(mode):
    """So no data is used twice, also after a resume."""
    staleness, joint = MODES[mode]
    clocks = Clocks(staleness, joint=joint)

    def rounds(count: int, *workers: int) -> None:
        for _ in range(count):
            for worker in workers:
                clocks.ask(worker)
            for worker in clocks.grant():
                clocks.give(worker, 1, 0.5)
            clocks.updates()

    for lowest in (0, 5):
        first, second = clocks.join(), clocks.join()
        assert clocks.clocks == {first: lowest, second: lowest}
        rounds(3, first, second)
        clocks.leave(first)
        rounds(2, second)
        clocks.leave(second)
    again = Clocks(staleness, joint=joint)
    again.load(clocks.state(), [0, 9])
    assert (again.clocks, again.following, again.version) == ({0: 10, 9: 10}, 10, clocks.version)


# ---------------------------------------------------------------- threads over real sockets


def _lr(clock: int) -> float:
    return 0.01 / (1 + 0.01 * clock)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x):
        return self.down(self.norm(torch.tanh(self.up(x))))


def _net() -> _Net:
    torch.manual_seed(1)
    return _Net().double()


def _samples(number: int, clock: int):
    draw = torch.Generator().manual_seed(1000 * number + clock)
    x = torch.randn(3 + number % 2, 5, generator=draw, dtype=torch.float64)
    return x, torch.stack([x.sum(1), x.prod(1), x[:, 0]], 1).detach()


def _loss(number: int):
    def losses(net, clock):
        x, y = _samples(number, clock)
        yield (net(x) - y).square().sum(), len(x)

    return losses


def _compute(number: int):
    return module_gradient(_net(), _loss(number))


class _Log(Notes):
    """A log that keeps everything in memory."""

    def __init__(self) -> None:
        self.rows, self.lines, self.saved = [], [], []

    def update(self, version, lr, norm, terms):
        del self.rows[version - 1 :]
        each = [dataclasses.asdict(term) for term in terms]
        self.rows.append({"version": version, "lr": lr, "terms": each})

    def save(self, state, tensors):
        self.saved.append((state, {name: x.clone() for name, x in tensors}))

    def say(self, line):
        self.lines.append(line)


class _Place:
    """A separate store, with threads that use it."""

    def __init__(self, plan: ServerPlan, rule, monkeypatch) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        self.keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.plan, self.rule, self.log = plan, rule, _Log()
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        self.records = records_of(_net())

    def store(self) -> dist.Store:
        wait = timedelta(seconds=20)
        return dist.TCPStore("127.0.0.1", self.keeper.port, is_master=False, timeout=wait)

    def shards(self) -> list[Shard]:
        weights = dict(_net().named_parameters())
        return [
            Shard(part, lambda r: weights[r.name].detach(), self.rule, torch.float64)
            for part in spread(self.records, self.plan.servers)
        ]

    def start(self, fn: Callable[[], object]) -> None:
        def caught() -> None:
            try:
                fn()
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=caught, daemon=True))
        self.threads[-1].start()

    def serve(self, workers, state=None, shards=None) -> None:
        for k, shard in enumerate(shards or self.shards()):
            server = Server(
                self.store(), k, self.plan, shard, records=self.records,
                lr=_lr, notes=self.log if k == 0 else None,
            )  # fmt: skip
            given = [workers, state] if k == 0 else []
            self.start(partial(server.serve, *given))

    def worker(self, number=None) -> Worker:
        return Worker(self.store(), self.records, self.plan, dtype=torch.float64, number=number)

    def work(self, number: int | None, steps: int, delay: float = 0.0) -> None:
        def run() -> None:
            worker = self.worker(number)
            draw, inner = random.Random(number or 99), _compute(worker.number)

            def compute(clock, weights):
                time.sleep(delay * draw.random())
                return inner(clock, weights)

            worker.run(steps, compute)

        self.start(run)

    def run(self, workers: int, steps: int, delay: float = 0.0) -> None:
        self.serve(range(workers))
        for number in range(workers):
            self.work(number, steps, delay)

    def end(self) -> dict[str, torch.Tensor]:
        _until(lambda: self.errors or not any(thread.is_alive() for thread in self.threads))
        if self.errors:
            raise self.errors[0]
        return self.log.saved[-1][1]

    def replayed(self) -> dict[str, torch.Tensor]:
        shards = self.shards()
        assert replay(self.log.rows, self.plan, shards, _compute) == len(self.log.rows)
        return {name: x for shard in shards for name, x in shard.read()}


def _equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (1, 3), (2, 2), (3, 2)])
def test_synchronous_is_one_process_that_accumulates_bitwise(servers, workers, monkeypatch):
    rule, steps = SGD(momentum=0.9, weight_decay=0.1), 6
    place = _Place(ServerPlan(servers), rule, monkeypatch)
    place.run(workers, steps, delay=0.003)
    found = place.end()
    net = _net()
    momentum = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for clock in range(steps):
        net.zero_grad()
        counts = 0
        for number in range(workers):
            for total, count in _loss(number)(net, clock):
                total.backward()  # accumulates
                counts += count
        lr = _lr(clock)
        for name, p in net.named_parameters():
            g = p.grad * (1.0 / counts)
            if p.ndim > 1:
                g = g.add(p.detach(), alpha=0.1)
            momentum[name] = 0.9 * momentum[name] + g
            p.data = p.data - lr * momentum[name]
    weights = {n: p.detach() for n, p in net.named_parameters()}
    _equal(found, weights | {f"momentum/{n}": m for n, m in momentum.items()})


@pytest.mark.parametrize("rule", [AdamW((0.9, 0.99), weight_decay=0.1), SGD()])
@pytest.mark.parametrize(
    ("servers", "staleness", "compensation", "clip"),
    [(1, None, 0.0, None), (2, 1, 0.0, 0.5), (1, None, 0.3, 0.5), (2, None, 0.3, None)],
)
def test_replay_has_the_bits_of_a_run_of_any_timing(
    servers, staleness, compensation, clip, rule, monkeypatch
):
    how = {"compensation": compensation, "clip": clip, "timeout": 20}
    plan = ServerPlan(servers, staleness, joint=False, **how)
    place = _Place(plan, rule, monkeypatch)
    place.run(3, 8, delay=0.01)
    found = place.end()
    assert len(place.log.rows) == 24
    terms = [t for row in place.log.rows for t in row["terms"]]
    assert any(t["pulled"] < row["version"] - 1 for row, t in zip(place.log.rows, terms))
    if staleness is not None:
        assert max(t["staleness"] for t in terms) <= staleness
    assert [row["lr"] for row in place.log.rows] == [_lr(t["clock"]) for t in terms]
    _equal(found, place.replayed())
    # The order affects the bits: a different one gives others.
    third, fourth = place.log.rows[3:5]
    third["terms"], fourth["terms"] = fourth["terms"], third["terms"]
    try:
        other = place.replayed()
    except ValueError:
        return  # it applies a gradient before its weights have arrived
    assert any(not torch.equal(found[name], other[name]) for name in found)


def test_adamw_on_servers_is_torchs(monkeypatch):
    place = _Place(ServerPlan(2, clip=0.7), AdamW((0.9, 0.99), 1e-8, 0.1), monkeypatch)
    place.run(2, 5)
    found = place.end()
    net = _net()
    decays = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8)
    for clock in range(5):
        adamw.zero_grad()
        terms = [term for number in range(2) for term in _loss(number)(net, clock)]
        (sum(total for total, _ in terms) / sum(count for _, count in terms)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.7)
        for group in adamw.param_groups:
            group["lr"] = _lr(clock)
        adamw.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- failures


def _until(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.01)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", ["synchronous", "ssp 2"])
def test_run_goes_on_without_a_hanging_worker_and_with_one_that_joins(servers, mode, monkeypatch):
    """Worker 1 hangs at clock 2 within its computation, which is noticed after the timeout."""
    staleness, joint = MODES[mode]
    plan = ServerPlan(servers, staleness, joint, timeout=5.0)
    place = _Place(plan, SGD(), monkeypatch)
    place.serve(range(2))
    woken, told = threading.Event(), []

    def hang() -> None:
        worker, compute = place.worker(1), _compute(1)

        def slow(clock, weights):
            if clock == 2:
                woken.wait(120)
            return compute(clock, weights)

        with pytest.raises(LostError) as lost:
            worker.run(8, slow)
        told.append(str(lost.value))

    place.start(hang)
    place.work(0, 8)
    _until(lambda: any("worker 1 was lost" in line for line in place.log.lines))
    place.work(None, 8)
    woken.set()
    found = place.end()
    why = "no message for 5 s; the worker has died or is hanging"
    assert told == [f"the servers dropped worker 1: {why}"]
    assert f"worker 1 was lost at clock 2: {why}" in place.log.lines
    terms = [t for row in place.log.rows for t in row["terms"]]
    assert {t["worker"] for t in terms} >= {0, 1}
    assert sum(t["worker"] == 1 for t in terms) == 2
    _equal(found, place.replayed())


@pytest.mark.parametrize("mode", ["synchronous", "async"])
@pytest.mark.parametrize("servers", [1, 2])
def test_servers_that_are_started_anew_go_on_from_their_checkpoint(servers, mode, monkeypatch):
    """All servers die after update 11; the last checkpoint is that of update 8."""
    staleness, joint = MODES[mode]
    plan = ServerPlan(servers, staleness, joint=joint, save_every=4, timeout=5.0)
    place = _Place(plan, SGD(), monkeypatch)

    class Dies(_Log):
        def update(self, version, lr, norm, terms):
            super().update(version, lr, norm, terms)
            if version == 11:
                raise InterruptedError

    log, place.log = place.log, Dies()
    place.run(2, 12)
    _until(lambda: any(isinstance(e, InterruptedError) for e in place.errors))
    place.errors.clear()
    state, tensors = place.log.saved[-1]
    assert state["version"] == 8
    log.rows, place.log = place.log.rows[:8], log
    shards = place.shards()
    for shard in shards:
        for prefix in ("", "momentum/"):
            shard.load(prefix, lambda r, prefix=prefix: tensors[prefix + r.name])
        shard.count.fill_(state["version"])
    if servers == 2:  # restarting servers ends the others first
        Mailbox(generation(place.store()), "server/1").put(op="stop")
    start_generation(place.store())
    place.serve(range(2), state, shards)
    found = place.end()
    assert len(place.log.rows) == (12 if joint else 24)
    _equal(found, place.replayed())


def test_a_run_that_is_stopped_saves_and_its_workers_end(monkeypatch):
    plan = ServerPlan(2, staleness=1, joint=False, timeout=10.0)
    place = _Place(plan, SGD(), monkeypatch)
    place.run(2, 10**6)
    _until(lambda: len(place.log.rows) >= 10)
    tell(place.store(), "stop")
    found = place.end()
    ((state, _),) = place.log.saved
    assert state["version"] == len(place.log.rows) < 10**5
    _equal(found, place.replayed())


def test_delay_compensation_is_the_papers_formula():
    """g + lambda g^2 (w - w_old) of the mean gradient, by SGD without momentum."""
    record = ParamRecord("w", (3,))
    shard = Shard([record], lambda r: torch.ones(3), SGD(0.0), torch.float64)
    old = shard.weights
    shard.update(torch.ones(shard.layout.size, dtype=torch.float64), 0.5, 1.0)
    assert old[:3].tolist() == [1.0] * 3, "what was pulled stays as it was"
    sums = torch.tensor([4.0, -8.0, 2.0], dtype=torch.float64)
    given = torch.zeros_like(old)
    given[:3] = sums
    shard.compensate(given, 4, old, 0.1)
    mean = sums / 4
    expected = mean + 0.1 * mean * mean * (0.5 - 1.0)
    torch.testing.assert_close(given[:3] / 4, expected, rtol=1e-14, atol=0)


# ---------------------------------------------------------------- the command


def _options(tmp_path: Path, *more: str) -> TrainConfig:
    (tmp_path / "text.txt").write_text(" ".join(str(i * i % 977) for i in range(1500)))
    words = (
        f"--model toy --data {tmp_path}/text.txt --batch 2 --seq-len 16 --steps 30 --warmup 2 "
        f"--layers 1 --width 16 --heads 2 --hidden 32 --eval-batches 1 --save-every 4 --timeout 60 "
        f"--device cpu --out {tmp_path}/run"
    )
    return parse([*words.split(), *more])


def _rows(config: TrainConfig) -> list[dict]:
    try:
        return read_log(config.out / UPDATES)[1]
    except ValueError:
        return []


class _Harmed(Servers):
    """Servers harmed by the steps of `harm`, a generator of the number of updates to await."""

    def __init__(self, config: TrainConfig, harm) -> None:
        super().__init__(config, "cpu", ranks.QuickProcesses())
        self._harm, self._updates = harm(self), 0

    def watch(self, stop: int | None) -> int | None:
        if len(_rows(self.config)) >= self._updates:
            self._updates = next(self._harm, math.inf)
        return super().watch(stop)


def test_run_survives_killed_workers_and_servers_and_replays_bitwise(tmp_path, monkeypatch, capfd):
    """Three workers and two servers; then worker 1 is killed, then server 1, and a worker joins."""
    config = _options(tmp_path, "--server", "2", "--dp", "3", "--staleness", "1")
    config.check()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def harm(run: Servers):
        yield 6
        os.kill(run.workers[1].pid, signal.SIGKILL)
        there = len(_rows(config))
        yield there + 8  # more than the others may be ahead of it: it is known to be lost
        os.kill(run.servers[1].pid, signal.SIGKILL)
        yield there + 12
        run.workers[3] = run._start("worker", None)

    _Harmed(config, harm).run()
    printed = capfd.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert "a server was killed; restarting all servers from" in printed.err
    terms = [t for row in _rows(config) for t in row["terms"]]
    assert {t["worker"] for t in terms} == {0, 1, 2, 3}
    # it is lost, and the others continue
    assert max(t["clock"] for t in terms if t["worker"] == 1) < 29
    assert max(t["staleness"] for t in terms) <= 1
    assert result["updates"] == len(terms)
    assert sum(result["delay"].values()) == len(terms)
    assert {t["clock"] for t in terms if t["worker"] in (0, 2)} == set(range(30))
    assert (config.out / STALENESS).exists()
    assert _replayed(config, capfd) == (0, True)
    # A run killed after a checkpoint has a log that extends beyond it.
    log = config.out / UPDATES
    head, rows = read_log(log)
    write_log(log, head, [*rows, rows[-1] | {"version": len(rows) + 1}])
    assert _replayed(config, capfd) == (0, True)
    # If one number of the log changes, so do the bits.
    rows[5]["lr"] *= 1.0000001
    write_log(log, head, rows)
    assert _replayed(config, capfd) == (1, False)


def _replayed(config: TrainConfig, capfd) -> tuple[int, bool]:
    with pytest.raises(SystemExit) as end:
        run_replay(ReplayConfig(config.out))
    return end.value.code, json.loads(capfd.readouterr().out.splitlines()[-1])["equal"]


def test_workers_of_the_command_are_one_rank_of_the_trainer_that_accumulates(tmp_path):
    """Two synchronous workers, and the engine with their micro-batches, in float64."""
    config = _options(tmp_path, "--server", "2", "--dp", "2", "--dtype", "fp64")
    served = ServedModel(config, "cpu")
    log = [
        {"version": c + 1, "lr": 0.01 * (c + 1),
         "terms": [dataclasses.asdict(Term(w, c, c, 0, 32, 0.0)) for w in range(2)]}
        for c in range(3)
    ]  # fmt: skip
    shards = [served.shard(k) for k in range(2)]
    gpt = served.make_gpt(torch.device("cpu"))
    replay(log, config.server_plan, shards, lambda number: served.gradient(gpt, number))
    found = {name: x for shard in shards for name, x in shard.read()}
    engine = Engine(
        served.model, Mesh().connect("cpu"), ParallelPlan(microbatches=2), micro_batch_size=2,
        dtype=torch.float64, seed=config.seed, rule=served.rule, clip=config.clip,
    )  # fmt: skip
    for clock in range(3):
        ids = torch.arange(4).view(2, 2)
        tokens, labels = served.data.batch(clock, ids.flatten().tolist())
        engine.step(
            tokens.view(2, 2, -1), labels.view(2, 2, -1), ids, lr=log[clock]["lr"],
            key=config.dropout_key(clock),
        )  # fmt: skip
    for kind, prefix in (("param", ""), ("exp_avg", "exp_avg/"), ("exp_avg_sq", "exp_avg_sq/")):
        for record, expected, _ in engine.read(kind):
            ours, near = found[prefix + record.name], {"rtol": 1e-9, "atol": 1e-13}
            torch.testing.assert_close(ours, expected, **near, msg=record.name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--server 1 --staleness -1", "staleness must be at least 0, or None, got -1"),
        ("--server 1 --tp 2", "--server does not support tp = 2; leave it out"),
        ("--server -1", "servers must be at least 1, got -1"),
    ],
)
def test_options_that_servers_cannot_do_are_refused_by_a_check(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        _options(tmp_path, *options.split()).check()


def test_servers_refuse_more_of_them_than_parameters_and_torchrun(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"servers must be from 1 to 16 .* got 99"):
        run_servers(_options(tmp_path, "--server", "99"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=eth7 would open sockets on the net"):
        run_servers(_options(tmp_path, "--server", "1"))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "5")):
        monkeypatch.setenv(name, value)
    error = exits(lambda: run_train(_options(tmp_path, "--server", "2", "--dp", "2")), capsys)
    assert "run it without torchrun, which started 5 ranks" in error


def test_servers_do_not_go_on_without_optimizer_state(tmp_path):
    config = _options(tmp_path, "--server", "1")
    served = ServedModel(config, "cpu")
    state = {"seed": 0, "optimizer": {"count": 1.0}, "settings": served.config.settings,
             "data": {"fingerprint": served.data.fingerprint, "name": "x",
                      "sequences_per_step": 8}}  # fmt: skip
    tensors = [pair for pair in served.shard(0).read() if "/" not in pair[0]]
    folder, model = config.out / "checkpoints", dataclasses.asdict(served.model)
    save_checkpoint(folder, 1, tensors, config=model, state=state)
    with pytest.raises(CheckpointError, match=r"has no optimizer state \(exp_avg/blocks"):
        served.open_run()
    save_checkpoint(folder, 2, list(served.shard(0).read()), config=model, state=state)
    with pytest.raises(CheckpointError, match="step_00000002 was not written by a --server run"):
        served.open_run()
    state |= {"server": {}}
    save_checkpoint(folder, 3, list(served.shard(0).read()), config=model, state=state)
    assert served.open_run().step == 3
    for changes, words in (
        ({"lr": 0.5}, "lr: saved .*, now 0.5"),
        ({"batch": 3}, "saved 8, which is not divisible by the 3 per worker of this run$"),
    ):
        other = ServedModel(dataclasses.replace(config, **changes), "cpu")
        with pytest.raises(CheckpointError, match=f"with its own options: .*{words}"):
            other.open_run()
    for step, moment in ((4, "exp_avg"), (5, "exp_avg_sq")):  # one of two is not enough
        some = [pair for pair in served.shard(0).read() if not pair[0].startswith(f"{moment}/")]
        save_checkpoint(folder, step, some, config=model, state=state)
        with pytest.raises(CheckpointError, match=rf"has no optimizer state \({moment}/blocks"):
            served.open_run()
