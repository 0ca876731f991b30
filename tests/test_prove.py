"""The proof passes on layouts of 2 to 8 ranks, detects planted faults, and is itself tested.

A fault is planted in what a single rank holds or reports, from the second step on, and in the
proof's own results. Each must make the verdict fail. `test_planted_faults.py` plants computations
that are wrong on all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
from collections.abc import Iterator
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import tyro
from plants import Plant, planted, replacing
from ranks import QuickProcesses, run_ranks
from threads import on_mesh, run_threads

from warpweave.kernels.norm import function as norm
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.launch import devices as gpus
from warpweave.launch.interrupt import Interrupt, Stopped
from warpweave.launch.session import Session
from warpweave.model import engine as engines
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.parallel.collectives import Pending
from warpweave.parallel.data import parameters, zero
from warpweave.parallel.data.optimizer import SGD, LossScale
from warpweave.parallel.mesh import AXES, Mesh, single
from warpweave.parallel.pipeline.losses import LOSS
from warpweave.parallel.shard import ParamRecord
from warpweave.parallel.tensor import ranks
from warpweave.parallel.words import Kind, Strategy
from warpweave.prove import (
    LIMITS,
    Errors,
    Layout,
    ProveConfig,
    command,
    expected,
    main,
    options,
    proof,
    prove_layout,
)
from warpweave.prove import truth as truths
from warpweave.prove import typecheck as typechecks
from warpweave.prove.layouts import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Sizes,
    Style,
    _strategies,
    all_layouts,
    draw,
    meshes,
    smallest,
)


def drawn(mesh: Mesh) -> Layout:
    """Draw the first random layout of `mesh`, with two layers or as many as stages
    need, and two micro-batches."""
    layout = next(layout for layout in map(draw, itertools.count()) if layout.mesh == mesh)
    layers = max(2, mesh.pp + layout.sizes.layers % mesh.pp)
    samples = 2 * mesh.dp * layout.micro_batch_size
    sizes = dataclasses.replace(layout.sizes, samples=samples, layers=layers)
    return dataclasses.replace(layout, count=2, drawn=sizes)


def shallow(mesh: Mesh, *words, layers: int = 1, length: int | None = None, **options) -> Layout:
    """Make a layout of one block in one micro-batch, where none interact."""
    layout = Layout(mesh, *words, **options)
    sizes = {"layers": layers, "seq_len": length or layout.sizes.seq_len}
    return dataclasses.replace(layout, count=1, drawn=dataclasses.replace(layout.sizes, **sizes))


LAYOUTS = {
    2: [
        shallow(Mesh(dp=2), zero=0),
        Layout(Mesh(dp=2), zero=3, style="llama", recompute="selective"),
        Layout(Mesh(cp=2), zero=2, style="llama", tied=False),
        shallow(Mesh(tp=2), style="llama", recompute="full"),
        Layout(Mesh(tp=2), style="qwen", count=1),
        shallow(Mesh(tp=2), style="olmo"),
        Layout(Mesh(tp=2), True, style="primer", recompute="selective", overlap="chunked"),
        Layout(Mesh(tp=2), True, style="gemma", count=1),
        shallow(Mesh(tp=2), True, style="gpt2", tied=False),
        Layout(Mesh(pp=2), schedule="gpipe", recompute="full"),
        Layout(Mesh(pp=2), schedule="interleaved", style="llama", count=3),
        Layout(Mesh(dp=2), zero=1, schedule="interleaved"),  # both stages on each rank
        shallow(Mesh(pp=2), layout="balanced", length=7, layers=2),
    ],
    4: [
        Layout(Mesh(dp=2, cp=2), zero=3, recompute="full"),
        Layout(Mesh(tp=2, cp=2), True, 3, style="llama", tied=False, strategy="ulysses"),
        Layout(
            Mesh(cp=4, ulysses=2), zero=1, style="llama", strategy="hybrid", layout="contiguous",
            count=1,
        ),
        Layout(Mesh(tp=2, pp=2), style="gemma", tied=False, recompute="full", count=2),
        Layout(Mesh(tp=2, cp=2), True, 3, style="olmo", overlap="chunked"),
        shallow(Mesh(tp=4), True, style="gpt2"),
        Layout(Mesh(pp=4), schedule="1f1b", style="llama", count=4),
        Layout(Mesh(pp=2, dp=2), zero=3, schedule="interleaved", count=2),
        Layout(Mesh(pp=2, dp=2), zero=2, style="llama", packed=True, count=2),
        shallow(Mesh(dp=2, cp=2), strategy="ring", packed=True),
        Layout(Mesh(tp=2, cp=2), True, style="qwen", strategy="gather", packed=True, count=1),
        Layout(
            Mesh(tp=2, cp=2), True, 3, strategy="ulysses", layout="striped", packed=True, count=1
        ),
        shallow(Mesh(cp=4, ulysses=2), style="llama", strategy="hybrid", packed=True),
        shallow(Mesh(dp=2, cp=2), zero=1, strategy="gather", layout="balanced", packed=True),
        Layout(
            Mesh(pp=2, dp=2), zero=1, schedule="pipedream", tied=False, recompute="full", count=2
        ),
        Layout(
            Mesh(pp=4), schedule="pipedream-2bw", tied=False, style="llama", packed=True, count=4
        ),
    ],
    5: [drawn(Mesh(cp=5))],
    6: [drawn(Mesh(tp=3, pp=2)), Layout(Mesh(dp=3, cp=2), zero=2)],
    8: [
        Layout(Mesh(dp=2, tp=2, pp=2), True, 1, recompute="selective", count=2),
        Layout(Mesh(cp=2, tp=2, pp=2), True, 3, "gpipe", "llama", count=2),
        Layout(Mesh(cp=4, tp=2, ulysses=2), True, 2, style="llama", strategy="hybrid", count=1),
    ],
}  # fmt: skip
LOW = {"fp32": (0, 2, 10), "bf16": (4, 6, 10), "fp16": (0, 2, 8)}  # those with two ranks


def _prove(rank: int, layouts: list[Layout]) -> list[Errors]:
    meshes = {sizes: sizes.connect() for sizes in dict.fromkeys(lay.mesh for lay in layouts)}
    return [prove_layout(layout, meshes[layout.mesh], 300.0) for layout in layouts]


def _within_the_limits(run, layouts: list[Layout]) -> None:
    for found in run(layouts[0].mesh.world, _prove, layouts):
        for layout, errors in zip(layouts, found, strict=True):
            assert errors.worst <= LIMITS[layout.dtype], (str(layout), errors)


@pytest.mark.parametrize("world", LAYOUTS)
def test_sampled_layouts_equal_the_plain_model_within_the_limits(world):
    """Two ranks are processes, all the others threads: they compute the same at half the cost."""
    _within_the_limits(run_ranks if world == 2 else run_threads, LAYOUTS[world])


@pytest.mark.parametrize("dtype", LOW)
def test_low_precisions_equal_the_plain_model_within_their_limits(dtype, monkeypatch):
    """The loss scale, which cancels in the gradients, may double after each step."""
    monkeypatch.setattr(LossScale.__init__, "__defaults__", (2.0**16, 1))
    layouts = [dataclasses.replace(LAYOUTS[2][at], dtype=dtype) for at in LOW[dtype]]
    _within_the_limits(run_threads, layouts)


SEEN = LIMITS["fp32"] * 2**29  # in fp64, fp32 would also notice an error of this size
EPS = {"fp64": 2**-52, "fp32": 2**-23}


def _truth(layout: Layout) -> truths.Truth:
    return truths.truth(layout.model, layout.sizes, NAMED_DTYPES[layout.dtype])


def _condition(layout: Layout) -> dict[str, float]:
    """Return the relative change of each number of the plain model when the initial weights change,
    in multiples of their relative change: derivatives, which are equal on every CPU.

    They are differences in float64 for a change of 2^-30 in random directions: so small that the
    model is linear there, and 2^22 times the rounding of a weight.
    """
    change, found = 2.0**-30, {}

    def moved(params: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        signs = {n: torch.randint(2, p.shape, generator=generator) for n, p in params.items()}
        return {name: p + change * p * (2 * signs[name] - 1) for name, p in params.items()}

    train = expected.train.__wrapped__
    values = train(layout.model, layout.sizes)
    with mock.patch.object(expected, "_moved", moved):
        others = [train(layout.model, layout.sizes, moved=number) for number in (1, 2, 3)]
    for what, value in values.items():
        by = max(float((other[what] - value).abs().max()) for other in others)
        found[what] = by / change / max(float(value.abs().max()), 1e-30)
    return found


@pytest.mark.parametrize(("dtype", "sharp"), [("fp64", 2e-13), ("fp32", 1e-4)])
def test_the_limits_leave_no_room_for_faults(dtype, sharp):
    """`sharp`: the fraction of a number that the limit allows if rounding moves weights by one
    unit. Measured values may be larger, but not as large as with a narrower dtype."""
    layout = Layout(Mesh(), style="llama", dtype=dtype)
    errors, truth, condition = prove_layout(layout, single()), _truth(layout), _condition(layout)
    assert errors.worst < LIMITS[dtype] / 4
    assert 1 < max(condition.values()) < sharp / (LIMITS[dtype] * EPS[dtype])
    assert all(by < 1 for what, by in condition.items() if "loss" in what)
    allowed = (LIMITS[dtype] * by / truth.largest[what] for what, by in truth.rounding.items())
    assert max(allowed) < 2**10 * sharp


def _alone(seed: int, dtype: str = "fp64") -> Layout:
    """Return the random model of `seed` on one device."""
    mesh = {"mesh": Mesh(), "strategy": "auto", "sequence_parallel": False, "overlap": "bulk"}
    return dataclasses.replace(draw(seed), **mesh, zero=0, dtype=dtype, schedule="1f1b")


def test_what_rounding_alone_makes_of_an_unlucky_model_is_no_error():
    """Norms over two elements: a change of the weights changes some gradients by thousands of times
    as much as in an ordinary model. The loss does not change more, so its limit is as sharp."""
    unlucky, ordinary = _condition(_alone(525)), _condition(_alone(1))
    assert max(unlucky.values()) > 1000 * max(ordinary.values())
    assert unlucky["loss of step 0"] < 1
    for dtype in "fp64", "fp32":
        assert prove_layout(_alone(525, dtype), single()).worst < LIMITS[dtype] / 4


def test_what_a_layout_says_is_what_the_engine_is_told():
    layout = Layout(
        Mesh(), True, 3, "gpipe", "llama", False, "full", "gather", "striped", "chunked", "fp32",
        "triton",
    )  # fmt: skip
    told = mock.Mock(side_effect=InterruptedError)
    with mock.patch.object(proof, "Engine", told), pytest.raises(InterruptedError):
        prove_layout(layout, single())
    ((config, mesh, plan), options) = told.call_args
    assert (config, mesh.sizes) == (layout.model, layout.mesh)
    assert (config.norm, config.tied) == ("rms", False)
    assert plan.microbatches * options["micro_batch_size"] == layout.sizes.samples
    assert plan == layout.plan  # `test_an_engine_is_told_all_that_a_layout_says`
    assert options["impl"] == options["rule"].impl == layout.impl
    assert options["dtype"] == torch.float32


# -------------------------------------------------------------------------- planted faults


@replacing
def _doubled(right, self, tokens, labels, ids, valid, *rest):
    """Return twice the number of valid tokens as the normalizer."""
    return right(self, tokens, labels, ids, 2 * valid.wait(), *rest)


DOUBLED = Plant(engines.Engine, "_micro_batches", _doubled)


def _interpreted(rank: int) -> list[Errors]:
    """Run one step with Triton kernels interpreted: two layouts, and one with a wrong kernel."""
    right = norm.launch_forward

    def too_much_eps(*args):
        *others, options = args
        return right(*others, options._replace(eps=options.eps + 0.01))

    found = []
    with mock.patch.object(expected, "STEPS", 1), mock.patch.object(proof, "STEPS", 1):
        sizes = Sizes(2, 8, vocab=11, layers=1, heads=2, kv_heads=2, head_dim=4, hidden=10)
        llama = Layout(
            Mesh(cp=2), style="llama", zero=2, tied=False, strategy="ring", impl="triton", count=1,
            drawn=sizes,
        )  # fmt: skip
        gpt2 = Layout(Mesh(tp=2), True, recompute="selective", impl="triton", count=1, drawn=sizes)
        for layout in (llama, gpt2):
            found.append(prove_layout(layout, layout.mesh.connect(), 300.0))
        with mock.patch.object(norm, "launch_forward", too_much_eps):
            found.append(prove_layout(gpt2, gpt2.mesh.connect(), 300.0))
    return found


def test_the_triton_kernels_prove_layouts_too():
    for llama, gpt2, wrong in run_ranks(2, _interpreted):
        assert max(llama.worst, gpt2.worst) <= LIMITS["fp64"], (llama, gpt2)
        assert wrong.worst > SEEN, wrong


def test_the_report_names_what_is_wrong():
    with planted(Plant(ParamRecord, "draw", _shifted)):
        errors = prove_layout(Layout(Mesh()), single())
    assert "of blocks." in errors.where or errors.where.startswith("blocks.")
    assert errors.worst > SEEN
    with planted(Plant(zero.Unit, "read", _nan_in_the_final_bias)):
        errors = prove_layout(Layout(Mesh()), single())
    assert errors.worst == float("inf")
    assert "final_norm.bias" in errors.where


def test_the_report_names_the_first_wrong_tensor_in_order_of_execution():
    """Later ones may have larger errors: the backward reaches the last parameter first."""

    @replacing
    def read(right, self, which):
        for record, tensor, owned in right(self, which):
            far = {"final_norm.weight": 1e-9, "embedding.weight": 0.5}.get(record.name, 0.0)
            yield record, tensor * (1 + far * (which == "grad")), owned

    with planted(Plant(engines.Engine, "read", read)):
        errors = prove_layout(Layout(Mesh()), single())
    assert errors.first == "gradient of final_norm.weight at step 0 on rank 0"
    assert errors.where.startswith("gradient of embedding.weight at step ")


@replacing
def _shifted(right, self, seed, **options):
    return right(self, seed, **options) + (self.name == "blocks.1.mlp.up.weight")


@replacing
def _nan_in_the_final_bias(right, self, kind):
    for record, tensor in right(self, kind):
        yield record, tensor * float("nan") if record.name == "final_norm.bias" else tensor


# ------------------------------------------------------- faults of one rank, or of later steps


def _says(name: str, change):
    """Make Engine.`name` return `change` of its result."""

    value = replacing(lambda right, *args, **options: change(right(*args, **options)))
    return engines.Engine, name, value


def _reads(kind: str, change, after: int = 0):
    """Change reads of the final norm's weight, from the call after `after` others."""

    def value(original):
        calls = itertools.count()

        def read(self, which):
            hit = which == kind and next(calls) >= after
            for record, tensor, owned in original(self, which):
                mine = hit and record.name == "final_norm.weight"
                yield change(record, tensor, owned) if mine else (record, tensor, owned)

        return read

    return engines.Engine, "read", value


def _scaled(factor: float):
    return lambda record, tensor, owned: (record, tensor * factor, owned)


def _one_element(record, tensor, owned):
    tensor = tensor.clone()
    tensor[-1] += 1e-6
    return record, tensor, owned


def _later_gradient(original):
    """From the second step on, change one element of the gradients before it is used."""
    calls = itertools.count()

    def norm(self):
        if next(calls):
            self.units[0].gradients.reduced[0] += 1e-6
        return original(self)

    return norm


def _last_publish(original):
    """After the last step, change a slice that another rank has updated."""
    calls = itertools.count()

    def publish(self):
        original(self)
        if next(calls) >= (expected.STEPS - 1) * UNITS and self.layout.own.start > 0:
            self.wait()
            self.flat[0] += 1e-6

    return publish


def _last_update(original):
    """Skip the last unit in the last update."""
    calls = itertools.count()

    def pieces(self, *args):
        return original(self, *args) if next(calls) != expected.STEPS * len(self.units) - 1 else ()

    return pieces


@replacing
def _padding(right, self, *how):
    """Give a padding row of the vocabulary a weight: it is never read, and in no softmax."""
    norm = right(self, *how)
    for record, param in self.units[0].params:
        if record.name == "embedding.weight" and self.mesh.index("tp") == 1:
            param.data[-1] = 1e-6
    return norm


def _with_loss(result, loss):
    return dataclasses.replace(result, losses={LOSS: loss})


NAN = float("nan")
TINY = {"count": 1, "drawn": Sizes(4, 8, 11, layers=1, heads=2, kv_heads=2, head_dim=4, hidden=10)}
UNITS = 3  # the embedding, a block and the head
DP, DP1 = Layout(Mesh(dp=2), **TINY), Layout(Mesh(dp=2), zero=1, **TINY)
ON_ONE_RANK = {
    "loss": _says("step", lambda r: _with_loss(r, r.loss * (1 + 1e-12))),
    "norm": _says("step", lambda r: dataclasses.replace(r, norm=r.norm * (1 + 1e-12))),
    "evaluation": _says("evaluate", lambda loss: loss * (1 + 1e-12)),
    "text": _says("generate", lambda text: torch.cat([text[:-1], (text[-1:] + 1) % 11])),
    "prompt": _says("generate", lambda text: torch.cat([(text[:1] + 1) % 11, text[1:]])),
    "loss NaN": _says("step", lambda r: _with_loss(r, r.loss * NAN)),
    "norm NaN": _says("step", lambda r: dataclasses.replace(r, norm=r.norm * NAN)),
    "evaluation NaN": _says("evaluate", lambda loss: loss * NAN),
    "loss of another shape": _says("step", lambda r: _with_loss(r, r.loss[None])),
    **{
        f"{kind} {words}": _reads(kind, change)
        for kind in ("grad", "param", "exp_avg", "exp_avg_sq")
        for words, change in (("one element", _one_element), ("NaN", _scaled(NAN)))
    },
    "grad after the first step": _reads("grad", _scaled(1 + 1e-12), after=1),
    "grad of the last step": _reads("grad", _scaled(1 + 1e-12), after=2),
}  # fmt: skip
REAL = {
    "gradients of one replica from the second step": (
        DP, zero.ZeroOptimizer, "norm", _later_gradient),
    "one replica misses its last update": (DP, zero.ZeroOptimizer, "_pieces", _last_update),
    "one rank's slice is missed in the last update": (
        DP1, zero.ZeroOptimizer, "_pieces", _last_update),
    "a published slice arrives wrong at the end": (
        DP1, parameters.FlatParameters, "publish", _last_publish),
    "a padding row is not zero": (
        Layout(Mesh(tp=2), **TINY), zero.ZeroOptimizer, "step", _padding),
    "nobody owns a tensor": (DP, *_reads("grad", lambda r, t, _: (r, t, False))),
    "two own a tensor": (DP, *_reads("param", lambda r, t, _: (r, t, True))),
    "nothing is read": (DP, engines.Engine, "read", lambda _: lambda self, kind: iter(())),
}  # fmt: skip


# Rank 0 holds the first slice itself and no padding, and writes the final norm's weight.
NO_FAULT = [("a published slice arrives wrong at the end", 0), ("nobody owns a tensor", 1),
            ("two own a tensor", 0), ("a padding row is not zero", 0)]  # fmt: skip


def _one_rank(rank: int) -> dict[tuple[str, int], Errors]:
    meshes = {sizes: sizes.connect() for sizes in (Mesh(dp=2), Mesh(tp=2))}
    found = {}
    faults = {name: (DP, *fault) for name, fault in ON_ONE_RANK.items()} | REAL
    for at, (name, (layout, *fault)) in enumerate(faults.items()):
        for culprit in range(2) if name in REAL else (at % 2,):  # ranks take turns in reporting
            with planted(*([fault] if rank == culprit else [])):
                found[name, culprit] = prove_layout(layout, meshes[layout.mesh], 300.0)
    found["nothing at all", 0] = prove_layout(DP1, meshes[DP1.mesh], 300.0)
    return found


def test_fault_on_a_single_rank_fails_on_every_rank_and_names_that_rank():
    first, second = run_ranks(2, _one_rank)
    assert first == second
    assert first.pop(("nothing at all", 0)).worst < LIMITS["fp64"], "a fault was not pulled out"
    for key in NO_FAULT:
        assert first.pop(key).worst < LIMITS["fp64"], key
    for (name, culprit), errors in first.items():
        assert errors.worst > 10 * LIMITS["fp64"], (name, culprit, errors)
        if name == "a published slice arrives wrong at the end":  # later reads are correct
            assert errors.weight > 10 * LIMITS["fp64"], (culprit, errors)
        if name in ON_ONE_RANK:
            assert f"on rank {culprit} " in errors.where, (name, culprit, errors)


def _compared(value: torch.Tensor, rounding: float, of: str = "w", **more) -> proof._Comparison:
    size = {of: float(value.abs().max())}
    truth = truths.Truth(Layout(Mesh()).model, {of: value} | more, size, {of: rounding})
    return proof._Comparison(truth, math.inf, {})


def test_error_is_that_of_the_worst_element_in_units_of_rounding():
    compare = _compared(torch.full((1000,), 4.0, dtype=torch.float64), 1e-6)
    for by, times in ((1e-3, 1e3), (2e-3, 2e3), (1e-4, 2e3)):
        actual = compare.truth.values["w"].clone()
        actual[7] -= by
        compare.tensor("grad", "w", actual)
        assert compare.errors == {"grad": pytest.approx(times)}
        assert compare.relative == {"grad": pytest.approx(times * 1e-6 / 4)}
    compare.tensor("weight", "w", actual[1:])  # of another shape
    compare.tensor("moment", "w", actual * NAN)
    assert compare.errors["weight"] == compare.errors["moment"] == float("inf")


def test_no_error_is_allowed_if_rounding_overflows_or_has_no_effect():
    for error, times in ((0.0, 0.0), (1e-300, float("inf")), (NAN, float("inf"))):
        compare = _compared(torch.zeros(3, dtype=torch.float64), 0.0)
        compare.tensor("grad", "w", torch.full((3,), error, dtype=torch.float64))
        assert compare.errors == {"grad": times}

    def overflowing(*args):
        return {w: v * NAN if args[3] == 2 else v for w, v in expected.train(*args).items()}

    with mock.patch.object(truths, "train", overflowing):
        assert set(_truth(LLAMA).rounding.values()) == {0.0}


def test_token_may_differ_only_if_rounding_swaps_the_order_of_two_logits():
    logits = torch.tensor([0.5, 3.0, 3.0 - 1e-9, 2.0], dtype=torch.float64)
    start = torch.tensor([2, 0])
    for token, times in ((1, 0.0), (2, 0.5), (3, 0.5e9)):
        compare = _compared(logits, 1e-9, "logits after step 0")
        compare.text(torch.tensor([2, 0, token]), start, 0, 1)
        assert compare.errors == {"token": pytest.approx(times)}
    for text in ([2, 0], [2, 1, 1], [2, 0, 1, 1]):
        compare.text(torch.tensor(text), start, 0, 1)
        assert compare.errors == {"token": float("inf")}
        compare.errors.clear()


def test_a_later_token_is_judged_by_the_text_before_it():
    """The third step's text has two new tokens: the second is the plain model's after the first."""
    layout = Layout(Mesh())
    compare = proof._Comparison(_truth(layout), math.inf, {})
    start = expected.prompt(layout.sizes, 2)
    for first in range(3):  # for any first token
        begun = torch.cat([start, torch.tensor([first])])
        second = compare.truth.logits(begun, 2).argmax()
        compare.errors.clear()
        compare.text(torch.cat([begun, second[None]]), start, 2, 2)
        found = compare.errors["token"]
        compare.errors.clear()
        compare.text(torch.cat([begun, (second[None] + 1) % 37]), start, 2, 2)
        best = compare.truth.values["logits after step 2"]
        by = compare.truth.rounding["logits after step 2"]
        assert found == pytest.approx(float(best.max() - best[first]) / 2 / by)
        assert compare.errors["token"] >= found > 0 or first == best.argmax()
    text, logits = start, best
    for new in (1, 2, 3):  # after the likeliest ones, each token counts only by its own logits
        for token in (0, 5, 36, int(logits.argmax())):
            compare.errors.clear()
            compare.text(torch.cat([text, torch.tensor([token])]), start, 2, new)
            wrong = float(logits.max() - logits[token]) / 2 / by
            assert compare.errors["token"] == pytest.approx(wrong)
        text = torch.cat([text, logits.argmax()[None]])
        logits = compare.truth.logits(text, 2)


def test_what_is_zero_but_for_rounding_is_measured_by_its_kind():
    """This applies to gradients of query and key norms if no token sees another in a step."""
    alone = dataclasses.replace(draw(11), mesh=Mesh(), strategy="auto", dtype="fp64")
    truth, at = _truth(alone), "gradient of blocks.0.attention.q_norm.weight at step 2"
    assert truth.values[at].abs().max() < 1e-17
    largest = max(v.abs().max() for w, v in truth.values.items() if "at step 2" in w)
    assert truth.largest[at] == largest
    assert truth.rounding[at] == pytest.approx(float(largest) * EPS["fp64"])
    assert prove_layout(alone, single()).worst < LIMITS["fp64"]


def test_the_plain_model_alone_decides_what_is_allowed():
    """A layout that is wrong everywhere is allowed as much as a correct one."""
    right = _truth(LLAMA)
    expected.train.cache_clear()
    with planted(DOUBLED), mock.patch.object(proof, "_Comparison", wraps=proof._Comparison) as made:
        assert prove_layout(LLAMA, single()).worst > SEEN
    assert made.call_args.args[0].rounding == right.rounding


LLAMA = Layout(Mesh(), style="llama")


def _shared(rank: int, layout: Layout) -> tuple[truths.Truth, int]:
    calls = mock.Mock(side_effect=expected.train)
    with mock.patch.object(truths, "train", calls):
        found = truths.truth(layout.model, layout.sizes, torch.float32, dist.group.WORLD)
    return found, calls.call_count


def test_ranks_share_the_trainings_of_the_plain_model():
    alone = truths.truth(LLAMA.model, LLAMA.sizes, torch.float32)
    shared = run_ranks(2, _shared, LLAMA)
    assert sum(count for _, count in shared) == 1 + truths.MOVED
    for found, _ in shared:
        assert found.rounding == alone.rounding
        assert found.largest == alone.largest
        assert all(torch.equal(found.values[w], v) for w, v in alone.values.items())


def test_whatever_is_never_compared_is_wrong():
    with mock.patch.object(engines.Engine, "read", return_value=()):
        errors = prove_layout(Layout(Mesh()), single())
    assert errors.each["grad"] == errors.each["moment"] == float("inf")


# -------------------------------------------------------------------------- the layouts


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_table_holds_every_mesh_and_every_choice_that_means_something(world):
    layouts = all_layouts(world)
    assert len(layouts) == len(set(layouts))
    sizes = [n for n in (1, 2, 3, 4) if world % n == 0]
    every = {m for m in itertools.product(sizes, repeat=4) if torch.Size(m).numel() == world}
    axes = [(lay.mesh.dp, lay.mesh.cp, lay.mesh.tp, lay.mesh.pp) for lay in layouts]
    assert set(axes) == every
    for mesh in every:
        dp, cp, tp, pp = mesh
        every_one = [lay for lay, at in zip(layouts, axes) if at == mesh]
        mine = [lay for lay in every_one if not lay.plan.asynchronous]
        stale = [lay for lay in every_one if lay.plan.asynchronous]
        stages = range(3 if dp * cp > 1 else 1)  # ZeRO stages, with whole versions
        wanted = {*itertools.product(ASYNCHRONOUS, stages)} if pp > 1 else set()
        assert {(lay.schedule, lay.zero) for lay in stale} == wanted
        assert not any(lay.tied or lay.microbatches < pp for lay in stale)
        assert {lay.zero for lay in mine} == set(range(4 if dp * cp > 1 else 1))
        assert {lay.sequence_parallel for lay in mine} == {False} | {tp > 1}
        strategies = {"ring", "gather", "stream", "ulysses"} if cp > 1 else {"auto"}
        strategies |= {"hybrid"} if cp == 4 else set()  # two by two
        assert {lay.strategy for lay in mine} == strategies
        packed = {(lay.strategy, lay.packed) for lay in mine}
        assert packed == set(itertools.product(strategies, (False, True)))
        for sp in (False, True) if tp > 1 else (False,):  # each has a separate message
            ways = {lay.overlap for lay in mine if lay.sequence_parallel == sp}
            assert ways == ({"bulk", "none", "chunked"} if tp > 1 else {"bulk"})
        assert {lay.schedule for lay in mine} == ({*SYNCHRONOUS} if pp > 1 else {"gpipe", "1f1b"})
        styles = set(itertools.product(("gpt2", "llama", "qwen"), (True, False)))
        assert {(lay.style, lay.tied) for lay in mine} == styles
        counts = {lay.microbatches for lay in mine}
        assert pp == 1 or min(counts) < pp < max(counts)  # fewer than stages, and more
    assert {lay.recompute for lay in layouts} == {"none", "selective", "full"}
    hybrid = [lay for lay in layouts if lay.mesh.dp_shard is not None]
    assert all(lay.mesh.size("shard") > 1 < lay.mesh.size("replica") for lay in hybrid)
    met = {(lay.mesh.dp, lay.zero, lay.tied) for lay in hybrid}
    replicas = (2, 4) if world == 4 else ()  # with two context ranks, and alone
    assert met == set(itertools.product(replicas, (1, 2, 3), (True, False)))
    if world == 4:  # every strategy with each layout it supports, with windows, with packing
        sequences = [lay for lay in layouts if lay.mesh.cp > 1]
        cuts = {(lay.strategy, lay.layout) for lay in sequences}
        assert len(cuts) == 3 + 4 * 3 + 2  # a ring has no balanced one, and a hybrid no striped one
        met = {(lay.strategy, lay.layout, bool(lay.model.windows), lay.packed) for lay in sequences}
        assert met == {(*cut, *both) for cut in cuts for both in itertools.product((0, 1), (0, 1))}


@pytest.mark.parametrize(("world", "axes"), [(5, {1}), (6, {2}), (7, {1}), (8, {3}), (9, {2})])
def test_more_ranks_are_proven_on_the_meshes_with_the_most_axes(world, axes):
    chosen = {lay.mesh for lay in ProveConfig(all=True, world=world, dtype="fp64").layouts()}
    assert {sum(mesh.size(axis) > 1 for axis in AXES) for mesh in chosen} == axes
    assert {mesh.world for mesh in chosen} == {world}


def test_a_strategy_is_offered_wherever_a_model_of_so_many_heads_can_take_it():
    every = itertools.chain(*map(meshes, (2, 3, 4, 8)))
    rings = [mesh for mesh in every if mesh.cp > 1 == mesh.ulysses]
    for mesh, heads in itertools.product(rings, (1, 2, 3, 4, 8)):
        model = GPTConfig(8, 4 * mesh.cp, mesh.pp, 2 * heads * mesh.tp, heads * mesh.tp)
        fit = set()
        for name in set(get_args(Strategy)) - {"auto"}:
            with contextlib.suppress(ValueError):
                model.check(mesh, ParallelPlan(cp_strategy=name))
                fit.add(name)
        assert set(_strategies(mesh, heads)) == fit, (mesh, heads)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_all_of_up_to_four_ranks_are_proven_largest_first(world):
    worlds = [lay.mesh.world for lay in ProveConfig(all=True, world=world, dtype="fp64").layouts()]
    assert worlds == sorted(worlds, reverse=True)
    assert set(worlds) == {*range(1, world + 1)}


@pytest.mark.parametrize("style", get_args(Style))
def test_every_mesh_of_up_to_eight_ranks_has_a_model_that_fits(style):
    for mesh in itertools.chain(*map(meshes, range(1, 9))):
        layout = Layout(mesh, mesh.tp > 1, style=style)
        layout.model.check(mesh)
        local = layout.micro_batch_size * layout.sizes.seq_len // mesh.cp
        assert local % mesh.tp == 0
        assert layout.sizes.vocab % mesh.tp or mesh.tp == 1
        s = layout.sizes
        assert (s.kv_heads < s.heads) == (style != "gpt2" and mesh.tp < 5)
        assert s.kv_heads > 1  # each for several queries
        assert s.dropout > 0
        assert s.layers % mesh.pp or mesh.pp == 1
        model = layout.model  # heads make up the width, or have a separate size
        assert (model.heads * model.head_dim != model.width) == (style == "qwen")
        powers = (mesh.dp, mesh.tp, mesh.cp)
        if set(powers) <= {1, 2, 4}:  # they share one truth
            assert smallest(mesh, "gpt2") == smallest(Mesh(pp=mesh.pp), "gpt2")


def test_a_seed_gives_one_layout_and_seeds_reach_every_corner():
    layouts = [draw(seed) for seed in range(400)]
    assert layouts == [draw(seed) for seed in range(400)]
    assert len(set(layouts)) == 400
    for layout in layouts:
        layout.model.check(layout.mesh, layout.plan)
    for axis in ("dp", "tp", "cp", "pp"):
        assert {getattr(layout.mesh, axis) for layout in layouts} >= {1, 2, 3, 4, 5, 6}
    assert max(layout.mesh.world for layout in layouts) == 8

    def some(corner) -> bool:
        return sum(map(corner, layouts)) >= 5

    pipelines = [layout for layout in layouts if layout.mesh.pp > 1]
    assert some(lambda lay: lay in pipelines and lay.microbatches > lay.mesh.pp)
    assert some(lambda lay: lay in pipelines and lay.microbatches < lay.mesh.pp)
    assert some(lambda lay: lay.model.layers % lay.mesh.pp)
    assert some(lambda lay: lay.micro_batch_size == 3)
    assert some(_cuts_inside_a_sample)
    assert some(lambda s: s.sizes.vocab <= -(-s.sizes.vocab // s.mesh.tp) * (s.mesh.tp - 1))
    assert some(lambda lay: 1 < lay.sizes.kv_heads < lay.sizes.heads)
    assert some(lambda lay: lay.sizes.dropout == 0)
    assert some(lambda lay: lay.sizes.seq_len % 2)
    for kind in get_args(Kind):  # ragged, on context ranks and without any
        mine = [x for x in layouts if x.layout == kind]
        chunks = 2 if kind in ("zigzag", "balanced") else 1
        assert sum(x.sizes.seq_len % (x.mesh.cp * chunks) > 0 for x in mine if x.mesh.cp > 1) >= 5
        for axis in ("dp", "tp", "pp"):
            alone = [lay for lay in layouts if lay.mesh.cp == 1 < getattr(lay.mesh, axis)]
            assert any(lay.layout == kind and lay.sizes.seq_len % 2 for lay in alone), (kind, axis)
    for name, words in {"strategy": Strategy, "layout": Kind}.items():
        alone = [lay for lay in layouts if lay.mesh.cp == 1]
        assert {getattr(lay, name) for lay in alone} == {*get_args(words)}
    assert some(lambda lay: lay.mesh.dp_shard is not None)
    assert some(lambda lay: lay.mesh.outer > 1 and lay.mesh.world > 2)
    assert some(lambda lay: lay.reduce == "ordered" and lay.mesh.data > 1)
    assert {lay.optimizer for lay in layouts} == {"adamw", "muon", "sgd"}
    every = [lay for lay in all_layouts(4) if not lay.plan.asynchronous]
    for name in ("style", "zero", "schedule", "tied", "recompute", "strategy", "layout"):
        assert {getattr(x, name) for x in layouts} >= {getattr(x, name) for x in every}


def test_sgd_is_proven_and_another_momentum_is_seen():
    layout = Layout(Mesh(dp=2), zero=2, style="llama", optimizer="sgd")

    def worst() -> float:
        return on_mesh(layout.mesh, lambda mesh: prove_layout(layout, mesh))[0].worst

    assert worst() <= LIMITS["fp64"]
    other = SGD(momentum=0.8001, weight_decay=0.1)
    with mock.patch.object(proof, "SGD", return_value=other):
        assert worst() > 1e3


def _cuts_inside_a_sample(layout: Layout) -> bool:
    length = layout.sizes.seq_len // layout.mesh.cp
    rows = layout.micro_batch_size * length // layout.mesh.tp
    return layout.sequence_parallel and rows > length and rows % length > 0


def test_the_command_that_a_layout_prints_gives_that_layout():
    layouts = [*all_layouts(4)[::47], *all_layouts(6)[::121], *map(draw, range(20))]
    for layout, dtype in zip(layouts, itertools.cycle(("fp64", "bf16"))):
        chosen = dataclasses.replace(layout, dtype=dtype)
        _, command, *words = shlex.split(chosen.command)
        (again,) = tyro.cli(ProveConfig, args=words).layouts()
        assert command == "prove"
        count = chosen.microbatches
        assert dataclasses.replace(again, count=count) == dataclasses.replace(chosen, count=count)
        assert again.microbatches == count


@pytest.mark.parametrize("chosen", [{}, {"all": True, "world": 1}, {"random": 2}])
def test_every_layout_computes_as_it_was_asked_to(chosen):
    for dtype, dtypes in (("both", {"fp64", "fp32"}), ("bf16", {"bf16"})):
        found = ProveConfig(impl="triton", dtype=dtype, **chosen).layouts()
        assert {(layout.impl, layout.dtype) for layout in found} == {("triton", d) for d in dtypes}


def test_random_layouts_are_those_of_the_following_seeds():
    config = ProveConfig(random=5, seed=11, dtype="fp64")
    assert sorted(layout.sizes.seed for layout in config.layouts()) == [11, 12, 13, 14, 15]
    assert set(config.layouts()) == {draw(seed) for seed in range(11, 16)}


@pytest.mark.parametrize("mesh", list(meshes(4)))
def test_the_batch_has_ranks_without_any_valid_token(mesh):
    """In some step, a data rank or a context rank has none."""
    layout = Layout(mesh)
    holes = 0
    for step in range(expected.STEPS):
        tokens, labels, _ = expected.batch(layout.sizes, step)
        valid = labels != -100
        assert tokens.shape == labels.shape == (12, 16)
        assert not torch.equal(tokens, expected.batch(layout.sizes, step + 1)[0])
        other = dataclasses.replace(layout.sizes, seed=6)
        assert not torch.equal(tokens, expected.batch(other, step)[0])
        assert valid.any()
        assert valid.sum(1).unique().numel() > 1
        by_sample = valid.view(mesh.dp, -1).sum(1)
        chunks = valid.view(12, 2 * mesh.cp, -1).sum((0, 2))
        zigzag = chunks[: mesh.cp] + chunks[mesh.cp :].flip(0)
        holes += int((by_sample == 0).any() or (zigzag == 0).any())
    assert (holes > 0) == (mesh.dp * mesh.cp > 1)


def test_token_numbers_exceed_32_bits_and_only_some_steps_clip():
    for layout in [Layout(Mesh()), *map(draw, range(20))]:
        first, second = (
            expected.batch(layout.sizes, step)[2] * layout.sizes.seq_len for step in (0, 2)
        )
        assert int(first[0]) < 2**32 <= int(second[-1])
    values = expected.train(LLAMA.model, LLAMA.sizes)
    norms = [float(values[f"norm of step {step}"]) for step in range(expected.STEPS)]
    assert min(norms) < expected.CLIP < max(norms)
    assert len(set(expected.RATES)) == expected.STEPS
    assert expected.KEY >= 2**32


# -------------------------------------------------------------------------- the verdict


def _row(layout: Layout, **errors: float) -> str:
    right = dict.fromkeys(proof.KINDS, 0.0) | {"where": "", "relative": {}}
    return json.dumps({"layout": str(layout), "errors": right | errors}) + "\n"


def test_every_layout_must_have_its_line_within_the_limit_of_its_dtype():
    layouts = [dataclasses.replace(DP, dtype=d) for d in ("fp64", "fp32", "bf16")]
    lines = [_row(layout, grad=LIMITS[layout.dtype]) for layout in layouts]
    good = command.judge(layouts, lines)
    assert (good["passed"], good["right"], good["layouts"]) == (True, 3, 3)
    assert good["worst_by_dtype"] == {d: LIMITS[d] for d in ("fp64", "fp32", "bf16")}
    wrong = {
        "nothing": [], "one missing": lines[:2], "first missing": lines[1:],
        "one twice": [*lines, lines[-1]], "one for another": [lines[0], lines[0], lines[2]],
        "order": [lines[1], lines[0], lines[2]], "last cut short": [*lines[:2], lines[2][:-1]],
    }  # fmt: skip
    for name in proof.KINDS:
        for error in (float("nan"), float("inf"), 1.01 * LIMITS["fp32"]):
            wrong[f"{name} {error}"] = [lines[0], _row(layouts[1], **{name: error}), lines[2]]
    for name, found in wrong.items():
        assert command.judge(layouts, found)["passed"] is False, name
    assert command.judge([], [])["passed"] is False
    summary = command.judge(layouts, wrong["token nan"])
    assert json.loads(json.dumps(summary, allow_nan=False))["worst_by_dtype"]["fp32"] is None


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_worst_error_of_a_dtype_is_that_of_its_worst_layout_in_any_order(dtype):
    one = dataclasses.replace(DP, dtype=dtype)
    other = dataclasses.replace(DP, dtype="fp32")
    for errors in itertools.permutations((0.0, LIMITS[dtype] / 2, 3 * LIMITS[dtype])):
        lines = [_row(one, grad=error) for error in errors]
        found = command.judge([*[one] * 3, other], [*lines, _row(other, norm=LIMITS["fp32"])])
        expected = {dtype: 3 * LIMITS[dtype], "fp32": LIMITS["fp32"]}
        assert (found["worst_by_dtype"], found["worst"]) == (expected, expected[dtype]), errors
        assert (found["passed"], found["right"]) == (False, 3)


def _dies(original):
    """Kill the rank in the middle of its second layout."""
    calls = itertools.count()

    def evaluate(self, *args):
        if next(calls) == expected.STEPS:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    return evaluate


OF_THE_LAST_RANK = {
    "right": (_says("evaluate", lambda loss: loss), 2),
    "evaluation": (_says("evaluate", lambda loss: loss * 1.001), 0),
    "gradient after the first step": (_reads("grad", _scaled(1.001), after=1), 0),
    "weights": (_reads("param", _scaled(1.001)), 0),
    "dies": ((engines.Engine, "evaluate", _dies), 1),
    "raises": ((proof, "_worst_rank", lambda _: lambda *_: 1 / 0), 0),
}


def _ranked(rank: int, args: tuple, name: str) -> None:
    """Run a rank of the command with the launcher `run_ranks`; the fault is planted on the last."""
    session = Session(torch.device("cpu"), rank, 2, None, 30.0, Mesh(dp=2))
    fault, _ = OF_THE_LAST_RANK[name]
    with (
        mock.patch.object(command, "join", return_value=session),
        planted(*([fault] if rank == 1 else [])),
    ):
        command.prove_rank(*args)


def _renewed(rank: int) -> list[int]:
    """Return the threads of the process after each layout; a cycle holds the groups."""
    store = dist.distributed_c10d._get_default_store()
    session, threads = Session(torch.device("cpu"), rank, 2, store, 30.0, Mesh(dp=2)), []
    for _ in range(4):
        session.renew(Mesh(dp=2))
        held = [Mesh(dp=2).connect()]
        held.append(held)
        threads.append(len(os.listdir("/proc/self/task")))
    return threads


def test_groups_and_threads_of_a_layout_end_two_layouts_later_at_most():
    for _, second, *later in run_ranks(2, _renewed):
        assert later == [second, second]


@pytest.mark.parametrize("name", OF_THE_LAST_RANK)
def test_the_command_is_red_for_a_fault_on_another_rank_than_the_first(name, monkeypatch):
    def launch(entry, args, mesh, **_):
        assert (entry, mesh) == (command.prove_rank, Mesh(dp=2))
        try:
            run_ranks(2, _ranked, args, name)
        except AssertionError:
            raise SystemExit(1) from None

    monkeypatch.setattr(command, "launch", launch)
    code, lines = _main("--dp", "2", "--microbatches", "1")
    summary, (_, right) = json.loads(lines[-1]), OF_THE_LAST_RANK[name]
    assert (summary["right"], summary["layouts"]) == (right, 2)
    assert (code, summary["passed"]) == ((0, True) if right == 2 else (1, False))


def _run_with(args: tuple, *fault) -> None:
    """Run a rank, the second one with the fault."""
    with planted(*([Plant(*fault)] if os.environ["RANK"] == "1" else [])):
        command.prove_rank(*args)


def _killed_rank(*args) -> None:
    _run_with(args, engines.Engine, "evaluate", _dies)


def _launching(monkeypatch, rank, folder=None) -> None:
    """Make the command's launcher start this `rank` in quick processes."""
    how = {"processes": QuickProcesses(folder)}
    right = command.launch
    monkeypatch.setattr(
        command, "launch", lambda _, *given, **more: right(rank, *given, **more | how)
    )


def test_a_rank_that_dies_under_the_launcher_is_not_proven(monkeypatch, capfd):
    _launching(monkeypatch, _killed_rank)
    code, lines = _main("--dp", "2")
    summary, printed = json.loads(lines[-1]), capfd.readouterr()
    assert code == 1
    assert (summary["passed"], summary["right"], summary["layouts"]) == (False, 1, 2), printed
    assert "stopped" not in summary
    assert "rank 1 (dp=1) was killed by SIGKILL" in printed.err


def _skips(original):
    """Skip one all-reduce of tensor ranks."""
    calls = itertools.count()

    def start(x, group):
        return Pending(None, lambda: x) if next(calls) == 1 else original(x, group)

    return start


def _skipping_rank(*args) -> None:
    _run_with(args, ranks, "start_all_reduce_", _skips)


def test_a_rank_that_skips_a_collective_is_named_with_both_calls(monkeypatch, tmp_path, capsys):
    _launching(monkeypatch, _skipping_rank, tmp_path)
    code, lines = _main("--tp", "2", "--no-sequence-parallel", "--dtype", "fp64")
    said = (tmp_path / "stderr").read_text()
    assert (code, json.loads(lines[-1])["passed"]) == (1, False)
    words = r"rank 0 \(tp=0\) calls all_reduce of .*, rank 1 \(tp=1\) calls all_gather of "
    assert re.search(words, said), said
    assert "Timed out" not in said
    again = "the ranks failed in this layout; rerun: warpweave prove --tp 2 "
    assert again in capsys.readouterr().err


def test_one_launch_proves_worlds_of_every_size(tmp_path):
    layouts = [Layout(Mesh(cp=3)), drawn(Mesh(tp=3)), Layout(Mesh(tp=2), True), Layout(Mesh())]
    path, before = tmp_path / "rows", dict(os.environ)
    given = command.prove_rank, (layouts, 300.0, str(path)), Mesh(dp=3)
    command.launch(*given, processes=QuickProcesses(tmp_path))
    assert dict(os.environ) == before  # what it sets for its ranks does not reach later children
    summary = command.judge(layouts, path.read_text().splitlines(keepends=True))
    assert (summary["passed"], summary["right"]) == (True, 4), summary
    rows = _rows((tmp_path / "stdout").read_text().splitlines())
    assert [row.split("] ")[1].split()[0] for row in rows] == ["ok"] * 4


# -------------------------------------------------------------------------- the command


def _rows(lines: list[str]) -> list[str]:
    """Return the rows of layouts that the command printed; each is below the head of the table."""
    heads = [at for at, line in enumerate(lines) if line.startswith("row ")]
    rows = [at for at, line in enumerate(lines) if line.startswith("[")]
    assert len(heads) == 1
    assert heads[0] < min(rows)
    return [lines[at] for at in rows]


def test_each_column_of_the_table_stands_under_a_name_of_whole_words():
    errors = Errors(*map(float, range(1, 8)), "x", dict.fromkeys(proof.KINDS, 1e-15))
    for count in (1, 99, 1316):
        head = command.table_head(count).splitlines()[-1]
        row = command.table_row(count, count, DP, errors)
        starts = [head.index(name) for name in command._COLUMNS.values()]
        assert starts == sorted(starts)
        for times, (kind, name) in enumerate(command._COLUMNS.items(), 1):
            assert getattr(errors, kind) == times
            assert row[head.index(f"{name} ") :].startswith(f"1.0e-15 x{times} ")
        assert row[head.rindex("layout") :] == str(DP)
        wrong = command.table_row(1, count, DP, dataclasses.replace(errors, loss=float("nan")))
        assert wrong[head.rindex("layout") :].startswith(f"{DP}; largest: x; rerun: warpweave")
        assert wrong.split("] ")[1].startswith("WRONG ")
        assert row.split("] ")[1].startswith("ok ")
    assert tuple(command._COLUMNS) == proof.KINDS


def _main(*argv: str) -> tuple[int, list[str]]:
    out = io.StringIO()
    with pytest.raises(SystemExit) as caught, contextlib.redirect_stdout(out):
        main(list(argv))
    return caught.value.code, out.getvalue().splitlines()


def test_the_command_exits_with_zero_and_a_line_of_json():
    code, lines = _main("--style", "llama")
    summary = json.loads(lines[-1])
    assert (code, summary["passed"], summary["layouts"], summary["right"]) == (0, True, 2, 2)
    assert summary["worst"] == summary["worst_by_dtype"]["fp64"] <= LIMITS["fp64"]
    assert summary["limits"] == {dtype: LIMITS[dtype] for dtype in ("fp64", "fp32")}
    assert [row.split("] ")[1].split()[0] for row in _rows(lines)] == ["ok", "ok"]


def test_the_command_exits_with_one_when_a_layout_is_wrong():
    with planted(DOUBLED):
        code, lines = _main("--dtype", "fp64")
    (row,) = _rows(lines)
    assert row.split("] ")[1].startswith("WRONG ")
    assert "rerun: warpweave prove" in row
    assert (code, json.loads(lines[-1])["passed"]) == (1, False)


def test_a_fault_that_raises_on_one_rank_leaves_the_line_of_json():
    out = io.StringIO()
    with (
        planted(Plant(engines.Engine, "evaluate", lambda _: lambda *_: 1 / 0)),
        pytest.raises(ZeroDivisionError),
        contextlib.redirect_stdout(out),
    ):
        main([])
    assert json.loads(out.getvalue().splitlines()[-1])["passed"] is False


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def heard() -> Iterator[None]:
    """Restore default handlers: the parent process may ignore signals (nohup)."""
    before = {n: signal.signal(n, signal.SIG_DFL) for n in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    ("words", "number"),
    [*((("--dtype", "fp64"), n) for n in SIGNALS), (("--typecheck", "--pp", "2"), SIGNALS[1])],
)
def test_a_proof_that_a_signal_stopped_says_so_and_not_that_it_passed_or_not(number, words):
    """The second evaluation, or stage, does not finish. The first of several signals counts."""
    calls = itertools.count()

    def interrupted(original):
        def run(*args, **options):
            if next(calls):
                try:
                    os.kill(os.getpid(), number)
                finally:
                    for later in SIGNALS:
                        os.kill(os.getpid(), later)
            return original(*args, **options)

        return run

    typed = "--typecheck" in words
    place = (typechecks, "typecheck") if typed else (engines.Engine, "evaluate")
    with planted(Plant(*place, interrupted)):
        code, lines = _main(*words)
    summary = json.loads(lines[-1])
    assert (code, summary["passed"], summary["stopped"]) == (128 + number, None, True)
    assert summary.get("right", 0) == 0
    assert summary.get("typechecked", 1) == 1
    assert next(calls) == 2


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", SIGNALS)
def test_signals_reach_the_launcher_and_results_so_far_are_reported(number):
    """The launcher handles them itself."""

    def launch(entry, args, mesh, **_):
        *_, path = args
        with open(path, "w") as file:
            file.write(_row(args[0][0]))
        with Interrupt() as interrupt:
            os.kill(os.getpid(), number)
        raise Stopped(interrupt.number, code=1)  # a rank then failed, and its peers did not say why

    with mock.patch.object(command, "launch", launch):
        code, lines = _main("--dp", "2")
    summary = json.loads(lines[-1])
    assert (code, summary["passed"], summary["stopped"]) == (128 + number, None, True)
    assert (summary["right"], summary["layouts"]) == (1, 2)


# Another value of every option, and the options that it needs.
OPTIONS = {
    "all": (True, {}), "world": (2, {"all": True}), "random": (2, {}), "seed": (3, {"random": 2}),
    "dp": (2, {}), "tp": (2, {}), "cp": (2, {}), "pp": (2, {}), "ulysses": (2, {"cp": 4}),
    "dp_shard": (2, {"dp": 4}), "outer": (2, {}),
    "zero": (3, {}), "schedule": ("gpipe", {}), "sequence_parallel": (False, {"tp": 2}),
    "style": ("olmo", {}), "tied": (False, {}), "recompute": ("full", {}), "packed": (True, {}),
    "cp_strategy": ("gather", {}), "layout": ("striped", {}), "microbatches": (6, {}),
    "overlap": ("chunked", {}), "optimizer": ("muon", {}), "reduce": ("ordered", {}),
    "dtype": ("bf16", {}),
    "device": ("cuda", {}),
    "impl": ("triton", {}), "timeout": (9.0, {}),
    "graph": (True, {}), "typecheck": (True, {}), "model": ("small", {"typecheck": True}),
}  # fmt: skip
SEEN_BY_TYPES = {"outer", "dp", "tp", "cp", "pp", "sequence_parallel", "style", "tied", "recompute",
                 "layout"}  # fmt: skip


def _told(chosen: dict) -> str:
    """Return the arguments of the program that does the work, or the error line."""
    told, line = [], io.StringIO()
    with (
        mock.patch.object(options, "all_layouts", lambda world, _: [Layout(Mesh(dp=world))]),
        mock.patch.object(command, "prove_rank", lambda *args, **how: told.append((args[:2], how))),
        mock.patch.object(command, "launch", lambda entry, args, *_, **how: told.append(args[:2])),
        mock.patch.object(gpus, "choose_backend", lambda ranks, asked: told.append(ranks)),
        mock.patch.object(typechecks, "typecheck", lambda *of, **how: told.append((of, how))),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(line),
        pytest.raises(SystemExit),
    ):
        command.run(ProveConfig(**chosen))
    return line.getvalue() or f"{told}"


def test_every_option_is_passed_on_or_refused():
    fields = {field.name for field in dataclasses.fields(ProveConfig)}
    assert set(OPTIONS) == fields - {"config"}  # which holds others
    for name, (value, needs) in OPTIONS.items():
        told = _told(needs | {name: value})
        assert told != _told(needs), name
        assert not told.startswith("warpweave:"), told
        types = {"typecheck": True}
        if name in SEEN_BY_TYPES:
            assert _told(needs | types | {name: value}) != _told(needs | types), name
        elif name not in ("typecheck", "model"):
            assert name.replace("_", "-") in _told({name: value} | types).partition(": ")[2], name
    for option in ({"style": "olmo"}, {"tied": False}):  # of the tiny model
        flag = "--no-tied" if "tied" in option else "--style"
        assert f"{flag} has no effect with --model" in _told(types | {"model": "small"} | option)


def test_an_engine_is_told_all_that_a_layout_says():
    for layout in [*all_layouts(4)[::7], *map(draw, range(60))]:
        plan = dataclasses.asdict(layout.plan) | {"strategy": layout.plan.cp_strategy}
        told = {name for name in plan if hasattr(layout, name)}
        assert len(told) == len(plan) - 2  # the strategy's other name, early_gradients
        assert {name: plan[name] for name in told} == {n: getattr(layout, n) for n in told}
        batch = layout.mesh.dp, layout.microbatches, layout.micro_batch_size, layout.sizes.seq_len
        assert f" batch={'x'.join(map(str, batch))} " in str(layout)


def test_the_line_of_a_layout_tells_it_from_every_other():
    plan = {field.name for field in dataclasses.fields(ParallelPlan)} & set(OPTIONS)
    for name in plan | {"outer", "dp", "pp", "ulysses", "style", "tied", "packed"}:
        other = {"tp": 2, "cp": 4} | {name: OPTIONS[name][0]}
        layouts = ProveConfig(tp=2, cp=4).given(), ProveConfig(**other).given()
        assert str(layouts[0]) != str(layouts[1]), name
    assert str(Layout(Mesh(dp=4, dp_shard=2))) != str(Layout(Mesh(dp=4)))


@pytest.mark.parametrize(
    ("argv", "message"),
    [(("--microbatches", "5"), "12 samples are not divisible by dp x micro-batches (1 x 5)\n"),
     (("--tp", "0"), "mesh axis tp must be a positive integer, got 0"),
     (("--packed", "--typecheck"), "--packed has no effect on types; leave it out, or "
      "prove without --typecheck"),
     (("--tp", "2", "--overlap", "fused"), "pass --impl triton"),
     (("--tp", "2", "--device", "cuda"), f"torch {torch.__version__} sees no GPU")],
)  # fmt: skip
def test_the_command_exits_with_two_and_one_line_for_a_layout_that_cannot_be(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
