"""The parts of servers and workers, each alone: distribution of weights, the norm and its clip, a
module's gradient, valid logs, the clocks, and addresses of this machine."""

from __future__ import annotations

import itertools
import math
import socket
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.distributed as dist
from refused import check, rows
from torch import nn

from warpweave.parallel.data.optimizer import SGD, AdamW
from warpweave.parallel.server import link
from warpweave.parallel.server.clocks import Clocks, Term
from warpweave.parallel.server.link import Mailbox, check_loopback
from warpweave.parallel.server.replay import log_of, replay
from warpweave.parallel.server.server import ServerPlan, generation, start_generation, tell
from warpweave.parallel.server.shard import Shard, digest, norm_and_scale, records_of, spread
from warpweave.parallel.server.worker import Gradient, module_gradient
from warpweave.parallel.shard import ParamRecord

NAN, LATE = float("nan"), {"staleness": None, "joint": False}


@rows(
    [
        (lambda: ServerPlan(servers=0), "servers must be at least 1, got 0"),
        (lambda: ServerPlan(servers=1), None),
        (lambda: ServerPlan(staleness=-1, joint=False),
         "staleness must be at least 0, or None, got -1"),
        (lambda: ServerPlan(staleness=0, joint=False), None),
        (lambda: ServerPlan(staleness=1), "staleness must be 0 with joint=True, got 1;"),
        (lambda: ServerPlan(staleness=None), "staleness must be 0 with joint=True, got None;"),
        (lambda: ServerPlan(compensation=-1e-9, **LATE), "compensation must be at least 0, .* -1e"),
        (lambda: ServerPlan(compensation=1e-9),
         r"exactly 0 with joint=True \(which delays no gradients\), got 1e-09"),
        (lambda: ServerPlan(compensation=1e-9, **LATE), None),
        (lambda: ServerPlan(clip=0.0), "clip must be positive, or None for no clipping, got 0.0"),
        (lambda: ServerPlan(clip=NAN), "clip must be positive, or None for no clipping, got nan"),
        (lambda: ServerPlan(clip=1e-9), None),
        (lambda: ServerPlan(timeout=0.0), "expected timeout > 0, .*, got 0.0, 0 and 0.0"),
        (lambda: ServerPlan(timeout=NAN), "expected timeout > 0, .*, got nan, 0 and 0.0"),
        (lambda: ServerPlan(timeout=1e-9), None),
        (lambda: ServerPlan(save_every=-1), "save_minutes >= 0, got 60.0, -1 and"),
        (lambda: ServerPlan(save_every=1), None),
        (lambda: ServerPlan(save_minutes=-1e-9), ">= 0, got 60.0, 0 and -1e-09"),
        (lambda: ServerPlan(save_minutes=NAN), ">= 0, got 60.0, 0 and nan"),
        (lambda: ServerPlan(save_minutes=1e-9), None),
    ]
)  # fmt: skip
def test_numbers_of_a_server_plan_are_taken_up_to_their_bounds(call, words) -> None:
    check(call, words)


# ---------------------------------------------------------------- distribution of weights


def test_a_plan_on_which_all_agreed_cannot_be_changed() -> None:
    plan = ServerPlan(servers=2)
    for name in vars(plan):
        with pytest.raises(FrozenInstanceError):
            setattr(plan, name, 1)
    assert {plan: 1}[ServerPlan(servers=2)] == 1


def test_every_parameter_has_a_record_and_a_frozen_one_is_refused() -> None:
    for frozen in ("0.bias", "1.weight"):
        net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        dict(net.named_parameters())[frozen].requires_grad_(False)
        with pytest.raises(ValueError, match=f"parameter {frozen} does not require grad"):
            records_of(net)
    records = records_of(nn.Sequential(nn.Conv1d(2, 3, 5), nn.LayerNorm(3)))
    found = [(r.name, r.shape, r.decay) for r in records]
    assert found == [
        ("0.weight", (3, 2, 5), True), ("0.bias", (3,), False),
        ("1.weight", (3,), False), ("1.bias", (3,), False),
    ]  # fmt: skip


def test_a_digest_is_of_names_shapes_and_dtype_and_of_no_order() -> None:
    one, two = ParamRecord("a", (2, 6)), ParamRecord("b", (3,))
    models = [
        ([one, two], torch.float32),
        ([one, two], torch.bfloat16),
        ([ParamRecord("a", (6, 2)), two], torch.float32),
        ([ParamRecord("a", (12,)), two], torch.float32),
        ([ParamRecord("A", (2, 6)), two], torch.float32),
        ([one], torch.float32),
    ]
    digests = [digest(*model) for model in models]
    assert len({*digests}) == len(models)
    assert digest([two, one], torch.float32) == digests[0]


@pytest.mark.parametrize(
    ("servers", "held"), [(2, ["0 3 6", "1 2 4 5 7 8 9"]), (3, ["0 1 4 5", "2 3 7", "6 8 9"])]
)
def test_parameters_are_spread_longest_first_each_to_the_least_loaded(servers, held) -> None:
    """Computed by hand: equal ones by name, and an empty one counts as one element."""
    sizes = [30, 1, 30, 7, 12, 0, 30, 9, 9, 4]
    records = [ParamRecord(str(n), (size,)) for n, size in enumerate(sizes)]
    for order in (records, records[::-1]):
        parts = spread(order, servers)
        assert [" ".join(sorted(r.name for r in part)) for part in parts] == held


def test_as_many_servers_as_parameters_and_no_fewer_than_one() -> None:
    records = [ParamRecord(f"p{n}", (n,)) for n in range(3)]
    assert [len(part) for part in spread(records, 3)] == [1, 1, 1]
    empty = [ParamRecord(f"p{n}", (0, 2)) for n in range(5)]
    assert sorted(len(part) for part in spread(empty, 3)) == [1, 2, 2]
    for servers in (4, 0, -1):
        with pytest.raises(ValueError, match=rf"^servers must be from 1 to 3 .* got {servers}$"):
            spread(records, servers)


@pytest.mark.parametrize("count", [1, 5])
def test_the_norm_is_of_the_mean_gradient_and_clips_what_is_above_it(count: int) -> None:
    squares = [torch.tensor(float(x), dtype=torch.float64) for x in (9, 16, 144)]
    norm = 13.0 / count
    for clip in (norm / 3, norm * 0.999, norm * 1.001, 100.0, None):
        found, scale = norm_and_scale(squares, count, clip)
        assert found == pytest.approx(norm, rel=1e-15)
        factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        assert scale == pytest.approx(factor / count, rel=1e-14), clip
    for bad in (math.nan, math.inf):
        with pytest.raises(FloatingPointError, match=rf"^the gradient norm is {bad}$"):
            norm_and_scale([*squares, torch.tensor(bad).double()], count, None)


def test_what_a_server_reads_is_what_another_expects_and_loads() -> None:
    """Masters first, then each moment; a shard of 16 bits has masters of 32."""
    records = [ParamRecord("w", (3, 5)), ParamRecord("b", (7,), decay=False)]
    shard = Shard(records, lambda r: torch.full(r.shape, len(r.name) + 0.1), AdamW(), torch.half)
    found = {name: tuple(x.shape) for name, x in shard.read()}
    assert list(found.items()) == list(shard.shapes(records))
    assert [*found] == ["w", "b", "exp_avg/w", "exp_avg/b", "exp_avg_sq/w", "exp_avg_sq/b"]
    assert {x.dtype for _, x in shard.read()} == {torch.float32}
    assert shard.weights.dtype == torch.half
    squares = shard.squares(shard.master)  # they are added to other servers'
    assert (squares.dtype, squares.shape) == (torch.float64, ())
    assert float(squares) == pytest.approx(22 * 1.1**2)
    for number, prefix in enumerate(("", "exp_avg/", "exp_avg_sq/")):
        shard.load(prefix, lambda r, n=number: torch.full(r.shape, 10.0 * n + len(r.shape)))
    for name, x in shard.read():
        moment = ("", "exp_avg/", "exp_avg_sq/").index(name.removesuffix("w").removesuffix("b"))
        assert (x == 10.0 * moment + x.ndim).all(), name


# ---------------------------------------------------------------- a worker's gradient


class _Two(nn.Module):
    """A module with losses that do not depend on its second parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.idle = (nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(2))


def test_gradient_covers_all_micro_batches_at_the_given_weights() -> None:
    """It is recomputed at each clock. The loss is the mean over their samples."""
    net, batches = _Two(), {0: [1, 4, 2], 1: [3], 7: [2, 2]}

    def rows_of(clock: int, part: int, n: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(10 * clock + part)
        return torch.randn(n, 3, generator=draw, dtype=torch.float64)

    def losses(module: nn.Module, clock: int):
        for part, n in enumerate(batches[clock]):
            yield (rows_of(clock, part, n) @ module.w).square().sum(), n

    gradient = module_gradient(net, losses)
    for clock in (0, 7, 1, 0):
        weights = {n: torch.full((3,), clock + 1.0, dtype=torch.float64) for n in ("w", "idle")}
        found = gradient(clock, weights)
        x = torch.cat([rows_of(clock, part, n) for part, n in enumerate(batches[clock])])
        y = x @ weights["w"]
        assert found.count == len(x)
        assert found.loss == pytest.approx(float(y.square().mean()), rel=1e-13)
        torch.testing.assert_close(found.tensors["w"], 2 * x.T @ y, rtol=1e-13, atol=0)
        assert found.tensors["idle"].tolist() == [0.0] * 3
        assert all(torch.equal(p.detach(), weights[n]) for n, p in net.named_parameters())


# ---------------------------------------------------------------- a log


def _term(worker: int, clock: int = 0, pulled: int = 0) -> dict:
    more = {"staleness": 0, "count": 1, "loss": 0.0}
    return {"worker": worker, "clock": clock, "pulled": pulled} | more


def _replayed(*terms: tuple[int, int, int], versions: tuple[int, ...] = ()) -> float:
    """Return one weight after updates of one term each: (worker, clock, version that it pulled)."""
    shard = Shard([ParamRecord("w", (1,))], lambda r: torch.zeros(1), SGD(0.0), torch.float64)
    pairs = zip(versions or itertools.count(1), terms)
    log = [{"version": version, "lr": 0.1, "terms": [_term(*of)]} for version, of in pairs]

    def compute(worker: int):
        def gradient(clock, weights):
            return Gradient({"w": weights["w"] + worker + 10 * clock + 1}, 1, 0.0)

        return gradient

    plan = ServerPlan(staleness=None, joint=False)
    assert replay(log, plan, [shard], compute) == len(log)
    return float(shard.master[0])


def test_a_replay_computes_at_the_version_that_was_pulled() -> None:
    w1 = -0.1 * 1.0  # worker 0 at clock 0, of 0
    w2 = w1 - 0.1 * 2.0  # worker 1 at clock 0, also of 0
    w3 = w2 - 0.1 * (w1 + 11.0)  # worker 0 at clock 1, of version 1
    w4 = w3 - 0.1 * (w2 + 12.0)  # worker 1 at clock 1, of version 2
    log = (0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 2)
    assert _replayed(*log) == pytest.approx(w4, rel=1e-15)


@pytest.mark.parametrize("workers", list(itertools.permutations(range(3))))
def test_a_replay_adds_an_updates_terms_in_the_order_of_the_log(workers) -> None:
    """The gradients are such that a sum in a different order differs."""
    values = 1e16, 1.0, -1e16
    shard = Shard([ParamRecord("w", (1,))], lambda r: torch.zeros(1), SGD(0.0), torch.float64)
    terms = [_term(w) for w in workers]

    def compute(worker: int):
        w = torch.tensor([values[worker]], dtype=torch.float64)
        return lambda clock, weights: Gradient({"w": w}, 1, 0.0)

    assert replay([{"version": 1, "lr": 3.0, "terms": terms}], ServerPlan(), [shard], compute) == 1
    first, second, third = (torch.tensor(values[w], dtype=torch.float64) for w in workers)
    assert float(shard.master[0]) == pytest.approx(-float(first + second + third), abs=1e-9)


def test_a_log_that_no_run_could_write_is_refused() -> None:
    words = "applies a gradient computed with later weights"
    with pytest.raises(ValueError, match=rf"^update 2 {words} \(version 5\)$"):
        _replayed((0, 0, 0), (1, 3, 5), (0, 1, 1))
    with pytest.raises(ValueError, match=rf"^update 1 {words} \(version 1\)$"):
        _replayed((0, 0, 1))
    for versions, number, found in (((2, 3), 1, 2), ((1, 1), 2, 1), ((1, 3), 2, 3), ((0, 1), 1, 0)):
        words = rf"^row {number} of the log must have version {number}, got {found}$"
        with pytest.raises(ValueError, match=words):
            _replayed((0, 0, 0), (1, 0, 0), versions=versions)
    assert log_of(iter([{"version": 1}, {"version": 2}])) == [{"version": 1}, {"version": 2}]


# ---------------------------------------------------------------- the clocks


def test_no_two_workers_of_a_run_have_the_same_number() -> None:
    clocks = Clocks(None, joint=False)
    assert [clocks.join(), clocks.join(6), clocks.join(2), clocks.join()] == [0, 6, 2, 7]
    assert clocks.following == 8
    for worker in (6, 0):
        with pytest.raises(ValueError, match=rf"^worker {worker} has already joined"):
            clocks.join(worker)
    clocks.leave(6)
    assert (clocks.join(6), clocks.following) == (6, 8)
    late = Clocks(None, joint=False)
    assert (late.join(clock=5), late.floor, late.join(), late.clocks) == (0, 5, 1, {0: 5, 1: 5})
    late.join(clock=3)
    assert late.state()["floor"] == 3


def test_a_worker_that_leaves_neither_waits_to_pull_nor_owes_a_gradient() -> None:
    clocks = Clocks(None, joint=False)
    for worker in (0, 1):
        clocks.join(worker)
        clocks.ask(worker)
    assert clocks.grant() == [0, 1]
    clocks.ask(1)
    for worker in (0, 1):
        clocks.leave(worker)
    assert not clocks.grant()
    clocks.join(1)
    assert not clocks.owes(1)
    with pytest.raises(ValueError, match="worker 1 pushed a gradient without pulling"):
        clocks.give(1, 1, 0.0)
    clocks.ask(1)
    assert clocks.grant() == [1]


def test_a_joint_update_has_the_terms_of_its_clock_in_the_workers_order() -> None:
    """This includes one that has left, and one that leaves the rest at once by leaving."""
    clocks = Clocks()
    for worker in (11, 2, 5):
        clocks.join(worker)
        clocks.ask(worker)
    assert clocks.grant() == [11, 2, 5]
    clocks.give(11, 3, 0.25)
    clocks.give(5, 4, 0.75)
    assert clocks.updates() == []
    clocks.leave(11)
    clocks.give(2, 5, 0.5)
    terms = Term(2, 0, 0, 0, 5, 0.5), Term(5, 0, 0, 0, 4, 0.75), Term(11, 0, 0, 0, 3, 0.25)
    assert clocks.updates() == [terms]
    assert (clocks.version, clocks.updates()) == (1, [])
    for worker in (5, 2):
        clocks.ask(worker)
    assert clocks.grant() == [5, 2]
    clocks.give(5, 1, 0.0)
    for worker in (5, 2):
        assert clocks.updates() == []
        clocks.leave(worker)
    assert clocks.updates() == [(Term(5, 1, 1, 0, 1, 0.0),)]
    assert (clocks.version, clocks.floor) == (2, 1)


# ---------------------------------------------------------------- mailboxes


def test_a_mailbox_gives_the_first_header_and_each_once() -> None:
    """Any sender counts. Queues of other names or generations are separate."""
    store = dist.HashStore()
    one, other = Mailbox(store, "server/0"), Mailbox(store, "server/1")
    assert one.take(0.0) is None
    headers = [{"op": "push", "visitor": n, "loss": n / 8, "why": None} for n in range(12)]
    for header in headers:
        Mailbox(store, "server/0").put(**header)
        other.put(op="stop")
    assert [one.take(0.0) for _ in range(13)] == [*headers, None]
    assert other.take(5.0) == {"op": "stop"}
    tell(store, "lost", worker=3)
    old = Mailbox(generation(store), "server/0")
    start_generation(store)
    tell(store, "stop")
    new = Mailbox(generation(store), "server/0")
    assert [new.take(0.0), new.take(0.0)] == [{"op": "stop"}, None]
    assert [old.take(0.0), old.take(0.0)] == [{"op": "lost", "worker": 3}, None]


# ---------------------------------------------------------------- this machine's addresses


@pytest.mark.parametrize(
    ("host", "interface", "words"),
    [
        *[(host, None, None) for host in ("localhost", "::1", "127.0.0.1", "127.9.0.1")],
        *[("127.0.0.1", name, None) for name in ("lo", "lo0")],
        *[
            (host, "eth7",
             f"=eth7 would open sockets on the network, but the store on {host} is only for")
            for host in ("localhost", "::1", "127.0.0.1", "127.9.0.1")
        ],
        ("", None, "^the store on every address is open to the network; .*, so use 127.0.0.1$"),
        *[
            (host, None, f"^the store on {host} is open to the network")
            for host in ("0.0.0.0", "::", "here", "10.1.2.3", "fe80::7")
        ],
        ("here", "lo", "^the store on here is open to the network"),
        ("10.1.2.4", None, None),  # another machine, which may have ranks
        ("10.1.2.4", "eth7", None),
        ("128.0.0.1", "eth7", None),
    ],
)  # fmt: skip
def test_what_listens_on_the_network_is_refused(host, interface, words, monkeypatch) -> None:
    found = [(socket.AF_INET, 1, 6, "", (at, 0)) for at in ("10.1.2.3", "fe80::7")]
    monkeypatch.setattr(link.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(link.socket, "getaddrinfo", lambda name, port: found)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    check(lambda: check_loopback(host), words)


def test_on_a_machine_without_a_name_of_its_own_other_hosts_are_accepted(monkeypatch) -> None:
    def unknown(name: str, port: None) -> None:
        raise OSError("no such name")

    monkeypatch.setattr(link.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(link.socket, "getaddrinfo", unknown)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    check(lambda: check_loopback("10.1.2.3"), None)
    check(lambda: check_loopback("here"), "the store on here is open")
