"""Bitwise replay of a parameter-server run in one process, from its log of updates.

    log           update 1 = worker 0's at version 0, 2 = worker 2's at 0, 3 = worker 0's at 1, ...
    version 0     compute the gradients of version 0: worker 0's for update 1, worker 2's for 2
    version 1     = apply update 1; compute worker 0's gradient of update 3
    version 2     = apply update 2, with the gradient kept since version 0; ...

A worker's gradient is a function of its number, its clock and the weights. What the servers do is a
function of the order of updates. Both are in the log, so the replay does not depend on timing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from warpweave.parallel.server.clocks import Term
from warpweave.parallel.server.server import ServerPlan
from warpweave.parallel.server.shard import Shard, norm_and_scale
from warpweave.parallel.server.worker import Compute


@torch.no_grad()
def replay(
    log: Iterable[dict[str, Any]],
    plan: ServerPlan,
    shards: Sequence[Shard],
    compute: Callable[[int], Compute],
) -> int:
    """Apply the updates of `log` to `shards` and return their number.

    Args:
        log: rows {"version", "lr", "terms"} in order; a term is ``dataclasses.asdict`` of `Term`.
        plan: the plan of the run.
        shards: the servers' shards in order, in their initial state.
        compute: returns the gradient function of a worker, given its number.

    Raises:
        ValueError: the versions are not 1, 2, 3, ..., or an update uses a gradient of a later
            version.

    Examples:
        >>> from warpweave.parallel.data.optimizer import SGD
        >>> from warpweave.parallel.server.server import ServerPlan
        >>> from warpweave.parallel.server.shard import Shard, records_of
        >>> from warpweave.parallel.server.worker import module_gradient
        >>> def losses(module, clock):
        ...     yield module(torch.ones(8, 4)).square().sum(), 8
        >>> module = nn.Linear(4, 2)
        >>> weights, compute = dict(module.named_parameters()), module_gradient(module, losses)
        >>> records = records_of(module)
        >>> shard = Shard(records, lambda r: weights[r.name].detach(), SGD(), torch.float32)
        >>> term = {"worker": 0, "clock": 0, "pulled": 0, "staleness": 0, "count": 8, "loss": 1.0}
        >>> log = [{"version": 1, "lr": 0.1, "terms": [term]}]
        >>> replay(log, ServerPlan(), [shard], lambda worker: compute)
        1
    """
    updates = [(row["lr"], [Term(**term) for term in row["terms"]]) for row in log_of(log)]
    wanted: dict[int, list[Term]] = defaultdict(list)
    for _, terms in updates:
        for term in terms:
            wanted[term.pulled].append(term)
    kept: dict[Term, tuple[list[Tensor], list[Tensor], int]] = {}
    for version, (lr, terms) in enumerate(updates):
        weights = [shard.weights for shard in shards]
        for term in wanted.pop(version, ()):
            kept[term] = _recomputed(compute(term.worker), term.clock, shards, weights)
        if late := [term for term in terms if term not in kept]:
            raise ValueError(
                f"update {version + 1} applies a gradient computed with later weights "
                f"(version {late[0].pulled})"
            )
        _apply(plan, shards, [kept.pop(term) for term in terms], lr)
    return len(updates)


def log_of(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows as a list. Raise ValueError unless their versions are 1, 2, 3, ..."""
    found = list(rows)
    for number, row in enumerate(found, 1):
        if row["version"] != number:
            raise ValueError(
                f"row {number} of the log must have version {number}, got {row['version']}"
            )
    return found


def _recomputed(
    compute: Compute, clock: int, shards: Sequence[Shard], weights: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], int]:
    """(gradient for each shard, the weights at which it was computed, count)."""
    views = {r.name: s.layout.view(w, r) for s, w in zip(shards, weights) for r in s.layout.records}
    with torch.enable_grad():
        found = compute(clock, views)
    gradients = [torch.zeros_like(shard.master) for shard in shards]
    for shard, flat in zip(shards, gradients):
        for record in shard.layout.records:
            shard.layout.view(flat, record).copy_(found.tensors[record.name])
    return gradients, weights, found.count


def _apply(plan: ServerPlan, shards: Sequence[Shard], given: list[Any], lr: float) -> None:
    """Apply one update, as `Server` does."""
    for gradients, old, count in given if plan.compensation else ():
        for shard, g, w in zip(shards, gradients, old):
            shard.compensate(g, count, w, plan.compensation)
    totals = [shard.sum([g[k] for g, _, _ in given]) for k, shard in enumerate(shards)]
    squares = [shard.squares(total) for shard, total in zip(shards, totals)]
    _, scale = norm_and_scale(squares, sum(count for _, _, count in given), plan.clip)
    for shard, total in zip(shards, totals):
        shard.update(total, lr, scale)
