"""Prove one layout: train under it, and compare with the plain model after every step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.model.engine import Engine
from warpweave.model.plain import is_muons
from warpweave.parallel.data.optimizer import SGD, AdamW, Muon, Rule
from warpweave.parallel.data.outer import OuterRule
from warpweave.parallel.exchange import exchange
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.prove.expected import (
    ADAMW,
    CLIP,
    KEY,
    MUON,
    PLAIN_SGD,
    RATES,
    STEPS,
    Delayed,
    batch,
    documents,
    execution_order,
    prompt,
)
from warpweave.prove.layouts import Layout
from warpweave.prove.truth import Truth, truth

# Limits on a number's error, in multiples of what rounding does to that number in the plain model.
# Over 2,000 random layouts on one CPU the largest were 5.8 in fp64 and 13.2 in fp32 (norms over two
# elements). Other CPUs round differently, so no test asserts these figures.
LIMITS = {"fp64": 32.0, "fp32": 32.0, "bf16": 8.0, "fp16": 8.0}


@dataclass(frozen=True)
class Errors:
    """The largest errors of a layout, in multiples of the effect of rounding alone (`truth`).

    `evaluation` is the error of losses without training. `token` measures generated tokens: how far
    the plain model's logit of the token is below its largest logit, in multiples of twice the
    effect of rounding. It is 0 for the token that the plain model generates. `relative` has the
    same errors relative to the size of the numbers. `where` names the tensor and rank of the
    largest error, `first` those of the first one beyond the limit in `execution_order`.

    Examples:
        >>> from warpweave import Mesh
        >>> from warpweave.prove import Layout, prove_layout
        >>> errors = prove_layout(Layout(Mesh(), dtype="fp32"), Mesh().connect())
        >>> sorted(errors.each)[:3]
        ['evaluation', 'grad', 'loss']
    """

    loss: float
    grad: float
    norm: float
    weight: float
    moment: float
    evaluation: float
    token: float
    where: str
    relative: dict[str, float]
    first: str = ""

    @property
    def each(self) -> dict[str, float]:
        """The errors by name."""
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def worst(self) -> float:
        """The largest error of all; NaN counts as infinite (`max` would skip it)."""
        return max(e if e == e else float("inf") for e in self.each.values())


KINDS = tuple(f.name for f in dataclasses.fields(Errors) if f.type == "float")


class _Comparison:
    """This rank's largest error of each kind, the tensor of the largest error, and the first tensor
    by `order` that is beyond `limit`."""

    def __init__(self, truth: Truth, limit: float, order: dict[str, int]) -> None:
        self.truth, self._limit, self._order = truth, limit, order
        self.errors: dict[str, float] = {}
        self.relative: dict[str, float] = {}
        self.where = self.first = ""

    def add(self, kind: str, what: str, times: float, relative: float = math.inf) -> None:
        """Record an error; NaN counts as infinite."""
        times, relative = (e if e == e else math.inf for e in (times, relative))
        if times > max(self.errors.values(), default=0.0):
            self.where = what
        if times > self._limit:
            self.first = min(self.first or what, what, key=self._place)
        if times >= self.errors.get(kind, 0.0):
            self.errors[kind], self.relative[kind] = times, relative

    def _place(self, what: str) -> int:
        """Return a tensor's place in the order of execution; the last if it is not listed."""
        return self._order.get(what, len(self._order))

    def difference(self, kind: str, what: str, of: str, by: float) -> None:
        """Record that the number `what` is off by `by`, with the rounding and size of `of`."""
        units = self.truth.rounding[of], self.truth.largest[of]
        self.add(kind, what, *(_ratio(by, unit) for unit in units))

    def tensor(
        self, kind: str, what: str, actual: Tensor, cut: Callable[[Tensor], Tensor] = lambda t: t
    ) -> None:
        """Compare `actual` with the value named `what`, of which `cut` takes this rank's part."""
        expected = cut(self.truth.values[what])
        if actual.shape != expected.shape:
            self.add(kind, what, math.inf)
            return
        by = (actual.double().cpu() - expected).abs().max().item() if actual.numel() else 0.0
        self.difference(kind, what, what, by)

    def text(self, text: Tensor, start: Tensor, step: int, new: int) -> None:
        """Record how far the plain logits of the `new` tokens after `start` are below the largest.

        Rounding may swap two logits that are closer than twice its effect on one.
        """
        what, of = f"text after step {step}", f"logits after step {step}"
        if len(text) != len(start) + new or not torch.equal(text[: len(start)], start):
            self.add("token", what, math.inf)
            return
        logits = self.truth.values[of]
        for at in range(len(start), len(text)):
            if at > len(start):
                logits = self.truth.logits(text[:at], step)
            self.difference("token", what, of, float(logits.max() - logits[text[at]]) / 2)


def _ratio(error: float, unit: float) -> float:
    """Return error / unit: 0 if there is no error, infinite for an error with a unit of 0."""
    return error / unit if error and unit else math.inf if error else 0.0


def make_engine(layout: Layout, mesh: ConnectedMesh, timeout: float) -> Engine:
    """Build the engine that trains under `layout`."""
    rule: Rule = AdamW(**ADAMW, impl=layout.impl)
    if layout.optimizer == "muon":
        rule = Muon(**MUON, rest=rule, impl=layout.impl)
    elif layout.optimizer == "sgd":
        rule = SGD(**PLAIN_SGD)
    device = torch.empty(0, device=layout.device).device  # includes this rank's index
    outer = OuterRule(1, lr=1.0, momentum=0.0) if mesh.size("outer") > 1 else None
    return Engine(
        layout.model, mesh, layout.plan, micro_batch_size=layout.micro_batch_size,
        dtype=NAMED_DTYPES[layout.dtype], device=device, seed=layout.sizes.seed, rule=rule,
        clip=None if layout.plan.asynchronous else CLIP, outer=outer, impl=layout.impl,
        timeout=timeout,
    )  # fmt: skip


def prove_layout(
    layout: Layout,
    mesh: ConnectedMesh,
    timeout: float = 60.0,
    checked: AbstractContextManager[object] | None = None,
) -> Errors:
    """Train under `layout` and measure its errors; collective, with the same result on every rank.

    The result has the worst error of any rank; `where` and `first` name that rank. The first step,
    its evaluation and its text run within `checked` (`parallel.checked`).

    Examples:
        >>> from warpweave import Mesh
        >>> from warpweave.prove import Layout
        >>> layout = Layout(Mesh())  # under torchrun: Layout(Mesh(tp=2)), Mesh(tp=2).connect()
        >>> prove_layout(layout, Mesh().connect()).weight < 32
        True
    """
    sizes = layout.sizes
    engine = make_engine(layout, mesh, timeout)
    group, device = mesh.group("world"), engine.device
    told = layout.model, sizes, NAMED_DTYPES[layout.dtype], group, device, layout.optimizer
    rule = (layout.schedule, layout.mesh.pp, layout.mesh.dp, layout.microbatches)
    delayed = Delayed(*rule) if layout.plan.asynchronous else None
    order = execution_order(layout.model, layout.optimizer)
    compare = _Comparison(truth(*told, delayed), LIMITS[layout.dtype], order)
    own = layout.plan.deal(layout.mesh.dp, layout.micro_batch_size)[mesh.index("dp")]
    owners = dict.fromkeys(compare.truth.names, 0)  # ranks that would save each tensor

    def mine(step: int) -> list[Tensor | None]:
        """Return this replica's part of a batch and of its documents, by micro-batches."""
        every = (*batch(sizes, step), documents(sizes, step))
        return [None if x is None else x[own].to(device) for x in every]

    def read(kind: str, state: str, what: str, scale: float = 1.0) -> None:
        for record, tensor, owned in engine.read(state):
            owners[record.name] += owned
            compare.tensor(kind, what.format(record.name), tensor / scale)

    scaler = engine.optimizer.loss_scale
    if scaler is not None:
        scaler.value.fill_(256.0)  # small enough not to overflow, which would skip the step
    ahead = engine.passes.ahead  # steps whose first forward passes have begun

    def train(step: int) -> None:
        tokens, labels, ids, packed = mine(step + ahead)
        scale = 1.0 if scaler is None else float(scaler.value)  # its gradients stay scaled
        key = KEY + step + ahead
        result = engine.step(tokens, labels, ids, lr=RATES[step], key=key, documents=packed)
        compare.tensor("loss", f"loss of step {step}", result.loss)
        compare.tensor("norm", f"norm of step {step}", result.norm)
        read("grad", "grad", f"gradient of {{}} at step {step}", scale)
        tokens, labels, _, packed = mine(STEPS + step)
        loss = engine.evaluate(tokens, labels, packed)
        compare.tensor("evaluation", f"evaluation after step {step}", loss)
        new = 1 + step // 2  # the last text continues from a token that it generated
        start = prompt(sizes, step)
        compare.text(engine.generate(start, new, temperature=0.0), start, step, new)

    with checked or nullcontext():
        for step in range(ahead):
            tokens, labels, ids, packed = mine(step)
            engine.feed(tokens, labels, ids, key=KEY + step, documents=packed)
        train(0)
    for step in range(1, STEPS):
        train(step)
    after = f"{{}} after step {STEPS - 1}"
    read("weight", "param", after)
    for kind in engine.optimizer.rule.moments:
        read("moment", kind, f"{kind} of {{}}")
    _compare_parameters(compare, engine, mesh, after)
    counts = torch.tensor(list(owners.values()), device=device)
    if group is not None:
        dist.all_reduce(counts)
    times = (STEPS + 1 + len(engine.optimizer.rule.moments)) * mesh.size("outer")
    for name, count in zip(owners, counts.tolist(), strict=True):
        reads = times - (layout.optimizer == "muon" and is_muons(name)) * mesh.size("outer")
        if count != reads:  # would be lost in a checkpoint, or written twice
            what = f"{name}, which the ranks would save {count} times instead of {reads},"
            compare.add("weight", what, float("inf"))
    never = dict.fromkeys(KINDS, math.inf)  # the error of a kind that was not compared
    errors, relative = never | compare.errors, never | compare.relative
    found = Errors(**errors, where=compare.where, relative=relative, first=compare.first)
    return _worst_rank(found, mesh, order)


def _compare_parameters(
    compare: _Comparison, engine: Engine, mesh: ConnectedMesh, what: str
) -> None:
    """Compare the parameters that this rank computes with, padding included."""
    for unit in engine.units:
        unit.parameters.unshard()
        unit.parameters.wait()
        for record, param in unit.params:
            own = partial(record.slice, at=mesh.coords)
            compare.tensor("weight", what.format(record.name), param.detach(), own)
        unit.parameters.reshard()


def _worst_rank(own: Errors, mesh: ConnectedMesh, order: dict[str, int]) -> Errors:
    """Return every error at its largest over all ranks, the place of the largest, and the first
    tensor by `order` that is beyond the limit on any rank."""
    ranks = [Errors(**e) for e in exchange(dataclasses.asdict(own), mesh.group("world"))]
    rank = max(range(len(ranks)), key=lambda r: ranks[r].worst)
    largest = {kind: max(ranks, key=lambda errors: errors.each[kind]) for kind in KINDS}
    wrong = [at for at, errors in enumerate(ranks) if errors.first]
    first = min(wrong, key=lambda at: order.get(ranks[at].first, len(order)), default=None)
    return Errors(
        **{kind: errors.each[kind] for kind, errors in largest.items()},
        where=f"{ranks[rank].where} on {mesh.sizes.describe(rank)}",
        relative={kind: errors.relative[kind] for kind, errors in largest.items()},
        first="" if first is None else f"{ranks[first].first} on {mesh.sizes.describe(first)}",
    )
