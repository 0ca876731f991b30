"""Ranks that hold different data: the message for every division of ranks, and everything that is
compared of an engine's units. Ranks are threads; `test_agree.py` has whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from threads import on_mesh
from torch import nn

from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel.data.optimizer import Muon
from warpweave.parallel.data.outer import OuterRule
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.train import not_finite
from warpweave.train.not_finite import _bad, _Note, _Notes
from warpweave.train.replicas import ReplicaCheck

GRID = Mesh(dp=2, tp=3)  # two replicas of three tensor ranks each
ALL = (0, 1, 2, 3, 4, 5)
SAME = {"count": (7.0,) * 6, "tokens": (1,) * 6, "labels": (2,) * 6, "rate": (0.5,) * 6}


def _compared(mesh: ConnectedMesh, held: dict[str, tuple]) -> tuple[str | None, list[float]]:
    """Compare an engine without parameters, twice: names are exchanged once."""
    mine = {name: values[mesh.rank] for name, values in held.items()}
    optimizer = SimpleNamespace(count=torch.tensor(mine.pop("count")))
    engine = SimpleNamespace(mesh=mesh, optimizer=optimizer, units=[], device=torch.device("cpu"))
    data = {n: v if n == "rate" else torch.tensor([9, v, 9]) for n, v in mine.items()}
    check = ReplicaCheck(engine)
    found = check.compare(data, 0.125 * (mesh.rank + 1))
    assert check.compare(data, 0.125 * (mesh.rank + 1)) == found
    return found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        # Each replica has different data, and all ranks have the same number.
        ({"tokens": (1, 1, 1, 4, 4, 4), "labels": (5, 5, 5, 6, 6, 6)}, None),
        ({"tokens": (1, 1, 1, 4, 3, 4)},
         "rank 4 (dp=1, tp=1) differs from ranks 3, 5 in tokens"),
        ({"tokens": (1, 8, 1, 1, 1, 1)},
         "rank 1 (dp=0, tp=1) differs from ranks 0, 2 in tokens"),
        ({"rate": (0.5,) * 5 + (0.25,)},
         "rank 5 (dp=1, tp=2) differs from ranks 0, 1, 2, 3, 4 in rate"),
        ({"rate": (0.25,) + (0.5,) * 5},
         "rank 0 (dp=0, tp=0) differs from ranks 1, 2, 3, 4, 5 in rate"),
        # Several ranks differ, all equally or each in a different way.
        ({"rate": (0.5, 0.5, 0.25, 0.5, 0.5, 0.25)},
         "ranks 2, 5 differ from ranks 0, 1, 3, 4 in rate"),
        ({"rate": (0.75, 0.5, 0.25, 0.5, 0.5, 0.5)},
         "ranks 0, 2 differ from ranks 1, 3, 4, 5 in rate"),
        # No majority is right.
        ({"rate": (0.5,) * 3 + (0.25,) * 3}, "ranks 0, 1, 2 and ranks 3, 4, 5 differ in rate"),
        ({"rate": (0.5, 0.25, 0.75) * 2},
         "ranks 0, 3 and ranks 1, 4 and ranks 2, 5 differ in rate"),
        ({"tokens": (1, 2, 3, 1, 1, 1)},
         "rank 0 (dp=0, tp=0) and rank 1 (dp=0, tp=1) and rank 2 (dp=0, tp=2) differ in tokens"),
        ({"count": (7.0,) * 4 + (8.0,) * 2},
         "ranks 4, 5 differ from ranks 0, 1, 2, 3 in the optimizer's step count"),
        # The first of several tensors is named.
        ({"tokens": (1, 1, 8, 1, 1, 1), "labels": (2, 2, 8, 2, 2, 2)},
         "rank 2 (dp=0, tp=2) differs from ranks 0, 1 in tokens (and 1 other tensor)"),
        ({"labels": (2, 2, 8, 2, 2, 2), "rate": (0.5,) * 4 + (0.25,) * 2},
         "rank 2 (dp=0, tp=2) differs from ranks 0, 1 in labels (and 1 other tensor)"),
        ({"count": (7.0, 9.0, 7.0, 7.0, 7.0, 7.0), "tokens": (1, 3, 1, 1, 1, 1),
          "labels": (2, 4, 2, 2, 2, 2)},
         "rank 1 (dp=0, tp=1) differs from ranks 0, 2, 3, 4, 5 in the optimizer's step count "
         "(and 2 other tensors)"),
    ],
)  # fmt: skip
def test_those_who_differ_are_named_against_the_most_that_agree(changes, words):
    found = on_mesh(GRID, _compared, SAME | changes)
    assert found == [(words, [0.125 * (rank + 1) for rank in ALL])] * 6


# ---------------------------------------------------------------- units

MODEL = GPTConfig(vocab_size=19, seq_len=8, layers=2, width=8, heads=2)
LAYOUTS = [
    *((Mesh(dp=2, tp=2), zero) for zero in range(4)),
    (Mesh(dp=4, dp_shard=2), 1),
    (Mesh(dp=4, dp_shard=2), 3),
    (Mesh(cp=2, dp=2), 2),
    (Mesh(pp=2, dp=2), 0),
    (Mesh(outer=2, dp=2), 2),
]


def _checked(mesh: ConnectedMesh, zero: int, dtype: torch.dtype, what: str, *ranks: int, **how):
    """Compare the replicas of an engine; these ranks' first element of `what` is another."""
    outer = OuterRule(2) if mesh.sizes.outer > 1 else None
    plan = ParallelPlan(zero=zero, microbatches=2)
    engine = Engine(MODEL, mesh, plan, seed=1, dtype=dtype, outer=outer, **how)
    unit = next((u for u in engine.units if u.name == "block 0"), None)
    if mesh.rank in ranks and what == "param":
        buffer = unit.parameters.flat if unit.parameters.shard is None else unit.parameters.shard
        buffer[0] += 1.0
    elif mesh.rank in ranks and what == "master":
        unit.state.master[0] += 1.0
    elif mesh.rank in ranks and what:
        unit.state.moments[what][0] += 1.0
    return ReplicaCheck(engine).compare({}, 0.0)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mesh", "zero"), LAYOUTS)
def test_what_replicas_begin_with_is_alike_in_every_layout(mesh, zero, dtype):
    assert on_mesh(mesh, _checked, zero, dtype, "") == [None] * mesh.world


FIRST = "blocks.0.attention.qkv.weight"  # the first of the unit
KINDS = {"param": "", "master": " (master)", "exp_avg": " (exp_avg)", "exp_avg_sq": " (exp_avg_sq)"}


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize(
    ("mesh", "zero", "sharded"),
    [(Mesh(dp=3), 0, ()), (Mesh(dp=3), 1, ("master", "exp_avg", "exp_avg_sq")),
     (Mesh(dp=3), 3, tuple(KINDS)), (Mesh(dp=6, dp_shard=2), 3, ())],
)  # fmt: skip
def test_each_buffer_that_several_ranks_hold_is_compared(mesh, zero, sharded, what):
    """In bf16, with masters in fp32. A shard that only one rank holds cannot be compared."""
    others = "0, 1" if mesh.world == 3 else "0, 4"
    words = f"rank 2 (dp=2) differs from ranks {others} in {FIRST}{KINDS[what]}"
    found = on_mesh(mesh, _checked, zero, torch.bfloat16, what, 2)
    assert found == [None if what in sharded else words] * mesh.world


@pytest.mark.parametrize("what", KINDS)
def test_in_the_second_of_two_shards_the_tensor_that_lies_there_is_named(what):
    mesh, second = Mesh(dp=6, dp_shard=2), "blocks.0.mlp.down.weight"
    words = f"rank 3 (dp=3) differs from ranks 1, 5 in {second}{KINDS[what]}"
    assert on_mesh(mesh, _checked, 3, torch.bfloat16, what, 3) == [words] * 6


def test_difference_in_a_second_moment_is_attributed_past_muon_matrices():
    """In a shard that begins within a matrix."""
    mesh, norm = Mesh(dp=6, dp_shard=2), "blocks.0.attention_norm.weight"
    for what, name in (("exp_avg", "blocks.0.mlp.down.weight"), ("exp_avg_sq", norm)):
        words = f"rank 3 (dp=3) differs from ranks 1, 5 in {name} ({what})"
        of_muon = partial(_checked, rule=Muon())
        assert on_mesh(mesh, of_muon, 1, torch.bfloat16, what, 3) == [words] * 6


@pytest.mark.parametrize("what", KINDS)
def test_outer_replicas_train_apart_and_are_not_compared_with_each_other(what):
    mesh, given = Mesh(outer=2, dp=2), (0, torch.bfloat16, what)
    assert on_mesh(mesh, _checked, *given, 2, 3) == [None] * 4
    words = f"rank 2 (outer=1, dp=0) and rank 3 (outer=1, dp=1) differ in {FIRST}{KINDS[what]}"
    assert on_mesh(mesh, _checked, *given, 3) == [words] * 4


def test_outer_replicas_have_data_of_their_own():
    for last, words in ((4, None), (3, "rank 2 (outer=1, tp=0) and rank 3 (outer=1, tp=1) differ")):
        held = {"count": (7.0,) * 4, "tokens": (1, 1, 4, last)}
        for found, _ in on_mesh(Mesh(outer=2, tp=2), _compared, held):
            assert found == (words and f"{words} in tokens")


# ---------------------------------------------------------------- values that are not finite


@pytest.mark.parametrize(
    ("values", "bad"),
    [([0.0, -1e30], False), ([float("-inf")], False), ([float("inf")], True),
     ([1.0, float("nan")], True), ([], False)],
)  # fmt: skip
def test_infinity_is_bad_and_the_minus_infinity_of_a_mask_is_not(values, bad):
    fine, whole = torch.ones(2), torch.tensor([1, 2])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = torch.tensor(values, dtype=dtype)
        assert _bad([given]) == _bad([fine, whole, given]) == _bad([given, fine]) == bad
    assert not _bad([])
    assert not _bad([whole, whole > 1])


class Pair(nn.Module):
    """A module with two outputs, of which the second may be changed."""

    def forward(self, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * factor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = Pair(), nn.Softsign()

    def forward(self, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.pair(x, factor)
        return a, self.last(b)


def test_every_output_of_a_module_and_its_gradient_is_checked_for_notes():
    model, x = Model(), torch.ones(3, requires_grad=True)
    nan, inf = float("nan"), float("inf")
    for at, factor, gradient in ((0, 1.0, nan), (1, 1.0, inf), (1, nan, 1.0)):
        notes = _Notes()
        with notes.of(model):
            out = model(x, factor)[at]
            assert notes.within == "last"  # the name that a collective would get now
            out.backward(torch.full((3,), gradient))
            assert notes.within == "the gradient of pair"
        bad = [note.where for note in notes.notes if note.bad]
        if factor != factor:
            assert bad[:2] == ["pair", "last"]
        else:
            assert bad == [*["the gradient of last"] * at, "the gradient of pair"]
        made = len(notes.notes)
        model(x, nan)[1].sum().backward()
        assert len(notes.notes) == made  # nothing is left on the model
        assert not any(module._forward_hooks for module in model.modules())
        assert not any(module._forward_pre_hooks for module in model.modules())


class GivenNotes:
    """A mock of `_Notes`: the notes of a rank replace those of its model."""

    def __init__(self) -> None:
        self.notes: list[_Note] = []

    @contextmanager
    def of(self, notes: list[_Note]) -> Iterator[None]:
        self.notes = notes
        yield


GIVES, GETS = _Note("m", True, "its message"), _Note("m", False, "", received=True)
FINE, LATE = _Note("other", False, "", received=True), _Note("", True, "mlp", given=True)
OWN, WELL = _Note("", True, "mlp"), _Note("", False, "norm")
SUM, BAD_SUM = _Note("sum", False, "a sum"), _Note("sum", True, "a sum")


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([WELL, SUM], [WELL, SUM], {}),
        ([GIVES], [WELL, GETS, WELL, LATE], {0: "its message"}),
        ([GIVES], [GETS, FINE, LATE], {0: "its message"}),  # an earlier message may be the cause
        ([GIVES], [FINE, GETS, LATE], {0: "its message"}),
        ([GIVES], [GETS, OWN], {0: "its message", 1: "mlp"}),  # posted, and nothing of it was used
        ([GIVES], [LATE, GETS], {0: "its message", 1: "mlp"}),  # before there was one
        ([WELL], [FINE, LATE], {1: "mlp"}),
        ([BAD_SUM, OWN], [SUM, OWN], {0: "a sum"}),
        ([BAD_SUM], [OWN, SUM], {0: "a sum", 1: "mlp"}),
        ([WELL, BAD_SUM], [BAD_SUM, OWN], {0: "a sum", 1: "a sum"}),
        ([OWN, BAD_SUM], [WELL, SUM], {0: "mlp"}),
    ],
)
def test_nan_comes_from_who_has_it_before_others_could_give_it(monkeypatch, first, second, found):
    monkeypatch.setattr(not_finite, "_Notes", GivenNotes)

    def run(mesh: ConnectedMesh, notes: tuple[list[_Note], ...]) -> dict[int, str]:
        engine: Any = SimpleNamespace(mesh=mesh, gpt=notes[mesh.rank])
        return not_finite.origins(engine, lambda: None)

    assert on_mesh(Mesh(dp=2), run, (first, second)) == [found] * 2
    turned = {1 - rank: where for rank, where in found.items()}
    assert on_mesh(Mesh(dp=2), run, (second, first)) == [turned] * 2
