"""The chain of segments: cut graphs equal one graph bit for bit, and collectives start in time."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from threads import on_mesh
from torch import nn

from warpweave.kernels.runtime.wgrad import wgrad
from warpweave.layers.records import collect_records
from warpweave.model.config import ParallelPlan
from warpweave.model.gpt import GPT, GPTConfig
from warpweave.parallel.context import attention
from warpweave.parallel.context.kept import Kept
from warpweave.parallel.data.unit import Unit, make_unit
from warpweave.parallel.mesh import ConnectedMesh, Mesh, single
from warpweave.parallel.pipeline.losses import LOSS
from warpweave.parallel.pipeline.stage import ChainStage, Segment
from warpweave.parallel.shard import ParamRecord

WIDTH, MICRO_BATCHES = 7, 3


class _Linear(torch.autograd.Function):
    """A linear layer that may defer its weight gradient, and counts its backward passes."""

    passes = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        _Linear.passes += 1
        return dy @ weight, wgrad(weight, lambda: dy.T @ x)


class _Layer(nn.Module):
    """tanh(x W^T + b): a weight that may be deferred and a bias that may not."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=dtype))

    def forward(self, x):
        return torch.tanh(_Linear.apply(x, self.weight) + self.bias)


def _layers(count: int, dtype: torch.dtype = torch.float32) -> list[_Layer]:
    return [_Layer(k, dtype) for k in range(count)]


def _unit(k: int, layer: nn.Module, mesh, stage: int = 0) -> Unit:
    records = {n: r.renamed(f"{k}.{n}") for n, r in collect_records(layer).items()}
    params = [(records[n], p) for n, p in layer.named_parameters()]
    return make_unit(f"{k}", params, mesh, zero=stage)


def _chain(layers, mesh=None, *, stage=0, recompute=False, trace=None, **options) -> ChainStage:
    """Make the layers segments; the first one gets the batch itself, the last returns the loss."""
    trace = trace if trace is not None else (lambda k: None)

    def segment(k: int, layer: nn.Module) -> Segment:
        last = k == len(layers) - 1

        def fn(x, batch):
            trace(k)
            y = layer(batch if x is None else x)
            return (None, {LOSS: (y * y).sum()}) if last else y

        return Segment(f"{k}", fn, (_unit(k, layer, mesh or single(), stage),), recompute)

    return ChainStage([segment(k, layer) for k, layer in enumerate(layers)], **options)


def _batches(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draws = torch.Generator().manual_seed(9)
    return torch.randn(MICRO_BATCHES, 5, WIDTH, generator=draws, dtype=dtype)


def _go(chain: ChainStage, batches, order: str = "FB", seed=None) -> None:
    """Run F, B, I and W of every micro-batch; "FI W" means all F and I first, then all W."""
    chain.begin(batches, seed)
    does = {"F": chain.forward, "B": chain.backward, "I": chain.backward_input}
    for phase in order.split():
        for mb, op in itertools.product(range(len(batches)), phase):
            chain.backward_weight(mb) if op == "W" else does[op](mb, None)
    chain.reduce()


def _losses(chain: ChainStage) -> list[torch.Tensor]:
    return [losses[LOSS] for losses in chain.losses.values()]


def _run(chain: ChainStage, *args, **options) -> list[torch.Tensor]:
    """Do the same, and return the gradients."""
    _go(chain, *args, **options)
    return [p.grad.clone() for unit in chain.units for _, p in unit.params]


def _one_graph(layers, batches) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return losses and gradients of plain autograd, accumulated over the micro-batches."""
    losses = []
    for x in batches:
        for layer in layers:
            x = layer(x)
        losses.append((x * x).sum())
        losses[-1].backward()
    grads = [p.grad for layer in layers for p in (layer.weight, layer.bias)]
    return [loss.detach() for loss in losses], grads


@pytest.mark.parametrize("order", ["FB", "F B"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_backward_through_cut_segments_equals_one_graph_bit_for_bit(dtype, recompute, order):
    losses, grads = _one_graph(_layers(4, dtype), _batches(dtype))
    chain = _chain(_layers(4, dtype), recompute=recompute)
    found = _run(chain, _batches(dtype), order)
    assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(_losses(chain), losses, strict=True))


@pytest.mark.parametrize("order", ["FIW", "FI W", "F I W"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_deferred_weight_gradients_equal_immediate_and_backwards_run_once(order, recompute):
    expected = _run(_chain(_layers(4)), _batches())
    chain = _chain(_layers(4), recompute=recompute)
    _Linear.passes = 0
    found = _run(chain, _batches(), order)
    assert _Linear.passes == 4 * MICRO_BATCHES
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_weight_gradients_wait_for_backward_weight():
    chain = _chain(_layers(3))
    chain.begin(_batches())
    chain.forward(0, None)
    chain.backward_input(0, None)
    grads = {r.name: p.grad for unit in chain.units for r, p in unit.params}
    assert all((grads[f"{k}.weight"] == 0).all() for k in range(3))
    assert all((grads[f"{k}.bias"] != 0).any() for k in range(3))
    chain.backward_weight(0)
    assert all((grads[f"{k}.weight"] != 0).any() for k in range(3))


class _Reads(_Linear):
    """A layer whose deferred gradient reads the weight, as if it recomputed its activations."""

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, wgrad(weight, lambda: dy.T @ (x @ weight.detach()))


def test_a_deferred_weight_gradient_reads_the_weights_of_its_forward():
    """An update comes between I and W, with the newest version and with the previous one."""
    found = []
    for updates in (0, 1, 2):
        chain = _chain(_layers(2), versions=3)
        chain.start()
        chain.begin(_batches()[:1])
        with mock.patch(f"{__name__}._Linear", _Reads), torch.no_grad():
            chain.forward(0, None)
            chain.backward_input(0, None)
            for _ in range(updates):
                for unit in chain.units:
                    unit.parameters.next_version(unit.state.region)
                    unit.state.master.mul_(2)
                chain.updated()
            chain.backward_weight(0)
        chain.reduce()
        found.append([p.grad.clone() for unit in chain.units for _, p in unit.params])
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))


def test_a_middle_stage_passes_activations_and_gradients_on():
    layers, x = _layers(2, torch.float64), _batches(torch.float64)[0]
    dy = torch.randn_like(x)
    entry = x.clone().requires_grad_()
    y = layers[1](layers[0](entry))
    y.backward(dy)
    parts = [Segment(f"{k}", lambda x, _, m=m: m(x), (_unit(k, m, single()),))
             for k, m in enumerate(_layers(2, torch.float64))]  # fmt: skip
    chain = ChainStage(parts)
    chain.begin([None])
    assert torch.equal(chain.forward(0, x), y.detach())
    assert torch.equal(chain.backward(0, dy), entry.grad)
    found, losses = chain.evaluate(x, None)
    assert torch.equal(found, y.detach())
    assert (chain.losses, losses) == ({0: {}}, {})


def test_the_loss_scale_multiplies_every_gradient_and_not_the_loss():
    plain, scaled = _chain(_layers(3)), _chain(_layers(3))
    expected = _run(plain, _batches())
    found = _run(scaled, _batches(), seed=torch.tensor(1024.0))
    assert all(torch.equal(a, b * 1024) for a, b in zip(found, expected, strict=True))
    assert _losses(plain) == _losses(scaled)


CONFIGS = {
    "gpt2": GPTConfig(23, 8, 2, 16, 4, dropout=0.3),
    "llama": GPTConfig(
        23, 8, 2, 16, 4, 2, 24, "rope", norm="rms", activation="swiglu", bias=False, tied=False,
        dropout=0.3,
    ),
}  # fmt: skip


def _gpt_grads(config: GPTConfig, recompute: str, mesh=None, **plan) -> dict[str, torch.Tensor]:
    plan = ParallelPlan(recompute=recompute, **plan)
    model = GPT(config, mesh=mesh, plan=plan, dtype=torch.float32)
    chain = ChainStage(model.segments()[0])
    tokens = torch.randint(0, 23, (2, 3, 9), generator=torch.Generator().manual_seed(4))
    batches = [
        model.micro_batch(t[:, :-1], t[:, 1:], torch.tensor(48.0), sample_ids=ids, seed=11)
        for t, ids in zip(tokens, torch.arange(6).view(2, 3))
    ]
    _run(chain, batches)
    return {r.name: p.grad for unit in chain.units for r, p in unit.params}


@pytest.mark.parametrize("style", CONFIGS)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit_of_a_gpts_gradients_with_dropout(recompute, style):
    expected = _gpt_grads(CONFIGS[style], "none")
    found = _gpt_grads(CONFIGS[style], recompute)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _on_context_ranks(rank: int) -> None:
    mesh, config = Mesh(cp=2).connect(), CONFIGS["llama"]
    watched = {
        name: mock.Mock(forward=mock.Mock(side_effect=own.forward), backward=own.backward)
        for name, own in attention._STRATEGIES.items()
    }
    with mock.patch.object(attention, "_STRATEGIES", watched):
        for name in ("ring", "gather", "stream", "ulysses"):
            found, attended = [], watched[name].forward
            for recompute in ("none", "full"):
                found.append(_gpt_grads(config, recompute, mesh, cp_strategy=name))
                assert attended.call_count == 2 * config.layers, (name, recompute)
                attended.reset_mock()
            assert all(torch.equal(found[1][key], found[0][key]) for key in found[0]), name
        with mock.patch.multiple(Kept, first=nullcontext, second=nullcontext):
            _gpt_grads(config, "full", mesh, cp_strategy=name)
        assert attended.call_count == 4 * config.layers


def test_full_recomputation_over_context_ranks_repeats_no_send_or_attention():
    run_ranks(2, _on_context_ranks)


def _two_readers(mesh, stage: int) -> None:
    """Make the first layer the last one as well, like a tied embedding on a single stage."""
    layers = _layers(2, torch.float64)
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    batches = [x + mesh.index("dp") for x in _batches(torch.float64)]
    losses = [(layers[0](layers[1](layers[0](x))) ** 2).sum() for x in batches]
    expected = torch.autograd.grad(sum(losses), parameters)
    for gradient in expected if mesh.size("dp") > 1 else ():
        dist.all_reduce(gradient)
    units = [_unit(k, layer, mesh, stage) for k, layer in enumerate(layers)]
    fns = (lambda x, b: layers[0](b), lambda x, b: layers[1](x),
           lambda x, b: (None, {LOSS: (layers[0](x) ** 2).sum()}))  # fmt: skip
    order = (units[0], units[1], units[0])
    segments = [Segment("s", f, (u,)) for f, u in zip(fns, order)]
    chain = ChainStage(segments, bucket_bytes=0)
    assert chain.units == units
    _go(chain, batches)
    found = [gradient for unit in units for _, gradient in unit.read("grad")]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-14 * b.abs().max(), stage


def _two_readers_on_two_ranks(rank: int) -> None:
    mesh = Mesh(dp=2).connect()
    for stage in range(4):
        _two_readers(mesh, stage)


def test_a_unit_that_two_segments_read_gets_both_gradients():
    _two_readers(single(), 0)
    run_ranks(2, _two_readers_on_two_ranks)


# -------------------------------------------------------------------------- times of collectives


class _Trace:
    """Record (event, segment) in order. Patches this process's collectives."""

    def __init__(self, mesh, stage: int, layers: int = 5, **options) -> None:
        self.events: list[tuple[str, int]] = []
        self.present: list[tuple[int, set[int]]] = []
        self.messages: list[int] = []  # number of units that each reduction sums
        self.chain = _chain(_layers(layers), mesh, stage=stage, trace=self._compute, **options)
        self.backward: list[tuple[int, int, int]] = []  # segment, in flight, gradients open
        for k, layer in enumerate(self.chain.segments):
            (unit,) = layer.units
            store, gradients = unit.parameters, unit.gradients
            store.unshard = self._noted("gather", k, store.unshard, lambda s=store: s._gather)
            gradients.start = self._noted("reduce", k, gradients.start, lambda: None)
            weight = next(p for r, p in unit.params if r.name.endswith("weight"))
            weight.register_hook(lambda g, k=k: self._backward(k))

    def _noted(self, event: str, k: int, fn, state):
        def run(*following, **options):
            before = state()
            fn(*following, **options)
            if event == "reduce":
                self.messages.append(1 + sum(map(len, following)))
            if event != "gather" or state() is not before:
                self.events.append((event, k))

        return run

    def _compute(self, k: int) -> None:
        self.events.append(("compute", k))
        sizes = [unit.parameters.flat.untyped_storage().size() for unit in self.chain.units]
        self.present.append((k, {j for j, size in enumerate(sizes) if size}))

    def _backward(self, k: int) -> None:
        units = self.chain.units
        self.events.append(("backward", k))
        flying = sum(unit.gradients._in_flight is not None for unit in units)
        opened = sum(unit.gradients.flat.untyped_storage().size() > 0 for unit in units)
        self.backward.append((k, flying, opened))


def _in_flight(rank: int) -> None:
    for sizes, stage in ((Mesh(dp=2), 2), (Mesh(cp=2), 3)):
        for order in ("FB", "F B"):
            trace = _Trace(sizes.connect(), stage, layers=6)
            _go(trace.chain, _batches(), order)
            assert len(trace.backward) == 6 * MICRO_BATCHES
            assert max(flying for _, flying, _ in trace.backward) == 2, trace.backward
            assert max(opened for _, _, opened in trace.backward) == 3, trace.backward
            assert all(unit.gradients._in_flight is None for unit in trace.chain.units)


def test_at_most_two_reductions_are_in_flight_while_a_segment_runs_backward():
    run_ranks(2, _in_flight)


def _prefetch(rank: int) -> None:
    last = 4
    trace = _Trace(Mesh(dp=2).connect(), 3)
    _go(trace.chain, _batches()[:2])
    once = [("gather", 0)]
    for k in range(last):
        once += [("gather", k + 1), ("compute", k)]
    once += [("compute", last)]  # its parameters stay for the backward pass
    for k in reversed(range(last + 1)):
        once += [("gather", k - 1)] * (k > 0) + [("backward", k), ("reduce", k)]
    assert trace.events == once * 2, trace.events


def _freed(rank: int) -> None:
    last = 4
    for recompute in (False, True):
        trace = _Trace(Mesh(dp=2).connect(), 3, recompute=recompute)
        _go(trace.chain, _batches()[:1])
        forward = [(k, {k, min(k + 1, last)}) for k in range(last + 1)]
        again = [(k, {k, max(k - 1, 0)}) for k in reversed(range(last + 1))]
        assert trace.present == forward + again * recompute, trace.present
        flats = [x.flat for unit in trace.chain.units for x in (unit.parameters, unit.gradients)]
        assert not any(flat.untyped_storage().size() for flat in flats)
        trace.present.clear()
        trace.chain.evaluate(None, _batches()[0])
        assert trace.present == forward
        assert all(unit.parameters.flat.untyped_storage().size() == 0 for unit in trace.chain.units)


def _early_reduction(rank: int) -> None:
    """Stages 0 and 1 reduce once, bucket by bucket, while earlier segments run their backward."""
    for stage in (0, 1):
        trace = _Trace(Mesh(dp=2).connect(), stage, layers=3, bucket_bytes=1)
        _go(trace.chain, _batches())
        tail = [(event, k) for k in (2, 1, 0) for event in ("backward", "reduce")]
        assert trace.events[-6:] == tail
        assert sum(event == "reduce" for event, _ in trace.events) == 3

        two = 2 * trace.chain.units[0].gradients.flat.nbytes
        trace = _Trace(Mesh(dp=2).connect(), stage, layers=3, bucket_bytes=two)
        _go(trace.chain, _batches())
        bucket = [("reduce", 2)] if stage == 0 else [("reduce", 2), ("reduce", 1)]
        tail = [("backward", 2), ("backward", 1), *bucket, ("backward", 0), ("reduce", 0)]
        assert trace.events[-len(tail) :] == tail
        assert trace.messages == ([2, 1] if stage == 0 else [1, 1, 1])  # whole gradients are joined

        trace = _Trace(Mesh(dp=2).connect(), stage, layers=3)  # far less than a bucket
        _go(trace.chain, _batches())
        events = [event for event, _ in trace.events]
        assert "reduce" not in events[: -len(trace.messages)]
        assert trace.messages == ([3] if stage == 0 else [1, 1, 1])


def _same_bits(rank: int) -> None:
    """Every ZeRO stage, recomputed or deferred, sums gradients to the same bits on 2 ranks."""
    mesh, batches = Mesh(dp=2).connect(), _batches() + rank
    expected = None
    for stage, recompute, order in itertools.product(range(4), (False, True), ("FB", "FI W")):
        chain = _chain(_layers(4), mesh, stage=stage, recompute=recompute)
        _go(chain, batches, order)
        grads = {r.name: g.clone() for unit in chain.units for r, g in unit.read("grad")}
        expected = expected or grads
        for name, grad in grads.items():
            # Stages 2 and 3 add micro-batches after the sum over ranks, 0 and 1 before it.
            error = (grad - expected[name]).abs().max() / expected[name].abs().max()
            assert error <= (2e-6 if stage >= 2 else 0), (stage, recompute, order, name, error)


def _timely(rank: int) -> None:
    _prefetch(rank)
    _freed(rank)
    _early_reduction(rank)
    _same_bits(rank)


def test_gathers_start_ahead_parameters_are_freed_and_reductions_start_early():
    run_ranks(2, _timely)


def _cut_ones(mesh: ConnectedMesh, buckets: float, each: int | None) -> list[int]:
    """Return the micro-batches of six in which the second of three segments has a separate graph,
    with a bucket as large as the gradients of this many."""
    layers, cut = _layers(3), []
    units = [_unit(k, layer, mesh) for k, layer in enumerate(layers)]

    def second(x, batch):
        cut.append(x.is_leaf)
        return layers[1](x)

    fns = (lambda x, b: layers[0](b), second, lambda x, b: (None, {LOSS: layers[2](x).sum()}))
    segments = [Segment("s", fn, (unit,)) for fn, unit in zip(fns, units)]
    size = int(buckets * units[0].gradients.flat.nbytes)
    chain = ChainStage(segments, bucket_bytes=size)
    chain.begin([*_batches(), *_batches()], each=each)
    for mb in range(6):
        chain.forward(mb, None)
    return [mb for mb in range(6) if cut[mb]]


def test_chain_is_cut_only_where_a_bucket_is_reduced_before_its_end() -> None:
    """These are all segments except the first, which completes last, on several data ranks."""
    assert _cut_ones(single(), 0, None) == []
    for buckets, each, expected in (
        (0, None, [5]), (2, None, [5]), (2.1, None, []), (2, 2, [1, 3, 5]), (2, 3, [2, 5]),
    ):  # fmt: skip
        assert on_mesh(Mesh(dp=2), _cut_ones, buckets, each) == [expected] * 2, (buckets, each)


def test_replacement_of_the_last_segment_runs_once_and_the_others_still_run() -> None:
    p = nn.Parameter(torch.ones(1))
    unit = make_unit("unit", [(ParamRecord("p", (1,)), p)], single())
    chain = [
        Segment(str(k), lambda x, batch, k=k: 10 * (batch if x is None else x) + k, (unit,))
        for k in range(1, 4)
    ]
    stage = ChainStage(chain)
    assert stage.evaluate(None, 7) == (7123, {})
    assert stage.evaluate(None, 7, lambda x, batch: 10 * x + batch) == (7127, {})
    assert stage.evaluate(8, 7) == (8123, {})
    losses = {"other": torch.ones(())}
    assert ChainStage(chain[:1]).evaluate(None, 7, lambda x, batch: (batch, losses)) == (7, losses)


def _two_kinds(mesh: ConnectedMesh) -> None:
    """Whole gradients of two dtypes, or of two groups of ranks: one buffer for each kind."""
    at = mesh.index("dp")
    units, terms = [], [3.0 + at, 2.0**-40 * (1 + at)]
    for name, dtype in (("a", torch.float32), ("b", torch.float64), ("c", torch.float32),
                        ("d", torch.float32)):  # fmt: skip
        p = nn.Parameter(torch.ones(2, dtype=dtype))
        record = ParamRecord(name, (2,), sum_over="dp" if name == "d" else "data")
        units.append(make_unit(name, [(record, p)], mesh))
    segments = [Segment(u.name, lambda x, _: x, (u,)) for u in units]
    stage = ChainStage(segments)
    assert units[2].gradients.is_before(units[0].gradients)  # they complete in reverse order
    assert not units[1].gradients.is_before(units[0].gradients)
    for unit, term in zip(units, (terms[0], terms[0] + terms[1], terms[0], terms[0])):
        unit.gradients.views[unit.params[0][1]].fill_(term)
    stage.begin([None])
    stage._backwards_left = 0
    stage._reduce_completed(units)
    stage.reduce()
    for unit, total in zip(units, (24.0, 24.0 + 2.0**-40 * 12, 24.0, 12.0)):
        wide = torch.float64 if unit.name == "b" else torch.float32
        assert unit.gradients.reduced.dtype == wide
        assert (unit.gradients.reduced[:2] == total).all(), unit.name


def test_gradients_of_two_dtypes_or_groups_are_reduced_in_their_own() -> None:
    on_mesh(Mesh(dp=3, cp=2), _two_kinds)


def test_a_parameter_that_a_step_does_not_reach_has_no_gradient() -> None:
    p, q = (nn.Parameter(torch.ones(3)) for _ in "pq")
    unit = make_unit("unit", [(ParamRecord("p", (3,)), p), (ParamRecord("q", (3,)), q)], single())
    for loss, grads in ((lambda: (p + 2 * q).sum(), (1, 2)), (lambda: (3 * p).sum(), (3, 0))):
        unit.gradients.before_backward()
        loss().backward()
        unit.gradients.after_backward()
        assert [(x.grad.min(), x.grad.max()) for x in (p, q)] == [(g, g) for g in grads]
        assert unit.gradients.flat.sum() == 3 * sum(grads)  # nothing between or behind them
        unit.gradients.clear()


def test_a_step_begins_with_nothing_of_the_one_before() -> None:
    """This includes a step that ended midway."""
    chain, again = _chain(_layers(2)), _chain(_layers(2))
    chain.begin([*_batches(), *_batches()])
    for mb in (2, 4):  # one that occurs again, and one that does not
        chain.forward(mb, None)
    for _ in range(2):
        _go(chain, _batches())
        for unit in chain.units:
            unit.gradients.clear()
    _go(again, _batches())
    assert _losses(chain) == _losses(again)
    assert not chain._saved


def _left_to_another(mesh: ConnectedMesh, layers: list[_Layer], every: list, cut: bool) -> None:
    """Use one list of layers for each rank; a recomputed segment is cut from the others."""
    first, second = mine = layers[2 * mesh.rank : 2 * mesh.rank + 2]
    units = [_unit(k, layer, mesh) for k, layer in enumerate(mine)]
    fns = (lambda x, b: first(b), lambda x, b: (None, {LOSS: second(x).square().sum()}))
    segments = [Segment("s", f, (u,), cut) for f, u in zip(fns, units)]
    _go(ChainStage(segments, shared=units[:1]), _batches() + mesh.rank)
    found = [p.grad for layer in mine for p in (layer.weight, layer.bias)]
    total = [sum(terms) for terms in zip(*every)]
    for grad, expected in zip(found, every[mesh.rank][:2] + total[2:], strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("cut", [False, True])
def test_a_unit_that_another_stage_completes_is_not_reduced_here(cut) -> None:
    every = [_one_graph(_layers(2), _batches() + rank)[1] for rank in range(2)]
    on_mesh(Mesh(dp=2), _left_to_another, [*_layers(2), *_layers(2)], every, cut)
