"""Elastic data parallelism: whichever replicas leave and join, the run equals one device's
on the samples of those present."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from close import relative_error
from threads import run_threads

from warpweave.checkpoint import open_latest
from warpweave.launch.interrupt import Interrupt
from warpweave.launch.session import Session
from warpweave.launch.supervise import keep_store
from warpweave.model.config import ParallelPlan
from warpweave.model.plain import PlainConfig, plain_adamw_step, plain_gpt_loss, plain_init
from warpweave.parallel.mesh import Mesh
from warpweave.train.elastic import membership
from warpweave.train.elastic.connections import Connections
from warpweave.train.elastic.membership import Generation, Member, Regroup, announce
from warpweave.train.elastic.run import Keeper
from warpweave.train.elastic.seat import Seat, replica_width
from warpweave.train.elastic.trainer import Carried, ElasticTrainer, StateLostError, source_of
from warpweave.train.lr_schedule import learning_rate
from warpweave.train.options import GPTOverrides, TrainConfig

pytestmark = pytest.mark.usefixtures("undrawn")


def _config(folder: Path, **changes) -> TrainConfig:
    """Return a small model in float64; its data is `folder`/text, in files of different lengths."""
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for i in range(60):
        (text / f"{i}.txt").write_bytes(b" ".join(b"%d" % (j * j % 977) for j in range(i, i + 12)))
    plan = {name: changes.pop(name) for name in ("zero", "schedule") if name in changes}
    layers = changes.pop("layers", 1)
    return dataclasses.replace(
        TrainConfig(
            model="toy",
            overrides=GPTOverrides(layers=layers, width=16, heads=2, seq_len=16, dropout=0.1),
            plan=ParallelPlan(**{"microbatches": 2, "zero": 0} | plan), dtype="fp64", clip=0.4,
            weight_decay=0.3, data=text, batch=2, steps=6, warmup=2, lr=0.02, eval_every=0,
            eval_batches=1, sample=0, out=folder / "run", timeout=30.0, seed=5, elastic=1,
        ),
        **changes,
    )  # fmt: skip


def _plain_run(
    config: TrainConfig, replicas: list[list[int]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return one device's losses and weights on the samples of each step's `replicas`."""
    data = config.open_data("train")
    model = config.model_config(data.vocab_size)
    plain = PlainConfig(
        model.vocab_size, model.seq_len, model.layers, model.width, model.heads,
        model.num_kv_heads, model.num_hidden, model.positions, model.norm, model.activation,
        model.bias, model.tied, model.norm_eps, model.rope_theta, model.dropout,
    )  # fmt: skip
    params, losses = plain_init(plain, config.seed, torch.float64), []
    moments: dict[str, dict[str, torch.Tensor]] = {}
    width = replica_width(config)
    each = width * config.plan.microbatches * config.batch
    for step, there in enumerate(replicas):
        tokens, labels = data.batch(step, range(each * config.mesh.dp // width))
        for replica in {*range(config.mesh.dp // width)} - {*there}:
            labels[replica * each : (replica + 1) * each] = -100
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        key = config.dropout_key(step)
        total, valid = plain_gpt_loss(leaves, tokens, labels, plain, seed=key)
        losses.append((total / valid).item())
        got = torch.autograd.grad(total / valid, list(leaves.values()))
        plain_adamw_step(
            params, dict(zip(leaves, got, strict=True)), moments, step + 1,
            lr=learning_rate(config, step), weight_decay=config.weight_decay, clip=config.clip,
            beta1=config.betas[0], beta2=config.betas[1], eps=config.eps,
        )  # fmt: skip
    return losses, params


def _rows(config: TrainConfig) -> list[dict]:
    """Return the complete rows, because the run may be writing one."""
    *lines, _ = (config.out / "metrics.jsonl").read_text().split("\n")
    return [row for row in map(json.loads, lines) if "loss" in row]


def _is_the_plain_run(config: TrainConfig) -> None:
    """Assert that losses and weights are one device's, with the replicas named in the metrics."""
    rows = _rows(config)
    assert [row["step"] for row in rows] == [*range(1, config.steps + 1)]
    losses, params = _plain_run(config, [row["replicas"] for row in rows])
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-11)
    reader = open_latest(config.out / "checkpoints")
    assert reader.step == config.steps
    for name, tensor in params.items():
        assert relative_error(reader.tensor(name), tensor) < 1e-11, name


# -------------------------------------------------------------------------- ranks as threads


class _Script:
    """A `Member` that records its votes: generation -> {step: decision}."""

    def __init__(self, seat: Seat, generation: Generation, decisions: dict[str, str]) -> None:
        self.seat, self.current, self._decisions = seat, generation, decisions
        self.updating = torch.autograd.profiler.record_function("")  # any context will do

    def vote(self, step: str, world: int) -> str:
        return self._decisions.get(step, "go")


def _generation(rank: int, config: TrainConfig, generation: Generation, decisions, carried):
    """Run one generation of the rank, with the state it carries into the next."""
    width = replica_width(config)
    whole = [Seat(config.mesh, width, r) for r in range(config.mesh.world)]
    there = [seat for seat in whole if seat.replica in generation.members]
    (seat,) = (seat for seat in there if seat.among(generation.replicas)[1] == rank)
    mesh, _ = seat.among(generation.replicas)
    session = Session(torch.device("cpu"), rank, mesh.world, None, 30.0, mesh)
    member = _Script(seat, generation, decisions)
    mine = carried.get(seat.rank, Carried())
    trainer = ElasticTrainer(config, session, Interrupt(), member, mine)
    with contextlib.suppress(Regroup):
        trainer.run()
    return seat.rank, trainer.carry()


# Who is present, and how it ends: "abort" at a step, or a last step after which replicas join.
STORY = [([0, 1, 2], {"2": "abort"}), ([0, 2], {"3": "regroup"}), ([0, 1, 2], {})]
TWO = [([0, 1], {"1": "abort"}), ([1], {"3": "regroup"}), ([0, 1], {})]
RUNS = (
    ({"dp": 3}, STORY),
    ({"dp": 3, "zero": 1, "dp_shard": 1}, [([0, 1, 2], {"1": "abort"}), ([2], {})]),
    ({"dp": 2, "tp": 2}, TWO),
    ({"dp": 2, "pp": 2, "layers": 2}, TWO),
    ({"dp": 4, "dp_shard": 2, "zero": 3}, TWO),
    ({"dp": 2, "cp": 2, "dp_shard": 1, "zero": 1}, TWO),
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": ParallelPlan(zero=1)},
         "ZeRO 1 shards it over all data ranks (dp = 3); pass --zero 0 or --dp-shard"),
        ({"elastic": 4}, "which must be at least 2, got elastic = 4 and 3 replicas"),
        ({"dp": 1}, "got elastic = 1 and 1 replica"),
        ({"dp": 4, "dp_shard": 2, "plan": ParallelPlan(), "elastic": 3},
         "elastic = 3 and 2 replicas"),
        ({"elastic": -1}, "got elastic = -1 and 3 replicas"),
        ({"outer_every": 4}, "--elastic does not support outer_every = 4"),
        ({"plan": ParallelPlan(zero=0, schedule="pipedream")}, "support schedule = pipedream"),
        ({"plan": ParallelPlan(zero=0, reduce="ordered")}, "does not support reduce = ordered"),
        ({"plan": ParallelPlan(zero=0, overlap="fused")}, "does not support overlap = fused"),
        ({"optimizer": "muon"}, "support optimizer = muon (its update exchanges matrices)"),
        ({"max_restarts": 1}, "--elastic does not support max_restarts = 1"),
        ({"timeline": Path("last.svg")}, "--elastic does not support timeline = last.svg"),
    ],
)  # fmt: skip
def test_what_cannot_be_elastic_is_refused(changes, words):
    config = dataclasses.replace(TrainConfig(dp=3, elastic=1, plan=ParallelPlan(zero=0)), **changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        replica_width(config)


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"elastic": 0}, 0),
        ({"elastic": 0, "dp": 1, "optimizer": "muon", "max_restarts": 3}, 0),  # nor rejected
        ({"elastic": 1}, 1),
        ({"elastic": 3}, 1),
        ({"dp": 2, "elastic": 2, "tp": 2, "pp": 2}, 1),
        ({"dp": 6, "dp_shard": 1, "plan": ParallelPlan(zero=3), "elastic": 6}, 1),
        ({"dp": 6, "dp_shard": 3, "plan": ParallelPlan(zero=1), "elastic": 2}, 3),
        ({"dp": 6, "dp_shard": 2, "elastic": 3}, 2),
    ],
)
def test_a_replica_has_as_many_data_ranks_as_shard_its_state(changes, width):
    config = dataclasses.replace(TrainConfig(dp=3, elastic=1, plan=ParallelPlan(zero=0)), **changes)
    assert replica_width(config) == width


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize(("changes", "story"), RUNS)
def test_a_run_is_that_of_one_device_on_the_samples_of_those_that_were_there(
    tmp_path, changes, story
):
    config = _config(tmp_path, **changes)
    carried: dict[int, Carried] = {}
    metrics = config.out / "metrics.jsonl"
    for number, (replicas, decisions) in enumerate(story, 1):
        if number > 1:  # rank 0 died before it wrote the last row
            metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
        generation = Generation(number, 0, dict.fromkeys(replicas, 0), begun=number > 1)
        world = Seat(config.mesh, replica_width(config), 0).mesh.world
        world = world * len(replicas) * replica_width(config) // config.mesh.dp
        carried = dict(run_threads(world, _generation, config, generation, decisions, carried))
    _is_the_plain_run(config)
    seen = {tuple(row["replicas"]) for row in _rows(config)}
    assert len(seen) == len({tuple(replicas) for replicas, _ in story})


# -------------------------------------------------------------------------- votes, connections


@pytest.fixture
def store():
    return keep_store()


def _client(store) -> dist.Store:
    wait = timedelta(seconds=20)
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=wait)


def _member(store, seat: Seat, close=lambda: None) -> Member:
    return Member(partial(_client, store), seat, 0, close)


def _at_once(*calls) -> list:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(20) for future in [pool.submit(call) for call in calls]]


def _hears(member: Member, number: int) -> None:
    """Wait until it has learned of this generation."""
    with member._news:
        assert member._news.wait_for(lambda: member.latest.number >= number, 20)


def _three(store) -> list[Member]:
    """Return three replicas of one rank each, in generation 1."""
    members = [_member(store, Seat(Mesh(dp=3), 1, rank)) for rank in range(3)]
    announce(store, Generation(1, 0, {0: 0, 1: 0, 2: 0}))
    for member in members:
        assert member.enter().number == 1
    return members


def test_member_reports_only_itself_and_its_current_generation_to_the_keeper(store):
    members = _three(store)
    store.wait([f"ready/0/{rank}" for rank in range(3)])
    members[2].complain()
    store.wait(["failed/1/2"])
    assert not any(store.check([f"failed/{of}/{rank}"]) for of, rank in ((1, 0), (1, 1), (2, 2)))
    for number, member in enumerate(members, 1):
        member.settle()
        assert store.add("settled/1", 0) == number
    announce(store, Generation(2, 0, {0: 0, 2: 0}))
    assert members[2].enter().number == 2
    members[2].settle()
    members[2].complain()
    store.wait(["failed/2/2"])
    assert (store.add("settled/1", 0), store.add("settled/2", 0)) == (3, 1)
    assert not store.check(["result"])
    members[0].finish("{}")
    assert store.get("result") == b"{}"
    assert not store.check(["over"])
    members[1].give_up()
    store.wait(["over"])


def test_step_counts_if_all_vote_and_a_waiting_replica_forces_a_regroup(store):
    members = _three(store)
    assert _at_once(*(partial(m.vote, "0", 3) for m in members)) == ["go"] * 3
    waiting = partial(members[0].vote, "1", 3), partial(members[1].vote, "1", 3)

    def join_then_vote() -> str:
        announce(store, Generation(2, 0, {0: 0, 1: 0, 2: 0, 3: 0}))
        _hears(members[2], 2)
        return members[2].vote("1", 3)

    assert _at_once(*waiting, join_then_vote) == ["regroup"] * 3
    assert not members[0].lost


def test_a_step_is_given_up_by_all_if_a_replica_is_lost_before_its_vote(store):
    members = _three(store)

    def lose() -> None:
        time.sleep(0.1)
        announce(store, Generation(2, 0, {0: 0, 1: 0}, "2 left", lost=True))

    decisions = _at_once(*(partial(member.vote, "0", 3) for member in members[:2]), lose)
    assert decisions[:2] == ["abort"] * 2
    assert members[2].vote("0", 3) == "abort"  # too late, although now all have voted
    assert members[0].enter().replicas == [0, 1]


def test_a_replica_lost_after_its_vote_has_made_the_step(store):
    members = _three(store)
    _at_once(*(partial(member.vote, "0", 3) for member in members))
    announce(store, Generation(2, 0, {0: 0, 1: 0}, "2 left", lost=True))
    assert members[0].wait_for_loss(20)
    assert members[0]._store.get("decision/1/0") == b"go"


def test_lost_replica_is_remembered_when_another_joins_before_a_rank_knows(store):
    members = _three(store)
    announce(store, Generation(2, 0, {0: 0, 1: 0}, "2 left", lost=True))
    announce(store, Generation(3, 0, {0: 0, 1: 0, 2: 1}, "2 joins"))
    _hears(members[0], 3)
    assert members[0].lost
    assert members[0].vote("0", 3) == "abort"
    assert members[0].enter().number == 3
    assert not members[0].lost
    assert not members[0].wait_for_loss(0.0)
    announce(store, Generation(4, 0, {0: 0, 1: 0}, "2 left", lost=True))
    assert members[0].wait_for_loss(20)
    assert members[0].enter().number == 4  # it begins after its loss
    assert not members[0].lost
    assert members[0].vote("1", 1) == "go"


def test_a_rank_that_was_started_again_waits_for_its_own_generation(store):
    """It closes no connection of a generation that it was not in."""
    announce(store, Generation(1, 0, {0: 0, 1: 0}))
    announce(store, Generation(2, 0, {0: 0}, "1 left", lost=True))
    closed = []
    member = _member(store, Seat(Mesh(dp=2), 1, 0), lambda: closed.append(1))
    member._start = 1
    thread = threading.Thread(target=member.enter, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert not closed
    announce(store, Generation(3, 0, {0: 1, 1: 0}))
    thread.join(20)
    assert member.current.number == 3
    announce(store, Generation(4, 0, {0: 1}, "1 left", lost=True))
    assert member.wait_for_loss(20)
    assert closed == [1]


@pytest.mark.parametrize("told", [0, 1, 2])
def test_the_end_of_the_keeper_is_no_error_of_the_thread_that_listens(told):
    """This also holds right after it has reported a loss, before they vote."""
    kept = dist.HashStore()
    announce(kept, Generation(1, 0, {0: 0, 1: 0}))
    announce(kept, Generation(2, 0, {0: 0}, "1 left", lost=True))
    client, ended = mock.Mock(wraps=kept), dist.DistNetworkError("Connection was likely closed")
    client.wait.side_effect = [None] * told + [ended]
    client.compare_set.side_effect = ended
    with mock.patch.object(membership.threading, "Thread"):  # no other thread listens
        member = Member(lambda: client, Seat(Mesh(dp=2), 0, 0), 0, lambda: None)
    member._listen(client)
    assert member.latest.number == told
    assert client.compare_set.call_count == (told == 2)


def test_connections_of_a_generation_are_closed_and_no_others(store):
    """A wait that nobody answers ends. Connections opened before or after stay open."""
    before = _client(store)
    connections = Connections()
    ours = _client(store)
    listener = socket.create_server(("127.0.0.1", 0))  # others connect to this process through it
    connections.complete()
    later = _client(store)

    def wait() -> str:
        with pytest.raises(dist.DistNetworkError):
            ours.get("never")
        return "ended"

    def close() -> None:
        time.sleep(0.2)
        connections.close()

    assert _at_once(wait, close)[0] == "ended"
    before.set("key", "1")
    assert later.get("key") == b"1"
    connections.open()
    ours = _client(store)  # its generation is lost before all have connected
    assert _at_once(wait, close)[0] == "ended"
    assert before.get("key") == later.get("key") == b"1"
    with listener, socket.create_connection(listener.getsockname()):
        listener.settimeout(10)
        listener.accept()[0].close()


def test_a_descriptor_that_another_socket_has_now_is_left_alone():
    connections = Connections()
    ours, other = socket.socketpair()
    connections.complete()
    number = ours.detach()
    one, two = socket.socketpair()
    os.dup2(one.fileno(), number)
    connections.close()
    with one, two, other, socket.socket(fileno=number) as again:
        again.send(b"x")
        one.send(b"y")
        assert two.recv(1) + two.recv(1) == b"xy"
        assert other.recv(1) == b""  # this one is closed


def test_the_source_is_the_lowest_replica_that_is_whole():
    mesh = Mesh(dp=6, dp_shard=2)
    assert source_of([3, 3, 3, 3, 3, 3], mesh, 2) == 0
    assert source_of([None, None, 3, 2, 3, 3], mesh, 2) == 2
    assert source_of([4, 4, 5, 5, 5, 5], mesh, 2) == 1
    assert source_of([0, 0, 0, None, 0, 0], mesh, 2) == 0
    assert source_of([5, 5, 4, 5, 5, 5], Mesh(dp=6, dp_shard=3), 3) == 1
    assert source_of([5, 5, 5, 4, 5, 5, 5, 5], Mesh(dp=4, tp=2), 1) == 0  # rank 1 also holds dp 0
    assert source_of([5, 4, 5, 5, 5, 5, 5, 5], Mesh(dp=4, tp=2), 1) == 1
    for lost in ([None] * 6, [3, None, None, 3, None, None]):
        with pytest.raises(StateLostError, match="holds the whole state; resume from a checkpoint"):
            source_of(lost, mesh, 2)


# -------------------------------------------------------------------------- ranks as processes


class _Harmed(Keeper):
    """A keeper that harms its ranks by the steps of `harm`, a generator of conditions to await."""

    def __init__(self, config: TrainConfig, harm) -> None:
        super().__init__(config, ranks.QuickProcesses())
        self._harm, self._until = harm(self), lambda: True
        self.changes: list[str] = []  # as rank 0 of each generation reports them

    def rows(self) -> list[dict]:
        return _rows(self.config) if (self.config.out / "metrics.jsonl").exists() else []

    def hit(self, rank: int, number: int = signal.SIGKILL) -> None:
        replica = self.replicas[self.seats[rank].replica]
        os.kill(replica.processes[rank].pid, number)

    def _announce(self, members, change, *more) -> None:
        self.changes.append(change)
        super()._announce(members, change, *more)

    def watch(self, stop: int | None) -> int | None:
        if self._until():
            self._until = next(self._harm, lambda: False)
        return super().watch(stop)


@pytest.fixture
def _over_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.usefixtures("_over_loopback")
def test_a_run_outlives_ranks_that_die_at_any_time_and_is_one_devices(tmp_path, capfd):
    """One dies; its replacement dies while it joins; rank 0 and another die at once; one hangs."""

    def harm(keeper: Keeper):
        def steps(more: int):
            there = len(keeper.rows()) + more
            return lambda: len(keeper.rows()) >= there

        def let_in():
            return len(keeper.current.members) == 3

        def trains():
            """Wait until all three train. Earlier rows of three may predate a death."""
            there = len(keeper.rows())
            return lambda: [0, 1, 2] in [row["replicas"] for row in keeper.rows()[there:]]

        yield steps(2)
        keeper.hit(1)
        yield lambda: len(keeper.current.members) == 2
        yield let_in
        keeper.hit(1)  # it has been admitted, and connects
        yield lambda: len(keeper.current.members) == 2
        yield let_in
        yield trains()
        keeper.hit(0)
        keeper.hit(2)
        yield lambda: keeper.current.replicas == [1]
        yield let_in
        yield trains()
        keeper.hit(2, signal.SIGSTOP)
        yield lambda: len(keeper.current.members) == 2

    config = _config(tmp_path, dp=3, steps=150, timeout=6.0, save_every=50)
    config.check()
    keeper = _Harmed(config, harm)
    keeper.run()
    said = capfd.readouterr()
    assert json.loads(said.out.splitlines()[-1])["steps"] == 150
    assert "rank 2 (dp=2) hangs, last seen at step" in said.err
    began, first, *later = keeper.changes
    assert (began, later[0]) == ("", "replica 1 joins")
    assert first.startswith("replica 1 left: rank 1 (dp=1) was killed by SIGKILL, last seen at")
    assert first.endswith("; replicas 0 and 2 continue")
    assert any(change.endswith("; replica 1 continues") for change in later)
    seen = {tuple(row["replicas"]) for row in _rows(config)}
    assert {(0, 1, 2), (0, 2), (1,), (0, 1)} <= seen
    _is_the_plain_run(config)


@pytest.mark.usefixtures("_over_loopback")
@pytest.mark.parametrize("late", [False, True])
def test_fewer_replicas_than_asked_for_save_and_stop(tmp_path, late):
    """If the first half of a replica of two tensor ranks dies, the other half also ends.

    A survivor may be late because its last wait for the dead rank ends only with its timeout.
    """

    def harm(keeper: Keeper):
        yield lambda: len(keeper.rows()) >= 3
        if late:
            keeper.hit(0, signal.SIGSTOP)
        keeper.hit(2)
        began = time.monotonic()
        yield lambda: time.monotonic() > began + config.timeout + 1.0
        if late:
            keeper.hit(0, signal.SIGCONT)

    timeout = 10.0 if late else 30.0
    config = _config(tmp_path, dp=2, tp=2, steps=5000, elastic=2, timeout=timeout)
    keeper = _Harmed(config, harm)
    with pytest.raises(SystemExit, match=r"^1$"):
        keeper.run()
    words = "; fewer replicas than --elastic 2 remain; replica 0 saves and stops"
    assert keeper.changes[-1].endswith(words)
    rows = _rows(config)
    assert open_latest(config.out / "checkpoints").step == rows[-1]["step"] < 5000
    assert all(row["replicas"] == [0, 1] for row in rows)
