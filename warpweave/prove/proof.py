"""The proof of one layout: train under it, and compare with the plain model after every step."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.dtypes import DTYPES
from warpweave.engine import Engine
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.parallel.shard import ParamRecord
from warpweave.prove.comparison import Comparison, Errors, worst_rank
from warpweave.prove.expected import ADAMW, CLIP, KEY, RATES, STEPS, batch, prompt
from warpweave.prove.layouts import Layout


def prove_layout(layout: Layout, mesh: ConnectedMesh, timeout: float = 60.0) -> Errors:
    """Train under `layout` and measure its errors; collective, the same result on every rank.

    The result is the worst of all ranks'; `where` names the rank that has the largest error.
    """
    sizes = layout.sizes
    engine = Engine(
        layout.model,
        mesh,
        microbatches=layout.microbatches,
        micro_batch_size=layout.micro_batch_size,
        zero=layout.zero,
        schedule=layout.schedule,
        chunks=layout.chunks,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        strategy=layout.strategy,
        layout=layout.layout,
        dtype=DTYPES[layout.dtype],
        seed=sizes.seed,
        clip=CLIP,
        impl=layout.impl,
        timeout=timeout,
        **ADAMW,
    )
    found = Comparison(layout)
    shape = (layout.mesh.dp, layout.microbatches, layout.micro_batch_size)
    owners = dict.fromkeys(found.expected.names, 0)  # ranks that say a tensor is theirs to write

    def mine(step: int) -> list[Tensor]:
        """This replica's part of a batch, by micro-batches."""
        return [x.unflatten(0, shape)[mesh.index("dp")] for x in batch(sizes, step)]

    def read(kind: str, state: str, what: str, scale: float = 1.0) -> None:
        for record, tensor, owned in engine.read(state):
            owners[record.name] += owned
            found.tensor(kind, what.format(record.name), tensor / scale)

    scaler = engine.optimizer.loss_scale
    if scaler is not None:
        scaler.value.fill_(256.0)  # a step that overflowed would be skipped
    for step in range(STEPS):
        tokens, labels, ids = mine(step)
        scale = 1.0 if scaler is None else float(scaler.value)  # its gradients keep it
        result = engine.step(tokens, labels, ids, lr=RATES[step], key=KEY + step)
        found.tensor("loss", f"loss of step {step}", result.loss)
        found.tensor("norm", f"norm of step {step}", result.norm)
        read("grad", "grad", f"gradient of {{}} at step {step}", scale)
        tokens, labels, _ = mine(STEPS + step)
        loss = engine.evaluate(tokens, labels)
        found.tensor("evaluation", f"evaluation after step {step}", loss)
        new = 1 + step // 2  # the last text goes on from its own token
        start = prompt(sizes, step)
        found.text(engine.generate(start, new, temperature=0.0), start, step, new)
    after = f"{{}} after step {STEPS - 1}"
    read("weight", "param", after)
    read("moment", "exp_avg", "exp_avg of {}")
    read("moment", "exp_avg_sq", "exp_avg_sq of {}")
    for unit in engine.units:  # what this very rank computes with, padding included
        unit.parameters.unshard()
        unit.parameters.wait()
        for record, param in unit.params:

            def own(full: Tensor, record: ParamRecord = record) -> Tensor:
                return record.slice(full, mesh.coords)

            found.tensor("weight", after.format(record.name), param.detach(), own)
        unit.parameters.reshard()
    counts = torch.tensor(list(owners.values()))
    if mesh.group("world") is not None:
        dist.all_reduce(counts)
    for name, count in zip(owners, counts.tolist(), strict=True):
        if count != STEPS + 3:  # lost in a checkpoint, or written twice
            found.add("weight", f"{name} read {count} times, not {STEPS + 3},", float("inf"))
    kinds = (field.name for field in dataclasses.fields(Errors) if field.name != "where")
    errors = {kind: found.errors.get(kind, float("inf")) for kind in kinds}  # inf: never compared
    return worst_rank(Errors(**errors, where=found.where), mesh)
