"""``reduce = "ordered"``: weights, moments, norms and losses are
bitwise equal on any data ranks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import threads
import torch
from refused import check
from threads import on_mesh
from torch import nn

from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.gpt import GPT
from warpweave.parallel import schedule as schedules
from warpweave.parallel.data import ordered
from warpweave.parallel.data.optimizer import SGD, AdamW, Muon, Rule
from warpweave.parallel.data.ordered import check_order, exact_sum
from warpweave.parallel.data.unit import make_unit
from warpweave.parallel.mesh import AXES, ConnectedMesh, Mesh, single
from warpweave.parallel.schedule import FAMILIES
from warpweave.parallel.schedule.actions import Action, B, F, I, W
from warpweave.parallel.shard import ParamRecord
from warpweave.plan.memory import TrainingStep, estimate
from warpweave.prove import LIMITS
from warpweave.prove.options import ProveConfig
from warpweave.prove.proof import prove_layout

MODEL = GPTConfig(37, 8, 2, 16, 4, 4, 20, activation="swiglu", norm="rms", dropout=0.1)


def _ring_sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """Add like a ring of ranks: each part of a message starts at a different rank."""
    flat, total = torch.stack([term.flatten() for term in terms]), torch.empty_like(terms[0])
    parts = flat.tensor_split(len(terms), 1)
    turned = [part.roll(-at, 0) for at, part in enumerate(parts)]
    sums = [sum(part[1:], start=part[0]) for part in turned]
    return total.copy_(torch.cat(sums).view_as(total))


@dataclasses.dataclass(frozen=True)
class _Case:
    """A training run whose result must be that of one data rank, on these (data ranks, ZeRO)."""

    ranks: tuple[tuple[int, int], ...]
    rule: Rule = dataclasses.field(default_factory=AdamW)
    dtype: torch.dtype = torch.float32
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    samples: int = 6
    steps: int = 2
    reduce: str = "ordered"
    schedule: str = "1f1b"

    def run(self, dp: int, zero: int) -> dict[str, torch.Tensor]:
        """Return the losses and norms of all steps, and every weight and moment after them."""
        count, sp = self.samples // dp, self.mesh.tp > 1
        how = {"microbatches": count, "sequence_parallel": sp, "reduce": self.reduce}
        chunks = FAMILIES[self.schedule].chunks or 1
        plan = ParallelPlan(zero, self.schedule, chunks, **how)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threads, "_sum", _ring_sum)
            ranks = on_mesh(replace(self.mesh, dp=dp), self._train, plan)
        return {name: x for of in ranks for name, x in of.items()}

    def _train(self, mesh: ConnectedMesh, plan: ParallelPlan) -> dict[str, torch.Tensor]:
        stages = len(plan.placement(mesh.size("pp")))
        model = replace(MODEL, layers=stages, tied=self.schedule == "1f1b")
        engine = Engine(model, mesh, plan, dtype=self.dtype, rule=self.rule, clip=0.3)
        ids = plan.deal(mesh.size("dp"), 1)[mesh.index("dp")]
        found = {}
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(step)
            drawn = torch.randint(37, (self.samples, 9), generator=generator)
            tokens, labels = drawn[ids, :-1], drawn[ids, 1:]
            result = engine.step(tokens, labels, ids, lr=0.01, key=step)
            found |= {f"norm {step}": result.norm, f"loss {step}": result.loss}
        for kind in ("param", *self.rule.moments):
            found |= {f"{kind} {r.name}": x.clone() for r, x, _ in engine.read(kind)}
        return found

    def differing(self, dp: int, zero: int, one: dict[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors that differ from `one`."""
        found = self.run(dp, zero)
        assert found.keys() == one.keys()
        return [name for name, x in one.items() if not torch.equal(x, found[name])]


CASES = {
    "adamw": _Case(((2, 0), (3, 3), (4, 2), (6, 1)), samples=12, steps=4),
    "muon bf16": _Case(((2, 2), (3, 1)), Muon(), torch.bfloat16),
    "sgd pp": _Case(((3, 1),), SGD(), mesh=Mesh(pp=2)),
    "adamw zb-v": _Case(((2, 0), (3, 2)), mesh=Mesh(pp=2), schedule="zb-v"),
    "muon tp": _Case(((2, 3),), Muon(), mesh=Mesh(tp=4), samples=4),
    "adamw cp": _Case(((2, 2),), mesh=Mesh(cp=3), samples=4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_do_not_depend_on_the_number_of_data_ranks(case: str) -> None:
    one = CASES[case].run(1, 0)
    assert one["norm 0"] > 0.3  # it is clipped
    for dp, zero in CASES[case].ranks:
        assert not CASES[case].differing(dp, zero, one), (dp, zero)


def test_the_librarys_bits_do() -> None:
    case = _Case((), samples=4, reduce="library")
    assert case.differing(2, 2, case.run(1, 0))


def _reduced(mesh, zero, terms):
    param = nn.Parameter(torch.zeros(7, 5))
    unit = make_unit("u", [(ParamRecord("w", (7, 5)), param)], mesh, zero=zero, ordered=True)
    every, own = unit.gradients, terms[:, mesh.index("dp")]
    for step in range(2):  # the second one without leftovers of the first
        every.clear()
        for number, term in enumerate(own * (step + 1)):
            unit.parameters.unshard()
            unit.parameters.wait()
            every.before_backward()
            (param * term).sum().backward()
            every.after_backward()
            every.start(last=number == len(own) - 1)
        every.finish()
    ((_, whole),) = unit.read("grad")
    return whole.clone(), every.reduced.numel()


@pytest.mark.parametrize(("ranks", "zero"), [(1, 1), (2, 0), (3, 3), (4, 2), (8, 1), (8, 0)])
def test_the_sum_is_that_of_a_loop(ranks: int, zero: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    scale = 10.0 ** torch.arange(-3, 3).repeat(4)[:, None, None]
    terms = torch.randn(24, 7, 5, generator=generator) * scale
    total, backwards = torch.zeros(7, 5), torch.zeros(7, 5)
    for term, last in zip(terms, terms.flip(0)):
        total += 2 * term
        backwards += 2 * last
    dealt = terms.view(-1, ranks, 7, 5)
    for whole, held in on_mesh(Mesh(dp=ranks), _reduced, zero, dealt):
        assert torch.equal(whole, total)
        assert held == (32 if zero and ranks > 1 else 64 if ranks < 3 else 32 * ranks)
    assert not torch.equal(backwards, total)  # the order shows in the bits


def test_a_step_is_dealt_in_turn() -> None:
    plan = ParallelPlan(microbatches=2, reduce="ordered")
    assert plan.deal(3, 2).tolist() == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    blocks = replace(plan, reduce="library").deal(3, 2)
    assert blocks.flatten().tolist() == [*range(12)]


def _held(mesh: ConnectedMesh, plan: ParallelPlan) -> int:
    """Return the bytes of the gradients between steps."""
    every = [t for unit in Engine(MODEL, mesh, plan).units for t in vars(unit.gradients).values()]
    storages = [x.untyped_storage() for x in every if isinstance(x, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(("dp", "zero"), [(1, 1), (2, 0), (2, 3)])
def test_the_memory_is_estimated(dp: int, zero: int) -> None:
    plan, mesh = ParallelPlan(zero, reduce="ordered"), Mesh(dp=dp)
    (told,) = estimate(TrainingStep(MODEL, mesh, plan, 1, "fp32"))
    blocks = GPT(MODEL).blocks.values()
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks)
    in_flight = (4 if dp > 1 else 2) * 4 * largest
    for held in on_mesh(mesh, _held, plan):  # padded to 128 bytes for each parameter
        assert held == pytest.approx(told.gradients - in_flight, rel=0.1)


# ---------------------------------------------------------------- the exact sum


def _summed(mesh: ConnectedMesh, terms: torch.Tensor, squares: bool) -> tuple:
    """Sum terms that the ranks share, over one axis after the other."""
    ranks, groups = mesh.sizes.world, [mesh.group(axis) for axis in AXES]
    pieces = terms[mesh.rank :: ranks].contiguous().split(1 + 600 // ranks)
    unit, total, finite = exact_sum(pieces, groups, terms, squares=squares)
    return (unit, total, bool(finite)) if squares else (unit * total, total, bool(finite))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("squares", [True, False])
def test_an_exact_sum_has_the_same_bits_in_any_order(dtype: torch.dtype, squares: bool) -> None:
    terms = torch.randn(4001, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    terms = (terms * 10.0 ** (torch.arange(4001) % 9 - 6)).to(dtype)
    unit, total, finite = _summed(single(), terms, squares)
    truth = math.fsum(x**2 if squares else x for x in terms.tolist())
    found = float(unit) ** 2 * float(total) if squares else float(unit)
    largest = float(terms.abs().max()) ** (1 + squares)
    assert abs(found - truth) < 1e-13 * largest
    assert finite
    for mesh in (Mesh(dp=2), Mesh(cp=3), Mesh(tp=8), Mesh(tp=2, cp=3), Mesh(dp=2, cp=2, pp=2)):
        for other in on_mesh(mesh, _summed, terms, squares):
            assert torch.equal(torch.stack(other[:2]), torch.stack([unit, total]))
    for at_a_time in (2**20, 100):
        with mock.patch.object(ordered, "_CHUNK", at_a_time):
            moved = _summed(single(), terms[torch.randperm(4001)], squares)
        assert torch.equal(moved[1], total)


def test_an_exact_sum_of_nothing_is_zero_and_of_what_is_not_finite_is_not() -> None:
    zero = exact_sum([], [], torch.zeros(()))
    assert [float(x) for x in zero] == [1.0, 0.0, 1.0]
    assert float(exact_sum([torch.zeros(3)], [], torch.zeros(()))[1]) == 0.0
    for bad in (math.nan, math.inf, -math.inf):
        unit, total, finite = exact_sum([torch.tensor([1.0, bad])], [], torch.zeros(()))
        assert not (unit * total).isfinite()
        assert not finite

    def of_one(mesh: ConnectedMesh) -> tuple[bool, bool]:
        x = torch.tensor([1.0, math.nan if mesh.rank == 3 else 2.0])
        unit, total, finite = exact_sum([x], [mesh.group("tp"), mesh.group("dp")], x)
        return bool((unit * total).isfinite()), bool(finite)

    assert on_mesh(Mesh(dp=2, tp=2), of_one) == [(False, True)] * 3 + [(False, False)]


# ---------------------------------------------------------------- errors, and prove


def test_a_schedule_in_another_order_is_refused() -> None:
    forward = [Action(F, 0, mb) for mb in range(2)]
    for lists in (schedules.gpipe(2, 3), schedules.interleaved(1, 3, 2)):
        check_order(lists, tied=True)
    split = [Action(*a) for a in ((I, 0, 0), (I, 0, 1), (W, 0, 0), (W, 0, 1))]
    check_order([forward + split], tied=False)
    for order in ([(B, 1), (B, 0)], [(I, 0), (I, 1), (W, 1), (W, 0)]):
        lists = [forward + [Action(op, 0, mb) for op, mb in order]]
        check(partial(check_order, lists, tied=False), r"stages \[0\] has the order \[1, 0\]")
    both = [[Action(F, s, mb) for mb in range(2) for s in range(2)]]
    both[0] += [Action(B, s, mb) for s in (1, 0) for mb in range(2)]
    check_order(both, tied=False)
    check(lambda: check_order(both, tied=True), r"stages \[0, 1\] has the order \[0, 1, 0, 1\]")
    for stages in (2, 3):  # on a separate rank, which is any: only the last stage alone is wrong
        lists = schedules.gpipe(stages, 2)
        ends = [at for at, a in enumerate(lists[-1]) if a.op == B]
        lists[-1][ends[0]], lists[-1][ends[1]] = lists[-1][ends[1]], lists[-1][ends[0]]
        words = rf"stages \[{stages - 1}\] has the order \[1, 0\]"
        for tied in (False, True):
            check(partial(check_order, lists, tied=tied), words)
    plan = ParallelPlan(schedule="zb-v", chunks=2, microbatches=3, reduce="ordered")
    words, model = r"stages \[0, 3\] has the order \[0, 1, 0, 2, 1, 2\]", replace(MODEL, layers=4)
    check(lambda: model.check(Mesh(pp=2), plan), words)  # before any rank is started


@pytest.mark.parametrize("mesh", [Mesh(dp=4, dp_shard=2), Mesh(outer=2)])
def test_replicas_of_shards_are_refused(mesh: Mesh) -> None:
    words = "reduce = 'ordered' does not support dp_shard"
    check(lambda: MODEL.check(mesh, ParallelPlan(reduce="ordered")), words)


def test_prove_takes_the_word() -> None:
    options = ProveConfig(dp=2, tp=2, zero=0, reduce="ordered", dtype="fp64")
    (layout,) = options.layouts()
    assert "--reduce ordered" in layout.command
    assert "reduce=ordered" in str(layout)
    for errors in on_mesh(layout.mesh, lambda mesh: prove_layout(layout, mesh)):
        assert errors.worst <= LIMITS["fp64"], errors.where
