"""ZeRO stages 0 to 3 against a textbook AdamW on whole float64 tensors, and against torch's own.

Ranks are threads, except in tests that run torch's own optimizers, count messages or name
processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from close import relative_error
from ranks import run_ranks
from threads import run_threads
from torch import nn

from warpweave.checkpoint import open_checkpoint, save_checkpoint
from warpweave.layers.linear import ColumnParallelLinear
from warpweave.layers.records import collect_records
from warpweave.parallel import mesh as mesh_tables
from warpweave.parallel.data import parameters, reduce
from warpweave.parallel.data.optimizer import SGD, AdamW, LossScale
from warpweave.parallel.data.unit import Unit, make_unit
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.pipeline.losses import LOSS
from warpweave.parallel.pipeline.stage import ChainStage, Segment
from warpweave.parallel.shard import Cut, ParamRecord

KINDS = ("param", "exp_avg", "exp_avg_sq")
ADAMW = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
LR, CLIP, STEPS, MICRO_BATCHES = 0.03, 2.0, 3, 3
# name, shape, shard_dim, partial, decay: indivisible sizes; 7 and 13 are padded on tp = 2
SPEC = {
    "block": [
        ("up", (7, 5), 0, False, True),
        ("up_bias", (7,), 0, False, False),
        ("down", (5, 13), 1, False, True),
        ("down_bias", (5,), None, True, False),
        ("norm", (5,), None, True, False),
        ("scale", (11, 3), None, False, True),
        ("offset", (3,), None, False, False),
        ("table", (3, 41), None, True, True),
    ],
    "tiny": [("one", (1,), None, False, True)],
    "embedding": [("embedding", (37, 3), 0, False, True)],  # tied if there are two stages
}


def _draw(shape, *key: int) -> torch.Tensor:
    seed = sum(k * 101**i for i, k in enumerate(key))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _start(name: str, shape) -> torch.Tensor:
    """Return values exactly representable in bf16 and fp16, so that every dtype starts equally."""
    return _draw(shape, len(name), 7).to(torch.bfloat16).double().clamp(-100, 100)


# -------------------------------------------------------------------------- the textbook


def _terms(name: str, shape, step: int, data: int, mb: int, end: int) -> torch.Tensor:
    """Return what data rank `data` adds to the gradient in micro-batch `mb` at pipeline end `end`.

    In bf16 the values are multiples of a fixed step, so float32 sums are exact and every order
    gives one result. The second step's are so small that the clip is inactive.
    """
    grid = 2**16 if step == 2 else 64
    return _draw(shape, len(name), step, data, mb, end).mul(64).round().div(grid)


def _textbook(data: int, ends: int) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    """Return norms and final state of AdamW with a global clip on whole tensors, all in float64."""
    spec = [row for rows in SPEC.values() for row in rows]
    state = {kind: {row[0]: torch.zeros(row[1], dtype=torch.float64) for row in spec}
             for kind in KINDS}  # fmt: skip
    state["param"] = {row[0]: _start(*row[:2]) for row in spec}
    norms, (beta1, beta2) = [], ADAMW["betas"]
    for step in range(1, STEPS + 1):
        grads = {}
        for name, shape, *_ in spec:
            count = ends if name == "embedding" else 1
            every = itertools.product(range(data), range(MICRO_BATCHES), range(count))
            grads[name] = sum(_terms(name, shape, step, *at) for at in every)
        norms.append(math.sqrt(sum(float((g * g).sum()) for g in grads.values())))
        for name, _, _, _, decays in spec:
            g = grads[name] * min(1.0, CLIP / (norms[-1] + 1e-6))
            w, m, v = (state[kind][name] for kind in KINDS)
            w *= 1 - LR * ADAMW["weight_decay"] * decays
            m.mul_(beta1).add_((1 - beta1) * g)
            v.mul_(beta2).add_((1 - beta2) * g * g)
            w -= LR * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + ADAMW["eps"])
    return norms, state


# -------------------------------------------------------------------------- ours


def _units(mesh, stage: int, dtype=torch.float64) -> list[Unit]:
    units = []
    tp, last = mesh.size("tp"), mesh.index("pp") > 0
    for unit, rows in SPEC.items():
        if last and unit != "embedding":  # the last stage holds only the tied embedding
            continue
        params = []
        for name, shape, dim, partial, decay in rows:
            cuts = () if dim is None else (Cut("tp", dim, tp),)
            summed = ("tp",) if partial and tp > 1 else ()
            record = ParamRecord(name, shape, cuts, summed, decay=decay)
            own = record.slice(_start(name, shape), mesh.coords).to(dtype)
            params.append((record, nn.Parameter(own)))
        tied = unit == "embedding" and mesh.size("pp") > 1
        units.append(make_unit(unit, params, mesh, zero=stage, tied=tied, owner=not last))
    return units


def _local(record: ParamRecord, mesh, step: int, mb: int) -> torch.Tensor:
    """Return this rank's gradient of one micro-batch: its rows, or its share of a partial sum."""
    at = (step, mesh.index("data"), mb, mesh.index("pp"))
    whole = _terms(record.name, record.shape, *at)
    index = mesh.index("tp")
    if record.partial:
        share = _draw(record.shape, 5, step, mb).mul(64).round().div(64)
        return share if index == 0 else (whole - share if index == 1 else torch.zeros_like(whole))
    return record.slice(whole, mesh.coords)


def _add(unit: Unit, terms) -> None:
    """Act as a backward pass: add `terms`, in the order of the unit's parameters."""
    unit.gradients.before_backward()
    for (_, param), term in zip(unit.params, terms, strict=True):
        term = term.to(unit.gradients.flat.dtype)
        param.grad = term if param.grad is None else param.grad.add_(term)
    unit.gradients.after_backward()


def _accumulate(unit: Unit, mesh, step: int, scale: float = 1.0, poison: int | None = None) -> None:
    for mb in range(MICRO_BATCHES):
        unit.parameters.unshard()
        unit.parameters.wait()
        _add(unit, [_local(record, mesh, step, mb) * scale for record, _ in unit.params])
        if poison == mb:
            unit.params[-1][1].grad.view(-1)[0] = float("inf")
        unit.parameters.reshard()
        if unit.placement.grad or mb == MICRO_BATCHES - 1:
            unit.gradients.start(last=mb == MICRO_BATCHES - 1)
    unit.gradients.finish()


def _tie(unit: Unit, mesh) -> None:
    if unit.tied:
        dist.all_reduce(unit.gradients.reduced, group=mesh.group("pp"))


def _step(units, optimizer, mesh, step: int, scale: float = 1.0) -> torch.Tensor:
    for unit in units:
        _accumulate(unit, mesh, step, scale)
        _tie(unit, mesh)
    optimizer.sum_partials()
    return optimizer.step(LR)


def _read(units) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: {r.name: t.clone() for u in units for r, t in u.read(kind)} for kind in KINDS}


def _train(mesh, stage: int, dtype=torch.float64):
    units = _units(mesh, stage, dtype)
    optimizer = ZeroOptimizer(units, mesh, AdamW(**ADAMW), clip=CLIP)
    norms = [float(_step(units, optimizer, mesh, step)) for step in range(1, STEPS + 1)]
    state = _read(units)
    return norms, state, units


def _check(mesh, stages) -> None:
    norms, state = _textbook(mesh.size("data"), mesh.size("pp"))
    assert norms[1] < CLIP < norms[0]
    for stage in stages:
        ours, ours_state, units = _train(mesh, stage)
        for actual, expected in zip(ours, norms, strict=True):
            assert abs(actual / expected - 1) < 1e-13, (mesh.sizes, stage)
        for kind in KINDS:
            for name, tensor in ours_state[kind].items():
                error = relative_error(tensor, state[kind][name])
                assert error < 1e-12, (mesh.sizes, stage, kind, name, error)
        for unit in units:
            unit.parameters.unshard()
            unit.parameters.wait()
            for record, param in unit.params:  # the parameters of the next forward pass
                whole = record.slice(state["param"][record.name], mesh.coords)
                assert relative_error(param.detach(), whole) < 1e-12, (mesh.sizes, stage, record)


def _check_meshes(rank: int, meshes: list[Mesh]) -> None:
    for sizes in meshes:
        mesh = sizes.connect()
        _check(mesh, range(4) if mesh.size("data") > 1 else (0,))


MESHES = {
    2: [Mesh(dp=2), Mesh(cp=2), Mesh(tp=2), Mesh(pp=2)],
    3: [Mesh(dp=3), Mesh(tp=3)],
    4: [Mesh(dp=4), Mesh(dp=2, cp=2), Mesh(dp=2, tp=2), Mesh(cp=2, pp=2), Mesh(tp=2, pp=2)],
    "4 hybrid": [Mesh(dp=4, dp_shard=2), Mesh(dp=2, cp=2, dp_shard=1)],
    "6 hybrid": [Mesh(dp=6, dp_shard=3), Mesh(dp=6, dp_shard=2)],
    "8 hybrid": [Mesh(dp=4, tp=2, dp_shard=2), Mesh(dp=4, pp=2, dp_shard=2)],
}


def test_one_device_equals_textbook_adamw_with_a_global_clip():
    _check(single(), (0, 3))


@pytest.mark.parametrize("world", MESHES)
def test_every_stage_on_every_mesh_equals_textbook_adamw_with_a_global_clip(world):
    run_threads(MESHES[world][0].world, _check_meshes, MESHES[world])


def test_so_it_does_on_processes():
    """Covers data over a product of axes, then sharded parameters, and a tied one."""
    run_ranks(4, _check_meshes, [Mesh(dp=2, cp=2), Mesh(tp=2, pp=2)])


# -------------------------------------------------------------------------- low precision


def _masters(rank: int) -> None:
    mesh = Mesh(dp=2).connect()
    for stage in range(4):
        high, low = (_train(mesh, stage, dtype) for dtype in (torch.float32, torch.bfloat16))
        assert high[0] == low[0]
        for kind in KINDS:
            for name, tensor in low[1][kind].items():
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, high[1][kind][name]), (stage, kind, name)
        for unit in low[2]:
            assert unit.parameters.flat.dtype == torch.bfloat16
            unit.parameters.unshard()
            unit.parameters.wait()
            for record, param in unit.params:
                assert torch.equal(param, low[1]["param"][record.name].bfloat16()), (stage, record)


def test_bf16_parameters_have_the_fp32_masters_of_an_fp32_run():
    run_threads(2, _masters)


def _snapshot(units, optimizer) -> list[torch.Tensor]:
    state = [u.buffer(kind) for u in units for kind in KINDS]
    homes = [u.state.param for u in units]
    counts = [optimizer.count]
    return [t.clone() for t in (*state, *homes, *counts)]


def _overflow(rank: int) -> None:
    mesh = Mesh(dp=3).connect()
    for stage in range(4):
        units, clean = _units(mesh, stage, torch.float16), _units(mesh, stage, torch.float16)
        scale = LossScale(1024.0, interval=3)
        optimizer = ZeroOptimizer(units, mesh, AdamW(**ADAMW), clip=CLIP, loss_scale=scale)
        plain = ZeroOptimizer(clean, mesh, AdamW(**ADAMW), clip=CLIP)
        for step, (bad, value) in enumerate(
            [(None, 1024), (1, 512), (2, 256), (None, 256), (None, 256), (None, 512)], 1
        ):
            before = _snapshot(units, optimizer)
            for unit in units:  # one element overflows, so that it is in one rank's slice
                at = 0 if rank == bad and unit.name == "block" else None
                _accumulate(unit, mesh, step, scale.value.item(), at)
            norm = optimizer.step(LR)
            for unit in units:
                unit.parameters.wait()
            same = [torch.equal(a, b) for a, b in zip(before, _snapshot(units, optimizer))]
            assert scale.value == value, (stage, step, scale.value)
            assert norm.isfinite() == (bad is None)
            if bad is not None:
                assert all(same), f"stage {stage}: a skipped step wrote"
                continue
            assert not any(same[: len(KINDS)])
            assert norm == _step(clean, plain, mesh, step), "the scale shows in the norm"
            for unit in clean:
                unit.parameters.wait()
            for a, b in zip(_snapshot(units, optimizer), _snapshot(clean, plain), strict=True):
                assert torch.equal(a, b), (stage, step)
        assert optimizer.count == 4


def test_an_overflow_on_one_rank_makes_every_rank_skip_and_halves_the_scale():
    run_threads(3, _overflow)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_the_loss_scale_follows_its_rule_and_goes_on_from_any_step(interval):
    """An overflow halves it, `interval` good steps in a row double it, within 1 and 2^24; a halted
    step changes nothing of it."""
    unit = _units(single(), 0, torch.float16)[0]

    def fresh() -> ZeroOptimizer:
        return ZeroOptimizer([unit], single(), AdamW(), loss_scale=LossScale(64.0, interval))

    draws = torch.Generator().manual_seed(interval)
    value, row, seen, optimizer = 64.0, 0, set(), fresh()
    for step in range(600):
        chances = torch.tensor(((0.0, 0.2, 0.9, 0.5)[step // 150], 0.3))
        bad, halted = (torch.rand(2, generator=draws) < chances).float()
        optimizer.loss_scale.update(torch.maximum(bad, halted), halted)  # as in the optimizer
        if not halted:
            row = 0 if bad else row + 1
            value = max(value / 2, 1.0) if bad else value
        if row == interval:
            value, row = min(value * 2, 2.0**24), 0
        seen.add(value)
        assert optimizer.state() == {"count": 0.0, "loss_scale": value, "good_steps": row}, step
        resumed = fresh()
        resumed.load_state(optimizer.state())
        optimizer = resumed
    assert {1.0, 2.0**24} <= seen


# -------------------------------------------------------------------------- the norm


def _share_of_ones(record: ParamRecord, unit: Unit, mesh) -> torch.Tensor:
    """Return this rank's term of a gradient that is 1 everywhere."""
    shares = mesh.size("data") * (mesh.size("tp") if record.partial else 1)
    shares *= 2 if unit.tied else 1
    return record.slice(torch.ones(record.shape, dtype=torch.float64), mesh.coords) / shares


def _norms(rank: int, meshes: list[Mesh]) -> list[float]:
    """Test the norm of gradients that are 1 everywhere, on every mesh and stage."""
    found = []
    for mesh in (sizes.connect() for sizes in meshes):
        for stage in range(4) if mesh.size("data") > 1 else (0,):
            units = _units(mesh, stage)
            optimizer = ZeroOptimizer(units, mesh, AdamW())
            for unit in units:
                _add(unit, [_share_of_ones(record, unit, mesh) for record, _ in unit.params])
                unit.gradients.start()
                unit.gradients.finish()
                _tie(unit, mesh)
            optimizer.sum_partials()
            found.append(float(optimizer.norm()))
    return found


def test_the_norm_counts_every_parameter_once_however_often_it_is_held():
    meshes = [Mesh(tp=4), Mesh(tp=2, pp=2), Mesh(dp=2, pp=2), Mesh(dp=2, tp=2), Mesh(cp=4)]
    count = sum(math.prod(row[1]) for rows in SPEC.values() for row in rows)
    for norms in run_threads(4, _norms, meshes):
        assert len(norms) == 1 + 1 + 3 * 4
        assert norms == pytest.approx([math.sqrt(count)] * len(norms), rel=1e-14)


# -------------------------------------------------------------------------- memory and traffic


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().size()


def _memory(rank: int) -> None:
    mesh = Mesh(dp=4).connect()
    for stage in range(4):
        for unit in _units(mesh, stage, torch.bfloat16):
            n, parts = unit.layout.size, (1 if stage == 0 else 4)
            assert n % (4 * 32) == 0
            for state in (unit.state.master, *unit.state.moments.values()):
                assert _bytes(state) == 4 * n // parts, stage
            assert _bytes(unit.gradients.reduced) == 4 * n // parts
            closed = 0 if stage == 3 else 2 * n
            assert _bytes(unit.parameters.flat) == closed, stage
            assert _bytes(unit.gradients.flat) == (0 if stage >= 2 else 4 * n), stage
            unit.parameters.unshard()
            unit.parameters.wait()
            unit.gradients.before_backward()
            assert (_bytes(unit.parameters.flat), _bytes(unit.gradients.flat)) == (2 * n, 4 * n)
            unit.parameters.reshard()
            unit.gradients.start()
            unit.gradients.finish()
            assert _bytes(unit.parameters.flat) == closed, stage
            assert _bytes(unit.gradients.flat) == (0 if stage >= 2 else 4 * n), stage
            assert unit.parameters.shard is None or _bytes(unit.parameters.shard) == 2 * n // 4


def test_sharded_states_take_a_quarter_on_four_ranks_and_the_rest_is_freed():
    run_threads(4, _memory)


class _Traffic:
    """A counter of each collective of ZeRO: name -> list of bytes of the whole buffer."""

    def __init__(self) -> None:
        self.calls: dict[str, list[int]] = {}
        for place, name, whole in (
            (parameters, "all_gather_into", 0),
            (reduce, "reduce_scatter_into", 1),
            (dist, "all_reduce", 0),
        ):
            setattr(place, name, self._counted(name, getattr(place, name), whole))

    def _counted(self, name: str, fn, whole: int):
        def run(*args, **kwargs):
            self.calls.setdefault(name, []).append(args[whole].nbytes)
            return fn(*args, **kwargs)

        return run


def _chain(mesh, stage: int, dtype, layers: int = 3, width: int = 8):
    """Make a chain of linear layers as ZeRO units, with its optimizer."""
    segments = []
    for k in range(layers):
        torch.manual_seed(k)
        linear = nn.Linear(width, width, dtype=dtype)
        records = {n: r.renamed(f"{k}.{n}") for n, r in collect_records(linear).items()}
        params = [(records[n], p) for n, p in linear.named_parameters()]
        unit = make_unit(f"linear {k}", params, mesh, zero=stage)
        last = k == layers - 1
        segments.append(Segment(unit.name, _layer(linear, last), (unit,)))
    chain = ChainStage(segments)
    return chain, ZeroOptimizer(chain.units, mesh, AdamW(**ADAMW), clip=CLIP)


def _layer(linear: nn.Linear, last: bool):
    def fn(x, batch):
        y = torch.tanh(linear(batch if x is None else x))
        return (None, {LOSS: (y * y).sum(dtype=torch.float32)}) if last else y

    return fn


def _chain_step(chain: ChainStage, optimizer: ZeroOptimizer, batches) -> torch.Tensor:
    chain.begin(batches)
    for mb in range(len(batches)):
        chain.forward(mb, None)
        chain.backward(mb, None)
    chain.reduce()
    return optimizer.step(LR)


def _traffic(rank: int) -> None:
    mesh, layers, m = Mesh(dp=2).connect(), 4, 3
    traffic = _Traffic()
    for stage in range(4):
        chain, optimizer = _chain(mesh, stage, torch.bfloat16, layers)
        params, grads = (nbytes * chain.units[0].layout.size for nbytes in (2, 4))
        for _ in range(2):
            traffic.calls.clear()
            _chain_step(chain, optimizer, torch.ones(m, 2, 8, dtype=torch.bfloat16))
            gathers = {0: 0, 1: layers, 2: layers, 3: m * (2 * layers - 1)}[stage]
            scatters = {0: 0, 1: layers, 2: m * layers, 3: m * layers}[stage]
            expected = {"all_reduce": [4] if stage else [grads * layers]}  # 4: the norm's sum
            if stage:
                expected["all_gather_into"] = [params] * gathers
                expected["reduce_scatter_into"] = [grads] * scatters
            assert traffic.calls == expected, stage
        for unit in chain.units:
            unit.parameters.wait()


def test_every_zero_stage_makes_exactly_the_collectives_of_its_formula():
    run_ranks(2, _traffic)


def _joined(rank: int) -> None:
    """Whole gradients laid end to end are summed in one message, bitwise equal to one by one."""
    mesh, sums = Mesh(dp=2).connect(), []
    for joined in (False, True):
        units = _units(mesh, 0)
        before = [unit.gradients.flat.nbytes for unit in units]
        if joined:
            reduce.end_to_end([unit.gradients for unit in units[::-1]])
            for unit in units:
                home = unit.gradients.flat.untyped_storage()
                assert home.nbytes() == sum(before)
                assert unit.gradients.reduced.data_ptr() == unit.gradients.flat.data_ptr()
                assert all(p.grad.untyped_storage().data_ptr() == home.data_ptr()
                           for _, p in unit.params)  # fmt: skip
            storages = {unit.gradients.flat.untyped_storage().data_ptr() for unit in units}
            reduce.end_to_end([unit.gradients for unit in units])  # they stay in place
            assert {unit.gradients.flat.untyped_storage().data_ptr() for unit in units} == storages
        pairs = list(itertools.pairwise(units[::-1]))
        assert [a.gradients.is_before(b.gradients) for a, b in pairs] == [joined] * len(pairs)
        assert not any(b.gradients.is_before(a.gradients) for a, b in pairs)
        for i, unit in enumerate(units):
            _add(unit, [_draw(tuple(p.shape), i, j, rank) for j, (_, p) in enumerate(unit.params)])
        first, *rest = units[::-1]
        first.gradients.start([unit.gradients for unit in rest] if joined else ())
        for unit in () if joined else rest:
            unit.gradients.start()
        for unit in units:
            unit.gradients.finish()
        sums.append([unit.gradients.reduced.clone() for unit in units])
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


def test_joined_gradients_are_summed_in_one_message():
    run_threads(2, _joined)


def _two_chains(rank: int) -> None:
    """A unit that a chain has placed stays there when another chain also uses it."""
    mesh = Mesh(dp=2).connect()
    linear = nn.Linear(4, 4, bias=False)
    params = [(collect_records(ColumnParallelLinear(4, 4, bias=False))["weight"], linear.weight)]
    shared = make_unit("shared", params, mesh)
    first = ChainStage([Segment("a", lambda x, _: linear(x), (shared,))])
    home = shared.gradients.flat.data_ptr()
    other = _units(mesh, 0)[0]
    ChainStage([Segment("a", lambda x, _: linear(x), (shared, other))])
    assert shared.gradients.flat.data_ptr() == home
    assert first._views[linear.weight].data_ptr() == home


def test_a_unit_of_two_chains_keeps_its_gradients_where_they_are():
    run_threads(2, _two_chains)


# -------------------------------------------------------------------------- loading and saving


def _save(rank: int, sizes: Mesh, stage: int):
    mesh = sizes.connect()
    units = _units(mesh, stage)
    optimizer = ZeroOptimizer(units, mesh, AdamW(**ADAMW), clip=CLIP)
    for step in (1, 2):
        norm = _step(units, optimizer, mesh, step)
    return _read(units), optimizer.state(), float(norm)


def _resume(rank: int, sizes: Mesh, stage: int, state, counts, steps):
    """Load into a fresh optimizer, check that it reads back unchanged, then do the given steps."""
    mesh = sizes.connect()
    units = _units(mesh, stage)
    for unit in units:
        unit.parameters.unshard()  # a gather in flight must not restore old values
        if unit.placement.optim and not unit.placement.param:
            unit.parameters.publish()
    optimizer = ZeroOptimizer(units, mesh, AdamW(**ADAMW), clip=CLIP)
    for kind in KINDS:
        for unit in units:
            unit.write(kind, lambda r, kind=kind: r.slice(state[kind][r.name], mesh.coords))
    optimizer.load_state(counts)
    back = _read(units)
    assert all(torch.equal(back[k][n], state[k][n]) for k in KINDS for n in state[k])
    for unit in units:
        unit.parameters.unshard()
        unit.parameters.wait()
        for record, param in unit.params:
            mine = record.slice(state["param"][record.name], mesh.coords)
            assert torch.equal(param.detach(), mine), record
        unit.parameters.reshard()
    for step in steps:
        _step(units, optimizer, mesh, step)
    return _read(units), optimizer.state(), 0.0


def test_state_moved_from_four_ranks_to_two_to_three_continues_the_same_run():
    state, counts, norm = run_threads(4, _save, Mesh(dp=4), 3)[3]
    assert counts == {"count": 2.0}
    assert norm == pytest.approx(_textbook(4, 1)[0][1], rel=1e-13)
    for world, sizes, stage in ((2, Mesh(tp=2), 0), (2, Mesh(dp=2), 1), (3, Mesh(cp=3), 2)):
        for moved, *_ in run_threads(world, _resume, sizes, stage, state, counts, ()):
            assert all(torch.equal(moved[k][n], state[k][n]) for k in KINDS for n in state[k])
    truth = _textbook(4, 1)[1]
    for resumed, counts_now, _ in run_threads(4, _resume, Mesh(dp=4), 3, moved, counts, (3,)):
        assert counts_now == {"count": 3.0}
        for kind in KINDS:
            for name, tensor in resumed[kind].items():
                assert relative_error(tensor, truth[kind][name]) < 1e-12, (kind, name)


# -------------------------------------------------------------------------- torch's own


def _modules(layers: int = 3, width: int = 8) -> nn.Sequential:
    chain = []
    for k in range(layers):
        torch.manual_seed(k)
        chain += [nn.Linear(width, width, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*chain)


def _groups(model: nn.Module) -> list[dict]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    decay = ADAMW["weight_decay"]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def _torch_steps(model: nn.Module, optimizer, data: torch.Tensor, sharded: bool):
    norms = []
    for batches in data:
        for x in batches:
            (model(x) ** 2).sum().backward()
        if not sharded:
            for param in model.parameters():
                dist.all_reduce(param.grad)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norms.append(float(norm.full_tensor() if sharded else norm))
        optimizer.step()
        optimizer.zero_grad()
    full = [p.full_tensor() if sharded else p for p in model.parameters()]
    return norms, [p.detach() for p in full]


def _oracles(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    mesh = Mesh(dp=2).connect()
    data = _draw((STEPS, 2, 5, 8), rank)  # two micro-batches of five rows per step
    rates = {"lr": LR, "betas": ADAMW["betas"], "eps": ADAMW["eps"]}
    fsdp = _modules()
    for layer in (*fsdp[::2], fsdp):
        fully_shard(layer, mesh=mesh.device_mesh["dp"]).set_gradient_divide_factor(1.0)
    expected = _torch_steps(fsdp, torch.optim.AdamW(_groups(fsdp), **rates), data, True)
    replicas = _modules()
    redundant = ZeroRedundancyOptimizer(_groups(replicas), torch.optim.AdamW, **rates)
    second = _torch_steps(replicas, redundant, data, False)
    for norms, params in (expected, second):
        for stage in range(4):
            chain, optimizer = _chain(mesh, stage, torch.float64)
            ours = [float(_chain_step(chain, optimizer, batches)) for batches in data]
            assert ours == pytest.approx(norms, rel=1e-13), stage
            read = {r.name: t for unit in chain.units for r, t in unit.read("param")}
            names = [f"{k}.{n}" for k in range(3) for n in ("weight", "bias")]
            for name, param in zip(names, params, strict=True):
                assert relative_error(read[name], param) < 1e-12, (stage, name)


def test_all_stages_equal_torchs_fsdp2_and_its_zero_redundancy_optimizer():
    run_ranks(2, _oracles)


def test_wrong_stages_dtypes_and_shapes_are_refused_in_one_line():
    weight = nn.Parameter(torch.zeros(3, 2))
    record = ParamRecord("w", (3, 2))
    with pytest.raises(ValueError, match="the ZeRO stage must be one of 0, 1, 2, 3, got 4"):
        make_unit("u", [(record, weight)], single(), zero=4)
    half = (ParamRecord("h", (2,)), nn.Parameter(torch.zeros(2, dtype=torch.float16)))
    with pytest.raises(ValueError, match=r"u needs parameters of one dtype, .*float16.*float32"):
        make_unit("u", [(record, weight), half], single())
    with pytest.raises(ValueError, match=r"w: expected shape \(2, 3\), .* got \(3, 2\)"):
        make_unit("u", [(ParamRecord("w", (2, 3)), weight)], single())


# -------------------------------------------------------------------------- SGD


def _sgd(rank: int) -> None:
    mesh = Mesh(dp=2).connect()
    data = _draw((STEPS, 2, 5, 8), rank)
    replicas = _modules()
    theirs = torch.optim.SGD(_groups(replicas), lr=LR, momentum=0.8)
    norms, params = _torch_steps(replicas, theirs, data, False)
    for stage in range(4):
        chain, _ = _chain(mesh, stage, torch.float64)
        rule = SGD(momentum=0.8, weight_decay=ADAMW["weight_decay"])
        optimizer = ZeroOptimizer(chain.units, mesh, rule, clip=CLIP)
        ours = [float(_chain_step(chain, optimizer, batches)) for batches in data]
        assert ours == pytest.approx(norms, rel=1e-13), stage
        read = {r.name: t for unit in chain.units for r, t in unit.read("param")}
        names = [f"{k}.{n}" for k in range(3) for n in ("weight", "bias")]
        for name, param in zip(names, params, strict=True):
            assert relative_error(read[name], param) < 1e-12, (stage, name)
        before = [b.clone() for unit in chain.units for b in unit.state.moments.values()]
        chain.units[0].gradients.reduced[0] = float("inf")
        optimizer.step(LR)
        after = [b for unit in chain.units for b in unit.state.moments.values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), stage


def test_sgd_with_momentum_equals_torch_in_every_stage_and_skips_overflows():
    run_threads(2, _sgd)


def test_sgd_keeps_bf16_parameters_as_copies_of_its_masters():
    unit = _units(single(), 0, torch.bfloat16)[0]
    optimizer = ZeroOptimizer([unit], single(), SGD(), clip=None)
    _add(unit, [torch.full(p.shape, 2.0**-9) for _, p in unit.params])
    optimizer.step(1.0)
    assert unit.state.master.dtype == torch.float32
    assert torch.equal(unit.parameters.flat, unit.state.master.bfloat16())
    assert not torch.equal(unit.state.master, unit.state.master.bfloat16().float())


# -------------------------------------------------------------------------- a user-defined axis

EXPERTS = {  # name, shape, cut over: experts are on different ranks of the made-up axis "ep"
    "experts.up": ((3, 5, 7), {"ep": 0, "tp": 2}),
    "experts.down": ((3, 7, 5), {"ep": 0, "tp": 1}),
    "experts.bias": ((3, 5), {"ep": 0}),
    "router": ((3, 5), {}),
}


@dataclasses.dataclass(frozen=True)
class _ExpertMesh(Mesh):
    """A mesh with an axis that the library does not know; its rows are below."""

    ep: int = 1


EP_AXES = ("pp", "dp", "ep", "cp", "tp")
EP_PRODUCTS = {
    "data": ("dp", "ep", "cp"), "shard": ("dp_shard", "ep", "cp"), "inner": EP_AXES,
    "world": EP_AXES,
}  # fmt: skip


@pytest.fixture
def ep_rows(monkeypatch):
    monkeypatch.setattr(mesh_tables, "AXES", EP_AXES)
    monkeypatch.setattr(mesh_tables, "PRODUCTS", EP_PRODUCTS)


def _expert_term(name: str, step: int, mesh) -> torch.Tensor:
    """Return this rank's term of a gradient: an expert's tokens come from all ranks of "dp"."""
    shape, cuts = EXPERTS[name]
    axis = "dp" if cuts else "data"
    return sum(_terms(name, shape, step, mesh.index(axis), mb, 0) for mb in range(2))


def _expert_units(mesh, zero: int) -> list[Unit]:
    params: dict[str, list] = {"dp": [], "data": []}
    for name, (shape, cuts) in EXPERTS.items():
        cut = tuple(Cut(axis, dim, mesh.size(axis)) for axis, dim in cuts.items())
        record = ParamRecord(name, shape, cut, decay=False, sum_over="dp" if cuts else "data")
        local = record.slice(_start(name, shape), mesh.coords)
        params[record.sum_over].append((record, nn.Parameter(local.clone())))
    return [make_unit(axis, params[axis], mesh, zero=zero) for axis in params]


def _experts(rank: int, sizes: dict[str, int], folder) -> None:
    mesh = _ExpertMesh(**sizes).connect()
    terms = {"dp": mesh.size("dp"), "data": mesh.size("data")}
    whole = {n: _start(n, shape) for n, (shape, _) in EXPERTS.items()}
    truth = [torch.nn.Parameter(t) for t in whole.values()]
    theirs = torch.optim.AdamW(truth, lr=LR, weight_decay=0.0)
    norms = []
    for step in (1, 2):
        for (name, (shape, cuts)), p in zip(EXPERTS.items(), truth, strict=True):
            ranks = range(terms["dp" if cuts else "data"])
            p.grad = sum(_terms(name, shape, step, d, mb, 0) for d in ranks for mb in range(2))
        norms.append(float(nn.utils.clip_grad_norm_(truth, CLIP)))
        theirs.step()
    for zero in range(4):
        units = _expert_units(mesh, zero)
        rule = AdamW(betas=(0.9, 0.999), weight_decay=0.0)
        optimizer = ZeroOptimizer(units, mesh, rule, clip=CLIP)
        for step in (1, 2):
            for unit in units:
                terms_of = [r.slice(_expert_term(r.name, step, mesh), mesh.coords)
                            for r, _ in unit.params]  # fmt: skip
                _add(unit, terms_of)
                unit.gradients.start()
                unit.gradients.finish()
            assert float(optimizer.step(LR)) == pytest.approx(norms[step - 1], rel=1e-13), zero
        found = {r.name: t for unit in units for r, t in unit.read("param")}
        for name, p in zip(EXPERTS, truth, strict=True):
            assert relative_error(found[name], p.detach()) < 1e-12, (zero, name)
        mine = ((n, t) for n, t in found.items() if _writer(n) % dist.get_world_size() == rank)
        save_checkpoint(folder / str(zero), 2, mine, config={}, state={}, mesh=sizes,
                        group=dist.group.WORLD)  # fmt: skip
        saved = open_checkpoint(folder / str(zero) / "step_00000002")
        for unit in _expert_units(mesh, 3 - zero):  # onto another placement
            unit.write("param", lambda r, saved=saved: r.slice(saved.tensor(r.name), mesh.coords))
            for record, tensor in unit.read("param"):
                assert torch.equal(tensor, found[record.name]), (zero, record.name)


def _writer(name: str) -> int:
    """Return the rank that writes a tensor, equal on all of them."""
    return sum(map(ord, name))


def _unlike_stages(rank: int) -> None:
    """Stage 0 holds whole parameters, stage 1 experts: their gradients are over different axes."""
    mesh = _ExpertMesh(pp=2, ep=2).connect()
    stage = mesh.index("pp")
    whole = {n: _start(n, shape) for n, (shape, _) in EXPERTS.items()}
    truth = math.sqrt(sum(float(t.square().sum()) for t in whole.values()))
    for zero in range(4):
        axis = ("data", "dp")[stage]
        units = [u for u in _expert_units(mesh, zero) if u.placement.sum_over == axis]
        optimizer = ZeroOptimizer(units, mesh, AdamW(), clip=CLIP)
        for unit in units:
            first = mesh.index(unit.placement.sum_over) == 0  # the others add nothing
            _add(unit, [first * r.slice(whole[r.name], mesh.coords) for r, _ in unit.params])
            unit.gradients.start()
            unit.gradients.finish()
        assert float(optimizer.norm()) == pytest.approx(truth, rel=1e-13), zero


def test_the_norm_is_right_where_stages_lie_over_other_data_axes(ep_rows):
    run_threads(4, _unlike_stages)


@pytest.mark.parametrize("sizes", [{"ep": 2, "tp": 2}, {"dp": 2, "ep": 2}, {"ep": 3}], ids=str)
def test_a_made_up_axis_is_data_for_zero_the_norm_and_checkpoints(sizes, tmp_path, ep_rows):
    run_threads(math.prod(sizes.values()), _experts, sizes, tmp_path)
