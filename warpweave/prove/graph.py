"""Proof that CUDA graphs of a step compute what the step computes, on any device.

`graph_safe` runs a step twice with different data and lists what would go wrong in a graph.
`prove_graph` does this for the engine's step under a layout. It then trains two engines, of which
one replays a captured step, and compares every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from warpweave.kernels.runtime.transfer import upload
from warpweave.model.engine_graph import as_tensors, cuda_graph_on
from warpweave.parallel.exchange import exchange
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.prove.expected import KEY, RATES, batch, documents
from warpweave.prove.layouts import Layout
from warpweave.prove.proof import make_engine
from warpweave.prove.recording import Difference, PretendedGraph, Recording, compare_recordings

_REPLAYS = 5  # after two steps without a graph


def graph_safe(
    step: Callable[..., Any], *examples: Sequence[Any], warm_up: int = 2
) -> list[Difference]:
    """List what would go wrong in a CUDA graph of ``step(*arguments)``; empty if it is safe.

    The arguments come from `examples`, at least two tuples that differ as steps do, or none for a
    step without arguments. Their tensors are copied to fixed buffers, as for a graph; if a number
    differs, the report names the line that uses it. `step` really runs, `warm_up` times first and
    once per example, and all of its intermediate tensors are kept. This works on any device, with
    torch's operators, collectives and Triton kernels on plain tensors. It does not see memory that
    is read or written without torch, what an operator does inside, nor work that is never waited
    for.

    Raises ValueError if there is only one example, or if shapes or dtypes differ.

    Examples:
        >>> x, scale = torch.ones(4), [1.0]
        >>> def step():
        ...     scale[0] *= 2
        ...     x.mul_(scale[0])
        >>> print(*graph_safe(step))  # doctest: +ELLIPSIS
        aten.mul_.Tensor at ...: a number is 8.0 in the first step and 16.0 in the second
        >>> graph_safe(lambda y: x.add_(y), (torch.ones(4),), (torch.zeros(4),))
        []
    """
    first, *others = _recorded_steps(step, examples, warm_up)
    return list(
        dict.fromkeys(found for other in others for found in compare_recordings(first, other))
    )


def _recorded_steps(
    step: Callable[..., Any], examples: Sequence[Sequence[Any]], warm_up: int = 2
) -> list[Recording]:
    """Record the step with each example; see `graph_safe`."""
    if len(examples) == 1:
        raise ValueError(
            "graph_safe compares steps, so it needs at least two examples or none, got 1"
        )
    examples = examples or ((), ())
    static = tree_map_only(Tensor, lambda x: x.detach().clone(), tuple(examples[0]))
    recordings = []
    for number in range(-warm_up, len(examples)):
        arguments = tree_map(_filled, static, tuple(examples[number % len(examples)]))
        recording = Recording()
        with nullcontext() if number < 0 else recording:
            step(*arguments)
        recordings += [recording] * (number >= 0)
    return recordings


def _filled(into: Any, x: Any) -> Any:
    """A tensor's fixed buffer with the values of `x`, or `x` if it is no tensor."""
    if not isinstance(into, Tensor):
        return x
    if (x.shape, x.dtype) != (into.shape, into.dtype):
        raise ValueError(
            f"examples must have equal shapes and dtypes, got {[*into.shape]} {into.dtype} and "
            f"{[*x.shape]} {x.dtype}"
        )
    return into.copy_(x.detach())


@dataclass(frozen=True)
class GraphProof:
    """The result of `prove_graph` over all ranks.

    Attributes:
        calls: number of recorded calls of a step on this rank.
        replays: number of steps that were replayed.
        differences: what would go wrong in a graph, as sentences that name the rank.
        unequal: sentences about numbers whose bits differ between replayed and ordinary steps.

    Examples:
        >>> GraphProof(calls=900, replays=5, differences=(), unequal=()).right
        True
    """

    calls: int
    replays: int
    differences: Sequence[str]
    unequal: Sequence[str]

    @property
    def right(self) -> bool:
        """True if nothing differs."""
        return not self.differences and not self.unequal


def prove_graph(layout: Layout, mesh: ConnectedMesh, timeout: float = 60.0) -> GraphProof:
    """Compare steps under `layout` with replays of a captured step; collective, and the result is
    the same on every rank, except `calls`.

    On a CPU, the graph is simulated (`PretendedGraph`). Raises ValueError for a layout whose steps
    cannot be captured.

    Examples:
        >>> from warpweave import Mesh
        >>> from warpweave.prove import Layout
        >>> prove_graph(Layout(Mesh(), dtype="bf16"), Mesh().connect()).right
        True
    """
    eager, replayed = (make_engine(layout, mesh, timeout) for _ in range(2))
    cuda = replayed.device.type == "cuda"
    replayed.use_graphs(cuda_graph_on(replayed.device) if cuda else PretendedGraph)
    unequal = dict[str, None]()
    for number in range(2 + _REPLAYS):
        inputs = _inputs(layout, mesh, number)
        found, wanted = (engine.step(**inputs).all() for engine in (replayed, eager))
        if not _same_bits(found, wanted):
            unequal[f"the results of step {number} have other bits in a graph"] = None
    for kind in ("param", *eager.optimizer.rule.moments):
        pairs = zip(eager.read(kind), replayed.read(kind), strict=True)
        for (record, a, _), (_, b, _) in pairs:
            if not _same_bits(a, b):
                unequal[f"{kind} of {record.name} has other bits in a graph"] = None
    step = replayed.graphs.step
    examples = [(as_tensors(_inputs(layout, mesh, number)),) for number in range(3)]
    first, *others = _recorded_steps(lambda inputs: step(**inputs), examples)
    where = mesh.sizes.describe(mesh.rank)
    texts = [f"{each} on {where}" for other in others for each in compare_recordings(first, other)]
    ranks = exchange([texts, list(unequal)], mesh.group("world"))
    every = (tuple(dict.fromkeys(x for rank in ranks for x in rank[i])) for i in (0, 1))
    replayed.graphs.reset()
    return GraphProof(len(first.calls), _REPLAYS, *every)


def _inputs(layout: Layout, mesh: ConnectedMesh, number: int) -> dict[str, Any]:
    """The arguments of step `number`, all of which change from step to step."""
    sizes, own = layout.sizes, layout.plan.deal(layout.mesh.dp, layout.micro_batch_size)
    rows = own[mesh.index("dp")]
    device = torch.empty(0, device=layout.device).device
    tokens, labels, ids = (upload(x[rows], device) for x in batch(sizes, number % 3))
    packed = documents(sizes, number % 3)
    rate, halted = RATES[number % 3], torch.tensor(number == 5, device=device)
    return {
        "tokens": tokens, "labels": labels, "sample_ids": ids, "lr": rate, "key": KEY + number,
        "interrupted": float(number == 4 and mesh.rank == 0), "halted": halted,
        "documents": None if packed is None else upload(packed[rows], device),
    }  # fmt: skip


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have equal bits; NaNs of equal bits are equal."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
