"""Muon: its kernel, and its update on any layout against five lines on whole float64 matrices."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from guarded import guarded
from refused import check, rows
from test_train import _config, _trainer
from threads import on_mesh
from torch import nn
from traffic import traffic

from warpweave.checkpoint import CheckpointError, open_latest
from warpweave.kernels import reference
from warpweave.kernels.muon import orthogonalize, symmetric_product
from warpweave.kernels.runtime.tile_table import GemmTile
from warpweave.kernels.runtime.tiles import pinned
from warpweave.model.gpt import GPT
from warpweave.model.plain import _newton_schulz, is_muons
from warpweave.parallel.data import muon
from warpweave.parallel.data.optimizer import AdamW, Muon
from warpweave.parallel.data.unit import make_unit
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import Mesh, single
from warpweave.parallel.shard import Cut, ParamRecord
from warpweave.prove.layouts import Layout, draw, smallest
from warpweave.train.options import TrainConfig

LR, CLIP, STEPS = 0.03, 5.0, 2
RULE = Muon(momentum=0.9, weight_decay=0.2, rest=AdamW(eps=1e-3, weight_decay=0.2))


def _parts(name: str, g: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return views of the matrices in a weight of a block, as documented
    in the layers' docstrings."""
    model = layout.model
    if name.endswith("qkv.weight"):
        groups = g.unflatten(0, (model.num_kv_heads, -1, model.head_dim))
        n = groups.shape[1] - 2
        return [groups[:, at] for at in (slice(0, n), slice(n, n + 1), slice(n + 1, n + 2))]
    if name.endswith("up.weight") and model.activation in ("swiglu", "geglu"):
        pairs = g.unflatten(0, (-1, 2))
        return [pairs[:, :1], pairs[:, 1:]]
    return [g]


def _draw(record: ParamRecord, step: int) -> torch.Tensor:
    """Draw a float64 gradient that depends only on the name."""
    seed = sum(map(ord, record.name)) * 10 + step
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(record.shape, generator=generator, dtype=torch.float64)


def _one_device(layout: Layout, rule: Muon) -> dict[str, torch.Tensor]:
    """Return every weight after STEPS steps, all on whole matrices."""
    records = GPT(layout.model, device="meta").parameter_records()
    w = {name: _draw(record, 0) for name, record in records.items()}
    m, v = ({name: torch.zeros_like(x) for name, x in w.items()} for _ in range(2))
    for step in range(1, STEPS + 1):
        grads = {name: _draw(record, step) for name, record in records.items()}
        norm = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
        for name, g in grads.items():
            g = g * min(1.0, CLIP / (norm + 1e-6))
            w[name] *= 1 - LR * 0.2 * records[name].decay
            if is_muons(name):
                m[name] = 0.9 * m[name] + 0.1 * g
                u = 0.1 * g + 0.9 * m[name]
                for into, part in zip(_parts(name, w[name], layout), _parts(name, u, layout)):
                    flat = part.flatten(0, -2)
                    o = _newton_schulz(flat)
                    s = {"moonlight": 0.2 * max(o.shape) ** 0.5,
                         "jordan": max(1, o.shape[0] / o.shape[1]) ** 0.5}[rule.scale]  # fmt: skip
                    into -= (LR * s * o).view(into.shape)
                continue
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            update = (m[name] / (1 - 0.9**step)) / ((v[name] / (1 - 0.95**step)).sqrt() + 1e-3)
            w[name] -= LR * update
    return w


def _units(mesh, layout: Layout):
    gpt = GPT(layout.model, mesh=mesh, plan=layout.plan, device="meta", dtype=torch.float64)
    chains = gpt.segments(zero=layout.zero, device="cpu").values()
    return list(dict.fromkeys(u for chain in chains for s in chain for u in s.units))


def _train(mesh, layout: Layout, rule: Muon = RULE) -> dict[str, torch.Tensor]:
    """Return every weight of this rank's stages after STEPS steps."""
    state, _ = _first_steps(mesh, layout, range(1, STEPS + 1), rule=rule)
    return state["param"]


def _layout(seed: int) -> Layout:
    """Draw a layout with as few blocks as its stages allow."""
    layout = draw(seed)
    few = dataclasses.replace(layout.sizes, layers=layout.mesh.pp * layout.chunks)
    return dataclasses.replace(layout, drawn=few)


def _worst(layout: Layout, rule: Muon = RULE) -> float:
    truth = _one_device(layout, rule)
    seen, worst = set(), 0.0
    for found in on_mesh(layout.mesh, _train, layout, rule):
        for name, x in found.items():
            worst = max(worst, float((x - truth[name]).abs().max()))
            seen.add(name)
    assert seen == truth.keys()
    return worst


# ---------------------------------------------------------------- the kernel


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 1), "float32"), ((5, 3), "float64"), ((37, 101), "float32"), ((131, 67), "float64"),
     ((64, 64), "float32"), ((65, 129), "float16"), ((70, 21), "bfloat16"), ((3, 0), "float64")],
)  # fmt: skip
def test_a_symmetric_product_is_torchs_and_symmetric_to_the_bit(shape, dtype):
    dtype = getattr(torch, dtype)
    # A result is rounded to its dtype. Its K terms are added in at least float32.
    rounding = 4 * torch.finfo(dtype).eps
    adding = (shape[1] + 2) * min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    x = (torch.randn(shape, dtype=torch.float64) / max(shape) ** 0.5).to(dtype)
    add = (x @ x.t()).add_(torch.eye(len(x), dtype=dtype))
    product = x.double() @ x.double().t()
    terms = (x.double().abs() @ x.double().abs().t()).max() if x.numel() else 0.0
    cases = [
        ({}, product),
        ({"alpha": 2.0315}, 2.0315 * product),
        ({"add": add, "alpha": 2.0315, "beta": -4.775}, 2.0315 * product - 4.775 * add.double()),
        ({"add": add}, product + add.double()),
    ]
    for given, impl in itertools.product((x, x.t().contiguous().t()), ("triton", "torch")):
        for more, truth in cases:
            y = symmetric_product(given, **more, impl=impl)
            limit = rounding * (truth.abs().max() + 1e-9) + adding * more.get("alpha", 1.0) * terms
            assert (y - truth).abs().max() <= limit
            assert impl == "torch" or torch.equal(y, y.t())


@pytest.mark.parametrize("sides", [(16, 16), (16, 64), (64, 16), (32, 16)], ids=str)
def test_tiles_of_any_sides_leave_no_element_out(sides):
    """Covers tiles that cross the diagonal, and short ones at the end."""
    for M in (61, 64, 81):
        x, add = torch.randn(M, 21, dtype=torch.float64), torch.full((M, M), 3.0).double()
        with pinned({("gemm", 8, "symmetric"): GemmTile(*sides, 16, 2, 1, 1, 1)}), guarded():
            y = symmetric_product(x, add, impl="triton")
        assert (y - x @ x.t() - 3).abs().max() < 1e-12
        assert torch.equal(y, y.t())


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("shape", [(7, 40), (40, 7), (33, 33), (1, 5), (5, 1)])
def test_newton_schulz_is_five_lines_of_torch(shape, impl):
    g = torch.randn(shape, dtype=torch.float64)
    o = orthogonalize(g, impl=impl)
    assert (o - _newton_schulz(g)).abs().max() < 1e-12
    assert (reference.orthogonalize(g) - _newton_schulz(g)).abs().max() < 1e-12
    values = torch.linalg.svdvals(o)
    assert values.max() < 1.3
    # the smallest of a square matrix is very small
    assert shape[0] == shape[1] or values.min() > 0.6
    assert not orthogonalize(torch.zeros(shape), impl=impl).any()
    low = orthogonalize(g.bfloat16(), impl=impl).double()
    assert (low - o).norm() < 0.05 * o.norm()


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("steps", [1, 3])
def test_orthogonalize_steps_are_polynomials_of_the_singular_values(steps, impl):
    for shape in ((7, 12), (12, 7)):
        g = torch.randn(shape, dtype=torch.float64)
        u, s, v = torch.linalg.svd(g, full_matrices=False)
        s = s / s.norm()
        for _ in range(steps):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        with traffic() as t:
            o = orthogonalize(g, steps=steps, impl=impl)
        assert (o - u * s @ v).abs().max() < 1e-6  # 1e-7 is added to the norm
        assert (o - reference.orthogonalize(g, steps)).abs().max() < 1e-12
        assert len(t.launches) == (2 * steps if impl == "triton" else 0)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_autocast_rounds_no_product(impl):
    g = torch.randn(9, 21)
    want = symmetric_product(g, impl=impl), orthogonalize(g, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        found = symmetric_product(g, impl=impl), orthogonalize(g, impl=impl)
    assert all(map(torch.equal, found, want))


def test_the_norm_of_a_matrix_in_16_bits_is_of_32():
    """fp16 cannot hold that norm: scaling by a power of two changes no bit."""
    g = torch.randn(40, 33).half()
    assert torch.equal(orthogonalize(g * 2**12), orthogonalize(g))


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("seed", range(40))
def test_the_update_on_a_random_layout_is_that_of_one_device(seed):
    rule = dataclasses.replace(RULE, scale=("moonlight", "jordan")[seed % 2])
    assert _worst(_layout(seed), rule) < 1e-11


def test_the_forty_layouts_have_all_that_there_is():
    layouts = [_layout(seed) for seed in range(40)]
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    for axis in ("dp", "cp", "tp", "pp"):
        assert sum(getattr(layout.mesh, axis) > 1 for layout in layouts) >= 5, axis
    assert any(x.mesh.dp_shard not in (None, x.mesh.dp) for x in layouts)
    assert any(x.mesh.tp > 1 and x.zero and x.mesh.data > 1 for x in layouts)


KINDS = ("param", "exp_avg", "exp_avg_sq")


def _first_steps(mesh, layout: Layout, steps: range, start=None, rule: Muon = RULE):
    """Train `steps` from the state `start`, and return the state after them; gradients come from
    data rank 0."""
    units = _units(mesh, layout)
    optimizer = ZeroOptimizer(units, mesh, rule, clip=CLIP)
    for unit in units:
        for kind in KINDS:
            if start is not None:
                unit.write(kind, lambda r, kind=kind: r.slice(start[kind][r.name], mesh.coords))
            elif kind == "param":
                unit.write(kind, lambda record: record.slice(_draw(record, 0), mesh.coords))
    optimizer.load_state({"count": steps.start - 1.0})
    for step in steps:
        for unit in units:
            unit.write("grad", lambda r, step=step: r.slice(_draw(r, step), mesh.coords))
        optimizer.step(LR)
    state = {kind: {r.name: x.clone() for u in units for r, x in u.read(kind)} for kind in KINDS}
    kept = sum(x.numel() for unit in units for x in unit.state.moments.values())
    return state, kept


def _joined(found) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: {n: x for state, _ in found for n, x in state[kind].items()} for kind in KINDS}


@pytest.mark.parametrize("zeros", [(0, 3), (2, 1)])
def test_the_state_of_one_layout_goes_on_in_another(zeros):
    """In addition, matrices have one moment, in every ZeRO stage."""
    sizes = smallest(Mesh(tp=2, pp=2, dp=2), "llama")
    first, second = (
        Layout(mesh, zero=zero, style="llama", tied=False, drawn=sizes)
        for mesh, zero in zip((Mesh(dp=2, pp=2), Mesh(dp=2, tp=2)), zeros)
    )
    found = on_mesh(first.mesh, _first_steps, first, range(1, 2))
    state = _joined(found)
    assert {n for n in state["exp_avg"] if n not in state["exp_avg_sq"]} == {
        n for n in state["exp_avg"] if is_muons(n)
    }
    truth = _one_device(second, RULE)
    found = on_mesh(second.mesh, _first_steps, second, range(2, 3), state)
    for name, x in _joined(found)["param"].items():
        assert (x - truth[name]).abs().max() < 1e-11, name
    matrices = sum(x.numel() for n, x in truth.items() if is_muons(n))
    rest = sum(x.numel() for n, x in truth.items()) - matrices
    most = 1.05 * (matrices + 2 * rest) / (4 if second.zero else 2)
    assert found[0][1] < most + 4 * 32 * 40, "one moment of matrices, two of the rest"


def _own(mesh, zero: int) -> list[torch.Tensor]:
    """Return two steps' directions of matrices that tensor ranks pad,
    replicate and shard by columns."""
    tp = mesh.size("tp")
    spec = {"rows": ((7, 5), (Cut("tp", 0, tp),)), "whole": ((4, 9), ()),
            "columns": ((6, 11), (Cut("tp", 1, tp),))}  # fmt: skip
    records = [ParamRecord(n, shape, cuts, matrices=(1,)) for n, (shape, cuts) in spec.items()]
    params = [(r, nn.Parameter(torch.zeros(r.local_shape, dtype=torch.float64))) for r in records]
    unit = make_unit("u", params, mesh, zero=zero)
    optimizer = ZeroOptimizer([unit], mesh, Muon(momentum=0.0, scale="jordan"), clip=None)
    unit.write("grad", lambda record: record.slice(_draw(record, 1), mesh.coords))
    optimizer.step(1.0)
    for record, x in unit.read("param"):
        o = _newton_schulz(_draw(record, 1)) * max(1, record.shape[0] / record.shape[1]) ** 0.5
        assert (x + o).abs().max() < 1e-12, record.name
    before = [x.clone() for x in (unit.state.master, *unit.state.moments.values())]
    unit.gradients.reduced.fill_(float("nan"))
    optimizer.step(1.0)
    assert all(map(torch.equal, before, (unit.state.master, *unit.state.moments.values())))
    return before


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(dp=3), Mesh(dp=2, tp=3)], ids=str)
def test_padded_and_replicated_matrices(mesh, zero):
    """In addition, a gradient that is not finite changes nothing."""
    on_mesh(mesh, _own, zero)


@pytest.mark.parametrize(("zero", "tp"), [(0, 1), (1, 1), (3, 2)])
def test_each_matrix_is_orthogonalised_once_and_moves_once_each_way(monkeypatch, zero, tp):
    mesh = Mesh(dp=4 // tp, tp=tp)
    layout = Layout(mesh, zero=zero, style="gpt2", drawn=smallest(Mesh(dp=4), "gpt2"))
    shapes, sent = [], []
    start = muon.start_all_to_all

    def spy(send, recv, given, taken, group):
        sent.append((group.rank, sum(n for r, n in enumerate(given) if r != group.rank)))
        return start(send, recv, given, taken, group)

    monkeypatch.setattr(muon, "start_all_to_all", spy)
    whole = Muon.orthogonalize
    monkeypatch.setattr(Muon, "orthogonalize", lambda s, u: shapes.append(u.shape) or whole(s, u))
    monkeypatch.setattr("test_muon.STEPS", 1)
    on_mesh(mesh, _train, layout)
    records = GPT(layout.model, device="meta").parameter_records()
    matrices = [r for r in records.values() if is_muons(r.name)]
    assert len(shapes) == sum(3 if r.name.endswith("qkv.weight") else 1 for r in matrices)
    n = sum(torch.Size(r.shape).numel() for r in matrices)
    exchanges = (1 if zero == 0 else 2) + (2 if tp > 1 else 0)
    assert len(sent) == 4 * exchanges  # of four ranks
    total = sum(count for _, count in sent)
    if zero == 0:
        assert total == 3 * n  # every result goes to three others
    else:
        data = 2 * n  # at most, once in each direction
        assert n / 2 < total <= data + (n if tp > 1 else 0)


# ---------------------------------------------------------------- the trainer


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_a_run_is_resumed_with_its_optimizer_and_no_other(tmp_path, optimizer):
    config = _config(tmp_path, layers=1, steps=4, save_every=2, lr=0.01, optimizer=optimizer)
    config.check()
    whole = _trainer(config)
    whole.run()
    names = {name for name in open_latest(config.out / "checkpoints").names if "/" in name}
    kinds = {name.split("/")[0] for name in names}
    assert kinds == {"muon": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum"}}[optimizer]
    assert ("exp_avg/blocks.0.mlp.up.weight" in names) == (optimizer == "muon")
    assert "exp_avg_sq/blocks.0.mlp.up.weight" not in names

    again = dataclasses.replace(config, out=tmp_path / "again")
    stopped = _trainer(again)
    for _ in range(2):
        stopped._train_step()
    stopped.save()
    stopped.saver.wait()
    resumed = _trainer(dataclasses.replace(again, resume=True))
    resumed.run()
    for (record, a, _), (_, b, _) in zip(whole.engine.read("param"), resumed.engine.read("param")):
        assert torch.equal(a, b), record.name
    other = "adamw" if optimizer == "muon" else "muon"
    with pytest.raises(
        CheckpointError, match=f"with optimizer {optimizer}, whose state does not fit"
    ):
        _trainer(dataclasses.replace(again, resume=True, optimizer=other))


def test_with_parameters_of_16_bits_newton_schulz_has_bf16():
    rules = {dtype: TrainConfig(optimizer="muon", dtype=dtype).rule for dtype in ("bf16", "fp32")}
    assert (rules["bf16"].dtype, rules["fp32"].dtype) == (torch.bfloat16, None)
    layout = Layout(Mesh(dp=2), zero=1, drawn=smallest(Mesh(dp=2), "gpt2"))
    exact, low = (
        on_mesh(layout.mesh, _train, layout, dataclasses.replace(RULE, dtype=dtype))[0]
        for dtype in (None, torch.bfloat16)
    )
    moved = {n: float((low[n] - exact[n]).norm() / exact[n].norm()) for n in exact}
    assert all((0 < x < 1e-2) == is_muons(n) for n, x in moved.items())


# ---------------------------------------------------------------- errors


def _muon_of(record: ParamRecord) -> None:
    param = nn.Parameter(torch.zeros(record.local_shape))
    ZeroOptimizer([make_unit("u", [(record, param)], single())], single(), Muon())


X, ADD, GAPS = torch.zeros(3, 2), torch.zeros(3, 3), torch.zeros(3, 6)[:, ::2]
ODD = ParamRecord("w", (7, 2), matrices=(1, 1))


@rows(
    [
        (lambda: _muon_of(ParamRecord("b", (5,), matrices=(1,))), r"but b has shape \(5,\)"),
        (lambda: _muon_of(ODD), "divisible by 2, but w has shape"),
        (lambda: _muon_of(ParamRecord("w", (8, 2), (Cut("cp", 0, 2),), matrices=(1,))), "over tp"),
        (lambda: Muon(scale="adam"), "scale must be one of .*moonlight"),
        (lambda: Muon(momentum=1.0), "momentum must be in"),
        (lambda: TrainConfig(momentum=1.0).check(), "momentum must be in"),
        (lambda: orthogonalize(X[:, 0]), "a matrix of floats, got"),
        (lambda: orthogonalize(X, steps=0), "steps >= 1, got 0"),
        (lambda: symmetric_product(X, torch.zeros(2, 2)), "`add` must be contiguous"),
        (lambda: symmetric_product(X[:, 0]), "expected a matrix of floats"),
        (lambda: symmetric_product(X.long()), "expected a matrix of floats, got .*int64"),
        (lambda: orthogonalize(X.long()), "a matrix of floats, got torch.int64"),
        (lambda: symmetric_product(X, ADD.double()), "`add` must be contiguous torch.float32"),
        (lambda: symmetric_product(X, GAPS), r"`add` must be contiguous .* with strides \(6, 2\)"),
        (lambda: symmetric_product(X, ADD.clone().requires_grad_()), "is not differentiable"),
        (lambda: orthogonalize(X.clone().requires_grad_()), "is not differentiable"),
    ]
)
def test_refusals(call, words):
    check(call, words)
