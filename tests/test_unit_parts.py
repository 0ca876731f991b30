"""The parts of a unit and of its optimizers, each alone: update rules, versions of the parameters,
which rank orthogonalizes which matrix, and errors."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from refused import check, rows
from threads import on_mesh
from torch import nn

from warpweave.parallel.data import ordered
from warpweave.parallel.data.batch_norm import is_recomputing, recomputing, sync_batch_norm
from warpweave.parallel.data.muon import WholeMatrices
from warpweave.parallel.data.optimizer import SGD, AdamW, LossScale, Muon, NAdamW, Piece
from warpweave.parallel.data.ordered import exact_sum
from warpweave.parallel.data.outer import OuterRule
from warpweave.parallel.data.reduce import end_to_end
from warpweave.parallel.data.unit import Placement, Unit, make_unit, version_age, zero_placement
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.mesh import ConnectedMesh, Mesh, single
from warpweave.parallel.shard import Cut, ParamRecord

NAN = float("nan")
F64 = torch.float64


def _unit(mesh: ConnectedMesh, *shapes: tuple[int, ...], zero: int = 0, dtype=F64) -> Unit:
    """Make parameters p0, p1, ... of zeros."""
    params = [
        (ParamRecord(f"p{n}", shape), nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for n, shape in enumerate(shapes)
    ]
    return make_unit("u", params, mesh, zero=zero)


# ---------------------------------------------------------------- rules


ADAM = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}
# torch's momentum is beta1 (1 - 0.96^(t decay) / 2): beta1, if the decay is large.
NADAM = ADAM | {"momentum_decay": 1e9, "decoupled_weight_decay": True}
NO_DECAY = {"weight_decay": 0.0}
RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # ours, and torch's with its options
    "adamw": (AdamW(**ADAM), torch.optim.AdamW, ADAM),
    "nadamw": (NAdamW(**ADAM), torch.optim.NAdam, NADAM),
    "sgd": (SGD(0.7, 0.3), torch.optim.SGD, {"momentum": 0.7, "weight_decay": 0.3}),
    "muon's rest": (Muon(0.6, 0.2, rest=AdamW(**ADAM)), torch.optim.AdamW, ADAM),
    "muon": (Muon(0.6, 0.2), torch.optim.SGD, {"weight_decay": 0.2}),  # along a direction
}


@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_torchs_and_a_skipped_step_changes_nothing(name: str, decay: bool) -> None:
    """The gradient is scaled, and parameters of 16 bits follow their masters."""
    rule, kind, options = RULES[name]
    draw = torch.Generator().manual_seed(3)
    w, half = (torch.randn(6, generator=draw, dtype=F64) for _ in range(2))
    half = half.half()
    theirs = kind([nn.Parameter(w.clone())], lr=1.0, **options | ({} if decay else NO_DECAY))
    moments = {moment: torch.zeros(6, dtype=F64) for moment in rule.moments}
    done = 0
    for number, skipped in enumerate((False, True, False, False)):
        g = torch.randn(6, generator=draw, dtype=F64)
        given, lr, scale = g.clone(), 0.1 / (1 + number), 0.5 + number
        piece = Piece(w, g, moments, name == "muon", half, decay)
        before = [x.clone() for x in (w, half, *moments.values())]
        count = torch.tensor(float(done + (not skipped)), dtype=F64)
        step = rule.begin(lr, count)
        rule.update(piece, step, torch.tensor(scale, dtype=F64), torch.tensor(float(skipped)))
        assert torch.equal(g, given), "a gradient is only read"
        if skipped:
            assert all(map(torch.equal, before, (w, half, *moments.values())))
            continue
        done += 1
        (group,) = theirs.param_groups
        (truth,), group["lr"] = group["params"], lr
        truth.grad = g * (1.0 if name == "muon" else scale)  # the direction's gradient was scaled
        # Otherwise torch counts steps, and multiplies NAdam's momenta, in 32 bits.
        with mock.patch("torch.optim.nadam._get_scalar_dtype", return_value=F64):
            theirs.step()
        torch.testing.assert_close(w, truth.detach(), rtol=1e-13, atol=1e-14)
        assert torch.equal(half, w.half())


def test_the_nesterov_step_of_muon_is_its_formula() -> None:
    rule, m = Muon(momentum=0.6), torch.tensor([1.0, -2.0], dtype=F64)
    g, scale = torch.tensor([3.0, 5.0], dtype=F64), torch.tensor(0.5, dtype=F64)
    after = 0.6 * m + 0.4 * (g * 0.5)
    u = rule.nesterov(g, m, scale, torch.tensor(0.0))
    torch.testing.assert_close(m, after, rtol=1e-15, atol=0)
    torch.testing.assert_close(u, 0.4 * g * 0.5 + 0.6 * after, rtol=1e-15, atol=0)
    assert g.tolist() == [3.0, 5.0]
    before = m.clone()
    rule.nesterov(g, m, scale, torch.tensor(1.0))
    assert torch.equal(m, before)


def test_defaults_are_those_of_the_papers() -> None:
    """DiLoCo's (arXiv:2311.08105), mixed precision's (arXiv:1710.03740), Muon's, GPT-3's."""

    def of(kind: Any) -> dict[str, Any]:
        given = inspect.signature(kind).parameters.values()
        return {p.name: p.default for p in given if p.default is not inspect.Parameter.empty}

    outer = {"lr": 0.7, "momentum": 0.9, "fragments": 1, "delay": 0, "mix": 0.0, "warmup": 0}
    assert of(OuterRule) == outer
    assert of(LossScale) == {"initial": 65536.0, "interval": 2000}
    adamw = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for kind in (AdamW, NAdamW):
        assert adamw.items() <= of(kind).items()
    assert {"momentum": 0.9, "weight_decay": 0.0}.items() <= of(SGD).items()
    muon = {"momentum": 0.95, "weight_decay": 0.1, "scale": "moonlight", "rest": AdamW()}
    assert muon.items() <= of(Muon).items()
    assert of(ZeroOptimizer)["clip"] == 1.0
    assert of(sync_batch_norm)["eps"] == 1e-5


# ---------------------------------------------------------------- versions


def test_as_many_versions_as_are_asked_for_are_kept_the_newest_first() -> None:
    """Twelve: each exists once an update has made it, or all from the beginning."""
    unit = _unit(single(), (3,), (40,))
    flat, param = unit.parameters, unit.params[1][1]
    flat.keep_versions(12)
    for update in range(1, 16):
        flat.next_version(unit.state.region)
        unit.state.master.fill_(update)
        assert flat.kept == min(update + 1, 12)
        assert param.detach().unique().tolist() == [update], "the newest, until another is shown"
        last = min(update - 1, 11)  # twice, after the newest, and all in turn
        for age in (last, last, 0, last, *range(flat.kept), 0, flat.kept - 1):
            flat.show(age)
            assert param.detach().unique().tolist() == [update - age], (update, age)
            if age:
                assert torch.equal(unit.buffer(f"version{age}"), flat.older(age)), age
        with pytest.raises(IndexError):
            flat.older(flat.kept)
    unit.write("version11", lambda record: torch.full(record.shape, 99.0))
    assert [float(flat.older(age).max()) for age in (1, 10, 11)] == [14, 5, 99]
    unit.write("param", lambda record: torch.full(record.shape, 7.0))
    assert {float(flat.older(age)[0]) for age in range(1, 12)} == {7.0}
    flat.show(0)
    assert param.detach().unique().tolist() == [7.0]
    unit.state.master.fill_(3.0)
    flat.fill_versions()
    assert {float(flat.older(age)[0]) for age in range(1, 12)} == {3.0}
    assert flat.kept == 12


def test_the_name_of_a_state_says_the_age_of_its_version() -> None:
    kinds = ("version1", "version9", "version10", "version123", "param", "exp_avg", "grad")
    assert [version_age(kind) for kind in kinds] == [1, 9, 10, 123, 0, 0, 0]


def _versions_of_shards(mesh: ConnectedMesh) -> None:
    for zero in range(4):
        flat = _unit(mesh, (3,), zero=zero).parameters
        for count in (0, -1):
            with pytest.raises(ValueError, match=rf"^versions must be at least 1, .* got {count}$"):
                flat.keep_versions(count)
        flat.keep_versions(1)
        words = None if zero < 3 else r"and exactly 1 if ZeRO 3 shards parameters, got 2$"
        check(lambda flat=flat: flat.keep_versions(2), words)


def test_sharded_parameters_have_one_version() -> None:
    on_mesh(Mesh(dp=2), _versions_of_shards)


def _versions_written(mesh: ConnectedMesh, zero: int) -> None:
    """A version is written whole on every rank, each of which updates only its part."""
    unit = _unit(mesh, (3,), (70,), zero=zero)
    unit.state.add_moments(["exp_avg"])
    unit.parameters.keep_versions(3)
    unit.parameters.fill_versions()
    for age in (2, 1):
        unit.write(f"version{age}", lambda r, age=age: torch.full(r.shape, 10.0 + age))
    unit.write("exp_avg", lambda r: torch.full(r.shape, 7.0))
    for age, value in ((0, 0.0), (1, 11.0), (2, 12.0)):
        unit.parameters.show(age)
        assert {float(x) for _, p in unit.params for x in p.detach().unique()} == {value}
        if age:
            read = {float(x) for _, t in unit.read(f"version{age}") for x in t.unique()}
            assert read == {value}
    assert {float(x) for _, t in unit.read("exp_avg") for x in t.unique()} == {7.0}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_versions_are_whole_on_every_rank(zero: int) -> None:
    on_mesh(Mesh(dp=3), _versions_written, zero)


SHARDED = {0: (), 1: ("optim",), 2: ("optim", "grad"), 3: ("optim", "grad", "param")}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(
    ("sum_over", "shard_over", "replicate_over", "one_rank"),
    [
        ("data", "shard", "replica", [Mesh(), Mesh(tp=2), Mesh(dp=2, dp_shard=1)]),
        ("dp", "dp_shard", "replica", [Mesh(), Mesh(cp=2), Mesh(dp=2, dp_shard=1)]),
        ("cp", "cp", None, [Mesh(), Mesh(dp=2)]),
    ],
)
def test_states_are_sharded_where_there_are_several_ranks_to_shard_over(
    zero, sum_over, shard_over, replicate_over, one_rank
) -> None:
    several = [Mesh(dp=2, cp=2), Mesh(dp=4, cp=2, dp_shard=2), Mesh(dp=2, cp=2, tp=2)]
    for sizes, stage in (*[(m, 0) for m in one_rank], *[(m, zero) for m in several]):
        states = dict.fromkeys(SHARDED[stage], True)
        expected = Placement(sum_over, shard_over, replicate_over, **states)
        placements = on_mesh(sizes, lambda mesh: zero_placement(zero, sum_over, mesh))
        assert placements == [expected] * sizes.world, sizes


# ---------------------------------------------------------------- Muon's matrices


def _work(mesh: ConnectedMesh, matrices: list[tuple[tuple[int, int], tuple[int, ...]]]) -> list:
    """Return the matrices that this rank orthogonalizes, for these shapes and parts."""
    params = [
        (ParamRecord(f"m{n}", shape, matrices=parts), nn.Parameter(torch.zeros(shape)))
        for n, (shape, parts) in enumerate(matrices)
    ]
    unit, done = make_unit("u", params, mesh), []
    WholeMatrices([unit], mesh).apply([unit.state.master], lambda x: done.append((*x.shape,)) or x)
    return sorted(done)


@pytest.mark.parametrize(
    ("mesh", "matrices", "work"),
    [
        (Mesh(dp=2, tp=2), [((n, n), (1,)) for n in (4, 8, 2, 8, 4, 4)],
         [[(2, 2), (4, 4)], [(4, 4), (4, 4)], [(8, 8)], [(8, 8)]]),
        # A long matrix costs less than a square one, whichever side is the long one.
        (Mesh(dp=2), [((40, 2), (1,)), *[((8, 8), (1,))] * 2], [[(8, 8)], [(8, 8), (40, 2)]]),
        (Mesh(dp=2), [((2, 40), (1,)), *[((8, 8), (1,))] * 2], [[(2, 40), (8, 8)], [(8, 8)]]),
        # m x n with m <= n costs 3 m^2 n + m^3. So 10 x 10 is between 18 x 8 and 19 x 8,
        (Mesh(dp=2), [((3, 3), (1,)), ((18, 8), (1,)), ((10, 10), (1,))],
         [[(3, 3), (18, 8)], [(10, 10)]]),
        (Mesh(dp=2), [((3, 3), (1,)), ((19, 8), (1,)), ((10, 10), (1,))],
         [[(3, 3), (10, 10)], [(19, 8)]]),
        # and between two parts of 8 x 8 and a whole matrix of 16 x 8.
        (Mesh(dp=2), [((3, 3), (1,)), ((10, 10), (1,)), ((16, 8), (1, 1))],
         [[(3, 3), (10, 10)], [(8, 8), (8, 8)]]),
    ],
)  # fmt: skip
def test_matrices_go_by_falling_cost_to_the_rank_with_the_least_work(mesh, matrices, work) -> None:
    assert sorted(on_mesh(mesh, _work, matrices)) == work


def test_units_without_matrices_have_nothing_to_orthogonalise() -> None:
    """A stage may hold no matrices."""

    def none(mesh: ConnectedMesh, zero: int) -> None:
        unit = _unit(mesh, (5, 3), (4,), zero=zero)
        WholeMatrices([unit], mesh).apply([unit.state.master[:0]], lambda x: 1 / 0)
        optimizer = ZeroOptimizer([unit], mesh, Muon())
        unit.write("grad", lambda r: torch.ones(r.shape))
        optimizer.step(0.1)
        assert all(bool((x < 0).all()) for _, x in unit.read("param"))

    for zero in range(4):
        on_mesh(Mesh(dp=2), none, zero)


# ---------------------------------------------------------------- invalid combinations


def _pair(name: str, **changes: Any) -> tuple[ParamRecord, nn.Parameter]:
    return ParamRecord(name, (3,), **changes), nn.Parameter(torch.zeros(3, dtype=F64))


@rows(
    [
        (lambda: make_unit("u", [_pair("a"), _pair("b", sum_over="dp")], single()),
         r"^all gradients of unit u must be summed over the same mesh axis, got \['data', 'dp'\]$"),
        (lambda: _bn(bias=torch.zeros(2)), r"\] and bias\[C\], got x\[2, 3\] and bias\[2\]$"),
        (lambda: _bn(torch.zeros(3, 1)), r"weight\[C\], got x\[2, 3\] and weight\[3, 1\]$"),
        (lambda: _bn(torch.zeros(4)), r"weight\[C\], got x\[2, 3\] and weight\[4\]$"),
        (lambda: _bn(torch.zeros(3), torch.zeros(4)), r"bias\[C\], got x\[2, 3\] and bias\[4\]$"),
        (lambda: _bn(torch.zeros(3), torch.zeros(3)), None),
        (lambda: _bn(bias=torch.zeros(3)), None),
    ]
)  # fmt: skip
def test_refusals(call, words) -> None:
    check(call, words)


def _bn(weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> None:
    y, moments = sync_batch_norm(torch.eye(3)[:2], weight, bias, group=None)
    assert (y.shape, float(moments.n)) == ((2, 3), 2.0)


def _of_replicas(mesh: ConnectedMesh) -> None:
    words = "^unit u: the ordered reduction of gradients does not support hybrid sharding"
    for zero in range(4):
        make = partial(make_unit, "u", [_pair("a")], mesh, zero=zero, ordered=True)
        check(make, words if zero else None)


def test_replicas_of_shards_are_not_summed_in_order() -> None:
    on_mesh(Mesh(dp=4, dp_shard=2), _of_replicas)


def _written(mesh: ConnectedMesh) -> None:
    record = ParamRecord("w", (4, 6), (Cut("tp", 1, 2),))
    unit = make_unit("u", [(record, nn.Parameter(torch.zeros(4, 3)))], mesh)
    for shape in ((4, 6), (3, 4), (12,)):
        words = rf"^w: expected grad of shape \(4, 3\) on this rank, got \({shape[0]},"
        check(lambda s=shape: unit.write("grad", lambda record: torch.zeros(s)), words)
    unit.write("grad", lambda record: torch.ones(4, 3))
    assert unit.gradients.reduced.sum() == 12


def test_what_is_written_has_the_shape_that_the_rank_holds() -> None:
    on_mesh(Mesh(tp=2), _written)


def test_moments_that_are_there_stay_and_the_others_are_zeros() -> None:
    state = _unit(single(), (5, 3), (4,)).state
    state.add_moments(("exp_avg", "square"), rest={"square"})
    kept = {name: moment.fill_(n + 1) for n, (name, moment) in enumerate(state.moments.items())}
    state.add_moments(("square", "exp_avg", "outer"), rest={"square"})  # another optimizer's
    assert state.of_rest == {"square"}
    assert all(state.moments[name] is moment for name, moment in kept.items())
    assert [set(state.moments[name].tolist()) for name in ("exp_avg", "square", "outer")] == [
        {1.0}, {2.0}, {0.0}
    ]  # fmt: skip
    assert len(state.moments["outer"]) == len(state.master)


def _joined(mesh: ConnectedMesh) -> None:
    """Only gradients of one group and one dtype are joined, each kind in the given order."""
    data = [_unit(mesh, (3,), (5, n), dtype=dtype) for n in (1, 2) for dtype in (F64, torch.half)]
    own = _pair("own", sum_over="dp")
    units = [*data, make_unit("dp", [own], mesh), make_unit("dp too", [own], mesh)]
    flats = [unit.gradients.flat for unit in units]
    sizes = [x.nbytes for x in flats]
    end_to_end([unit.gradients for unit in units])
    homes = [unit.gradients.flat.untyped_storage() for unit in units]
    joined = [(0, 2), (1, 3), (0, 2), (1, 3), (4, 5), (4, 5)]
    assert [home.nbytes() for home in homes] == [sizes[a] + sizes[b] for a, b in joined]
    assert [unit.gradients.flat.dtype for unit in units] == [x.dtype for x in flats]
    pairs = [(a, b) for a in range(6) for b in range(6)
             if units[a].gradients.is_before(units[b].gradients)]  # fmt: skip
    assert pairs == [(0, 2), (1, 3), (4, 5)]


def test_gradients_of_one_kind_are_joined() -> None:
    on_mesh(Mesh(dp=2, cp=2), _joined)


# ---------------------------------------------------------------- sums and passes


@pytest.mark.parametrize("squares", [True, False])
def test_an_exact_sum_takes_all_of_a_long_piece(squares: bool, monkeypatch) -> None:
    terms = torch.randn(1001, generator=torch.Generator().manual_seed(5))
    whole = exact_sum([terms[:1], terms[1:]], [], terms, squares=squares)
    monkeypatch.setattr(ordered, "_CHUNK", 7)
    again = exact_sum([terms[:1], terms[1:]], [], terms, squares=squares)
    assert all(map(torch.equal, whole, again))


def test_recomputing_ends_where_it_began_nested_and_after_an_error() -> None:
    assert not is_recomputing()
    with recomputing():
        with pytest.raises(KeyError), recomputing():
            raise KeyError
        assert is_recomputing()
    assert not is_recomputing()
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(is_recomputing()))
    x.sum().backward()
    assert seen == [True]
    assert not is_recomputing()


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2), (1, 3), (0, 3, 2), (2, 3, 1, 4)])
def test_moments_are_those_of_the_samples_and_have_no_gradient(shape: tuple[int, ...]) -> None:
    """They have at least 32 bits; with no sample or one sample, there is no deviation."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=draw, dtype=F64, requires_grad=True)
    for dtype, wide, near, rounding in (
        (F64, F64, 1e-14, 1e-14), (torch.bfloat16, torch.float32, 1e-6, 2**-8),
    ):  # fmt: skip
        given = x.to(dtype)
        y, (n, mean, m2) = sync_batch_norm(given, None, None, 0.25, group=None)
        rows_ = given.detach().double().movedim(1, -1).reshape(-1, 3)
        truth = rows_.mean(0) if len(rows_) else torch.zeros(3)
        assert float(n) == len(rows_)
        assert {t.dtype for t in (n, mean, m2)} == {wide}
        assert y.dtype == dtype
        assert not any(t.requires_grad for t in (n, mean, m2))
        squares = (rows_ - truth).square().sum(0)
        for found, exact in ((mean, truth), (m2, squares)):
            assert torch.allclose(found.double(), exact.double(), rtol=near, atol=near)
        scale = (squares / max(len(rows_), 1) + 0.25).rsqrt()
        expected = ((rows_ - truth) * scale).view(*shape[:1], *shape[2:], 3).movedim(-1, 1)
        assert torch.allclose(y.double(), expected.double(), rtol=rounding, atol=near)
