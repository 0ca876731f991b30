"""PipeDream in passes that remain open: bitwise equal to the delayed update rule, in one process.

The truth is `_delayed`: every stage's gradient at the weights that its forward read, in plain
autograd. It does not depend on schedules, versions or passes.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from refused import check
from torch import Tensor, nn

from warpweave.layers.records import collect_records
from warpweave.parallel.data.optimizer import SGD
from warpweave.parallel.data.unit import make_unit
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.pipeline import Distributed, InFlight, InProcess, ModuleStage, execute
from warpweave.parallel.pipeline.losses import LOSS
from warpweave.parallel.pipeline.stage import ChainStage, Segment
from warpweave.parallel.schedule import (
    Action,
    Schedule,
    cut_into_passes,
    from_csv,
    pipedream,
    renumbered,
    split_backward,
    to_csv,
    validate,
    validate_pass,
    with_comm,
    with_reduce,
)
from warpweave.parallel.schedule.open_passes import staleness
from warpweave.parallel.schedule.ordering import order

# eight blocks, unequal so that every link has a different shape
WIDTHS = (6, 5, 7, 6, 5, 4, 6, 5, 3)
CPU = torch.device("cpu")
LR = 0.2


def _pipedream(p: int, n: int, split: bool = False) -> Schedule:
    return split_backward(pipedream(p, n)) if split else pipedream(p, n)


def _block(k: int) -> nn.Sequential:
    torch.manual_seed(k)
    return nn.Sequential(nn.Linear(WIDTHS[k], WIDTHS[k + 1]), nn.Tanh())


def _data(n: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(n, 3, WIDTHS[0], generator=draw), torch.randn(n, 3, 1, generator=draw)


def _stages(p: int) -> list[nn.Sequential]:
    return [nn.Sequential(*map(_block, range(8 * s // p, 8 * (s + 1) // p))) for s in range(p)]


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LR, foreach=False)


def _delayed(p: int, n: int, delay=lambda p, s: p - 1 - s) -> tuple[list[Tensor], list[Tensor]]:
    """Compute w_s(t+1), which is AdamW's step from w_s(t) by the gradient of minibatch t, in which
    every stage has its weights of `delay` updates ago. Return the final weights and all losses."""
    modules, (x, target) = _stages(p), _data(n)
    optimizers = [_optimizer(module) for module in modules]
    history = [[[w.detach().clone() for w in m.parameters()] for m in modules]]
    losses = []
    for t in range(n):
        y, read = x[t], []
        for s, module in enumerate(modules):
            old = [w.clone().requires_grad_() for w in history[max(t - delay(p, s), 0)][s]]
            read.append(old)
            names = [name for name, _ in module.named_parameters()]
            y = torch.func.functional_call(module, dict(zip(names, old)), (y,))
        loss = ((y - target[t]) ** 2).sum()
        loss.backward()
        losses.append(loss.detach())
        for module, optimizer, old in zip(modules, optimizers, read):
            for w, copy in zip(module.parameters(), old):
                w.grad = copy.grad
            optimizer.step()
        history.append([[w.detach().clone() for w in m.parameters()] for m in modules])
    return [w for of_stage in history[-1] for w in of_stage], losses


def _build(p: int, n: int, mine: range, versions=None) -> dict[int, ModuleStage]:
    modules, (x, target) = _stages(p), _data(n)
    result = {}
    for s in mine:
        first = 8 * s // p
        result[s] = ModuleStage(
            modules[s],
            inputs=(lambda mb: x[mb]) if s == 0 else None,
            like=None if s == 0 else ((3, WIDTHS[first]), torch.float32, CPU),
            loss=(lambda mb, y: ((y - target[mb]) ** 2).sum()) if s == p - 1 else None,
            optimizer=_optimizer(modules[s]),
            versions=p - s if versions is None else versions,
        )
    return result


def _passes(p: int, each: int, count: int, split: bool = False) -> list[Schedule]:
    """Return the first pass, the one that is repeated, and the last."""
    lists = _pipedream(p, each * count, split)
    validate(lists, staleness=p - 1)
    validate(with_comm(lists), staleness=p - 1)
    passes = [
        renumbered(with_comm(one), k * each, k * each)
        for k, one in enumerate(cut_into_passes(lists, each))
    ]
    assert all(one == passes[1] for one in passes[1:-1])
    return [passes[0], passes[1], passes[-1]]


def _run(stages, transports, passes, each: int, count: int) -> None:
    in_flight = InFlight()
    for k in range(count):
        which = 0 if k == 0 else 1 if k < count - 1 else 2
        execute(passes[which], stages, transports[which], in_flight)
        in_flight.advance(each, each)
    in_flight.check_ended()


def _weights(stages: dict[int, ModuleStage]) -> list[Tensor]:
    return [w.detach() for s in sorted(stages) for w in stages[s].module.parameters()]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_pipedream_in_open_passes_is_the_delayed_rule_bit_for_bit(p: int, split: bool) -> None:
    each, count = max(3, p - 1), 4
    stages = _build(p, each * count, range(p))
    passes = _passes(p, each, count, split)
    for one in passes:
        validate_pass(one)
        assert from_csv(to_csv(one)) == one
    _run(stages, [InProcess()] * 3, passes, each, count)
    expected, losses = _delayed(p, each * count)
    assert all(map(torch.equal, _weights(stages), expected))
    assert [stages[p - 1].losses[t]["loss"] for t in range(each * count)] == losses
    if p > 1:  # the delay shows
        fresh, _ = _delayed(p, each * count, lambda p, s: 0)
        assert max((a - b).abs().max() for a, b in zip(expected, fresh)) > 1e-3


def _vee(stages: int, n: int, split: bool = False) -> Schedule:
    """Fold the passes: stages s and `stages` - 1 - s on one rank."""
    flat, lists = _pipedream(stages, n, split), [[] for _ in range(-(-stages // 2))]
    for s, index in order(flat):
        lists[min(s, stages - 1 - s)].append(flat[s][index])
    return lists


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_stages_of_one_rank_wait_for_each_other_over_passes(count: int, split: bool) -> None:
    """A micro-batch that has ended on one stage of a rank continues on
    the other in the next pass."""
    lists, stages, in_flight = _vee(count, 12, split), _build(count, 12, range(count)), InFlight()
    for k, one in enumerate(cut_into_passes(lists, 3)):
        one = renumbered(with_comm(one), 3 * k, 3 * k)
        validate_pass(one)
        execute(one, stages, InProcess(), in_flight)
        in_flight.advance(3, 3)
    in_flight.check_ended()
    assert all(map(torch.equal, _weights(stages), _delayed(count, 12)[0]))


def _on_gloo(rank: int, p: int, each: int, count: int) -> list[Tensor]:
    passes = _passes(p, each, count)
    transports = [Distributed(one, dist.group.WORLD, open_pass=True, timeout=300) for one in passes]
    stages = _build(p, each * count, range(rank, rank + 1))
    _run(stages, transports, passes, each, count)
    return _weights(stages)


def test_pipedream_on_real_ranks_is_the_delayed_rule_bit_for_bit() -> None:
    p, each, count = 3, 3, 5
    found = [w for rank in run_ranks(p, _on_gloo, p, each, count) for w in rank]
    assert all(map(torch.equal, found, _delayed(p, each * count)[0]))


# ----------------------------------------------------------------------------- errors


def test_a_pass_holds_what_is_under_way_and_says_what_never_ends() -> None:
    passes, stages = _passes(3, 3, 3), _build(3, 9, range(3))
    in_flight = InFlight()
    execute(passes[0], stages, InProcess(), in_flight)
    words = r"^rank 0: the run ends with unfinished \(stage, micro-batch\) pairs: "
    with pytest.raises(RuntimeError, match=words + r"\[\(0, 3\), \(0, 4\)\]$"):
        in_flight.check_ended()
    with pytest.raises(RuntimeError, match="rank 1: 1F1 comes before 1RECV_F1"):
        execute(passes[1], stages, InProcess(), InFlight())  # nothing is in flight
    with pytest.raises(RuntimeError, match=r"action list ends with unused data of .*\('F', 1, 4\)"):
        execute(passes[0], _build(3, 9, range(3)), InProcess())  # closed
    stages = _build(3, 9, range(3), versions=2)
    words = "micro-batch 2 reads version 0 of the weights, but the stage holds"
    check(lambda: _run(stages, [InProcess()] * 3, passes, 3, 3), words)


def _without(lists: Schedule, *cells: str) -> Schedule:
    return [[a for a in row if str(a) not in cells] for row in lists]


def test_a_pass_that_cannot_be_is_refused() -> None:
    first, steady, _ = _passes(3, 3, 4)
    for lists, words in (
        (_without(first, "1RECV_F4"), "1RECV_F4 must occur once"),
        (_without(steady, "0SEND_F3"), "0SEND_F3 must occur once"),
        ([row + row[:1] for row in steady], "occurs twice in a pass"),
        ([row[::-1] for row in steady], "sent as|deadlock"),
    ):
        check(partial(validate_pass, lists), words)
    late = [[Action(op, s, i) for s in (1, 0) for i in (0, 1) for op in "FB"]]
    for lists, each, words in (
        (pipedream(2, 12), 5, "12 micro-batches are not divisible by 5 per pass"),
        (first, 3, "already have sends and receives"),
        (_vee(4, 12), 3, "pass 1 would need 2F7 from a later pass"),
        (late, 1, r"pass 0 would have no action of stages \[0\]"),
    ):
        check(partial(cut_into_passes, lists, each), words)
    words = r"for ranks \[0, 1\], got \[0, 1, 2\]"
    check(lambda: execute(first[:2], _build(3, 12, range(3)), InProcess(), InFlight()), words)
    wrong = pipedream(2, 4)
    wrong[0][-2] = wrong[0][-2]._replace(ver=1)
    check(lambda: validate(wrong, staleness=1), "the F of the same micro-batch read version")


def test_a_stage_is_as_stale_as_the_oldest_of_its_gradients_wherever_that_is() -> None:
    """Its age is that of its weights when the gradient arrived: its own update does not count."""
    early = "0F0 0F1 0F2 0B0 0UPDATE@1 0B1 0UPDATE@2 0B2 0UPDATE@3 0F3@3 0B3@3 0UPDATE@4"
    split = "1F0 1F1 1I0 1I1 1W1 1UPDATE@1 1W0 1UPDATE@2 1F2@2 1B2@2 1F3@2 1B3@2 1UPDATE@3"
    fresh = "2F0 2B0 2F1 2B1 2UPDATE@1 2F2@1 2B2@1 2F3@1 2B3@1 2UPDATE@2"
    text = "\n".join(row.replace(" ", ",") for row in (early, split, fresh))
    assert staleness(from_csv(text)) == (2, 1, 0)
    assert staleness(pipedream(4, 9)) == (3, 2, 1, 0)
    assert staleness(pipedream(3, 9, vertical=True)) == (2, 2, 2)


def test_messages_end_in_the_pass_in_which_they_begin() -> None:
    """A message that only the next pass uses is received at the end, and not again there."""
    first, steady, last = ([" ".join(map(str, row)) for row in one] for one in _passes(2, 2, 3))
    assert first[1] == (
        "1RECV_F0 1F0 1B0 1SEND_B0 1UPDATE@1 1RECV_F1 1F1@1 1B1@1 1SEND_B1 1UPDATE@2 1RECV_F2"
    )
    assert steady[1] == (
        "1F0 1B0 1SEND_B0 1UPDATE@1 1RECV_F1 1F1@1 1B1@1 1SEND_B1 1UPDATE@2 1RECV_F2"
    )
    assert last[1] == "1F0 1B0 1SEND_B0 1UPDATE@1 1RECV_F1 1F1@1 1B1@1 1SEND_B1 1UPDATE@2"


# ----------------------------------------------------------------------------- units with versions


class _Updating(ChainStage):
    """A chain of one segment per block, with a separate optimizer."""

    def __init__(self, p: int, s: int, mesh=None, *, zero: int = 0, versions: int, rule) -> None:
        mesh, modules, segments = mesh or single(), _stages(p)[s].to(torch.float64), []
        for k, block in enumerate(modules):
            records = {n: r.renamed(f"{k}.{n}") for n, r in collect_records(block).items()}
            params = [(records[n], w) for n, w in block.named_parameters()]
            last = s == p - 1 and k == len(modules) - 1

            def fn(x, batch, block=block, last=last):
                y = block(batch[0] if x is None else x)
                return (None, {LOSS: ((y - batch[1]) ** 2).sum()}) if last else y

            segments.append(
                Segment(f"{k}", fn, (make_unit(f"{k}", params, mesh, zero=zero),), k == 1)
            )
        super().__init__(segments, versions=versions)
        self.optimizer = ZeroOptimizer(self.units, mesh, rule, clip=None)
        self.width, self.lr = modules[0][0].in_features, LR

    def input_like(self, mb: int):
        return (3, self.width), torch.float64, CPU

    def update(self) -> None:
        self.optimizer.step(self.lr)
        self.updated()

    def weights(self) -> list[Tensor]:
        found = [(r.name, t.clone()) for unit in self.units for r, t in unit.read("param")]
        order = [n for n, _ in _stages(1)[0].named_parameters()]
        return [t for _, t in sorted(found, key=lambda pair: order.index(pair[0]))]


def _rule_of_sgd(weights, grads, moments, lr: float) -> None:
    for w, g, b in zip(weights, grads, moments):
        b.copy_(0.9 * b + g)
        w.copy_(w - lr * b)


def _delayed_sgd(p: int, n: int, each: int, delay, terms: int = 1) -> list[Tensor]:
    """Like `_delayed`, with momentum, in float64, over `each` minibatches of `terms` replicas."""
    modules = [module.to(torch.float64) for module in _stages(p)]
    x, target = (part.double() for part in _data(n * terms))
    weights = [[w.detach().clone() for w in m.parameters()] for m in modules]
    moments = [[torch.zeros_like(w) for w in of] for of in weights]
    history = [[[w.clone() for w in of] for of in weights]]
    for t in range(n // each):
        old = [
            [w.clone().requires_grad_() for w in history[max(t - delay(p, s), 0)][s]]
            for s in range(p)
        ]
        for mb in range(t * each * terms, (t + 1) * each * terms):
            y = x[mb]
            for module, of in zip(modules, old):
                names = [name for name, _ in module.named_parameters()]
                y = torch.func.functional_call(module, dict(zip(names, of)), (y,))
            ((y - target[mb]) ** 2).sum().backward()
        for of, read, b in zip(weights, old, moments):
            _rule_of_sgd(of, [w.grad for w in read], b, LR / 8)
        history.append([[w.clone() for w in of] for of in weights])
    return [w for of in history[-1] for w in of]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_versions_of_units_are_the_delayed_rule_bit_for_bit(p: int, split: bool) -> None:
    each, count = max(3, p - 1), 4
    x, target = (part.double() for part in _data(each * count))
    batches = list(zip(x, target))
    passes = _passes(p, each, count, split)
    stages = {s: _Updating(p, s, versions=p - s, rule=SGD()) for s in range(p)}
    in_flight = InFlight()
    for stage in stages.values():
        stage.lr = LR / 8
        stage.begin(batches[: each + p], each=1)
    for k in range(count):
        which = 0 if k == 0 else 1 if k < count - 1 else 2
        execute(passes[which], stages, InProcess(), in_flight)
        in_flight.advance(each, each)
        for stage in stages.values():
            stage.feed(batches[each * (k + 1) + p : each * (k + 2) + p])
            assert not stage._saved or k < count - 1
    in_flight.check_ended()
    found = [w for s in range(p) for w in stages[s].weights()]
    expected = _delayed_sgd(p, each * count, 1, lambda p, s: p - 1 - s)
    assert all(map(torch.equal, found, expected))
    assert [len({u.parameters.kept for u in stages[s].units}) for s in range(p)] == [1] * p
    assert [stages[s].units[0].parameters.kept for s in range(p)] == [p - s for s in range(p)]


def two_buffered(n: int, each: int) -> Schedule:
    """Compute PipeDream-2BW (arXiv:2006.09503) on one stage: an update after every `each`
    micro-batches, by gradients at the second newest weights."""
    row = [Action("F", 0, mb, 0) for mb in range(each)]
    for t in range(n // each):
        row += [Action("F", 0, mb, t) for mb in range((t + 1) * each, min((t + 2) * each, n))]
        done = range(t * each, (t + 1) * each)
        row += [Action("B", 0, mb, max(t - 1, 0)) for mb in done]
        row.append(Action("UPDATE", 0, ver=t + 1))
    return [row]


def _replicas(rank: int, n: int, each: int) -> list[list[Tensor]]:
    mesh, found = Mesh(dp=2).connect(), []
    x, target = (part.double() for part in _data(2 * n))
    lists = with_reduce(two_buffered(n, each))
    assert [a.op for a in lists[0]].count("REDUCE") == n // each
    for zero in (0, 1, 2):
        stage = _Updating(1, 0, mesh, zero=zero, versions=2, rule=SGD())
        stage.lr = LR / 8
        stage.begin(list(zip(x[rank::2], target[rank::2])), each=each)
        execute(lists, {0: stage}, Distributed(lists, None, staleness=1))
        assert all(unit.parameters.kept == 2 for unit in stage.units)
        found.append(stage.weights())
    return found


def test_replicas_reduce_before_each_update_of_a_list_and_keep_two_versions() -> None:
    n, each = 9, 3
    expected = _delayed_sgd(1, n, each, lambda p, s: 1, terms=2)
    synchronous = _delayed_sgd(1, n, each, lambda p, s: 0, terms=2)
    assert max((a - b).abs().max() for a, b in zip(expected, synchronous)) > 1e-3
    for rank in run_ranks(2, _replicas, n, each):
        for found in rank:
            for a, b in zip(found, expected, strict=True):
                assert (a - b).abs().max() <= 1e-13


def _sharded(rank: int) -> str:
    with pytest.raises(ValueError, match="1 if ZeRO 3 shards parameters, got 2") as error:
        _Updating(1, 0, Mesh(dp=2).connect(), zero=3, versions=2, rule=SGD())
    return str(error.value)


def test_versions_of_sharded_parameters_and_of_freed_weights_are_rejected() -> None:
    run_ranks(2, _sharded)
    stage = _Updating(1, 0, versions=2, rule=SGD())
    x, target = (part.double() for part in _data(4))
    stage.begin(list(zip(x, target)), each=1)
    for version in (-1, 1):
        words = rf"version {version} of the weights, but the stage holds only versions \[0\]"
        check(partial(stage.forward, 0, None, version), words)
    stage.forward(0, None, 0)
    for _ in range(2):
        stage.updated()
        for unit in stage.units:
            unit.parameters.next_version(unit.state.region)
    words = r"reads version 0 of the weights, but the stage holds only versions \[1, 2\]"
    check(lambda: stage.backward(0, None), words)
