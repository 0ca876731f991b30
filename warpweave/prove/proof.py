"""The proof of one layout: train under it, and compare with the plain model after every step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.dtypes import DTYPES
from warpweave.engine import Engine
from warpweave.exchange import exchange
from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.parallel.shard import ParamRecord
from warpweave.prove.expected import ADAMW, CLIP, KEY, RATES, STEPS, batch, documents, prompt, truth
from warpweave.prove.layouts import Layout

# Largest relative error allowed: float64 leaves no room for anything but the order of sums. For low
# dtypes, how many times the error that the plain model has there on one device.
LIMITS = {"fp64": 1e-11, "fp32": 5e-5, "bf16": 8.0, "fp16": 8.0}
_ROUNDING = 2.0**-46  # of the largest value: what float64 makes of a sum that is zero


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of a layout, and what the largest of them was of.

    `evaluation` is that of losses without training; `token` is by how much, of their range, the
    plain logit of a generated token is below the largest: 0 for the one that the plain model takes.
    """

    loss: float
    grad: float
    norm: float
    weight: float
    moment: float
    evaluation: float
    token: float
    where: str

    @property
    def each(self) -> dict[str, float]:
        """The errors by name."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "where"}

    @property
    def worst(self) -> float:
        """The largest of all; NaN is as wrong as can be, and `max` would pass over it."""
        return max(e if e == e else float("inf") for e in self.each.values())


def _relative(actual: Tensor, expected: Tensor, largest: float = 0.0) -> float:
    """max|actual - expected| / max|expected|; infinite for other shapes or NaN.

    What is zero but for rounding beside the `largest` value of its kind is measured by that: where
    every token sees itself alone, queries and keys have no gradient, and 3e-19 is not one either.
    """
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual.double() - expected).abs().max().item()
    scale = expected.abs().max().item()
    if scale <= _ROUNDING * largest:
        scale = largest
    error = difference / scale if scale else difference
    return error if error == error else float("inf")


class _Comparison:
    """This rank's largest error of each kind, and what the largest of all was of.

    In a low dtype errors are counted in those of the plain model in that dtype.
    """

    def __init__(self, layout: Layout) -> None:
        dtype = DTYPES[layout.dtype]
        self.expected = truth(layout.model, layout.sizes)
        self.low = truth(layout.model, layout.sizes, dtype) if dtype.itemsize < 4 else None
        self.eps = torch.finfo(dtype).eps
        self.errors: dict[str, float] = {}
        self.where = ""

    def add(self, kind: str, what: str, error: float) -> None:
        """Count an error in."""
        if error > max(self.errors.values(), default=0.0):
            self.where = what
        self.errors[kind] = max(error, self.errors.get(kind, 0.0))

    def tensor(
        self,
        kind: str,
        what: str,
        actual: Tensor,
        cut: Callable[[Tensor], Tensor] = lambda t: t,
        largest: float = 0.0,
    ) -> None:
        """Compare `actual` with the (cut of the) value whose words are `what`."""
        expected = cut(self.expected.values[what])
        error = _relative(actual, expected, largest)
        if self.low is not None:
            plain = _relative(cut(self.low.values[what]), expected, largest)
            error = error / (plain + self.eps) if math.isfinite(plain) else float("inf")
        self.add(kind, what, error)

    def text(self, text: Tensor, start: Tensor, step: int, new: int) -> None:
        """By how much of their range the plain logits of the `new` tokens after `start` are low."""
        if len(text) != len(start) + new or not torch.equal(text[: len(start)], start):
            self.add("token", f"text after step {step}", float("inf"))
            return
        for at in range(len(start), len(text)):
            logits = self.expected.logits(text[:at], step)
            best, least = logits.max(), logits.min()
            error = float((best - logits[text[at]]) / (best - least))
            self.add("token", f"text after step {step}", error / (self.eps if self.low else 1.0))


def _engine(layout: Layout, mesh: ConnectedMesh, timeout: float) -> Engine:
    """The engine that trains as `layout` says."""
    return Engine(
        layout.model,
        mesh,
        layout.plan,
        micro_batch_size=layout.micro_batch_size,
        dtype=DTYPES[layout.dtype],
        seed=layout.sizes.seed,
        rule=AdamW(**ADAMW, impl=layout.impl),
        clip=CLIP,
        impl=layout.impl,
        timeout=timeout,
    )


def prove_layout(layout: Layout, mesh: ConnectedMesh, timeout: float = 60.0) -> Errors:
    """Train under `layout` and measure its errors; collective, the same result on every rank.

    The result is the worst of all ranks'; `where` names the rank that has the largest error.
    """
    sizes = layout.sizes
    engine = _engine(layout, mesh, timeout)
    compare = _Comparison(layout)
    shape = (layout.mesh.dp, layout.microbatches, layout.micro_batch_size)
    owners = dict.fromkeys(compare.expected.names, 0)  # ranks that say a tensor is theirs to write

    def mine(step: int) -> list[Tensor | None]:
        """This replica's part of a batch and of its documents, by micro-batches."""
        every = (*batch(sizes, step), documents(sizes, step))
        return [None if x is None else x.unflatten(0, shape)[mesh.index("dp")] for x in every]

    def read(kind: str, state: str, what: str, scale: float = 1.0) -> None:
        values = (compare.expected.values[what.format(name)] for name in owners)
        largest = max(value.abs().max().item() for value in values)
        for record, tensor, owned in engine.read(state):
            owners[record.name] += owned
            compare.tensor(kind, what.format(record.name), tensor / scale, largest=largest)

    scaler = engine.optimizer.loss_scale
    if scaler is not None:
        scaler.value.fill_(256.0)  # a step that overflowed would be skipped
    for step in range(STEPS):
        tokens, labels, ids, packed = mine(step)
        scale = 1.0 if scaler is None else float(scaler.value)  # its gradients keep it
        result = engine.step(tokens, labels, ids, lr=RATES[step], key=KEY + step, documents=packed)
        compare.tensor("loss", f"loss of step {step}", result.loss)
        compare.tensor("norm", f"norm of step {step}", result.norm)
        read("grad", "grad", f"gradient of {{}} at step {step}", scale)
        tokens, labels, _, packed = mine(STEPS + step)
        loss = engine.evaluate(tokens, labels, packed)
        compare.tensor("evaluation", f"evaluation after step {step}", loss)
        new = 1 + step // 2  # the last text goes on from its own token
        start = prompt(sizes, step)
        compare.text(engine.generate(start, new, temperature=0.0), start, step, new)
    after = f"{{}} after step {STEPS - 1}"
    read("weight", "param", after)
    read("moment", "exp_avg", "exp_avg of {}")
    read("moment", "exp_avg_sq", "exp_avg_sq of {}")
    _compare_parameters(compare, engine, mesh, after)
    counts = torch.tensor(list(owners.values()))
    if mesh.group("world") is not None:
        dist.all_reduce(counts)
    for name, count in zip(owners, counts.tolist(), strict=True):
        if count != STEPS + 3:  # lost in a checkpoint, or written twice
            compare.add("weight", f"{name} read {count} times, not {STEPS + 3},", float("inf"))
    kinds = (field.name for field in dataclasses.fields(Errors) if field.name != "where")
    errors = {kind: compare.errors.get(kind, float("inf")) for kind in kinds}  # inf: never compared
    return _worst_rank(Errors(**errors, where=compare.where), mesh)


def _compare_parameters(
    compare: _Comparison, engine: Engine, mesh: ConnectedMesh, what: str
) -> None:
    """Compare what this very rank computes with, padding included."""
    for unit in engine.units:
        unit.parameters.unshard()
        unit.parameters.wait()
        for record, param in unit.params:

            def own(full: Tensor, record: ParamRecord = record) -> Tensor:
                return record.slice(full, mesh.coords)

            compare.tensor("weight", what.format(record.name), param.detach(), own)
        unit.parameters.reshard()


def _worst_rank(own: Errors, mesh: ConnectedMesh) -> Errors:
    """Every error at its largest over all ranks, and the words of the rank with the largest."""
    ranks = [Errors(**e) for e in exchange(dataclasses.asdict(own), mesh.group("world"))]
    rank = max(range(len(ranks)), key=lambda r: ranks[r].worst)
    largest = {kind: max(errors.each[kind] for errors in ranks) for kind in own.each}
    return Errors(**largest, where=f"{ranks[rank].where} on {mesh.sizes.describe(rank)}")
